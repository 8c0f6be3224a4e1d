"""The plain kernel on JAX arrays: whole matrices, direct differences, one line a formula. The oracle of the tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .jax_pairs import Pairs, product, root


def applies(request) -> str | None:
    """Any JAX problem, as long as its matrix fits into memory."""
    return None


def cost(pairs: Pairs) -> jax.Array:
    """C, (B or 1, n, m)."""
    if pairs.matrix is not None:
        return pairs.costs
    differences = pairs.x[:, :, None] - pairs.y[:, None]
    if pairs.metric == "l1":
        return abs(differences).sum(-1)
    squares = (differences**2).sum(-1)
    return squares if pairs.metric == "sqeuclidean" else root(squares)


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
    return product(_weights(pairs, s, t, power, left, right), values)


def pull(pairs: Pairs, s: jax.Array, t: jax.Array, left: jax.Array, right: jax.Array, power: int = 0) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) ∂C_ij/∂x_i, (B, n, d), of "euclidean" and "l1"."""
    weights, differences = _weights(pairs, s, t, power, left, right), pairs.x[:, :, None] - pairs.y[:, None]
    if pairs.metric == "l1":
        return (weights[..., None] * jnp.sign(differences)).sum(2)
    lengths = cost(pairs)
    slopes = jnp.where(lengths > 0, weights / jnp.where(lengths > 0, lengths, 1), 0)
    return (slopes[..., None] * differences).sum(2)


def _weights(pairs: Pairs, s: jax.Array, t: jax.Array, power: int, left: jax.Array | None, right: jax.Array | None):
    costs = cost(pairs)
    plan = jnp.exp(s[:, :, None] + t[:, None, :] - costs / pairs.epsilon[:, None, None])
    for _ in range(power):
        plan = jnp.where(plan == 0, 0, plan * costs)
    if left is not None:
        plan = plan * product(left, jnp.swapaxes(right, -1, -2))
    return plan
