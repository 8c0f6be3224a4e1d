"""Pallas for CUDA through Triton: rows stay on chip and the column tiles in reach of their band stream past.

Columns are reduced by the same kernels on the transposed pairs, because blocks cannot share a running column sum, so a
full step is two passes. Scores are made by one function, `_score_tile`, in base 2: S · log2 e.

float32 goes through the matrix units as two float16 parts of 11 bits each, three products, float32 sums: the errors of
float32, at a third of float16's speed. (What `lax.dot_general` does with float32 in a kernel has changed from IEEE to
TF32 between releases of jax.)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flashot_backends.kernels.attention.chunked import score_gradient
from flashot_backends.kernels.attention.pairs import Pairs
from flashot_backends.kernels.attention.tuning import LARGEST_BLOCK, gpu_blocks

__all__ = ["applies", "apply", "half_step", "lse", "matvec", "prepare", "pull", "score_gradient"]

whole = False
one_pass = False
unroll = 32  # a loop on the device costs as much as half a step
LOG2E = math.log2(math.e)
LARGEST_FEATURES = 256
# The sums of a strip are taken around one number for all its rows, the middle of their guesses: an addition less for
# each pair. Where guesses lie further apart than SPREAD, or a sum comes out beyond TINY or HUGE, each row's sum is
# taken around its own maximum.
TINY, HUGE, SPREAD = 2.0**-90, 2.0**90, 120.0

#: Tests run the kernels on a CPU through the interpreter.
interpret = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    if request.dtype == "float64":
        return "float64 runs in the chunked tier"
    if max(request.d, request.e) > LARGEST_FEATURES:
        return f"at most {LARGEST_FEATURES} features per head fit a tile, not {max(request.d, request.e)}"
    return None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "y", "x_unit", "y_unit", "scale", "x_ids", "y_ids", "dense", "transposed"],
    meta_fields=["rows", "columns", "features", "window", "packed"],
)
@dataclass(frozen=True)
class Laid:
    """`Pairs` as the kernels read them: tokens padded to whole blocks, features to a power of two, float32 split.

    x, y: tuples of one array (P or fewer, padded, D), or of two float16 parts whose sum times the unit (P,) is the
    original. scale: (P,) from products of parts to scores in base 2. packed: pairs whose ids differ are off the
    support; else ids only tell padding, by being negative. dense: what came as large as the scores is, "mask"
    (int8) and "bias" (in base 2), (P or fewer, padded, padded); transposed: the same seen from the columns.
    """

    x: tuple[jax.Array, ...]
    y: tuple[jax.Array, ...]
    x_unit: jax.Array | None
    y_unit: jax.Array | None
    scale: jax.Array
    x_ids: jax.Array | None
    y_ids: jax.Array | None
    dense: dict[str, jax.Array]
    transposed: dict[str, jax.Array]
    rows: int
    columns: int
    features: int
    window: int | None
    packed: bool

    @property
    def problems(self) -> int:
        """P."""
        return self.scale.shape[0]

    @property
    def T(self) -> Laid:  # noqa: N802
        """The same problems with rows and columns exchanged."""
        swapped = replace(self, x=self.y, y=self.x, x_unit=self.y_unit, y_unit=self.x_unit)
        swapped = replace(swapped, x_ids=self.y_ids, y_ids=self.x_ids, dense=self.transposed, transposed=self.dense)
        return replace(swapped, rows=self.columns, columns=self.rows)


def prepare(pairs: Pairs) -> Laid:
    """Lay the operands out for the kernels: once for all the steps of a call."""
    count = pairs.problems
    x, x_unit = _parts(pairs.x, count)
    y, y_unit = _parts(pairs.y, count)
    x_ids, y_ids = (
        None if side is None else _tokens(side, off) for side, off in ((pairs.x_ids, -1), (pairs.y_ids, -2))
    )
    scale = pairs.scale * LOG2E if x_unit is None else pairs.scale * LOG2E * x_unit * y_unit
    packed = pairs.packed and pairs.x_ids is not None
    sizes = pairs.rows, pairs.columns, pairs.x.shape[-1]
    dense = _dense(pairs)
    transposed = {name: jnp.swapaxes(part, 1, 2) for name, part in dense.items()}
    return Laid(x, y, x_unit, y_unit, scale, x_ids, y_ids, dense, transposed, *sizes, pairs.window, packed)


def lse(laid: Laid, w: jax.Array) -> jax.Array:
    """log Σ_j exp(S_ij + w_j), (P, n); −inf in rows without support. w: (P, m)."""
    guess = jnp.zeros((laid.problems, laid.rows), jnp.float32)
    return _run(_half_step_kernel, laid, rows={"guess": guess}, columns={"w": w})


def half_step(laid: Laid, w, log_target, extra, guess) -> jax.Array:
    """log_target − LSE_j(S + w), (P, n); 0 in rows without support.

    extra: (P, n) one more term of each row's sum (the dustbin), or None. guess: (P, n), roughly the result: the sums
    are taken around it, which saves a running maximum. A bad one costs time, not digits.
    """
    rows = {"guess": guess, "target": log_target} | ({} if extra is None else {"extra": extra})
    return _run(_half_step_kernel, laid, rows, columns={"w": w})


def matvec(laid: Laid, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n). u: (P, n), w and z: (P, m)."""
    return _run(_matvec_kernel, laid, rows={"u": u}, columns={"w": w, "z": z})


def apply(laid: Laid, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n, e). z: (P or fewer, m, e)."""
    values, unit = _parts(z, laid.problems)
    out = _run(_apply_kernel, laid, rows={"u": u}, columns={"w": w, "values": values}, width=z.shape[-1])
    return out if unit is None else out * unit[:, None, None]


def pull(laid: Laid, u, w, left, right, x_terms, y_terms) -> jax.Array:
    """Σ_j P_ij M_ij y_j with M = left rightᵀ − x_terms y_termsᵀ, (P, n, d).

    left: (P or fewer, n, e) and right: (P or fewer, m, e), or None; x_terms: (P, n, h), y_terms: (P, m, h).
    """
    x_terms, x_unit = _parts(x_terms, laid.problems)
    y_terms, y_unit = _parts(y_terms, laid.problems)
    rows, columns = {"u": u, "terms": x_terms}, {"w": w, "terms": y_terms}
    scalars = {"terms": x_unit * y_unit}
    if left is not None:
        rows["values"], left_unit = _parts(left, laid.problems)
        columns["values"], right_unit = _parts(right, laid.problems)
        scalars |= {} if left_unit is None else {"values": left_unit * right_unit}
    out = _run(_pull_kernel, laid, rows, columns, scalars, width=laid.features)
    return out if laid.y_unit is None else out * laid.y_unit[:, None, None]


# --- layout -----------------------------------------------------------------------------------------------------------


def _parts(array: jax.Array, problems: int) -> tuple[tuple[jax.Array, ...], Any]:
    """Padded parts (P or fewer, padded, D) and, for float32, their unit (P,); else None."""
    padded = _tokens(array, 0, 1)
    padded = jnp.pad(padded, [(0, 0), (0, 0), (0, _power(array.shape[2]) - array.shape[2])])
    if array.dtype != jnp.float32:
        return (padded,), None
    largest = jnp.max(jnp.abs(padded), axis=(1, 2))
    unit = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(largest, 1e-30))) - 14)  # parts of at most 2^14; float16 holds 2^16
    scaled = padded / unit[:, None, None]
    high = lax.reduce_precision(scaled, 5, 10)  # XLA would drop a cast to float16 and back as superfluous
    parts = high.astype(jnp.float16), (scaled - high).astype(jnp.float16)
    return parts, jnp.repeat(unit, problems // unit.shape[0])


def _dense(pairs: Pairs) -> dict[str, jax.Array]:
    dense = {}
    if pairs.mask is not None:
        dense["mask"] = pairs.mask.astype(jnp.int8)
    if pairs.bias is not None:
        dense["bias"] = pairs.bias.astype(jnp.float32) * LOG2E
    return {name: _tokens(_tokens(part, 0, 1), 0, 2) for name, part in dense.items()}


def _tokens(array: jax.Array, value, axis: int = -1) -> jax.Array:
    """Pad the tokens to whole blocks."""
    axis %= array.ndim
    size = array.shape[axis]
    amounts = [(0, _padded_length(size) - size if position == axis else 0) for position in range(array.ndim)]
    return jnp.pad(array, amounts, constant_values=value) if any(after for _, after in amounts) else array


def _padded_length(size: int) -> int:
    block = min(LARGEST_BLOCK, _power(size))
    return -(-size // block) * block


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


class _Shape(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    n: int
    height: int
    strips: int
    width: int
    tiles: int
    window: int | None
    packed: bool


# --- kernels: rows are dicts of arrays on chip, columns dicts of refs -------------------------------------------------


def _score_tile(shape: _Shape, rows, columns, scalars, tile):
    """Scores + w in base 2 of the resident rows with one tile of columns, −inf off the support. The one place for it.

    Padding needs no mask of its own: inactive columns have w = −inf, inactive rows `around` = −inf.
    """
    y = _parts_at(shape, columns["features"], tile)
    shift = _column_potential(shape, columns, tile)[None, :] + rows["around"]
    scores = _fused(_multiply(rows["features"], y, 1), scalars["scale"], shift)
    if "bias" in columns:
        scores = scores + columns["bias"][:, _tile(shape, tile)]
    if "mask" in columns:
        scores = jnp.where(columns["mask"][:, _tile(shape, tile)] != 0, scores, -jnp.inf)
    if shape.window is not None:
        scores = _in_band(shape.window, rows["first"] - tile * shape.width, scores)
    if shape.packed:
        scores = jnp.where(rows["ids"][:, None] == columns["ids"][_tile(shape, tile)][None, :], scores, -jnp.inf)
    return scores, y


def _column_potential(shape: _Shape, columns, tile):
    w = columns["w"][_tile(shape, tile)] * LOG2E
    if shape.packed or "ids" not in columns:
        return w
    return jnp.where(columns["ids"][_tile(shape, tile)] >= 0, w, -jnp.inf)


def _in_band(window: int, offset, scores):
    """−inf where |i − j| > window; offset: i − j of the first pair. Tiles well inside the band are left alone."""
    height, width = scores.shape

    def edge(scores):
        i = offset + window + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
        j = lax.broadcasted_iota(jnp.int32, (1, width), 1)
        inside = lax.convert_element_type(i - j, jnp.uint32) <= 2 * window  # what is below 0 becomes large
        return jnp.where(inside, scores, -jnp.inf)

    inner = (offset + height - 1 <= window) & (offset - width + 1 >= -window)
    return lax.cond(inner, lambda scores: scores, edge, scores)


def _tile(shape: _Shape, tile):
    return pl.ds(tile * shape.width, shape.width)


def _dot(left, right, right_axis):
    return lax.dot_general(left, right, (((1,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _multiply(left, right, right_axis):
    """left (height, k) times right, contracted over `right_axis`; both in parts, the smallest products first."""
    if len(left) == 1:
        return _dot(left[0], right[0], right_axis)
    total = _dot(left[1], right[0], right_axis)
    total = total + _dot(left[0], right[1], right_axis)
    return total + _dot(left[0], right[0], right_axis)


def _multiply_tile(tile, right):
    """A float32 tile times right, whose parts set the precision. Rows are brought into float16's range and back."""
    if right[0].dtype == jnp.bfloat16:
        return _dot(tile.astype(jnp.bfloat16), right[0], 0)
    largest = jnp.maximum(jnp.max(jnp.abs(tile), axis=1), 1e-30)
    scaled = tile * (8192 / largest)[:, None]
    high = scaled.astype(jnp.float16)
    if len(right) == 1:
        return _dot(high, right[0], 0) * (largest / 8192)[:, None]
    low = (scaled - high.astype(jnp.float32)).astype(jnp.float16)
    return _multiply([high, low], right, 0) * (largest / 8192)[:, None]


def _exp2(x):
    """One instruction; the library's exp2 spends three more on results below 2^−126, which are 0 here."""
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32 $0, $1;", x)


def _fused(x, factor, shift):
    """x · factor + shift in one instruction; XLA's Triton leaves products and sums apart."""
    factor, shift = jnp.full(x.shape, factor), jnp.broadcast_to(shift, x.shape)
    return x * factor + shift if interpret else _instruction("fma.rn.f32 $0, $1, $2, $3;", x, factor, shift)


def _instruction(assembly: str, *operands):
    from jax.experimental.pallas import triton

    shape = jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)
    constraints = ",".join(["=f"] + ["f"] * len(operands))
    return triton.elementwise_inline_asm(
        assembly, args=list(operands), constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )[0]


def _stream(shape: _Shape, rows, body, start):
    """Fold `body` over the column tiles that the band of these rows reaches."""
    if shape.window is None:
        return lax.fori_loop(np.int32(0), np.int32(shape.tiles), body, start)
    first = rows["first"]
    low = jnp.maximum(first - shape.window, 0) // shape.width
    high = jnp.minimum((first + shape.height - 1 + shape.window) // shape.width + 1, shape.tiles)
    return lax.fori_loop(low, high, body, start)


def _half_step_kernel(shape: _Shape, rows, columns, scalars, out):
    around = _around(shape, rows, rows["guess"])
    active = around > -jnp.inf
    highest, lowest = jnp.max(around), jnp.min(jnp.where(active, around, jnp.inf))
    middle = jnp.where(highest >= lowest, 0.5 * (highest + lowest), 0.0)

    def body(tile, total):
        scores, _ = _score_tile(shape, {**rows, "around": middle}, columns, scalars, tile)
        return total + jnp.sum(_exp2(scores), axis=1)

    start = jnp.zeros((shape.height,), jnp.float32)
    total = lax.cond(highest - lowest < SPREAD, lambda: _stream(shape, rows, body, start), lambda: start)
    total = jnp.where(active, total, 0.0)
    again = jnp.min(((total > TINY) & (total < HUGE) | ~active).astype(jnp.int32)) == 0
    top = jnp.full((shape.height,), 0.0, jnp.float32) - middle
    top, total = lax.cond(again, lambda: _around_maximum(shape, rows, columns, scalars), lambda: (top, total))
    out[...] = _potential(rows, top, total)


def _around(shape: _Shape, rows, potential):
    """The potential in base 2, −inf in rows that take no part."""
    active = rows["first"] + lax.broadcasted_iota(jnp.int32, (shape.height,), 0) < shape.n
    active = active & (rows["ids"] >= 0) if "ids" in rows else active
    return jnp.where(active, potential * LOG2E, -jnp.inf)


def _around_maximum(shape: _Shape, rows, columns, scalars):
    """(top, total) with Σ_j 2^score = total · 2^top."""
    rows = {**rows, "around": _around(shape, rows, jnp.zeros((shape.height,), jnp.float32))[:, None]}

    def body(tile, carry):
        top, total = carry
        scores, _ = _score_tile(shape, rows, columns, scalars, tile)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        return new, total * _exp2(top - safe) + jnp.sum(_exp2(scores - safe[:, None]), axis=1)

    start = jnp.full((shape.height,), -jnp.inf, jnp.float32), jnp.zeros((shape.height,), jnp.float32)
    return _stream(shape, rows, body, start)


def _potential(rows, top, total):
    sums = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    if "extra" in rows:
        extra = rows["extra"] * LOG2E
        higher = jnp.maximum(jnp.maximum(sums, extra), -1e30)
        both = jnp.exp2(sums - higher) + jnp.exp2(extra - higher)
        sums = jnp.where(both > 0, higher + jnp.log2(jnp.where(both > 0, both, 1.0)), -jnp.inf)
    if "target" not in rows:
        return sums / LOG2E
    return jnp.where(sums == -jnp.inf, 0.0, rows["target"] - sums / LOG2E)


def _accumulate(part):
    """A kernel that sums part(plan tile, …) over the tiles of a strip."""

    @functools.wraps(part)
    def kernel(shape: _Shape, rows, columns, scalars, out):
        rows = {**rows, "around": _around(shape, rows, rows["u"])[:, None]}

        def body(tile, total):
            scores, y = _score_tile(shape, rows, columns, scalars, tile)
            return total + part(shape, _exp2(scores), y, rows, columns, scalars, tile)

        out[...] = _stream(shape, rows, body, jnp.zeros(out.shape, jnp.float32))

    return kernel


@_accumulate
def _matvec_kernel(shape: _Shape, plan, y, rows, columns, scalars, tile):
    return jnp.sum(plan * columns["z"][_tile(shape, tile)][None, :], axis=1)


@_accumulate
def _apply_kernel(shape: _Shape, plan, y, rows, columns, scalars, tile):
    return _multiply_tile(plan, _parts_at(shape, columns["values"], tile))


@_accumulate
def _pull_kernel(shape: _Shape, plan, y, rows, columns, scalars, tile):
    return _multiply_tile(plan * _cotangent(shape, rows, columns, scalars, tile), y)


def _cotangent(shape: _Shape, rows, columns, scalars, tile):
    """left rightᵀ − x_terms y_termsᵀ, the small product with float32's accuracy whatever the inputs' dtype."""
    total = -scalars["terms"] * _multiply(rows["terms"], _parts_at(shape, columns["terms"], tile), 1)
    if "values" not in rows:
        return total
    direct = _multiply(rows["values"], _parts_at(shape, columns["values"], tile), 1)
    return total + (direct * scalars["values"] if "values" in scalars else direct)


def _parts_at(shape: _Shape, refs, tile):
    return [ref[_tile(shape, tile), :] for ref in refs]


# --- launching -------------------------------------------------------------------------------------------------------


def _run(kernel, laid: Laid, rows: dict, columns: dict, scalars: dict | None = None, width: int = 0) -> jax.Array:
    """Launch over (row tiles, problems); returns (P, n) or (P, n, width)."""
    rows = {name: _operand(part, 0) for name, part in rows.items()} | {"features": laid.x}
    columns = {name: _operand(part, -jnp.inf if name == "w" else 0) for name, part in columns.items()}
    columns["features"] = laid.y
    if laid.x_ids is not None:
        rows, columns = {**rows, "ids": laid.x_ids}, {**columns, "ids": laid.y_ids}
    padded = laid.x[0].shape[1], laid.y[0].shape[1]
    wide = laid.window is None or laid.window >= 2 * LARGEST_BLOCK
    simple = wide and not laid.packed and "bias" not in laid.dense
    blocks = gpu_blocks(kernel.__name__, len(laid.x), max(laid.features, width), laid.problems, *padded, simple)
    scalars = {"scale": laid.scale, **(scalars or {})}
    setting = blocks, laid.rows, laid.window, laid.packed, width and _power(width), interpret
    out = _launch(kernel, *setting, scalars, rows, columns, laid.dense)
    return out[:, : laid.rows, :width] if width else out[:, : laid.rows]


def _operand(part, value):
    return part if isinstance(part, tuple) else _tokens(part, value)


@functools.partial(jax.jit, static_argnums=range(7))
def _launch(kernel, blocks, n, window, packed, width, interpreted, scalars, rows, columns, dense):
    """Jitted on its own, so that the half-steps of a call share one trace."""
    setting = kernel, blocks, n, window, packed, width, interpreted
    return _foldable(functools.partial(_call, *setting))(scalars, rows, columns, dense)


def _foldable(function):
    """Under vmap there are more problems, not one more axis of a grid that has only three, two of them short."""
    folding = jax.custom_batching.custom_vmap(function)

    @folding.def_vmap
    def _(size, batched, *arguments):
        def fold(own, part):
            part = part if own else jnp.broadcast_to(part, (size, *part.shape))
            return part.reshape(-1, *part.shape[2:])

        out = folding(*jax.tree.map(fold, batched, list(arguments)))
        return out.reshape(size, -1, *out.shape[1:]), True

    return folding


def _call(kernel, blocks, n, window, packed, width, interpreted, scalars, rows, columns, dense):
    height, breadth, warps, stages = blocks
    (problems,), padded = scalars["scale"].shape, rows["features"][0].shape[1]
    shape = _Shape(n, height, padded // height, breadth, columns["features"][0].shape[1] // breadth, window, packed)
    groups = scalars, rows, columns, dense
    specs = (
        jax.tree.map(lambda _: pl.BlockSpec((1,), lambda program: (_div(program, shape.strips),)), scalars),
        jax.tree.map(functools.partial(_row_spec, shape, problems), rows),
        jax.tree.map(functools.partial(_column_spec, shape, problems), columns),
        jax.tree.map(functools.partial(_row_spec, shape, problems), dense),
    )
    leaves, structure = jax.tree.flatten(groups)
    out = (problems, padded, width) if width else (problems, padded)
    return pl.pallas_call(
        functools.partial(_entry, kernel, shape, structure),
        out_shape=jax.ShapeDtypeStruct(out, jnp.float32),
        grid=(shape.strips * problems,),
        in_specs=jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, pl.BlockSpec)),
        out_specs=_row_spec(shape, problems, jax.ShapeDtypeStruct(out, jnp.float32)),
        compiler_params=_compiler_params(warps, stages),
        interpret=interpreted,
        name=kernel.__name__.strip("_"),
    )(*leaves)


def _entry(kernel, shape, structure, *refs):
    scalars, rows, columns, dense = jax.tree.unflatten(structure, refs[:-1])
    rows = {name: _resident(part) for name, part in rows.items()}
    strip = _rem(pl.program_id(0), shape.strips)  # the interpreter knows it only outside of loops
    rows["first"] = strip * shape.height
    kernel(shape, rows, {**columns, **dense}, {name: ref[0] for name, ref in scalars.items()}, refs[-1])


def _resident(part):
    """Read once, before the stream."""
    return [ref[...] for ref in part] if isinstance(part, tuple) else part[...]


def _compiler_params(warps: int, stages: int) -> Any:
    """Name Triton explicitly: which compiler Pallas prefers on a GPU has changed from release to release."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


def _div(program, by: int):
    return lax.div(program, np.int32(by))  # `//` would take care of signs


def _rem(program, by: int):
    return lax.rem(program, np.int32(by))


def _row_spec(shape: _Shape, problems: int, array):
    """Programs count the strips of a problem first, then the problems."""
    shared = shape.strips * (problems // array.shape[0])

    def at(program, *where):
        strip = _rem(program, shape.strips)
        return (_div(program, shared), *(strip if part is None else part for part in where))

    if array.ndim == 2:
        return pl.BlockSpec((None, shape.height), lambda program: at(program, None))
    return pl.BlockSpec((None, shape.height, array.shape[2]), lambda program: at(program, None, 0))


def _column_spec(shape: _Shape, problems: int, array: jax.Array):
    shared = shape.strips * (problems // array.shape[0])
    zeros = (0,) * (array.ndim - 1)
    return pl.BlockSpec((None, *array.shape[1:]), lambda program: (_div(program, shared), *zeros))
