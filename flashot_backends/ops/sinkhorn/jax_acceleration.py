"""Over-relaxation and annealing of JAX problems: the rules of `acceleration`, which explains them, on the device.

A problem decides only where its error is looked at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from .pacing import (
    ENOUGH_FACTOR,
    FIRST_FACTOR,
    GROWTH,
    LEAST_FACTOR,
    LONGEST_CYCLE,
    STAGE_FACTOR,
    STAGE_ITERATIONS,
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
    divided = jnp.where(error < pace.error, error / pace.error, 1)
    log_z = _log_factor(pace.gap, 2 * pace.cycle) + jnp.log(divided)
    arccosh = log_z + jnp.log1p(jnp.sqrt(jnp.maximum(1 - jnp.exp(-2 * log_z), 0)))
    square = pace.gap**2 - (1 - pace.gap**2) * jnp.sinh(arccosh / (2 * pace.cycle)) ** 2  # 1 − λ'
    gap = jnp.where(log_z > 0, jnp.sqrt(jnp.maximum(square, 0)), jnp.minimum(GROWTH * pace.gap, WIDEST_GAP))
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
    shorter = (cycle > check_every) & (_log_factor(gap, cycle) > math.log(ENOUGH_FACTOR))
    return jnp.where(longer, 2 * cycle, jnp.where(shorter, cycle // 2, cycle))


def _log_factor(gap: jax.Array, half_steps: jax.Array) -> jax.Array:
    """log T_h(1/√λ), of what h half steps divide errors by."""
    exponent = half_steps * jnp.arctanh(gap)
    return exponent + jnp.log(0.5 + 0.5 * jnp.exp(-2 * exponent))


def _gap(factor: float, cycle: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The gap at which a cycle divides errors by this factor."""
    return jnp.tanh(math.acosh(factor) / (2 * cycle.astype(dtype)))


def omega(gap: jax.Array, previous: jax.Array, half_step: jax.Array) -> jax.Array:
    """Chebyshev's factor of the h-th half step after a look, whose row update is h = 0; h = 1 has the previous gap."""
    gap = jnp.where(half_step > 1, gap, previous)
    q = (1 - gap) / (1 + gap)
    return jnp.where(half_step > 0, (1 + q) * (1 + q**half_step) / (1 + q ** (half_step + 1)), 1)


def factors(
    pace: Pace, iteration: jax.Array, count: int, last: jax.Array | int, looked: jax.Array, translated: bool
) -> jax.Array:
    """Factors of the ``count`` iterations that follow, (count, 2, B): of their column updates and of their row updates.

    The rows of a look, after the ``last`` of them (from 0), are plain. So are the columns before a translation, and the
    first ones of all.
    """
    half_steps = 2 * (iteration - pace.last) + jnp.arange(1, 2 * count + 1)[:, None]
    table = omega(pace.gap, pace.previous, half_steps).reshape(count, 2, -1)
    table = table.at[0, 0].set(jnp.where(iteration == 0, 1, table[0, 0]))
    plain = slice(0 if translated else 1, 2)
    return table.at[last, plain].set(jnp.where(looked, 1, table[last, plain]))


def stages(pairs: Pairs, most: int, sizes: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """How often ε may be multiplied by four before it is as large as the costs' deviation, (B,) int32, up to ``most``.

    ``sizes``: rows and columns of each problem, (B,) each, where problems are padded.
    """
    pairs = lax.stop_gradient(pairs)
    ratio = deviation(pairs, sizes) / pairs.epsilon
    reached = ratio >= stage_factors(most, ratio.dtype)[1:, None]
    return jnp.where(jnp.isfinite(ratio), reached.sum(0, dtype=jnp.int32), 0)


def stage_factors(most: int, dtype: jnp.dtype) -> jax.Array:
    """What ε is multiplied by in each stage, and 1 in front, (1 + most,)."""
    return jnp.asarray([STAGE_FACTOR**stage for stage in range(most + 1)], dtype)


def stage_omegas(floor: jax.Array) -> jax.Array:
    """Factors of a stage's iterations, (iterations, 2, B). There is no error to learn from; its last rows are plain."""
    gap = jnp.maximum(floor, math.tanh(math.acosh(LEAST_FACTOR) / (2 * STAGE_ITERATIONS)))
    table = omega(gap, gap, jnp.arange(2 * STAGE_ITERATIONS)[:, None])
    return table.at[-1].set(1).reshape(STAGE_ITERATIONS, 2, -1)


def deviation(pairs: Pairs, sizes: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """How much the costs vary, (B or 1,), about: as far as potentials cannot absorb it."""
    if pairs.matrix is not None:
        return _deviation_of_matrix(pairs.costs, sizes)
    clouds = [_centred(points, sizes and sizes[side]) for side, points in enumerate((pairs.x, pairs.y))]
    if pairs.metric == "l1":
        return sum(abs(points).sum((1, 2)) / count for points, count in clouds)
    squares = sum((points**2).sum((1, 2)) / count for points, count in clouds)
    return squares if pairs.metric == "sqeuclidean" else jnp.sqrt(squares)


def _centred(points: jax.Array, size: jax.Array | None) -> tuple[jax.Array, jax.Array | int]:
    """Points around their mean, zero where padded, and how many there are."""
    if size is None:
        return points - points.mean(1, keepdims=True), points.shape[1]
    there = (jnp.arange(points.shape[1]) < size[:, None])[:, :, None]
    mean = jnp.where(there, points, 0).sum(1, keepdims=True) / size[:, None, None]
    return jnp.where(there, points - mean, 0), size


def _deviation_of_matrix(matrix: jax.Array, sizes: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """The standard deviation of the finite entries."""
    there = jnp.isfinite(matrix)
    if sizes is not None:
        rows, columns = (jnp.arange(matrix.shape[1 + side]) < size[:, None] for side, size in enumerate(sizes))
        there &= rows[:, :, None] & columns[:, None, :]
    mean = matrix.mean((1, 2), keepdims=True, where=there)
    return jnp.sqrt(((matrix - mean) ** 2).mean((1, 2), where=there))


def relaxed(old: jax.Array, target: jax.Array, omega: jax.Array, epsilon: jax.Array) -> jax.Array:
    """old + ω (target − old), upwards no further than target + ε log(1 + (target − old)/ε); see the kernels' twin."""
    step = target - old
    there = jnp.isfinite(step)
    step = jnp.where(there, step, 0)
    up = jnp.maximum(step, 0) / epsilon
    bounded = (step > 0) & (jnp.log1p(up) < (omega - 1) * up)
    return target + jnp.where(bounded, epsilon * jnp.log1p(up), (omega - 1) * step)
