"""The operands that every tier of Sinkhorn attention reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "y", "scale", "x_ids", "y_ids", "mask", "bias"],
    meta_fields=["window", "packed"],
)
@dataclass(frozen=True)
class Pairs:
    """Scores S_ij = scale · x_i·y_j + bias_ij of P independent problems, −inf off the support; nothing here is (n, m)
    unless the caller brought a dense mask or bias.

    An array whose leading axis is shorter than P is shared: problem p reads row p // (P / length). So grouped heads
    need no repeated keys.

    x: (P or fewer, n, d) row features; y: (P or fewer, m, d) column features.
    scale: (P,) in the accumulation dtype.
    x_ids, y_ids: (P, n) and (P, m) int32 or None: a pair is on the support only where its ids are equal.
    mask: (P or fewer, n, m) bool or None; bias: (P or fewer, n, m) or None.
    window: pairs with |i − j| > window are off the support; None for no band.
    packed: the ids tell segments apart; else they are 0, or negative for padding, and each side can be read alone.
    """

    x: jax.Array
    y: jax.Array
    scale: jax.Array
    x_ids: jax.Array | None = None
    y_ids: jax.Array | None = None
    mask: jax.Array | None = None
    bias: jax.Array | None = None
    window: int | None = None
    packed: bool = True

    @property
    def problems(self) -> int:
        """P."""
        return self.scale.shape[0]

    @property
    def rows(self) -> int:
        """n."""
        return self.x.shape[1]

    @property
    def columns(self) -> int:
        """m."""
        return self.y.shape[1]

    @property
    def T(self) -> Pairs:  # noqa: N802
        """The same problems with rows and columns exchanged."""
        swapped = replace(self, x=self.y, y=self.x, x_ids=self.y_ids, y_ids=self.x_ids)
        return replace(swapped, mask=_swap(self.mask), bias=_swap(self.bias))


def _swap(dense: jax.Array | None) -> jax.Array | None:
    return None if dense is None else jnp.swapaxes(dense, -1, -2)


def spread(array: jax.Array, problems: int) -> jax.Array:
    """Repeat a shared array so that its leading axis counts every problem."""
    repeats = problems // max(array.shape[0], 1)
    return array if repeats == 1 else jnp.repeat(array, repeats, axis=0)


def gather(array: jax.Array, shared: int) -> jax.Array:
    """The transpose of `spread`: sum the problems that shared one row."""
    if array.shape[0] == shared:
        return array
    return array.reshape(shared, -1, *array.shape[1:]).sum(1)


def potential(log_target: jax.Array, sums: jax.Array, extra: jax.Array | None = None) -> jax.Array:
    """log_target − log(e^sums + e^extra); 0 where both are empty. All (P, n), extra or None."""
    sums = sums if extra is None else jnp.logaddexp(sums, extra)
    return jnp.where(sums == -jnp.inf, 0, log_target - sums)


def matched(tile: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 tile of the plan or of its gradient and what it multiplies, in one dtype: that of `other`, but float32
    instead of float16, below whose range the entries of a long row lie."""
    kind = tile.dtype if other.dtype == jnp.float16 else other.dtype
    return tile.astype(kind), other.astype(kind)
