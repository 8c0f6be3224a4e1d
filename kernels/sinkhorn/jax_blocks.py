"""Pure JAX in strips of rows: the default on a CPU, and the fallback everywhere.

A strip is a few rows against all columns, so memory is linear in the points. Products use direct differences where
points have few coordinates, which cannot cancel, and expanded squares otherwise. Metrics other than squared distances
take direct differences always, eight coordinates at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .jax_pairs import Pairs, log_sum_exp, product, root

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
        return log_sum_exp(h[:, None, :] - pairs.costs / pairs.epsilon[:, None, None])
    return _over_strips(pairs, lambda strip: log_sum_exp(h[:, None, :] - strip.scaled()))


def reduce(
    pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array, power: int = 0, left: jax.Array | None = None,
    right: jax.Array | None = None,
) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) values_j, (B, n, k).

    s: (B, n); t: (B, m); values: (B or 1, m, k); power: 0, 1 or 2; left: (B, n, r) and right: (B, m, r), or None.
    """

    return _over_strips(pairs, lambda strip: product(strip.weights(s, t, power, left, right), values))


def pull(pairs: Pairs, s: jax.Array, t: jax.Array, left: jax.Array, right: jax.Array, power: int = 0) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) ∂C_ij/∂x_i, (B, n, d), of "euclidean" and "l1"."""
    return _over_strips(pairs, lambda strip: strip.pulled(strip.weights(s, t, power, left, right)))


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

    def weights(
        self, s: jax.Array, t: jax.Array, power: int, left: jax.Array | None, right: jax.Array | None
    ) -> jax.Array:
        """exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) of the strip, (B, height, m)."""
        scaled = self.scaled()
        plan = jnp.exp(self.part(s)[:, :, None] + t[:, None, :] - scaled)
        if power:
            costs = jnp.where(plan == 0, 0, scaled) * self.pairs.epsilon[:, None, None]
            plan = plan * costs**power
        if left is not None:
            plan = plan * product(self.part(left), jnp.swapaxes(right, -1, -2))
        return plan

    def pulled(self, weights: jax.Array) -> jax.Array:
        """Σ_j W_ij ∂C_ij/∂x_i, (B, height, d)."""
        slope = jnp.sign
        if self.pairs.metric == "euclidean":
            lengths = self._cost()
            weights, slope = jnp.where(lengths > 0, weights / jnp.where(lengths > 0, lengths, 1), 0), _itself
        x, y = (_by_eights(points) for points in (self.part(self.pairs.x), self.pairs.y))
        eights = lax.map(lambda eight: jnp.stack([(slope(d) * weights).sum(-1) for d in _differences(*eight)]), (x, y))
        flat = eights.reshape(-1, *eights.shape[2:])[: self.pairs.x.shape[-1]]
        return jnp.moveaxis(flat, 0, -1)

    def _cost(self) -> jax.Array:
        if self.pairs.matrix is not None:
            return self.part(self.pairs.costs)
        x, y, metric = self.part(self.pairs.x), self.pairs.y, self.pairs.metric
        if metric != "sqeuclidean" or x.shape[-1] <= FEW_COORDINATES:
            total = _summed(x, y, abs if metric == "l1" else jnp.square)
            return root(total) if metric == "euclidean" else total
        squares = (x**2).sum(-1)[:, :, None] + (y**2).sum(-1)[:, None, :]
        return jnp.maximum(squares - 2 * product(x, jnp.swapaxes(y, -1, -2)), 0)


def _summed(x: jax.Array, y: jax.Array, term: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Σ_k term(x_ik − y_jk), (B, height, m)."""
    start = jnp.zeros((*x.shape[:2], y.shape[1]), x.dtype)
    if x.shape[-1] <= FEW_COORDINATES:
        points = (jnp.moveaxis(part, -1, 0) for part in (x, y))
        return sum((term(d) for d in _differences(*points)), start=start)
    add = lambda total, eight: (sum((term(d) for d in _differences(*eight)), start=total), None)  # noqa: E731
    return lax.scan(add, start, (_by_eights(x), _by_eights(y)))[0]


def _differences(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """x_ik − y_jk of every coordinate, (B, height, m) each, for x (k, B, height) and y (k, B, m)."""
    return [x[k][:, :, None] - y[k][:, None, :] for k in range(x.shape[0])]


def _by_eights(points: jax.Array) -> jax.Array:
    """Coordinates in front, eight of them together, (d/8, 8, B, n); what is missing to eight is zero."""
    size = min(FEW_COORDINATES, max(1, points.shape[-1]))
    padded = jnp.pad(points, [(0, 0), (0, 0), (0, -points.shape[-1] % size)])
    return jnp.moveaxis(padded, -1, 0).reshape(-1, size, *points.shape[:2])


def _itself(differences: jax.Array) -> jax.Array:
    return differences


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
