"""Pallas for TPU: the grid runs in order, so what a strip of rows sums up stays in scratch while columns stream past.

Points are scaled by √(1/ε), so that a cost over ε is a squared distance. Vectors travel as (P, 1, L): the last two axes
of a block must be multiples of (8, 128) or whole.
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

from .jax_pairs import Pairs, no_tile, opaque

LARGEST_WIDTH = 512
VMEM_BYTES = 48 << 20

#: Tests run the kernels on a CPU: `True`, or `pltpu.InterpretParams(...)`.
interpret: Any = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return no_tile(request, LARGEST_WIDTH)


def hold(pairs: Pairs) -> Pairs:
    """Nothing to prepare."""
    return pairs


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


class _Tiles(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    height: int
    width: int
    row_tiles: int
    column_tiles: int

    @classmethod
    def of(cls, pairs: Pairs) -> _Tiles:
        height, width = min(256, _round(pairs.rows)), min(512, _round(pairs.columns))
        return cls(height, width, -(-pairs.rows // height), -(-pairs.columns // width))


def _round(size: int) -> int:
    return -(-size // 128) * 128


# --- kernels: rows and columns are dicts of refs; top and total are scratch -------------------------------------------


def _costs(rows: dict, columns: dict):
    """Scaled costs of a strip with one tile of columns. The one place for them."""
    squares = _upright(rows["squares"][...]) + columns["squares"][...]
    return jnp.maximum(squares - 2 * _dot(rows["points"][...], columns["points"][...], 1), 0.0)


def _dot(left, right, right_axis):
    dimensions = (((1,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _upright(vector):
    """(1, L) → (L, 1)."""
    return jnp.reshape(vector, (vector.shape[1], 1))


def _lse_kernel(rows: dict, columns: dict, out, top, total):
    @pl.when(pl.program_id(2) == 0)
    def _():
        top[...], total[...] = jnp.full(top.shape, -jnp.inf, jnp.float32), jnp.zeros(total.shape, jnp.float32)

    exponents = columns["t"][...] - _costs(rows, columns)
    new = jnp.maximum(top[...], jnp.max(exponents, axis=1, keepdims=True))
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    total[...] = total[...] * jnp.exp(top[...] - safe) + jnp.sum(jnp.exp(exponents - safe), axis=1, keepdims=True)
    top[...] = new

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        found = total[...]
        sums = jnp.where(found > 0, top[...] + jnp.log(jnp.where(found > 0, found, 1.0)), -jnp.inf)
        out[...] = jnp.reshape(sums, (1, sums.shape[0]))


def _reduce_kernel(power: int, rows: dict, columns: dict, out, top, total):
    @pl.when(pl.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    costs = _costs(rows, columns)
    plan = jnp.exp(_upright(rows["s"][...]) + columns["t"][...] - costs)
    for _ in range(power):
        plan = plan * costs
    if "factors" in rows:
        plan = plan * _dot(rows["factors"][...], columns["factors"][...], 1)
    total[...] += _dot(plan, columns["values"][...], 0)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out[...] = total[...]


# --- launching -------------------------------------------------------------------------------------------------------


def _launch(kernel, pairs: Pairs, rows: dict, columns: dict, values: int) -> jax.Array:
    """Launch over (problems, strips, column tiles); returns (B, n) or (B, n, values)."""
    tiles = _Tiles.of(pairs)
    padded = tiles.row_tiles * tiles.height
    rows = _operands({**rows, **_points(pairs, "x")}, padded)
    columns = _operands({**columns, **_points(pairs, "y")}, tiles.column_tiles * tiles.width)
    specs = [_spec(name, part, tiles.height, pairs.problems, 0) for name, part in rows.items()]
    specs += [_spec(name, part, tiles.width, pairs.problems, 1) for name, part in columns.items()]
    block = (None, tiles.height, values) if values else (None, 1, tiles.height)
    launch = pl.pallas_call(
        functools.partial(_entry, kernel, tuple(rows), tuple(columns)),
        out_shape=jax.ShapeDtypeStruct((pairs.problems, *((padded, values) if values else (1, padded))), jnp.float32),
        grid=(pairs.problems, tiles.row_tiles, tiles.column_tiles),
        in_specs=specs,
        out_specs=pl.BlockSpec(block, lambda p, i, j: (p, i, 0) if values else (p, 0, i)),
        scratch_shapes=[
            pltpu.VMEM((tiles.height, 1), jnp.float32), pltpu.VMEM((tiles.height, values or 1), jnp.float32)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
    )  # fmt: skip
    result = opaque(launch)(*rows.values(), *columns.values())
    return result[:, : pairs.rows] if values else result[:, 0, : pairs.rows]


def _entry(kernel, row_names, column_names, *refs):
    split, end = len(row_names), len(row_names) + len(column_names)
    rows, columns = dict(zip(row_names, refs, strict=False)), dict(zip(column_names, refs[split:end], strict=True))
    kernel(rows, columns, *refs[end:])


def _points(pairs: Pairs, side: str) -> dict[str, jax.Array]:
    unit = jax.lax.rsqrt(pairs.epsilon)[:, None, None]
    points = (pairs.x if side == "x" else pairs.y) * unit
    return {"points": points, "squares": (points**2).sum(-1)}


#: What padded columns hold, so that they weigh nothing: their exponent.
_FILL = {"t": -math.inf}
_MATRICES = ("points", "values", "factors")


def _operands(parts: dict, length: int) -> dict:
    """Vectors (P, L) become (P, 1, L); rows or columns are padded to whole blocks."""
    return {name: _blockable(name, part, length) for name, part in parts.items()}


def _blockable(name: str, array: jax.Array, length: int) -> jax.Array:
    array = array if name in _MATRICES else array[:, None, :]
    axis = 1 if name in _MATRICES else 2
    amounts = [(0, length - array.shape[axis]) if position == axis else (0, 0) for position in range(3)]
    if array.shape[axis] == length:
        return array
    return jnp.pad(array, amounts, constant_values=_FILL.get(name, 0.0))


def _spec(name: str, array: jax.Array, size: int, problems: int, axis: int):
    """A block of ``size`` rows (axis 0) or columns (axis 1). An array with one leading entry is shared."""
    alone = array.shape[0] == problems
    if name in _MATRICES:
        return pl.BlockSpec((None, size, array.shape[2]), lambda p, *ij: (p if alone else 0, ij[axis], 0))
    return pl.BlockSpec((None, 1, size), lambda p, *ij: (p if alone else 0, 0, ij[axis]))
