"""The operation on JAX arrays: loops that compile, and gradients that are streamed themselves.

A kernel offers `lse(pairs, h, guess)` and `reduce(pairs, s, t, values, power, left, right)`, see
`kernels/sinkhorn/jax_blocks.py`; everything here is made of those two. Neither is ever differentiated in reverse.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs, prepare, product

from .jax_problem import Control, Problem, as_jax, checked_control, choose, flat, make_problem, starting_point


class State(NamedTuple):
    """The outcome by problem: potentials (B, n) and (B, m), iterations, error, and whether it is small."""

    f: jax.Array
    g: jax.Array
    iterations: jax.Array
    error: jax.Array
    converged: jax.Array


def solve(
    cost: Any, a: Any, b: Any, *, epsilon: Any, max_iterations: Any, tolerance: Any, check_every: Any,
    acceleration: Any, init: Any, gradient: Any, gradient_tolerance: Any, precision: Any, backend: Any, norm: Any,
) -> Any:
    """`ops.sinkhorn.solve` for JAX arrays: inside or outside of ``jit``, ``grad`` and ``vmap``."""
    from .jax_solution import Solution

    control = checked_control(
        max_iterations, tolerance, check_every, norm, acceleration, precision, gradient, gradient_tolerance
    )
    problem, batch = make_problem(cost, a, b, epsilon)
    f = starting_point(problem, batch, init)
    kernel = choose(problem, backend)
    pairs = prepare(problem.x, problem.y, problem.epsilon)
    state = _solve(kernel, control, pairs, problem.a, problem.b, f, jnp.asarray(tolerance, f.dtype))
    return Solution(kernel, batch, pairs, problem.a, problem.b, state)


def softmin(cost: Any, h: Any, epsilon: Any, *, backend: Any) -> jax.Array:
    """`ops.sinkhorn.softmin` for JAX arrays."""
    problem, batch = make_problem(cost, None, None, epsilon)
    h_, m = as_jax(h, "h"), problem.b.shape[1]
    if h_.shape[-1:] != (m,):
        raise ValueError(f"h has shape {h_.shape}; accepted is (..., {m}) for a cost {cost.shape}")
    from .costs import broadcast_batch

    wider = broadcast_batch(batch, h_.shape[:-1], "cost", "h")
    if wider != batch:  # ε and the cost follow h
        epsilon_ = problem.epsilon.reshape(batch)
        problem, batch = make_problem(cost, None, None, jnp.broadcast_to(epsilon_, wider))[0], wider
    pairs = prepare(problem.x, problem.y, problem.epsilon)
    out = _softmin(choose(problem, backend), pairs, flat(h_.astype(problem.a.dtype), batch, 1))
    return out.reshape(*batch, -1)


def plan_product(cost: Any, s: Any, t: Any, values: Any, epsilon: Any, *, backend: Any = None) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) values_j, (n,), for one problem: s (n,), t and values (m,). Streamed, differentiable.

    Exponents are taken as they are, so s and t must keep them in range.
    """
    problem, _ = make_problem(cost, None, None, epsilon)
    pairs = prepare(problem.x, problem.y, problem.epsilon)
    s, t, values = (jnp.asarray(part, problem.a.dtype)[None] for part in (s, t, values))
    return moment(choose(problem, backend), 0, pairs, s, t, values[:, :, None])[0, :, 0]


def log_weights(given: jax.Array) -> jax.Array:
    """log a, −inf without mass; no gradient flows where there is no mass."""
    massive = given > 0
    return jnp.where(massive, jnp.log(jnp.where(massive, given, 1)), -jnp.inf)


def scaling(log_weight: jax.Array, potential: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log a + f/ε, and −inf without mass: its potential, +inf where it may go nowhere, has no derivative."""
    massless = log_weight == -jnp.inf
    return jnp.where(massless, -jnp.inf, log_weight + jnp.where(massless, 0, potential) / epsilon[:, None])


# --------------------------------------------------------------------------------------------------------- the loop


class _Loop(NamedTuple):
    """Where the loop is: after iteration k, with row potentials f from g, and ``after`` the columns' next."""

    k: jax.Array
    f: jax.Array
    g: jax.Array
    after: jax.Array
    saved: jax.Array  # (slots, B, n): f before every ``stride``-th iteration
    out: State  # iterations are 0 where a problem goes on


class _Updates:
    """The two half steps."""

    def __init__(self, kernel: Any, pairs: Pairs, a: jax.Array, b: jax.Array):
        self.kernel, self.pairs, self.columns_first = kernel, pairs, pairs.T
        self.epsilon = pairs.epsilon
        self.log_a, self.log_b = log_weights(a), log_weights(b)

    def rows(self, g: jax.Array, guess: jax.Array) -> jax.Array:
        """f from g."""
        return _minus(self.epsilon, self.kernel.lse(self.pairs, self.h_columns(g), -guess / self.epsilon[:, None]))

    def columns(self, f: jax.Array, guess: jax.Array) -> jax.Array:
        """g from f."""
        h, near = self.h_rows(f), -guess / self.epsilon[:, None]
        return _minus(self.epsilon, self.kernel.lse(self.columns_first, h, near))

    def h_rows(self, f: jax.Array) -> jax.Array:
        return scaling(self.log_a, f, self.epsilon)

    def h_columns(self, g: jax.Array) -> jax.Array:
        return scaling(self.log_b, g, self.epsilon)


def _minus(epsilon: jax.Array, sums: jax.Array) -> jax.Array:
    return -epsilon[:, None] * sums


def iterate(
    kernel: Any, control: Control, pairs: Pairs, a: jax.Array, b: jax.Array, f: jax.Array, tolerance: jax.Array,
    saving: bool = False,
) -> tuple[State, jax.Array]:
    """Alternate from the row potentials ``f``: columns, then rows, so that rows are exact at the end.

    A problem that has converged keeps its answer while the others go on. Returns the row potentials before every
    ``stride(control)``-th iteration too, if ``saving``.
    """
    updates = _Updates(kernel, pairs, a, b)
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


# ------------------------------------------------------------------------------------------------ its derivatives


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve(
    kernel: Any, control: Control, pairs: Pairs, a: jax.Array, b: jax.Array, f: jax.Array, tolerance: jax.Array
) -> State:
    return iterate(kernel, control, pairs, a, b, f, tolerance)[0]


class _Wants(NamedTuple):
    """Which gradients are asked for: () for yes, None for no, so that jit passes them on."""

    cost: tuple[()] | None
    epsilon: tuple[()] | None

    @classmethod
    def of(cls, pairs: Pairs) -> _Wants:
        parts = (pairs.x, pairs.y, pairs.matrix)
        moved = any(part is not None and part.perturbed for part in parts)
        return cls(() if moved else None, () if pairs.epsilon.perturbed else None)


def _values(tree: Any) -> Any:
    """Strip the marks of which inputs move."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))


def _instantiated(cotangent: Any, like: jax.Array) -> jax.Array:
    return jnp.zeros_like(like) if isinstance(cotangent, jax.custom_derivatives.SymbolicZero) else cotangent


def _solve_fwd(kernel: Any, control: Control, *arguments: Any) -> Any:
    wants = _Wants.of(arguments[0])
    pairs, a, b, f, tolerance = _values(arguments)
    state, saved = iterate(kernel, control, pairs, a, b, f, tolerance, saving=control.gradient == "unrolled")
    return state, (wants, pairs, a, b, state, saved)


def _solve_bwd(kernel: Any, control: Control, residual: Any, cotangent: Any) -> Any:
    wants, pairs, a, b, state, saved = residual
    by_f, by_g = _instantiated(cotangent[0], state.f), _instantiated(cotangent[1], state.g)
    updates = _Updates(kernel, pairs, a, b)
    if control.gradient == "implicit":
        total = _implicit(updates, wants, state, by_f, by_g)
    else:
        total = _unrolled(updates, wants, state.iterations, saved, stride(control), by_f, by_g)
    by_a, by_b = (
        jnp.where(w > 0, by_log / jnp.where(w > 0, w, 1), 0) for w, by_log in ((a, total.log_a), (b, total.log_b))
    )
    return total.pairs, by_a, by_b, total.f, None


_solve.__wrapped__.defvjp(_solve_fwd, _solve_bwd, symbolic_zeros=True)


class _Gradients(NamedTuple):
    """Sums over the half steps passed so far, and the gradient by the row potentials that are reached."""

    pairs: Pairs
    log_a: jax.Array
    log_b: jax.Array
    f: jax.Array

    @classmethod
    def none(cls, updates: _Updates) -> _Gradients:
        pairs, log_a, log_b = updates.pairs, updates.log_a, updates.log_b
        return cls(jax.tree.map(jnp.zeros_like, pairs), jnp.zeros_like(log_a), jnp.zeros_like(log_b), jnp.zeros_like(log_a))


class _Walk:
    """Passes half steps on the way back."""

    def __init__(self, updates: _Updates, wants: _Wants):
        self.updates, self.wants = updates, wants

    def row_update(self, total: _Gradients, g: jax.Array, f: jax.Array, grad: jax.Array) -> Any:
        """Pass f = softmin(log b + g/ε); return the sums and the gradient by g."""
        by_pairs, by_h = self._pass(self.updates.pairs, self.updates.h_columns(g), g, f, grad)
        return _plus(total, by_pairs, log_b=by_h), by_h / self.updates.epsilon[:, None]

    def column_update(self, total: _Gradients, f: jax.Array, g: jax.Array, grad: jax.Array) -> Any:
        """Pass g = softmin(log a + f/ε) along columns; return the sums and the gradient by f."""
        by_pairs, by_h = self._pass(self.updates.columns_first, self.updates.h_rows(f), f, g, grad)
        return _plus(total, by_pairs.T, log_a=by_h), by_h / self.updates.epsilon[:, None]

    def _pass(self, pairs: Pairs, h: jax.Array, potential: jax.Array, out: jax.Array, grad: jax.Array) -> Any:
        by_pairs, by_h = softmin_gradient(self.updates.kernel, self.wants, pairs, h, out, grad)
        if self.wants.epsilon is not None:
            through_h = jnp.where(by_h == 0, 0, by_h * potential).sum(-1) / pairs.epsilon**2
            by_pairs = by_pairs._replace(epsilon=by_pairs.epsilon - through_h)
        return by_pairs, by_h


def _plus(total: _Gradients, pairs: Pairs, log_a: Any = 0, log_b: Any = 0) -> _Gradients:
    return _Gradients(
        jax.tree.map(jnp.add, total.pairs, pairs), total.log_a + log_a, total.log_b + log_b, total.f
    )


def _unrolled(
    updates: _Updates, wants: _Wants, iterations: jax.Array, saved: jax.Array, every: int, by_f: jax.Array,
    by_g: jax.Array,
) -> _Gradients:
    """Vector-Jacobian product of the iterations: walk back through segments that are recomputed from ``saved``."""
    walk, count = _Walk(updates, wants), iterations.max(initial=0)

    def segment(i: Any, total: _Gradients) -> _Gradients:
        slot = (count - 1) // every - i
        steps = jnp.minimum(every, count - slot * every)
        fs, gs = _history(updates, saved[slot], steps, every)

        def back(j: Any, total: _Gradients) -> _Gradients:
            at = steps - 1 - j
            ends_here = (iterations == slot * every + at + 1)[:, None]
            by_row = total.f + jnp.where(ends_here, by_f, 0)
            total, by_column = walk.row_update(total, gs[at], fs[at + 1], by_row)
            by_column = by_column + jnp.where(ends_here, by_g, 0)
            total, by_row = walk.column_update(total, fs[at], gs[at], by_column)
            return total._replace(f=by_row)

        return lax.fori_loop(0, steps, back, total)

    return lax.fori_loop(0, -(-count // every), segment, _Gradients.none(updates))


def _history(updates: _Updates, f: jax.Array, steps: jax.Array, every: int) -> tuple[jax.Array, jax.Array]:
    """Row potentials f_0 … and the column potentials g_1 … of one segment."""
    fs = jnp.zeros((every + 1, *f.shape), f.dtype).at[0].set(f)
    gs = jnp.zeros((every, *updates.log_b.shape), f.dtype)

    def step(i: Any, held: Any) -> Any:
        fs, gs, near = held
        g = updates.columns(fs[i], near)
        return fs.at[i + 1].set(updates.rows(g, fs[i])), gs.at[i].set(g), g

    return lax.fori_loop(0, steps, step, (fs, gs, jnp.zeros_like(updates.log_b)))[:2]


def softmin_gradient(
    kernel: Any, wants: _Wants, pairs: Pairs, h: jax.Array, out: jax.Array, grad: jax.Array
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
    return Pairs(*cost, by_epsilon), jnp.where(h == -jnp.inf, 0, _minus(pairs.epsilon, columns))


def _softmin_by_cost(kernel: Any, needed: bool, pairs: Pairs, s: Any, h: Any, grad: Any) -> Any:
    """Σ W ∂C by x, y and the matrix for W_ij = grad_i p_ij, and the column sums of W."""
    nothing = tuple(None if part is None else jnp.zeros_like(part) for part in pairs[:3])
    if pairs.matrix is not None and needed:
        weights = grad[:, :, None] * plan(pairs, s, h)
        return (None, None, summed(weights, pairs.matrix)), weights.sum(1)
    if not needed:
        return nothing, kernel.reduce(pairs.T, h, s, grad[:, :, None])[:, :, 0]
    columns = kernel.reduce(pairs.T, h, s, grad[:, :, None] * _with_ones(pairs.x))
    rows = kernel.reduce(pairs, s, h, _with_ones(pairs.y)) * grad[:, :, None]
    return (*_pulled(pairs, rows, columns), None), columns[:, :, 0]


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
    return jnp.exp(s[:, :, None] + t[:, None, :] - pairs.matrix / pairs.epsilon[:, None, None])


# --------------------------------------------------------------------------------------------- the implicit gradient

#: Where conjugate gradients stop: residual over right side, by dtype; and after how many steps at most.
RESIDUAL = {"float64": 1e-12, "float32": 1e-6}
MOST_STEPS = 1000


def _implicit(updates: _Updates, wants: _Wants, state: State, by_f: jax.Array, by_g: jax.Array) -> _Gradients:
    """Gradient of the fixed point f = softmin(g), g = softmin(f), by the implicit function theorem.

    The adjoints λ of the rows and μ of the columns solve λ = f̄ − Cᵀμ, μ = ḡ − Rᵀλ with R and C the plan over its row
    and its column sums. With μ = c ν, c the column sums, this is (diag c − Pᵀ diag(1/r) P) ν = ḡ − Rᵀ f̄: symmetric,
    positive on what is orthogonal to constants, solved by conjugate gradients with two streamed products a step.
    Constants are left out: a potential is determined up to one.
    """
    kernel, pairs, epsilon = updates.kernel, updates.pairs, updates.epsilon
    s, t = updates.h_rows(state.f), updates.h_columns(state.g)
    through = lambda v: kernel.reduce(pairs, s, t, v[:, :, None])[:, :, 0]  # noqa: E731
    back = lambda u: kernel.reduce(updates.columns_first, t, s, u[:, :, None])[:, :, 0]  # noqa: E731
    rows, columns = through(jnp.ones_like(t)), back(jnp.ones_like(s))
    over_rows = lambda u: jnp.where(rows > 0, u / jnp.where(rows > 0, rows, 1), 0)  # noqa: E731
    root = jnp.sqrt(columns)
    over_root = jnp.where(root > 0, 1 / jnp.where(root > 0, root, 1), 0)
    system = lambda y: y - over_root * back(over_rows(through(over_root * y)))  # noqa: E731
    right = over_root * (by_g - back(over_rows(by_f)))
    nu = over_root * _conjugate_gradients(system, right, root)
    mu = columns * nu
    lam = by_f - through(nu)
    walk = _Walk(updates, wants)
    f, g = updates.rows(state.g, state.f), updates.columns(state.f, state.g)
    total, _ = walk.row_update(_Gradients.none(updates), state.g, f, lam)
    total, _ = walk.column_update(total, state.f, g, mu)
    return total


def _conjugate_gradients(system: Any, right: jax.Array, null: jax.Array) -> jax.Array:
    """Solve system(y) = right, by problem, orthogonally to the vector ``null`` that the system annihilates."""
    unit = null / jnp.sqrt(_dot(null, null))
    project = lambda y: y - _dot(unit, y) * unit  # noqa: E731
    right = project(right)
    enough = _dot(right, right) * RESIDUAL[str(right.dtype)] ** 2

    def goes_on(held: Any) -> jax.Array:
        return ((held[3] > enough).any()) & (held[4] < MOST_STEPS)

    def step(held: Any) -> Any:
        y, residual, direction, size, count = held
        image = project(system(direction))
        curvature = _dot(direction, image)
        length = jnp.where((size > enough) & (curvature > 0), size / jnp.where(curvature > 0, curvature, 1), 0)
        y, residual = y + length * direction, residual - length * image
        new = _dot(residual, residual)
        ratio = jnp.where(size > 0, new / jnp.where(size > 0, size, 1), 0)
        stuck = length == 0
        return y, residual, project(residual + ratio * direction), jnp.where(stuck, 0, new), count + 1

    start = jnp.zeros_like(right), right, right, _dot(right, right), jnp.int32(0)
    return lax.while_loop(goes_on, step, start)[0]


def _dot(first: jax.Array, second: jax.Array) -> jax.Array:
    return (first * second).sum(-1, keepdims=True)


# ----------------------------------------------------------------------------------------------------------- softmin


@partial(jax.jit, static_argnums=(0,))
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmin(kernel: Any, pairs: Pairs, h: jax.Array) -> jax.Array:
    return _minus(pairs.epsilon, kernel.lse(pairs, h, None))


def _softmin_fwd(kernel: Any, pairs: Any, h: Any) -> Any:
    wants = _Wants.of(pairs)
    pairs, h = _values((pairs, h))
    out = _minus(pairs.epsilon, kernel.lse(pairs, h, None))
    return out, (wants, pairs, h, out)


def _softmin_bwd(kernel: Any, residual: Any, grad: Any) -> Any:
    wants, pairs, h, out = residual
    return softmin_gradient(kernel, wants, pairs, h, out, _instantiated(grad, out))


_softmin.__wrapped__.defvjp(_softmin_fwd, _softmin_bwd, symbolic_zeros=True)


# ------------------------------------------------------------------------------------------ products with the plan


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def moment(kernel: Any, power: int, pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array) -> jax.Array:
    """Σ_j P_ij C_ij^power values_j, (B, n, k), with P_ij = exp(s_i + t_j − C_ij/ε) and values (B, m, k)."""
    return kernel.reduce(pairs, s, t, values, power)


def _moment_fwd(kernel: Any, power: int, *arguments: Any) -> Any:
    wants = _Wants.of(arguments[0])
    pairs, s, t, values = _values(arguments)
    out = kernel.reduce(pairs, s, t, values, power)
    return out, (wants, pairs, s, t, values, out)


def _moment_bwd(kernel: Any, power: int, residual: Any, grad: Any) -> Any:
    wants, pairs, s, t, values, out = residual
    grad = _instantiated(grad, out)
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
    return Pairs(*cost, by_epsilon), by_s, by_t, by_values


moment.__wrapped__.defvjp(_moment_fwd, _moment_bwd, symbolic_zeros=True)


def _moment_by_cost(kernel: Any, power: int, pairs: Pairs, s: Any, t: Any, left: Any, right: Any) -> Any:
    """Σ W ∂C for W_ij = P_ij (left_i·right_j) ∂(C^p exp(−C/ε))/exp(−C/ε), that is p C^(p−1) − C^p/ε, for p 0 or 1."""
    factor = -1 / pairs.epsilon[:, None, None]
    if pairs.matrix is not None:
        found = plan(pairs, s, t)
        costs = jnp.where(found == 0, 0, pairs.matrix)
        weights = found * product(left, jnp.swapaxes(right, -1, -2)) * (power + factor * costs**power)
        return None, None, summed(weights, pairs.matrix)

    def side(pairs: Pairs, *operands: Any) -> jax.Array:
        s, t, left, right = operands
        ones = _with_ones(pairs.y)
        total = factor * kernel.reduce(pairs, s, t, ones, power, left, right)
        return total + kernel.reduce(pairs, s, t, ones, 0, left, right) if power else total

    return *_pulled(pairs, side(pairs, s, t, left, right), side(pairs.T, t, s, right, left)), None
