"""MaxSim for JAX arrays with Pallas through Triton: a tile of query tokens stays on chip, a document streams past it.

The best similarity so far is kept for every place of the tile and reduced once at the end. The gradient of a document
token is summed by the program that owns it, over the query tokens that chose it, in a fixed order; that of the queries
gathers the chosen rows. float32 goes through the matrix units as two float16 parts, three products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

LARGEST_FEATURES = 256
ROWS, TOKENS = 128, 64
#: Gathered numbers held at once in the gradient of the queries.
BLOCK = 1 << 26

#: Tests run the kernels on a CPU through the interpreter.
interpret = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    if request.dtype == "float64":
        return "float64 runs in the chunked kernel"
    if request.d > LARGEST_FEATURES:
        return f"at most {LARGEST_FEATURES} features fit a tile, not {request.d}"
    return None


def best(queries, documents, mask, record: bool):
    """Largest similarities and their places; see `jax_blocks`."""
    groups, count, tokens, _ = queries.shape
    owned = documents.shape[1]
    rows, q_unit = _parts(queries.reshape(groups, count * tokens, -1), ROWS)
    columns, d_unit = _parts(documents.reshape(-1, *documents.shape[2:]), TOKENS)
    bias = _bias(mask, documents.shape[2], columns[0].shape[:2])
    value, places = _best(rows, columns, bias, owned, record, interpret)
    if q_unit is not None:
        value = value * (q_unit[:, None] * d_unit.reshape(groups, owned))[:, :, None]
    shape = groups, owned, count, tokens
    cut = [None if part is None else part[:, :, : count * tokens].reshape(shape) for part in (value, places)]
    return cut[0], cut[1]


def backward(queries, documents, winners, gradient):
    """Gradients of both sides; see `jax_blocks`."""
    groups, count, tokens, features = queries.shape
    flat = winners.reshape(*winners.shape[:2], -1)
    slopes = jnp.where(flat >= 0, jnp.repeat(gradient, tokens, axis=2), 0)
    to_queries = _gathered(documents, flat, slopes).reshape(queries.shape).astype(queries.dtype)
    rows, unit = _parts(queries.reshape(groups, count * tokens, -1), ROWS)
    padded = rows[0].shape[1] - count * tokens
    flat, slopes = (jnp.pad(part, ((0, 0), (0, 0), (0, padded))) for part in (flat, slopes))
    high, low, slope_unit = _split(slopes, -1, rows[0].dtype)
    found = _owned(rows, flat, high, low, _padded_size(documents.shape[2], TOKENS), interpret)
    unit = slope_unit if unit is None else slope_unit * unit[:, None]
    found = found * unit[..., None, None]
    return to_queries, found[:, :, : documents.shape[2], :features].astype(documents.dtype)


def _gathered(documents, winners, slopes):
    """Σ_D slope · the chosen row of document D, (B, rows, d) in float32, some documents at a time."""
    each = winners.shape[0] * winners.shape[2] * documents.shape[3]
    size = min(documents.shape[1], max(1, BLOCK // max(each, 1)))
    total = jnp.zeros((winners.shape[0], winners.shape[2], documents.shape[3]), jnp.float32)

    def add(total, start, size):
        block, won, slope = (lax.dynamic_slice_in_dim(part, start, size, 1) for part in (documents, winners, slopes))
        chosen = jnp.take_along_axis(block, jnp.maximum(won, 0)[..., None], 2)
        return total + (chosen.astype(jnp.float32) * slope[..., None]).sum(1)

    whole, rest = divmod(documents.shape[1], size)
    total = lax.fori_loop(0, whole, lambda i, total: add(total, i * size, size), total)
    return add(total, whole * size, rest) if rest else total


# --- layout -----------------------------------------------------------------------------------------------------------


def _parts(array, block: int):
    """Padded parts (count, tokens, D) and, for float32, their unit (count,): two float16 parts of at most 2^14."""
    sizes = _padded_size(array.shape[1], block), _power(array.shape[2])
    padded = jnp.pad(array, [(0, 0), *((0, size - old) for size, old in zip(sizes, array.shape[1:], strict=True))])
    if array.dtype != jnp.float32:
        return (padded,), None
    high, low, unit = _split(padded, (1, 2), jnp.float16)
    return (high, low), unit


def _split(array, axes, kind):
    """Two parts of at most 2^14 whose sum times the unit is the array; the unit has no such axes."""
    largest = jnp.max(jnp.abs(array), axis=axes, keepdims=True)
    unit = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(largest, 1e-30))) - 14)
    scaled, width = array / unit, jnp.finfo(kind)
    high = lax.reduce_precision(scaled, width.nexp, width.nmant)  # XLA would drop a cast to and from as superfluous
    return high.astype(kind), (scaled - high).astype(kind), unit.squeeze(axes)


def _bias(mask, tokens: int, shape):
    """0 for tokens that may win, −inf for masked ones and for padding; None where there are neither."""
    if mask is None and tokens == shape[1]:
        return None
    mask = jnp.ones((1, tokens), bool) if mask is None else mask.reshape(-1, tokens)
    alive = jnp.pad(mask, ((0, 0), (0, shape[1] - tokens)))
    return jnp.broadcast_to(jnp.where(alive, 0.0, -jnp.inf).astype(jnp.float32), shape)


def _padded_size(size: int, block: int) -> int:
    block = min(block, _power(size))
    return -(-size // block) * block


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


# --- kernels ----------------------------------------------------------------------------------------------------------


def _foldable(function):
    """Under vmap there are more groups, not one more axis of a grid that has only three, two of them short."""
    folding = jax.custom_batching.custom_vmap(function)

    @folding.def_vmap
    def _(size, batched, *arguments):
        def fold(own, part):
            part = part if own else jnp.broadcast_to(part, (size, *part.shape))
            return part.reshape(-1, *part.shape[2:])

        out = folding(*jax.tree.map(fold, batched, list(arguments)))
        return jax.tree.map(lambda part: part.reshape(size, -1, *part.shape[1:]), out), jax.tree.map(
            lambda _: True, out
        )

    return folding


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _best(rows, columns, bias, owned, record, interpreted):
    """(B, D, padded rows) float32, and int32 places or None. rows: parts (B, padded, d); columns: (B·D, padded, d)."""
    found = _foldable(functools.partial(_best_call, owned, record, interpreted))(rows, columns, bias)
    value, *places = [part.reshape(-1, owned, part.shape[1]) for part in found]
    return value, places[0] if record else None


def _best_call(owned, record, interpreted, rows, columns, bias):
    groups, padded, features = rows[0].shape
    length = columns[0].shape[1]
    height, width = min(ROWS, padded), min(TOKENS, length)
    strips = padded // height  # programs count these first, then documents, then groups
    out = jax.ShapeDtypeStruct((groups * owned, padded), jnp.float32)
    outs = [out, jax.ShapeDtypeStruct(out.shape, jnp.int32)] if record else [out]
    row = pl.BlockSpec((None, height, features), lambda at: (_div(at, strips * owned), _rem(at, strips), 0))
    column = pl.BlockSpec((None, length, features), lambda at: (_div(at, strips), 0, 0))
    extra = [] if bias is None else [pl.BlockSpec((None, length), lambda at: (_div(at, strips), 0))]
    return pl.pallas_call(
        functools.partial(_best_kernel, len(rows), bias is not None, width),
        out_shape=outs,
        grid=(strips * owned * groups,),
        in_specs=[row] * len(rows) + [column] * len(columns) + extra,
        out_specs=[pl.BlockSpec((None, height), lambda at: (_div(at, strips), _rem(at, strips)))] * len(outs),
        compiler_params=_compiler_params(8 if record and height > 64 else 4, 3),
        interpret=interpreted,
        name="maxsim_best",
    )(*rows, *columns, *([] if bias is None else [bias]))


def _best_kernel(parts, biased, width, *refs):
    rows, columns = [ref[...] for ref in refs[:parts]], refs[parts : 2 * parts]
    outs = refs[2 * parts + biased :]
    shape = rows[0].shape[0], width

    def body(tile, carry):
        at = pl.ds(tile * width, width)
        similar = _multiply(rows, [ref[at, :] for ref in columns], 1)
        similar = similar + refs[2 * parts][at][None, :] if biased else similar
        if len(outs) == 1:
            return (jnp.maximum(carry[0], similar),)
        better = similar > carry[0]
        return jnp.where(better, similar, carry[0]), jnp.where(better, tile, carry[1])

    start = [jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)][: len(outs)]
    found = lax.fori_loop(np.int32(0), np.int32(columns[0].shape[0] // width), body, tuple(start))
    top = jnp.max(found[0], axis=1)
    outs[0][...] = top
    if len(outs) == 2:  # of equals the first
        place = found[1] * width + lax.broadcasted_iota(jnp.int32, shape, 1)
        outs[1][...] = jnp.min(jnp.where(found[0] == top[:, None], place, np.int32(2**31 - 1)), axis=1)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _owned(rows, winners, high, low, length, interpreted):
    """Σ over the query tokens that chose document token j of (high + low) · token, (B, D, length, d) in float32."""
    owned = winners.shape[1]
    choices = [part.reshape(-1, part.shape[2]) for part in (winners, high, low)]
    found = _foldable(functools.partial(_owned_call, owned, length, interpreted))(rows, choices)
    return found.reshape(-1, owned, *found.shape[1:])


def _owned_call(owned, length, interpreted, rows, choices):
    groups, padded, features = rows[0].shape
    height, width = min(64, padded), min(TOKENS, length)
    tiles = length // width  # programs count these first, then documents, then groups
    row = pl.BlockSpec((None, padded, features), lambda at: (_div(at, tiles * owned), 0, 0))
    choice = pl.BlockSpec((None, padded), lambda at: (_div(at, tiles), 0))
    return pl.pallas_call(
        functools.partial(_owned_kernel, len(rows), height, width, tiles),
        out_shape=jax.ShapeDtypeStruct((groups * owned, length, features), jnp.float32),
        grid=(tiles * owned * groups,),
        in_specs=[row] * len(rows) + [choice] * 3,
        out_specs=pl.BlockSpec((None, width, features), lambda at: (_div(at, tiles), _rem(at, tiles), 0)),
        compiler_params=_compiler_params(4, 2),
        interpret=interpreted,
        name="maxsim_owned",
    )(*rows, *choices)


def _owned_kernel(parts, height, width, tiles, *refs):
    rows, (winners, high, low, out) = refs[:parts], refs[parts:]
    own = _rem(pl.program_id(0), tiles) * width + lax.broadcasted_iota(jnp.int32, (width, height), 0)

    def body(tile, total):
        at = pl.ds(tile * height, height)
        chosen = winners[at][None, :] == own
        slopes = [jnp.where(chosen, part[at][None, :], jnp.zeros((), part.dtype)) for part in (high, low)]
        return total + _multiply(slopes, [ref[at, :] for ref in rows], 0)

    start = jnp.zeros(out.shape, jnp.float32)
    out[...] = lax.fori_loop(np.int32(0), np.int32(rows[0].shape[0] // height), body, start)


def _dot(left, right, right_axis):
    return lax.dot_general(left, right, (((1,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _multiply(left, right, right_axis):
    """Parts times parts, the smallest products first."""
    if len(left) == len(right) == 1:
        return _dot(left[0], right[0], right_axis)
    total = _dot(left[1], right[0], right_axis)
    total = total if len(right) == 1 else total + _dot(left[0], right[1], right_axis)
    return total + _dot(left[0], right[0], right_axis)


def _div(program, by: int):
    return lax.div(program, np.int32(by))  # `//` would take care of signs


def _rem(program, by: int):
    return lax.rem(program, np.int32(by))


def _compiler_params(warps: int, stages: int) -> Any:
    """Name Triton explicitly: which compiler Pallas prefers on a GPU has changed from release to release."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)
