"""The loop on JAX arrays: alternating updates until the column marginal is right."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from . import jax_acceleration as acceleration
from .jax_acceleration import Pace
from .jax_annealing import anneal
from .jax_duals import Point, Updates, begin, step, written_out
from .jax_problem import Control
from .jax_unbalanced import Penalty
from .pacing import STAGE_ITERATIONS


class State(NamedTuple):
    """The outcome by problem: potentials (B, n) and (B, m), iterations, error, whether it is small, and the errors of
    all looks (B, looks), NaN where nothing was looked at."""

    f: jax.Array
    g: jax.Array
    iterations: jax.Array
    error: jax.Array
    converged: jax.Array
    errors: jax.Array


class Saved(NamedTuple):
    """What a derivative needs of the iterations: potentials before every ``stride``-th of them, g only where it is
    relaxed; the factors of all (iterations, 2, B), of columns and of rows; and who was looked at (looks, B). Of
    annealing: the stages of each problem (B,), and f before each stage (stages, B, n)."""

    f: jax.Array
    g: jax.Array
    factors: jax.Array | None
    looked: jax.Array
    stages: jax.Array | None = None
    before_stages: jax.Array | None = None

    def limit(self, control: Control) -> jax.Array | int:
        """How many iterations follow on annealing at most, (B,)."""
        return control.max_iterations - (0 if self.stages is None else STAGE_ITERATIONS * self.stages)


class _Task(NamedTuple):
    """What stays the same in every iteration. ``limit`` (B,): the iterations that annealing left."""

    updates: Updates
    control: Control
    tolerance: jax.Array
    limit: jax.Array | int

    @property
    def translated(self) -> bool:
        return self.updates.duals.penalty is not None


class _Loop(NamedTuple):
    """Where the loop is: after iteration k."""

    k: jax.Array
    point: Point
    pace: Pace | None
    saved: Saved | None
    out: State  # iterations are 0 where a problem goes on


def iterate(
    kernel: Any, control: Control, pairs: Pairs, a: jax.Array, b: jax.Array, f: jax.Array, tolerance: jax.Array,
    penalty: Penalty | None, stages: jax.Array | None = None, saving: bool = False,
) -> tuple[State, Saved | None]:
    """Alternate from the row potentials ``f``: columns, then rows, so that rows are exact at the end.

    A problem that has converged keeps its answer while the others go on. Before all this come so many ``stages`` (B,)
    of annealing, whose iterations count. Returns what a derivative needs too, if ``saving``.
    """
    updates = Updates(kernel, pairs, a, b, penalty)
    f, limit, before_stages = jnp.where(updates.a > 0, f, 0), control.max_iterations, None
    if stages is not None:
        f, before_stages = anneal(updates, f, stages, control.stages, saving)
        limit = limit - STAGE_ITERATIONS * stages
    task = _Task(updates, control, tolerance, limit)
    loop = _repeat(task, _begin(task, f, saving))
    saved = loop.saved and loop.saved._replace(stages=stages, before_stages=before_stages)
    return loop.out._replace(errors=loop.out.errors.T), saved


def _begin(task: _Task, f: jax.Array, saving: bool) -> _Loop:
    control, floor = task.control, task.updates.duals.floor()
    point, batch = begin(task.updates, f), f.shape[:1]
    pace = acceleration.start(floor, control.check_every) if control.relaxes else None
    zero = jnp.zeros(batch, f.dtype)
    errors = jnp.full((control.looks, *batch), jnp.nan, f.dtype)
    out = State(f, point.g, jnp.zeros(batch, jnp.int32), zero, jnp.zeros(batch, bool), errors)
    return _Loop(jnp.int32(0), point, pace, _nothing_saved(control, point) if saving else None, out)


def _nothing_saved(control: Control, point: Point) -> Saved:
    (batch, _), slots, dtype = point.f.shape, -(-control.max_iterations // stride(control)), point.f.dtype
    room = min(control.check_every, control.max_iterations) if control.stages else 0  # blocks that a limit cuts overlap
    count = control.max_iterations + room
    factors = jnp.ones((count, 2, batch), dtype) if control.relaxes else None
    g = jnp.zeros((slots if control.relaxes else 0, *point.g.shape), dtype)
    looked = jnp.zeros((control.looks, batch), bool)
    return Saved(jnp.zeros((slots, *point.f.shape), dtype), g, factors, looked)


def _repeat(task: _Task, loop: _Loop) -> _Loop:
    """Blocks that end after iterations 1, 1 + check_every, …, and the last.

    Their lengths are known, so a device need not be asked within them, nor between them where there is no tolerance.
    """
    control, block = task.control, partial(_block, task)
    loop = block(loop, 1)
    if control.stages:
        return _to_their_limits(task, loop)
    blocks, rest = divmod(control.max_iterations - 1, control.check_every)
    last = 1 + blocks * control.check_every
    if not control.stops:
        loop = lax.fori_loop(0, blocks, lambda _, loop: block(loop, control.check_every), loop) if blocks else loop
        return block(loop, rest) if rest else loop
    if blocks:
        loop = lax.while_loop(
            lambda loop: _goes_on(loop).any() & (loop.k < last), lambda loop: block(loop, control.check_every), loop
        )
    return lax.cond(_goes_on(loop).any(), lambda loop: block(loop, rest), lambda loop: loop, loop) if rest else loop


def _to_their_limits(task: _Task, loop: _Loop) -> _Loop:
    """The same where annealing left each problem a limit of its own, which may cut a block."""
    every = task.control.check_every

    def block(loop: _Loop) -> _Loop:
        left = jnp.where(_goes_on(loop), task.limit - loop.k, every)
        steps = jnp.minimum(left.min(initial=every), every - (loop.k - 1) % every)
        return _block(task, loop, min(every, task.control.max_iterations), steps)

    return lax.while_loop(lambda loop: _goes_on(loop).any(), block, loop)


def _goes_on(loop: _Loop) -> jax.Array:
    return loop.out.iterations == 0


def _block(task: _Task, loop: _Loop, count: int, steps: jax.Array | None = None) -> _Loop:
    """``count`` iterations, or the first ``steps`` of them, and a look after the last at those that are due."""
    updates, control = task.updates, task.control
    looked, factors, last = _goes_on(loop), None, (count if steps is None else steps) - 1
    at = loop.k + last + 1
    if loop.pace is not None:
        looked &= (loop.pace.last + loop.pace.cycle == at) | (at == task.limit)
        factors = acceleration.factors(loop.pace, loop.k, count, last, looked, task.translated)
        factors = factors.astype(loop.point.f.dtype)
    loop = _note(loop, control, factors, looked, at)

    def iteration(i: Any, loop: _Loop, where: jax.Array | None = None) -> _Loop:
        saved = loop.saved and _save(loop.saved, loop.point, loop.k, stride(control))
        point = step(updates, loop.point, None if factors is None else factors[i], where)
        return loop._replace(k=loop.k + 1, point=point, saved=saved)

    loop = _so_often(iteration, loop, last if task.translated else last + 1)
    loop = iteration(last, loop, looked) if task.translated else loop
    return _look(task, loop, looked)


def _so_often(iteration: Any, loop: _Loop, count: jax.Array | int) -> _Loop:
    """That many iterations, several in one round; where their number is not known, the last round leaves some out."""
    if isinstance(count, int):
        return lax.fori_loop(0, count, iteration, loop, unroll=min(count, written_out())) if count else loop

    def some(i: Any, loop: _Loop) -> _Loop:
        for later in range(written_out()):
            new, goes_on = iteration(i * written_out() + later, loop), i * written_out() + later < count
            point = jax.tree.map(partial(jnp.where, goes_on), new.point, loop.point)
            loop = new._replace(point=point, k=jnp.where(goes_on, new.k, loop.k))
        return loop

    return lax.fori_loop(0, -(-count // written_out()), some, loop)


def _note(loop: _Loop, control: Control, factors: jax.Array | None, looked: jax.Array, at: jax.Array) -> _Loop:
    """Keep the factors of a block and who is looked at after it."""
    if loop.saved is None:
        return loop
    slot = control.slot(at)
    looked = looked | loop.saved.looked[slot]  # of a problem whose limit cuts a block
    saved = loop.saved._replace(looked=loop.saved.looked.at[slot].set(looked))
    if factors is not None:
        saved = saved._replace(factors=lax.dynamic_update_slice_in_dim(saved.factors, factors, loop.k, 0))
    return loop._replace(saved=saved)


def _save(saved: Saved, point: Point, k: jax.Array, every: int) -> Saved:
    slot, now = k // every, k % every == 0
    f = saved.f.at[slot].set(jnp.where(now, point.f, saved.f[slot]))
    g = saved.g.at[slot].set(jnp.where(now, point.g, saved.g[slot])) if len(saved.g) else saved.g
    return saved._replace(f=f, g=g)


def _look(task: _Task, loop: _Loop, looked: jax.Array) -> _Loop:
    """Note the errors, and the problems that end here. Columns without mass say nothing about the error."""
    updates, control, out, point = task.updates, task.control, loop.out, loop.point
    ratio = jnp.exp((point.g - point.by_columns) / updates.epsilon[:, None])
    penalty = updates.duals.penalty
    wanted = 1 if penalty is None else jnp.exp(penalty.columns.lost(point.g))
    violation = jnp.where(updates.b > 0, updates.b * (ratio - wanted), 0)
    error = abs(violation).sum(-1) if control.norm == "l1" else jnp.sqrt((violation**2).sum(-1))
    small = error < task.tolerance
    ends = looked & (small | (loop.k == task.limit))
    slot = control.slot(loop.k)
    errors = out.errors.at[slot].set(jnp.where(looked, error, out.errors[slot]))
    run = loop.k + control.max_iterations - task.limit
    found = point.f, point.g, jnp.broadcast_to(run, ends.shape), error, small
    f, g, iterations, error_, converged = map(partial(_chosen, ends), found, out[:5])
    out = State(f, g, iterations, error_, converged, errors)
    pace = loop.pace
    if pace is not None:
        learnt = acceleration.learn(pace, error, loop.k, control.check_every, updates.duals.floor())
        pace = Pace(*map(partial(_chosen, looked), learnt, pace))
    return loop._replace(out=out, pace=pace)


def _chosen(where: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(where.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def stride(control: Control) -> int:
    """Iterations between two saved potentials: memory and recomputed steps grow as the root of the iterations."""
    return max(1, math.isqrt(control.max_iterations - 1) + 1)
