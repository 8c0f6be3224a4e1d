"""The operation on JAX arrays, inside or outside of ``jit``, ``grad`` and ``vmap``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs, prepare

from . import jax_acceleration, jax_ragged, jax_streams
from .costs import broadcast_batch
from .jax_costs import as_jax
from .jax_duals import Updates
from .jax_implicit import implicit
from .jax_loop import State, iterate
from .jax_problem import Control, checked_control, choose, flat, make_problem, starting_point
from .jax_solution import Solution
from .jax_streams import Wants, instantiated, moment, values_of
from .jax_unbalanced import Penalty, make_penalty
from .jax_unrolled import unrolled


def solve(
    cost: Any, a: Any, b: Any, *, epsilon: Any, reach: Any, max_iterations: Any, tolerance: Any, check_every: Any,
    acceleration: Any, init: Any, gradient: Any, gradient_tolerance: Any, precision: Any, backend: Any, norm: Any,
) -> Any:
    """`ops.sinkhorn.solve` for JAX arrays: inside or outside of ``jit``, ``grad`` and ``vmap``."""
    control = checked_control(
        max_iterations, tolerance, check_every, norm, acceleration, precision, gradient, gradient_tolerance
    )
    solved = partial(_solved, control, tolerance, backend)
    if isinstance(cost, list | tuple):
        return jax_ragged.solve(cost, a, b, epsilon, reach, init, solved)
    return solved(cost, a, b, epsilon, reach, init)


def _solved(
    control: Control, tolerance: Any, backend: Any, cost: Any, a: Any, b: Any, epsilon: Any, reach: Any, init: Any,
    sizes: tuple[jax.Array, jax.Array] | None = None,
) -> Solution:
    """``sizes``: rows and columns of each problem, where a batch is padded."""
    problem, batch = make_problem(cost, a, b, epsilon, reach)
    kernel = choose(problem, backend)
    pairs = prepare(problem.x, problem.y, problem.epsilon, problem.metric)
    f, penalty = starting_point(problem, batch, init), make_penalty(problem.reach, problem.offsets)
    given = pairs, problem.a, problem.b, f, penalty
    envelope = control.gradient == "envelope"
    if envelope:
        given = jax.lax.stop_gradient(given)
    stages = _stages(pairs, control.stages, sizes) if control.stages else None
    state = _solve(kernel, control, *given, jnp.asarray(tolerance, f.dtype), stages)
    weights = problem.a, problem.b
    return Solution(kernel, batch, envelope, pairs, weights, problem.offsets, problem.reach, state)


def softmin(cost: Any, h: Any, epsilon: Any, *, guess: Any = None, backend: Any = None) -> jax.Array:
    """`ops.sinkhorn.softmin` for JAX arrays; a guess (n,) at the result of one problem may save time."""
    problem, batch = make_problem(cost, None, None, epsilon)
    h_, m = as_jax(h, "h"), problem.b.shape[1]
    if h_.shape[-1:] != (m,):
        raise ValueError(f"h has shape {h_.shape}; accepted is (..., {m}) for a cost {cost.shape}")
    wider = broadcast_batch(batch, h_.shape[:-1], "cost", "h")
    if wider != batch:  # ε and the cost follow h
        epsilon_ = problem.epsilon.reshape(batch)
        problem, batch = make_problem(cost, None, None, jnp.broadcast_to(epsilon_, wider))[0], wider
    pairs = prepare(problem.x, problem.y, problem.epsilon, problem.metric)
    alpha, beta = problem.offsets or (jnp.zeros((), problem.a.dtype),) * 2
    h_ = flat(h_.astype(problem.a.dtype), batch, 1) - beta / problem.epsilon[:, None]
    near = None if guess is None else jax.lax.stop_gradient(jnp.asarray(guess, h_.dtype))[None] - alpha
    return (jax_streams.softmin(choose(problem, backend), pairs, h_, near) + alpha).reshape(*batch, -1)


def plan_product(cost: Any, s: Any, t: Any, values: Any, epsilon: Any, *, backend: Any = None) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) values_j, (n,), for one problem: s (n,), t and values (m,). Streamed, differentiable.

    Exponents are taken as they are, so s and t must keep them in range.
    """
    problem, _ = make_problem(cost, None, None, epsilon)
    pairs = prepare(problem.x, problem.y, problem.epsilon, problem.metric)
    s, t, values = (jnp.asarray(part, problem.a.dtype)[None] for part in (s, t, values))
    return moment(choose(problem, backend), 0, pairs, s, t, values[:, :, None])[0, :, 0]


@partial(jax.jit, static_argnums=(1,))
def _stages(pairs: Pairs, most: int, sizes: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    return jax_acceleration.stages(pairs, most, sizes)


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve(
    kernel: Any, control: Control, pairs: Pairs, a: jax.Array, b: jax.Array, f: jax.Array, penalty: Penalty | None,
    tolerance: jax.Array, stages: jax.Array | None,
) -> State:
    return iterate(kernel, control, pairs, a, b, f, tolerance, penalty, stages)[0]


def _solve_fwd(kernel: Any, control: Control, *arguments: Any) -> Any:
    wants = Wants.of(arguments[0])
    pairs, a, b, f, penalty, tolerance, stages = values_of(arguments)
    saving = control.gradient == "unrolled"
    state, saved = iterate(kernel, control, pairs, a, b, f, tolerance, penalty, stages, saving)
    return state, (wants, pairs, a, b, penalty, state, saved)


def _solve_bwd(kernel: Any, control: Control, residual: Any, cotangent: Any) -> Any:
    wants, pairs, a, b, penalty, state, saved = residual
    by_f, by_g = instantiated(cotangent[0], state.f), instantiated(cotangent[1], state.g)
    updates = Updates(kernel, pairs, a, b, penalty)
    if control.gradient == "implicit":
        total, by_start = implicit(updates, wants, state, control.residual, by_f, by_g), jnp.zeros_like(by_f)
    else:
        total, by_start = unrolled(updates, wants, control, state.iterations, saved, by_f, by_g)
    duals, weights = total.duals, (updates.a, updates.b)
    by_a, by_b = (_by_weight(*pair) for pair in zip(weights, (duals.log_a, duals.log_b), strict=True))
    return total.of_pairs, by_a, by_b, jnp.where(updates.a > 0, by_start, 0), duals.penalty, None, None


def _by_weight(weight: jax.Array, by_log: jax.Array) -> jax.Array:
    return jnp.where(weight > 0, by_log / jnp.where(weight > 0, weight, 1), 0)


_solve.__wrapped__.defvjp(_solve_fwd, _solve_bwd, symbolic_zeros=True)
