"""Pallas for CUDA through Triton: a tile of rows stays on chip and the columns stream past it.

Everything is in base 2 and in units of ε / log2 e: points are scaled by √(log2 e / ε), so that a cost over ε is a
squared distance. Few coordinates: direct differences on the ordinary units. More: each scaled coordinate is split into
two float16 parts, x = hi + lo, and three products on the matrix units give float32's accuracy (TF32 would keep 11
bits). "euclidean" and "l1" take direct differences of any number of coordinates. A matrix of costs is read where it
lies, along its rows or its columns, each entry once for a result. A sum of exponentials is taken relative to what the
caller expects it to be near; where that was far off, the tile is done again with a running maximum.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .jax_pairs import Pairs, no_tile, opaque

LOG2E = math.log2(math.e)
FEW_COORDINATES = 8
LARGEST_WIDTH = 256
LARGEST_PART = 2.0**14  # float16 holds 2^16, and the smaller part keeps its digits down to 2^−24

#: Sums outside of these bounds are taken again: terms may have been lost, or overflowed.
LEAST, MOST = 2.0**-60, 2.0**100

#: Sums that a thread may keep for every pair of a tile that it holds.
MOST_SUMS = 72

#: Processors of a card, most parts of the columns, and what a program costs beside its tiles, in tiles.
PROCESSORS, MOST_SPLITS, OVERHEAD = 132, 8, 2

#: Tests run the kernels on a CPU through the interpreter.
interpret = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return no_tile(request, LARGEST_WIDTH)


def hold(pairs: Pairs) -> Pairs:
    """Scale, split and pad the points once for many calls of `lse`; a matrix of 16 bits is read as such."""
    if pairs.matrix is not None:
        kept = pairs.matrix if pairs.narrow is None else pairs.matrix.astype(pairs.narrow)
        return pairs._replace(held=(kept, kept))
    return pairs._replace(held=(_points(_Tiles.of(pairs, 0, 0), pairs), _points(_Tiles.of(pairs.T, 0, 0), pairs.T)))


def lse(pairs: Pairs, h: jax.Array, guess: jax.Array | None = None) -> jax.Array:
    """log Σ_j exp(h_j − C_ij/ε), (B, n), for h of shape (B, m); guess: (B, n), what it may be near, or None."""
    tiles = _Tiles.of(pairs, 0, 0)
    near = jnp.zeros(h.shape[:1] + (pairs.rows,), jnp.float32) if guess is None else guess * LOG2E
    near = jnp.where(jnp.isfinite(near), near, 0)
    (parts,) = _launch(_lse_kernel, tiles, pairs, rows={"near": near}, columns={"t": h * LOG2E})
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
    sides = {"s": s * LOG2E}, {"t": t * LOG2E}
    tiles = _Tiles.of(pairs, *_shares(pairs, width))
    if tiles.vectors:
        sides[1]["vectors"] = jnp.swapaxes(values[..., : tiles.vectors], 1, 2)
    if tiles.values:
        sides[1]["values_hi"], sides[1]["values_lo"], unit = _parts(values[..., tiles.vectors :])
    scale = None if left is None else _factors(sides, left, right)
    parts = _launch(functools.partial(_reduce_kernel, power), tiles, pairs, *sides, scale)
    sums = [part.sum(1) for part in parts]
    found = [jnp.swapaxes(sums[0], 1, 2)] if tiles.vectors else []
    found += [sums[-1][..., : tiles.values] * unit] if tiles.values else []
    out = jnp.concatenate(found, -1)[:, : pairs.rows]
    return out * (pairs.epsilon / LOG2E)[:, None, None] ** power


def pull(pairs: Pairs, s: jax.Array, t: jax.Array, left: jax.Array, right: jax.Array, power: int = 0) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) ∂C_ij/∂x_i, (B, n, d), of "euclidean" and "l1"."""
    d, sides = pairs.x.shape[-1], ({"s": s * LOG2E}, {"t": t * LOG2E})
    vectors, values = (d, 0) if d <= FEW_COORDINATES else (0, d)
    tiles = _Tiles.of(pairs, vectors, values, pulls=True)
    scale = _factors(sides, left, right)
    (parts,) = _launch(functools.partial(_pull_kernel, power), tiles, pairs, *sides, scale)
    sums = parts.sum(1)
    out = jnp.swapaxes(sums, 1, 2) if tiles.vectors else sums[..., :d]
    return out[:, : pairs.rows] * (pairs.epsilon / LOG2E)[:, None, None] ** power


def _shares(pairs: Pairs, width: int) -> tuple[int, int]:
    """How many columns of a result the ordinary units add up, and how many the matrix units, by powers of two."""
    if width == 1 or (_source(pairs) != "products" and width <= FEW_COORDINATES + 1):
        return width, 0
    alone = _power(width - 1) < _power(width)
    return (1, width - 1) if alone else (0, width)


def _factors(sides: tuple[dict, dict], left: jax.Array, right: jax.Array) -> jax.Array | None:
    """Add left and right to the operands of rows and of columns; return the scale (B,) of products of their parts."""
    if left.shape[-1] == 1:
        sides[0]["factor"], sides[1]["factor"] = left[..., 0], right[..., 0]
        return None
    units = []
    for side, factors in zip(sides, (left, right), strict=True):
        largest = abs(factors).max((1, 2), keepdims=True)
        unit = jnp.where(largest > 0, largest, 1) / LARGEST_PART
        side["factors_hi"], side["factors_lo"] = split(factors / unit)
        units.append(unit[:, 0])
    return units[0] * units[1]


def _parts(values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two float16 parts of each column over its unit, and the units (B or 1, 1, k)."""
    largest = abs(values).max(1, keepdims=True)
    unit = jnp.where(largest > 0, largest, 1) / LARGEST_PART
    return *split(values / unit), unit


class _Tiles(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    n: int
    m: int
    height: int
    width: int
    splits: int
    steps: int  # column tiles of one split
    source: str  # of the costs, see `_source`
    turned: bool  # rows are the columns of a matrix in memory
    coordinates: int
    vectors: int  # columns of the result that ordinary units add up
    values: int  # and those that the matrix units add up; a log-sum-exp has neither
    warps: int
    stages: int

    @classmethod
    def of(cls, pairs: Pairs, vectors: int, values: int, pulls: bool = False) -> _Tiles:
        source, d = _source(pairs), 0 if pairs.matrix is not None else pairs.x.shape[-1]
        kind = _kind(source, pairs.turned, d, vectors, values, pulls)
        height, width, warps, stages, resident = shape(kind, max(d, values))
        height, width = min(height, _power(pairs.rows)), min(width, _power(pairs.columns))
        while source != "products" and vectors * height * width > MOST_SUMS * 32 * warps:
            width //= 2
        work = pairs.problems * pairs.columns // width
        while height > 16 and source != "squares" and -(-pairs.rows // height) * work < PROCESSORS:
            height //= 2
        tiles, programs = -(-pairs.columns // width), -(-pairs.rows // height) * pairs.problems
        splits = _splits(tiles, programs, resident * PROCESSORS)
        steps = -(-tiles // splits)
        known = source, pairs.turned, d, vectors, values, warps, stages
        return cls(pairs.rows, pairs.columns, height, width, splits, steps, *known)

    @property
    def direct(self) -> bool:
        """Costs do not come from the matrix units, so every thread holds whole pairs and keeps sums of its own."""
        return self.source != "products"

    @property
    def few(self) -> bool:
        """A program keeps all coordinates of its rows."""
        return self.coordinates <= FEW_COORDINATES

    @property
    def padded_rows(self) -> int:
        return -(-self.n // self.height) * self.height

    @property
    def padded_columns(self) -> int:
        return self.splits * self.steps * self.width


def _source(pairs: Pairs) -> str:
    """Where costs come from: read from a "matrix", or of points.

    "squares" are direct differences and "products" expanded on the matrix units; "euclidean" and "l1" are direct.
    """
    if pairs.matrix is not None:
        return "matrix"
    if pairs.metric != "sqeuclidean":
        return pairs.metric
    return "squares" if pairs.x.shape[-1] <= FEW_COORDINATES else "products"


def _kind(source: str, turned: bool, coordinates: int, vectors: int, values: int, pulls: bool) -> str:
    """The entry of the table of launch shapes, see `shape`."""
    kind = "matrix" if values else "vector" if vectors else "lse"
    if source == "matrix":
        return kind if values else f"{kind}-turned" if turned else f"{kind}-read"
    if source in ("euclidean", "l1") and coordinates > FEW_COORDINATES:
        return "pull-direct" if pulls else kind if values else f"{kind}-direct"
    return kind


def shape(kind: str, width: int) -> tuple[int, int, int, int, int]:
    """Rows and columns of a tile, warps, stages, and programs that a processor holds at once: ``pallas_tuning.json``.

    kind: "lse", "vector" or "matrix", of what is added up; an entry holds up to so many coordinates or columns. Others
    hold any number: "…-read" and "…-turned" of a matrix, "…-direct" of many coordinates one after another.
    """
    table = _tuning()
    size = next(size for size in (FEW_COORDINATES, 64, 128, LARGEST_WIDTH) if width <= size)
    rows, columns, warps, stages, resident = table[kind if kind in table else f"{kind}-{size}"]
    return rows, columns, warps, stages, resident


@functools.lru_cache
def _tuning() -> dict[str, list[int]]:
    return json.loads(Path(__file__).with_name("pallas_tuning.json").read_text())


def _splits(tiles: int, programs: int, places: int) -> int:
    """Parts of the columns: programs run in rounds, as many at once as there are places, and all take as long."""

    def duration(splits: int) -> int:
        return -(-programs * splits // places) * (-(-tiles // splits) + OVERHEAD)

    return min(range(1, min(tiles, MOST_SPLITS) + 1), key=duration)


# --- kernels: rows are dicts of arrays on chip, columns dicts of refs -------------------------------------------------


def _costs(tiles: _Tiles, rows: dict, columns: dict, tile):
    """Scaled costs of the resident rows with one tile of columns, (height, width)."""
    if tiles.source == "squares":
        return _raw(tiles, rows, columns, tile)
    if tiles.direct:
        return _raw(tiles, rows, columns, tile) * rows["unit"]
    squares = rows["squares"][:, None] + _columns_of(tiles, "squares", columns, tile)[None, :]
    return jnp.maximum(_fused(_dots(tiles, rows, columns, tile), -rows["scale"], squares), 0.0)


def _exponents(tiles: _Tiles, rows: dict, columns: dict, tile, level):
    """t_j − C_ij − level_i, with the squares of the row's own point left to `_shift`: few operations a pair."""
    t = _columns_of(tiles, "t", columns, tile)
    if tiles.direct:
        exponents = t[None, :] - level[:, None]
        if tiles.source != "squares":
            return _fused(_raw(tiles, rows, columns, tile), -rows["unit"], exponents)
        for x, y in _coordinates(tiles, rows, columns, tile):
            exponents = _less_square(exponents, x - y)
        return exponents
    rest = (t - _columns_of(tiles, "squares", columns, tile))[None, :] - level[:, None]
    return _fused(_dots(tiles, rows, columns, tile), rows["scale"], rest)


def _shift(tiles: _Tiles, rows: dict):
    """What `_exponents` are above t_j − C_ij − level_i."""
    return jnp.zeros((tiles.height,), jnp.float32) if tiles.direct else rows["squares"]


def _raw(tiles: _Tiles, rows: dict, columns: dict, tile):
    """Costs in their own unit, of points that of squared distances alone is scaled."""
    if tiles.source == "matrix":
        return _read(tiles, rows["index"], columns["costs"], tile)
    term = abs if tiles.source == "l1" else jnp.square
    total = jnp.zeros((tiles.height, tiles.width), jnp.float32)
    if tiles.few:
        for x, y in _coordinates(tiles, rows, columns, tile):
            total = total + term(x - y)
    else:
        add = lambda k, total: total + term(_difference(tiles, rows, columns, tile, k))  # noqa: E731
        total = lax.fori_loop(0, tiles.coordinates, add, total)
    return _root(total) if tiles.source == "euclidean" else total


def _read(tiles: _Tiles, index, costs, tile):
    """A tile of a matrix where it lies; 0 beyond its edges."""
    from jax.experimental.pallas import triton

    i = jnp.broadcast_to(index[:, None], (tiles.height, tiles.width))
    j = tile * tiles.width + lax.broadcasted_iota(jnp.int32, i.shape, 1)
    mask = (i < tiles.n) & (j < tiles.m)
    return triton.load(costs.at[(j, i) if tiles.turned else (i, j)], mask=mask, other=0).astype(jnp.float32)


def _coordinates(tiles: _Tiles, rows: dict, columns: dict, tile):
    return ((x[:, None], columns["points"][k, _at(tiles, tile)][None, :]) for k, x in enumerate(rows["points"]))


def _difference(tiles: _Tiles, rows: dict, columns: dict, tile, k):
    """x_ik − y_jk of one coordinate, which is read for the rows too."""
    return rows["points"][k, :][:, None] - columns["points"][k, _at(tiles, tile)][None, :]


def _dots(tiles: _Tiles, rows: dict, columns: dict, tile):
    """Products of points over the rows' scale."""
    return _product(rows["points"], _parts_of(tiles, "", columns, tile), 1)


def _product(left, right, right_axis):
    """left @ right, or @ rightᵀ, of numbers in two parts: float16 in, float32 out, the small parts first."""
    (hi, lo), (right_hi, right_lo) = left, right
    total = _dot(lo, right_hi, right_axis)
    total = total + _dot(hi, right_lo, right_axis)
    return total + _dot(hi, right_hi, right_axis)


def _dot(left, right, right_axis):
    return lax.dot_general(left, right, (((1,), (right_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _weighted(plan, values, total):
    """total + plan @ values for values in parts. Rows of the plan are brought into float16's range and back."""
    largest = jnp.maximum(jnp.max(jnp.abs(plan), axis=1), 1e-30)
    scaled = plan * (LARGEST_PART / largest)[:, None]
    hi = scaled.astype(jnp.float16)
    lo = (scaled - hi.astype(jnp.float32)).astype(jnp.float16)
    return _fused(_product((hi, lo), values, 0), (largest / LARGEST_PART)[:, None], total)


def _exp2(x):
    """One instruction; the library's exp2 spends three more on results below 2^−126, which are 0 here."""
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32 $0, $1;", x)


def _fused(x, factor, shift):
    """x · factor + shift in one instruction; XLA's Triton leaves products and sums apart."""
    if interpret:
        return x * factor + shift
    return _instruction("fma.rn.f32 $0, $1, $2, $3;", x, jnp.broadcast_to(factor, x.shape), shift)


def _root(squares):
    """√ by one instruction, right but for the last bit."""
    return jnp.sqrt(squares) if interpret else _instruction("sqrt.approx.f32 $0, $1;", squares)


def _less_square(x, difference):
    """x − difference² in one instruction."""
    if interpret:
        return x - difference**2
    return _instruction("{.reg .f32 n; neg.f32 n, $1; fma.rn.f32 $0, n, $1, $2;}", difference, x)


def _instruction(assembly: str, *operands):
    from jax.experimental.pallas import triton

    shape = jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)
    constraints = ",".join(["=f"] + ["f"] * len(operands))
    return triton.elementwise_inline_asm(
        assembly, args=list(operands), constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )[0]


def _at(tiles: _Tiles, tile):
    return pl.ds(tile * tiles.width, tiles.width)


def _columns_of(tiles: _Tiles, name: str, columns: dict, tile):
    return columns[name][_at(tiles, tile)]


def _parts_of(tiles: _Tiles, prefix: str, columns: dict, tile):
    return tuple(columns[f"{prefix}{part}"][_at(tiles, tile), :] for part in ("hi", "lo"))


def _lse_kernel(tiles: _Tiles, rows: dict, columns: dict, first, out):
    shift = _shift(tiles, rows)
    level = rows["near"] + shift

    def near(tile, total):
        terms = _exp2(_exponents(tiles, rows, columns, tile, level))
        return total + (terms if tiles.direct else jnp.sum(terms, axis=1))

    def anywhere(tile, carry):
        top, total = carry
        found = _exponents(tiles, rows, columns, tile, jnp.zeros_like(level))
        new = jnp.maximum(top, jnp.max(found, axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        return new, total * _exp2(top - safe) + jnp.sum(_exp2(found - safe[:, None]), axis=1)

    def again():
        start = jnp.full((tiles.height,), -jnp.inf, jnp.float32), jnp.zeros((tiles.height,), jnp.float32)
        top, total = lax.fori_loop(first, first + tiles.steps, anywhere, start)
        return _log(top - shift, total)

    # Rows of the matrix units' results lie in few threads, and are cheap to add up; others are added up once.
    start = jnp.zeros((tiles.height, tiles.width) if tiles.direct else (tiles.height,), jnp.float32)
    total = lax.fori_loop(first, first + tiles.steps, near, start)
    total = jnp.sum(total, axis=1) if tiles.direct else total
    doubtful = (rows["index"] < tiles.n) & ~((total > LEAST) & (total < MOST))
    found = jnp.max(jnp.where(doubtful, 1, 0)) > 0
    out[...] = lax.cond(found, again, lambda: _log(rows["near"], total))


def _log(top, total):
    return jnp.where(total == 0, -jnp.inf, top + jnp.log2(jnp.where(total == 0, 1.0, total)))


def _reduce_kernel(power: int, tiles: _Tiles, rows: dict, columns: dict, first, *outs):
    def body(tile, totals):
        plan, (vectors, matrix) = _plan(power, tiles, rows, columns, tile), totals
        plan = _with_factors(plan, tiles, rows, columns, tile)
        for k in range(tiles.vectors):
            values = columns["vectors"][k, _at(tiles, tile)][None, :]
            total = _fused(plan, values, vectors[k]) if tiles.direct else vectors[k] + jnp.sum(plan * values, axis=1)
            vectors = (*vectors[:k], total, *vectors[k + 1 :])
        if tiles.values:
            matrix = _weighted(plan, _parts_of(tiles, "values_", columns, tile), matrix)
        return vectors, matrix

    blank = jnp.zeros((tiles.height, tiles.width) if tiles.direct else (tiles.height,), jnp.float32)
    matrix = jnp.zeros(outs[-1].shape, jnp.float32) if tiles.values else jnp.float32(0)
    vectors, matrix = lax.fori_loop(first, first + tiles.steps, body, ((blank,) * tiles.vectors, matrix))
    for k, total in enumerate(vectors):
        outs[0][k, :] = jnp.sum(total, axis=1) if tiles.direct else total
    if tiles.values:
        outs[-1][...] = matrix


def _pull_kernel(power: int, tiles: _Tiles, rows: dict, columns: dict, first, out):
    """Few coordinates are added up by every thread; more are taken one after another, each a column of the result."""

    def few(tile, totals):
        weights, slope = _slopes(power, tiles, rows, columns, tile)
        pairs = _coordinates(tiles, rows, columns, tile)
        return tuple(total + weights * slope(x - y) for total, (x, y) in zip(totals, pairs, strict=True))

    def many(tile, totals):
        weights, slope = _slopes(power, tiles, rows, columns, tile)

        def add(k, totals):
            found = jnp.sum(weights * slope(_difference(tiles, rows, columns, tile, k)), axis=1)
            return totals + jnp.where(lax.broadcasted_iota(jnp.int32, totals.shape, 1) == k, found[:, None], 0.0)

        return lax.fori_loop(0, tiles.coordinates, add, totals)

    if tiles.values:
        out[...] = lax.fori_loop(first, first + tiles.steps, many, jnp.zeros(out.shape, jnp.float32))
        return
    blank = jnp.zeros((tiles.height, tiles.width), jnp.float32)
    for k, total in enumerate(lax.fori_loop(first, first + tiles.steps, few, (blank,) * tiles.vectors)):
        out[k, :] = jnp.sum(total, axis=1)


def _slopes(power: int, tiles: _Tiles, rows: dict, columns: dict, tile):
    """Weights, and the function of a difference for which ∂C/∂x is their product; 0 where points meet."""
    raw = _raw(tiles, rows, columns, tile)
    exponents = rows["s"][:, None] + _columns_of(tiles, "t", columns, tile)[None, :]
    plan = _exp2(_fused(raw, -rows["unit"], exponents))
    for _ in range(power):
        plan = plan * (raw * rows["unit"])
    weights = _with_factors(plan, tiles, rows, columns, tile)
    if tiles.source == "l1":
        return weights, jnp.sign
    return jnp.where(raw > 0, weights / jnp.where(raw > 0, raw, 1.0), 0.0), lambda difference: difference


def _with_factors(plan, tiles: _Tiles, rows: dict, columns: dict, tile):
    """plan_ij (left_i·right_j), of what is among the operands."""
    if "factor" in rows:
        plan = plan * rows["factor"][:, None] * _columns_of(tiles, "factor", columns, tile)[None, :]
    if "factors" in rows:
        products = _product(rows["factors"], _parts_of(tiles, "factors_", columns, tile), 1)
        plan = plan * (products * rows["factors_scale"])
    return plan


def _plan(power: int, tiles: _Tiles, rows: dict, columns: dict, tile):
    """exp(s_i + t_j − C_ij) C_ij^power, (height, width)."""
    if not power:
        return _exp2(_exponents(tiles, rows, columns, tile, _shift(tiles, rows) - rows["s"]))
    costs = _costs(tiles, rows, columns, tile)
    plan = _exp2(rows["s"][:, None] + _columns_of(tiles, "t", columns, tile)[None, :] - costs)
    if tiles.source == "matrix":
        costs = jnp.where(plan == 0, 0.0, costs)  # which may be infinite
    for _ in range(power):
        plan = plan * costs
    return plan


# --- launching -------------------------------------------------------------------------------------------------------


def _launch(
    kernel, tiles: _Tiles, pairs: Pairs, rows: dict, columns: dict, factors_scale: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Launch over (row tiles, splits, problems).

    Returns (B, splits, rows) of a log-sum-exp; else (B, splits, vectors, rows) and (B, splits, rows, values) of what
    there is. Padded.
    """
    points = _operands(tiles, pairs)
    rows = {**_padded(rows, tiles.padded_rows), **points[0]}
    if factors_scale is not None:
        rows["factors_scale"] = factors_scale
    columns = {**_padded(columns, tiles.padded_columns), **points[1]}
    specs = [_spec(name, part, pairs.problems, tiles.height) for name, part in rows.items()]
    specs += [_spec(name, part, pairs.problems, None) for name, part in columns.items()]
    shapes, out_specs = zip(*_outs(tiles, pairs.problems), strict=True)
    launch = pl.pallas_call(
        functools.partial(_entry, kernel, tiles, tuple(rows), tuple(columns)),
        out_shape=shapes,
        grid=(tiles.padded_rows // tiles.height, tiles.splits, pairs.problems),
        in_specs=specs,
        out_specs=out_specs,
        compiler_params=_compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="sinkhorn_reduce" if tiles.vectors or tiles.values else "sinkhorn_lse",
    )
    return opaque(launch)(*rows.values(), *columns.values())


def _outs(tiles: _Tiles, problems: int) -> list[tuple[jax.ShapeDtypeStruct, Any]]:
    """What is written, and the block of it that a program writes."""
    found: list[tuple[jax.ShapeDtypeStruct, Any]] = []
    leading, rows, height = (problems, tiles.splits), tiles.padded_rows, tiles.height

    def add(shape: tuple[int, ...], block: tuple[int, ...], at: Any) -> None:
        spec = pl.BlockSpec((None, None, *block), lambda i, q, p: (p, q, *at(i)))
        found.append((jax.ShapeDtypeStruct((*leading, *shape), jnp.float32), spec))

    if tiles.vectors:
        add((tiles.vectors, rows), (tiles.vectors, height), lambda i: (0, i))
    if tiles.values:
        columns = _power(tiles.values)
        add((rows, columns), (height, columns), lambda i: (i, 0))
    if not found:
        add((rows,), (height,), lambda i: (i,))
    return found


def _entry(kernel, tiles: _Tiles, row_names, column_names, *refs):
    end = len(row_names) + len(column_names)
    near = dict(zip(row_names, refs[: len(row_names)], strict=True))
    columns = dict(zip(column_names, refs[len(row_names) : end], strict=True))
    rows = {name: ref[...] for name, ref in near.items() if name in ("near", "s", "squares", "factor")}
    if "factors_hi" in near:
        rows["factors"] = near["factors_hi"][...], near["factors_lo"][...]
        rows["factors_scale"] = near["factors_scale"][0]
    if "unit" in near:
        rows["unit"] = near["unit"][0]
    if "points" in near:
        few = range(tiles.coordinates)
        rows["points"] = [near["points"][k, :] for k in few] if tiles.few else near["points"]
    if "hi" in near:
        rows["points"], rows["scale"] = (near["hi"][...], near["lo"][...]), near["scale"][0]
    rows["index"] = pl.program_id(0) * tiles.height + lax.broadcasted_iota(jnp.int32, (tiles.height,), 0)
    kernel(tiles, rows, columns, pl.program_id(1) * tiles.steps, *refs[end:])


def _compiler_params(warps: int, stages: int) -> Any:
    """Name Triton explicitly: which compiler Pallas prefers on a GPU has changed from release to release."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


def _operands(tiles: _Tiles, pairs: Pairs) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What costs are made of, of rows and of columns; a loop over log-sum-exps may hold it."""
    if tiles.source == "matrix":
        costs = pairs.matrix if pairs.held is None else pairs.held[0]
        return {"unit": (LOG2E / pairs.epsilon)[:, None]}, {"costs": costs}
    if tiles.vectors or tiles.values or pairs.held is None:
        return _points(tiles, pairs)
    return pairs.held[0]


def _points(tiles: _Tiles, pairs: Pairs) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Rows and columns as the kernels read them; squared distances are scaled, so that they are costs over ε."""
    squared = pairs.metric == "sqeuclidean"
    unit = jnp.sqrt(LOG2E / pairs.epsilon)[:, None, None] if squared else 1
    x, y = pairs.x * unit, pairs.y * unit
    if tiles.direct:
        rows, columns = ({"points": jnp.swapaxes(points, 1, 2)} for points in (x, y))
        if not squared:
            rows["unit"] = (LOG2E / pairs.epsilon)[:, None]
    else:
        largest = jnp.maximum(abs(x).max((1, 2)), abs(y).max((1, 2)))[:, None, None]
        unit = jnp.where(largest > 0, largest, 1) / LARGEST_PART
        rows, columns = (_split_points(points, unit) for points in (x, y))
        rows["scale"] = 2 * unit[:, 0] ** 2
    return _padded(rows, tiles.padded_rows), _padded(columns, tiles.padded_columns)


def _split_points(points: jax.Array, unit: jax.Array) -> dict[str, jax.Array]:
    hi, lo = split(points / unit)
    return {"hi": hi, "lo": lo, "squares": (points**2).sum(-1)}


def split(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float16 parts of float32 numbers up to `LARGEST_PART`: hi + lo.

    Rounded by ``reduce_precision``: XLA may leave out a conversion to float16 and back.
    """
    hi = lax.reduce_precision(numbers, exponent_bits=5, mantissa_bits=10)
    return hi.astype(jnp.float16), (numbers - hi).astype(jnp.float16)


#: Numbers of a problem among the operands of its rows.
SCALES = ("scale", "factors_scale", "unit")

#: What padded columns hold, so that they weigh nothing: their exponent.
_FILL = {"t": -math.inf}


def _padded(parts: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Rows or columns to whole tiles, coordinates and values to a power of two."""
    return {name: _padded_array(name, part, count) for name, part in parts.items()}


def _padded_array(name: str, array: jax.Array, count: int) -> jax.Array:
    if name in SCALES or name == "costs":
        return array
    axis = 2 if name in ("points", "vectors") else 1
    amounts = [(0, 0)] * array.ndim
    amounts[axis] = (0, count - array.shape[axis])
    if name.endswith(("hi", "lo")):
        amounts[2] = (0, _power(array.shape[2]) - array.shape[2])
    fill = _FILL.get(name, 0.0)
    return jnp.pad(array, amounts, constant_values=fill) if any(after for _, after in amounts) else array


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _spec(name: str, array: jax.Array, problems: int, height: int | None):
    """A block of rows, or all columns; an array with one leading entry is shared by the problems."""
    own = problems // array.shape[0]
    if name in SCALES:
        return pl.BlockSpec((None, 1), lambda i, q, p: (p // own, 0))
    axis = 2 if name in ("points", "vectors") else 1
    block = [*array.shape[1:]]
    if height is not None:
        block[axis - 1] = height
    at = (lambda i, k: i if k == axis - 1 else 0) if height is not None else (lambda i, k: 0)
    return pl.BlockSpec((None, *block), lambda i, q, p: (p // own, *(at(i, k) for k in range(len(block)))))
