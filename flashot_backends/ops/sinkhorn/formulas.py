"""Second derivatives: the gradients of the streamed operations once more, written with streamed operations.

A backward pass runs as one fused operation. Where its result is differentiated again, its derivative is that of the
same gradient as a formula of products with (P ∘ C^power), which are closed under differentiation: for squared distances
Σ_j W_ij ∂C_ij/∂x_i = 2 (x_i Σ_j W_ij − Σ_j W_ij y_j), products again. Nothing is stored over pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.blocks import exact_products

from .streamed import StreamedOp, transformed


@StreamedOp
def product(first: Tensor, second: Tensor) -> Tensor:
    """first secondᵀ, (B, n, k) and (B, m, k) to (B, n, m), as wide as its operands, and so are its derivatives.

    Autograd would run the derivative of a product outside of what guards the product.
    """
    with exact_products(first.device):
        return first @ second.transpose(-1, -2)


@product.fake
def _(first, second):  # type: ignore[no-untyped-def]
    return first.new_empty(*first.shape[:2], second.shape[1])


def _product_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _product_grad(ctx: Any, grad: Tensor) -> Any:
    first, second = ctx.saved_tensors
    by_first = product(grad, second.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
    return by_first, product(grad.transpose(-1, -2), first.transpose(-1, -2)) if ctx.needs_input_grad[1] else None


product.derivative(_product_grad, _product_setup)
product.batched()


class Plan(NamedTuple):
    """P_ij = exp(s_i + t_j − C_ij/ε) as something to differentiate; fields as in the operations' arguments."""

    x: Tensor
    y: Tensor | None
    s: Tensor
    t: Tensor
    epsilon: Tensor
    how: tuple[str, str, str]

    @property
    def T(self) -> Plan:  # noqa: N802
        """The transposed plan."""
        x, y = (self.x.transpose(-1, -2), None) if self.y is None else (self.y, self.x)
        return Plan(x, y, self.t, self.s, self.epsilon, self.how)

    @property
    def real(self) -> Tensor:
        """ε in the dtype of the potentials, to divide vectors by."""
        return self.epsilon.to(self.s.dtype)

    def moment(self, values: Tensor, power: int = 0) -> Tensor:
        """(P ∘ C^power) V."""
        from . import torch_ops  # it imports this module

        x, y, s, t, epsilon, how = self
        if power == 0:
            return torch_ops.apply(x, y, s, t, epsilon, values, *how)  # type: ignore[no-any-return]
        return torch_ops.moment(x, y, s, t, epsilon, values, power, *how)  # type: ignore[no-any-return]

    def sums(self, power: int = 0) -> Tensor:
        """Row sums of P ∘ C^power."""
        return self.moment(torch.ones_like(self.t)[:, :, None], power)[:, :, 0]

    def pull_back(self, u: Tensor, v: Tensor, power: int = 0) -> tuple[Tensor, Tensor | None]:
        """Σ W_ij ∂C_ij by the cost's tensors, with W_ij = P_ij C_ij^power u_i·v_j."""
        if self.y is None:
            return self._dense(u, v, power), None
        if self.how[0] != "sqeuclidean":
            raise NotImplementedError(
                f"flashot_backends: second derivatives by points with the metric {self.how[0]!r} are not available; "
                "those of 'sqeuclidean', 'cosine', 'inner' and of matrices are: for a small problem take "
                "DenseCost(cost.dense())"
            )
        middle = 0.5 * (self.x.mean(1, keepdim=True) + self.y.mean(1, keepdim=True)).detach()
        x, y = ((points - middle).to(self.s.dtype) for points in (self.x, self.y))
        by_x, by_y = self._towards(x, y, u, v, power), self.T._towards(y, x, v, u, power)
        return by_x.to(self.x.dtype), by_y.to(self.x.dtype)

    def _towards(self, x: Tensor, y: Tensor, u: Tensor, v: Tensor, power: int) -> Tensor:
        """2 Σ_j W_ij (x_i − y_j)."""
        extended = torch.cat([torch.ones_like(y[:, :, :1]), y], -1)
        values = (v.to(y.dtype)[:, :, :, None] * extended[:, :, None, :]).reshape(*y.shape[:2], -1)
        found = self.moment(values, power).reshape(*x.shape[:2], v.shape[-1], extended.shape[-1])
        rows = (u[:, :, :, None] * found).sum(2)
        return 2 * (x * rows[:, :, :1] - rows[:, :, 1:])

    def _dense(self, u: Tensor, v: Tensor, power: int) -> Tensor:
        forbidden = self.x == torch.inf
        matrix = self.x.to(self.s.dtype).masked_fill(forbidden, 0.0)
        scalings = (self.s[:, :, None] + self.t[:, None, :]).masked_fill(forbidden, -torch.inf)
        plan = torch.exp(scalings - matrix / self.real[:, None, None])
        return (plan * matrix**power * product(u, v.to(u.dtype))).to(self.x.dtype)


def moment_gradients(
    plan: Plan, values: Tensor, out: Tensor, grad: Tensor, power: int, need_cost: bool, need_epsilon: bool
) -> tuple[Tensor, ...]:
    """Gradients of (P ∘ C^power) V by x, y, s, t, ε and V."""
    by_values = plan.T.moment(grad, power)
    by_s, by_t = (grad * out).sum(-1), (by_values * values).sum(-1)
    nothing = plan.x.new_empty(0)
    by_x, by_y = nothing, nothing
    if need_cost:
        by_x, by_y = plan.pull_back(-grad / plan.real[:, None, None], values, power)  # type: ignore[assignment]
        if power:
            lower = plan.pull_back(power * grad, values, power - 1)
            by_x, by_y = by_x + lower[0], by_y if lower[1] is None else by_y + lower[1]
    by_epsilon = torch.zeros_like(plan.epsilon)
    if need_epsilon:
        by_epsilon = (grad * plan.moment(values, power + 1)).sum((1, 2)).to(plan.epsilon.dtype) / plan.epsilon**2
    return by_x, nothing if by_y is None else by_y, by_s, by_t, by_epsilon, by_values.to(values.dtype)


def apply_backward(x, y, s, t, epsilon, values, out, grad, need_cost, need_epsilon, *how):  # type: ignore[no-untyped-def]
    """``torch_ops.apply_backward``."""
    plan = Plan(x, y, s, t, epsilon, how)
    return moment_gradients(plan, values, out, grad, 0, need_cost, need_epsilon)


def softmin_backward(x, y, h, epsilon, out, grad, need_cost, *how):  # type: ignore[no-untyped-def]
    """``torch_ops.softmin_backward``: d softmin_i = Σ_j p_ij (dC_ij − ε dh_j) + …, p the plan of s = softmin/ε."""
    nowhere = out == torch.inf
    out, grad = torch.where(nowhere, 0.0, out), torch.where(nowhere, 0.0, grad)
    real = epsilon.to(h.dtype)[:, None]
    plan = Plan(x, y, out / real, h, epsilon, how)
    nothing = x.new_empty(0)
    by_x, by_y = plan.pull_back(grad[:, :, None], torch.ones_like(h)[:, :, None]) if need_cost else (nothing, nothing)
    by_h = torch.where(h == -torch.inf, 0.0, -real * plan.T.moment(grad[:, :, None])[:, :, 0])
    by_epsilon = (grad * (out - plan.sums(1))).sum(-1) / real[:, 0]
    return by_x, nothing if by_y is None else by_y, by_h, by_epsilon.to(epsilon.dtype)


def linear_cost_backward(x, y, s, t, epsilon, grad, need_cost, need_epsilon, *how):  # type: ignore[no-untyped-def]
    """``torch_ops.linear_cost_backward``."""
    plan, ones = Plan(x, y, s, t, epsilon, how), torch.ones_like(t)[:, :, None]
    rows = grad[:, None, None].expand(-1, s.shape[1], 1)
    return moment_gradients(plan, ones, plan.moment(ones, 1), rows, 1, need_cost, need_epsilon)[:5]


# ------------------------------------------------------------------------------------------ differentiating a formula


def keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    """Save every input; tensors where autograd looks for them."""
    ctx.set_materialize_grads(False)
    ctx.where = [k for k, part in enumerate(inputs) if isinstance(part, Tensor)]
    ctx.rest = [None if isinstance(part, Tensor) else part for part in inputs]
    ctx.save_for_backward(*(part for part in inputs if isinstance(part, Tensor)))


def derivative_of(formula: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
    """The backward pass of an operation (set up by ``keep_inputs``) that computes what ``formula`` says."""

    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = list(ctx.rest)
        for k, tensor in zip(ctx.where, ctx.saved_tensors, strict=True):
            inputs[k] = tensor
        return vector_jacobian(formula, inputs, ctx.needs_input_grad, cotangents)

    return backward


def vector_jacobian(
    formula: Callable[..., Sequence[Tensor]], inputs: list[Any], needs: Sequence[bool], cotangents: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Gradients of a formula by the inputs that need one; differentiable again if autograd records."""
    if transformed():
        return _transformed_vjp(formula, inputs, needs, cotangents)
    again = torch.is_grad_enabled()
    gradients: list[Tensor | None] = [None] * len(inputs)
    with torch.enable_grad():
        given = [_alias(part, need, again) for part, need in zip(inputs, needs, strict=True)]
        pairs = [(out, by) for out, by in zip(formula(*given), cotangents, strict=True) if by is not None]
        pairs = [(out, by) for out, by in pairs if out.requires_grad]
        wanted = [k for k, need in enumerate(needs) if need]
        if pairs and wanted:
            outs, bys = zip(*pairs, strict=True)
            found = torch.autograd.grad(outs, [given[k] for k in wanted], bys, create_graph=again, allow_unused=True)
            for k, gradient in zip(wanted, found, strict=True):
                gradients[k] = gradient
    return tuple(gradients)


def _transformed_vjp(
    formula: Callable[..., Sequence[Tensor]], inputs: list[Any], needs: Sequence[bool], cotangents: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The same inside of ``torch.func``, which differentiates functions and not tensors."""
    wanted = [k for k, need in enumerate(needs) if need]

    def of(*changed: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(wanted, changed, strict=True))
        return tuple(formula(*(given.get(k, part) for k, part in enumerate(inputs))))

    outs, pull = torch.func.vjp(of, *(inputs[k] for k in wanted))
    filled = tuple(torch.zeros_like(out) if by is None else by for out, by in zip(outs, cotangents, strict=True))
    found = dict(zip(wanted, pull(filled), strict=True))
    return tuple(found.get(k) for k in range(len(inputs)))


def _alias(part: Any, need: bool, again: bool) -> Any:
    """The same tensor as a variable of its own: derivatives by it leave out what other inputs owe to it."""
    if not isinstance(part, Tensor):
        return part
    return part.view_as(part) if again and part.requires_grad else part.detach().requires_grad_(need)
