"""The two kinds of cost a transport problem can have: points with a metric, or a matrix."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..arrays import framework, restorer, to_torch

METRICS = ("sqeuclidean", "euclidean", "l1", "cosine", "inner")
ALIASES = {"cityblock": "l1"}
LABELLED = ("sqeuclidean", "cosine", "inner")
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class PointCloud:
    """The cost between two clouds of points, never stored as a matrix.

    Parameters
    ----------
    x, y : arrays of shape (..., n, d) and (..., m, d)
        Points, float16, bfloat16, float32 or float64, both of one dtype on one device. Leading axes are the batch and
        broadcast against each other. For clouds of different sizes see ``PointCloud.ragged``.
    metric : "sqeuclidean", "euclidean", "l1" (or "cityblock"), "cosine", "inner"
        C_ij = |x_i − y_j|², |x_i − y_j| (without gradient where points meet), Σ_k |x_ik − y_jk|, 1 − cos(x_i, y_j) (no
        point may be at the origin), or −⟨x_i, y_j⟩: the negative inner product, so that near directions are cheap.
    feature_weights : array (..., d), optional
        Weights w_k ≥ 0 of the coordinates: w_k (x_ik − y_jk)², w_k |x_ik − y_jk|, and w_k x_ik y_jk in products.
    labels : pair of integer arrays (..., n) and (..., m), optional
        Classes of the points. With ``table`` (..., K, L), costs between the classes, ``label_weight`` · table[l_i, k_j]
        is added to the cost, as in Alvarez-Melis and Fusi, "Geometric dataset distances via optimal transport",
        NeurIPS 2020. For "sqeuclidean", "cosine" and "inner"; differentiable by the table too.

    Raises
    ------
    TypeError
        An argument is no array of floating point numbers (labels: of integers), or the dtypes or frameworks differ.
    ValueError
        Shapes do not match, devices differ, the metric is unknown, a weight is negative, a label is no row or column of
        the table, or the table holds infinite numbers.
    """

    x: Any
    y: Any
    metric: str = "sqeuclidean"
    feature_weights: Any = None
    labels: Any = None
    table: Any = None
    label_weight: float = 1.0
    restore: Callable[[Any], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        metric = ALIASES.get(self.metric, self.metric)
        if metric not in METRICS:
            raise ValueError(f"metric is {self.metric!r}; accepted is one of {METRICS}")
        object.__setattr__(self, "metric", metric)
        if framework(self.x) == "jax":
            _of_jax_arrays(self)
            return
        object.__setattr__(self, "restore", restorer(self.x))
        x, y = floating(self.x, "x"), floating(self.y, "y")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)
        same_kind(x, y, "x", "y")
        if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; accepted are (..., n, d) and (..., m, d)"
            )
        broadcast_batch(x.shape[:-2], y.shape[:-2], "x", "y")
        if self.feature_weights is not None or self.labels is not None or self.table is not None:
            from .extras import check_extras

            check_extras(self)

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes, broadcast."""
        batch = broadcast_batch(self.x.shape[:-2], self.y.shape[:-2], "x", "y")
        for name, part, tail in self._extras():
            batch = broadcast_batch(batch, part.shape[: part.ndim - tail], "x", name)
        return batch

    def _extras(self) -> list[tuple[str, Any, int]]:
        """Name, tensor and own axes of what else holds the cost."""
        found = [] if self.feature_weights is None else [("feature_weights", self.feature_weights, 1)]
        if self.labels is not None:
            found += [("labels", self.labels[0], 1), ("labels", self.labels[1], 1), ("table", self.table, 2)]
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., n, m), the shape the cost would have as a matrix."""
        return (*self.batch, self.x.shape[-2], self.y.shape[-2])

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The points."""
        return (self.x, self.y)

    @property
    def T(self) -> PointCloud:  # noqa: N802 - the field's name for a transpose
        """The same cost with rows and columns exchanged."""
        labels = None if self.labels is None else self.labels[::-1]
        table = None if self.table is None else self.table.swapaxes(-1, -2)
        turned = PointCloud(self.y, self.x, self.metric, self.feature_weights, labels, table, self.label_weight)
        object.__setattr__(turned, "restore", self.restore)
        return turned

    @classmethod
    def ragged(
        cls, x: Any, y: Any, metric: str = "sqeuclidean", feature_weights: Any = None, labels: Any = None,
        table: Any = None, label_weight: float = 1.0,
    ) -> list[PointCloud]:  # fmt: skip
        """One cost for each pair of clouds, of any sizes: lists of (n_k, d) and (m_k, d), or jagged nested tensors.

        Labels are a pair of lists; feature weights and table hold for all. ``solve`` takes the list.
        """
        xs, ys = pieces(x, "x"), pieces(y, "y")
        sides = ([None] * len(xs), [None] * len(ys)) if labels is None else [pieces(side, "labels") for side in labels]
        if len({len(xs), len(ys), *(len(side) for side in sides)}) > 1:
            counts = len(xs), len(ys), *(len(side) for side in sides)
            raise ValueError(f"x, y and labels have {counts} entries; accepted are equally many")
        pairs = ((one, two) if labels is not None else None for one, two in zip(*sides, strict=True))
        rest = feature_weights, table, label_weight
        return [cls(one, two, metric, rest[0], pair, *rest[1:]) for one, two, pair in zip(xs, ys, pairs, strict=True)]

    def dense(self) -> Any:
        """Return the cost as a matrix (..., n, m), from direct differences, differentiable."""
        if framework(self.x) == "jax":
            from .jax_metrics import dense
        else:
            from .extras import dense

        return dense(self)


@dataclass(frozen=True, eq=False)
class DenseCost:
    """A cost matrix.

    Parameters
    ----------
    M : array of shape (..., n, m)
        Costs, float16, bfloat16, float32 or float64. +inf forbids a pair.

    Raises
    ------
    TypeError
        M is no array of floating point numbers.
    ValueError
        M has fewer than two axes.
    """

    M: Any
    restore: Callable[[Any], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if framework(self.M) == "jax":
            _of_jax_arrays(self)
            return
        object.__setattr__(self, "restore", restorer(self.M))
        object.__setattr__(self, "M", floating(self.M, "M"))
        if self.M.ndim < 2:
            raise ValueError(f"M has shape {tuple(self.M.shape)}; accepted is (..., n, m)")

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes."""
        return tuple(self.M.shape[:-2])

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., n, m)."""
        return tuple(self.M.shape)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensor that holds the cost."""
        return (self.M,)

    @property
    def T(self) -> DenseCost:  # noqa: N802
        """The same cost with rows and columns exchanged."""
        turned = DenseCost(self.M.swapaxes(-1, -2))
        object.__setattr__(turned, "restore", self.restore)
        return turned

    @classmethod
    def ragged(cls, M: Any) -> list[DenseCost]:
        """One cost for each matrix of a list, of any sizes (n_k, m_k). ``solve`` takes the list."""
        return [cls(matrix) for matrix in pieces(M, "M")]

    def dense(self) -> Any:
        """Return the matrix itself."""
        return self.M


def _of_jax_arrays(cost: Any) -> None:
    from .jax_costs import settle

    settle(cost)


def check_labelling(cost: PointCloud) -> None:
    """Refuse labels without a table, a table without labels, and what goes with neither."""
    if cost.labels is None or cost.table is None:
        there, missing = ("table", "labels") if cost.labels is None else ("labels", "table")
        raise ValueError(f"{there} is given without {missing}; accepted are both or none")
    if cost.metric not in LABELLED:
        raise ValueError(f"labels are given with the metric {cost.metric!r}; accepted with labels is one of {LABELLED}")
    if not isinstance(cost.labels, tuple | list) or len(cost.labels) != 2:
        raise TypeError(f"labels is a {type(cost.labels).__name__}; accepted is a pair of integer arrays")
    weight = cost.label_weight
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ValueError(f"label_weight is {weight!r}; accepted is a finite number")


def pieces(given: Any, name: str) -> list[Any]:
    """The entries of a list, a tuple, or a jagged nested tensor."""
    if getattr(given, "is_nested", False):
        return list(given.unbind())
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} is a {type(given).__name__}; accepted is a list of arrays, or a jagged nested tensor")
    return list(given)


def floating(array: Any, name: str) -> Any:
    """Return ``array`` as a torch tensor of floating point numbers, or say what is wrong with it."""
    tensor = to_torch(array, name)
    kind = _name_of(tensor.dtype)
    if kind not in FLOATS:
        raise TypeError(f"{name} has dtype {kind}; accepted are {', '.join(FLOATS)}")
    return tensor


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def same_kind(first: Any, second: Any, first_name: str, second_name: str) -> None:
    """Refuse two tensors of different dtypes or on different devices."""
    if first.dtype != second.dtype:
        raise TypeError(
            f"{first_name} has dtype {first.dtype} and {second_name} {second.dtype}; accepted is one dtype for both"
        )
    if first.device != second.device:
        raise ValueError(
            f"{first_name} is on {first.device} and {second_name} on {second.device}; accepted is one device for both"
        )


def broadcast_batch(first: Any, second: Any, first_name: str, second_name: str) -> tuple[int, ...]:
    """Broadcast two batch shapes as numpy does."""
    if first == second:
        return tuple(first)
    longest = max(len(first), len(second))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in (first, second)]
    if any(a != b and a != 1 and b != 1 for a, b in zip(*padded, strict=True)):
        raise ValueError(
            f"the leading axes of {first_name} are {tuple(first)} and those of {second_name} {tuple(second)}; "
            "accepted are shapes that broadcast"
        )
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))
