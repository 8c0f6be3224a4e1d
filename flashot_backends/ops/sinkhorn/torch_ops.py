"""The operation as torch custom ops: opaque to ``torch.compile``, with gradients that are streamed themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import formulas, solver, unrolled
from .metrics import summed
from .problem import check_values, inspect_values
from .streamed import StreamedOp, cost_gradients, fake_cost, given
from .unbalanced import make_penalty


def _refuse_second(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "flashot_backends: second derivatives of gradient='unrolled' are not available, with any backend; those of "
        "gradient='implicit' are, and of 'envelope' for the value"
    )


def _twice(operation: StreamedOp, formula: Callable[..., Any]) -> None:
    """Let the result of a backward pass be differentiated, by the formula that it computes."""
    operation.derivative(formulas.derivative_of(formula), formulas.keep_inputs)


def operator_of(x: Tensor, y: Tensor | None, epsilon: Tensor, metric: str, precision: str, backend: str) -> Any:
    """Have the kernel in charge prepare the costs."""
    return solver.make_operator(x, y, epsilon, metric, precision, backend)


# ---------------------------------------------------------------------------------------------------------- softmin


@StreamedOp
def softmin(
    x: Tensor, y: Tensor | None, h: Tensor, epsilon: Tensor, metric: str, precision: str, backend: str
) -> Tensor:
    """−ε log Σ_j exp(h_j − C_ij/ε), (B, m) to (B, n)."""
    return operator_of(x, y, epsilon, metric, precision, backend).softmin(h)


@softmin.fake
def _(x, y, h, epsilon, metric, precision, backend):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape[0], x.shape[1])


@StreamedOp
def softmin_backward(
    x: Tensor, y: Tensor | None, h: Tensor, epsilon: Tensor, out: Tensor, grad: Tensor, need_cost: bool, metric: str,
    precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, h and ε."""
    operator = operator_of(x, y, epsilon, metric, precision, backend)
    cost, by_h, by_epsilon = solver.softmin_gradient(operator, h, out, grad, need_cost, True)
    assert by_epsilon is not None
    return *cost_gradients(cost, x, y), by_h, by_epsilon.to(epsilon.dtype)


@softmin_backward.fake
def _(x, y, h, epsilon, out, grad, need_cost, metric, precision, backend):  # type: ignore[no-untyped-def]
    return *fake_cost(x, y, need_cost), torch.empty_like(h), torch.empty_like(epsilon)


def _softmin_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, h, epsilon, *ctx.how = inputs
    ctx.save_for_backward(x, y, h, epsilon, output)


def _softmin_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, h, epsilon, out = ctx.saved_tensors
    need_cost = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    by_x, by_y, by_h, by_epsilon = softmin_backward(x, y, h, epsilon, out, grad, need_cost, *ctx.how)
    return given(by_x, x), given(by_y, y), by_h, by_epsilon, None, None, None


softmin.derivative(_softmin_grad, _softmin_setup)
_twice(softmin_backward, formulas.softmin_backward)

# ------------------------------------------------------------------------------------------------------------ solve


def outcome(
    tensors: tuple[Any, ...], control: solver.Control, kernel: tuple[str, str, str]
) -> tuple[Any, Callable[..., Any] | None]:
    """``solver.State`` as a tuple, and how the kernel would run the same again."""
    x, y, a, b, epsilon, f, reach, alpha, beta = tensors
    values = (x, y, a, b, epsilon, reach)
    operator = operator_of(x, y, epsilon, *kernel)
    look: Callable[[dict[str, float]], None] = partial(inspect_values, *values)
    if reach is not None or control.anneals:
        check_values(*values)
        look = _nothing_to_see
    missed = None if reach is None else solver.Missed(reach, None if alpha is None else (alpha, beta))
    found = solver.on_device(operator, a, b, f, control, look, missed)
    if found is not None:
        return tuple(found), None if control.anneals else operator.again
    if look is not _nothing_to_see:
        check_values(*values)
    penalty = make_penalty(reach, alpha, beta, operator.dtype)
    return tuple(solver.iterate(operator, a, b, f, control, penalty)), None


def _nothing_to_see(seen: dict[str, float]) -> None:
    """The values have been looked at."""


@StreamedOp
def solve(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, reach: Tensor | None,
    alpha: Tensor | None, beta: Tensor | None, max_iterations: int, tolerance: float, check_every: int, norm: str,
    acceleration: str, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``solver.State``: the outcome, by batch element.

    ``reach`` (B, 2) may be left out where both marginals are binding; then ``alpha`` and ``beta``, the terms of the
    cost that depend on its row (B, n) or column (B, m) alone, change nothing.
    """
    control = solver.Control(max_iterations, tolerance, check_every, norm, acceleration)
    return outcome((x, y, a, b, epsilon, f, reach, alpha, beta), control, (metric, precision, backend))[0]


@solve.fake
def _(x, y, a, b, epsilon, f, reach, alpha, beta, *how):  # type: ignore[no-untyped-def]
    batch, looks = a.shape[0], solver.Control(*how[:5]).looks
    return (
        torch.empty_like(a), torch.empty_like(b), a.new_empty(batch, dtype=torch.int64), a.new_empty(batch),
        a.new_empty(batch, dtype=torch.bool), a.new_empty(batch, looks), a.new_empty(batch, looks),
        a.new_empty(batch, dtype=torch.int64),
    )  # fmt: skip


@StreamedOp
def solve_backward(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, reach: Tensor | None,
    alpha: Tensor | None, beta: Tensor | None, iterations: Tensor, errors: Tensor, gaps: Tensor, stages: Tensor,
    grad_f: Tensor, grad_g: Tensor, need_cost: bool, need_epsilon: bool, max_iterations: int, tolerance: float,
    check_every: int, norm: str, acceleration: str, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, a, b, ε, the starting potential, and the cost's terms of rows and of columns."""
    operator = operator_of(x, y, epsilon, metric, precision, backend)
    control = solver.Control(max_iterations, tolerance, check_every, norm, acceleration)
    penalty, run = make_penalty(reach, alpha, beta, operator.dtype), unrolled.Run(iterations, errors, gaps, stages)
    found = unrolled.iterate_gradient(
        operator, a, b, f, control, penalty, run, (grad_f, grad_g), need_cost, need_epsilon
    )
    by_epsilon = torch.zeros_like(epsilon) if found.epsilon is None else found.epsilon.to(epsilon.dtype)
    by_alpha, by_beta = (x.new_empty(0) if part is None else part for part in (found.alpha, found.beta))
    return *cost_gradients(found.cost, x, y), found.a, found.b, by_epsilon, found.f, by_alpha, by_beta


@solve_backward.fake
def _(x, y, a, b, epsilon, f, reach, alpha, beta, *rest):  # type: ignore[no-untyped-def]
    offsets = (x.new_empty(0) if reach is None or part is None else torch.empty_like(part) for part in (alpha, beta))
    return (
        *fake_cost(x, y, rest[6]), torch.empty_like(a), torch.empty_like(b), torch.empty_like(epsilon),
        torch.empty_like(f), *offsets,
    )  # fmt: skip


def _solve_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.how = inputs[9:]
    _, _, iterations, error, converged, *history = output
    ctx.save_for_backward(*inputs[:9], iterations, *history)
    ctx.mark_non_differentiable(iterations, error, converged, *history)


def _solve_grad(ctx: Any, grad_f: Tensor, grad_g: Tensor, *_: Any) -> Any:
    x, y, *_, alpha, beta = inputs = ctx.saved_tensors[:9]
    need = ctx.needs_input_grad
    by_x, by_y, by_a, by_b, by_epsilon, by_f, by_alpha, by_beta = solve_backward(
        *inputs, *ctx.saved_tensors[9:], grad_f, grad_g, need[0] or need[1], need[4], *ctx.how
    )
    by_offsets = given(by_alpha, alpha), given(by_beta, beta)
    return given(by_x, x), given(by_y, y), by_a, by_b, by_epsilon, by_f, None, *by_offsets, *[None] * 8


solve.derivative(_solve_grad, _solve_setup)
solve_backward.derivative(_refuse_second)

# ------------------------------------------------------------------------------------------ products with the plan


@StreamedOp
def apply(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, values: Tensor, metric: str, precision: str,
    backend: str,
) -> Tensor:
    """P V with P_ij = exp(s_i + t_j − C_ij/ε): (B, m, k) to (B, n, k)."""
    return operator_of(x, y, epsilon, metric, precision, backend).apply(s, t, values)


@apply.fake
def _(x, y, s, t, epsilon, values, *how):  # type: ignore[no-untyped-def]
    return s.new_empty(*s.shape, values.shape[-1])


@StreamedOp
def apply_backward(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, values: Tensor, out: Tensor, grad: Tensor,
    need_cost: bool, need_epsilon: bool, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, s, t, ε and the values."""
    operator = operator_of(x, y, epsilon, metric, precision, backend)
    by_values = operator.T.apply(t, s, grad)
    by_s, by_t = (grad * out).sum(-1), (by_values * values).sum(-1)
    cost, by_epsilon = None, torch.zeros_like(epsilon)
    if need_cost:
        cost = operator.weighted(s, t, u=-grad / operator.epsilon[:, None, None], v=values).cost
    if need_epsilon:
        moment = operator.moment(s, t, values.to(grad.dtype), 1)
        by_epsilon = (grad * moment).sum((1, 2)).to(epsilon.dtype) / epsilon**2
    return *cost_gradients(cost, x, y), by_s, by_t, by_epsilon, by_values.to(values.dtype)


@apply_backward.fake
def _(x, y, s, t, epsilon, values, out, grad, need_cost, *how):  # type: ignore[no-untyped-def]
    return (
        *fake_cost(x, y, need_cost), torch.empty_like(s), torch.empty_like(t), torch.empty_like(epsilon),
        torch.empty_like(values),
    )  # fmt: skip


def _apply_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(*tensors, output)


def _apply_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, s, t, epsilon, values, out = ctx.saved_tensors
    need = ctx.needs_input_grad
    by_x, by_y, *others = apply_backward(
        x, y, s, t, epsilon, values, out, grad, need[0] or need[1], need[4], *ctx.how
    )
    return given(by_x, x), given(by_y, y), *others, None, None, None


apply.derivative(_apply_grad, _apply_setup)
_twice(apply_backward, formulas.apply_backward)


@StreamedOp
def moment(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, values: Tensor, power: int, metric: str,
    precision: str, backend: str,
) -> Tensor:
    """(P ∘ C^power) V with P_ij = exp(s_i + t_j − C_ij/ε): (B, m, k) to (B, n, k)."""
    return operator_of(x, y, epsilon, metric, precision, backend).moment(s, t, values, power)


@moment.fake
def _(x, y, s, t, epsilon, values, *how):  # type: ignore[no-untyped-def]
    return s.new_empty(*s.shape, values.shape[-1])


def _moment_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.power, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(*tensors, output)


def _moment_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, s, t, epsilon, values, out = ctx.saved_tensors
    need, plan = ctx.needs_input_grad, formulas.Plan(x, y, s, t, epsilon, ctx.how)
    by_x, by_y, *others = formulas.moment_gradients(plan, values, out, grad, ctx.power, need[0] or need[1], need[4])
    return given(by_x, x), given(by_y, y), *others, None, None, None, None


moment.derivative(_moment_grad, _moment_setup)

# --------------------------------------------------------------------------------------------- choices of single pairs


@StreamedOp
def largest(
    x: Tensor, y: Tensor | None, t: Tensor, epsilon: Tensor, count: int, metric: str, precision: str, backend: str
) -> Tensor:
    """The columns with the largest t_j − C_ij/ε in each row, largest first: (B, m) to indices (B, n, count)."""
    return operator_of(x, y, epsilon, metric, precision, backend).largest(t, count)


@largest.fake
def _(x, y, t, epsilon, count, *how):  # type: ignore[no-untyped-def]
    return t.new_empty(t.shape[0], x.shape[1], count, dtype=torch.int64)


def chosen(x: Tensor, y: Tensor | None, index: Tensor, metric: str, dtype: torch.dtype) -> Tensor:
    """C_ij at the columns j = index_ik, (B, n, k), from direct differences, a coordinate at a time."""
    if y is None:
        return x.gather(2, index).to(dtype)
    flat = index.flatten(1)

    def differences() -> Any:
        for k in range(x.shape[-1]):
            yield x[:, :, k, None].to(dtype) - y[:, :, k].gather(1, flat).reshape(index.shape).to(dtype)

    return summed(differences(), metric, torch.zeros(index.shape, dtype=dtype, device=x.device))


# ------------------------------------------------------------------------------------------------------ linear cost


@StreamedOp
def linear_cost(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, metric: str, precision: str, backend: str
) -> Tensor:
    """⟨P, C⟩, (B,)."""
    moments = operator_of(x, y, epsilon, metric, precision, backend).cost_apply(s, t)
    return moments.sum(-1, dtype=torch.float64).to(moments.dtype)


@linear_cost.fake
def _(x, y, s, t, epsilon, metric, precision, backend):  # type: ignore[no-untyped-def]
    return s.new_empty(s.shape[0])


@StreamedOp
def linear_cost_backward(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, grad: Tensor, need_cost: bool,
    need_epsilon: bool, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, s, t and ε: ∂⟨P, C⟩ = ⟨P ∘ (1 − C/ε), ∂C⟩ + ⟨P ∘ C, ∂s + ∂t + C/ε² ∂ε⟩."""
    operator = operator_of(x, y, epsilon, metric, precision, backend)
    cost = None
    if need_cost:
        alpha = grad[:, None].expand(-1, operator.rows)
        found = operator.weighted(s, t, alpha=alpha), operator.weighted(s, t, gamma=1.0)
        scale = grad / operator.epsilon
        cost = tuple(
            first - second * scale.reshape(-1, 1, 1) for first, second in zip(found[0].cost, found[1].cost, strict=True)
        )
    by_s, by_t = operator.cost_apply(s, t), operator.T.cost_apply(t, s)
    by_epsilon = torch.zeros_like(epsilon)
    if need_epsilon:
        by_epsilon += grad * operator.cost_apply(s, t, power=2).sum(-1) / epsilon**2
    return *cost_gradients(cost, x, y), by_s * grad[:, None], by_t * grad[:, None], by_epsilon


@linear_cost_backward.fake
def _(x, y, s, t, epsilon, grad, need_cost, *how):  # type: ignore[no-untyped-def]
    return *fake_cost(x, y, need_cost), torch.empty_like(s), torch.empty_like(t), torch.empty_like(epsilon)


def _linear_cost_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(*tensors)


def _linear_cost_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, s, t, epsilon = ctx.saved_tensors
    need = ctx.needs_input_grad
    by_x, by_y, *others = linear_cost_backward(x, y, s, t, epsilon, grad, need[0] or need[1], need[4], *ctx.how)
    return given(by_x, x), given(by_y, y), *others, None, None, None


linear_cost.derivative(_linear_cost_grad, _linear_cost_setup)
_twice(linear_cost_backward, formulas.linear_cost_backward)

for operation in (
    softmin, softmin_backward, solve, solve_backward, apply, apply_backward, moment, largest, linear_cost,
    linear_cost_backward,
):  # fmt: skip
    operation.batched()
