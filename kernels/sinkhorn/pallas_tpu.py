"""Pallas for TPU: the grid runs in order, so what a strip of rows sums up stays in scratch while columns stream past.

Points are scaled by √(1/ε), so that a cost over ε is a squared distance. "euclidean" and "l1" take direct differences
of coordinates (P, d, L), eight at a time. A matrix of costs is read where it lies, and its tiles are turned on the chip
where its columns are the rows. Vectors travel as (P, 1, L): the last two axes of a block must be multiples of (8, 128)
or whole.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tpu import without_x64
from .jax_pairs import Pairs, no_tile, opaque

LARGEST_WIDTH = 512
VMEM_BYTES = 48 << 20
EIGHT = 8  # rows of a register

#: Tests run the kernels on a CPU: `True`, or `pltpu.InterpretParams(...)`.
interpret: Any = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return no_tile(request, LARGEST_WIDTH)


def hold(pairs: Pairs) -> Pairs:
    """A matrix of bfloat16 is read as such; there is nothing else to prepare."""
    if pairs.narrow != "bfloat16":
        return pairs
    kept = pairs.matrix.astype(jnp.bfloat16)
    return pairs._replace(held=(kept, kept))


def lse(pairs: Pairs, h: jax.Array, guess: jax.Array | None = None) -> jax.Array:
    """log Σ_j exp(h_j − C_ij/ε), (B, n), for h of shape (B, m); −inf leaves a column out. Needs no guess."""
    return _launch(_lse_kernel, pairs, {}, {"t": h}, 0)


def reduce(
    pairs: Pairs, s: jax.Array, t: jax.Array, values: jax.Array, power: int = 0, left: jax.Array | None = None,
    right: jax.Array | None = None,
) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) values_j, (B, n, k); see `jax_blocks.reduce`."""
    rows, columns = {"s": s}, {"t": t, "values": values}
    if left is not None:
        rows, columns = {**rows, "factors": left}, {**columns, "factors": right}
    out = _launch(functools.partial(_reduce_kernel, power), pairs, rows, columns, values.shape[-1])
    return out * pairs.epsilon[:, None, None] ** power


def pull(pairs: Pairs, s: jax.Array, t: jax.Array, left: jax.Array, right: jax.Array, power: int = 0) -> jax.Array:
    """Σ_j exp(s_i + t_j − C_ij/ε) C_ij^power (left_i·right_j) ∂C_ij/∂x_i, (B, n, d), of "euclidean" and "l1"."""
    rows, columns = {"s": s, "factors": left}, {"t": t, "factors": right}
    out = _launch(functools.partial(_pull_kernel, power), pairs, rows, columns, pairs.x.shape[-1], pulls=True)
    return out * pairs.epsilon[:, None, None] ** power


class _Tiles(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    height: int
    width: int
    row_tiles: int
    column_tiles: int
    columns: int
    coordinates: int
    metric: str
    turned: bool

    @classmethod
    def of(cls, pairs: Pairs) -> _Tiles:
        height, width = min(256, _round(pairs.rows, 128)), min(512, _round(pairs.columns, 128))
        counts = -(-pairs.rows // height), -(-pairs.columns // width), pairs.columns
        matrix = pairs.matrix is not None
        coordinates, metric = (0, "matrix") if matrix else (pairs.x.shape[-1], pairs.metric)
        return cls(height, width, *counts, coordinates, metric, pairs.turned)

    @property
    def eights(self) -> int:
        """How many times eight coordinates there are."""
        return -(-self.coordinates // EIGHT)


def _round(size: int, whole: int) -> int:
    return -(-size // whole) * whole


# --- kernels: rows and columns are dicts of refs; top and total are scratch -------------------------------------------


def _costs(tiles: _Tiles, rows: dict, columns: dict):
    """Scaled costs of a strip with one tile of columns. The one place for them."""
    if tiles.metric != "sqeuclidean":
        return _raw(tiles, rows, columns) * rows["unit"][...]
    squares = _upright(rows["squares"][...]) + columns["squares"][...]
    return jnp.maximum(squares - 2 * _dot(rows["points"][...], columns["points"][...], 1), 0.0)


def _raw(tiles: _Tiles, rows: dict, columns: dict):
    """Costs of a matrix or of direct differences in their own unit."""
    if tiles.metric == "matrix":
        return _read(tiles, columns["costs"][...].astype(jnp.float32))
    term = abs if tiles.metric == "l1" else jnp.square

    def add(eight, total):
        return sum((term(difference) for difference in _differences(tiles, rows, columns, eight)), start=total)

    total = lax.fori_loop(0, tiles.eights, add, jnp.zeros((tiles.height, tiles.width), jnp.float32))
    return jnp.sqrt(total) if tiles.metric == "euclidean" else total


def _read(tiles: _Tiles, costs):
    """A tile as rows by columns; what lies beyond the last column is anything, and becomes 0."""
    costs = costs.T if tiles.turned else costs
    if tiles.columns % tiles.width == 0:
        return costs
    column = pl.program_id(2) * tiles.width + lax.broadcasted_iota(jnp.int32, costs.shape, 1)
    return jnp.where(column < tiles.columns, costs, 0.0)


def _differences(tiles: _Tiles, rows: dict, columns: dict, eight):
    """x_ik − y_jk of eight coordinates, or of all if they are fewer, (height, width) each."""
    at = pl.ds(pl.multiple_of(eight * EIGHT, EIGHT), EIGHT)
    x, y = rows["coordinates"][at, :].T, columns["coordinates"][at, :]
    return [x[:, k : k + 1] - y[k : k + 1, :] for k in range(min(EIGHT, tiles.coordinates))]


def _dot(left, right, right_axis):
    dimensions = (((1,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _upright(vector):
    """(1, L) → (L, 1)."""
    return jnp.reshape(vector, (vector.shape[1], 1))


def _lse_kernel(tiles: _Tiles, rows: dict, columns: dict, out, top, total):
    @pl.when(pl.program_id(2) == 0)
    def _():
        top[...], total[...] = jnp.full(top.shape, -jnp.inf, jnp.float32), jnp.zeros(total.shape, jnp.float32)

    exponents = columns["t"][...] - _costs(tiles, rows, columns)
    new = jnp.maximum(top[...], jnp.max(exponents, axis=1, keepdims=True))
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    total[...] = total[...] * jnp.exp(top[...] - safe) + jnp.sum(jnp.exp(exponents - safe), axis=1, keepdims=True)
    top[...] = new

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        found = total[...]
        sums = jnp.where(found == 0, -jnp.inf, top[...] + jnp.log(jnp.where(found == 0, 1.0, found)))
        out[...] = jnp.reshape(sums, (1, sums.shape[0]))


def _reduce_kernel(power: int, tiles: _Tiles, rows: dict, columns: dict, out, top, total):
    @pl.when(pl.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    plan = _plan(power, rows, columns, _costs(tiles, rows, columns))
    total[...] += _dot(plan, columns["values"][...], 0)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out[...] = total[...]


def _pull_kernel(power: int, tiles: _Tiles, rows: dict, columns: dict, out, top, total):
    """Sums of coordinates lie on top of each other, (coordinates, height)."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    raw = _raw(tiles, rows, columns)
    weights, slope = _plan(power, rows, columns, raw * rows["unit"][...]), _sign
    if tiles.metric == "euclidean":  # no derivative where points meet
        weights, slope = jnp.where(raw > 0, weights / jnp.where(raw > 0, raw, 1.0), 0.0), lambda difference: difference

    def add(eight, _):
        differences = _differences(tiles, rows, columns, eight)
        sums = [jnp.sum(weights * slope(difference), axis=1, keepdims=True) for difference in differences]
        sums += [jnp.zeros_like(sums[0])] * (EIGHT - len(sums))
        total[pl.ds(pl.multiple_of(eight * EIGHT, EIGHT), EIGHT), :] += jnp.concatenate(sums, 1).T

    lax.fori_loop(0, tiles.eights, add, None)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out[...] = total[...]


def _sign(x):
    """jnp.sign is lowered by the kind of the chip, which a compilation ahead of time does not have."""
    return jnp.where(x > 0, 1.0, jnp.where(x < 0, -1.0, 0.0))


def _plan(power: int, rows: dict, columns: dict, costs):
    """exp(s_i + t_j − C_ij) C_ij^power (left_i·right_j) of scaled costs, which may be infinite."""
    plan = jnp.exp(_upright(rows["s"][...]) + columns["t"][...] - costs)
    costs = jnp.where(plan == 0, 0.0, costs) if power else costs
    for _ in range(power):
        plan = plan * costs
    if "factors" in rows:
        plan = plan * _dot(rows["factors"][...], columns["factors"][...], 1)
    return plan


# --- launching -------------------------------------------------------------------------------------------------------


def _launch(kernel, pairs: Pairs, rows: dict, columns: dict, values: int, pulls: bool = False) -> jax.Array:
    """Launch over (problems, strips, column tiles); returns (B, n) or (B, n, values)."""
    tiles = _Tiles.of(pairs)
    padded, height = tiles.row_tiles * tiles.height, tiles.height
    of_rows, of_columns = _costs_of(pairs)
    rows = _operands({**rows, **of_rows}, padded)
    columns = _operands({**columns, **of_columns}, tiles.column_tiles * tiles.width)
    specs = [_spec(name, part, tiles, pairs.problems, 0) for name, part in rows.items()]
    specs += [_spec(name, part, tiles, pairs.problems, 1) for name, part in columns.items()]
    upright = bool(values) and not pulls  # rows of the result are rows of the output
    wide = tiles.eights * EIGHT if pulls else values or 1
    total = (height, wide) if upright else (wide, height)
    launch = pl.pallas_call(
        functools.partial(_entry, functools.partial(kernel, tiles), tuple(rows), tuple(columns)),
        out_shape=jax.ShapeDtypeStruct((pairs.problems, *((padded, wide) if upright else (wide, padded))), jnp.float32),
        grid=(pairs.problems, tiles.row_tiles, tiles.column_tiles),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, *total), lambda p, i, j: (p, i, 0) if upright else (p, 0, i)),
        scratch_shapes=[
            pltpu.VMEM((height, 1), jnp.float32), pltpu.VMEM(total if values else (height, 1), jnp.float32)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
    )  # fmt: skip
    with without_x64():
        result = opaque(launch)(*rows.values(), *columns.values())
    result = jnp.swapaxes(result, 1, 2)[..., :values] if pulls else result
    return result[:, : pairs.rows] if values else result[:, 0, : pairs.rows]


def _entry(kernel, row_names, column_names, *refs):
    split, end = len(row_names), len(row_names) + len(column_names)
    rows, columns = dict(zip(row_names, refs, strict=False)), dict(zip(column_names, refs[split:end], strict=True))
    kernel(rows, columns, *refs[end:])


def _costs_of(pairs: Pairs) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What costs are made of, of rows and of columns."""
    unit = (1 / pairs.epsilon)[:, None, None]
    if pairs.matrix is not None:
        return {"unit": unit}, {"costs": pairs.matrix if pairs.held is None else pairs.held[0]}
    if pairs.metric == "sqeuclidean":
        rows, columns = (_points(points * jnp.sqrt(unit)) for points in (pairs.x, pairs.y))
        return rows, columns
    rows, columns = ({"coordinates": jnp.swapaxes(points, 1, 2)} for points in (pairs.x, pairs.y))
    return {"unit": unit, **rows}, columns


def _points(points: jax.Array) -> dict[str, jax.Array]:
    return {"points": points, "squares": (points**2).sum(-1)}


#: What padded columns hold, so that they weigh nothing: their exponent.
_FILL = {"t": -math.inf}

#: Operands with a second axis of their own: behind that of rows or columns, or, of coordinates, in front of it.
_MATRICES = ("points", "values", "factors")


def _operands(parts: dict, length: int) -> dict:
    """Vectors (P, L) become (P, 1, L); rows or columns are padded to whole blocks, coordinates to eights."""
    return {name: _blockable(name, part, length) for name, part in parts.items()}


def _blockable(name: str, array: jax.Array, length: int) -> jax.Array:
    if name in ("unit", "costs"):
        return array
    if name in _MATRICES:
        sizes = length, array.shape[2]
    else:
        array = array if name == "coordinates" else array[:, None, :]
        sizes = _round(array.shape[1], EIGHT) if name == "coordinates" else 1, length
    amounts = [(0, 0), *((0, size - given) for size, given in zip(sizes, array.shape[1:], strict=True))]
    padded = any(after for _, after in amounts)
    return jnp.pad(array, amounts, constant_values=_FILL.get(name, 0.0)) if padded else array


def _spec(name: str, array: jax.Array, tiles: _Tiles, problems: int, axis: int):
    """A block of rows (axis 0) or columns (axis 1). An array with one leading entry is shared."""
    alone, size = array.shape[0] == problems, (tiles.height, tiles.width)[axis]

    def spec(shape: tuple[int, int], at: Any) -> Any:
        return pl.BlockSpec((None, *shape), lambda p, *ij: (p if alone else 0, *at(*ij)))

    if name == "unit":
        return spec((1, 1), lambda i, j: (0, 0))
    if name == "costs":
        turned = (tiles.width, tiles.height), lambda i, j: (j, i)
        return spec(*(turned if tiles.turned else ((tiles.height, tiles.width), lambda i, j: (i, j))))
    if name in _MATRICES:
        return spec((size, array.shape[2]), lambda *ij: (ij[axis], 0))
    return spec((array.shape[1], size), lambda *ij: (0, ij[axis]))
