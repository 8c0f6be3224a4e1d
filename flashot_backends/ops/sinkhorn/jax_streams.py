"""Differentiable streamed reductions of JAX arrays: softmin, and products with a plan.

A kernel offers `hold(pairs)`, `lse(pairs, h, guess)`, `reduce(pairs, s, t, values, power, left, right)` and, if it has
metrics whose differences do not expand, `pull(pairs, s, t, left, right, power)`, see `kernels/sinkhorn/jax_blocks.py`;
everything is made of those, and none is differentiated in reverse.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs, product


def minus(epsilon: jax.Array, sums: jax.Array) -> jax.Array:
    """−ε times a log-sum-exp, (B, n)."""
    return -epsilon[:, None] * sums


class Wants(NamedTuple):
    """Which gradients are asked for: () for yes, None for no, so that jit passes them on."""

    cost: tuple[()] | None
    epsilon: tuple[()] | None

    @classmethod
    def of(cls, pairs: Pairs) -> Wants:
        """What moves, of costs that carry the marks of ``symbolic_zeros``."""
        parts = (pairs.x, pairs.y, pairs.matrix)
        moved = any(part is not None and part.perturbed for part in parts)
        return cls(() if moved else None, () if pairs.epsilon.perturbed else None)


def values_of(tree: Any) -> Any:
    """Strip the marks of which inputs move."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))


def instantiated(cotangent: Any, like: jax.Array) -> jax.Array:
    """A gradient as an array, also where it is known to be zero."""
    return jnp.zeros_like(like) if isinstance(cotangent, jax.custom_derivatives.SymbolicZero) else cotangent


@partial(jax.jit, static_argnums=(0,))
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def softmin(kernel: Any, pairs: Pairs, h: jax.Array, guess: jax.Array | None = None) -> jax.Array:
    """−ε log Σ_j exp(h_j − C_ij/ε), (B, m) to (B, n); it may be near a guess."""
    near = None if guess is None else -guess / pairs.epsilon[:, None]
    return minus(pairs.epsilon, kernel.lse(pairs, h, near))


def _softmin_fwd(kernel: Any, *arguments: Any) -> Any:
    wants = Wants.of(arguments[0])
    pairs, h, guess = values_of(arguments)
    out = softmin.__wrapped__(kernel, pairs, h, guess)
    return out, (wants, pairs, h, out)


def _softmin_bwd(kernel: Any, residual: Any, grad: Any) -> Any:
    wants, pairs, h, out = residual
    return *softmin_gradient(kernel, wants, pairs, h, out, instantiated(grad, out)), None


softmin.__wrapped__.defvjp(_softmin_fwd, _softmin_bwd, symbolic_zeros=True)


def softmin_gradient(
    kernel: Any, wants: Wants, pairs: Pairs, h: jax.Array, out: jax.Array, grad: jax.Array
) -> tuple[Pairs, jax.Array]:
    """Gradients of a softmin by the costs and ε, and by h; none through left-out columns and infinite results."""
    nowhere = out == jnp.inf
    out, grad = jnp.where(nowhere, 0, out), jnp.where(nowhere, 0, grad)
    s = out / pairs.epsilon[:, None]
    cost, columns = _softmin_by_cost(kernel, wants.cost is not None, pairs, s, h, grad)
    by_epsilon = jnp.zeros_like(pairs.epsilon)
    if wants.epsilon is not None:
        moment = kernel.reduce(pairs, s, h, jnp.ones_like(h)[:, :, None], 1)[:, :, 0]
        by_epsilon = ((out - moment) * grad).sum(-1) / pairs.epsilon
    return _of_pairs(pairs, cost, by_epsilon), jnp.where(h == -jnp.inf, 0, minus(pairs.epsilon, columns))


def _softmin_by_cost(kernel: Any, needed: bool, pairs: Pairs, s: Any, h: Any, grad: Any) -> tuple[Any, Any]:
    """Σ W ∂C by x, y and the matrix for W_ij = grad_i p_ij, and the column sums of W."""
    nothing = tuple(None if part is None else jnp.zeros_like(part) for part in pairs[:3])
    if pairs.matrix is not None and needed:
        weights = grad[:, :, None] * plan(pairs, s, h)
        return (None, None, summed(pairs.laid(weights), pairs.matrix)), weights.sum(1)
    if not needed:
        return nothing, kernel.reduce(pairs.T, h, s, grad[:, :, None])[:, :, 0]
    if pairs.metric != "sqeuclidean":
        ones, grad = jnp.ones_like(h)[:, :, None], grad[:, :, None]
        by_x, by_y = kernel.pull(pairs, s, h, grad, ones), kernel.pull(pairs.T, h, s, ones, grad)
        columns = kernel.reduce(pairs.T, h, s, grad)[:, :, 0]
        return (summed(by_x, pairs.x), summed(by_y, pairs.y), None), columns
    columns = kernel.reduce(pairs.T, h, s, grad[:, :, None] * _with_ones(pairs.x))
    rows = kernel.reduce(pairs, s, h, _with_ones(pairs.y)) * grad[:, :, None]
    return (*_pulled(pairs, rows, columns), None), columns[:, :, 0]


def _of_pairs(pairs: Pairs, cost: tuple[Any, ...], epsilon: jax.Array) -> Pairs:
    """Gradients in the form of what they are of."""
    return pairs._replace(x=cost[0], y=cost[1], matrix=cost[2], epsilon=epsilon, held=None)


def _with_ones(points: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.ones_like(points[:, :, :1]), points], -1)


def _pulled(pairs: Pairs, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients by the points from Σ_j W_ij (1, y_j) and Σ_i W_ij (1, x_i)."""
    by_x = 2 * (rows[:, :, :1] * pairs.x - rows[:, :, 1:])
    by_y = 2 * (columns[:, :, :1] * pairs.y - columns[:, :, 1:])
    return summed(by_x, pairs.x), summed(by_y, pairs.y)


def summed(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Add up the problems that share one cost."""
    shared = like.shape[0] == 1 and gradient.shape[0] != 1
    return gradient.sum(0, keepdims=True) if shared else gradient


def plan(pairs: Pairs, s: jax.Array, t: jax.Array) -> jax.Array:
    """exp(s_i + t_j − C_ij/ε) of a matrix of costs, (B, n, m)."""
    return jnp.exp(s[:, :, None] + t[:, None, :] - pairs.costs / pairs.epsilon[:, None, None])


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def moment(kernel: Any, power: int, pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array) -> jax.Array:
    """Σ_j P_ij C_ij^power values_j, (B, n, k), with P_ij = exp(s_i + t_j − C_ij/ε) and values (B, m, k)."""
    return kernel.reduce(pairs, s, t, values, power)


def _moment_fwd(kernel: Any, power: int, *arguments: Any) -> Any:
    wants = Wants.of(arguments[0])
    pairs, s, t, values = values_of(arguments)
    out = kernel.reduce(pairs, s, t, values, power)
    return out, (wants, pairs, s, t, values, out)


def _moment_bwd(kernel: Any, power: int, residual: Any, grad: Any) -> Any:
    wants, pairs, s, t, values, out = residual
    grad = instantiated(grad, out)
    by_values = kernel.reduce(pairs.T, t, s, grad, power)
    by_s, by_t = (grad * out).sum(-1), (by_values * values).sum(-1)
    cost = tuple(None if part is None else jnp.zeros_like(part) for part in pairs[:3])
    by_epsilon = jnp.zeros_like(pairs.epsilon)
    if wants.cost is not None:
        cost = _moment_by_cost(kernel, power, pairs, s, t, grad, values)
    if wants.epsilon is not None:
        ones = jnp.ones_like(t)[:, :, None]
        total = kernel.reduce(pairs, s, t, ones, power + 1, grad, values).sum((1, 2))
        by_epsilon = total / pairs.epsilon**2
    return _of_pairs(pairs, cost, by_epsilon), by_s, by_t, by_values


moment.__wrapped__.defvjp(_moment_fwd, _moment_bwd, symbolic_zeros=True)


def _moment_by_cost(kernel: Any, power: int, pairs: Pairs, s: Any, t: Any, left: Any, right: Any) -> Any:
    """Σ W ∂C for W_ij = P_ij (left_i·right_j) ∂(C^p exp(−C/ε))/exp(−C/ε), that is p C^(p−1) − C^p/ε, for p 0 or 1."""
    factor = -1 / pairs.epsilon[:, None, None]
    if pairs.matrix is not None:
        found = plan(pairs, s, t)
        costs = jnp.where(found == 0, 0, pairs.costs)
        weights = found * product(left, jnp.swapaxes(right, -1, -2)) * (power + factor * costs**power)
        return None, None, summed(pairs.laid(weights), pairs.matrix)
    if pairs.metric != "sqeuclidean":
        return *_moment_by_points(kernel, power, pairs, s, t, left, right), None

    def side(pairs: Pairs, *operands: Any) -> jax.Array:
        s, t, left, right = operands
        ones = _with_ones(pairs.y)
        total = factor * kernel.reduce(pairs, s, t, ones, power, left, right)
        return total + kernel.reduce(pairs, s, t, ones, 0, left, right) if power else total

    return *_pulled(pairs, side(pairs, s, t, left, right), side(pairs.T, t, s, right, left)), None


def _moment_by_points(kernel: Any, power: int, pairs: Pairs, s: Any, t: Any, left: Any, right: Any) -> Any:
    """The same by the points of a metric whose differences do not expand."""

    def side(pairs: Pairs, *operands: Any) -> jax.Array:
        total = -kernel.pull(pairs, *operands, power) / pairs.epsilon[:, None, None]
        return total + kernel.pull(pairs, *operands, 0) if power else total

    by_x, by_y = side(pairs, s, t, left, right), side(pairs.T, t, s, right, left)
    return summed(by_x, pairs.x), summed(by_y, pairs.y)
