"""The value's derivatives at the optimum, with potentials held fixed: one streamed pass, and exact where the loop has
converged (envelope theorem). Their own derivatives follow the potentials, so that Hessians are right too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import formulas, torch_ops
from .implicit import dot, ratio, scalings
from .problem import log_weights
from .streamed import StreamedOp, cost_gradients, fake_cost, given


@StreamedOp
def optimum(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, alpha: Tensor | None,
    beta: Tensor | None, reach: Tensor | None, value: Tensor, entropy: bool, metric: str, precision: str, backend: str,
) -> Tensor:
    """The value (B,) as it is: the operation exists for its derivative, that of the minimum over plans.

    ``alpha`` (B, n) and ``beta`` (B, m) are the cost's terms of one side, which f and g do not contain; ``reach``
    (B, 2) the penalties ρ, infinite where a marginal is binding, as all are where it is None.
    """
    return value.clone()


@optimum.fake
def _(x, y, a, b, epsilon, f, g, alpha, beta, reach, value, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(value)


class Sums(NamedTuple):
    """What the gradients by vectors are made of: row and column sums of the plan, and ⟨P, C⟩ where ε needs it."""

    rows: Tensor
    columns: Tensor
    linear: Tensor | None


@StreamedOp
def optimum_backward(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, alpha: Tensor | None,
    beta: Tensor | None, reach: Tensor | None, grad: Tensor, need_cost: bool, need_epsilon: bool, entropy: bool,
    metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, a, b, ε and the cost's terms of rows and of columns."""
    how, real = (metric, precision, backend), epsilon.to(f.dtype)
    s, t = scalings(a, b, f, g, real)
    operator, cost = torch_ops.operator_of(x, y, epsilon, *how), None
    if need_cost:
        cost, rows, columns = operator.weighted(s, t, alpha=torch.ones_like(s))
        cost = tuple(part * grad[:, None, None] for part in cost)
    else:
        rows = operator.apply(s, t, torch.ones_like(t)[:, :, None])[:, :, 0]
        columns = operator.T.apply(t, s, torch.ones_like(s)[:, :, None])[:, :, 0]
    linear = operator.cost_apply(s, t).sum(-1) if need_epsilon else None
    others = _by_vectors(a, b, epsilon, f, g, alpha, beta, grad, Sums(rows, columns, linear), reach, entropy)
    return *cost_gradients(cost, x, y), *others


def _by_vectors(a, b, epsilon, f, g, alpha, beta, grad, sums, reach, entropy):  # type: ignore[no-untyped-def]
    """Gradients by a, b, ε and the one-sided terms; ``grad`` is the one by the value.

    By a_i: the marginal's multiplier, f_i or ρ (1 − P1_i/a_i), and what a_i does to the regularisation,
    ε (Σ b − P1_i/a_i). For "entropy", which knows no a, the multiplier is f_i + ε log a_i; its marginals are binding.
    """
    real, wide = epsilon.to(f.dtype), grad[:, None]
    rows, columns, linear = sums
    whole = (f if alpha is None else f + alpha), (g if beta is None else g + beta)
    masses = a.sum(-1), b.sum(-1)
    strengths = (None, None) if reach is None else (reach[:, :1].to(f.dtype), reach[:, 1:].to(f.dtype))
    by_weights = []
    for weight, potential, present, other, strength in zip(
        (a, b), whole, (rows, columns), masses[::-1], strengths, strict=True
    ):
        share, multiplier = ratio(present, weight), potential
        if strength is not None:
            bound = strength == torch.inf
            multiplier = torch.where(bound, multiplier, torch.where(bound, 0.0, strength) * (1 - share))
        by_regulariser = torch.where(weight > 0, log_weights(weight), 0.0) if entropy else other[:, None] - share
        multiplier = multiplier + real[:, None] * by_regulariser
        by_weights.append(torch.where(weight > 0, wide * torch.where(weight > 0, multiplier, 0.0), 0.0))
    by_epsilon = torch.zeros_like(epsilon)
    if linear is not None:
        s, t = scalings(a, b, f, g, real)
        plain = dot(rows, f) / real + dot(columns, g) / real + masses[0] * masses[1]
        regulariser = (dot(rows, s) + dot(columns, t) if entropy else plain) - linear / real - rows.sum(-1)
        by_epsilon = (grad * regulariser).to(epsilon.dtype)
    nothing = a.new_empty(0)
    one_sided = (nothing, a.new_empty(0)) if alpha is None else (wide * rows, wide * columns)
    return *by_weights, by_epsilon, *one_sided


@optimum_backward.fake
def _(x, y, a, b, epsilon, f, g, alpha, beta, reach, grad, need_cost, *rest):  # type: ignore[no-untyped-def]
    one_sided = [torch.empty_like(w) if alpha is not None else a.new_empty(0) for w in (a, b)]
    return (
        *fake_cost(x, y, need_cost), torch.empty_like(a), torch.empty_like(b), torch.empty_like(epsilon), *one_sided
    )  # fmt: skip


def _optimum_formula(  # type: ignore[no-untyped-def]
    x, y, a, b, epsilon, f, g, alpha, beta, reach, grad, need_cost, need_epsilon, entropy, *how
):
    real = epsilon.to(f.dtype)
    s, t = scalings(a, b, f, g, real)
    plan = formulas.Plan(x, y, s, t, epsilon, how)
    linear = plan.sums(1).sum(-1) if need_epsilon else None
    sums = Sums(plan.sums(), plan.T.sums(), linear)
    by_x = by_y = x.new_empty(0)
    if need_cost:
        wide = grad[:, None, None].expand(*s.shape, 1)
        by_x, by_y = plan.pull_back(wide, torch.ones_like(t)[:, :, None])  # type: ignore[assignment]
    others = _by_vectors(a, b, epsilon, f, g, alpha, beta, grad, sums, reach, entropy)
    return by_x, x.new_empty(0) if by_y is None else by_y, *others


def _optimum_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, entropy, metric, precision, backend = inputs
    ctx.rest = (entropy, metric, precision, backend)
    ctx.save_for_backward(*tensors)


def _optimum_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, a, b, epsilon, f, g, alpha, beta, reach = ctx.saved_tensors
    need = ctx.needs_input_grad
    by_x, by_y, by_a, by_b, by_epsilon, by_alpha, by_beta = optimum_backward(
        x, y, a, b, epsilon, f, g, alpha, beta, reach, grad, need[0] or need[1], need[4], *ctx.rest
    )
    one_sided = given(by_alpha, alpha), given(by_beta, beta)
    return given(by_x, x), given(by_y, y), by_a, by_b, by_epsilon, None, None, *one_sided, *[None] * 6


optimum.derivative(_optimum_grad, _optimum_setup)
optimum_backward.derivative(formulas.derivative_of(_optimum_formula), formulas.keep_inputs)


@StreamedOp
def held(potential: Tensor) -> Tensor:
    """A potential of gradient="envelope" as it is; whoever asks for its derivative is told where there is one."""
    return potential.clone()


@held.fake
def _(potential):  # type: ignore[no-untyped-def]
    return torch.empty_like(potential)


def _refuse(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError(
        "flashot_backends: gradient='envelope' gives the derivatives of value() alone, and this result depends on the "
        "potentials too; gradient='implicit' and 'unrolled' give those of every result"
    )


held.derivative(_refuse)

for operation in (optimum, optimum_backward, held):
    operation.batched()
