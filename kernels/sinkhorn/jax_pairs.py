"""The operands that every JAX kernel of the operation "sinkhorn" reads, and what needs no loop over pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

#: |x − y|²; |x − y|, without gradient where points meet; Σ_k |x_k − y_k|, without gradient where coordinates meet.
METRICS = ("sqeuclidean", "euclidean", "l1")


class Pairs(NamedTuple):
    """A batch of B problems: costs C (B, n, m), never formed for points, each over its own ε.

    x: (B or 1, n, d) and y: (B or 1, m, d), points around a common centre, with a metric of `METRICS`; or None.
    matrix: (B or 1, n, m), +inf for a forbidden pair, or (B or 1, m, n) where ``turned``; or None. A leading axis of 1
    is shared by the problems.
    epsilon: (B,). All are in the dtype of the potentials: float64, else float32.
    held: what a kernel's `hold` made of these once for a whole loop, for them and for their transpose; or None.
    turned: the matrix lies in memory with its columns first, so that a transpose moves nothing.
    narrow: the name of a dtype of 16 bits that holds every entry of the matrix exactly, or None.
    """

    x: Any
    y: Any
    matrix: Any
    epsilon: Any
    held: Any = None
    metric: str = "sqeuclidean"
    turned: bool = False
    narrow: str | None = None

    @property
    def T(self) -> Pairs:  # noqa: N802 - the field's name for a transpose
        """The same problems with rows and columns exchanged."""
        held = None if self.held is None else self.held[::-1]
        turned = self.matrix is not None and not self.turned
        return self._replace(x=self.y, y=self.x, held=held, turned=turned)

    @property
    def costs(self) -> jax.Array:
        """The matrix as (B or 1, n, m), however it lies."""
        return self.laid(self.matrix)

    def laid(self, array: jax.Array) -> jax.Array:
        """Turn (B, n, m) to how the matrix lies, or what lies like it to (B, n, m)."""
        return jnp.swapaxes(array, -1, -2) if self.turned else array

    @property
    def problems(self) -> int:
        """B."""
        return int(self.epsilon.shape[0])

    @property
    def rows(self) -> int:
        """n."""
        return int(self.x.shape[1] if self.matrix is None else self.matrix.shape[1 + self.turned])

    @property
    def columns(self) -> int:
        """m."""
        return int(self.y.shape[1] if self.matrix is None else self.matrix.shape[2 - self.turned])


# Registered, for a tuple's own flattening takes what is no array for one.
jax.tree_util.register_pytree_node(
    Pairs, lambda pairs: (tuple(pairs[:5]), tuple(pairs[5:])), lambda known, parts: Pairs(*parts, *known)
)


def no_tile(request: Any, largest_width: int) -> str | None:
    """Why a Pallas kernel that holds so many coordinates at once cannot serve `request`, or None."""
    if request.dtype == "float64":
        return "float64 runs in the chunked tier"
    if request.width > largest_width:
        return f"at most {largest_width} coordinates fit a tile, not {request.width}"
    return None


def prepare(x: jax.Array, y: jax.Array | None, epsilon: jax.Array, metric: str = "sqeuclidean") -> Pairs:
    """Put points (or, with y None, a matrix) into the potentials' dtype, points around the midpoint of their means."""
    dtype, narrow = jnp.promote_types(x.dtype, jnp.float32), str(x.dtype) if x.dtype.itemsize == 2 else None
    x = x.astype(dtype)
    if y is None:
        return Pairs(None, None, x, epsilon.astype(dtype), narrow=narrow)
    y = y.astype(dtype)
    centre = lax.stop_gradient((x.mean(1, keepdims=True) + y.mean(1, keepdims=True)) / 2)
    shared = (max(x.shape[0], y.shape[0]),)
    x, y = (jnp.broadcast_to(part - centre, (*shared, *part.shape[1:])) for part in (x, y))
    return Pairs(x, y, None, epsilon.astype(dtype), None, metric)


def root(squares: jax.Array) -> jax.Array:
    """√ of what is not negative, without a derivative at 0."""
    apart = squares > 0
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1)), 0)


def log_sum_exp(exponents: jax.Array, axis: int = -1) -> jax.Array:
    """log Σ exp along an axis; −inf where nothing is finite, without a NaN."""
    top = lax.stop_gradient(exponents.max(axis))
    safe = jnp.where(top == -jnp.inf, 0, top)
    return safe + jnp.log(jnp.exp(exponents - jnp.expand_dims(safe, axis)).sum(axis))


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """left @ right as exactly as the dtype allows."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def opaque(call: Callable[..., Any]) -> Callable[..., Any]:
    """A launch that says plainly that it has no derivative; first derivatives never ask for one."""
    launch = jax.custom_jvp(lambda *arrays: call(*arrays))

    @launch.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "flashot_backends: the Pallas kernels of the Sinkhorn operation have no second derivatives; accepted for "
            "jax.hessian is backend='chunked'"
        )

    return launch
