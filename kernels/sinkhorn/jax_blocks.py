"""Pure JAX in strips of rows: the default on a CPU, and the fallback everywhere.

A strip is a few rows against all columns, so memory is linear in the points. Products use direct differences where
points have few coordinates, which cannot cancel, and expanded squares otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .jax_pairs import Pairs, log_sum_exp, product

#: Pairs held at once, over all problems; a strip gets as many rows as fit.
STRIP_PAIRS = {"cpu": 1 << 18, "other": 1 << 25}
FEW_COORDINATES = 8


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return None


def hold(pairs: Pairs) -> Pairs:
    """Nothing to prepare."""
    return pairs


def lse(pairs: Pairs, h: jax.Array, guess: jax.Array | None = None) -> jax.Array:
    """log Σ_j exp(h_j − C_ij/ε), (B, n), for h of shape (B, m); −inf leaves a column out.

    guess: (B, n), what the result may be near, or None; this kernel needs no guess.
    """
    if pairs.matrix is not None:  # XLA folds all of it into the reduction
        return log_sum_exp(h[:, None, :] - pairs.matrix / pairs.epsilon[:, None, None])
    return _over_strips(pairs, lambda strip: log_sum_exp(h[:, None, :] - strip.scaled()))


def reduce(
    pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array, power: int = 0, left: jax.Array | None = None,
    right: jax.Array | None = None,
) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) values_j, (B, n, k).

    s: (B, n); t: (B, m); values: (B or 1, m, k); power: 0, 1 or 2; left: (B, n, r) and right: (B, m, r), or None.
    """

    def rows(strip: _Strip) -> jax.Array:
        scaled = strip.scaled()
        plan = jnp.exp(strip.part(s)[:, :, None] + t[:, None, :] - scaled)
        if power:
            costs = jnp.where(plan == 0, 0, scaled) * pairs.epsilon[:, None, None]
            plan = plan * costs**power
        if left is not None:
            plan = plan * product(strip.part(left), jnp.swapaxes(right, -1, -2))
        return product(plan, values)

    return _over_strips(pairs, rows)


class _Strip:
    """Rows first … first + height against all columns."""

    def __init__(self, pairs: Pairs, first: jax.Array | int, height: int):
        self.pairs, self.first, self.height = pairs, first, height

    def part(self, array: jax.Array) -> jax.Array:
        if self.height == array.shape[1]:
            return array
        return lax.dynamic_slice_in_dim(array, self.first, self.height, 1)

    def scaled(self) -> jax.Array:
        """C/ε of the strip, (B, height, m)."""
        return self._cost() / self.pairs.epsilon[:, None, None]

    def _cost(self) -> jax.Array:
        if self.pairs.matrix is not None:
            return self.part(self.pairs.matrix)
        x, y = self.part(self.pairs.x), self.pairs.y
        if x.shape[-1] <= FEW_COORDINATES:
            terms = ((x[:, :, None, k] - y[:, None, :, k]) ** 2 for k in range(x.shape[-1]))
            return sum(terms, start=jnp.zeros((), x.dtype))
        squares = (x**2).sum(-1)[:, :, None] + (y**2).sum(-1)[:, None, :]
        return jnp.maximum(squares - 2 * product(x, jnp.swapaxes(y, -1, -2)), 0)


def _over_strips(pairs: Pairs, rows: Callable[[_Strip], jax.Array]) -> jax.Array:
    """Stack rows(strip) of every strip along axis 1. The last strip slides back inside instead of being padded."""
    n = pairs.rows
    room = STRIP_PAIRS["cpu" if jax.default_backend() == "cpu" else "other"]
    height = min(n, max(8, room // max(1, pairs.problems * pairs.columns)))
    count = -(-n // height)
    if count == 1:
        return rows(_Strip(pairs, 0, n))
    parts = lax.map(lambda i: rows(_Strip(pairs, jnp.minimum(i * height, n - height), height)), jnp.arange(count))
    whole, last = jnp.moveaxis(parts[:-1], 0, 1), parts[-1]
    whole = whole.reshape(whole.shape[0], -1, *whole.shape[3:])
    return jnp.concatenate([whole, last[:, height - (n - whole.shape[1]) :]], 1)
