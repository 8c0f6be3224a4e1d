"""Costs that hold JAX arrays: their checks, and their way through ``jit``, ``grad`` and ``vmap`` as pytrees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import framework
from .costs import DenseCost, PointCloud, broadcast_batch, check_labelling


def settle(cost: Any) -> None:
    """Check a cost whose first array is of JAX, and turn its other arrays into that kind."""
    if isinstance(cost, PointCloud):
        _settle_points(cost)
    else:
        object.__setattr__(cost, "M", as_jax(cost.M, "M"))
        if cost.M.ndim < 2:
            raise ValueError(f"M has shape {cost.M.shape}; accepted is (..., n, m)")
    object.__setattr__(cost, "restore", same)


def _settle_points(cost: PointCloud) -> None:
    x, y = as_jax(cost.x, "x"), as_jax(cost.y, "y")
    if x.dtype != y.dtype:
        raise TypeError(f"x has dtype {x.dtype} and y {y.dtype}; accepted is one dtype for both")
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x has shape {x.shape} and y {y.shape}; accepted are (..., n, d) and (..., m, d)")
    broadcast_batch(x.shape[:-2], y.shape[:-2], "x", "y")
    object.__setattr__(cost, "x", x)
    object.__setattr__(cost, "y", y)
    if cost.feature_weights is not None:
        _settle_feature_weights(cost)
    if cost.labels is not None or cost.table is not None:
        _settle_labels(cost)


def _settle_feature_weights(cost: PointCloud) -> None:
    weights, d = as_jax(cost.feature_weights, "feature_weights"), cost.x.shape[-1]
    if weights.ndim == 0 or weights.shape[-1] != d:
        raise ValueError(f"feature_weights has shape {weights.shape}; accepted is (..., {d}), one a coordinate")
    _check_dtype(weights, "feature_weights", cost)
    broadcast_batch(cost.x.shape[:-2], weights.shape[:-1], "x", "feature_weights")
    if visible(weights) and not bool(((weights >= 0) & (weights < jnp.inf)).all()):
        raise ValueError("feature_weights holds negative, infinite or NaN numbers; accepted are finite ones from 0")
    object.__setattr__(cost, "feature_weights", weights)


def _settle_labels(cost: PointCloud) -> None:
    check_labelling(cost)
    table = as_jax(cost.table, "table")
    _check_dtype(table, "table", cost)
    if table.ndim < 2 or 0 in table.shape[-2:]:
        raise ValueError(f"table has shape {table.shape}; accepted is (..., K, L), K and L from 1")
    if visible(table) and not bool(jnp.isfinite(table).all()):
        raise ValueError("table holds NaN or infinite costs; accepted are finite ones")
    sides = zip(cost.labels, (cost.x, cost.y), ("x", "y"), table.shape[-2:], strict=True)
    object.__setattr__(cost, "labels", tuple(_checked_labels(*side) for side in sides))
    object.__setattr__(cost, "table", table)
    _ = cost.batch


def _checked_labels(given: Any, points: jax.Array, name: str, classes: int) -> jax.Array:
    if framework(given) not in ("jax", "numpy"):
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        raise TypeError(f"labels of {name} are a {kind}; accepted with JAX arrays are JAX and numpy arrays")
    labels = jnp.asarray(given)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels of {name} have dtype {labels.dtype}; accepted are integers")
    if labels.ndim == 0 or labels.shape[-1] != points.shape[-2]:
        raise ValueError(f"labels of {name} have shape {labels.shape}; accepted is (..., {points.shape[-2]})")
    if labels.size and visible(labels):
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"labels of {name} go from {low} to {high}; accepted are 0 to {classes - 1}, as in table")
    return labels


def _check_dtype(array: jax.Array, name: str, cost: PointCloud) -> None:
    dtype = jnp.promote_types(cost.x.dtype, jnp.float32)
    if array.dtype not in (cost.x.dtype, dtype):
        raise TypeError(f"{name} has dtype {array.dtype} and x {cost.x.dtype}; accepted is {dtype}")


def visible(array: Any) -> bool:
    """Whether values can be looked at: not inside of ``jit``, ``grad`` or ``vmap``."""
    return not isinstance(array, jax.core.Tracer)


def as_jax(array: Any, name: str) -> jax.Array:
    """Return ``array`` as a JAX array of floating point numbers, or say what is wrong with it."""
    if framework(array) not in ("jax", "numpy"):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name} is a {kind}; accepted with JAX arrays are JAX and numpy arrays")
    if str(array.dtype) not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"{name} has dtype {array.dtype}; accepted are float16, bfloat16, float32, float64")
    return jnp.asarray(array)


def same(array: Any) -> Any:
    """JAX arrays come back as they are."""
    return array


def _register_points() -> None:
    names = ("x", "y", "feature_weights", "labels", "table", "metric", "label_weight")

    def flatten(cost: PointCloud) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        *parts, metric, weight = (getattr(cost, name) for name in names)
        return tuple(parts), (metric, weight)

    unflatten = lambda kept, parts: _restored(PointCloud, names, (*parts, *kept))  # noqa: E731
    jax.tree_util.register_pytree_node(PointCloud, flatten, unflatten)


def _restored(kind: type, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """No checks: transformations put placeholders where arrays were."""
    cost: Any = object.__new__(kind)
    for name, value in zip((*names, "restore"), (*values, same), strict=True):
        object.__setattr__(cost, name, value)
    return cost


_register_points()
jax.tree_util.register_pytree_node(
    DenseCost, lambda cost: ((cost.M,), None), lambda _, parts: _restored(DenseCost, ("M",), tuple(parts))
)
