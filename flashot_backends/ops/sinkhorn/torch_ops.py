"""The operation as torch custom ops: opaque to ``torch.compile``, with gradients that are streamed themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import solver
from .problem import check_values, inspect_values


def plain(tensors: Iterable[Any]) -> bool:
    """Whether real tensors are computed on right now: no compiler, tracer, mode or functional transform looks on."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors if isinstance(tensor, Tensor))


def transformed() -> bool:
    """Whether ``torch.func`` (grad, vmap) looks on, and no compiler."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


class StreamedOp:
    """One differentiable operation in three dresses.

    On plain tensors it is an ``autograd.Function``, which costs microseconds and imports nothing. Under
    ``torch.compile`` and other tracers it is the custom op ``flashot::sinkhorn_<name>``; ``torch.func``, which does not
    differentiate custom ops by itself, sees that op in an ``autograd.Function`` again.
    """

    def __init__(self, compute: Callable[..., Any]):
        name = compute.__name__
        self.compute = compute
        self.custom = torch.library.custom_op(f"flashot::sinkhorn_{name}", mutates_args=())(compute)
        self.function: Any = type(name, (torch.autograd.Function,), {"forward": staticmethod(compute)})
        general = {"forward": staticmethod(self.custom), "generate_vmap_rule": True}
        self.general: Any = type(name, (torch.autograd.Function,), general)
        self.__name__, self.__doc__ = name, compute.__doc__

    def __call__(self, *args: Any) -> Any:
        """Compute, in the dress that fits."""
        if not plain(args):
            return self.general.apply(*args) if transformed() else self.custom(*args)
        if torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in args):
            return self.function.apply(*args)
        return self.compute(*args)

    def fake(self, shapes: Callable[..., Any]) -> None:
        """Say what shapes come out."""
        self.custom.register_fake(shapes)

    def derivative(self, backward: Callable[..., Any], setup: Callable[..., None] | None = None) -> None:
        """Say how gradients flow back, and what is kept for that."""
        self.custom.register_autograd(backward, setup_context=setup)
        for function in (self.function, self.general):
            function.backward = staticmethod(backward)
            function.setup_context = staticmethod(setup or (lambda ctx, inputs, output: None))


def _cost_gradients(cost: tuple[Tensor, ...] | None, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients by the cost's tensors in their dtype; a tensor without elements where there is none."""
    nothing = x.new_empty(0)
    if cost is None:
        return nothing, x.new_empty(0)
    return cost[0].to(x.dtype), cost[1].to(x.dtype) if y is not None else nothing


def _fake_cost(x: Tensor, y: Tensor | None, needed: bool) -> tuple[Tensor, Tensor]:
    if not needed:
        return x.new_empty(0), x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(y) if y is not None else x.new_empty(0)


def _given(tensor: Tensor, like: Tensor | None) -> Tensor | None:
    return tensor if like is not None and tensor.numel() == like.numel() else None


def _refuse_second(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "flashot_backends: second derivatives through the Sinkhorn kernels are not available, with any backend; "
        "for a small problem write the iterations with torch.logsumexp"
    )


def _operator(x: Tensor, y: Tensor | None, epsilon: Tensor, metric: str, precision: str, backend: str) -> Any:
    return solver.make_operator(x, y, epsilon, metric, precision, backend)


# ---------------------------------------------------------------------------------------------------------- softmin


@StreamedOp
def softmin(
    x: Tensor, y: Tensor | None, h: Tensor, epsilon: Tensor, metric: str, precision: str, backend: str
) -> Tensor:
    """−ε log Σ_j exp(h_j − C_ij/ε), (B, m) to (B, n)."""
    return _operator(x, y, epsilon, metric, precision, backend).softmin(h)


@softmin.fake
def _(x, y, h, epsilon, metric, precision, backend):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape[0], x.shape[1])


@StreamedOp
def softmin_backward(
    x: Tensor, y: Tensor | None, h: Tensor, epsilon: Tensor, out: Tensor, grad: Tensor, need_cost: bool, metric: str,
    precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, h and ε."""
    operator = _operator(x, y, epsilon, metric, precision, backend)
    cost, by_h, by_epsilon = solver.softmin_gradient(operator, h, out, grad, need_cost, True)
    assert by_epsilon is not None
    return *_cost_gradients(cost, x, y), by_h, by_epsilon.to(epsilon.dtype)


@softmin_backward.fake
def _(x, y, h, epsilon, out, grad, need_cost, metric, precision, backend):  # type: ignore[no-untyped-def]
    return *_fake_cost(x, y, need_cost), torch.empty_like(h), torch.empty_like(epsilon)


def _softmin_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, h, epsilon, *ctx.how = inputs
    ctx.save_for_backward(x, y, h, epsilon, output)


def _softmin_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, h, epsilon, out = ctx.saved_tensors
    need_cost = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    by_x, by_y, by_h, by_epsilon = softmin_backward(x, y, h, epsilon, out, grad, need_cost, *ctx.how)
    return _given(by_x, x), _given(by_y, y), by_h, by_epsilon, None, None, None


softmin.derivative(_softmin_grad, _softmin_setup)
softmin_backward.derivative(_refuse_second)

# ------------------------------------------------------------------------------------------------------------ solve


@StreamedOp
def solve(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, max_iterations: int,
    tolerance: float, check_every: int, norm: str, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Potentials, iterations, marginal error, and whether it is below the tolerance, by batch element."""
    values = (x, y, a, b, epsilon)
    operator = _operator(x, y, epsilon, metric, precision, backend)
    control = solver.Control(max_iterations, tolerance, check_every, norm)
    whole = operator.iterate(a, b, f, *control, partial(inspect_values, *values))
    if whole is None:
        check_values(*values)
        whole = solver.iterate(operator, a, b, f, control)
    return tuple(whole)  # type: ignore[return-value]


@solve.fake
def _(x, y, a, b, epsilon, f, *how):  # type: ignore[no-untyped-def]
    batch = a.shape[0]
    return (
        torch.empty_like(a), torch.empty_like(b), a.new_empty(batch, dtype=torch.int64), a.new_empty(batch),
        a.new_empty(batch, dtype=torch.bool),
    )  # fmt: skip


@StreamedOp
def solve_backward(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, iterations: Tensor, grad_f: Tensor,
    grad_g: Tensor, need_cost: bool, need_epsilon: bool, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, a, b, ε and the starting potential."""
    operator = _operator(x, y, epsilon, metric, precision, backend)
    found = solver.iterate_gradient(operator, a, b, f, iterations, grad_f, grad_g, need_cost, need_epsilon)
    by_epsilon = torch.zeros_like(epsilon) if found.epsilon is None else found.epsilon.to(epsilon.dtype)
    return *_cost_gradients(found.cost, x, y), found.a, found.b, by_epsilon, found.f


@solve_backward.fake
def _(x, y, a, b, epsilon, f, iterations, grad_f, grad_g, need_cost, *how):  # type: ignore[no-untyped-def]
    return (
        *_fake_cost(x, y, need_cost), torch.empty_like(a), torch.empty_like(b), torch.empty_like(epsilon),
        torch.empty_like(f),
    )  # fmt: skip


def _solve_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, a, b, epsilon, f, *_, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(x, y, a, b, epsilon, f, output[2])
    ctx.mark_non_differentiable(*output[2:])


def _solve_grad(ctx: Any, grad_f: Tensor, grad_g: Tensor, *_: Any) -> Any:
    x, y, a, b, epsilon, f, iterations = ctx.saved_tensors
    need = ctx.needs_input_grad
    by_x, by_y, by_a, by_b, by_epsilon, by_f = solve_backward(
        x, y, a, b, epsilon, f, iterations, grad_f, grad_g, need[0] or need[1], need[4], *ctx.how
    )
    return _given(by_x, x), _given(by_y, y), by_a, by_b, by_epsilon, by_f, *[None] * 7


solve.derivative(_solve_grad, _solve_setup)
solve_backward.derivative(_refuse_second)

# ------------------------------------------------------------------------------------------ products with the plan


@StreamedOp
def apply(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, values: Tensor, metric: str, precision: str,
    backend: str,
) -> Tensor:
    """P V with P_ij = exp(s_i + t_j − C_ij/ε): (B, m, k) to (B, n, k)."""
    return _operator(x, y, epsilon, metric, precision, backend).apply(s, t, values)


@apply.fake
def _(x, y, s, t, epsilon, values, *how):  # type: ignore[no-untyped-def]
    return s.new_empty(*s.shape, values.shape[-1])


@StreamedOp
def apply_backward(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, values: Tensor, out: Tensor, grad: Tensor,
    need_cost: bool, need_epsilon: bool, metric: str, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, s, t, ε and the values."""
    operator = _operator(x, y, epsilon, metric, precision, backend)
    by_values = operator.T.apply(t, s, grad)
    by_s, by_t = (grad * out).sum(-1), (by_values * values).sum(-1)
    cost, by_epsilon = None, torch.zeros_like(epsilon)
    if need_cost:
        cost = operator.weighted(s, t, u=-grad / operator.epsilon[:, None, None], v=values).cost
    if need_epsilon:
        by_epsilon = _epsilon_of_product(operator, s, t, values, grad).to(epsilon.dtype)
    return *_cost_gradients(cost, x, y), by_s, by_t, by_epsilon, by_values.to(values.dtype)


def _epsilon_of_product(operator: Any, s: Tensor, t: Tensor, values: Tensor, grad: Tensor) -> Tensor:
    """Σ P_ij (u_i·v_j) C_ij/ε², one streamed pass a column of the values."""
    total = torch.zeros_like(operator.epsilon)
    for k in range(values.shape[-1]):
        signs = ((values[..., k] > 0, 1.0), (values[..., k] < 0, -1.0))
        for chosen, sign in signs:
            log_value = torch.where(chosen, values[..., k].abs(), 1).log()
            moment = operator.cost_apply(s, torch.where(chosen, t + log_value, -torch.inf))
            total += sign * (grad[..., k] * moment).sum(-1)
    return total / operator.epsilon**2


@apply_backward.fake
def _(x, y, s, t, epsilon, values, out, grad, need_cost, *how):  # type: ignore[no-untyped-def]
    return (
        *_fake_cost(x, y, need_cost), torch.empty_like(s), torch.empty_like(t), torch.empty_like(epsilon),
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
    return _given(by_x, x), _given(by_y, y), *others, None, None, None


apply.derivative(_apply_grad, _apply_setup)
apply_backward.derivative(_refuse_second)

# ------------------------------------------------------------------------------------------------------ linear cost


@StreamedOp
def linear_cost(
    x: Tensor, y: Tensor | None, s: Tensor, t: Tensor, epsilon: Tensor, metric: str, precision: str, backend: str
) -> Tensor:
    """⟨P, C⟩, (B,)."""
    moments = _operator(x, y, epsilon, metric, precision, backend).cost_apply(s, t)
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
    operator = _operator(x, y, epsilon, metric, precision, backend)
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
    return *_cost_gradients(cost, x, y), by_s * grad[:, None], by_t * grad[:, None], by_epsilon


@linear_cost_backward.fake
def _(x, y, s, t, epsilon, grad, need_cost, *how):  # type: ignore[no-untyped-def]
    return *_fake_cost(x, y, need_cost), torch.empty_like(s), torch.empty_like(t), torch.empty_like(epsilon)


def _linear_cost_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, metric, precision, backend = inputs
    ctx.how = (metric, precision, backend)
    ctx.save_for_backward(*tensors)


def _linear_cost_grad(ctx: Any, grad: Tensor) -> Any:
    x, y, s, t, epsilon = ctx.saved_tensors
    need = ctx.needs_input_grad
    by_x, by_y, *others = linear_cost_backward(x, y, s, t, epsilon, grad, need[0] or need[1], need[4], *ctx.how)
    return _given(by_x, x), _given(by_y, y), *others, None, None, None


linear_cost.derivative(_linear_cost_grad, _linear_cost_setup)
linear_cost_backward.derivative(_refuse_second)
