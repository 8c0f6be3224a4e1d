"""Triton on CUDA: annealed symmetric updates of clouds, against each other and against themselves.

Points are prepared once and a temperature is a number, so a step of the descent is one launch: all softmins, the whole
batch; small clouds take one launch for all steps. Points with few coordinates go through direct differences, others
through the matrix units (``triton.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import far, triton
from .launch import INTERPRETED, Shape, compile_together, launch, launch_shape, processors, splits_for
from .operator import Cost
from .triton import DOT, FMA, LOG2E, PAD, on

LN_2 = math.log(2)
SHARE = 128  # points that one program prepares, or integrates over
SMALL = 1 << 26  # pairs of a step, up to which waiting for each other is cheaper than another launch
NEAR = Shape(16, 128, 4, 1, 4, 128)  # direct differences of up to three coordinates
WAITING = Shape(16, 64, 2, 1, 6, 160)  # for small clouds; all its programs must fit at once
WAITING_MANY = Shape(8, 64, 2, 1, 6, 160)
SLOPED = Shape(16, 64, 2, 1, 4)  # keeps sums for each coordinate too
SLOPED_MANY = Shape(8, 64, 2, 1, 4)  # more than three coordinates


def applies(request: Any) -> str | None:
    """Serve points: squared distances as ``triton.py`` does, distances of few coordinates."""
    if request.kind == "points" and request.metric == "clamped" and 0 < request.width <= triton.FMA_DIMENSIONS:
        return triton.applies(request._replace(metric="sqeuclidean"))
    return triton.applies(request)


Step = tuple[float, float, float]  # ε, damping, keep: f ← keep f + (1 − keep) damping · softmin at ε
Steps = tuple[tuple[Step, ...], ...]  # for each step, one for all elements or one for each


class Potentials(NamedTuple):
    """Potentials (B, 2, N) and slopes (B, 2, n + m, d), or None, of both clouds: across, then of each to itself.

    Potentials of y begin at ``offset`` along the last axis. The parts of slopes that were not asked for hold anything.
    """

    values: Tensor
    slopes: Tensor | None
    offset: int


class Clouds(NamedTuple):
    """Points (B, n, d) and (B, m, d), weights (B, n) and (B, m)."""

    x: Tensor
    a: Tensor
    y: Tensor
    b: Tensor


class Task(NamedTuple):
    """What to do with them.

    The cost is |x − y|²/2 for p = 2, max(|x − y|, 1e-4) for p = 1, and potentials are in its unit. ``steps`` lists for
    each step one setting for all elements or one for each; the first starts from nothing, and the last gives the slopes
    too. ``rho`` is the strength of the marginal constraints, infinite for balanced transport.
    """

    p: int
    steps: Steps
    rho: float
    debias: bool
    need_x: bool
    need_y: bool
    precision: str
    shown: Callable[[Iterable[int]], Iterable[int]] = iter


def anneal(clouds: Clouds, task: Task) -> Potentials:
    """Follow the steps."""
    with on(clouds.x.device):
        return _descended(clouds, task).found()


def divergence(clouds: Clouds, task: Task) -> tuple[Tensor, ...]:
    """Follow the steps; the values (B,) of the divergence, and their gradients by x, a, y and b.

    Gradients by points that were not asked for are empty.
    """
    with on(clouds.x.device):
        return _descended(clouds, task).integral()


def sums(points: Tensor, weights: Tensor, kind: str, blur: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    """Sums of a kernel over one signed cloud, for few coordinates (``triton_norms.py``)."""
    from .triton_norms import sums as found

    return found(points, weights, kind, blur, slope)


def _descended(clouds: Clouds, task: Task) -> Descent:
    if not INTERPRETED:
        _get_ready(clouds, task)
    descent = Descent(clouds, task)
    if descent.small:
        descent.all_but_last()
    else:
        fields = far.fields(clouds.x, clouds.y) if task.p == 2 else []
        for k in task.shown(range(len(task.steps) - 1)):
            if fields and descent.far_pays(fields, k):
                descent.far_step(fields, k)
            else:
                descent.step(k)
    descent.last()
    return descent


_ready: set[Any] = set()


def _get_ready(clouds: Clouds, task: Task) -> None:
    """Before the first problem of a kind, compile every kernel that it will take, side by side."""
    layout = _layout(clouds, task)
    d = min(layout.d, 2 * triton.CHUNK)
    key = (torch.cuda.current_device(), clouds.x.dtype, d, task.p, any(layout.need), task.precision, layout.small)
    if key in _ready or torch.cuda.is_current_stream_capturing():
        return

    def rehearse() -> None:
        descent = Descent(clouds, task)
        if layout.small:
            descent.all_but_last()
        else:
            descent.step(0)
        descent.last()
        descent.integral()

    compile_together(rehearse)
    _ready.add(key)


@dataclass(frozen=True, eq=False)
class Layout:
    """What depends on sizes alone; one object for one combination of them."""

    kind: int
    batch: int
    n: int
    m: int
    d: int
    width: int  # as the kernels see it
    blocks_x: int
    blocks_y: int
    debias: bool
    need: tuple[bool, bool]
    device: torch.device
    small: bool
    p: int
    precision: str

    @property
    def rows(self) -> int:
        """Of both clouds, with padding."""
        return (self.blocks_x + self.blocks_y) * PAD

    @property
    def constants(self) -> tuple[int, int, int, int, int]:
        """KIND, D (0 where the width is only known at run time), P, CHUNK and PRODUCTS of the kernels."""
        held, chunk = (self.width, self.width) if self.width <= triton.CHUNK else (0, 64)
        return self.kind, held, self.p, chunk, 1 if self.precision == "fast" else 3


def _layout(clouds: Clouds, task: Task) -> Layout:
    x, _, y, _ = clouds
    need = task.need_x, task.need_y
    return _laid_out(*x.shape, y.shape[1], x.device, task.p, task.debias, need, task.precision, SMALL)


@functools.lru_cache(maxsize=512)
def _laid_out(
    batch: int, n: int, d: int, m: int, device: torch.device, p: int, debias: bool, need: tuple[bool, bool],
    precision: str, most: int,
) -> Layout:
    few = d <= triton.FMA_DIMENSIONS
    pairs = batch * ((n + m) ** 2 if debias else 2 * n * m)
    width = d if few else triton.padded_width(d)
    blocks_x, blocks_y = -(-n // PAD), -(-m // PAD)
    small = few and pairs <= most
    kind = FMA if few else DOT
    return Layout(kind, batch, n, m, d, width, blocks_x, blocks_y, debias, need, device, small, p, precision)


class Cut(NamedTuple):
    """How the pairs of one step are cut into programs."""

    tiles_x: int
    tiles_y: int
    splits_x: int
    splits_y: int
    tiles_each: int
    most_tiles: int
    room: int  # for partial sums
    shape: Shape
    options: tuple[tuple[str, int], ...]

    def programs(self, debias: bool, for_x: int = 1, for_y: int = 1) -> int:
        """For one element of the batch, for the rows of x, of y, or both."""
        tiles_x, tiles_y = self.tiles_x * for_x, self.tiles_y * for_y
        across = tiles_x * self.splits_y + tiles_y * self.splits_x
        return across + debias * (tiles_x * self.splits_x + tiles_y * self.splits_y)


@functools.lru_cache(maxsize=512)
def cut(layout: Layout, sloped: bool, shape: Shape) -> Cut:
    """For a step of plain softmins, or with slopes."""
    tiles_x, tiles_y = -(-layout.n // shape.rows), -(-layout.m // shape.rows)
    blocks_of_rows = layout.batch * (1 + layout.debias) * (tiles_x + tiles_y)
    tiles_each = splits_for(shape, blocks_of_rows, max(layout.n, layout.m), layout.device)[1]
    splits_x, splits_y = (-(-count // (shape.columns * tiles_each)) for count in (layout.n, layout.m))
    splits = max(splits_x, splits_y)
    room = blocks_of_rows * splits * (1 + layout.d * sloped) * shape.rows if splits > 1 else 1
    limit = (("maxnreg", shape.registers),) if shape.registers and not INTERPRETED else ()
    options = (("num_warps", shape.warps), ("num_stages", shape.stages), *limit)
    return Cut(tiles_x, tiles_y, splits_x, splits_y, tiles_each, max(tiles_x, tiles_y), room, shape, options)


def shape_for(layout: Layout, sloped: bool) -> Shape:
    """The tile of one program."""
    if sloped:
        return SLOPED if layout.width <= 3 else SLOPED_MANY
    if layout.small:
        return WAITING if layout.width <= 3 else WAITING_MANY
    if layout.kind == FMA and layout.width <= 3:
        return NEAR
    rows = layout.batch * (1 + layout.debias) * (layout.n + layout.m)
    return launch_shape(layout.kind, layout.width, rows, layout.device)


@functools.lru_cache(maxsize=128)
def numbers_for(steps: Steps, p: int, reference: float) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """What the kernels need to know of each step and of the temperature after it (``SETTING`` numbers each).

    The scale leads from prepared to base-2 units: of coordinates, or of squared distances prepared at ``reference``.
    """

    def scale(epsilon: float) -> float:
        if reference:
            return reference / (2 * epsilon)
        return LOG2E / epsilon if p == 1 else math.sqrt(LOG2E / (2 * epsilon))

    def numbers(step: Step, following: Step) -> tuple[float, ...]:
        epsilon, damping, keep = step
        share = LN_2 * epsilon * damping * (1 - keep)
        return scale(epsilon), LOG2E / epsilon, share, keep, LOG2E / following[0], scale(following[0]), damping

    afterwards = (*steps[1:], steps[-1])
    return tuple(tuple(map(numbers, *pair)) for pair in zip(steps, afterwards, strict=True))


@functools.lru_cache(maxsize=128)
def table_for(numbers: tuple[tuple[tuple[float, ...], ...], ...], device: torch.device, stream: int) -> Tensor:
    """The same on the card, for one stream; copied from memory that the driver takes over, so nobody waits."""
    return torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)


class Descent:
    """The state of one descent on the card."""

    def __init__(self, clouds: Clouds, task: Task):
        x, a, y, b = clouds
        self.x, self.y, self.task = x, y, task
        self.a, self.b = (weight if weight.stride(-1) == 1 else weight.contiguous() for weight in (a, b))
        self.layout = layout = _layout(clouds, task)
        listed = len(task.steps[0]) > 1
        capturing = not INTERPRETED and torch.cuda.is_current_stream_capturing()
        self.small = layout.small and not capturing and task.shown is iter
        self.reference = 0.0 if layout.kind == FMA else 2 * task.steps[-1][0][0]
        self.numbers = numbers_for(task.steps, task.p, self.reference)
        self.table: Tensor | None = None
        if listed or self.small:
            stream = 0 if INTERPRETED else torch._C._cuda_getCurrentRawStream(x.device.index)
            self.table = table_for(self.numbers, x.device, stream)
        self.listed = int(listed)
        self.turn = 0
        self.cuts = [cut(layout, False, shape_for(layout, False)), cut(layout, True, shape_for(layout, True))]
        self._allocate()
        self._begin()

    def _allocate(self) -> None:
        """One piece of memory for all that is computed, and one for what is counted."""
        layout, (plain, sloped) = self.layout, self.cuts
        few, each = layout.kind == FMA, layout.batch * layout.rows
        slopes = layout.batch * 2 * (layout.n + layout.m) * layout.d * any(layout.need)
        points = layout.batch * layout.width * few
        sizes = (
            points * layout.blocks_x * PAD, points * layout.blocks_y * PAD, each, 4 * each, 4 * each,
            PAD * (-(-slopes // PAD)), PAD * (-(-plain.room // PAD)), sloped.room,
        )  # fmt: skip
        space = torch.empty(sum(sizes), device=layout.device)
        self.points_x, self.points_y, self.logs, self.potentials, self.biases, *rest = space.split(sizes)
        self.slopes, self.parts, self.sloped_parts = rest
        counts = layout.batch * 4 * max(plain.most_tiles, sloped.most_tiles)
        counters = torch.zeros(2 * counts + 1, dtype=torch.int32, device=layout.device)
        self.counters, self.sloped_counters, self.meeting = counters.split((counts, counts, 1))
        self.state = 2 * each  # numbers of one state of potentials, or of biases

    def _begin(self) -> None:
        from .triton_symmetric_kernels import begin

        layout, x, y = self.layout, self.x, self.y
        norms = sides = self.points_x, self.points_y
        self.prepared = None
        if layout.kind == DOT:
            epsilon = torch.full((1,), self.reference, dtype=torch.float64, device=layout.device).expand(layout.batch)
            self.prepared = triton.prepare(Cost(x, y, None), epsilon)
            norms = self.prepared.rows.half_norm, self.prepared.columns.half_norm
        programs = (layout.blocks_x + layout.blocks_y) * (PAD // SHARE)
        args = (
            x, y, self.a, self.b, *sides, *norms, self.logs, self.biases, self.biases[self.state :], self.potentials,
            self.logs if self.table is None else self.table, programs, layout.n, layout.m, layout.blocks_x,
            layout.blocks_y, layout.d, *x.stride(), *y.stride(), self.a.stride(0), self.b.stride(0), self.listed,
            self.numbers[0][0][0],
        )  # fmt: skip
        variant = (x.dtype, *(part.data_ptr() % 16 for part in (x, y, self.a, self.b)))
        constants = (layout.kind, SHARE, 1 << (min(layout.d, 8) - 1).bit_length())
        launch(begin, programs * layout.batch, args, constants, (("num_warps", 4),), variant)

    def all_but_last(self) -> None:
        """All steps but the last in one launch."""
        from .triton_symmetric_kernels import descend

        layout, sized, steps = self.layout, self.cuts[0], len(self.numbers) - 1
        programs = sized.programs(layout.debias)
        args = (
            self.points_x, self.points_y, self.logs, self.potentials, self.biases, self.parts, self.counters,
            self.meeting, self.table, layout.batch, steps, programs, layout.n, layout.m, layout.blocks_x,
            layout.blocks_y, sized.tiles_x, sized.tiles_y, sized.splits_x, sized.splits_y, sized.tiles_each,
            sized.most_tiles, self.listed,
        )  # fmt: skip
        together = processors(layout.device) * sized.shape.resident
        together = 1 if INTERPRETED else min(programs * layout.batch, together)
        constants = (layout.width, layout.p, sized.shape.rows, sized.shape.columns)
        options = sized.options if INTERPRETED else (*sized.options, ("launch_cooperative_grid", True))
        launch(descend, together, args, constants, options)
        self.turn = steps % 2

    def step(self, k: int) -> None:
        """All softmins of a step."""
        self._launch(k, False, 1, 1)
        self.turn = 1 - self.turn

    def far_pays(self, fields: list[far.Field], k: int) -> bool:
        """Whether all problems are better served by sums over cells."""
        settings = self.task.steps[k]
        return all(field.pays(settings[b * self.listed][0]) for b, field in enumerate(fields))

    def far_step(self, fields: list[far.Field], k: int) -> None:
        """All softmins of a step from sums over cells."""
        layout, offset = self.layout, self.layout.blocks_x * PAD
        for b, field in enumerate(fields):
            epsilon, damping, keep = self.task.steps[k][b * self.listed]
            next_bits = self.numbers[k][b * self.listed][4]
            (before, after), (bias, following) = (self._states(buffer, b) for buffer in (self.potentials, self.biases))
            x, y = slice(layout.n), slice(offset, offset + layout.m)
            places = ((0, x), (0, y), (1, x), (1, y))[: 4 if layout.debias else 2]
            biases = tuple(bias[row][part] * LN_2 for row, part in ((0, y), (0, x), (1, x), (1, y)))
            found = field.softmins(epsilon, biases[: len(places)])
            for (row, part), softmin in zip(places, found, strict=True):
                old = before[row][part]
                new = torch.lerp((damping * softmin).float(), old, keep) if keep < 1 else old
                after[row][part] = new
                log_weight = self.logs[b * layout.rows :][part]
                following[row][part] = torch.where(log_weight.isinf(), log_weight, log_weight + new * next_bits)
        self.turn = 1 - self.turn

    def _states(self, buffer: Tensor, b: int) -> tuple[Tensor, Tensor]:
        """One problem's part (2, rows) of the present state and of the next one."""
        present = buffer.view(2, self.layout.batch, 2, self.layout.rows)[:, b]
        return present[self.turn], present[1 - self.turn]

    def last(self) -> None:
        """The last step, with slopes where they are wanted."""
        k, few, need = len(self.numbers) - 1, self.layout.kind == FMA, self.layout.need
        if self.small and any(need):
            need = True, True  # one launch for both clouds, where a launch costs more than a slope
        if few and any(need):
            self._launch(k, True, *map(int, need))
        if not (few and all(need)):
            self._launch(k, False, *(int(not few or not wanted) for wanted in need))
        if not few and any(need):
            self._wide_slopes()
        self.turn = 1 - self.turn

    def found(self) -> Potentials:
        """What the steps have led to."""
        layout = self.layout
        values = self.potentials[self.turn * self.state :][: self.state].view(layout.batch, 2, layout.rows)
        slopes = self._slopes() if any(layout.need) else None
        return Potentials(values, slopes, layout.blocks_x * PAD)

    def _slopes(self) -> Tensor:
        layout = self.layout
        shape = layout.batch, 2, layout.n + layout.m, layout.d
        return self.slopes[: math.prod(shape)].view(shape)

    def integral(self) -> tuple[Tensor, ...]:
        """Values and gradients from the potentials and their slopes."""
        from .triton_symmetric_kernels import integrate

        task, layout = self.task, self.layout
        by_x, by_y = (
            points.new_empty(points.shape if need else (0,))
            for points, need in zip((self.x, self.y), layout.need, strict=True)
        )
        by_a, by_b = self.a.new_empty(layout.batch, layout.n), self.b.new_empty(layout.batch, layout.m)
        programs = (layout.blocks_x + layout.blocks_y) * (PAD // SHARE)
        partial = self.a.new_empty(layout.batch, programs, dtype=torch.float64)
        balanced = math.isinf(task.rho)
        strengths = (1.0, 1.0) if balanced else (task.rho, task.rho + task.steps[-1][0][0] / 2)
        args = (
            self.potentials[self.turn * self.state :], self.slopes, self.a, self.b, by_a, by_b, by_x, by_y, partial,
            programs, layout.n, layout.m, layout.blocks_x, layout.blocks_y, layout.d, self.a.stride(0),
            self.b.stride(0), int(balanced), int(task.debias), *map(int, layout.need), *strengths,
        )  # fmt: skip
        variant = (self.x.dtype, *(tensor.data_ptr() % 16 for tensor in (self.a, self.b, by_x, by_y)))
        chunk = min(16, 1 << (layout.d - 1).bit_length())
        launch(integrate, programs * layout.batch, args, (SHARE, chunk), (("num_warps", 4),), variant)
        return partial.sum(1, dtype=torch.float64).float(), by_x, by_a, by_y, by_b

    def _launch(self, k: int, sloped: bool, for_x: int, for_y: int) -> None:
        from .triton_symmetric_kernels import step

        layout, sized, table = self.layout, self.cuts[sloped], self.table
        programs = sized.programs(layout.debias, for_x, for_y)
        before, after = self.turn * self.state, (1 - self.turn) * self.state
        shape = sized.shape
        args = (
            *self._points(), self.logs, self.potentials[before:], self.potentials[after:], self.biases[before:],
            self.biases[after:], self.slopes, self.sloped_parts if sloped else self.parts,
            self.sloped_counters if sloped else self.counters,
            self.parts if self.prepared is None else self.prepared.slopes, self.parts if table is None else table,
            programs, layout.n, layout.m, layout.blocks_x, layout.blocks_y, sized.tiles_x * for_x,
            sized.tiles_y * for_y, sized.splits_x, sized.splits_y, sized.tiles_each, sized.most_tiles,
            layout.width // 64, k, layout.batch, self.listed, *self.numbers[k][0],
        )  # fmt: skip
        constants = (*layout.constants, shape.rows, shape.columns, shape.stages, sloped)
        launch(step, programs * layout.batch, args, constants, sized.options, layout.kind)

    def _points(self) -> tuple[Tensor, ...]:
        if self.prepared is None:
            return (self.points_x,) * 2 + (self.points_y,) * 2 + (self.points_x, self.points_y)
        rows, columns = self.prepared.rows, self.prepared.columns
        return rows.first, rows.second, columns.first, columns.second, rows.half_norm, columns.half_norm

    def _wide_slopes(self) -> None:
        """x_i − Σ_j p_ij y_j through the kernel of products."""
        layout, slopes = self.layout, self._slopes()
        centre = 0.5 * sum(points.mean(1, keepdim=True, dtype=torch.float32) for points in (self.x, self.y))
        x, y = (points.float() - centre for points in (self.x, self.y))
        biases = self.biases[self.turn * self.state :][: self.state].view(layout.batch, 2, layout.rows)
        cases = ((x, slopes[:, :, : layout.n], layout.need[0]), (y, slopes[:, :, layout.n :], layout.need[1]))
        damping: Any = self.numbers[-1][0][6]
        if self.listed and self.table is not None:
            damping = self.table[-1, :, 6, None, None]
        for side, (points, out, wanted) in enumerate(cases):
            for own in range(1 + layout.debias if wanted else 0):
                other = side ^ (1 - own)
                torch.mul(points - self._mean(side, other, biases[:, own], (x, y)[other]), damping, out=out[:, own])

    def _mean(self, side: int, other: int, bias: Tensor, values: Tensor) -> Tensor:
        """Σ_j p_ij V_j of the last softmin, which has this bias."""
        layout, prepared, points = self.layout, self.prepared, (self.x, self.y)
        assert prepared is not None
        both, offset = (prepared.rows, prepared.columns), layout.blocks_x * PAD
        columns = both[other]
        bias = bias[:, offset:] if other else bias[:, :offset]
        t = (bias + columns.half_norm)[:, : columns.length] * LN_2
        turned = prepared._replace(rows=both[side], columns=columns)
        epsilon = torch.full((layout.batch,), self.reference, dtype=torch.float64, device=layout.device)
        operator = triton.Fused(Cost(points[side], points[other], None), epsilon, layout.precision, turned)
        top, total, out, largest = operator._parts_of_product(t, values, None, 0)
        fade = torch.exp2(top - top.amax(0))
        mean = (out * fade[..., None]).sum(0) / (total * fade).sum(0)[:, :, None]
        return mean if largest is None else mean * (largest / triton.HALF_RANGE**2)[:, None, None]
