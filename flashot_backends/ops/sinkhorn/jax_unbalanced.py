"""Marginals of JAX problems that may be missed: penalties ρ KL(P1 | a) by side, and their translation.

The JAX twin of `unbalanced`, which names the sources. Everything here has n or m terms, and JAX differentiates it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs, log_sum_exp


class Side(NamedTuple):
    """One side's penalty: 1/ρ (B, 1), zero where binding, and the terms of the cost that kernels do not see, (B, n)."""

    tightness: jax.Array
    offset: jax.Array | None

    def damping(self, epsilon: jax.Array) -> jax.Array:
        """ρ/(ρ + ε), (B, 1)."""
        return 1 / (1 + epsilon[:, None] * self.tightness)

    def target(self, epsilon: jax.Array, softmin: jax.Array) -> jax.Array:
        """Where the potentials go that belong to a softmin, (B, n); where that is infinite they follow it."""
        damping, there = self.damping(epsilon), jnp.isfinite(softmin)
        target = damping * jnp.where(there, softmin, 0)
        target = target if self.offset is None else target + (damping - 1) * self.offset
        return jnp.where(there, target, softmin)

    def lost(self, potential: jax.Array) -> jax.Array:
        """−(f + offset)/ρ, (B, n): the logarithm of the marginal that f asks for, over the given weights."""
        whole = potential if self.offset is None else potential + self.offset
        bound = self.tightness == 0
        return jnp.where(bound, 0, -jnp.where(bound, 0, whole) * self.tightness)

    def log_mass(self, log_weight: jax.Array, potential: jax.Array) -> jax.Array:
        """log ⟨a, e^(−f/ρ)⟩, (B, 1)."""
        massless = log_weight == -jnp.inf
        lost = self.lost(jnp.where(massless, 0, potential))
        return log_sum_exp(jnp.where(massless, -jnp.inf, log_weight + lost))[:, None]


class Penalty(NamedTuple):
    """The penalties of rows and columns."""

    rows: Side
    columns: Side

    @property
    def both(self) -> jax.Array:
        """ρ₁ρ₂/(ρ₁ + ρ₂), (B, 1); zero where both sides are balanced: translating changes nothing there."""
        total = self.rows.tightness + self.columns.tightness
        return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)

    def translation(self, log_a: jax.Array, log_b: jax.Array, f: jax.Array, g: jax.Array) -> jax.Array:
        """The κ (B, 1) for which (f + κ, g − κ) has the largest dual."""
        return self.both * (self.rows.log_mass(log_a, f) - self.columns.log_mass(log_b, g))

    def contraction(self, epsilon: jax.Array) -> jax.Array:
        """No eigenvalue of an iteration is larger than this product of both dampings, (B, 1)."""
        return self.rows.damping(epsilon) * self.columns.damping(epsilon)


def make_penalty(reach: jax.Array | None, offsets: tuple[jax.Array, jax.Array] | None) -> Penalty | None:
    """From the reaches (B, 2) of rows and columns, infinite where balanced."""
    if reach is None:
        return None
    alpha, beta = offsets or (None, None)
    return Penalty(Side(1 / reach[:, :1], alpha), Side(1 / reach[:, 1:], beta))


def without_the_unreachable(kernel: Any, pairs: Pairs, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights, zero where every pair is forbidden: such mass is given up, and no potential says how much."""
    if pairs.matrix is None:
        return a, b
    everything = [jnp.where(weight > 0, 0.0, -jnp.inf).astype(weight.dtype) for weight in (a, b)]
    nowhere = kernel.lse(pairs, everything[1]) == -jnp.inf, kernel.lse(pairs.T, everything[0]) == -jnp.inf
    return jnp.where(nowhere[0], 0, a), jnp.where(nowhere[1], 0, b)
