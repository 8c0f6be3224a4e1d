"""Over-relaxation of JAX problems: the rule of `acceleration`, which explains it, on the device.

A problem decides only where its error is looked at. The constants are those of `acceleration`, which needs torch; a
test compares them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .pacing import (
    ENOUGH_FACTOR,
    FIRST_FACTOR,
    GROWTH,
    LARGEST_EXPONENT,
    LEAST_FACTOR,
    LONGEST_CYCLE,
    WIDEST_GAP,
)


class Pace(NamedTuple):
    """What a problem remembers from one look to the next, (B,) each."""

    gap: jax.Array  # √(1 − λ); 1 relaxes nothing
    previous: jax.Array  # the one before the last look
    cycle: jax.Array  # iterations from look to look
    last: jax.Array  # the iteration of the last look
    error: jax.Array  # the error there; infinite before the first look


def start(floor: jax.Array, check_every: int) -> Pace:
    """Before the first iteration, which is the first look. ``floor`` (B,) is the least gap that each may have."""
    gap = jnp.maximum(floor, math.tanh(math.acosh(FIRST_FACTOR) / (2 * check_every)))
    cycle = jnp.full(floor.shape, check_every, jnp.int32)
    return Pace(gap, gap, cycle, 1 - cycle, jnp.full_like(floor, jnp.inf))


def learn(pace: Pace, error: jax.Array, iteration: jax.Array, check_every: int, floor: jax.Array) -> Pace:
    """The pace after a look that found this error; a constant to derivatives."""
    error = lax.stop_gradient(error)
    z = jnp.where(error < pace.error, error / pace.error, 1) * _factor(pace.gap, 2 * pace.cycle)
    slower = jnp.sinh(jnp.arccosh(jnp.maximum(z, 1)) / (2 * pace.cycle)) ** 2
    square = pace.gap**2 - (1 - pace.gap**2) * slower  # 1 − λ', without a difference of numbers near 1
    gap = jnp.where(z > 1, jnp.sqrt(jnp.maximum(square, 0)), jnp.minimum(GROWTH * pace.gap, WIDEST_GAP))
    cycle = _next_cycle(pace.cycle, gap, iteration, check_every)
    anew = _gap(FIRST_FACTOR, cycle, gap.dtype)
    stalled = (error >= pace.error) & (pace.gap < anew)
    gap = jnp.maximum(jnp.where(stalled, anew, gap), jnp.maximum(_gap(LEAST_FACTOR, cycle, gap.dtype), floor))
    first = pace.error == jnp.inf
    gap, cycle = jnp.where(first, pace.gap, gap), jnp.where(first, pace.cycle, cycle)
    return Pace(gap, pace.gap, cycle, jnp.broadcast_to(iteration, cycle.shape), error)


def _next_cycle(cycle: jax.Array, gap: jax.Array, iteration: jax.Array, check_every: int) -> jax.Array:
    longest = jnp.minimum(max(check_every, LONGEST_CYCLE), iteration // 2)
    longer = (gap < _gap(LEAST_FACTOR, cycle, gap.dtype)) & (2 * cycle <= longest)
    shorter = (cycle > check_every) & (_factor(gap, cycle) > ENOUGH_FACTOR)
    return jnp.where(longer, 2 * cycle, jnp.where(shorter, cycle // 2, cycle))


def _factor(gap: jax.Array, half_steps: jax.Array) -> jax.Array:
    """T_h(1/√λ), what h half steps divide errors by."""
    return jnp.cosh(jnp.minimum(half_steps * jnp.arctanh(gap), LARGEST_EXPONENT))


def _gap(factor: float, cycle: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The gap at which a cycle divides errors by this factor."""
    return jnp.tanh(math.acosh(factor) / (2 * cycle.astype(dtype)))


def omega(gap: jax.Array, previous: jax.Array, half_step: jax.Array) -> jax.Array:
    """Chebyshev's factor of the h-th half step after a look, whose row update is h = 0; h = 1 has the previous gap."""
    gap = jnp.where(half_step > 1, gap, previous)
    q = (1 - gap) / (1 + gap)
    return jnp.where(half_step > 0, (1 + q) * (1 + q**half_step) / (1 + q ** (half_step + 1)), 1)


def factors(pace: Pace, iteration: jax.Array, count: int, looked: jax.Array, translated: bool) -> jax.Array:
    """Factors of the ``count`` iterations that follow, (count, 2, B): of their column updates and of their row updates.

    The rows of a look, after the last of them, are plain. So are the columns before a translation, and the first ones
    of all.
    """
    half_steps = 2 * (iteration - pace.last) + jnp.arange(1, 2 * count + 1)[:, None]
    table = omega(pace.gap, pace.previous, half_steps).reshape(count, 2, -1)
    table = table.at[0, 0].set(jnp.where(iteration == 0, 1, table[0, 0]))
    plain = slice(0 if translated else 1, 2)
    return table.at[-1, plain].set(jnp.where(looked, 1, table[-1, plain]))


def relaxed(old: jax.Array, target: jax.Array, omega: jax.Array, epsilon: jax.Array) -> jax.Array:
    """old + ω (target − old), upwards no further than target + ε log(1 + (target − old)/ε); see the kernels' twin."""
    step = target - old
    there = jnp.isfinite(step)
    step = jnp.where(there, step, 0)
    up = jnp.maximum(step, 0) / epsilon
    bounded = (step > 0) & (jnp.log1p(up) < (omega - 1) * up)
    return target + jnp.where(bounded, epsilon * jnp.log1p(up), (omega - 1) * step)
