"""Arrays of any framework, computed on as torch tensors and handed back as the kind that came.

Frameworks are recognised through ``sys.modules``: an array of a framework that was never imported cannot exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

ACCEPTED = "a numpy, torch, jax or cupy array"


def framework(array: Any) -> str | None:
    """Name the framework of ``array``: "torch", "numpy", "jax", "cupy", "tensorflow", or None."""
    for name, kind in (("torch", "Tensor"), ("numpy", "ndarray"), ("cupy", "ndarray"), ("jax", "Array")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, kind, ())):
            return name
    if type(array).__module__.partition(".")[0] == "tensorflow":
        return "tensorflow"
    return None


def require_torch() -> Any:
    """Import torch, or say how to get it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("flashot-backends computes with PyTorch: pip install 'flashot-backends[torch]'") from error
    return torch


def to_torch(array: Any, name: str) -> Any:
    """Return ``array`` as a torch tensor on the device where it lies, without a copy where the framework allows it."""
    kind = framework(array)
    if kind == "torch":
        return array
    torch = require_torch()
    if kind == "numpy":
        return _from_numpy(torch, array, name)
    if kind == "jax":
        _refuse_tracer(array, name)
    if kind in ("jax", "cupy"):
        return torch.from_dlpack(array)
    raise TypeError(f"{name} is a {_type_name(array)}; accepted is {ACCEPTED}")


def restorer(array: Any) -> Callable[[Any], Any]:
    """Return the function that turns a torch tensor into the kind of array that ``array`` is."""
    kind = framework(array)
    if kind == "numpy":
        return lambda tensor: tensor.detach().cpu().numpy()
    if kind == "jax":
        return lambda tensor: sys.modules["jax"].numpy.from_dlpack(tensor.detach().contiguous())
    if kind == "cupy":
        return lambda tensor: sys.modules["cupy"].from_dlpack(tensor.detach())
    return lambda tensor: tensor


def _from_numpy(torch: Any, array: Any, name: str) -> Any:
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise TypeError(f"{name} has dtype {array.dtype}; accepted are float16, float32 and float64")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if odd or not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def _refuse_tracer(array: Any, name: str) -> None:
    if isinstance(array, sys.modules["jax"].core.Tracer):
        raise TypeError(
            f"{name} is a JAX tracer (a value inside jit, grad or vmap); call this outside of the transformation"
        )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
