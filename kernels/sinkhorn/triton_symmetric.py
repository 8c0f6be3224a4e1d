"""Triton on CUDA: annealed symmetric updates of clouds, against each other and against themselves.

Points are prepared once and a temperature is a number, so a step of the descent is one launch: all softmins, the whole
batch; small clouds take one launch for all steps, and the card itself measures them and counts the steps. Points with
few coordinates go through direct differences, others through the matrix units (``triton.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import far, triton, triton_near
from .launch import (
    INTERPRETED,
    Launch,
    Shape,
    compile_once,
    launch_shape,
    limit,
    named_shape,
    processors,
    splits_for,
)  # fmt: skip
from .operator import Cost
from .triton import DOT, FMA, LOG2E, PAD, on

LN_2 = math.log(2)
SHARE = 128  # points that one program prepares, or integrates over
SETTING = 7  # numbers that tell a step what to do
ARRIVALS = 4  # counters that do not belong to a problem
FARTHEST = 1e40  # no two points in float32 are further apart
MOST_STEPS = 4096  # of a descent that the card may count
MOST_BYTES = 64 << 20  # that one kept run may take


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
    too. ``rho`` is the strength of the marginal constraints, infinite for balanced transport. With ``measured``, blur
    and scaling, there is the last step only, and those before it follow from the box around all points. With ``start``,
    potentials (B, n), (B, m) across and of each cloud to itself, the first step starts from those.
    """

    p: int
    steps: Steps
    rho: float
    debias: bool
    need_x: bool
    need_y: bool
    precision: str
    shown: Callable[[Iterable[int]], Iterable[int]] = iter
    measured: tuple[float, float] | None = None
    start: tuple[Tensor | None, ...] | None = None


class Outputs(NamedTuple):
    """Where results go: the values (B,), and their gradients by x, a, y and b, contiguous; None where nobody asks."""

    value: Tensor
    x: Tensor | None
    a: Tensor | None
    y: Tensor | None
    b: Tensor | None


def anneal(clouds: Clouds, task: Task) -> Potentials:
    """Follow the steps."""
    with on(clouds.x.device):
        return _descended(clouds, task).found()


def divergence(clouds: Clouds, task: Task) -> tuple[Tensor, ...]:
    """Follow the steps; the values (B,) of the divergence, and their gradients by x, a, y and b.

    Gradients by points that were not asked for are empty.
    """
    x, a, y, b = clouds
    by_x, by_y = (part.new_empty(part.shape if need else 0) for part, need in ((x, task.need_x), (y, task.need_y)))
    value, by_a, by_b = a.new_empty(len(a)), a.new_empty(a.shape), b.new_empty(b.shape)
    wanted = by_x if task.need_x else None, by_a, by_y if task.need_y else None, by_b
    with on(x.device):
        _descended(clouds, task).integrate(Outputs(value, *wanted))
    return value, by_x, by_a, by_y, by_b


def divergence_into(clouds: Clouds, task: Task, outputs: Outputs, other: dict[str, Tensor]) -> Again | None:
    """The same into tensors that are there; and what does it again, given other tensors in their places.

    ``other`` names the inputs and outputs that will be others next time, laid out as these are, on the same stream.
    None where that cannot be done.
    """
    with on(clouds.x.device):
        descent = _descended(clouds, task)
        descent.integrate(outputs)
    if not descent.small or not all(one.repeatable for one in descent.launches):
        return None
    if descent.a is not clouds.a or descent.b is not clouds.b:
        return None
    again = Again(descent.launches, other)
    return again if again.bytes <= MOST_BYTES else None


class Again:
    """Launches that ran once, to run again in the same buffers: only what has a name is another tensor each time."""

    def __init__(self, launches: list[Launch], named: dict[str, Tensor]):
        names = {id(tensor): name for name, tensor in named.items()}
        self.launches = launches
        self.kept = [part for one in launches for part in one.detach(names)]

    @property
    def bytes(self) -> int:
        """What the buffers take."""
        storages = (part.untyped_storage() for part in self.kept)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def __call__(self, named: dict[str, Tensor]) -> None:
        """Run them on these tensors. Where that fails, half of it may have run: not to be used again."""
        addresses = {name: tensor.data_ptr() for name, tensor in named.items()}
        for one in self.launches:
            one.attach(addresses)
            one()


def repeats(clouds: Clouds, task: Task) -> bool:
    """Whether the launches are the same for all clouds laid out like these."""
    return _layout(clouds, task).small and task.shown is iter and not _capturing()


def measures(x: Tensor, y: Tensor, p: int, blur: float, scaling: float, debias: bool) -> bool:
    """Whether the card can be left to measure the box around all points, and to count the steps of the descent."""
    layout = _laid_out(*x.shape, y.shape[1], x.device, p, debias, (False, False), "", _small(x.device))
    return layout.small and not _capturing() and room_for_steps(p, blur, scaling) <= MOST_STEPS


@functools.lru_cache(maxsize=128)
def room_for_steps(p: int, blur: float, scaling: float) -> int:
    """No descent has more steps."""
    return 4 + max(0, math.ceil(p * math.log(FARTHEST / blur) / (-p * math.log(scaling))))


def _capturing() -> bool:
    return not INTERPRETED and torch.cuda.is_current_stream_capturing()


def _small(device: torch.device) -> int:
    return int(limit("waiting-pairs", device))


def anneal_matrices(
    matrices: Tensor, a: Tensor, b: Tensor, steps: Steps, f: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Potentials (B, n) and (B, m) after the steps, where the costs are matrices (``triton_matrices.py``)."""
    from .triton_matrices import anneal as found

    return found(matrices, a, b, steps, f, g)


def sums(points: Tensor, weights: Tensor, kind: str, blur: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    """Sums of a kernel over one signed cloud, for few coordinates (``triton_norms.py``)."""
    from .triton_norms import sums as found

    return found(points, weights, kind, blur, slope)


def _descended(clouds: Clouds, task: Task) -> Descent:
    nearby = None
    if task.p == 2 and not _layout(clouds, task).small and not _capturing():
        nearby = triton_near.of(clouds, min(step[0] for step in task.steps[-1]))
    if nearby is not None:
        clouds, task = nearby.clouds, task._replace(start=nearby.in_order(task.start))
    if not INTERPRETED:
        _get_ready(clouds, task, nearby)
    descent = Descent(clouds, task, nearby)
    descent.follow()
    return descent


_ready: set[Any] = set()


def _get_ready(clouds: Clouds, task: Task, nearby: triton_near.Nearby | None) -> None:
    """Before the first problem of a kind, compile every kernel that it will take, side by side."""
    layout = _layout(clouds, task)
    d = min(layout.d, 2 * triton.CHUNK)
    how = task.p, any(layout.need), task.precision, layout.small, nearby is not None
    key = (torch.cuda.current_device(), clouds.x.dtype, d, *how)

    def rehearse() -> None:
        descent = Descent(clouds, task)
        if nearby is not None:
            nearby.rehearse(descent)
        if layout.small:
            descent.all_but_last()
        else:
            descent.step(0)
        descent.last()
        points = zip((clouds.x, clouds.y), layout.need, strict=True)
        by_x, by_y = (torch.empty_like(part) if need else None for part, need in points)
        descent.integrate(Outputs(clouds.a, by_x, None, by_y, None))

    compile_once(_ready, key, rehearse)


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
    return _laid_out(*x.shape, y.shape[1], x.device, task.p, task.debias, need, task.precision, _small(x.device))


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
    few = "3" if layout.width <= 3 else "8"
    if sloped:
        return named_shape(f"sloped-{few}", layout.device)
    if layout.small:
        return named_shape(f"waiting-{few}", layout.device)
    if layout.kind == FMA and layout.width <= 3:
        return named_shape("near-3", layout.device)
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


def _rounded(size: int) -> int:
    """Numbers from one aligned address to another."""
    return -(-size // PAD) * PAD


class Descent:
    """The state of one descent on the card."""

    def __init__(self, clouds: Clouds, task: Task, nearby: triton_near.Nearby | None = None):
        x, a, y, b = clouds
        self.x, self.y, self.task, self.nearby = x, y, task, nearby
        self.a, self.b = (weight if weight.stride(-1) == 1 else weight.contiguous() for weight in (a, b))
        self.layout = layout = _layout(clouds, task)
        self.small = layout.small and task.shown is iter and not _capturing()
        self.reference = 0.0 if layout.kind == FMA else 2 * task.steps[-1][0][0]
        self.numbers = numbers_for(task.steps, task.p, self.reference)
        self.listed = int(len(task.steps[0]) > 1)
        self.room = 0 if task.measured is None else room_for_steps(task.p, *task.measured)
        self.turn = 0
        self.launches: list[Launch] = []  # what has been started
        self.cuts = [cut(layout, False, shape_for(layout, False)), cut(layout, True, shape_for(layout, True))]
        self._allocate()
        if not self.room and (self.listed or self.small):
            stream = 0 if INTERPRETED else torch._C._cuda_getCurrentRawStream(x.device.index)
            self.table = table_for(self.numbers, x.device, stream)
        self._begin()

    def _allocate(self) -> None:
        """One piece of memory for all that is computed, and one for what must be zero at the start."""
        layout, (plain, sloped), batch = self.layout, self.cuts, self.layout.batch
        few, each, programs = layout.kind == FMA, batch * layout.rows, self._blocks
        slopes = batch * 2 * (layout.n + layout.m) * layout.d * any(layout.need)
        points = batch * layout.width * few
        self.counts = 2 * batch * 4 * max(plain.most_tiles, sloped.most_tiles) + 1
        sizes = [
            points * layout.blocks_x * PAD, points * layout.blocks_y * PAD, each, 4 * each, 4 * each, slopes,
            plain.room, sloped.room, self.room * SETTING, 2 * self._box * programs * batch if self.room else 0,
            2 * programs * batch, self.counts,
        ]  # fmt: skip
        space = torch.empty(sum(map(_rounded, sizes)), device=layout.device)
        pieces = space.split([_rounded(size) for size in sizes])
        self.points_x, self.points_y, self.logs, self.potentials, self.biases, self.slopes, *pieces = pieces
        self.parts, self.sloped_parts, self.table, self.boxes, partial, counters = pieces
        self.partial, self.counters = partial.view(torch.float64), counters.view(torch.int32)
        self.sloped_counters, self.meeting = self.counters[self.counts // 2 :], self.counters[self.counts - 1 :]
        self.arrivals = torch.zeros(ARRIVALS + batch, dtype=torch.int32, device=layout.device)
        self.state = 2 * each  # numbers of one state of potentials, or of biases

    @property
    def _blocks(self) -> int:
        """Programs of one problem where each takes ``SHARE`` points."""
        return (self.layout.blocks_x + self.layout.blocks_y) * (PAD // SHARE)

    @property
    def _box(self) -> int:
        """Coordinates of a corner, as the kernel that prepares the points holds them."""
        return 1 << (min(self.layout.d, 8) - 1).bit_length()

    def _begin(self) -> None:
        from .triton_symmetric_kernels import begin

        layout, x, y, task = self.layout, self.x, self.y, self.task
        norms = sides = self.points_x, self.points_y
        self.prepared = None
        if layout.kind == DOT:
            epsilon = torch.full((1,), self.reference, dtype=torch.float64, device=layout.device).expand(layout.batch)
            self.prepared = triton.prepare(Cost(x, y, None), epsilon)
            norms = self.prepared.rows.half_norm, self.prepared.columns.half_norm
        blur, scaling = task.measured or (1.0, 1.0)
        args = (
            x, y, self.a, self.b, *sides, *norms, self.logs, self.biases, self.potentials, self.counters, self.arrivals,
            self.boxes, self.table, self._blocks, layout.n, layout.m, layout.blocks_x, layout.blocks_y, layout.d,
            layout.batch, *x.stride(), *y.stride(), self.a.stride(0), self.b.stride(0), self.listed, self.counts,
            self.room, task.p, self.numbers[0][0][0], task.steps[-1][0][0], task.p * math.log(blur),
            task.p * math.log(scaling), task.rho,
        )  # fmt: skip
        variant = (x.dtype, *(part.data_ptr() % 16 for part in (x, y, self.a, self.b)))
        constants = (layout.kind, SHARE, self._box)
        self._start(begin, self._blocks * layout.batch, args, constants, (("num_warps", 4),), variant)
        if task.start is not None:
            self._start_from(*task.start)

    def _start(
        self, kernel: Any, programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], options: Any,
        variant: Any = None,
    ) -> None:  # fmt: skip
        self.launches.append(Launch(kernel, programs, args, constants, options, variant))
        self.launches[-1]()

    def _start_from(self, f: Tensor | None, g: Tensor | None, own_f: Tensor | None, own_g: Tensor | None) -> None:
        """Potentials to start from; biases without any are there."""
        layout, offset = self.layout, self.layout.blocks_x * PAD
        potentials, biases = (part.view(2, layout.batch, 2, layout.rows) for part in (self.potentials, self.biases))
        x, y = slice(layout.n), slice(offset, offset + layout.m)
        for row, part, given in ((0, x, f), (0, y, g), (1, x, own_f), (1, y, own_g)):
            if given is not None:
                potentials[:, :, row, part] = given
        bits: Any = self.numbers[0][0][1]
        if self.listed:
            bits = self.table[0, :, 1, None, None]
        biases += potentials * bits

    def follow(self) -> None:
        """All steps."""
        if self.small:
            self.all_but_last()
        else:
            fields = far.fields(self.x, self.y) if self.task.p == 2 else []
            for k in self.task.shown(range(len(self.task.steps) - 1)):
                if fields and self.far_pays(fields, k):
                    self.far_step(fields, k)
                else:
                    self.step(k)
        self.last()

    def all_but_last(self) -> None:
        """All steps but the last in one launch."""
        from .triton_symmetric_kernels import descend

        layout, sized, steps = self.layout, self.cuts[0], len(self.numbers) - 1
        programs = sized.programs(layout.debias)
        args = (
            self.points_x, self.points_y, self.logs, self.potentials, self.biases, self.parts, self.counters,
            self.meeting, self.arrivals, self.table, layout.batch, steps, programs, layout.n, layout.m,
            layout.blocks_x, layout.blocks_y, sized.tiles_x, sized.tiles_y, sized.splits_x, sized.splits_y,
            sized.tiles_each, sized.most_tiles, self.listed,
        )  # fmt: skip
        together = processors(layout.device) * sized.shape.resident
        together = 1 if INTERPRETED else min(programs * layout.batch, together)
        constants = (layout.width, layout.p, sized.shape.rows, sized.shape.columns)
        options = sized.options if INTERPRETED else (*sized.options, ("launch_cooperative_grid", True))
        self._start(descend, together, args, constants, options)

    def step(self, k: int) -> None:
        """All softmins of a step."""
        self._softmins(k, False)
        self.turn = 1 - self.turn

    def _softmins(self, k: int, sloped: bool, for_x: int = 1, for_y: int = 1) -> None:
        """Over the tiles that count, or over all pairs."""
        if self.nearby is None or not self.nearby.step(self, k, sloped, for_x, for_y):
            self._launch(k, sloped, for_x, for_y)

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
            self._softmins(k, True, *map(int, need))
        if not (few and all(need)):
            self._softmins(k, False, *(int(not few or not wanted) for wanted in need))
        if not few and any(need):
            self._wide_slopes()
        self.turn = 1 - self.turn

    def found(self) -> Potentials:
        """What the steps have led to."""
        layout = self.layout
        values = self.potentials[self.turn * self.state :][: self.state].view(layout.batch, 2, layout.rows)
        slopes, offset = self._slopes() if any(layout.need) else None, layout.blocks_x * PAD
        if self.nearby is not None:
            values = self.nearby.turned_back(values, (0, offset))
            slopes = None if slopes is None else self.nearby.turned_back(slopes, (0, layout.n))
        return Potentials(values, slopes, offset)

    def _slopes(self) -> Tensor:
        layout = self.layout
        shape = layout.batch, 2, layout.n + layout.m, layout.d
        return self.slopes[: math.prod(shape)].view(shape)

    def integrate(self, outputs: Outputs) -> None:
        """Values and gradients from the potentials and their slopes."""
        if self.nearby is None:
            self._integrate(outputs)
            return
        found = Outputs(outputs.value, *(None if part is None else torch.empty_like(part) for part in outputs[1:]))
        self._integrate(found)
        self.nearby.put_back(found, outputs)

    def _integrate(self, outputs: Outputs) -> None:
        from .triton_symmetric_kernels import integrate

        task, layout = self.task, self.layout
        balanced = math.isinf(task.rho)
        strengths = (1.0, 1.0) if balanced else (task.rho, task.rho + task.steps[-1][0][0] / 2)
        wanted = outputs.x, outputs.y, outputs.a, outputs.b
        spare = next((by for by in wanted[:2] if by is not None), self.slopes)
        by_x, by_y = (spare if by is None else by for by in wanted[:2])
        by_a, by_b = (self.logs if by is None else by for by in wanted[2:])
        args = (
            self.potentials[self.turn * self.state :], self.slopes, self.a, self.b, by_a, by_b, by_x, by_y,
            self.partial, self.arrivals, outputs.value, self._blocks, layout.n, layout.m, layout.blocks_x,
            layout.blocks_y, layout.d, self.a.stride(0), self.b.stride(0), int(balanced), int(task.debias),
            *(int(by is not None) for by in wanted), *strengths,
        )  # fmt: skip
        variant = by_x.dtype, *(tensor.data_ptr() % 16 for tensor in (self.a, self.b, by_a, by_b, by_x, by_y))
        chunk = min(16, 1 << (layout.d - 1).bit_length())
        self._start(integrate, self._blocks * layout.batch, args, (SHARE, chunk), (("num_warps", 4),), variant)

    def _launch(self, k: int, sloped: bool, for_x: int, for_y: int) -> None:
        from .triton_symmetric_kernels import step

        layout, sized = self.layout, self.cuts[sloped]
        programs = sized.programs(layout.debias, for_x, for_y)
        before, after = self.turn * self.state, (1 - self.turn) * self.state
        shape = sized.shape
        args = (
            *self._points(), self.logs, self.potentials[before:], self.potentials[after:], self.biases[before:],
            self.biases[after:], self.slopes, self.sloped_parts if sloped else self.parts,
            self.sloped_counters if sloped else self.counters,
            self.parts if self.prepared is None else self.prepared.slopes, self.table,
            programs, layout.n, layout.m, layout.blocks_x, layout.blocks_y, sized.tiles_x * for_x,
            sized.tiles_y * for_y, sized.splits_x, sized.splits_y, sized.tiles_each, sized.most_tiles,
            layout.width // 64, k, layout.batch, self.listed, *self.numbers[k][0],
        )  # fmt: skip
        constants = (*layout.constants, shape.rows, shape.columns, shape.stages, sloped)
        self._start(step, programs * layout.batch, args, constants, sized.options, layout.kind)

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
        if self.listed:
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
        epsilon = torch.ones(layout.batch, dtype=torch.float64, device=layout.device)  # all is in base 2 already
        operator = triton.Fused(Cost(points[side], points[other], None), epsilon, layout.precision, turned)
        top, total, out, largest = operator._parts_of_product(t, values, None, 0)
        fade = torch.exp2(top - top.amax(0))
        mean = (out * fade[..., None]).sum(0) / (total * fade).sum(0)[:, :, None]
        return mean if largest is None else mean * (largest / triton.HALF_RANGE**2)[:, None, None]
