"""Derivatives of the fixed point, whatever loop found it: potentials by the implicit function theorem, values by the
envelope theorem. Memory does not grow with the iterations.

At the fixed point P1 = a e^(−f/ρ_a) and Pᵀ1 = b e^(−g/ρ_b), with P_ij = a_i b_j exp((f_i + g_j − C_ij)/ε); balanced
transport is ρ = ∞. Its Jacobian by (f, g), times ε, is the symmetric matrix

    H = [[κ_a diag(P1), P], [Pᵀ, κ_b diag(Pᵀ1)]],   κ = 1 + ε/ρ,

so that a gradient (u_f, u_g) by the potentials is carried on by (λ, μ) = H⁻¹ (u_f, u_g): with W_ij = P_ij (λ_i + μ_j)
it is W by the costs, ε (λ P1 − W1)/a by a, the same by b, and Σ W (f + g − C)/ε by ε. Without penalties H has one null
vector, (1, −1): potentials are determined up to a constant that passes between them. Cuturi, Meng-Papaxanthos, Tian,
Bunne, Davis and Teboul, "Optimal transport tools", 2022, solve such systems too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import scaling

from . import formulas, torch_ops
from .problem import Problem, log_weights
from .streamed import StreamedOp, cost_gradients, fake_cost, given, plain

# Relative residual of the linear system, by default, and the most steps towards it, of two passes over the pairs each.
RESIDUAL = {torch.float64: 1e-10, torch.float32: 1e-6}
MOST_STEPS = 2000
PATIENCE = 60  # steps without progress: rounding allows no more
LOOK_EVERY = 4


def attach(
    problem: Problem, f: Tensor, g: Tensor, tolerance: float | None, how: tuple[str, str, str]
) -> tuple[Tensor, Tensor]:
    """The potentials of a fixed point, with its derivative by x, y or M, a, b, ε and the cost's one-sided terms."""
    x, y, a, b, epsilon = problem[:5]
    # Without a reach the potentials inside, of the cost without its one-sided terms, do not depend on those.
    alpha, beta = problem.offsets if problem.offsets and problem.reach is not None else (None, None)
    kappa_a, kappa_b = stretches(epsilon, problem.reach)
    f, g = fixed_point(x, y, a, b, epsilon, f, g, kappa_a, kappa_b, alpha, beta, tolerance or 0.0, *how)
    if problem.weighted:
        f, g = (
            extension(x, y, a, b, epsilon, f, g, kappa_a, alpha, *how),
            extension(*exchanged(x, y), b, a, epsilon, g, f, kappa_b, beta, *how),
        )
    return f, g


def exchanged(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The cost's tensors with rows and columns exchanged."""
    return (x.transpose(-1, -2), None) if y is None else (y, x)


def stretches(epsilon: Tensor, reach: Tensor | None) -> tuple[Tensor, Tensor]:
    """κ = 1 + ε/ρ of rows and of columns, (B,)."""
    if reach is None:
        return torch.ones_like(epsilon), torch.ones_like(epsilon)
    return 1 + epsilon / reach[:, 0], 1 + epsilon / reach[:, 1]


def scalings(a: Tensor, b: Tensor, f: Tensor, g: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
    """log a + f/ε and log b + g/ε; mass that can go nowhere (with a reach it may stay) is left out."""
    s, t = (scaling(log_weights(torch.where(p.isinf(), 0.0, w)), p, epsilon) for w, p in ((a, f), (b, g)))
    return s, t


def ratio(part: Tensor, weight: Tensor) -> Tensor:
    """part/weight, zero without mass."""
    return torch.where(weight > 0, part / torch.where(weight > 0, weight, 1.0), 0.0)


# -------------------------------------------------------------------------------------------------- the linear system


@StreamedOp
def adjoint(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, kappa_a: Tensor, kappa_b: Tensor, u_f: Tensor,
    u_g: Tensor, tolerance: float, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor]:
    """(λ, μ) = H⁻¹ (u_f, u_g), (B, n) and (B, m); what rows and columns without mass get is zero.

    By conjugate gradients on (κ_a − K Kᵀ/κ_b) z, K = diag(P1)^(−1/2) P diag(Pᵀ1)^(−1/2), whose eigenvalues lie in
    [0, κ_a]. Balanced, the part of u along the null vector is taken off (as if ⟨a, f⟩ − ⟨b, g⟩ were held), and λ, μ
    come without it.
    """
    operator = torch_ops.operator_of(x, y, epsilon, metric, precision, backend)
    system = System(operator, s, t, kappa_a.double(), kappa_b.double())
    lam, mu = system.solve(u_f.double(), u_g.double(), tolerance or RESIDUAL[operator.dtype])
    return lam.to(operator.dtype), mu.to(operator.dtype)


class System:
    """H of a batch, applied by streamed products; vectors in float64."""

    def __init__(self, operator: Any, s: Tensor, t: Tensor, kappa_a: Tensor, kappa_b: Tensor):
        self.rows_of, self.columns_of, self.s, self.t = operator, operator.T, s, t
        self.kappa_a, self.kappa_b = kappa_a[:, None], kappa_b[:, None]
        self.balanced = ((self.kappa_a == 1) & (self.kappa_b == 1)).double()
        self.rows, self.columns = self.forward(torch.ones_like(t)), self.backward(torch.ones_like(s))
        self.root_rows, self.root_columns = self.rows.sqrt(), self.columns.sqrt()

    def forward(self, v: Tensor) -> Tensor:
        """P v."""
        return self.rows_of.apply(self.s, self.t, v.to(self.s.dtype)[:, :, None])[:, :, 0].double()

    def backward(self, u: Tensor) -> Tensor:
        """Pᵀ u."""
        return self.columns_of.apply(self.t, self.s, u.to(self.s.dtype)[:, :, None])[:, :, 0].double()

    def solve(self, u_f: Tensor, u_g: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
        """H⁻¹ (u_f, u_g)."""
        u_f, u_g = torch.where(self.rows > 0, u_f, 0.0), torch.where(self.columns > 0, u_g, 0.0)
        mass = self.rows.sum(-1, keepdim=True) + self.columns.sum(-1, keepdim=True)
        share = self.balanced * (u_f.sum(-1, keepdim=True) - u_g.sum(-1, keepdim=True)) / mass
        u_f, u_g = u_f - share * self.rows, u_g + share * self.columns
        right = u_f - self.forward(ratio(u_g, self.columns)) / self.kappa_b
        z = conjugate_gradients(self._reduced, self._without_null(ratio(right, self.root_rows)), tolerance)
        lam = ratio(self._without_null(z), self.root_rows)
        mu = ratio(u_g - self.backward(lam), self.columns) / self.kappa_b
        drift = (self.rows * lam).sum(-1, keepdim=True) - (self.columns * mu).sum(-1, keepdim=True)
        drift = self.balanced * drift / mass
        lam, mu = lam - drift, mu + drift
        return torch.where(self.rows > 0, lam, 0.0), torch.where(self.columns > 0, mu, 0.0)

    def _reduced(self, z: Tensor) -> Tensor:
        inner = ratio(self.backward(ratio(z, self.root_rows)), self.columns) / self.kappa_b
        return self._without_null(self.kappa_a * z - ratio(self.forward(inner), self.root_rows))

    def _without_null(self, z: Tensor) -> Tensor:
        """z less its part along diag(P1)^(1/2) 1, the null vector of balanced transport."""
        along = (z * self.root_rows).sum(-1, keepdim=True) / self.rows.sum(-1, keepdim=True)
        return z - self.balanced * along * self.root_rows


def conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor, tolerance: float) -> Tensor:
    """Solve a batch of symmetric positive semidefinite systems, (B, n), each to its own residual."""
    z, residual, direction = torch.zeros_like(right), right, right
    squared = residual.square().sum(-1)
    goal = tolerance**2 * squared
    best, since = squared.clone(), 0
    for step in range(MOST_STEPS):
        if step % LOOK_EVERY == 0:
            since = 0 if bool((squared < 0.5 * best).any()) else since + LOOK_EVERY
            best = torch.minimum(best, squared)
            if since > PATIENCE or bool((squared <= goal).all()):
                break
        image = apply(direction)
        curvature = (direction * image).sum(-1)
        active = (squared > goal) & (curvature > 0)
        length = torch.where(active, squared / torch.where(active, curvature, 1.0), 0.0)[:, None]
        z, residual = z + length * direction, residual - length * image
        before, squared = squared, torch.where(active, residual.square().sum(-1), squared)
        direction = residual + ratio(squared, before)[:, None] * direction
    _report(squared, goal, tolerance)
    return z


def _report(squared: Tensor, goal: Tensor, tolerance: float) -> None:
    short = squared > 1e4 * goal
    if bool(short.any()):
        reached = tolerance * float((squared / goal)[short].max().sqrt())
        warnings.warn(
            f"the linear system of gradient='implicit' was solved to a relative residual of {reached:.1e} only, not "
            f"{tolerance:.1e}; a larger epsilon or float64 lets it converge",
            RuntimeWarning,
            stacklevel=2,
        )


@adjoint.fake
def _(x, y, s, t, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(s), torch.empty_like(t)


def _adjoint_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.tolerance, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(*tensors, *output)


def _adjoint_grad(ctx: Any, by_lam: Tensor, by_mu: Tensor) -> Any:
    """H is symmetric: with (p, q) = H⁻¹ (by λ, by μ) it is (p, q) by u, and −⟨(p, q), ∂H (λ, μ)⟩ by the rest."""
    x, y, s, t, epsilon, kappa_a, kappa_b, _, _, lam, mu = ctx.saved_tensors
    need, how = ctx.needs_input_grad, ctx.how
    p, q = adjoint(x, y, s, t, epsilon, kappa_a, kappa_b, by_lam, by_mu, ctx.tolerance, *how)
    wide_a, wide_b = (kappa.to(s.dtype)[:, None] for kappa in (kappa_a, kappa_b))
    u = torch.stack([wide_a * p * lam, p, lam, torch.ones_like(lam)], -1)
    v = torch.stack([torch.ones_like(mu), mu, q, wide_b * q * mu], -1)
    out = torch_ops.apply(x, y, s, t, epsilon, v, *how)
    by_x, by_y, by_s, by_t, by_epsilon, _ = torch_ops.apply_backward(
        x, y, s, t, epsilon, v, out, -u, need[0] or need[1], need[4], *how
    )
    by_a = -(p * lam * out[:, :, 0]).sum(-1).to(kappa_a.dtype)
    columns = torch_ops.apply(*exchanged(x, y), t, s, epsilon, torch.ones_like(s)[:, :, None], *how)[:, :, 0]
    by_b = -(q * mu * columns).sum(-1).to(kappa_b.dtype)
    return given(by_x, x), given(by_y, y), by_s, by_t, by_epsilon, by_a, by_b, p, q, *[None] * 4


adjoint.derivative(_adjoint_grad, _adjoint_setup)

# ---------------------------------------------------------------------------------------------------------- potentials


@StreamedOp
def fixed_point(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, kappa_a: Tensor,
    kappa_b: Tensor, alpha: Tensor | None, beta: Tensor | None, tolerance: float, metric: str, precision: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The potentials as they are, (B, n) and (B, m): the operation exists for its derivative, by all but f and g.

    The derivative by ε is the whole one, κ = 1 + ε/ρ included. ``alpha`` (B, n) and ``beta`` (B, m) are the cost's
    terms of one side; None where the marginals are binding, as nothing depends on them then.
    """
    return f.clone(), g.clone()


@fixed_point.fake
def _(x, y, a, b, epsilon, f, g, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(f), torch.empty_like(g)


@StreamedOp
def fixed_point_backward(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, grad_f: Tensor,
    grad_g: Tensor, kappa_a: Tensor, kappa_b: Tensor, one_sided: bool, need_cost: bool, need_epsilon: bool,
    tolerance: float, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, a, b, ε, and the cost's terms of rows and of columns."""
    how, real = (metric, precision, backend), epsilon.to(f.dtype)
    s, t = scalings(a, b, f, g, real)
    lam, mu = adjoint(x, y, s, t, epsilon, kappa_a, kappa_b, grad_f, grad_g, tolerance, *how)
    operator = torch_ops.operator_of(x, y, epsilon, *how)
    u, v = torch.stack([lam, torch.ones_like(lam)], -1), torch.stack([torch.ones_like(mu), mu], -1)
    to_rows, to_columns = operator.apply(s, t, v), operator.T.apply(t, s, u)
    by_a, by_b = -real[:, None] * ratio(to_rows[:, :, 1], a), -real[:, None] * ratio(to_columns[:, :, 0], b)
    by_epsilon = torch.zeros_like(epsilon)
    if need_epsilon:
        product = dot((u * to_rows).sum(-1), f) + dot((v * to_columns).sum(-1), g)
        moment = (u * operator.moment(s, t, v, 1)).sum((1, 2))
        by_epsilon = ((product - moment) / real).to(epsilon.dtype)
    cost = operator.weighted(s, t, u=u, v=v).cost if need_cost else None
    by_terms = _by_terms(one_sided, kappa_a, kappa_b, lam, mu, to_rows, to_columns)
    return *cost_gradients(cost, x, y), by_a, by_b, by_epsilon, *by_terms


def _by_terms(one_sided, kappa_a, kappa_b, lam, mu, to_rows, to_columns):  # type: ignore[no-untyped-def]
    """Gradients by the terms of one side, which P1 = a exp(−(f + α)/ρ) depends on: −(κ − 1) λ P1."""
    if not one_sided:
        return lam.new_empty(0), lam.new_empty(0)
    slack_a, slack_b = ((1 - kappa.to(lam.dtype))[:, None] for kappa in (kappa_a, kappa_b))
    return slack_a * lam * to_rows[:, :, 0], slack_b * mu * to_columns[:, :, 1]


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ_i first_i second_i, (B,); nothing where the first is zero, even by something infinite."""
    there = first != 0
    return torch.where(there, first * torch.where(there, second, 0.0), 0.0).sum(-1)


@fixed_point_backward.fake
def _(x, y, a, b, epsilon, f, g, grad_f, grad_g, kappa_a, kappa_b, one_sided, need_cost, *rest):  # type: ignore[no-untyped-def]
    terms = [torch.empty_like(w) if one_sided else a.new_empty(0) for w in (a, b)]
    return *fake_cost(x, y, need_cost), torch.empty_like(a), torch.empty_like(b), torch.empty_like(epsilon), *terms


def _fixed_point_formula(  # type: ignore[no-untyped-def]
    x, y, a, b, epsilon, f, g, grad_f, grad_g, kappa_a, kappa_b, one_sided, need_cost, need_epsilon, tolerance, *how
):
    real = epsilon.to(f.dtype)
    s, t = scalings(a, b, f, g, real)
    lam, mu = adjoint(x, y, s, t, epsilon, kappa_a, kappa_b, grad_f, grad_g, tolerance, *how)
    plan = formulas.Plan(x, y, s, t, epsilon, how)
    u, v = torch.stack([lam, torch.ones_like(lam)], -1), torch.stack([torch.ones_like(mu), mu], -1)
    to_rows, to_columns = plan.moment(v), plan.T.moment(u)
    by_a, by_b = -real[:, None] * ratio(to_rows[:, :, 1], a), -real[:, None] * ratio(to_columns[:, :, 0], b)
    nothing = x.new_empty(0)
    by_x, by_y = plan.pull_back(u, v) if need_cost else (nothing, nothing)
    by_epsilon = torch.zeros_like(epsilon)
    if need_epsilon:
        product = dot((u * to_rows).sum(-1), f) + dot((v * to_columns).sum(-1), g)
        moment = (u * plan.moment(v, 1)).sum((1, 2))
        by_epsilon = ((product - moment) / real).to(epsilon.dtype)
    by_terms = _by_terms(one_sided, kappa_a, kappa_b, lam, mu, to_rows, to_columns)
    return by_x, nothing if by_y is None else by_y, by_a, by_b, by_epsilon, *by_terms


def _fixed_point_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, a, b, epsilon, _, _, kappa_a, kappa_b, alpha, beta, *ctx.rest = inputs
    ctx.save_for_backward(x, y, a, b, epsilon, *output, kappa_a, kappa_b, alpha, beta)


def _fixed_point_grad(ctx: Any, grad_f: Tensor, grad_g: Tensor) -> Any:
    x, y, a, b, epsilon, f, g, kappa_a, kappa_b, alpha, beta = ctx.saved_tensors
    need, one_sided = ctx.needs_input_grad, alpha is not None
    by_x, by_y, *others, by_alpha, by_beta = fixed_point_backward(
        x, y, a, b, epsilon, f, g, grad_f, grad_g, kappa_a, kappa_b, one_sided, need[0] or need[1], need[4], *ctx.rest
    )
    terms = given(by_alpha, alpha), given(by_beta, beta)
    return given(by_x, x), given(by_y, y), *others, *[None] * 4, *terms, *[None] * 4


fixed_point.derivative(_fixed_point_grad, _fixed_point_setup)
fixed_point_backward.derivative(formulas.derivative_of(_fixed_point_formula), formulas.keep_inputs)


@StreamedOp
def extension(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, kappa: Tensor,
    alpha: Tensor | None, metric: str, precision: str, backend: str,
) -> Tensor:
    """f as it is, whose entries without mass owe their derivative to one update from g.

    f + α = (softmin(log b + g/ε) + α)/κ, where the softmin is that of the cost without its terms of rows α.
    """
    return f.clone()


@extension.fake
def _(x, y, a, b, epsilon, f, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(f)


def _extension_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(*tensors)


def _extension_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, a, b, epsilon, f, g, kappa, alpha = ctx.saved_tensors
    inner = torch.where(a > 0, 0.0, grad)
    if plain((x, grad)) and not bool(inner.any()):
        return *[None] * 5, grad, *[None] * 6
    need, real, kappa = ctx.needs_input_grad, epsilon.to(f.dtype)[:, None], kappa.to(f.dtype)[:, None]
    whole = f if alpha is None else f + alpha
    h, value = scaling(log_weights(b), g, real[:, 0]), f + (kappa - 1) * whole
    by_x, by_y, by_h, by_epsilon = torch_ops.softmin_backward(
        x, y, h, epsilon, value, inner / kappa, need[0] or need[1], *ctx.how
    )
    by_kappa = dot(inner, whole) / kappa[:, 0]
    through = dot(by_h, g) / real[:, 0] ** 2 + by_kappa * (kappa[:, 0] - 1) / real[:, 0]
    by_epsilon = by_epsilon - through.to(epsilon.dtype)
    return (
        given(by_x, x), given(by_y, y), None, ratio(by_h, b), by_epsilon, torch.where(a > 0, grad, 0.0), by_h / real,
        None, None if alpha is None else inner * (1 / kappa - 1), *[None] * 3,
    )  # fmt: skip


extension.derivative(_extension_grad, _extension_setup)

for operation in (adjoint, fixed_point, fixed_point_backward, extension):
    operation.batched()
