"""MaxSim for JAX arrays with Pallas on TPU: a running maximum for a strip of query tokens, a document tile at a time.

The gradient is `jax_blocks`' products with the recorded choices, which suit the matrix unit as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flashot_backends.kernels.maxsim.jax_blocks import backward
from flashot_backends.kernels.tpu import without_x64

__all__ = ["applies", "backward", "best"]

LARGEST_FEATURES = 1024
ROWS, TOKENS = 256, 512

#: Tests run the kernels on a CPU: `True`, or `pltpu.InterpretParams(...)`.
interpret: Any = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    if request.dtype == "float64":
        return "float64 runs in the chunked kernel"
    if request.d > LARGEST_FEATURES:
        return f"at most {LARGEST_FEATURES} features fit a tile, not {request.d}"
    return None


def best(queries, documents, mask, record: bool):
    """Largest similarities and their places; see `jax_blocks`."""
    groups, count, tokens, features = queries.shape
    owned, length = documents.shape[1:3]
    height, width = min(ROWS, _round(count * tokens)), min(TOKENS, _round(length))
    rows = _padded(queries.reshape(groups, count * tokens, features), 1, height)
    columns = _padded(documents.reshape(groups * owned, length, features), 1, width)
    inputs = [rows, columns] if mask is None else [rows, columns, _alive(mask, length, width)]
    row = pl.BlockSpec((None, height, features), lambda b, j, i, t: (b, i, 0))
    column = pl.BlockSpec((None, width, features), lambda b, j, i, t: (b * owned + j, t, 0))
    alive = pl.BlockSpec((None, 1, width), lambda b, j, i, t: (b * owned + j, 0, t))
    out = pl.BlockSpec((None, 1, height), lambda b, j, i, t: (b * owned + j, 0, i))
    shape = groups * owned, 1, rows.shape[1]
    launch = pl.pallas_call(
        functools.partial(_kernel, length, columns.shape[1] // width),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)],
        grid=(groups, owned, rows.shape[1] // height, columns.shape[1] // width),
        in_specs=[row, column, alive][: len(inputs)],
        out_specs=[out, out],
        scratch_shapes=[pltpu.VMEM((height, 1), jnp.float32), pltpu.VMEM((height, 1), jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=48 << 20
        ),
        interpret=interpret,
    )
    with without_x64():
        value, places = launch(*inputs)
    cut = (part[:, 0, : count * tokens].reshape(groups, owned, count, tokens) for part in (value, places))
    value, places = cut
    return value, places if record else None


def _kernel(length, tiles, *refs):
    rows, columns, *alive, value, places, top, place = refs
    tile = pl.program_id(3)
    width = columns.shape[0]

    @pl.when(tile == 0)
    def _():
        top[...], place[...] = jnp.full(top.shape, -jnp.inf, jnp.float32), jnp.zeros(place.shape, jnp.int32)

    similar = _dot(rows[...], columns[...])
    at = tile * width + lax.broadcasted_iota(jnp.int32, similar.shape, 1)
    if alive:
        similar = jnp.where(alive[0][...] > 0, similar, -jnp.inf)
    elif length % width:
        similar = jnp.where(at < length, similar, -jnp.inf)
    highest = jnp.max(similar, axis=1, keepdims=True)
    first = jnp.min(jnp.where(similar == highest, at, 2**31 - 1), axis=1, keepdims=True)
    place[...] = jnp.where(highest > top[...], first, place[...])
    top[...] = jnp.maximum(top[...], highest)

    @pl.when(tile == tiles - 1)
    def _():
        value[...], places[...] = (jnp.reshape(part[...], (1, part.shape[0])) for part in (top, place))


def _dot(left, right):
    exact = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)


def _alive(mask, length, width):
    """1 for tokens that may win, (B·D, 1, padded) float32."""
    return _padded(mask.reshape(-1, 1, length).astype(jnp.float32), 2, width)


def _padded(array, axis, block):
    missing = -array.shape[axis] % block
    return jnp.pad(array, [(0, missing if place == axis else 0) for place in range(array.ndim)])


def _round(size: int) -> int:
    return -(-size // 128) * 128
