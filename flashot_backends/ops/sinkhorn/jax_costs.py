"""Costs that hold JAX arrays: their checks, and their way through ``jit``, ``grad`` and ``vmap`` as pytrees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import framework
from .costs import DenseCost, PointCloud, broadcast_batch


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
    if cost.metric != "sqeuclidean":
        raise ValueError(f"metric is {cost.metric!r}; accepted for JAX arrays is 'sqeuclidean'")
    for name in ("feature_weights", "labels", "table"):
        if getattr(cost, name) is not None:
            raise ValueError(f"{name} was given; accepted for JAX arrays are points alone")
    x, y = as_jax(cost.x, "x"), as_jax(cost.y, "y")
    if x.dtype != y.dtype:
        raise TypeError(f"x has dtype {x.dtype} and y {y.dtype}; accepted is one dtype for both")
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x has shape {x.shape} and y {y.shape}; accepted are (..., n, d) and (..., m, d)")
    broadcast_batch(x.shape[:-2], y.shape[:-2], "x", "y")
    object.__setattr__(cost, "x", x)
    object.__setattr__(cost, "y", y)


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


def dense(cost: PointCloud) -> jax.Array:
    """The cost as a matrix (..., n, m), from direct differences."""
    return ((cost.x[..., :, None, :] - cost.y[..., None, :, :]) ** 2).sum(-1)


def _flatten(cost: Any) -> tuple[tuple[Any, ...], None]:
    return cost.tensors, None


def _unflatten(kind: type, names: tuple[str, ...], children: Any) -> Any:
    """No checks: transformations put placeholders where arrays were."""
    cost: Any = object.__new__(kind)
    for name, value in zip((*names, "restore"), (*children, same), strict=True):
        object.__setattr__(cost, name, value)
    return cost


def _register(kind: type, names: tuple[str, ...]) -> None:
    jax.tree_util.register_pytree_node(kind, _flatten, lambda _, children: _unflatten(kind, names, children))


_register(PointCloud, ("x", "y"))
_register(DenseCost, ("M",))
