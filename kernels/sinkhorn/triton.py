"""Triton on CUDA: the whole loop stays on the card, and no problem waits for the host between iterations.

Points with few coordinates go through direct differences, others through the matrix units in split float16 (see
``triton_kernels.py``); matrices are read as they lie. Potentials live in base 2 with everything that depends on one side
alone folded in, u_i = (f_i − |x_i|²) log₂e/ε for points, so that the inner loop is a product, an addition and a 2^t.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import blocks
from .launch import launch_shape, processors, splits_for
from .operator import Cost, Operator, Weighted

LOG2E = math.log2(math.e)
LN2 = math.log(2)
PAD = 256  # rows of prepared arrays come in multiples of this, so that no load inside a loop needs a mask
FMA_DIMENSIONS = 8
CHUNK = 128  # coordinates held at once by the matrix units' path
# The tile that a program keeps in registers, (rows, columns), and how many of them a multiprocessor holds.
TILE, TILE_WARPS, TILE_REGISTERS, TILES_RESIDENT = (64, 128), 4, 128, 4
LARGEST = 2.0**14  # a scaled coordinate, of 65504 that float16 can hold


def applies(request: Any) -> str | None:
    """Serve float32 and narrower points and matrices."""
    if request.dtype == torch.float64:
        return "it computes in float32, and the cost is float64"
    return None


def operator(cost: Cost, epsilon: Tensor, precision: str = "high") -> Fused:
    """Prepare a batch of costs on their card."""
    with torch.cuda.device(cost.first.device) if cost.first.is_cuda else _nowhere():
        return Fused(cost, epsilon, precision)


class _nowhere:  # noqa: N801 - a context that does nothing, for the interpreter
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Side(NamedTuple):
    """The rows or the columns of a batch, as the kernels read them."""

    first: Tensor  # hi, coordinates, or the matrix
    second: Tensor  # lo, or the same again
    half_norm: Tensor | None  # (B, padded): |x'|²/2
    count: int
    padded: int
    stride_batch: int
    stride: int  # of a row in a matrix


class Fused(Operator):
    """Costs prepared for the kernels: rows, columns, and the slope that makes a base-2 score of a product."""

    def __init__(self, cost: Cost, epsilon: Tensor, precision: str = "high", sides: Any = None):
        super().__init__(cost, epsilon)
        self.precision = precision
        self.rows_side, self.columns_side, self.slope = sides or _sides(cost, self.exact_epsilon)
        self.unit = (self.exact_epsilon * LN2).to(self.dtype)[:, None]
        dimension = 0 if cost.x is None else cost.x.shape[-1]
        self.kind = 2 if cost.x is None else 1 if dimension <= FMA_DIMENSIONS else 0
        self.dimension = dimension if self.kind == 1 else self.rows_side.first.shape[-1] if self.kind == 0 else 1
        chunk = min(CHUNK if self.dimension <= CHUNK else 64, self.dimension)
        products = 1 if precision == "fast" else 3
        self.constants = {"KIND": self.kind, "D": self.dimension, "CHUNK": chunk, "PRODUCTS": products}
        self._streamed: blocks.Blocks | None = None

    @property
    def T(self) -> Fused:  # noqa: N802
        """The operator that works along columns, sharing what was prepared."""
        sides = (self.columns_side, self.rows_side, self.slope)
        return Fused(self.cost.T, self.exact_epsilon, self.precision, sides)

    def select(self, index: Tensor) -> Fused:
        """The operator of some problems of the batch."""
        return Fused(self.cost.select(index), self.exact_epsilon[index], self.precision)

    def softmin(self, h: Tensor) -> Tensor:
        """−ε log Σ_j exp(h_j − C_ij/ε), one pass."""
        run = _Run(self)
        run.set_column_bias(h * LOG2E)
        run.rows(first=True)
        return run.row_potential()

    def iterate(
        self, a: Tensor, b: Tensor, f: Tensor, max_iterations: int, tolerance: float, check_every: int, norm: str
    ) -> tuple[Tensor, ...]:
        """Alternate until every problem's error is below the tolerance, looking at it on the card."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else _nowhere():
            run = _Run(self, a, b)
            run.start(torch.where(a > 0, f, 0.0))
            if fits_registers(self):
                run.resident(max_iterations, tolerance, check_every, norm)
                return run.result(tolerance)
            run.columns(0)
            for iteration in range(1, max_iterations + 1):
                run.rows(first=iteration == 1)
                run.columns(iteration)
                if (iteration - 1) % check_every == 0 or iteration == max_iterations:
                    run.check(iteration, tolerance, norm)
                    if tolerance > 0 and run.all_done():
                        break
            return run.result(tolerance)

    @property
    def streamed(self) -> blocks.Blocks:
        """The same costs for what has no kernel of its own."""
        if self._streamed is None:
            self._streamed = blocks.operator(self.cost, self.exact_epsilon)
        return self._streamed

    def apply(self, s: Tensor, t: Tensor, values: Tensor) -> Tensor:
        """P V."""
        return self.streamed.apply(s, t, values)

    def cost_apply(self, s: Tensor, t: Tensor, power: int = 1) -> Tensor:
        """Row sums of P∘C or P∘C²."""
        return self.streamed.cost_apply(s, t, power)

    def weighted(self, s, t, alpha=None, gamma=0.0, u=None, v=None) -> Weighted:  # type: ignore[no-untyped-def]
        """Reductions of W_ij = P_ij (α_i + γ C_ij + u_i·v_j)."""
        return self.streamed.weighted(s, t, alpha, gamma, u, v)


def fits_registers(op: Fused) -> bool:
    """Whether every tile of the batch can lie in some multiprocessor's registers at the same time."""
    tiles = op.batch * math.prod(-(-count // size) for count, size in zip((op.rows, op.columns), TILE, strict=True))
    if op.device.type != "cuda":
        return tiles == op.batch  # the interpreter runs one program after another: they cannot meet
    return tiles <= processors(op.device) * TILES_RESIDENT


class _Run:
    """One loop's state on the card: base-2 potentials, biases, partial sums and flags."""

    def __init__(self, op: Fused, a: Tensor | None = None, b: Tensor | None = None):
        self.op, self.a, self.b = op, a, b
        rows, columns, batch = op.rows_side, op.columns_side, op.batch
        new = lambda *shape, fill=0.0: torch.full(shape, fill, device=op.device, dtype=torch.float32)  # noqa: E731
        self.u, self.row_ratio = torch.empty(2, batch, rows.padded, device=op.device)
        self.row_bias, self.column_bias = new(batch, rows.padded, fill=-math.inf), new(batch, columns.padded, fill=-math.inf)
        self.log_a = _padded(a, rows, self.row_bias)
        self.active = torch.ones(batch, device=op.device, dtype=torch.int32)
        self.row_launch = _launch(op, rows, columns)
        if b is None:
            return
        self.log_b = _padded(b, columns, self.column_bias)
        self.v = torch.empty(2, batch, columns.padded, device=op.device)
        self.ratio = torch.empty(batch, columns.padded, device=op.device)
        self.column_launch = _launch(op.T, columns, rows)
        self.iterations = torch.zeros(batch, device=op.device, dtype=torch.int32)
        self.error = torch.empty(batch, device=op.device)
        self.last: Tensor | None = None

    def set_column_bias(self, h: Tensor) -> None:
        """Fold the columns' own terms into a base-2 h."""
        side = self.op.columns_side
        inner = self.column_bias[:, : side.count]
        inner.copy_(h if side.half_norm is None else h - side.half_norm[:, : side.count])

    def start(self, f: Tensor) -> None:
        """Set out from the row potentials f."""
        side = self.op.rows_side
        u = f / self.op.unit
        if side.half_norm is not None:
            u = u - side.half_norm[:, : side.count]
        self.row_bias[:, : side.count] = torch.where(self.a > 0, u + self.log_a[:, : side.count], -math.inf)

    def rows(self, first: bool) -> None:
        """Update the row potentials."""
        self.row_launch(self.column_bias, self.u, self.log_a, self.u, self.row_bias, self.row_ratio, self.active, first)

    def columns(self, iteration: int) -> None:
        """Update the column potentials into the other buffer, so that a problem that stops keeps those of its plan."""
        before, after = self.v[iteration % 2], self.v[(iteration + 1) % 2]
        first = iteration == 0
        self.column_launch(self.row_bias, before, self.log_b, after, self.column_bias, self.ratio, self.active, first)

    def resident(self, max_iterations: int, tolerance: float, check_every: int, norm: str) -> None:
        """Run the whole loop in one launch. The column potentials end in both buffers' place of the last iteration."""
        from .triton_kernels import resident

        op, rows, columns = self.op, self.op.rows_side, self.op.columns_side
        tiles_q, tiles_k = (-(-side.count // size) for side, size in ((rows, TILE[0]), (columns, TILE[1])))
        new = lambda *shape: torch.empty(shape, device=op.device)  # noqa: E731
        parts = new(op.batch, tiles_k, 2, rows.padded), new(op.batch, tiles_q, 2, columns.padded), new(op.batch, tiles_k)
        counters = torch.zeros(op.batch, device=op.device, dtype=torch.int32)
        together = {"launch_cooperative_grid": True} if op.device.type == "cuda" else {}
        resident[(op.batch * tiles_q * tiles_k,)](
            rows.first, rows.second, columns.first, columns.second, self.row_bias, self.log_a, self.log_b, self.b, self.u,
            self.v[0], self.iterations, self.error, *parts, counters, op.slope, rows.count, columns.count, tiles_q, tiles_k,
            max_iterations, check_every, tolerance, rows.padded, columns.padded, rows.stride_batch, columns.stride_batch,
            rows.stride, columns.stride, SQUARED=norm == "l2", BLOCK_M=TILE[0], BLOCK_N=TILE[1], num_warps=TILE_WARPS,
            num_stages=2, maxnreg=TILE_REGISTERS, **op.constants, **together,
        )  # fmt: skip
        self.last = self.v[0]

    def check(self, iteration: int, tolerance: float, norm: str) -> None:
        """Look at the marginal error on the card."""
        from .triton_kernels import check

        pad, m = self.op.columns_side.padded, self.op.columns_side.count
        check[(self.op.batch,)](
            self.ratio, self.b, self.active, self.iterations, self.error, iteration, tolerance, m, pad,
            SQUARED=norm == "l2", BLOCK=1024,
        )  # fmt: skip

    def all_done(self) -> bool:
        """Whether every problem has left the loop."""
        return not bool(self.active.any())

    def row_potential(self) -> Tensor:
        """f, in the unit of the cost."""
        return self._potential(self.u, self.op.rows_side)

    def _potential(self, u: Tensor, side: Side) -> Tensor:
        inner = u[:, : side.count]
        return (inner if side.half_norm is None else inner + side.half_norm[:, : side.count]) * self.op.unit

    def result(self, tolerance: float) -> tuple[Tensor, ...]:
        """Potentials, iterations, error and whether it is below the tolerance."""
        v = self.last
        if v is None:
            v = torch.where((self.iterations % 2 == 1)[:, None], self.v[1], self.v[0])
        g = self._potential(v, self.op.columns_side)
        return self.row_potential(), g, self.iterations.long(), self.error, self.error < tolerance


def _padded(weight: Tensor | None, side: Side, like: Tensor) -> Tensor:
    """log₂ of the weights, −∞ without mass and beyond the last; zeros where there are no weights."""
    if weight is None:
        return torch.zeros_like(like)
    out = torch.full_like(like, -math.inf)
    torch.log2(weight, out=out[:, : side.count])
    return out


def _launch(op: Fused, rows: Side, columns: Side) -> Any:
    """Bind everything about an update that stays the same; the rest is given call by call."""
    from .triton_kernels import update

    shape = launch_shape(op.kind, op.dimension, op.batch, rows.count, columns.count, op.device)
    blocks_of_rows = -(-rows.count // shape.rows)
    splits, tiles_each = splits_for(shape, blocks_of_rows * op.batch, columns.padded, op.device)
    parts = torch.empty(op.batch * blocks_of_rows * splits * 2 * shape.rows, device=op.device)
    counters = torch.zeros(op.batch * blocks_of_rows, device=op.device, dtype=torch.int32)
    launcher = update[(blocks_of_rows * splits, op.batch)]

    def run(bias, u_in, log_weight, u_out, bias_out, ratio, active, first) -> None:  # type: ignore[no-untyped-def]
        launcher(
            rows.first, rows.second, columns.first, columns.second, bias, u_in, log_weight, u_out, bias_out, ratio, parts,
            counters, active, op.slope, rows.count, columns.count, splits, tiles_each, rows.padded, columns.padded, rows.stride_batch,
            columns.stride_batch, rows.stride, columns.stride,
            BLOCK_M=shape.rows, BLOCK_N=shape.columns, FIRST=first, num_warps=shape.warps, num_stages=shape.stages,
            **op.constants,
        )  # fmt: skip

    return run


def _sides(cost: Cost, epsilon: Tensor) -> tuple[Side, Side, Tensor]:
    if cost.matrix is not None:
        return _matrix_sides(cost.matrix, epsilon)
    assert cost.x is not None and cost.y is not None
    centre, extent = _centre_and_extent(cost.x, cost.y)
    if cost.x.shape[-1] <= FMA_DIMENSIONS:
        scale = (LOG2E / epsilon).sqrt()
        slope = torch.ones_like(epsilon)
        prepare = _prepare_fma
    else:
        scale = (2 * LOG2E / epsilon).sqrt()
        shrink = torch.exp2((extent.double() * scale / LARGEST).log2().ceil().clamp(min=0))
        scale, slope = scale / shrink, shrink**2
        prepare = _prepare_dot
    factors = torch.stack([scale, slope], -1).float()
    x, y = (prepare(points, centre, factors) for points in (cost.x, cost.y))
    return x, y, slope.float()


def _centre_and_extent(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The midpoint of the two means (B, d), and the largest distance from it along an axis (B,)."""
    centre = (0.5 * (x.mean(1, dtype=torch.float64) + y.mean(1, dtype=torch.float64))).float()
    extent = centre.new_zeros(centre.shape[0])
    for points in (x, y):
        low, high = torch.aminmax(points, dim=1)
        extent = torch.maximum(extent, torch.maximum((high - centre), (centre - low)).amax(-1))
    return centre.contiguous(), extent


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _prepare_dot(points: Tensor, centre: Tensor, factors: Tensor) -> Side:
    from .triton_kernels import prepare_dot

    batch, n, d = points.shape
    padded, width = _round_up(n, PAD), max(16, 1 << (d - 1).bit_length()) if d <= CHUNK else _round_up(d, 64)
    high = torch.empty(batch, padded, width, dtype=torch.float16, device=points.device)
    low, half_norm = torch.empty_like(high), torch.empty(batch, padded, device=points.device)
    prepare_dot[(padded // 32, batch)](
        points, centre, factors, high, low, half_norm, n, padded, d, *points.stride(),
        D=width, CHUNK=min(width, 64), BLOCK=32,
    )  # fmt: skip
    return Side(high, low, half_norm, n, padded, padded * width, 0)


def _prepare_fma(points: Tensor, centre: Tensor, factors: Tensor) -> Side:
    from .triton_kernels import prepare_fma

    batch, n, d = points.shape
    padded = _round_up(n, PAD)
    out = torch.empty(batch, d, padded, device=points.device)
    prepare_fma[(padded // PAD, batch)](points, centre, factors, out, n, padded, d, *points.stride(), BLOCK=PAD)
    return Side(out, out, None, n, padded, d * padded, 0)


def _matrix_sides(matrix: Tensor, epsilon: Tensor) -> tuple[Side, Side, Tensor]:
    batch, n, m = matrix.shape
    stride_batch, *strides = matrix.stride()
    rows, columns = (
        Side(matrix, matrix, None, count, _round_up(count, PAD), stride_batch, stride)
        for count, stride in zip((n, m), strides, strict=True)
    )
    return rows, columns, (-LOG2E / epsilon).float()
