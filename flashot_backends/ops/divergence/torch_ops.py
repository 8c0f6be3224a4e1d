"""The losses as torch ops, streamed forward and backward: memory is linear in the points.

The derivative of each potential by its own points comes out of the last step of the loop, so going back costs nothing
but products of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sinkhorn.torch_ops import StreamedOp
from .loop import Side, anneal, in_one_go, task
from .schedule import Settings

FEW_COORDINATES = 8  # for which kernels take differences of points rather than products


def refuse_second(ctx: Any, *grads: Any) -> Any:
    """Stand where a second derivative would."""
    raise NotImplementedError(
        "flashot_backends: second derivatives of a streamed loss are not available; "
        "backend='tensorized' has those of its last step for a small problem"
    )


def or_nothing(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An empty tensor for None: ops return tensors."""
    return like.new_empty(0) if tensor is None else tensor


# --------------------------------------------------------------------------------------------- the Sinkhorn divergence


@StreamedOp
def divergence(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: int, blur: float, reach: float, scaling: float,
    diameters: Sequence[float], each: bool, debias: bool, verbose: bool, need_x: bool, need_y: bool, precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values (B,), and their gradients by x, a, y and b."""
    settings = Settings(p, blur, reach, scaling, diameters, each, debias, verbose)
    kernel = in_one_go(x, y, settings.metric, backend)
    if kernel is not None:
        found: Any = kernel.divergence(*task(kernel, (x, a, y, b), settings, need_x, need_y, precision))
        return found  # type: ignore[no-any-return]
    rows, columns = anneal(x, a, y, b, settings, need_x, need_y, precision, backend)
    value_a, by_x, by_a = _integrated(rows, a, settings)
    value_b, by_y, by_b = _integrated(columns, b, settings)
    by_x, by_y = or_nothing(by_x, a).to(x.dtype), or_nothing(by_y, b).to(y.dtype)
    return (value_a + value_b).to(a.dtype), by_x, by_a, by_y, by_b


def _integrated(side: Side, weight: Tensor, settings: Settings) -> tuple[Tensor, Tensor | None, Tensor]:
    """⟨a, φ⟩ in float64 with its gradients by the points and by a, where φ is the side's integrand.

    Balanced: φ = f, less the cloud's own potential when debiased. Unbalanced: (ρ + ε/2)(e^(−own/ρ) − e^(−f/ρ)), with
    own = 0 when not debiased (Séjourné et al., proposition 12).
    """
    rho = settings.rho
    strength = rho + settings.epsilon / 2

    def integrand(potential: Tensor | None) -> Any:
        if potential is None:
            return 0.0
        return potential if math.isinf(rho) else strength * -torch.expm1(-potential / rho)

    def rate(potential: Tensor) -> Any:
        return 1.0 if math.isinf(rho) else strength / rho * torch.exp(-potential / rho)

    phi = integrand(side.across) - integrand(side.own)
    by_points = None
    if side.across_slope is not None:
        by_points = _scaled(side.across_slope, weight * rate(side.across))
        if side.own is not None and side.own_slope is not None:
            by_points = by_points - _scaled(side.own_slope, weight * rate(side.own))
    return (weight * phi).sum(-1, dtype=torch.float64), by_points, phi


def _scaled(slope: Tensor, factor: Tensor) -> Tensor:
    return slope * factor[:, :, None]


@divergence.fake
def _(x, a, y, b, *settings):  # type: ignore[no-untyped-def]
    need_x, need_y = settings[8:10]
    points = [torch.empty_like(part) if need else a.new_empty(0) for part, need in ((x, need_x), (y, need_y))]
    return a.new_empty(a.shape[0]), points[0], torch.empty_like(a), points[1], torch.empty_like(b)


@StreamedOp
def divergence_backward(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, grad: Tensor, by_x: Tensor, by_a: Tensor, by_y: Tensor, by_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, a, y and b, given the gradient by the values. Not differentiable, by any input."""
    points = [(by * grad.to(by.dtype)[:, None, None] if by.numel() else by.clone()) for by in (by_x, by_y)]
    return points[0], by_a * grad[:, None], points[1], by_b * grad[:, None]


@divergence_backward.fake
def _(x, a, y, b, grad, by_x, by_a, by_y, by_b):  # type: ignore[no-untyped-def]
    return torch.empty_like(by_x), torch.empty_like(by_a), torch.empty_like(by_y), torch.empty_like(by_b)


def _divergence_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or zeros are made for each output that has no derivative


def _divergence_grad(ctx: Any, grad: Tensor, *_: Any) -> Any:
    *inputs, by_x, by_a, by_y, by_b = ctx.saved_tensors
    need = ctx.needs_input_grad
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # nobody asks for second derivatives
        found = zip((by_x, by_a, by_y, by_b), need, strict=False)
        return *(_times(by, grad) if wanted else None for by, wanted in found), *[None] * 12
    by_x, by_a, by_y, by_b = divergence_backward(*inputs, grad, by_x, by_a, by_y, by_b)
    return by_x if need[0] else None, by_a, by_y if need[2] else None, by_b, *[None] * 12


def _times(by: Tensor, grad: Tensor) -> Tensor:
    return by * grad.to(by.dtype).reshape(-1, *[1] * (by.dim() - 1))


divergence.derivative(_divergence_grad, _divergence_setup)
divergence_backward.derivative(refuse_second)

# ------------------------------------------------------------------------------------------- kernel norms, in one pass


def in_one_pass(x: Tensor, y: Tensor, backend: str) -> bool:
    """Whether a kernel sums over all pairs and gives the gradients too. A compiler is told without asking anybody."""
    if torch.compiler.is_compiling():
        return x.device.type == "cuda" and x.dtype != torch.float64 and 0 < x.shape[-1] <= FEW_COORDINATES
    return in_one_go(x, y, "clamped", backend) is not None


@StreamedOp
def norm(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, kind: str, blur: float, need_x: bool, need_y: bool, precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """½ ⟨c, k ⋆ c⟩ (B,) of the signed cloud c = (a, −b) at (x, y), and its gradients by x, a, y and b."""
    kernel, n = in_one_go(x, y, "clamped", backend), x.shape[1]
    if kernel is None:
        return _norm_in_parts(x, a, y, b, kind, blur, (precision, backend))
    signs = torch.cat([a, -b], 1)
    smoothed, slopes = kernel.sums(torch.cat([x, y], 1), signs, kind, blur, need_x or need_y)
    value = 0.5 * (signs * smoothed).sum(-1, dtype=torch.float64).to(a.dtype)
    by_points = None if slopes is None else _scaled(slopes, signs).to(x.dtype)
    by_x, by_y = (
        x.new_empty(0) if by_points is None or not need else by_points[:, part].contiguous()
        for need, part in ((need_x, slice(n)), (need_y, slice(n, None)))
    )
    return value, by_x, smoothed[:, :n].contiguous(), by_y, -smoothed[:, n:]


def _norm_in_parts(x: Tensor, a: Tensor, y: Tensor, b: Tensor, kind: str, blur: float, how: Any) -> Any:
    """For a compiled graph that finds no such kernel after all."""
    from .kernels import in_parts

    with torch.enable_grad():
        inputs = tuple(part.detach().requires_grad_() for part in (x, a, y, b))
        value = in_parts(kind, inputs, blur, how)  # type: ignore[arg-type]
        return value.detach(), *torch.autograd.grad(value.sum(), inputs)


@norm.fake
def _(x, a, y, b, kind, blur, need_x, need_y, precision, backend):  # type: ignore[no-untyped-def]
    points = [torch.empty_like(part) if need else part.new_empty(0) for part, need in ((x, need_x), (y, need_y))]
    return a.new_empty(a.shape[0]), points[0], torch.empty_like(a), points[1], torch.empty_like(b)


def _norm_grad(ctx: Any, grad: Tensor, *_: Any) -> Any:
    return _divergence_grad(ctx, grad)[: 4 + 6]


norm.derivative(_norm_grad, _divergence_setup)

# ------------------------------------------------------------------------------------------------------- its potentials


@StreamedOp
def divergence_potentials(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: int, blur: float, reach: float, scaling: float,
    diameters: Sequence[float], each: bool, debias: bool, verbose: bool, need_x: bool, need_y: bool, precision: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Potentials (B, n) and (B, m), less each cloud's own when debiased, and their derivatives by their own points."""
    settings = Settings(p, blur, reach, scaling, diameters, each, debias, verbose)
    sides = anneal(x, a, y, b, settings, need_x, need_y, precision, backend)
    potentials = [_difference(side.across, side.own) for side in sides]
    given = [(side.across_slope, side.own_slope) for side in sides]
    slopes = [a.new_empty(0) if across is None else _difference(across, own) for across, own in given]
    return potentials[0], potentials[1], slopes[0], slopes[1]


def _difference(across: Tensor, own: Tensor | None) -> Tensor:
    """A tensor of its own: kernels give parts of all that they hold."""
    return across.clone() if own is None else across - own


@divergence_potentials.fake
def _(x, a, y, b, *settings):  # type: ignore[no-untyped-def]
    need_x, need_y = settings[8:10]
    slopes = [a.new_empty(part.shape) if need else a.new_empty(0) for part, need in ((x, need_x), (y, need_y))]
    return torch.empty_like(a), torch.empty_like(b), slopes[0], slopes[1]


@StreamedOp
def divergence_potentials_backward(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, grad_f: Tensor, grad_g: Tensor, slope_x: Tensor, slope_y: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by x and y, given those by the potentials. Not differentiable, by any input."""
    triples = ((grad_f, slope_x, x), (grad_g, slope_y, y))
    by_x, by_y = (
        _scaled(slope, grad).to(points.dtype) if slope.numel() else slope.clone() for grad, slope, points in triples
    )
    return by_x, by_y


@divergence_potentials_backward.fake
def _(x, a, y, b, grad_f, grad_g, slope_x, slope_y):  # type: ignore[no-untyped-def]
    pairs = (slope_x, x), (slope_y, y)
    by_x, by_y = (torch.empty_like(points if slope.numel() else slope) for slope, points in pairs)
    return by_x, by_y


def _potentials_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _potentials_grad(ctx: Any, grad_f: Tensor, grad_g: Tensor, *_: Any) -> Any:
    *inputs, slope_x, slope_y = ctx.saved_tensors
    by_x, by_y = divergence_potentials_backward(*inputs, grad_f, grad_g, slope_x, slope_y)
    need = ctx.needs_input_grad
    return by_x if need[0] else None, None, by_y if need[2] else None, None, *[None] * 12


divergence_potentials.derivative(_potentials_grad, _potentials_setup)
divergence_potentials_backward.derivative(refuse_second)

# -------------------------------------------------------------------------------------------------- sums of distances


@StreamedOp
def distance_product(x: Tensor, y: Tensor, values: Tensor, precision: str, backend: str) -> Tensor:
    """C V with C_ij = max(|x_i − y_j|, 1e-4): (B, m, k) to (B, n, k)."""
    return _distances(x, y, precision, backend).cost_product(values)


def _distances(x: Tensor, y: Tensor, precision: str, backend: str) -> Any:
    """Distances at infinite temperature, where every pair counts the same."""
    from ..sinkhorn.solver import make_operator

    infinite = torch.full((x.shape[0],), math.inf, dtype=torch.float64, device=x.device)
    return make_operator(x, y, infinite, "clamped", precision, backend)


@distance_product.fake
def _(x, y, values, *how):  # type: ignore[no-untyped-def]
    return values.new_empty(x.shape[0], x.shape[1], values.shape[-1])


@StreamedOp
def distance_product_backward(
    x: Tensor, y: Tensor, values: Tensor, grad: Tensor, need_points: bool, precision: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, y and the values."""
    operator = _distances(x, y, precision, backend)
    by_values = operator.T.cost_product(grad)
    if not need_points:
        return x.new_empty(0), x.new_empty(0), by_values
    zero = torch.zeros(x.shape[:2], dtype=grad.dtype, device=x.device)
    other = torch.zeros(y.shape[:2], dtype=grad.dtype, device=x.device)
    by_x, by_y = operator.weighted(zero, other, u=grad, v=values).cost
    return by_x.to(x.dtype), by_y.to(y.dtype), by_values


@distance_product_backward.fake
def _(x, y, values, grad, need_points, *how):  # type: ignore[no-untyped-def]
    points = [torch.empty_like(part) if need_points else x.new_empty(0) for part in (x, y)]
    return points[0], points[1], torch.empty_like(values)


def _product_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, values, *ctx.how = inputs
    ctx.save_for_backward(x, y, values)


def _product_grad(ctx: Any, grad: Tensor) -> Any:
    need = ctx.needs_input_grad
    by_x, by_y, by_values = distance_product_backward(*ctx.saved_tensors, grad, need[0] or need[1], *ctx.how)
    return by_x if need[0] else None, by_y if need[1] else None, by_values, None, None


distance_product.derivative(_product_grad, _product_setup)
distance_product_backward.derivative(refuse_second)
