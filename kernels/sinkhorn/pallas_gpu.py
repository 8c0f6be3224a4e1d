"""Pallas for CUDA through Triton: a tile of rows stays on chip and the columns stream past it.

Everything is in base 2 and in units of ε / log2 e: points are scaled by √(log2 e / ε), so that a cost over ε is a
squared distance. Few coordinates: direct differences on the ordinary units. More: each scaled coordinate is split into
two float16 parts, x = hi + lo / 2048, and three products on the matrix units give float32's accuracy (TF32 would keep
11 bits). A sum of exponentials is taken relative to what the caller expects it to be near; where that was far off, the
tile is done again with a running maximum.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .jax_pairs import Pairs, no_tile, opaque

LOG2E = math.log2(math.e)
FEW_COORDINATES = 8
LARGEST_WIDTH = 256
SPLIT = 2048.0

#: Sums outside of these bounds are taken again: terms may have been lost, or overflowed.
LEAST, MOST = 2.0**-60, 2.0**100

#: Programs that fill a card: columns are split until there are so many.
PROGRAMS = 512

#: Tests run the kernels on a CPU through the interpreter.
interpret = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return no_tile(request, LARGEST_WIDTH)


def hold(pairs: Pairs) -> Pairs:
    """Scale, split and pad the points once for many calls of `lse`."""
    return pairs._replace(held=(_points(_Tiles.of(pairs, 0), pairs), _points(_Tiles.of(pairs.T, 0), pairs.T)))


def lse(pairs: Pairs, h: jax.Array, guess: jax.Array | None = None) -> jax.Array:
    """log Σ_j exp(h_j − C_ij/ε), (B, n), for h of shape (B, m); guess: (B, n), what it may be near, or None."""
    tiles = _Tiles.of(pairs, 0)
    near = jnp.zeros(h.shape[:1] + (pairs.rows,), jnp.float32) if guess is None else guess * LOG2E
    near = jnp.where(jnp.isfinite(near), near, 0)
    parts = _launch(_lse_kernel, tiles, pairs, rows={"near": near}, columns={"t": h * LOG2E})
    if tiles.splits == 1:
        return parts[:, 0, : pairs.rows] / LOG2E
    top = parts.max(1, keepdims=True)
    safe = jnp.where(top == -jnp.inf, 0, top)
    total = jnp.exp2(parts - safe).sum(1)
    return (safe[:, 0] + jnp.log2(total))[:, : pairs.rows] / LOG2E


def reduce(
    pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array, power: int = 0, left: jax.Array | None = None,
    right: jax.Array | None = None,
) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) values_j, (B, n, k); see `jax_blocks.reduce`."""
    width = values.shape[-1]
    if width > LARGEST_WIDTH:
        halves = values[..., : width // 2], values[..., width // 2 :]
        return jnp.concatenate([reduce(pairs, s, t, half, power, left, right) for half in halves], -1)
    rows, columns = {"s": s * LOG2E}, {"t": t * LOG2E, "values": values}
    if left is not None:
        rows, columns = {**rows, "factors": left}, {**columns, "factors": right}
    tiles = _Tiles.of(pairs, width)
    out = _launch(functools.partial(_reduce_kernel, power), tiles, pairs, rows, columns)
    out = out.sum(1)[:, : pairs.rows, :width]
    return out * (pairs.epsilon / LOG2E)[:, None, None] ** power


class _Tiles(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    n: int
    height: int
    width: int
    splits: int
    steps: int  # column tiles of one split
    few: bool  # coordinates
    values: int  # columns of the result, 0 for a vector
    warps: int
    stages: int

    @classmethod
    def of(cls, pairs: Pairs, values: int) -> _Tiles:
        few = pairs.x.shape[-1] <= FEW_COORDINATES
        height, width, warps, stages = _shape(few, pairs.x.shape[-1], values)
        height, width = min(height, _power(pairs.rows)), min(width, _power(pairs.columns))
        row_tiles, tiles = -(-pairs.rows // height), -(-pairs.columns // width)
        while height > 16 and row_tiles * tiles * pairs.problems < PROGRAMS // 2 and not few:
            height //= 2
            row_tiles = -(-pairs.rows // height)
        splits = max(1, min(tiles, PROGRAMS // max(1, row_tiles * pairs.problems), 8))
        return cls(pairs.rows, height, width, splits, -(-tiles // splits), few, values, warps, stages)

    @property
    def padded_rows(self) -> int:
        return -(-self.n // self.height) * self.height

    @property
    def padded_columns(self) -> int:
        return self.splits * self.steps * self.width


def _shape(few: bool, coordinates: int, values: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, stages."""
    if values:
        return (64, 64, 4, 2) if max(coordinates, values) <= 64 else (64, 32, 4, 2)
    if few:
        return 16, 256, 4, 2
    return (64, 128, 4, 2) if coordinates <= 64 else (64, 64, 4, 2)


# --- kernels: rows are dicts of arrays on chip, columns dicts of refs -------------------------------------------------


def _costs(tiles: _Tiles, rows: dict, columns: dict, tile):
    """Scaled costs of the resident rows with one tile of columns, (height, width)."""
    if tiles.few:
        return _differences(tiles, rows, columns, tile)
    squares = rows["squares"][:, None] + _columns_of(tiles, "squares", columns, tile)[None, :]
    return jnp.maximum(squares - rows["scale"] * _dots(tiles, rows, columns, tile), 0.0)


def _exponents(tiles: _Tiles, rows: dict, columns: dict, tile):
    """t_j − C_ij, with what belongs to the row alone left to `_shift`: fewer operations a pair."""
    t = _columns_of(tiles, "t", columns, tile)
    if tiles.few:
        return t[None, :] - _differences(tiles, rows, columns, tile)
    rest = t - _columns_of(tiles, "squares", columns, tile)
    return rest[None, :] + rows["scale"] * _dots(tiles, rows, columns, tile)


def _shift(tiles: _Tiles, rows: dict):
    """What `_exponents` are above t_j − C_ij."""
    return jnp.zeros((tiles.height,), jnp.float32) if tiles.few else rows["squares"]


def _differences(tiles: _Tiles, rows: dict, columns: dict, tile):
    total = jnp.zeros((tiles.height, tiles.width), jnp.float32)
    for k, x in enumerate(rows["points"]):
        total = total + (x[:, None] - columns["points"][k, _at(tiles, tile)][None, :]) ** 2
    return total


def _dots(tiles: _Tiles, rows: dict, columns: dict, tile):
    x_hi, x_lo = rows["points"]
    y_hi, y_lo = columns["hi"][_at(tiles, tile), :], columns["lo"][_at(tiles, tile), :]
    return _product(x_hi, y_hi) + (_product(x_hi, y_lo) + _product(x_lo, y_hi)) * (1 / SPLIT)


def _product(left, right):
    """left @ rightᵀ, float16 in and float32 out."""
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _exact(left, right, right_axis):
    """A product of float32 numbers to float32's accuracy: three TF32 products, which a processor does not know."""
    precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return lax.dot_general(
        left, right, (((1,), (right_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _at(tiles: _Tiles, tile):
    return pl.ds(tile * tiles.width, tiles.width)


def _columns_of(tiles: _Tiles, name: str, columns: dict, tile):
    return columns[name][_at(tiles, tile)]


def _lse_kernel(tiles: _Tiles, rows: dict, columns: dict, first, out):
    shift = _shift(tiles, rows)
    level = rows["near"] + shift

    def near(tile, total):
        return total + jnp.sum(jnp.exp2(_exponents(tiles, rows, columns, tile) - level[:, None]), axis=1)

    def anywhere(tile, carry):
        top, total = carry
        found = _exponents(tiles, rows, columns, tile)
        new = jnp.maximum(top, jnp.max(found, axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        return new, total * jnp.exp2(top - safe) + jnp.sum(jnp.exp2(found - safe[:, None]), axis=1)

    def again():
        start = jnp.full((tiles.height,), -jnp.inf, jnp.float32), jnp.zeros((tiles.height,), jnp.float32)
        top, total = lax.fori_loop(first, first + tiles.steps, anywhere, start)
        return _log(top - shift, total)

    total = lax.fori_loop(first, first + tiles.steps, near, jnp.zeros((tiles.height,), jnp.float32))
    doubtful = (rows["index"] < tiles.n) & ~((total > LEAST) & (total < MOST))
    found = jnp.max(jnp.where(doubtful, 1, 0)) > 0
    out[...] = lax.cond(found, again, lambda: _log(rows["near"], total))


def _log(top, total):
    return jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def _reduce_kernel(power: int, tiles: _Tiles, rows: dict, columns: dict, first, out):
    def body(tile, total):
        costs = _costs(tiles, rows, columns, tile)
        exponents = rows["s"][:, None] + _columns_of(tiles, "t", columns, tile)[None, :] - costs
        plan = jnp.exp2(exponents)
        for _ in range(power):
            plan = plan * costs
        if "factors" in rows:
            plan = plan * _exact(rows["factors"], columns["factors"][_at(tiles, tile), :], 1)
        return total + _exact(plan, columns["values"][_at(tiles, tile), :], 0)

    out[...] = lax.fori_loop(first, first + tiles.steps, body, jnp.zeros(out.shape, jnp.float32))


# --- launching -------------------------------------------------------------------------------------------------------


def _launch(kernel, tiles: _Tiles, pairs: Pairs, rows: dict, columns: dict) -> jax.Array:
    """Launch over (row tiles, splits, problems); returns (B, splits, rows) or (B, splits, rows, values), padded."""
    points = _points(tiles, pairs) if tiles.values or pairs.held is None else pairs.held[0]
    rows = {**_padded(rows, tiles.padded_rows), **points[0]}
    columns = {**_padded(columns, tiles.padded_columns), **points[1]}
    specs = [_spec(name, part, pairs.problems, tiles.height) for name, part in rows.items()]
    specs += [_spec(name, part, pairs.problems, None) for name, part in columns.items()]
    tail = (_power(tiles.values),) if tiles.values else ()
    out = pairs.problems, tiles.splits, tiles.padded_rows, *tail
    launch = pl.pallas_call(
        functools.partial(_entry, kernel, tiles, tuple(rows), tuple(columns)),
        out_shape=jax.ShapeDtypeStruct(out, jnp.float32),
        grid=(tiles.padded_rows // tiles.height, tiles.splits, pairs.problems),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, tiles.height, *tail), lambda i, q, p: (p, q, i, *(0 for _ in tail))),
        compiler_params=_compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="sinkhorn_reduce" if tiles.values else "sinkhorn_lse",
    )
    return opaque(launch)(*rows.values(), *columns.values())


def _entry(kernel, tiles: _Tiles, row_names, column_names, *refs):
    inputs, out = refs[:-1], refs[-1]
    near = dict(zip(row_names, inputs[: len(row_names)], strict=True))
    columns = dict(zip(column_names, inputs[len(row_names) :], strict=True))
    rows = {name: ref[...] for name, ref in near.items() if name in ("near", "s", "squares", "factors")}
    if tiles.few:
        rows["points"] = [near["points"][k, :] for k in range(near["points"].shape[0])]
    else:
        rows["points"], rows["scale"] = (near["hi"][...], near["lo"][...]), near["scale"][0]
    rows["index"] = pl.program_id(0) * tiles.height + lax.broadcasted_iota(jnp.int32, (tiles.height,), 0)
    kernel(tiles, rows, columns, pl.program_id(1) * tiles.steps, out)


def _compiler_params(warps: int, stages: int) -> Any:
    """Name Triton explicitly: which compiler Pallas prefers on a GPU has changed from release to release."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


def _points(tiles: _Tiles, pairs: Pairs) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Rows and columns as the kernels read them, scaled so that costs over ε are squared distances."""
    unit = jnp.sqrt(LOG2E / pairs.epsilon)[:, None, None]
    x, y = pairs.x * unit, pairs.y * unit
    if tiles.few:
        rows, columns = ({"points": jnp.swapaxes(points, 1, 2)} for points in (x, y))
    else:
        largest = jnp.maximum(abs(x).max((1, 2)), abs(y).max((1, 2)))[:, None, None]
        largest = jnp.where(largest > 0, largest, 1)
        rows, columns = (_split_points(points, largest) for points in (x, y))
        rows["scale"] = 2 * largest[:, 0] ** 2
    return _padded(rows, tiles.padded_rows), _padded(columns, tiles.padded_columns)


def _split_points(points: jax.Array, largest: jax.Array) -> dict[str, jax.Array]:
    hi, lo = split(points / largest)
    return {"hi": hi, "lo": lo, "squares": (points**2).sum(-1)}


def split(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float16 parts of float32 numbers in [−1, 1]: hi + lo / 2048.

    Rounded by ``reduce_precision``: XLA may leave out a conversion to float16 and back.
    """
    hi = lax.reduce_precision(numbers, exponent_bits=5, mantissa_bits=10)
    return hi.astype(jnp.float16), ((numbers - hi) * SPLIT).astype(jnp.float16)


#: What padded columns hold, so that they weigh nothing: their exponent.
_FILL = {"t": -math.inf}


def _padded(parts: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Rows or columns to whole tiles, coordinates and values to a power of two."""
    return {name: _padded_array(name, part, count) for name, part in parts.items()}


def _padded_array(name: str, array: jax.Array, count: int) -> jax.Array:
    if name == "scale":
        return array
    axis = 2 if name == "points" else 1
    amounts = [(0, 0)] * array.ndim
    amounts[axis] = (0, count - array.shape[axis])
    if name in ("hi", "lo", "values", "factors"):
        amounts[2] = (0, _power(array.shape[2]) - array.shape[2])
    fill = _FILL.get(name, 0.0)
    return jnp.pad(array, amounts, constant_values=fill) if any(after for _, after in amounts) else array


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _spec(name: str, array: jax.Array, problems: int, height: int | None):
    """A block of rows, or all columns; an array with one leading entry is shared by the problems."""
    own = problems // array.shape[0]
    if name == "scale":
        return pl.BlockSpec((None, 1), lambda i, q, p: (p // own, 0))
    axis = 2 if name == "points" else 1
    block = [*array.shape[1:]]
    if height is not None:
        block[axis - 1] = height
    at = (lambda i, k: i if k == axis - 1 else 0) if height is not None else (lambda i, k: 0)
    return pl.BlockSpec((None, *block), lambda i, q, p: (p // own, *(at(i, k) for k in range(len(block)))))
