"""Derivative of the fixed point f = softmin(g), g = softmin(f), whatever loop found it: the implicit function theorem.

With R and K the plan over its row sums and, transposed, over its column sums, the adjoints of the half steps solve
λ = f̄ − δ_b Kᵀμ and μ = ḡ − δ_a Rᵀλ, where δ = ρ/(ρ + ε) damps a side that may miss its marginal, and is 1 for others.
For μ = c ν, c the column sums, this is (diag c − δ_a δ_b Pᵀ diag(1/r) P) ν = ḡ − δ_a Rᵀ f̄: symmetric and positive, for
binding marginals on what is orthogonal to constants. Conjugate gradients with two streamed products a step; memory does
not grow with the iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .jax_duals import Updates
from .jax_loop import State
from .jax_streams import Wants
from .jax_unrolled import Gradients, Walk

# Relative residual of the linear system, by default; the most steps, and how many of them may bring no progress.
RESIDUAL = {"float64": 1e-10, "float32": 1e-6}
MOST_STEPS = 2000
PATIENCE = 60


def implicit(
    updates: Updates, wants: Wants, state: State, residual: float, by_f: jax.Array, by_g: jax.Array
) -> Gradients:
    """Carry the gradient by the potentials on to all that updates are made of; with binding marginals f and g alone as
    if ⟨a, f⟩ − ⟨b, g⟩ were held, for only f_i + g_j is determined."""
    a, b = updates.a, updates.b
    softmins = updates.rows(state.g, state.f), updates.columns(state.f, state.g)
    loose_f, loose_g = jnp.where(a > 0, 0, by_f), jnp.where(b > 0, 0, by_g)
    from_g, from_f = lax.cond(
        (loose_f != 0).any() | (loose_g != 0).any(),
        lambda: _of_massless(updates, state, softmins, loose_f, loose_g),
        lambda: (jnp.zeros_like(by_f), jnp.zeros_like(by_g)),
    )
    by_f, by_g = jnp.where(a > 0, by_f + from_g, 0), jnp.where(b > 0, by_g + from_f, 0)
    system = _System.of(updates, state)
    surplus = system.balanced[:, 0] * (by_f.sum(-1) - by_g.sum(-1)) / (a.sum(-1) + b.sum(-1))
    by_f, by_g = by_f - surplus[:, None] * a, by_g + surplus[:, None] * b
    right = system.over_root * (by_g - system.damping[0] * system.back(system.over_rows * by_f))
    nu = system.over_root * conjugate_gradients(system, right, residual or RESIDUAL[str(right.dtype)])
    mu, lam = system.columns * nu, by_f - system.damping[1] * system.through(nu)
    walk = Walk(updates, wants)
    total, _ = walk.row_update(Gradients.none(updates), state.g, softmins[0], lam + loose_f)
    return walk.column_update(total, state.f, softmins[1], mu + loose_g)[0]


def _of_massless(updates: Updates, state: State, softmins: Any, by_f: jax.Array, by_g: jax.Array) -> tuple:
    """What the potentials without mass, which only follow the others, hand on: gradients by g from f, by f from g."""
    walk, none = Walk(updates, Wants(None, None)), Gradients.none(updates)
    by_state_f = walk.column_update(none, state.f, softmins[1], by_g)[1]
    return by_state_f, walk.row_update(none, state.g, softmins[0], by_f)[1]


class _System(NamedTuple):
    """y ↦ y − δ_a δ_b c^(−1/2) Pᵀ r⁻¹ P c^(−1/2) y, which annihilates c^(1/2) where both marginals are binding."""

    through: Callable[[jax.Array], jax.Array]  # P v
    back: Callable[[jax.Array], jax.Array]  # Pᵀ u
    columns: jax.Array
    over_rows: jax.Array
    over_root: jax.Array
    damping: tuple[jax.Array, jax.Array]  # δ_a and δ_b, (B, 1)
    balanced: jax.Array  # (B, 1): 1 where both are 1

    @classmethod
    def of(cls, updates: Updates, state: State) -> _System:
        s, t = updates.h_rows(state.f), updates.h_columns(state.g)
        reduce, pairs, transposed = updates.kernel.reduce, updates.pairs, updates.columns_first
        through = lambda v: reduce(pairs, s, t, v[:, :, None])[:, :, 0]  # noqa: E731
        back = lambda u: reduce(transposed, t, s, u[:, :, None])[:, :, 0]  # noqa: E731
        rows, columns = through(jnp.ones_like(t)), back(jnp.ones_like(s))
        penalty, epsilon = updates.duals.penalty, updates.epsilon
        damping = (jnp.ones_like(epsilon)[:, None],) * 2
        if penalty is not None:
            damping = penalty.rows.damping(epsilon), penalty.columns.damping(epsilon)
        balanced = ((damping[0] == 1) & (damping[1] == 1)).astype(s.dtype)
        return cls(through, back, columns, _inverse(rows), _inverse(jnp.sqrt(columns)), damping, balanced)

    def __call__(self, y: jax.Array) -> jax.Array:
        damping = self.damping[0] * self.damping[1]
        return y - damping * self.over_root * self.back(self.over_rows * self.through(self.over_root * y))

    def project(self, y: jax.Array) -> jax.Array:
        """Leave out what the system annihilates."""
        null = jnp.sqrt(self.columns)
        return y - self.balanced * _dot(null, y) / _dot(null, null) * null


class _Step(NamedTuple):
    y: jax.Array
    residual: jax.Array
    direction: jax.Array
    size: jax.Array  # (B, 1): squared residual
    best: jax.Array
    stale: jax.Array  # steps since the best went down
    steps: jax.Array


def conjugate_gradients(system: _System, right: jax.Array, tolerance: float) -> jax.Array:
    """Solve system(y) = right, each problem of the batch to its own end."""
    right = system.project(right)
    size = _dot(right, right)
    enough = size * tolerance**2

    def goes_on(step: _Step) -> jax.Array:
        return ((step.size > enough) & (step.stale < PATIENCE)).any() & (step.steps < MOST_STEPS)

    def forward(step: _Step) -> _Step:
        image = system.project(system(step.direction))
        length = jnp.where(step.size > enough, _ratio(step.size, _dot(step.direction, image)), 0)
        y, residual = step.y + length * step.direction, step.residual - length * image
        size = _dot(residual, residual)
        direction = system.project(residual + _ratio(size, step.size) * step.direction)
        better = size < step.best
        stale = jnp.where(better, 0, step.stale + 1)
        return _Step(y, residual, direction, size, jnp.minimum(size, step.best), stale, step.steps + 1)

    start = _Step(jnp.zeros_like(right), right, right, size, size, jnp.zeros(size.shape, jnp.int32), jnp.int32(0))
    return lax.while_loop(goes_on, forward, start).y


def _inverse(sums: jax.Array) -> jax.Array:
    return _ratio(jnp.ones_like(sums), sums)


def _ratio(over: jax.Array, under: jax.Array) -> jax.Array:
    return jnp.where(under > 0, over / jnp.where(under > 0, under, 1), 0)


def _dot(first: jax.Array, second: jax.Array) -> jax.Array:
    return (first * second).sum(-1, keepdims=True)
