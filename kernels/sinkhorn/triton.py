"""Triton on CUDA: the whole loop stays on the card, and no iteration waits for the host.

Points with few coordinates go through direct differences, others through the matrix units in split float16 (see
``triton_kernels.py``); matrices are read as they lie. Potentials live in base 2 with everything that depends on one
side alone folded in, u_i = (f_i − |x_i|²) log₂e/ε for points, so that the inner loop is a product, an addition and a
2^t.

Problems whose scores fit into the card's registers are solved in one launch; others take two launches an iteration.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import blocks
from .launch import (
    INTERPRETED,
    Launch,
    Shape,
    compile_once,
    launch,
    launch_shape,
    processors,
    splits_for,
)  # fmt: skip
from .operator import Cost, Operator, Rule, Sweep, Weighted

if TYPE_CHECKING:
    from .triton_loop import InTurn, Vectors

LOG2E = math.log2(math.e)
PAD = 512  # rows of prepared arrays come in multiples of this, so that no load inside a loop needs a mask
FMA_DIMENSIONS = 8
CHUNK = 128  # coordinates held at once by the matrix units' path
DOT, FMA, MATRIX = 0, 1, 2
BLOCK = PAD  # rows of one program in kernels that only touch vectors


class Tile(NamedTuple):
    """The scores that one program keeps in registers, and how many such programs a multiprocessor holds."""

    rows: int
    columns: int
    warps: int
    resident: int


# For few, some and many tiles: small ones share the work, large ones leave less to exchange.
TILES = (Tile(64, 64, 4, 4), Tile(32, 128, 4, 4), Tile(128, 64, 4, 4))
REGISTERS = 128  # a thread may use where as many programs as promised above must be resident
FEW_TILES, MOST_TILES = 8, 32  # along one side of a problem
HIGHEST_POWER = 2  # of the cost that the kernel of products knows
WIDEST = 64  # columns of a product that one program takes
NARROW = 4  # columns of a product that are added up one by one
PRODUCT_SHAPES = {  # by what gives the scores, and whether the matrix units take the values
    (DOT, True): Shape(64, 64, 4, 2, 2), (DOT, False): Shape(64, 64, 4, 2, 3),
    (FMA, True): Shape(64, 32, 8, 2, 1), (FMA, False): Shape(64, 32, 4, 1, 3),
    (MATRIX, True): Shape(64, 32, 8, 2, 1), (MATRIX, False): Shape(16, 128, 4, 1, 3),
}  # fmt: skip
POWERED = Shape(32, 64, 4, 1, 3)  # of narrow products with a power of the cost, where the units do not give the scores
HALF_RANGE = 16384.0  # what float16 parts are scaled to, exponentials and values
MOST_PRODUCTS = 4  # with the plan, before torch's blocks do as well
PER_PROBLEM = (torch.int64, torch.float32, torch.bool)  # iterations, error, converged
PRODUCT_OPTIONS = (("num_warps", 4), ("num_stages", 1))


def applies(request: Any) -> str | None:
    """Serve float32 and narrower points and matrices, where Triton can build its launchers."""
    if request.dtype == torch.float64:
        return "it computes in float32, and the cost is float64"
    if request.kind == "points" and request.width == 0:
        return "the points have no coordinates"
    if request.kind == "points" and request.metric != "sqeuclidean":
        return f"it has no kernel for the metric {request.metric!r}"
    return None if INTERPRETED else _no_compiler()


@functools.cache
def _no_compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    if any(name and shutil.which(name) for name in names):
        return None
    return "Triton needs a C compiler to build its launchers, and none of cc, gcc and clang is on the PATH"


def operator(cost: Cost, epsilon: Tensor, precision: str = "high") -> Fused:
    """Prepare a batch of costs on their card."""
    with on(cost.first.device):
        if not INTERPRETED:
            _get_ready(cost, epsilon, precision)
        return Fused(cost, epsilon, precision)


_ready: set[Any] = set()


def _get_ready(cost: Cost, epsilon: Tensor, precision: str) -> None:
    """Before the first problem of a kind, compile every kernel that it will take, side by side."""
    batch, n, m = cost.size

    def work() -> None:
        op = Fused(cost, epsilon, precision)
        a, b = torch.ones(batch, n, device=op.device), torch.ones(batch, m, device=op.device)
        op.iterate(a, b, torch.zeros_like(a), 2, 0.0, 1, "l1", 1.0, lambda seen: None)

    _compile_first(cost, precision, (), work)


def _compile_first(cost: Cost, precision: str, what: tuple[Any, ...], work: Callable[[], Any]) -> None:
    """Compile the kernels of some work on a kind of problem together, unless that was done before."""
    batch, n, m = cost.size
    width = 0 if cost.x is None else cost.x.shape[-1]
    large = batch * n * m > 1 << 22
    held = width if width <= FMA_DIMENSIONS else min(padded_width(width), 2 * CHUNK)
    key = (torch.cuda.current_device(), cost.first.dtype, held, precision, large, *what)
    compile_once(_ready, key, work)


def on(device: torch.device) -> Any:
    """Make the device the current one; nothing to do for the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Side(NamedTuple):
    """The rows or the columns of a batch, as the kernels read them."""

    first: Tensor  # hi, coordinates, or the matrix
    second: Tensor  # lo, or the same again
    half_norm: Tensor  # (B, padded): |x'|²/2, or anything where there is no such thing
    length: int
    blocks: int  # of PAD rows
    stride: int  # of a row in a matrix


class Prepared(NamedTuple):
    """Both sides of a batch; score = slope · product."""

    kind: int
    width: int  # coordinates, padded for the matrix units
    rows: Side
    columns: Side
    slopes: Tensor
    flags: Tensor | None  # int32: bad coordinates of x, of y
    scratch: Tensor | None  # flags among others, zero at the start
    batch_stride: int
    variant: Any
    launches: tuple[Launch, ...] = ()  # that prepared them


class Fused(Operator):
    """Costs prepared for the kernels, to be used on one stream at a time."""

    whole_loop = True

    def __init__(self, cost: Cost, epsilon: Tensor, precision: str = "high", prepared: Prepared | None = None):
        super().__init__(cost, epsilon)
        self.precision = precision
        self._prepared = prepared
        self._turned: Fused | None = None
        self._kept_alone: tuple[Update, Tensor, Tensor] | None = None
        self._streamed: blocks.Blocks | None = None
        self._halved: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None = None  # values last seen, and their parts

    @property
    def prepared(self) -> Prepared:
        """Both sides as the kernels read them; made when they are asked for."""
        if self._prepared is None:
            with on(self.device):
                self._prepared = prepare(self.cost, self.exact_epsilon)
        return self._prepared

    @functools.cached_property
    def unit(self) -> Tensor:
        """What a potential in base 2 is multiplied by, (B, 1), float64: see `triton_kernels.bits_per_unit`."""
        if self.prepared.kind == MATRIX:
            return -1 / self.prepared.slopes.double()[:, None]
        return (self.exact_epsilon / LOG2E)[:, None]

    @property
    def T(self) -> Fused:  # noqa: N802
        """The operator that works along columns, sharing what was prepared."""
        if self._turned is None:
            sides = self.prepared._replace(rows=self.prepared.columns, columns=self.prepared.rows)
            self._turned = Fused(self.cost.T, self.exact_epsilon, self.precision, sides)
        return self._turned

    def select(self, index: Tensor) -> Fused:
        """The operator of some problems of the batch."""
        return Fused(self.cost.select(index), self.exact_epsilon[index], self.precision)

    def at(self, epsilon: Tensor) -> Fused:
        """The same costs under another ε."""
        return Fused(self.cost, epsilon, self.precision)

    def softmin(self, h: Tensor) -> Tensor:
        """−ε log Σ_j exp(h_j − C_ij/ε), one pass."""
        with on(self.device):
            return self._updated(self._laid(h, None)[0])

    def sweep(self, log_a: Tensor, log_b: Tensor, g: Tensor, f: Tensor, rule: Rule | None = None) -> Sweep:
        """See `Operator.sweep`; where loops look at errors on the card, nobody asks for the ratio here."""
        with on(self.device):
            softmin = self._updated(self._laid_dual(log_b, g))
            f = softmin if rule is None else rule.follow(f, softmin, self.epsilon)
            after = self.T._updated(self.T._laid_dual(log_a, f))
        after = torch.where(log_b == -math.inf, g, after)
        ratio = None if self.whole_loop else torch.exp((g - after) / self.epsilon[:, None])
        return Sweep(f, after, ratio, softmin)

    def _updated(self, bias: Tensor) -> Tensor:
        """The softmin of a bias that is laid."""
        update, none, binding = self._alone
        rows = self.prepared.rows
        u, rest = self.new(2, self.batch, rows.blocks * PAD).unbind()
        update.bind(bias, u, rest, u, rest, rest, none, rest, none, binding)()
        inner = u[:, : rows.length]
        inner = inner + rows.half_norm[:, : rows.length] if self.prepared.kind == DOT else inner
        return torch.mul(inner, self.unit, out=self.new(*inner.shape))  # in float64, rounded once

    def _laid_dual(self, log_weight: Tensor, potential: Tensor) -> Tensor:
        """The bias of log b + g/ε."""
        from .triton_pull_kernels import lay_dual

        columns, epsilon = self.prepared.columns, self.exact_epsilon
        bias = self.new(self.batch, columns.blocks * PAD)
        given = log_weight.contiguous(), potential.contiguous()
        args = (*given, epsilon, columns.half_norm, bias, columns.blocks, columns.length, epsilon.stride(0))
        variant = tuple(part.data_ptr() % 16 for part in (*given, epsilon))
        constants = (self.prepared.kind, BLOCK)
        launch(lay_dual, columns.blocks * self.batch, args, constants, (("num_warps", 4),), variant)
        return bias

    @property
    def _alone(self) -> tuple[Update, Tensor, Tensor]:
        """What an update outside of a loop takes: it is never done, and marginals are binding."""
        found = self._kept_alone
        if found is None:
            found = Update(self), self.zeros(self.batch), self.new(self.batch, 8).zero_()
            if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._kept_alone = found  # of a captured graph it would be zero only after a replay
        return found

    def iterate(
        self, a: Tensor, b: Tensor, f: Tensor, max_iterations: int, tolerance: float, check_every: int, norm: str,
        gap: float, inspect: Callable[[dict[str, float]], None], reach: Tensor | None = None,
        offsets: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Alternate until every problem's error is below the tolerance, looking at it on the card.

        ``offsets``, beside a reach: the terms of the cost that depend on its row (B, n) or its column (B, m) alone.
        """
        from . import triton_loop

        control = triton_loop.Control(max_iterations, tolerance, check_every, int(norm == "l2"), gap)
        if self.batch == 0:
            nothing = (a.new_empty(0, dtype=kind) for kind in PER_PROBLEM)
            return a.new_empty(a.shape), b.new_empty(b.shape), *nothing, *a.new_empty(2, 0, control.looks)
        with on(self.device):
            run = functools.partial(triton_loop.solve, a=a, b=b, f=f, reach=reach, offsets=offsets)
            if reach is not None and not INTERPRETED:
                what, fresh = ("missed", offsets is None, check_every == 1 and gap < 1), self.at(self.exact_epsilon)
                short = control._replace(max_iterations=2, tolerance=0.0)
                work = functools.partial(run, fresh, control=short, inspect=lambda seen: None)
                _compile_first(self.cost, self.precision, what, work)
            return run(self, control=control, inspect=inspect)

    def anneal(
        self, a: Tensor, b: Tensor, f: Tensor, stages: int, factor: float, iterations: int, gap: float,
        reach: Tensor | None = None, offsets: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `Operator.anneal`; the host does not wait for the card."""
        from .triton_stages import Schedule, Stages

        schedule = Schedule(stages, factor, iterations, gap)
        with on(self.device):
            if not INTERPRETED:
                what = ("stages", reach is None, offsets is None)
                given = (a, b, f, schedule._replace(stages=1), reach, offsets)
                _compile_first(self.cost, self.precision, what, lambda: Stages(self, *given).run())
            return Stages(self, a, b, f, schedule, reach, offsets).run()

    def new(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor."""
        return torch.empty(shape, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Zeroed int32."""
        return torch.zeros(shape, device=self.device, dtype=torch.int32)

    @property
    def streamed(self) -> blocks.Blocks:
        """The same costs for what has no kernel of its own."""
        if self._streamed is None:
            self._streamed = blocks.operator(self.cost, self.exact_epsilon)
        return self._streamed

    def pulls(self, need_cost: bool) -> Any:
        """See `Operator.pulls`."""
        from .triton_pull import Pulls

        def work() -> None:
            pulls = Pulls(self.at(self.exact_epsilon), need_cost)  # nothing is prepared while launches are recorded
            rows, columns = (torch.zeros(self.batch, count, device=self.device) for count in (self.rows, self.columns))
            pulls.pull(False, columns, columns, rows, rows)
            pulls.pull(True, rows, rows, columns, columns)
            if need_cost:
                pulls.cost()

        if self.batch == 0:
            return None
        with on(self.device):
            if not INTERPRETED:
                _compile_first(self.cost, self.precision, ("pulls", need_cost), work)
            return Pulls(self, need_cost)

    def cost_product(self, values: Tensor) -> Tensor:
        """C V."""
        return self.streamed.cost_product(values)

    def apply(self, s: Tensor, t: Tensor, values: Tensor) -> Tensor:
        """P V."""
        if values.shape[-1] == 1:
            return self._product(s, t, None, values[:, :, 0])[1][:, :, None]
        products = self._product(s, t, values)[0]
        assert products is not None
        return products

    def moment(self, s: Tensor, t: Tensor, values: Tensor, power: int) -> Tensor:
        """(P∘C^power) V."""
        if power > HIGHEST_POWER:
            return self.streamed.moment(s, t, values, power)
        products = self._product(s, t, values, None, power)[0]
        assert products is not None
        return products

    def largest(self, t: Tensor, count: int) -> Tensor:
        """The columns with the largest t_j − C_ij/ε in each row, streamed by torch."""
        return self.streamed.largest(t, count)

    def cost_apply(self, s: Tensor, t: Tensor, power: int = 1) -> Tensor:
        """Row sums of P∘C or P∘C²."""
        return self._product(s, t, None, power=power)[1]

    def weighted(self, s, t, alpha=None, gamma=0.0, u=None, v=None) -> Weighted:  # type: ignore[no-untyped-def]
        """Reductions of W_ij = P_ij (α_i + γ C_ij + u_i·v_j).

        For points Σ_j W_ij ∂C_ij/∂x_i = 2 (x_i Σ_j W_ij − Σ_j W_ij y_j): products of the plan with the other side's
        points, one way and the other. The gradient by a matrix is a matrix, and is streamed by torch.
        """
        if self.cost.matrix is not None or (u is not None and u.shape[-1] > MOST_PRODUCTS):
            return self.streamed.weighted(s, t, alpha, gamma, u, v)
        x, y = self.streamed.x, self.streamed.y  # type: ignore[attr-defined]
        means_y, rows = self._weighted_rows(s, t, y, alpha, None, gamma, u, v)
        means_x, columns = self.T._weighted_rows(t, s, x, None, alpha, gamma, v, u)
        by_x, by_y = 2 * (x * rows[:, :, None] - means_y), 2 * (y * columns[:, :, None] - means_x)
        return Weighted((by_x, by_y), rows, columns)

    def _weighted_rows(self, s, t, y, alpha, beta, gamma, u, v):  # type: ignore[no-untyped-def]
        """Σ_j P_ij (α_i + β_j + γ C_ij + u_i·v_j) (y_j, 1)."""
        terms: list[tuple[Any, Any, int]] = [(alpha, None, 0)] if alpha is not None else []
        terms += [(None, beta, 0)] if beta is not None else []
        terms += [(gamma, None, 1)] if gamma else []
        terms += [(u[:, :, k], v[:, :, k], 0) for k in range(0 if u is None else u.shape[-1])]
        means, totals = torch.zeros(self.batch, self.rows, y.shape[-1], device=self.device), 0.0
        for factor, weights, power in terms:
            products, sums = self._product(s, t, y, weights, power)
            if isinstance(factor, Tensor):
                products, sums = products * factor[:, :, None], sums * factor
            elif factor is not None:
                products, sums = products * factor, sums * factor
            means, totals = means + products, totals + sums
        return means, totals

    def _product(
        self, s: Tensor, t: Tensor, values: Tensor | None, weights: Tensor | None = None, power: int = 0
    ) -> tuple[Any, Tensor]:
        """Σ_j P_ij C_ij^power w_j V_j (None without values), and the same with 1 for V_j, streamed."""
        from .triton_kernels import join

        rows, epsilon, kind = self.prepared.rows, self.exact_epsilon, self.prepared.kind
        with on(self.device):
            top, total, out, largest = self._parts_of_product(t, values, weights, power)
            width = out.shape[-1]
            sums, result = self.new(self.batch, rows.length), self.new(self.batch, rows.length, width)
            across = min(WIDEST, max(1, 1 << (width - 1).bit_length())) if width else 1
            programs = -(-rows.length // 32) * max(1, -(-width // across))
            args = (
                top, total, out, s, rows.half_norm, epsilon, top if largest is None else largest, sums, result,
                programs, len(top), self.batch, rows.length, width, rows.blocks, *s.stride(), epsilon.stride(0),
            )  # fmt: skip
            constants = (kind, power, 1 if largest is None else HALF_RANGE, 32, across)
            variant = tuple(part.data_ptr() % 16 for part in (s, epsilon, total, result, sums))
            launch(join, programs * self.batch, args, constants, PRODUCT_OPTIONS, variant)
            return (None if values is None else result), sums

    def _parts_of_product(
        self, t: Tensor, values: Tensor | None, weights: Tensor | None, power: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """By parts of the columns, around the maxima ``top`` (parts, B, n): sums (parts, B, n), products with V.

        Last, by problem, what products are to be multiplied by, and divided by the square of HALF_RANGE, if they are.
        """
        from .triton_kernels import product

        prepared = self.prepared
        rows, columns = prepared.rows, prepared.columns
        bias, padded = self._laid(t, weights)
        if values is not None and weights is not None:
            values = values * weights[:, :, None]
        width = 0 if values is None else values.shape[-1]
        across = width if width <= NARROW else min(WIDEST, max(16, 1 << (width - 1).bit_length()))
        first, second, largest = bias, bias, None
        if values is not None:
            first, second, largest = self._values(values.float(), across > NARROW and power == 0)
        shape = PRODUCT_SHAPES[prepared.kind, across > NARROW]
        if power and across <= NARROW and prepared.kind != DOT:
            shape = POWERED
        blocks_of_rows, slices = -(-rows.length // shape.rows), -(-width // across) if width else 1
        splits, tiles = splits_for(shape, blocks_of_rows * slices * self.batch, columns.length, self.device)
        top, total = self.new(2, splits, self.batch, rows.length)
        out = self.new(splits, self.batch, rows.length, width)
        programs = blocks_of_rows * slices * splits
        args = (
            rows.first, rows.second, columns.first, columns.second, bias, rows.half_norm, columns.half_norm, first,
            second, padded, top, total, out, prepared.slopes, programs, splits, tiles, self.batch, rows.length,
            columns.length, width, rows.blocks, columns.blocks, columns.length * width, prepared.width // 64,
            prepared.batch_stride, *strides(prepared),
        )  # fmt: skip
        variant = (prepared.variant, *(part.data_ptr() % 16 for part in (total, first)))
        constants = (*self.constants, shape.rows, shape.columns, across, shape.stages, power)
        options = (("num_warps", shape.warps), ("num_stages", shape.stages))
        launch(product, programs * self.batch, args, constants, options, variant)
        return top, total, out, largest

    def _laid(self, t: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Biases and weights of the columns, padded."""
        from .triton_kernels import lay

        columns, epsilon = self.prepared.columns, self.exact_epsilon
        bias, padded = self.new(2, self.batch, columns.blocks * PAD).unbind()
        given = t if weights is None else weights
        args = (
            t, given, columns.half_norm, epsilon, bias, padded, columns.blocks, columns.length, columns.blocks,
            *t.stride(), *given.stride(), epsilon.stride(0),
        )  # fmt: skip
        constants = (self.prepared.kind, weights is not None, BLOCK)
        variant = tuple(part.data_ptr() % 16 for part in (t, given, epsilon))
        launch(lay, columns.blocks * self.batch, args, constants, (("num_warps", 4),), variant)
        return bias, padded

    def _values(self, values: Tensor, in_halves: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values as the kernel takes them: float32, or two float16 parts, high + low = value · HALF_RANGE / largest."""
        from .triton_kernels import halve

        values = values.contiguous()
        if not in_halves:
            return values, values, None
        if self._halved is None or self._halved[0] is not values:
            largest = values.abs().amax((1, 2))
            high, low = torch.empty((2, *values.shape), dtype=torch.float16, device=self.device).unbind()
            count = values[0].numel()
            programs = -(-count // 1024)
            args = (values, largest, high, low, programs, count)
            variant = (values.data_ptr() % 16, low.data_ptr() % 16)
            launch(halve, programs * self.batch, args, (HALF_RANGE, 1024), (("num_warps", 4),), variant)
            self._halved = values, (high, low, largest)
        return self._halved[1]

    @property
    def constants(self) -> tuple[int, ...]:
        """KIND, D (0 where the width is only known at run time), CHUNK, PRODUCTS, UNIT and ALIGN of the kernels."""
        prepared, width = self.prepared, self.prepared.width
        held, chunk = (width, width) if width <= CHUNK else (0, 64)
        return (prepared.kind, held, chunk, 1 if self.precision == "fast" else 3, *alignment(prepared))


def alignment(prepared: Prepared) -> tuple[int, int]:
    """Which stride of a matrix is 1 (UNIT: 1 rows, 2 columns, 0 none), and what the other is counted in (ALIGN)."""
    if prepared.kind != MATRIX:
        return 2, 1
    matrix, rows, columns = prepared.rows.first, prepared.rows, prepared.columns
    aligned = matrix.data_ptr() % 16 == 0
    for unit, one, other in ((2, columns, rows), (1, rows, columns)):
        if one.stride == 1 and aligned:
            return unit, 8 if other.stride % 8 == 0 else 1
    return 0, int(aligned)


def lookers(op: Fused) -> int:
    """Programs that look through a matrix, a few tiles of 8 192 entries each."""
    return min(-(-op.rows // (8192 // BLOCK)) * -(-op.columns // BLOCK), 512)


def strides(prepared: Prepared) -> tuple[int, int]:
    """The strides of rows and columns, counted as ``_alignment`` says."""
    unit, align = alignment(prepared)
    rows, columns = prepared.rows.stride, prepared.columns.stride
    return (rows, columns // align) if unit == 1 else (rows // align, columns) if unit == 2 else (rows, columns)


class Update:
    """An update of all row potentials, bound to an operator: only the vectors are given call by call."""

    def __init__(self, op: Fused):
        self.prepared, self.batch = op.prepared, op.batch  # and not op, which may keep this: a cycle outlives its use
        rows, columns = self.prepared.rows, self.prepared.columns
        transposed = columns.stride != 1
        shape = launch_shape(self.prepared.kind, self.prepared.width, op.batch * rows.length, op.device, transposed)
        blocks_of_rows = -(-rows.length // shape.rows)
        splits, tiles = splits_for(shape, blocks_of_rows * op.batch, columns.length, op.device)
        self.programs = blocks_of_rows * splits
        self.parts = op.new(op.batch * blocks_of_rows * splits * 2 * shape.rows)
        self.counters = op.zeros(op.batch * blocks_of_rows)
        self.sizes = (
            self.programs, rows.length, columns.length, splits, tiles, rows.blocks, columns.blocks,
            self.prepared.width // 64, self.prepared.batch_stride, *strides(self.prepared),
        )  # fmt: skip
        self.constants = (*op.constants, shape.rows, shape.columns, shape.stages)
        limit = (("maxnreg", shape.registers),) if shape.registers and not INTERPRETED else ()
        self.options = (("num_warps", shape.warps), ("num_stages", shape.stages), *limit)

    def bind(
        self, bias: Tensor, u_in: Tensor, log_weight: Tensor, u_out: Tensor, bias_out: Tensor, ratio: Tensor,
        done: Tensor, gaps: Tensor, cycles: Tensor, penalty: Tensor, most: int = 0, column: int = 0, first: bool = True,
        steady: bool = False, lack: Tensor | None = None,
    ) -> Launch:
        """The launch of an update from the columns' bias, to be called with the iteration.

        ``first`` where there is no previous potential to start from; ``column`` is 1 for columns. ``steady`` as in a
        stage of annealing. ``lack`` where potentials lack more than the norm.
        """
        from .triton_kernels import update

        rows, columns, slopes = self.prepared.rows, self.prepared.columns, self.prepared.slopes
        tensors = (
            rows.first, rows.second, columns.first, columns.second, bias, u_in, log_weight, u_out, bias_out, ratio,
            self.parts, self.counters, done, slopes, gaps, cycles, penalty, rows.half_norm if lack is None else lack,
        )  # fmt: skip
        args, programs = (*tensors, 0, most, column, *self.sizes), self.programs * self.batch
        lacking = self.prepared.kind == DOT or lack is not None
        constants, variant = (*self.constants, first, steady, lacking), self.prepared.variant
        return Launch(update, programs, args, constants, self.options, variant, at=len(tensors))


class Strips:
    """Both updates of an iteration from one exponential a pair, where whole rows fit into a program's registers."""

    LONGEST = 16384  # columns
    FEWEST = 16  # rows for each multiprocessor
    UNIFORM = 32  # coordinates of a strip's rows that lie in registers of their own
    # Rows of a strip at most, warps of a program, programs of a multiprocessor, and registers of a thread.
    SHAPES: ClassVar = {MATRIX: (1, 8, 2, 128), FMA: (8, 8, 1, 255)}
    LONG: ClassVar = {MATRIX: 12288, FMA: 10240}  # columns, and what suits more of them
    LONG_SHAPES: ClassVar = {MATRIX: (2, 8, 1, 255), FMA: (4, 16, 1, 128)}

    def __init__(self, op: Fused):
        self.op, self.prepared = op, op.prepared
        prepared, rows, columns = op.prepared, op.prepared.rows, op.prepared.columns
        long = columns.length > self.LONG[prepared.kind]
        chosen = self.LONG_SHAPES if long else self.SHAPES
        self.rows, self.warps, resident, self.registers = chosen[prepared.kind]
        while columns.length <= 128 * self.warps * 2 and self.warps > 4:
            self.warps, resident = self.warps // 2, 2 * resident
        pieces, padded = -(-columns.length // (128 * self.warps)), columns.blocks * PAD
        self.first = 1 << max(1, min(pieces - 1, padded // (128 * self.warps))).bit_length() - 1  # without a mask
        self.second = 1 << (max(1, pieces - self.first) - 1).bit_length()
        held = 4 * (self.first + self.second)  # numbers of a row in each thread; most registers are theirs
        most = min(self.registers * 5 // 6 // held - 1, self.UNIFORM // prepared.width)
        while self.rows > max(1, most):
            self.rows //= 2
        strips, places = -(-rows.length // self.rows), processors(op.device) * resident
        self.each = -(-strips // max(1, min(strips, places // op.batch)))
        self.programs = -(-strips // self.each)
        self.parts = op.new(op.batch * self.programs * columns.blocks * PAD)
        numbers = (prepared.batch_stride, rows.stride, columns.length)
        self.align = 8 if prepared.kind == MATRIX and not any(number % 8 for number in numbers) else 1
        self.batch_stride, self.stride, self.length = (number // self.align for number in numbers)

    @classmethod
    def fit(cls, op: Fused) -> bool:
        """Whether a row fits into one program, and there are rows enough for all.

        Long rows of five to eight coordinates do, but two passes are faster (H200, 10 000 rows of 12 288 columns: 0.18
        and 0.32 ms instead of 0.21 and 0.49; of 10 000 columns 0.16 and 0.25 instead of 0.10 and 0.15).
        """
        prepared = op.prepared
        if prepared.kind == DOT or (prepared.kind == MATRIX and alignment(prepared)[0] != 2):
            return False
        enough = cls.FEWEST * processors(op.device)
        longest = cls.LONG[FMA] if prepared.kind == FMA and prepared.width > 4 else cls.LONGEST
        return prepared.columns.length <= longest and prepared.rows.length * op.batch >= enough

    def bind(self, loop: Vectors, before: Tensor, after: Tensor) -> InTurn:
        """Launches that update rows, then columns from ``before`` to ``after``, to be called with the iteration."""
        from .triton_kernels import gather, strip
        from .triton_loop import InTurn

        op, prepared, most = self.op, self.prepared, loop.control.max_iterations
        rows, columns = prepared.rows, prepared.columns
        tensors: tuple[Tensor, ...] = (
            rows.first, columns.first, loop.column_bias, loop.u, loop.log_a, loop.u, loop.row_bias, self.parts,
            loop.done, prepared.slopes, loop.gaps, loop.cycles, loop.penalty, loop.lacks[0],
        )  # fmt: skip
        strides = (self.batch_stride, self.stride)
        sizes: tuple[int, ...] = (
            self.programs, self.each, rows.length, self.length, rows.blocks, columns.blocks, *strides,
        )  # fmt: skip
        limit = () if INTERPRETED else (("maxnreg", self.registers),)
        options = (("num_warps", self.warps), ("num_stages", 1), *limit)
        constants, ways = (*op.constants[:2], self.align), (loop.steady, loop.offset)
        first = Launch(
            strip, self.programs * op.batch, (*tensors, 0, most, *sizes),
            (*constants, self.rows, self.first, self.second, 128 * self.warps, *ways), options, prepared.variant,
            at=len(tensors),
        )  # fmt: skip
        blocks_of_columns = -(-columns.length // 32)
        tensors = (
            rows.first, columns.first, self.parts, loop.row_bias, before, loop.log_b, after, loop.column_bias,
            loop.ratio, loop.done, prepared.slopes, loop.column_gaps, loop.cycles, loop.penalty, loop.lacks[1],
        )  # fmt: skip
        sizes = (
            blocks_of_columns, columns.length, rows.length, self.programs, columns.blocks, rows.blocks,
            loop.control.check_every, *strides,
        )  # fmt: skip
        then = Launch(
            gather, blocks_of_columns * op.batch, (*tensors, 0, most, *sizes), (*constants, 32, 128, *ways),
            PRODUCT_OPTIONS, prepared.variant, at=len(tensors),
        )  # fmt: skip
        return InTurn(first, then)


def fitting_tile(op: Fused, max_iterations: int) -> Tile | None:
    """The tile with which every score of the batch lies in some register at the same time, or None.

    The first that takes no more than half of a processor's places, or else the last.
    """
    if op.device.type != "cuda":  # the interpreter runs one program after another: none may wait
        return TILES[0] if op.rows <= TILES[0].rows and op.columns <= TILES[0].columns else None
    for tile in TILES:
        along = -(-op.rows // tile.rows), -(-op.columns // tile.columns)
        count, slots = op.batch * math.prod(along), processors(op.device) * tile.resident
        if tile is not TILES[-1]:
            slots //= 8 if tile is TILES[0] else 2
        if max(along) <= MOST_TILES and count <= slots and 2 * max_iterations < 1 << 31:
            return tile  # rounds are counted in 32 bits, two an iteration
    return None


def prepare(cost: Cost, epsilon: Tensor) -> Prepared:
    """Both sides of a batch, centred, scaled and split."""
    if cost.matrix is not None:
        return _prepare_matrix(cost.matrix, epsilon)
    from .triton_kernels import prepare as kernel

    assert cost.x is not None and cost.y is not None
    x, y = cost.x, cost.y
    batch, d = x.shape[0], x.shape[-1]
    kind = FMA if d <= FMA_DIMENSIONS else DOT
    width = d if kind == FMA else padded_width(d)
    rows, columns = (_empty_side(points, kind, width) for points in (x, y))
    slopes = torch.empty(batch, device=x.device)
    scratch = torch.zeros(4 + batch, dtype=torch.int32, device=x.device)
    flags, extents = scratch[:4], scratch[4:].view(torch.float32)
    block = 64 if kind == DOT else 256
    programs = (rows.blocks + columns.blocks) * (PAD // block)
    chunk = min(64, width) if kind == DOT else 1 << (d - 1).bit_length()
    options = (("num_warps", 8 if kind == DOT else 4),)
    variant = (x.dtype, x.data_ptr() % 16, y.data_ptr() % 16, epsilon.data_ptr() % 16)
    launches = []
    for again in range(2 if kind == DOT else 1):
        args = (
            x, y, epsilon, rows.first, rows.second, columns.first, columns.second, rows.half_norm, columns.half_norm,
            slopes, extents, flags, programs, rows.length, columns.length, rows.blocks, columns.blocks, d, width, again,
            *x.stride(), *y.stride(), epsilon.stride(0),
        )  # fmt: skip
        launches.append(Launch(kernel, programs * batch, args, (kind, chunk, block), options, variant))
        launches[-1]()
    return Prepared(kind, width, rows, columns, slopes, flags, scratch, 0, kind, tuple(launches))


def padded_width(d: int) -> int:
    """Coordinates as the matrix units take them: a power of two, or whole chunks."""
    return max(16, 1 << (d - 1).bit_length()) if d <= CHUNK else -(-d // 64) * 64


def _empty_side(points: Tensor, kind: int, width: int) -> Side:
    batch, count, _ = points.shape
    blocks_of = -(-count // PAD)
    if kind == FMA:
        coordinates = torch.empty(batch, width, blocks_of * PAD, device=points.device)
        return Side(coordinates, coordinates, coordinates, count, blocks_of, 1)
    halves = torch.empty(2, batch, blocks_of * PAD, width, dtype=torch.float16, device=points.device)
    norms = torch.empty(batch, blocks_of * PAD, device=points.device)
    return Side(halves[0], halves[1], norms, count, blocks_of, 1)


def slopes_of(epsilon: Tensor) -> Tensor:
    """What entries of matrices are multiplied by."""
    return (-LOG2E / epsilon).float()


def _prepare_matrix(matrix: Tensor, epsilon: Tensor) -> Prepared:
    batch_stride, *strides = matrix.stride()
    rows, columns = (
        Side(matrix, matrix, matrix, count, -(-count // PAD), stride)
        for count, stride in zip(matrix.shape[1:], strides, strict=True)
    )
    return Prepared(MATRIX, 1, rows, columns, slopes_of(epsilon), None, None, batch_stride, (MATRIX, matrix.dtype))
