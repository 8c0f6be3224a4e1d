"""Pallas for TPU: the grid runs in order, so a strip of scores stays in scratch and a full step reads the pairs once.

For each strip of rows, phase 0 makes the scores, keeps them, and finds the potential of the rows; phase 1 adds the kept
scores to the running log-sum-exp of every column. Vectors travel as (P, 1, L): the last two axes of a block must be
multiples of (8, 128) or whole.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flashot_backends.kernels.attention.chunked import score_gradient
from flashot_backends.kernels.attention.pairs import Pairs, matched, potential
from flashot_backends.kernels.tpu import without_x64

__all__ = ["applies", "apply", "full_step", "half_step", "lse", "matvec", "prepare", "pull", "score_gradient"]

whole = False
one_pass = True
unroll = 1
LARGEST_FEATURES = 512

#: Bytes of scores that one strip may keep, and what a kernel may use in all.
STRIP_BYTES = 20 << 20
VMEM_BYTES = 48 << 20

#: Tests run the kernels on a CPU: `True`, or `pltpu.InterpretParams(...)`.
interpret: Any = False


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    if request.dtype == "float64":
        return "float64 runs in the chunked tier"
    if max(request.d, request.e) > LARGEST_FEATURES:
        return f"at most {LARGEST_FEATURES} features per head fit a tile, not {max(request.d, request.e)}"
    return None


def prepare(pairs: Pairs) -> Pairs:
    """Nothing to lay out once and for all."""
    return pairs


def lse(pairs: Pairs, w: jax.Array) -> jax.Array:
    """log Σ_j exp(S_ij + w_j), (P, n); −inf in rows without support. w: (P, m)."""
    return _run(_lse_kernel, pairs, rows={}, columns={"w": w})


def half_step(pairs: Pairs, w, log_target, extra, guess) -> jax.Array:
    """log_target − LSE_j(S + w), (P, n); extra: (P, n) one more term of each row's sum, or None. No use for a guess."""
    return potential(log_target, lse(pairs, w), extra)


def matvec(pairs: Pairs, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
    """Σ_j exp(S_ij + u_i + w_j) z_j, (P, n). u: (P, n), w and z: (P, m)."""
    return _run(_matvec_kernel, pairs, rows={"u": u}, columns={"w": w, "z": z})


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
    """u = log_target − LSE_j(S + w) and then LSE_i(S + u), one pass where a strip of scores fits; see `chunked`."""
    shape = _shape(pairs)
    if 4 * shape.height * shape.width * shape.reach <= STRIP_BYTES:
        return _one_pass(shape, pairs, w, log_target, extra)
    u = half_step(pairs, w, log_target, extra, None)
    return u, lse(pairs.T, u)


class _Shape(NamedTuple):
    """What a kernel needs to know before it is compiled."""

    n: int
    m: int
    height: int
    width: int
    row_tiles: int
    tiles: int  # of columns
    reach: int  # of these, how many a strip can touch
    window: int | None
    ids: bool

    def tile(self, i, j):
        """The column tile that step j of strip i visits; outside 0 … tiles − 1 there is nothing to do."""
        if self.window is None or self.reach == self.tiles:
            return j
        back = -(-self.window // self.width)  # keeps the dividend positive
        return lax.div(i * self.height - self.window + back * self.width, self.width) - back + j


def _shape(pairs: Pairs) -> _Shape:
    height, width = min(128, _round(pairs.rows)), min(512, _round(pairs.columns))
    tiles = -(-pairs.columns // width)
    reach = tiles if pairs.window is None else min(tiles, -(-(height + 2 * pairs.window) // width) + 1)
    row_tiles = -(-pairs.rows // height)
    return _Shape(
        pairs.rows, pairs.columns, height, width, row_tiles, tiles, reach, pairs.window, pairs.x_ids is not None
    )


def _round(size: int) -> int:
    return -(-size // 128) * 128


# --- kernels: refs are dicts of what the call brought ----------------------------------------------------------------


def _score_tile(shape: _Shape, rows, columns, i, tile):
    """Scores of a strip with one tile of columns, −inf off the support. The one place for it."""
    x, y = rows["features"][...], columns["features"][...]
    scores = _dot(x, y, 1, 1) * rows["scale"][...]
    if "bias" in columns:
        scores = scores + columns["bias"][...]
    for allowed in _support(shape, rows, columns, i, tile):
        scores = jnp.where(allowed, scores, -jnp.inf)
    return scores


def _support(shape: _Shape, rows, columns, i, tile):
    size = shape.height, shape.width
    column = tile * shape.width + lax.broadcasted_iota(jnp.int32, size, 1)
    row = i * shape.height + lax.broadcasted_iota(jnp.int32, size, 0)
    if shape.m % shape.width:
        yield column < shape.m
    if shape.n % shape.height:
        yield row < shape.n
    if shape.window is not None:
        yield jnp.abs(row - column) <= shape.window
    if shape.ids:
        yield _upright(rows["ids"][...]) == columns["ids"][...]
    if "mask" in columns:
        yield columns["mask"][...].astype(jnp.float32) > 0


def _upright(vector):
    """(1, L) → (L, 1)."""
    return jnp.reshape(vector, (vector.shape[1], 1))


def _flat(vector):
    """(L, 1) → (1, L)."""
    return jnp.reshape(vector, (1, vector.shape[0]))


def _dot(left, right, left_axis, right_axis):
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _online(top, total, scores, axis):
    """Running maximum and sum of exponentials after more scores along `axis`."""
    new = jnp.maximum(top, jnp.max(scores, axis=axis, keepdims=True))
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    return new, total * jnp.exp(top - safe) + jnp.sum(jnp.exp(scores - safe), axis=axis, keepdims=True)


def _log_total(top, total):
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def _lse_kernel(shape: _Shape, rows, columns, out, scratch, step):
    top, total = scratch["top"], scratch["total"]

    @pl.when(step.first)
    def _():
        top[...], total[...] = jnp.full(top.shape, -jnp.inf, jnp.float32), jnp.zeros(total.shape, jnp.float32)

    @pl.when(step.inside)
    def _():
        scores = _score_tile(shape, rows, columns, step.i, step.tile) + columns["w"][...]
        top[...], total[...] = _online(top[...], total[...], scores, 1)

    @pl.when(step.last)
    def _():
        out[...] = _flat(_log_total(top[...], total[...]))


def _accumulate(part):
    """A kernel that sums part(plan tile, …) over the tiles of a strip."""

    def kernel(shape: _Shape, rows, columns, out, scratch, step):
        total = scratch["total"]

        @pl.when(step.first)
        def _():
            total[...] = jnp.zeros(total.shape, jnp.float32)

        @pl.when(step.inside)
        def _():
            scores = _score_tile(shape, rows, columns, step.i, step.tile)
            plan = jnp.exp(scores + _upright(rows["u"][...]) + columns["w"][...])
            total[...] += part(plan, rows, columns)

        @pl.when(step.last)
        def _():
            out[...] = total[...] if out.shape == total.shape else _flat(total[...])

    return kernel


def _matvec_part(plan, rows, columns):
    return jnp.sum(plan * columns["z"][...], axis=1, keepdims=True)


def _apply_part(plan, rows, columns):
    values = columns["values"][...]
    return _dot(*matched(plan, values), 1, 0)


def _pull_part(plan, rows, columns):
    total = -_dot(rows["terms"][...], columns["terms"][...], 0, 0)
    if "values" in rows:
        total = total + _dot(rows["values"][...], columns["values"][...], 1, 1)
    features = columns["features"][...]
    return _dot(*matched(plan * total, features), 1, 0)


_matvec_kernel, _apply_kernel, _pull_kernel = (_accumulate(part) for part in (_matvec_part, _apply_part, _pull_part))


class _Step(NamedTuple):
    i: Any
    tile: Any
    first: Any
    inside: Any
    last: Any


def _step(shape: _Shape, j_axis: int) -> _Step:
    i, j = pl.program_id(1), pl.program_id(j_axis)
    tile = shape.tile(i, j)
    return _Step(i, tile, j == 0, (tile >= 0) & (tile < shape.tiles), j == shape.reach - 1)


def _one_pass_kernel(shape: _Shape, row_names, column_names, *refs):
    split = len(row_names)
    rows = dict(zip(row_names, refs[:split], strict=True))
    columns = dict(zip(column_names, refs[split : split + len(column_names)], strict=True))
    u_out, sums_out, strip, top, total, column_top, column_total = refs[split + len(column_names) :]
    step, phase, j = _step(shape, 3), pl.program_id(2), pl.program_id(3)

    @pl.when((step.i == 0) & (phase == 0) & step.first)
    def _():
        column_top[...] = jnp.full(column_top.shape, -jnp.inf, jnp.float32)
        column_total[...] = jnp.zeros(column_total.shape, jnp.float32)

    @pl.when((phase == 0) & step.first)
    def _():
        top[...], total[...] = jnp.full(top.shape, -jnp.inf, jnp.float32), jnp.zeros(total.shape, jnp.float32)

    @pl.when((phase == 0) & step.inside)
    def _():
        scores = _score_tile(shape, rows, columns, step.i, step.tile)
        strip[j] = scores
        top[...], total[...] = _online(top[...], total[...], scores + columns["w"][...], 1)

    @pl.when((phase == 0) & step.last)
    def _():
        sums = _log_total(top[...], total[...])
        if "extra" in rows:
            sums = jnp.logaddexp(sums, _upright(rows["extra"][...]))
        target = _upright(rows["target"][...])
        top[...] = jnp.where(sums == -jnp.inf, 0.0, target - sums)  # from here on it holds u
        u_out[...] = _flat(top[...])

    @pl.when((phase == 1) & step.inside)
    def _():
        carry = column_top[step.tile], column_total[step.tile]
        column_top[step.tile], column_total[step.tile] = _online(*carry, strip[j] + top[...], 0)

    @pl.when((step.i == shape.row_tiles - 1) & (phase == 1) & step.last)
    def _():
        sums_out[...] = _log_total(column_top[...], column_total[...])


# --- launching -------------------------------------------------------------------------------------------------------


def _run(kernel, pairs: Pairs, rows: dict, columns: dict, width: int = 0) -> jax.Array:
    """Launch over (problems, strips, tiles in reach); returns (P, n) or (P, n, width)."""
    shape = _shape(pairs)
    rows, columns = _operands(shape, pairs, rows, columns)
    specs = [_row_spec(name, part, shape, pairs.problems) for name, part in rows.items()]
    specs += [_column_spec(name, part, shape, pairs.problems) for name, part in columns.items()]
    padded, scratch = shape.row_tiles * shape.height, (shape.height, width or 1)
    block = (None, shape.height, width) if width else (None, 1, shape.height)
    launch = pl.pallas_call(
        functools.partial(_entry, kernel, shape, tuple(rows), tuple(columns)),
        out_shape=jax.ShapeDtypeStruct((pairs.problems, *((padded, width) if width else (1, padded))), jnp.float32),
        grid=(pairs.problems, shape.row_tiles, shape.reach),
        in_specs=specs,
        out_specs=pl.BlockSpec(block, lambda p, i, *j: (p, i, 0) if width else (p, 0, i)),
        scratch_shapes=[pltpu.VMEM((shape.height, 1), jnp.float32), pltpu.VMEM(scratch, jnp.float32)],
        compiler_params=_compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
    )
    with without_x64():
        result = launch(*rows.values(), *columns.values())
    return result[:, : pairs.rows] if width else result[:, 0, : pairs.rows]


def _entry(kernel, shape, row_names, column_names, *refs):
    split, end = len(row_names), len(row_names) + len(column_names)
    rows, columns = dict(zip(row_names, refs, strict=False)), dict(zip(column_names, refs[split:end], strict=True))
    out, top, total = refs[end:]
    kernel(shape, rows, columns, out, {"top": top, "total": total}, _step(shape, 2))


def _one_pass(shape: _Shape, pairs: Pairs, w, log_target, extra):
    rows = {"target": log_target} if extra is None else {"target": log_target, "extra": extra}
    rows, columns = _operands(shape, pairs, rows, {"w": w})
    specs = [_row_spec(name, part, shape, pairs.problems) for name, part in rows.items()]
    specs += [_column_spec(name, part, shape, pairs.problems) for name, part in columns.items()]
    padded, tile = shape.row_tiles * shape.height, (shape.tiles, 1, shape.width)
    vector, column = pltpu.VMEM((shape.height, 1), jnp.float32), pltpu.VMEM(tile, jnp.float32)
    launch = pl.pallas_call(
        functools.partial(_one_pass_kernel, shape, tuple(rows), tuple(columns)),
        out_shape=[
            jax.ShapeDtypeStruct((pairs.problems, 1, padded), jnp.float32),
            jax.ShapeDtypeStruct((pairs.problems, *tile), jnp.float32),
        ],
        grid=(pairs.problems, shape.row_tiles, 2, shape.reach),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, 1, shape.height), lambda p, i, *_: (p, 0, i)),
            pl.BlockSpec((None, *tile), lambda p, *_: (p, 0, 0, 0)),
        ],
        scratch_shapes=[
            pltpu.VMEM((shape.reach, shape.height, shape.width), jnp.float32), vector, vector, column, column,
        ],
        compiler_params=_compiler_params("parallel", "arbitrary", "arbitrary", "arbitrary"),
        interpret=interpret,
    )  # fmt: skip
    with without_x64():
        u, sums = launch(*rows.values(), *columns.values())
    return u[:, 0, : pairs.rows], sums.reshape(pairs.problems, -1)[:, : pairs.columns]


def _compiler_params(*semantics: str):
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_BYTES)


def _operands(shape: _Shape, pairs: Pairs, rows: dict, columns: dict):
    """Add what every kernel reads, and give everything its blockable shape."""
    rows = {**rows, "features": pairs.x, "scale": pairs.scale}
    columns = {**columns, "features": pairs.y}
    if shape.ids:
        rows, columns = {**rows, "ids": pairs.x_ids}, {**columns, "ids": pairs.y_ids}
    rows = {name: _blockable(name, part, shape.row_tiles * shape.height) for name, part in rows.items()}
    columns = {name: _blockable(name, part, shape.tiles * shape.width) for name, part in columns.items()}
    return rows, columns | _dense(shape, pairs)


def _dense(shape: _Shape, pairs: Pairs):
    """What came as large as the scores are, padded to whole tiles."""
    given = {
        "mask": None if pairs.mask is None else pairs.mask.astype(jnp.int8),
        "bias": None if pairs.bias is None else pairs.bias.astype(jnp.float32),
    }
    missing = shape.row_tiles * shape.height - shape.n, shape.tiles * shape.width - shape.m
    amounts = ((0, 0), *((0, amount) for amount in missing))
    return {name: jnp.pad(part, amounts) for name, part in given.items() if part is not None}


def _blockable(name: str, array: jax.Array, length: int) -> jax.Array:
    """Vectors (P, L) become (P, 1, L), scalars (P, 1, 1); tokens are padded with zeros to whole blocks."""
    if name == "scale":
        return array[:, None, None]
    array = array[:, None, :] if array.ndim == 2 else array
    axis = 1 if name in ("features", "values") else 2
    amounts = [(0, length - array.shape[axis]) if position == axis else (0, 0) for position in range(3)]
    return jnp.pad(array, amounts) if array.shape[axis] < length else array


def _owner(shared: int):
    """Which row of a shared array problem p reads; `//` would lower to a sign that needs the chip's generation."""
    return (lambda p: p) if shared == 1 else (lambda p: lax.div(p, shared))


def _row_spec(name: str, array: jax.Array, shape: _Shape, problems: int):
    own = _owner(problems // array.shape[0])
    if name == "scale":
        return pl.BlockSpec((None, 1, 1), lambda p, *_: (own(p), 0, 0))
    if name in ("features", "values"):
        return pl.BlockSpec((None, shape.height, array.shape[2]), lambda p, i, *_: (own(p), i, 0))
    return pl.BlockSpec((None, array.shape[1], shape.height), lambda p, i, *_: (own(p), 0, i))


def _column_spec(name: str, array: jax.Array, shape: _Shape, problems: int):
    """The last grid axis counts tiles. In the second phase of a full step the block stays, and is not read again."""
    own = _owner(problems // array.shape[0])

    def tile(i, steps):
        j = steps[-1] if len(steps) == 1 else jnp.where(steps[0] == 0, steps[-1], shape.reach - 1)
        return jnp.clip(shape.tile(i, j), 0, shape.tiles - 1)

    if name in ("features", "values"):
        return pl.BlockSpec((None, shape.width, array.shape[2]), lambda p, i, *j: (own(p), tile(i, j), 0))
    if name in ("mask", "bias"):
        return pl.BlockSpec((None, shape.height, shape.width), lambda p, i, *j: (own(p), i, tile(i, j)))
    return pl.BlockSpec((None, array.shape[1], shape.width), lambda p, i, *j: (own(p), 0, tile(i, j)))
