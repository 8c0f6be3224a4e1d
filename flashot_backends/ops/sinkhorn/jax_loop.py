"""The loop on JAX arrays: alternating updates until the column marginal is right, and its exact derivative."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from .jax_problem import Control
from .jax_streams import Wants, minus, softmin_gradient


class State(NamedTuple):
    """The outcome by problem: potentials (B, n) and (B, m), iterations, error, and whether it is small."""

    f: jax.Array
    g: jax.Array
    iterations: jax.Array
    error: jax.Array
    converged: jax.Array


def log_weights(given: jax.Array) -> jax.Array:
    """log a, −inf without mass; no gradient flows where there is no mass."""
    massive = given > 0
    return jnp.where(massive, jnp.log(jnp.where(massive, given, 1)), -jnp.inf)


def scaling(log_weight: jax.Array, potential: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log a + f/ε, and −inf without mass: its potential, +inf where it may go nowhere, has no derivative."""
    massless = log_weight == -jnp.inf
    return jnp.where(massless, -jnp.inf, log_weight + jnp.where(massless, 0, potential) / epsilon[:, None])


class _Loop(NamedTuple):
    """Where the loop is: after iteration k, with row potentials f from g, and ``after`` the columns' next."""

    k: jax.Array
    f: jax.Array
    g: jax.Array
    after: jax.Array
    saved: jax.Array  # (slots, B, n): f before every ``stride``-th iteration
    out: State  # iterations are 0 where a problem goes on


class Updates:
    """The two half steps."""

    def __init__(self, kernel: Any, pairs: Pairs, a: jax.Array, b: jax.Array):
        self.kernel, self.pairs, self.columns_first = kernel, pairs, pairs.T
        self.held = kernel.hold(pairs)
        self.epsilon = pairs.epsilon
        self.log_a, self.log_b = log_weights(a), log_weights(b)

    def rows(self, g: jax.Array, guess: jax.Array) -> jax.Array:
        """f from g."""
        return minus(self.epsilon, self.kernel.lse(self.held, self.h_columns(g), -guess / self.epsilon[:, None]))

    def columns(self, f: jax.Array, guess: jax.Array) -> jax.Array:
        """g from f."""
        h, near = self.h_rows(f), -guess / self.epsilon[:, None]
        return minus(self.epsilon, self.kernel.lse(self.held.T, h, near))

    def h_rows(self, f: jax.Array) -> jax.Array:
        """log a + f/ε."""
        return scaling(self.log_a, f, self.epsilon)

    def h_columns(self, g: jax.Array) -> jax.Array:
        """log b + g/ε."""
        return scaling(self.log_b, g, self.epsilon)


def iterate(
    kernel: Any, control: Control, pairs: Pairs, a: jax.Array, b: jax.Array, f: jax.Array, tolerance: jax.Array,
    saving: bool = False,
) -> tuple[State, jax.Array]:
    """Alternate from the row potentials ``f``: columns, then rows, so that rows are exact at the end.

    A problem that has converged keeps its answer while the others go on. Returns the row potentials before every
    ``stride(control)``-th iteration too, if ``saving``.
    """
    updates = Updates(kernel, pairs, a, b)
    every = stride(control)
    f = jnp.where(a > 0, f, 0)
    slots = -(-control.max_iterations // every) if saving else 0
    g = updates.columns(f, jnp.zeros_like(b))
    blank = State(
        f, g, jnp.zeros(f.shape[:1], jnp.int32), jnp.zeros(f.shape[:1], f.dtype), jnp.zeros(f.shape[:1], bool)
    )
    loop = _Loop(jnp.int32(0), f, g, g, jnp.zeros((slots, *f.shape), f.dtype), blank)

    def step(_: Any, loop: _Loop) -> _Loop:
        saved = loop.saved
        if saving:
            slot = loop.k // every
            saved = saved.at[slot].set(jnp.where(loop.k % every == 0, loop.f, saved[slot]))
        f = updates.rows(loop.after, loop.f)
        return _Loop(loop.k + 1, f, loop.after, updates.columns(f, loop.after), saved, loop.out)

    def run(loop: _Loop, count: int) -> _Loop:
        return _look(lax.fori_loop(0, count, step, loop), control, b, pairs.epsilon, tolerance)

    loop = _repeat(run, loop, control)
    return loop.out, loop.saved


def _repeat(run: Any, loop: _Loop, control: Control) -> _Loop:
    """Look after iterations 1, 1 + check_every, …, and the last. Counts are known, so a device need not be asked."""
    if not control.stops:
        return run(loop, control.max_iterations)
    loop = run(loop, 1)
    blocks, rest = divmod(control.max_iterations - 1, control.check_every)
    last = 1 + blocks * control.check_every
    if blocks:
        loop = lax.while_loop(
            lambda loop: _goes_on(loop) & (loop.k < last), lambda loop: run(loop, control.check_every), loop
        )
    return lax.cond(_goes_on(loop), lambda loop: run(loop, rest), lambda loop: loop, loop) if rest else loop


def _goes_on(loop: _Loop) -> jax.Array:
    return (loop.out.iterations == 0).any()


def _look(loop: _Loop, control: Control, b: jax.Array, epsilon: jax.Array, tolerance: jax.Array) -> _Loop:
    """Record the problems that end here. Columns without mass say nothing about the error."""
    ratio = jnp.exp((loop.g - loop.after) / epsilon[:, None])
    violation = jnp.where(b > 0, b * (ratio - 1), 0)
    error = abs(violation).sum(-1) if control.norm == "l1" else jnp.sqrt((violation**2).sum(-1))
    small, out = error < tolerance, loop.out
    ends = (out.iterations == 0) & (small | (loop.k == control.max_iterations))
    found = State(loop.f, loop.g, jnp.broadcast_to(loop.k, ends.shape), error, small)
    return loop._replace(out=jax.tree.map(partial(_chosen, ends), found, out))


def _chosen(where: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(where.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def stride(control: Control) -> int:
    """Iterations between two saved potentials: memory and recomputed steps grow as the root of the iterations."""
    return max(1, math.isqrt(control.max_iterations - 1) + 1)


# its derivative


class Gradients(NamedTuple):
    """Sums over the half steps passed so far, and the gradient by the row potentials that are reached."""

    pairs: Pairs
    log_a: jax.Array
    log_b: jax.Array
    f: jax.Array

    @classmethod
    def none(cls, updates: Updates) -> Gradients:
        """Nothing passed yet."""
        log_a, log_b = jnp.zeros_like(updates.log_a), jnp.zeros_like(updates.log_b)
        return cls(jax.tree.map(jnp.zeros_like, updates.pairs), log_a, log_b, log_a)


class Walk:
    """Passes half steps on the way back."""

    def __init__(self, updates: Updates, wants: Wants):
        self.updates, self.wants = updates, wants

    def row_update(self, total: Gradients, g: jax.Array, f: jax.Array, grad: jax.Array) -> Any:
        """Pass f = softmin(log b + g/ε); return the sums and the gradient by g."""
        by_pairs, by_h = self._pass(self.updates.pairs, self.updates.h_columns(g), g, f, grad)
        return _plus(total, by_pairs, log_b=by_h), by_h / self.updates.epsilon[:, None]

    def column_update(self, total: Gradients, f: jax.Array, g: jax.Array, grad: jax.Array) -> Any:
        """Pass g = softmin(log a + f/ε) along columns; return the sums and the gradient by f."""
        by_pairs, by_h = self._pass(self.updates.columns_first, self.updates.h_rows(f), f, g, grad)
        return _plus(total, by_pairs.T, log_a=by_h), by_h / self.updates.epsilon[:, None]

    def _pass(self, pairs: Pairs, h: jax.Array, potential: jax.Array, out: jax.Array, grad: jax.Array) -> Any:
        by_pairs, by_h = softmin_gradient(self.updates.kernel, self.wants, pairs, h, out, grad)
        if self.wants.epsilon is not None:
            through_h = jnp.where(by_h == 0, 0, by_h * potential).sum(-1) / pairs.epsilon**2
            by_pairs = by_pairs._replace(epsilon=by_pairs.epsilon - through_h)
        return by_pairs, by_h


def _plus(total: Gradients, pairs: Pairs, log_a: Any = 0, log_b: Any = 0) -> Gradients:
    return Gradients(
        jax.tree.map(jnp.add, total.pairs, pairs), total.log_a + log_a, total.log_b + log_b, total.f
    )


def unrolled(
    updates: Updates, wants: Wants, iterations: jax.Array, saved: jax.Array, every: int, by_f: jax.Array,
    by_g: jax.Array,
) -> Gradients:
    """Vector-Jacobian product of the iterations: walk back through segments that are recomputed from ``saved``."""
    walk, count = Walk(updates, wants), iterations.max(initial=0)

    def segment(i: Any, total: Gradients) -> Gradients:
        slot = (count - 1) // every - i
        steps = jnp.minimum(every, count - slot * every)
        fs, gs = _history(updates, saved[slot], steps, every)

        def back(j: Any, total: Gradients) -> Gradients:
            at = steps - 1 - j
            ends_here = (iterations == slot * every + at + 1)[:, None]
            by_row = total.f + jnp.where(ends_here, by_f, 0)
            total, by_column = walk.row_update(total, gs[at], fs[at + 1], by_row)
            by_column = by_column + jnp.where(ends_here, by_g, 0)
            total, by_row = walk.column_update(total, fs[at], gs[at], by_column)
            return total._replace(f=by_row)

        return lax.fori_loop(0, steps, back, total)

    return lax.fori_loop(0, -(-count // every), segment, Gradients.none(updates))


def _history(updates: Updates, f: jax.Array, steps: jax.Array, every: int) -> tuple[jax.Array, jax.Array]:
    """Row potentials f_0 … and the column potentials g_1 … of one segment."""
    fs = jnp.zeros((every + 1, *f.shape), f.dtype).at[0].set(f)
    gs = jnp.zeros((every, *updates.log_b.shape), f.dtype)

    def step(i: Any, held: Any) -> Any:
        fs, gs, near = held
        g = updates.columns(fs[i], near)
        return fs.at[i + 1].set(updates.rows(g, fs[i])), gs.at[i].set(g), g

    return lax.fori_loop(0, steps, step, (fs, gs, jnp.zeros_like(updates.log_b)))[:2]
