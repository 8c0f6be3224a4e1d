"""Annealing of JAX problems: iterations under larger ε lead to where those under the problem's own begin.

The rule is that of `acceleration`. A stage is one for the whole batch; problems that have fewer stages sit out the
first ones. See `jax_unrolled` for the way back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .jax_acceleration import stage_factors, stage_omegas
from .jax_duals import Duals, Point, Updates, begin, step, written_out
from .pacing import STAGE_ITERATIONS


def anneal(
    updates: Updates, f: jax.Array, stages: jax.Array, most: int, saving: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Row potentials (B, n) after ``stages`` (B,) stages, and those before each stage (most, B, n) if ``saving``."""
    first = stages.max(initial=0)

    def once(i: jax.Array, held: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        (f, before), stage = held, first - i
        before = before if before is None else before.at[stage - 1].set(f)
        found = _stage(stage_updates(updates, stage, most), f)
        return jnp.where((stages >= stage)[:, None], found, f), before

    before = jnp.zeros((most, *f.shape), f.dtype) if saving else None
    return lax.fori_loop(0, first, once, (f, before))


def stage_updates(updates: Updates, stage: jax.Array, most: int) -> Updates:
    """Updates under the ε of a stage."""
    return updates.at(stage_factors(most, updates.epsilon.dtype)[stage])


def _stage(updates: Updates, f: jax.Array) -> jax.Array:
    """The row potentials that a stage ends with."""
    factors = stage_omegas(updates.duals.floor()).astype(f.dtype)

    def iteration(i: jax.Array, point: Point) -> Point:
        return step(updates, point, factors[i], None)

    rounds = min(STAGE_ITERATIONS, written_out())
    point = lax.fori_loop(0, STAGE_ITERATIONS, iteration, begin(updates, f), unroll=rounds)
    return translated(updates.duals, point.f, point.g)


def translated(duals: Duals, f: jax.Array, g: jax.Array) -> jax.Array:
    """f, moved by what is best."""
    if duals.penalty is None:
        return f
    return f + duals.penalty.translation(duals.log_a, duals.log_b, f, g)
