"""The exact derivative of the iterations that were run on JAX arrays: run them again, then walk back through each.

Softmins, which have all pairs, are passed by their streamed vector-Jacobian product; what follows from them has n or m
terms, and JAX differentiates it. Factors of over-relaxation are constants.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from .jax_acceleration import stage_omegas
from .jax_annealing import stage_updates, translated
from .jax_duals import Duals, Point, Updates, begin, step
from .jax_loop import Saved, stride
from .jax_problem import Control
from .jax_streams import Wants, softmin_gradient
from .pacing import STAGE_ITERATIONS


class Gradients(NamedTuple):
    """Sums over the half steps passed so far: by the costs and ε, and by what is in ``Duals``, where ε is too."""

    pairs: Pairs
    duals: Duals

    @classmethod
    def none(cls, updates: Updates) -> Gradients:
        """Nothing passed yet."""
        return cls(*jax.tree.map(jnp.zeros_like, (updates.pairs, updates.duals)))

    def plus(self, pairs: Any = None, duals: Any = None) -> Gradients:
        """The sums and another half step."""
        return Gradients(_sum(self.pairs, pairs), _sum(self.duals, duals))

    def under(self, factor: jax.Array) -> Gradients:
        """By ε, where these are by ε times a factor."""
        pairs, duals = self
        return Gradients(
            pairs._replace(epsilon=factor * pairs.epsilon), duals._replace(epsilon=factor * duals.epsilon)
        )

    @property
    def of_pairs(self) -> Pairs:
        """The gradient by the costs, with all of ε's."""
        return self.pairs._replace(epsilon=self.pairs.epsilon + self.duals.epsilon)


def _sum(total: Any, more: Any) -> Any:
    return total if more is None else jax.tree.map(jnp.add, total, more)


class Walk:
    """Passes half steps on the way back."""

    def __init__(self, updates: Updates, wants: Wants):
        self.updates, self.wants, self.duals = updates, wants, updates.duals

    def rows(self, total: Gradients, g: jax.Array, softmin: jax.Array, grad: jax.Array) -> tuple[Gradients, jax.Array]:
        """Pass a softmin of rows, of log b + g/ε; return the sums and the gradient by g."""
        by_pairs, by_h, by_epsilon = self._pass(self.updates.pairs, self.updates.h_columns(g), g, softmin, grad)
        return total.plus(by_pairs, self._logs(by_epsilon, b=by_h)), by_h / self.updates.epsilon[:, None]

    def columns(
        self, total: Gradients, f: jax.Array, softmin: jax.Array, grad: jax.Array
    ) -> tuple[Gradients, jax.Array]:
        """Pass a softmin of columns, of log a + f/ε; return the sums and the gradient by f."""
        by_pairs, by_h, by_epsilon = self._pass(self.updates.columns_first, self.updates.h_rows(f), f, softmin, grad)
        return total.plus(by_pairs.T, self._logs(by_epsilon, a=by_h)), by_h / self.updates.epsilon[:, None]

    def row_update(
        self, total: Gradients, g: jax.Array, softmin: jax.Array, grad: jax.Array
    ) -> tuple[Gradients, jax.Array]:
        """Pass a plain update of the rows from g."""
        by_duals, by_softmin = self.through(lambda duals, softmin: duals.rows(softmin, softmin, None), grad, softmin)
        return self.rows(total.plus(duals=by_duals), g, softmin, by_softmin)

    def column_update(
        self, total: Gradients, f: jax.Array, softmin: jax.Array, grad: jax.Array
    ) -> tuple[Gradients, jax.Array]:
        """Pass a plain update of the columns from f."""
        by_duals, by_softmin = self.through(lambda duals, softmin: duals.columns(softmin, softmin, None), grad, softmin)
        return self.columns(total.plus(duals=by_duals), f, softmin, by_softmin)

    def through(self, function: Any, grads: Any, *arguments: jax.Array) -> Any:
        """Gradients by the duals and the arguments of what has no pairs."""
        return jax.vjp(function, self.duals, *arguments)[1](grads)

    def _pass(self, pairs: Pairs, h: jax.Array, potential: jax.Array, out: jax.Array, grad: jax.Array) -> Any:
        by_pairs, by_h = softmin_gradient(self.updates.kernel, self.wants, pairs, h, out, grad)
        through_h = jnp.zeros_like(pairs.epsilon)
        if self.wants.epsilon is not None:
            through_h = -jnp.where(by_h == 0, 0, by_h * potential).sum(-1) / pairs.epsilon**2
        return by_pairs, by_h, through_h

    def _logs(self, by_epsilon: jax.Array, a: jax.Array | None = None, b: jax.Array | None = None) -> Duals:
        nothing = jax.tree.map(jnp.zeros_like, self.duals)
        return nothing._replace(
            epsilon=by_epsilon, log_a=nothing.log_a if a is None else a, log_b=nothing.log_b if b is None else b
        )


def unrolled(
    updates: Updates, wants: Wants, control: Control, iterations: jax.Array, saved: Saved, by_f: jax.Array,
    by_g: jax.Array,
) -> tuple[Gradients, jax.Array]:
    """Vector-Jacobian product of the iterations, by what they are made of and by the f that they began with.

    Walks back through segments that are computed again from what was ``saved``.
    """
    walk, every = Walk(updates, wants), stride(control)
    iterations = iterations - (control.max_iterations - saved.limit(control))
    count = iterations.max(initial=0)

    def segment(i: Any, passed: Any) -> Any:
        slot = (count - 1) // every - i
        steps = jnp.minimum(every, count - slot * every)
        history = _history(updates, control, saved, slot, steps)

        def back(j: Any, passed: Any) -> Any:
            total, towards_f, towards_g = passed
            at = steps - 1 - j
            k = slot * every + at
            ends = (iterations == k + 1)[:, None]
            grads = towards_f + jnp.where(ends, by_f, 0), towards_g + jnp.where(ends, by_g, 0)
            before, after = (jax.tree.map(lambda part: part[at + later], history) for later in (0, 1))  # noqa: B023
            if plain(updates, saved):
                before, after = before._replace(by_columns=after.g), after._replace(by_rows=after.f)
            return _back(walk, total, before, after, *_of_iteration(control, saved, k), grads)

        return lax.fori_loop(0, steps, back, passed)

    nothing = Gradients.none(updates), jnp.zeros_like(by_f), jnp.zeros_like(by_g)
    total, by_start, _ = lax.fori_loop(0, -(-count // every), segment, nothing)
    return (total, by_start) if saved.stages is None else _through_stages(walk, control, saved, total, by_start)


def _through_stages(walk: Walk, control: Control, saved: Any, total: Gradients, by_f: jax.Array) -> Any:
    """Pass the stages of annealing, from the gradient by the f that they led to."""

    def once(i: Any, passed: Any) -> Any:
        total, by_f = passed
        stage = stage_updates(walk.updates, i + 1, control.stages)
        taking_part = (saved.stages > i)[:, None]
        by_end = jnp.where(taking_part, by_f, 0)
        more, by_start = _through_stage(Walk(stage, walk.wants), saved.before_stages[i], by_end)
        more = more.under(stage.epsilon / walk.updates.epsilon)
        return total.plus(*more), jnp.where(taking_part, by_start, by_f)

    return lax.fori_loop(0, saved.stages.max(initial=0), once, (total, by_f))


def _through_stage(walk: Walk, f: jax.Array, by_f: jax.Array) -> tuple[Gradients, jax.Array]:
    """Pass one stage that began with f; return what it adds, and the gradient by f."""
    count, factors = STAGE_ITERATIONS, stage_omegas(walk.duals.floor()).astype(f.dtype)
    history = _replayed(walk.updates, begin(walk.updates, f), count, count, lambda i: (factors[i], None))
    point = lambda i: jax.tree.map(lambda part: part[i], history)  # noqa: E731
    by_duals, by_f, by_g = walk.through(translated, by_f, point(count).f, point(count).g)

    def back(j: Any, passed: Any) -> Any:
        total, *grads = passed
        at = count - 1 - j
        return _back(walk, total, point(at), point(at + 1), factors[at], None, grads)

    nothing = Gradients.none(walk.updates).plus(duals=by_duals)
    return lax.fori_loop(0, count, back, (nothing, by_f, by_g))[:2]


def _of_iteration(control: Control, saved: Saved, k: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """The factors of the iteration after the k-th, and where it is translated."""
    is_look = (k % control.check_every == 0) | (k + 1 == saved.limit(control))
    where = saved.looked[control.slot(k + 1)] & is_look
    return None if saved.factors is None else saved.factors[k], where


def _back(
    walk: Walk, total: Gradients, before: Point, after: Point, factors: jax.Array | None, where: jax.Array | None,
    grads: Any,
) -> Any:
    """Pass one iteration, from gradients by f and g after it to those before it."""
    of_columns, of_rows = (None, None) if factors is None else factors
    by_f, by_g = grads

    def begin(duals: Duals, f: jax.Array, g: jax.Array, by_columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = duals.columns(g, by_columns, of_columns)
        shift = duals.translation(f, g, where)
        return f + shift, g - shift

    f = begin(walk.duals, before.f, before.g, before.by_columns)[0]
    end = partial(_end, of_rows)
    by_duals, by_old, by_softmin = walk.through(end, by_f, f, after.by_rows)
    total, more = walk.rows(total.plus(duals=by_duals), after.g, after.by_rows, by_softmin)
    by_duals, by_f, by_old_g, by_softmin = walk.through(
        begin, (by_old, by_g + more), before.f, before.g, before.by_columns
    )
    total, more = walk.columns(total.plus(duals=by_duals), before.f, before.by_columns, by_softmin)
    return total, by_f + more, by_old_g


def _end(of_rows: jax.Array | None, duals: Duals, f: jax.Array, by_rows: jax.Array) -> jax.Array:
    return duals.rows(f, by_rows, of_rows)


def _history(updates: Updates, control: Control, saved: Saved, slot: jax.Array, steps: jax.Array) -> Point:
    """Where one segment began and where each of its iterations led, (every + 1, …)."""
    f = saved.f[slot]
    g = saved.g[slot] if len(saved.g) else jnp.zeros_like(updates.b)
    start = Point(f, g, f, updates.columns(f, g))
    kept = (lambda point: Point(point.f, point.g, None, None)) if plain(updates, saved) else lambda point: point
    of = lambda i: _of_iteration(control, saved, slot * stride(control) + i)  # noqa: E731
    return _replayed(updates, start, stride(control), steps, of, kept)


def _replayed(
    updates: Updates, start: Point, room: int, steps: jax.Array | int, of: Any, kept: Any = lambda point: point
) -> Any:
    """The start and where each of the iterations leads, (room + 1, …), ``of`` their factors and translations."""
    blank = lambda part: jnp.zeros((room + 1, *part.shape), part.dtype).at[0].set(part)  # noqa: E731

    def again(i: Any, held: Any) -> Any:
        table, point = held
        point = step(updates, point, *of(i))
        return jax.tree.map(lambda whole, part: whole.at[i + 1].set(part), table, kept(point)), point

    return lax.fori_loop(0, steps, again, (jax.tree.map(blank, kept(start)), start))[0]


def plain(updates: Updates, saved: Saved) -> bool:
    """Whether potentials are their softmins."""
    return updates.duals.penalty is None and saved.factors is None
