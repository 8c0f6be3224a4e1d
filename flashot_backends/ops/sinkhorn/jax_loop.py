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
from .jax_problem import Control
from .jax_streams import minus
from .jax_unbalanced import Penalty, Side, without_the_unreachable


class State(NamedTuple):
    """The outcome by problem: potentials (B, n) and (B, m), iterations, error, whether it is small, and the errors of
    all looks (B, looks), NaN where nothing was looked at."""

    f: jax.Array
    g: jax.Array
    iterations: jax.Array
    error: jax.Array
    converged: jax.Array
    errors: jax.Array


def log_weights(given: jax.Array) -> jax.Array:
    """log a, −inf without mass; no gradient flows where there is no mass."""
    massive = given > 0
    return jnp.where(massive, jnp.log(jnp.where(massive, given, 1)), -jnp.inf)


def scaling(log_weight: jax.Array, potential: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log a + f/ε, and −inf without mass: its potential, +inf where it may go nowhere, has no derivative."""
    massless = log_weight == -jnp.inf
    return jnp.where(massless, -jnp.inf, log_weight + jnp.where(massless, 0, potential) / epsilon[:, None])


class Duals(NamedTuple):
    """What updates are made of besides their softmins: ε (B,), logarithms of the weights, penalties.

    Its methods have n or m terms, and JAX differentiates them.
    """

    epsilon: jax.Array
    log_a: jax.Array
    log_b: jax.Array
    penalty: Penalty | None

    def rows(self, old: jax.Array, softmin: jax.Array, omega: jax.Array | None) -> jax.Array:
        """f that follows from its softmin, beyond it by the factors ω (B,) of relaxation."""
        omega = omega if omega is None else omega[:, None]
        return self._follow(self.penalty and self.penalty.rows, old, softmin, omega)

    def columns(self, old: jax.Array, softmin: jax.Array, omega: jax.Array | None) -> jax.Array:
        """g that follows from its softmin. Columns without mass only follow, and are not relaxed."""
        if omega is not None:
            omega = jnp.where(self.log_b == -jnp.inf, 1, omega[:, None])
        return self._follow(self.penalty and self.penalty.columns, old, softmin, omega)

    def _follow(self, side: Side | None, old: jax.Array, softmin: jax.Array, omega: jax.Array | None) -> jax.Array:
        target = softmin if side is None else side.target(self.epsilon, softmin)
        return target if omega is None else acceleration.relaxed(old, target, omega, self.epsilon[:, None])

    def translation(self, f: jax.Array, g: jax.Array, where: jax.Array | None) -> jax.Array | int:
        """By how much (B, 1) f is to grow and g to fall, in the problems (B,) where it is due."""
        if self.penalty is None or where is None:
            return 0
        return jnp.where(where[:, None], self.penalty.translation(self.log_a, self.log_b, f, g), 0)

    def floor(self) -> jax.Array:
        """The least gap that each of these problems can have, (B,)."""
        if self.penalty is None:
            return jnp.zeros_like(self.epsilon)
        contraction = self.penalty.contraction(self.epsilon)[:, 0]
        return lax.stop_gradient(jnp.sqrt(jnp.maximum(1 - contraction, 0)))


class Updates:
    """A batch of problems as its loop sees it: softmins over all pairs, and what follows from them."""

    def __init__(self, kernel: Any, pairs: Pairs, a: jax.Array, b: jax.Array, penalty: Penalty | None):
        if penalty is not None:
            a, b = without_the_unreachable(kernel, pairs, a, b)
        self.a, self.b = a, b
        self.kernel, self.pairs, self.columns_first = kernel, pairs, pairs.T
        self.held, self.lse = kernel.hold(pairs), jax.jit(kernel.lse)  # compiled once for all its calls
        self.epsilon = pairs.epsilon
        self.duals = Duals(pairs.epsilon, log_weights(a), log_weights(b), penalty)

    def rows(self, g: jax.Array, guess: jax.Array) -> jax.Array:
        """The softmin of the rows that belongs to g, (B, n); it may be near a guess."""
        return minus(self.epsilon, self.lse(self.held, self.h_columns(g), -guess / self.epsilon[:, None]))

    def columns(self, f: jax.Array, guess: jax.Array) -> jax.Array:
        """The softmin of the columns that belongs to f, (B, m)."""
        h, near = self.h_rows(f), -guess / self.epsilon[:, None]
        return minus(self.epsilon, self.lse(self.held.T, h, near))

    def h_rows(self, f: jax.Array) -> jax.Array:
        """log a + f/ε."""
        return scaling(self.duals.log_a, f, self.epsilon)

    def h_columns(self, g: jax.Array) -> jax.Array:
        """log b + g/ε."""
        return scaling(self.duals.log_b, g, self.epsilon)


class Point(NamedTuple):
    """Where the iterations are: potentials, the softmin that rows had last, and the one that columns have next."""

    f: jax.Array
    g: jax.Array
    by_rows: jax.Array
    by_columns: jax.Array


class Saved(NamedTuple):
    """What a derivative needs of the iterations: potentials before every ``stride``-th of them, g only where it is
    relaxed; the factors of all (iterations, 2, B), of columns and of rows; and who was looked at (looks, B)."""

    f: jax.Array
    g: jax.Array
    factors: jax.Array | None
    looked: jax.Array


class _Loop(NamedTuple):
    """Where the loop is: after iteration k."""

    k: jax.Array
    point: Point
    pace: Pace | None
    saved: Saved | None
    out: State  # iterations are 0 where a problem goes on


def iterate(
    kernel: Any, control: Control, pairs: Pairs, a: jax.Array, b: jax.Array, f: jax.Array, tolerance: jax.Array,
    penalty: Penalty | None, saving: bool = False,
) -> tuple[State, Saved | None]:
    """Alternate from the row potentials ``f``: columns, then rows, so that rows are exact at the end.

    A problem that has converged keeps its answer while the others go on. Returns what a derivative needs too, if
    ``saving``.
    """
    updates = Updates(kernel, pairs, a, b, penalty)
    loop = _begin(updates, control, jnp.where(updates.a > 0, f, 0), saving)
    loop = _repeat(partial(_block, updates, control, tolerance), loop, control)
    return loop.out._replace(errors=loop.out.errors.T), loop.saved


def _begin(updates: Updates, control: Control, f: jax.Array, saving: bool) -> _Loop:
    batch, g = f.shape[:1], jnp.zeros_like(updates.b)
    point = Point(f, g, f, updates.columns(f, g))
    pace = acceleration.start(updates.duals.floor(), control.check_every) if control.relaxes else None
    zero = jnp.zeros(batch, f.dtype)
    errors = jnp.full((control.looks, *batch), jnp.nan, f.dtype)
    out = State(f, g, jnp.zeros(batch, jnp.int32), zero, jnp.zeros(batch, bool), errors)
    return _Loop(jnp.int32(0), point, pace, _nothing_saved(control, point) if saving else None, out)


def _nothing_saved(control: Control, point: Point) -> Saved:
    (batch, _), slots, dtype = point.f.shape, -(-control.max_iterations // stride(control)), point.f.dtype
    factors = jnp.ones((control.max_iterations, 2, batch), dtype) if control.relaxes else None
    g = jnp.zeros((slots if control.relaxes else 0, *point.g.shape), dtype)
    looked = jnp.zeros((control.looks, batch), bool)
    return Saved(jnp.zeros((slots, *point.f.shape), dtype), g, factors, looked)


def _repeat(block: Any, loop: _Loop, control: Control) -> _Loop:
    """Blocks that end after iterations 1, 1 + check_every, …, and the last.

    Their lengths are known, so a device need not be asked within them, nor between them where there is no tolerance.
    """
    loop = block(loop, 1)
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


def _goes_on(loop: _Loop) -> jax.Array:
    return loop.out.iterations == 0


def _block(updates: Updates, control: Control, tolerance: jax.Array, loop: _Loop, count: int) -> _Loop:
    """``count`` iterations, and a look after the last at those that are due."""
    looked, factors = _goes_on(loop), None
    if loop.pace is not None:
        at = loop.k + count
        looked &= (loop.pace.last + loop.pace.cycle == at) | (at == control.max_iterations)
        translated = updates.duals.penalty is not None
        factors = acceleration.factors(loop.pace, loop.k, count, looked, translated).astype(loop.point.f.dtype)
    loop = _note(loop, control, factors, looked, count)

    def iteration(i: Any, loop: _Loop, where: jax.Array | None = None) -> _Loop:
        saved = loop.saved and _save(loop.saved, loop.point, loop.k, stride(control))
        point = step(updates, loop.point, None if factors is None else factors[i], where)
        return loop._replace(k=loop.k + 1, point=point, saved=saved)

    translated = updates.duals.penalty is not None
    before = count - 1 if translated else count
    loop = lax.fori_loop(0, before, iteration, loop, unroll=min(before, written_out())) if before else loop
    loop = iteration(count - 1, loop, looked) if translated else loop
    return _look(updates, loop, control, tolerance, looked)


def written_out() -> int:
    """Iterations that one round of a loop does. A round costs a CUDA device as much as some hundred million pairs."""
    return 10 if jax.default_backend() == "gpu" else 1


def step(updates: Updates, point: Point, factors: jax.Array | None, where: jax.Array | None) -> Point:
    """One iteration, translated before its row update ``where`` (B,) that is due."""
    duals = updates.duals
    of_columns, of_rows = (None, None) if factors is None else factors
    g = duals.columns(point.g, point.by_columns, of_columns)
    shift = duals.translation(point.f, g, where)
    g = g - shift
    by_rows = updates.rows(g, point.by_rows + shift)
    f = duals.rows(point.f + shift, by_rows, of_rows)
    return Point(f, g, by_rows, updates.columns(f, point.by_columns))


def _note(loop: _Loop, control: Control, factors: jax.Array | None, looked: jax.Array, count: int) -> _Loop:
    """Keep the factors of a block and who is looked at after it."""
    if loop.saved is None:
        return loop
    saved = loop.saved._replace(looked=loop.saved.looked.at[control.slot(loop.k + count)].set(looked))
    if factors is not None:
        saved = saved._replace(factors=lax.dynamic_update_slice_in_dim(saved.factors, factors, loop.k, 0))
    return loop._replace(saved=saved)


def _save(saved: Saved, point: Point, k: jax.Array, every: int) -> Saved:
    slot, now = k // every, k % every == 0
    f = saved.f.at[slot].set(jnp.where(now, point.f, saved.f[slot]))
    g = saved.g.at[slot].set(jnp.where(now, point.g, saved.g[slot])) if len(saved.g) else saved.g
    return saved._replace(f=f, g=g)


def _look(updates: Updates, loop: _Loop, control: Control, tolerance: jax.Array, looked: jax.Array) -> _Loop:
    """Note the errors, and the problems that end here. Columns without mass say nothing about the error."""
    out, point, b = loop.out, loop.point, updates.b
    ratio = jnp.exp((point.g - point.by_columns) / updates.epsilon[:, None])
    penalty = updates.duals.penalty
    wanted = 1 if penalty is None else jnp.exp(penalty.columns.lost(point.g))
    violation = jnp.where(b > 0, b * (ratio - wanted), 0)
    error = abs(violation).sum(-1) if control.norm == "l1" else jnp.sqrt((violation**2).sum(-1))
    small = error < tolerance
    ends = looked & (small | (loop.k == control.max_iterations))
    slot = control.slot(loop.k)
    errors = out.errors.at[slot].set(jnp.where(looked, error, out.errors[slot]))
    found = point.f, point.g, jnp.broadcast_to(loop.k, ends.shape), error, small
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
