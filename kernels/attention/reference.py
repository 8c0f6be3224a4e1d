"""The plain unrolled surrogate: dense scores, no custom derivative, any dtype. The oracle of every test.

Source: arXiv 2605.08123 (stopped base, differentiable tail). Automatic differentiation of this function *is* the
definition of the gradient; the other tiers compute the same gradient without storing a matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.attention.pairs import Pairs, spread

whole = True  # this tier runs the whole operation, derivative included, through `attention`


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return None


def attention(schedule, problem) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Output (P, n, e) and, with a dustbin, the mass that rows (P, n) and columns (P, m) send to it."""
    scores, support = _with_border(*dense_scores(problem.pairs), problem.border)
    u, v = potentials(schedule, scores, support, problem.log_a, problem.log_b)
    plan = _exp(scores + u[:, :, None] + v[:, None, :], support)
    return _outputs(plan, problem)


def dense_scores(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Scores (P, n, m), finite everywhere, and their support (P, n, m) bool."""
    count, acc = pairs.problems, pairs.scale.dtype
    x, y = (spread(side, count).astype(acc) for side in (pairs.x, pairs.y))
    scores = jnp.einsum("pnd,pmd->pnm", x, y, precision=lax.Precision.HIGHEST) * pairs.scale[:, None, None]
    if pairs.bias is not None:
        scores = scores + spread(pairs.bias, count).astype(acc)
    return scores, _support(pairs)


def _support(pairs: Pairs) -> jax.Array:
    n, m = pairs.rows, pairs.columns
    support = jnp.ones((pairs.problems, n, m), bool)
    if pairs.window is not None:
        support &= abs(jnp.arange(n)[:, None] - jnp.arange(m)[None, :]) <= pairs.window
    if pairs.x_ids is not None and pairs.y_ids is not None:
        support &= pairs.x_ids[:, :, None] == pairs.y_ids[:, None, :]
    if pairs.mask is not None:
        support &= spread(pairs.mask, pairs.problems)
    return support


def _with_border(scores, support, border):
    if border is None:
        return scores, support
    scores = jnp.concatenate([scores, border.right[:, :, None]], 2)
    below = jnp.concatenate([border.below, border.corner[:, None]], 1)
    scores = jnp.concatenate([scores, below[:, None, :]], 1)
    outside = jnp.isfinite(scores).at[:, :-1, :-1].set(support)
    return jnp.where(outside, scores, 0), outside


def prepare(pairs: Pairs) -> Pairs:
    """Nothing to lay out."""
    return pairs


def lse(pairs: Pairs, w: jax.Array) -> jax.Array:
    """log Σ_j exp(S_ij + w_j), (P, n); −inf in rows without support."""
    scores, support = dense_scores(pairs)
    return jax.nn.logsumexp(jnp.where(support, scores + w[:, None, :], -jnp.inf), axis=2)


def potentials(schedule, scores, support, log_a, log_b) -> tuple[jax.Array, jax.Array]:
    """Run the stopped base and the tail; row and column potentials after the last half-step."""
    state = jnp.zeros_like(log_a), jnp.zeros_like(log_b)
    for side in schedule.base_sides:
        state = _half_step(side, scores, support, log_a, log_b, state)
    state = lax.stop_gradient(_centred(schedule, state))
    for side in schedule.tail_sides:
        state = _half_step(side, scores, support, log_a, log_b, state)
    return state


def _half_step(side, scores, support, log_a, log_b, state):
    u, v = state
    if side == "rows":
        return _update(log_a, scores + v[:, None, :], support, 2), v
    return u, _update(log_b, scores + u[:, :, None], support, 1)


def _update(log_target, scores, support, axis):
    active = support.any(axis, keepdims=True)
    safe = jnp.where(support, scores, -jnp.inf)
    lse = jax.nn.logsumexp(jnp.where(active, safe, 0), axis=axis)
    return jnp.where(active.squeeze(axis), log_target - lse, 0)


def _centred(schedule, state):
    if not schedule.base_sides:
        return state
    u, v = state
    if schedule.tail_sides[0] == "rows":
        return u, v - v.mean(1, keepdims=True)
    return u - u.mean(1, keepdims=True), v


def _exp(log_plan, support):
    return jnp.where(support, jnp.exp(jnp.where(support, log_plan, 0)), 0)


def _outputs(plan, problem):
    values = spread(problem.values, plan.shape[0]).astype(plan.dtype)
    border = problem.border
    if border is None:
        return jnp.einsum("pnm,pme->pne", plan, values, precision=lax.Precision.HIGHEST), None
    inner = jnp.einsum("pnm,pme->pne", plan[:, :-1, :-1], values, precision=lax.Precision.HIGHEST)
    out = inner + plan[:, :-1, -1:] * border.value[:, None, :]
    return out, (plan[:, :-1, -1], plan[:, -1, :-1])
