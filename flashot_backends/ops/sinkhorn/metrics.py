"""Every metric of points, brought to one that kernels have: C_ij = kernel's cost of (x'_i, y'_j) + α_i + β_j.

What depends on one side alone is absorbed into that side's potential, so cosine, inner product and a table of labels
run on the kernels of squared distances. All of it is plain torch, and differentiable as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .costs import DenseCost, PointCloud

# The kernels' name for a metric; the others are squared distances of other points.
KERNEL_METRICS = {"euclidean": "euclidean", "l1": "l1"}


class Form(NamedTuple):
    """What a kernel is given: points or a matrix, the metric, and the terms of rows (..., n) and columns (..., m)."""

    x: Tensor
    y: Tensor | None
    metric: str
    alpha: Tensor | None = None
    beta: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the cost."""
        return (self.x,) if self.y is None else (self.x, self.y)


def kernel_form(cost: PointCloud | DenseCost) -> Form:
    """Bring a cost to what kernels have; transformed points of 16 bits become float32, so that nothing is rounded."""
    if isinstance(cost, DenseCost):
        return Form(cost.M, None, "matrix")
    x, y = _featured(cost)
    form = Form(x, y, KERNEL_METRICS.get(cost.metric, "sqeuclidean"))
    if cost.metric == "inner":
        form = form._replace(alpha=-x.square().sum(-1), beta=-y.square().sum(-1))
    return form if cost.labels is None else _labelled(form, cost)


def _featured(cost: PointCloud) -> tuple[Tensor, Tensor]:
    """Points with their features weighted, brought to unit length for the cosine; halved squares for products."""
    points = (cost.x, cost.y)
    if cost.feature_weights is not None:
        weights = _wide(cost.feature_weights)
        weights = (weights if cost.metric == "l1" else weights.sqrt()).unsqueeze(-2)
        points = tuple(_wide(part) * weights for part in points)  # type: ignore[assignment]
    if cost.metric == "cosine":
        points = tuple(_directions(_wide(part)) for part in points)  # type: ignore[assignment]
    if cost.metric in ("cosine", "inner"):
        points = tuple(_wide(part) * math.sqrt(0.5) for part in points)  # type: ignore[assignment]
    return points


def _directions(points: Tensor) -> Tensor:
    """x/|x|, scaled first so that no square under- or overflows; NaN at the origin."""
    largest = points.detach().abs().amax(-1, keepdim=True) if points.shape[-1] else 1.0
    scaled = points / largest
    return scaled / scaled.square().sum(-1, keepdim=True).sqrt()


def _labelled(form: Form, cost: PointCloud) -> Form:
    """Append w T[l_i, k_j] as a product of |classes| coordinates: |u − v|² = |u|² + |v|² − 2 u·v.

    With u_i = −w T[l_i] / (2 c) and v_j = c e_{k_j}, −2 u·v is the table's entry; c makes both of one size.
    """
    assert cost.labels is not None and cost.table is not None and form.y is not None
    table = _wide(cost.table) * cost.label_weight
    mean = table.mean(-1, keepdim=True)
    deviation = table - mean
    widest = deviation.detach().abs().amax((-1, -2), keepdim=True)
    scale = torch.where(widest > 0, 0.5 * widest, 1.0).sqrt()
    rows, columns = cost.labels
    u = _rows_of(-deviation / (2 * scale), rows)
    v = scale * torch.nn.functional.one_hot(columns, table.shape[-1]).to(table.dtype)
    alpha = _rows_of(mean, rows)[..., 0] - u.square().sum(-1)
    beta = -(scale * scale)[..., 0].expand(*v.shape[:-1])
    return Form(
        _joined(form.x, u), _joined(form.y, v), form.metric,
        alpha if form.alpha is None else form.alpha + alpha, beta if form.beta is None else form.beta + beta,
    )  # fmt: skip


def _rows_of(table: Tensor, labels: Tensor) -> Tensor:
    """table[labels] where both may have batch axes: (..., K, c) and (..., n) to (..., n, c)."""
    batch = torch.broadcast_shapes(table.shape[:-2], labels.shape[:-1])
    table = table.expand(*batch, *table.shape[-2:])
    index = labels.expand(*batch, labels.shape[-1])[..., None].expand(*batch, labels.shape[-1], table.shape[-1])
    return table.gather(-2, index)


def _joined(points: Tensor, extra: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(points.shape[:-2], extra.shape[:-2])
    parts = (_wide(points), extra)
    return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in parts], -1)


def _wide(tensor: Tensor) -> Tensor:
    """float64 as it is, anything narrower in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def pairwise(x: Tensor, y: Tensor, metric: str) -> Tensor:
    """A kernel's cost as a matrix: x (..., n, d) and y (..., m, d) to (..., n, m), without the array of differences."""
    return summed((x[..., :, None, k] - y[..., None, :, k] for k in range(x.shape[-1])), metric, x.new_zeros(()))


def summed(differences: Iterable[Tensor], metric: str, start: Tensor) -> Tensor:
    """A kernel's cost, given the differences of every coordinate."""
    terms = (part.abs() if metric == "l1" else part.square() for part in differences)
    total = sum(terms, start=start)
    if metric != "euclidean":
        return total
    apart = total > 0
    return torch.where(apart, torch.where(apart, total, 1.0).sqrt(), 0.0)
