"""Pallas for CUDA through Triton: rows stay on chip and the column tiles in reach of their band stream past.

Columns are reduced by the same kernels on the transposed pairs, because blocks cannot share a running column sum, so a
full step is two passes. Scores are made by one function, `_score_tile`, in base 2: S · log2 e.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flashot_backends.kernels.attention.pairs import Pairs
from flashot_backends.kernels.attention.tuning import gpu_blocks

whole = False
LOG2E = math.log2(math.e)
LARGEST_FEATURES = 256

#: Tests run the kernels on a CPU through the interpreter.
interpret = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    if request.dtype == "float64":
        return "float64 runs in the chunked tier"
    if request.dense:
        return "dense masks and biases run in the chunked tier; padding, segments and bands run here"
    if max(request.d, request.e) > LARGEST_FEATURES:
        return f"at most {LARGEST_FEATURES} features per head fit a tile, not {max(request.d, request.e)}"
    return None


def lse(pairs: Pairs, w: jax.Array) -> jax.Array:
    """log Σ_j exp(S_ij + w_j), (P, n); −inf in rows without support. w: (P, m)."""
    return _run(_lse_kernel, pairs, rows={}, columns={"w": w})[..., 0] / LOG2E


def matvec(pairs: Pairs, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n). u: (P, n), w and z: (P, m)."""
    return _run(_matvec_kernel, pairs, rows={"u": u}, columns={"w": w, "z": z})[..., 0]


def apply(pairs: Pairs, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n, e). z: (P or fewer, m, e)."""
    return _run(_apply_kernel, pairs, rows={"u": u}, columns={"w": w, "values": z}, width=z.shape[-1])


def pull(pairs: Pairs, u, w, left, right, x_terms, y_terms) -> jax.Array:
    """Σ_j P_ij M_ij y_j with M = left rightᵀ − x_terms y_termsᵀ, (P, n, d).

    left: (P or fewer, n, e) and right: (P or fewer, m, e), or None; x_terms: (P, n, h), y_terms: (P, m, h).
    """
    rows = {"u": u, "terms": jnp.swapaxes(x_terms, 1, 2)}
    columns = {"w": w, "terms": jnp.swapaxes(y_terms, 1, 2)}
    if left is not None:
        rows, columns = {**rows, "values": left}, {**columns, "values": right}
    return _run(_pull_kernel, pairs, rows, columns, width=pairs.x.shape[-1])


def full_step(pairs: Pairs, w, log_target, extra) -> tuple[jax.Array, jax.Array]:
    """u = log_target − LSE_j(S + w) and then LSE_i(S + u); see `chunked.full_step`."""
    sums = lse(pairs, w)
    sums = sums if extra is None else jnp.logaddexp(sums, extra)
    u = jnp.where(sums == -jnp.inf, 0, log_target - sums)
    return u, lse(pairs.T, u)


class _Shape(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    n: int
    m: int
    height: int
    width: int
    tiles: int
    window: int | None
    ids: bool


# --- kernels: rows are dicts of arrays on chip, columns dicts of refs -------------------------------------------------


def _score_tile(shape: _Shape, rows, columns, scale, tile):
    """Scores in base 2 of the resident rows with one tile of columns, −inf off the support. The one place for both."""
    y = columns["features"][_tile(shape, tile), :]
    scores = _dot(rows["features"], y, 1, 1) * (scale * LOG2E) + (columns["w"][_tile(shape, tile)] * LOG2E)[None, :]
    for allowed in _support(shape, rows, columns, tile):
        scores = jnp.where(allowed, scores, -jnp.inf)
    return scores, y


def _support(shape: _Shape, rows, columns, tile):
    j = tile * shape.width + lax.broadcasted_iota(jnp.int32, (shape.height, shape.width), 1)
    if shape.m % shape.width:
        yield j < shape.m
    if shape.window is not None:
        i = rows["first"] + lax.broadcasted_iota(jnp.int32, (shape.height, shape.width), 0)
        yield jnp.abs(i - j) <= shape.window
    if shape.ids:
        yield rows["ids"][:, None] == columns["ids"][_tile(shape, tile)][None, :]


def _tile(shape: _Shape, tile):
    return pl.ds(tile * shape.width, shape.width)


def _dot(left, right, left_axis, right_axis):
    return lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _stream(shape: _Shape, rows, body, start):
    """Fold `body` over the column tiles that the band of these rows reaches."""
    if shape.window is None:
        return lax.fori_loop(0, shape.tiles, body, start)
    first = rows["first"]
    low = jnp.maximum(first - shape.window, 0) // shape.width
    high = jnp.minimum((first + shape.height - 1 + shape.window) // shape.width + 1, shape.tiles)
    return lax.fori_loop(low, high, body, start)


def _lse_kernel(shape: _Shape, rows, columns, scale, out):
    def body(tile, carry):
        top, total = carry
        scores, _ = _score_tile(shape, rows, columns, scale, tile)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        return new, total * jnp.exp2(top - safe) + jnp.sum(jnp.exp2(scores - safe[:, None]), axis=1)

    start = jnp.full((shape.height,), -jnp.inf, jnp.float32), jnp.zeros((shape.height,), jnp.float32)
    top, total = _stream(shape, rows, body, start)
    out[...] = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def _plan_tile(shape: _Shape, rows, columns, scale, tile):
    scores, y = _score_tile(shape, rows, columns, scale, tile)
    return jnp.exp2(scores + (rows["u"] * LOG2E)[:, None]), y


def _matvec_kernel(shape: _Shape, rows, columns, scale, out):
    def body(tile, total):
        plan, _ = _plan_tile(shape, rows, columns, scale, tile)
        return total + jnp.sum(plan * columns["z"][_tile(shape, tile)][None, :], axis=1)

    out[...] = _stream(shape, rows, body, jnp.zeros((shape.height,), jnp.float32))


def _apply_kernel(shape: _Shape, rows, columns, scale, out):
    def body(tile, total):
        plan, _ = _plan_tile(shape, rows, columns, scale, tile)
        values = columns["values"][_tile(shape, tile), :]
        return total + _dot(plan.astype(values.dtype), values, 1, 0)

    out[...] = _stream(shape, rows, body, jnp.zeros(out.shape, jnp.float32))


def _pull_kernel(shape: _Shape, rows, columns, scale, out):
    def body(tile, total):
        plan, y = _plan_tile(shape, rows, columns, scale, tile)
        gradient = plan * _cotangent(shape, rows, columns, tile)
        return total + _dot(gradient.astype(y.dtype), y, 1, 0)

    out[...] = _stream(shape, rows, body, jnp.zeros(out.shape, jnp.float32))


def _cotangent(shape: _Shape, rows, columns, tile):
    """left rightᵀ − Σ_h x_h y_hᵀ, the small sum in float32 whatever the inputs' dtype."""
    total = jnp.zeros((shape.height, shape.width), jnp.float32)
    if "values" in rows:
        total = _dot(rows["values"], columns["values"][_tile(shape, tile), :], 1, 1)
    for term, near in enumerate(rows["terms"]):
        total = total - near[:, None] * columns["terms"][term, _tile(shape, tile)][None, :]
    return total


# --- launching -------------------------------------------------------------------------------------------------------


def _run(kernel, pairs: Pairs, rows: dict, columns: dict, width: int = 0) -> jax.Array:
    """Launch over (row tiles, problems); returns (P, n, 1) or (P, n, width)."""
    height, breadth, warps, stages = gpu_blocks(pairs.x.dtype, max(pairs.x.shape[-1], width), kernel is _lse_kernel)
    height, breadth = min(height, _power(pairs.rows)), min(breadth, _power(pairs.columns))
    rows, columns = {**rows, "features": pairs.x}, {**columns, "features": pairs.y}
    if pairs.x_ids is not None:
        rows, columns = {**rows, "ids": pairs.x_ids}, {**columns, "ids": pairs.y_ids}
    rows = {name: _padded(name, part, height) for name, part in rows.items()}
    columns = {name: _padded(name, part, breadth) for name, part in columns.items()}
    padded = rows["features"].shape[1]
    tiles = columns["features"].shape[1] // breadth
    shape = _Shape(pairs.rows, pairs.columns, height, breadth, tiles, pairs.window, pairs.x_ids is not None)
    specs = [_row_spec(name, part, height, pairs.problems) for name, part in rows.items()]
    specs += [_column_spec(part, pairs.problems) for part in columns.values()]
    out = (pairs.problems, padded) if width == 0 else (pairs.problems, padded, _power(width))
    result = pl.pallas_call(
        functools.partial(_entry, kernel, shape, tuple(rows), tuple(columns)),
        out_shape=jax.ShapeDtypeStruct(out, jnp.float32),
        grid=(padded // height, pairs.problems),
        in_specs=[pl.BlockSpec((1,), lambda i, p: (p,)), *specs],
        out_specs=pl.BlockSpec((None, height, *out[2:]), lambda i, p: (p, i) if width == 0 else (p, i, 0)),
        compiler_params=_compiler_params(warps, stages),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(pairs.scale, *rows.values(), *columns.values())
    return result[:, : pairs.rows, None] if width == 0 else result[:, : pairs.rows, :width]


def _entry(kernel, shape, row_names, column_names, scale, *refs):
    inputs, out = refs[:-1], refs[-1]
    split = len(row_names)
    rows = {name: _resident(name, ref) for name, ref in zip(row_names, inputs[:split], strict=True)}
    rows["first"] = pl.program_id(0) * shape.height  # read here: the interpreter knows it only outside of loops
    columns = dict(zip(column_names, inputs[split:], strict=True))
    kernel(shape, rows, columns, scale[0], out)


def _resident(name, ref):
    """Read once, before the stream; the terms one by one, since their number need not be a power of two."""
    return [ref[term, :] for term in range(ref.shape[0])] if name == "terms" else ref[...]


def _compiler_params(warps: int, stages: int) -> Any:
    """Name Triton explicitly: which compiler Pallas prefers on a GPU has changed from release to release."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


def _padded(name: str, array: jax.Array, block: int) -> jax.Array:
    """Tokens to a multiple of the block, features to a power of two; zeros there are harmless or masked."""
    token_axis = 2 if name == "terms" else 1
    amounts = [(0, 0)] * array.ndim
    amounts[token_axis] = (0, -array.shape[token_axis] % block)
    if name in ("features", "values"):
        amounts[2] = (0, _power(array.shape[2]) - array.shape[2])
    return jnp.pad(array, amounts) if any(after for _, after in amounts) else array


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _row_spec(name: str, array: jax.Array, height: int, problems: int):
    shared = problems // array.shape[0]
    if name == "terms":
        return pl.BlockSpec((None, array.shape[1], height), lambda i, p: (p // shared, 0, i))
    if array.ndim == 2:
        return pl.BlockSpec((None, height), lambda i, p: (p // shared, i))
    return pl.BlockSpec((None, height, array.shape[2]), lambda i, p: (p // shared, i, 0))


def _column_spec(array: jax.Array, problems: int):
    shared = problems // array.shape[0]
    return pl.BlockSpec((None, *array.shape[1:]), lambda i, p: (p // shared, *(0,) * (array.ndim - 1)))
