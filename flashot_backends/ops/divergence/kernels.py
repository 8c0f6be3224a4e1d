"""Kernel norms of the difference of two measures, from streamed products with the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sinkhorn import torch_ops as sinkhorn_ops
from . import torch_ops


def norm(
    kernel: str, clouds: tuple[Tensor, Tensor, Tensor, Tensor], blur: float, how: tuple[bool, bool, str, str]
) -> Tensor:
    """½ ⟨α − β, k ⋆ (α − β)⟩, (B,)."""
    x, a, y, b = clouds
    need_x, need_y, precision, backend = how
    if torch_ops.in_one_pass(x, y, backend):
        return torch_ops.norm(x, a, y, b, kernel, blur, need_x, need_y, precision, backend)[0]
    return in_parts(kernel, clouds, blur, (precision, backend))


def in_parts(
    kernel: str, clouds: tuple[Tensor, Tensor, Tensor, Tensor], blur: float, how: tuple[str, str]
) -> Tensor:
    """The same from three products with the kernel.

    It is symmetric, so the derivative of ⟨α, k ⋆ α⟩ is twice that with one of its two arguments held.
    """
    x, a, y, b = clouds
    own_x = smooth(kernel, x, x.detach(), a.detach(), blur, how)
    own_y = smooth(kernel, y, y.detach(), b.detach(), blur, how)
    across = smooth(kernel, x, y, b, blur, how)
    return _own(a, own_x) + _own(b, own_y) - _inner(a, across)


def _own(weight: Tensor, smoothed: Tensor) -> Tensor:
    """½ ⟨α, k ⋆ α⟩ with twice the derivative of the argument that is not held: the whole derivative."""
    value = _inner(weight, smoothed)
    return value - 0.5 * value.detach()


def _inner(weight: Tensor, values: Tensor) -> Tensor:
    return (weight * values).sum(-1, dtype=torch.float64).to(weight.dtype)


def potentials(
    kernel: str, clouds: tuple[Tensor, Tensor, Tensor, Tensor], blur: float, how: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """k ⋆ (α − β) at x, and k ⋆ (β − α) at y."""
    x, a, y, b = clouds
    return (
        smooth(kernel, x, x, a, blur, how) - smooth(kernel, x, y, b, blur, how),
        smooth(kernel, y, y, b, blur, how) - smooth(kernel, y, x, a, blur, how),
    )


def smooth(kernel: str, x: Tensor, y: Tensor, weight: Tensor, blur: float, how: tuple[Any, ...]) -> Tensor:
    """Σ_j k(x_i, y_j) w_j, (B, n)."""
    values = weight[:, :, None]
    if kernel == "energy":
        return -torch_ops.distance_product(x, y, values, *how)[:, :, 0]
    metric, epsilon = "sqeuclidean", 2 * blur**2
    if kernel == "laplacian":
        metric, epsilon, x, y = "clamped", 1.0, x / blur, y / blur
    flat = torch.full((x.shape[0],), epsilon, dtype=torch.float64, device=x.device)
    zeros = torch.zeros(x.shape[:2], dtype=weight.dtype, device=x.device), torch.zeros_like(weight)
    return sinkhorn_ops.apply(x, y, *zeros, flat, values, metric, *how)[:, :, 0]
