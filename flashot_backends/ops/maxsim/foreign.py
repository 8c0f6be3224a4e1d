"""numpy, JAX and CuPy arrays: computed on as torch tensors, answered in kind."""

import functools

import numpy as np
import torch

from flashot_backends.ops.arrays import framework, restorer, to_torch

OTHERS = ("numpy", "jax", "cupy", "tensorflow")


def in_torch(function):
    """Let a function of torch tensors take other arrays, or lists of them, in any argument."""

    @functools.wraps(function)
    def call(queries, documents, *args, **kwargs):
        if type(queries) is torch.Tensor:
            return function(queries, documents, *args, **kwargs)
        first = _first(queries)
        if isinstance(first, torch.Tensor) or framework(first) not in OTHERS:
            return function(queries, documents, *args, **kwargs)
        if framework(first) == "jax" and function.__name__ in ("maxsim", "topk"):
            from . import jax_ops

            return getattr(jax_ops, function.__name__)(queries, documents, *args, **kwargs)
        queries, documents = _taken(queries, "queries"), _taken(documents, "documents")
        taken = [_taken(value, "an argument") for value in args]
        kwargs = {name: _taken(value, name) for name, value in kwargs.items()}
        return _given(function(queries, documents, *taken, **kwargs), restorer(first))

    return call


def _first(value):
    while isinstance(value, (list, tuple)) and len(value):
        value = value[0]
    return value


def _taken(value, name):
    if isinstance(value, (list, tuple)):
        return [_taken(item, name) for item in value]
    if framework(value) not in OTHERS:
        return value
    if framework(value) != "tensorflow" and np.dtype(value.dtype).kind in "biu":
        return torch.from_numpy(np.array(value))  # masks
    return to_torch(value, name)


def _given(result, restore):
    if isinstance(result, (list, tuple)):
        return type(result)(_given(item, restore) for item in result)
    return restore(result)
