"""Pure JAX in strips of rows: the default on a CPU, and the fallback everywhere.

A strip is `height` rows against every column its band can reach, so memory is O(L) and a band of width W costs O(L·W).
These functions are never differentiated by the operation: it has the exact adjoint and calls them for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.attention.pairs import Pairs, matched, potential, spread

whole = False
one_pass = True
unroll = 1

#: Scores held at once, over all problems; a strip gets as many rows as fit.
STRIP_SCORES = {"cpu": 1 << 20, "other": 1 << 25}


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return None


def prepare(pairs: Pairs) -> Pairs:
    """Nothing to lay out."""
    return pairs


def lse(pairs: Pairs, w: jax.Array) -> jax.Array:
    """log Σ_j exp(S_ij + w_j), (P, n); −inf in rows without support. w: (P, m)."""
    return _over_strips(pairs, lambda strip: _logsumexp(strip.scores() + strip.columns(w)[:, None, :], -1))


def half_step(pairs: Pairs, w, log_target, extra, guess) -> jax.Array:
    """log_target − LSE_j(S + w), (P, n); extra: (P, n) one more term of each row's sum, or None. No use for a guess."""
    return potential(log_target, lse(pairs, w), extra)


def matvec(pairs: Pairs, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n). u: (P, n), w and z: (P, m)."""
    acc = pairs.scale.dtype
    return _over_strips(pairs, lambda strip: _product("pnm,pm->pn", strip.plan(u, w), strip.columns(z), acc))


def apply(pairs: Pairs, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n, e) in the accumulation dtype. z: (P or fewer, m, e)."""

    def rows(strip):
        plan, values = matched(strip.plan(u, w), spread(strip.columns(z), pairs.problems))
        return _product("pnm,pme->pne", plan, values, pairs.scale.dtype)

    return _over_strips(pairs, rows)


def pull(pairs: Pairs, u, w, left, right, x_terms, y_terms) -> jax.Array:
    """Σ_j P_ij M_ij y_j with M = left rightᵀ − x_terms y_termsᵀ, (P, n, d): the scores' gradient times the columns.

    left: (P or fewer, n, e) and right: (P or fewer, m, e), or None; x_terms: (P, n, h), y_terms: (P, m, h).
    """

    def rows(strip):
        gradient = strip.plan(u, w) * _strip_cotangent(strip, left, right, x_terms, y_terms)
        gradient, features = matched(gradient, spread(strip.columns(pairs.y), pairs.problems))
        return _product("pnm,pmd->pnd", gradient, features, pairs.scale.dtype)

    return _over_strips(pairs, rows)


def score_gradient(pairs: Pairs, u, w, left, right, x_terms, y_terms) -> jax.Array:
    """P ∘ M, (P, n, m): the gradient of a dense bias, which is as large as the bias is."""
    return _over_strips(
        pairs, lambda strip: strip.plan(u, w) * _strip_cotangent(strip, left, right, x_terms, y_terms), full=True
    )


def full_step(pairs: Pairs, w, log_target, extra) -> tuple[jax.Array, jax.Array]:
    """u = log_target − LSE_j(S + w) and then LSE_i(S + u), scores computed once.

    w: (P, m); log_target: (P, n); extra: (P, n) one more term of each row's sum (the dustbin), or None.
    Returns u (P, n) and the columns' log-sum-exp (P, m).
    """
    acc = pairs.scale.dtype
    start = jnp.full(w.shape, -jnp.inf, acc), jnp.zeros(w.shape, acc)

    def visit(carry, strip):
        scores = strip.scores()
        sums = _logsumexp(scores + strip.columns(w)[:, None, :], -1)
        u = potential(strip.rows(log_target), sums, None if extra is None else strip.rows(extra))
        return strip.merge(carry, scores + u[:, :, None]), u

    (top, total), u = _scan_strips(pairs, visit, start)
    return u, top + jnp.log(total)


class _Strip:
    """Rows row0 … row0 + height against columns column0 … column0 + width."""

    def __init__(self, pairs: Pairs, index, height: int, width: int):
        self.pairs, self.height, self.width = pairs, height, width
        # The last strip slides back inside instead of being padded; `fresh` marks the rows not seen before.
        self.row0 = jnp.minimum(index * height, pairs.rows - height)
        self.fresh = self.row0 + jnp.arange(height) >= index * height
        reach = 0 if pairs.window is None else self.row0 - pairs.window
        self.column0 = jnp.clip(reach, 0, pairs.columns - width)

    def rows(self, array):
        return lax.dynamic_slice_in_dim(array, self.row0, self.height, 1)

    def columns(self, array, axis: int = 1):
        if self.width == array.shape[axis]:
            return array
        return lax.dynamic_slice_in_dim(array, self.column0, self.width, axis)

    def scores(self):
        """Scores of the strip, (P, height, width), −inf off the support."""
        pairs, acc = self.pairs, self.pairs.scale.dtype
        x, y = (spread(side, pairs.problems) for side in (self.rows(pairs.x), self.columns(pairs.y)))
        scores = _product("pnd,pmd->pnm", x, y, acc) * pairs.scale[:, None, None]
        if pairs.bias is not None:
            scores = scores + self._dense(pairs.bias).astype(acc)
        for allowed in self._support():
            scores = jnp.where(allowed, scores, -jnp.inf)
        return scores

    def plan(self, u, w):
        return jnp.exp(self.scores() + self.rows(u)[:, :, None] + self.columns(w)[:, None, :])

    def merge(self, carry, scores):
        """Fold a strip of scores into the running maximum and sum of every column."""
        scores = jnp.where(self.fresh[None, :, None], scores, -jnp.inf)
        top, total = (self.columns(part) for part in carry)
        new = jnp.maximum(top, scores.max(1))
        safe = jnp.where(new == -jnp.inf, 0, new)
        total = total * jnp.exp(top - safe) + jnp.exp(scores - safe[:, None, :]).sum(1)
        return tuple(self._put(old, part) for old, part in zip(carry, (new, total), strict=True))

    def _put(self, old, part):
        return part if self.width == old.shape[1] else lax.dynamic_update_slice_in_dim(old, part, self.column0, 1)

    def _dense(self, array):
        return spread(self.columns(self.rows(array), 2), self.pairs.problems)

    def _support(self):
        pairs = self.pairs
        if pairs.window is not None:
            i, j = self.row0 + jnp.arange(self.height), self.column0 + jnp.arange(self.width)
            yield (abs(i[:, None] - j[None, :]) <= pairs.window)[None]
        if pairs.x_ids is not None:
            yield self.rows(pairs.x_ids)[:, :, None] == self.columns(pairs.y_ids)[:, None, :]
        if pairs.mask is not None:
            yield self._dense(pairs.mask)


def _strip_cotangent(strip: _Strip, left, right, x_terms, y_terms):
    count, acc = strip.pairs.problems, strip.pairs.scale.dtype
    terms = _product("pnh,pmh->pnm", strip.rows(x_terms), strip.columns(y_terms), acc)
    if left is None:
        return -terms
    left, right = spread(strip.rows(left), count), spread(strip.columns(right), count)
    return _product("pne,pme->pnm", left, right, acc) - terms


def _product(pattern, left, right, acc):
    return jnp.einsum(pattern, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=acc)


def _logsumexp(scores, axis):
    top = scores.max(axis)
    safe = jnp.where(top == -jnp.inf, 0, top)
    return top + jnp.log(jnp.exp(scores - jnp.expand_dims(safe, axis)).sum(axis))


def _sizes(pairs: Pairs) -> tuple[int, int, int]:
    """Number of strips, rows in each, columns each can reach."""
    n, m = pairs.rows, pairs.columns
    platform = "cpu" if jax.default_backend() == "cpu" else "other"
    reach = m if pairs.window is None else 2 * pairs.window + 1
    height = min(n, max(8, STRIP_SCORES[platform] // (pairs.problems * max(1, min(m, reach)))))
    height = height if pairs.window is None else min(height, max(64, 2 * pairs.window))
    width = m if pairs.window is None else min(m, height + 2 * pairs.window)
    return -(-n // height), height, width


def _over_strips(pairs: Pairs, rows, full: bool = False):
    """Stack rows(strip) of every strip along axis 1. `full`: the strip's columns are laid out among all m."""

    def visit(carry, strip):
        part = rows(strip)
        return carry, _widen(strip, part) if full else part

    return _scan_strips(pairs, visit, None)[1]


def _widen(strip: _Strip, part):
    if strip.width == strip.pairs.columns:
        return part
    empty = jnp.zeros((*part.shape[:2], strip.pairs.columns), part.dtype)
    return lax.dynamic_update_slice_in_dim(empty, part, strip.column0, 2)


def _scan_strips(pairs: Pairs, visit, carry):
    """Visit every strip; the rows of the outputs come back in order, each once."""
    count, height, width = _sizes(pairs)
    if count == 1:
        return visit(carry, _Strip(pairs, 0, height, width))
    carry, parts = lax.scan(lambda c, index: visit(c, _Strip(pairs, index, height, width)), carry, jnp.arange(count))
    whole, last = parts[:-1], parts[-1]
    stacked = jnp.moveaxis(whole, 0, 1).reshape(last.shape[0], -1, *last.shape[2:])
    rest = pairs.rows - stacked.shape[1]
    return carry, jnp.concatenate([stacked, last[:, height - rest :]], 1)
