"""Updates of the potentials of JAX problems: what a loop is made of, and what its derivative walks back through."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from . import jax_acceleration as acceleration
from .jax_streams import minus
from .jax_unbalanced import Penalty, Side, without_the_unreachable


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

    def at(self, factor: jax.Array) -> Updates:
        """Under ε times a factor."""
        other = copy.copy(self)
        other.epsilon = self.epsilon * factor
        other.pairs = self.pairs._replace(epsilon=other.epsilon)
        other.columns_first, other.held = other.pairs.T, self.kernel.hold(other.pairs)
        other.duals = self.duals._replace(epsilon=other.epsilon)
        return other

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


def begin(updates: Updates, f: jax.Array) -> Point:
    """Before the first iteration from f."""
    g = jnp.zeros_like(updates.b)
    return Point(f, g, f, updates.columns(f, g))


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


def written_out() -> int:
    """Iterations that one round of a loop does. A round costs a CUDA device as much as some hundred million pairs."""
    return 10 if jax.default_backend() == "gpu" else 1
