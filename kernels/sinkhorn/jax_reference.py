"""The plain kernel on JAX arrays: whole matrices, direct differences, one line a formula. The oracle of the tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .jax_pairs import Pairs, product


def applies(request) -> str | None:
    """Any JAX problem, as long as its matrix fits into memory."""
    return None


def cost(pairs: Pairs) -> jax.Array:
    """C, (B or 1, n, m)."""
    if pairs.matrix is not None:
        return pairs.matrix
    return ((pairs.x[:, :, None] - pairs.y[:, None]) ** 2).sum(-1)


def hold(pairs: Pairs) -> Pairs:
    """Nothing to prepare."""
    return pairs


def lse(pairs: Pairs, h: jax.Array, guess: jax.Array | None = None) -> jax.Array:
    """log Σ_j exp(h_j − C_ij/ε), (B, n)."""
    return jax.nn.logsumexp(h[:, None, :] - cost(pairs) / pairs.epsilon[:, None, None], -1)


def reduce(
    pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array, power: int = 0, left: jax.Array | None = None,
    right: jax.Array | None = None,
) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) values_j, (B, n, k)."""
    costs = cost(pairs)
    plan = jnp.exp(s[:, :, None] + t[:, None, :] - costs / pairs.epsilon[:, None, None])
    for _ in range(power):
        plan = jnp.where(plan == 0, 0, plan * costs)
    if left is not None:
        plan = plan * product(left, jnp.swapaxes(right, -1, -2))
    return product(plan, values)
