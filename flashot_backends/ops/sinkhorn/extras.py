"""What a point cloud may carry besides its points: weights of the features, and classes with a table of costs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays import to_torch
from .costs import PointCloud, broadcast_batch, check_labelling, floating
from .formulas import product
from .metrics import pairwise


def check_extras(cost: PointCloud) -> None:
    """Check feature weights, labels and table, and store them as tensors: one look at their values."""
    if cost.feature_weights is not None:
        _check_feature_weights(cost)
    if cost.labels is not None or cost.table is not None:
        _check_labels(cost)


def _check_feature_weights(cost: PointCloud) -> None:
    weights, d = floating(cost.feature_weights, "feature_weights"), cost.x.shape[-1]
    if weights.ndim == 0 or weights.shape[-1] != d:
        raise ValueError(f"feature_weights has shape {tuple(weights.shape)}; accepted is (..., {d}), one a coordinate")
    _same_place(weights, "feature_weights", cost)
    broadcast_batch(cost.x.shape[:-2], weights.shape[:-1], "x", "feature_weights")
    if _visible(weights) and not bool(((weights >= 0) & (weights < math.inf)).all()):
        raise ValueError("feature_weights holds negative, infinite or NaN numbers; accepted are finite ones from 0")
    object.__setattr__(cost, "feature_weights", weights)


def _check_labels(cost: PointCloud) -> None:
    check_labelling(cost)
    table = floating(cost.table, "table")
    _same_place(table, "table", cost)
    if table.ndim < 2 or 0 in table.shape[-2:]:
        raise ValueError(f"table has shape {tuple(table.shape)}; accepted is (..., K, L), K and L from 1")
    if _visible(table) and not bool(table.isfinite().all()):
        raise ValueError("table holds NaN or infinite costs; accepted are finite ones")
    sides = zip(cost.labels, (cost.x, cost.y), ("x", "y"), table.shape[-2:], strict=True)
    object.__setattr__(cost, "labels", tuple(_checked_labels(cost, *side) for side in sides))
    object.__setattr__(cost, "table", table)
    _ = cost.batch


def _checked_labels(cost: PointCloud, given: Any, points: Tensor, name: str, classes: int) -> Tensor:
    labels = _integers(given, name)
    if labels.ndim == 0 or labels.shape[-1] != points.shape[-2]:
        raise ValueError(f"labels of {name} have shape {tuple(labels.shape)}; accepted is (..., {points.shape[-2]})")
    _same_place(labels, f"labels of {name}", cost, dtype=False)
    labels = labels.long()
    if labels.numel() and _visible(labels):
        low, high = (int(number) for number in torch.stack(labels.aminmax()).tolist())
        if low < 0 or high >= classes:
            raise ValueError(f"labels of {name} go from {low} to {high}; accepted are 0 to {classes - 1}, as in table")
    return labels


def _integers(given: Any, name: str) -> Tensor:
    if isinstance(given, Tensor):
        labels = given
    elif type(given).__module__ == "numpy" and getattr(given, "dtype", None) is not None and given.dtype.kind in "iu":
        labels = torch.from_numpy(given.astype("int64"))
    else:
        labels = to_torch(given, f"labels of {name}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels of {name} have dtype {labels.dtype}; accepted are integers")
    return labels


def _same_place(tensor: Tensor, name: str, cost: PointCloud, dtype: bool = True) -> None:
    if tensor.device != cost.x.device:
        raise ValueError(f"{name} is on {tensor.device} and x on {cost.x.device}; accepted is one device for all")
    wide = torch.float64 if cost.x.dtype == torch.float64 else torch.float32
    if dtype and tensor.dtype not in (cost.x.dtype, wide):
        raise TypeError(f"{name} has dtype {tensor.dtype} and x {cost.x.dtype}; accepted is {wide}")


def _visible(tensor: Tensor) -> bool:
    """Whether values can be looked at: no compiler traces, no graph is captured, and they exist."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return tensor.device.type != "meta" and not torch._C._len_torch_dispatch_stack()


def dense(cost: PointCloud) -> Tensor:
    """The cost as a matrix, in plain formulas."""
    x, y, weights = cost.x, cost.y, cost.feature_weights
    if cost.metric in ("cosine", "inner"):
        scale = 1.0 if weights is None else weights.sqrt().unsqueeze(-2)
        x, y = x * scale, y * scale
        if cost.metric == "cosine":
            x, y = (part / part.square().sum(-1, keepdim=True).sqrt() for part in (x, y))
        out = float(cost.metric == "cosine") - _products(x, y)
    else:
        if weights is not None:
            scale = (weights if cost.metric == "l1" else weights.sqrt()).unsqueeze(-2)
            x, y = x * scale, y * scale
        out = pairwise(x, y, cost.metric)
    if cost.labels is None:
        return out
    rows, columns = cost.labels
    return out + cost.label_weight * _looked_up(cost.table, rows, columns)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ, (..., n, d) and (..., m, d) to (..., n, m)."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    flat = (part.expand(*batch, *part.shape[-2:]).reshape(math.prod(batch), *part.shape[-2:]) for part in (x, y))
    return product(*flat).reshape(*batch, x.shape[-2], y.shape[-2])


def _looked_up(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """table[rows_i, columns_j]: (..., K, L), (..., n) and (..., m) to (..., n, m)."""
    batch = torch.broadcast_shapes(table.shape[:-2], rows.shape[:-1], columns.shape[:-1])
    n, m = rows.shape[-1], columns.shape[-1]
    index = rows.expand(*batch, n)[..., None].expand(*batch, n, table.shape[-1])
    chosen = table.expand(*batch, *table.shape[-2:]).gather(-2, index)
    return chosen.gather(-1, columns.expand(*batch, m)[..., None, :].expand(*batch, n, m))
