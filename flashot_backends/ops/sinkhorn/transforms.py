"""Choices of single pairs: the hard minimum over columns, and the largest entries of a plan. Indices are streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import torch_ops
from .control import backend_names
from .costs import DenseCost, PointCloud
from .problem import make_softmin


class CTransform(NamedTuple):
    """A potential and the columns that attain it, both (..., n)."""

    values: Any
    indices: Any


class TopK(NamedTuple):
    """Entries of a plan, largest first, and their columns (or rows), both (..., n, k)."""

    values: Any
    indices: Any


def c_transform(cost: PointCloud | DenseCost, g: Any, backend: str | Sequence[str] | None) -> CTransform:
    """The operation's ``c_transform``."""
    problem = make_softmin(cost, g, 1.0, "g")
    x, y, h, epsilon, metric, shaped = problem
    index = largest(x, y, h, epsilon, 1, (metric, "", backend_names(backend)))
    values = (torch_ops.chosen(x, y, index, metric, h.dtype) - at(h, index))[:, :, 0]
    indices = index[:, :, 0].reshape(shaped(values).shape)
    return CTransform(cost.restore(shaped(values)), cost.restore(indices))


def largest(x: Tensor, y: Tensor | None, t: Tensor, epsilon: Tensor, count: int, how: tuple[str, str, str]) -> Tensor:
    """The columns with the largest t_j − C_ij/ε in each row, (B, n, count); indices have no derivative."""
    detached = (None if part is None else part.detach() for part in (x, y, t, epsilon))
    return torch_ops.largest(*detached, count, *how)  # type: ignore[no-any-return]


def at(columns: Tensor, index: Tensor) -> Tensor:
    """columns[index]: (B, m) and (B, n, k) to (B, n, k)."""
    return columns.gather(1, index.flatten(1)).reshape(index.shape)
