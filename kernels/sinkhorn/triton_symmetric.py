"""Triton on CUDA: annealed symmetric updates of clouds, against each other and against themselves.

Points are prepared once and a temperature is a number, so a step of the descent is one launch: all softmins, the whole
batch. Points with few coordinates go through direct differences, others through the matrix units (``triton.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import triton
from .launch import INTERPRETED, Shape, compile_together, launch, launch_shape, splits_for
from .operator import Cost
from .triton import BLOCK, FMA, LOG2E, PAD, PRODUCT_OPTIONS, Prepared, on

LN_2 = math.log(2)
FLAT = LOG2E  # the ε at which prepared coordinates keep their scale
SLOPED = Shape(16, 64, 2, 1, 4)  # keeps sums for each coordinate too
SHARE = 128  # points that one program integrates over
SLOPED_MANY = Shape(8, 64, 2, 1, 4)  # more than three coordinates


def applies(request: Any) -> str | None:
    """Serve points: squared distances as ``triton.py`` does, distances of few coordinates."""
    if request.kind == "points" and request.metric == "clamped" and 0 < request.width <= triton.FMA_DIMENSIONS:
        return triton.applies(request._replace(metric="sqeuclidean"))
    return triton.applies(request)


Step = tuple[float, float, float]  # ε, damping, keep: f ← keep f + (1 − keep) damping · softmin at ε


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
    steps: Sequence[Sequence[Step]]
    rho: float
    debias: bool
    need_x: bool
    need_y: bool
    precision: str
    shown: Callable[[Iterable[int]], Iterable[int]] = iter


def anneal(clouds: Clouds, task: Task) -> Potentials:
    """Follow the steps."""
    with on(clouds.x.device):
        return _descended(clouds, task).last()


def divergence(clouds: Clouds, task: Task) -> tuple[Tensor, ...]:
    """Follow the steps; the values (B,) of the divergence, and their gradients by x, a, y and b.

    Gradients by points that were not asked for are empty.
    """
    with on(clouds.x.device):
        descent = _descended(clouds, task)
        return descent.integral(descent.last())


def sums(points: Tensor, weights: Tensor, kind: str, blur: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    """Sums of a kernel over one signed cloud, for few coordinates (``triton_norms.py``)."""
    from .triton_norms import sums as found

    return found(points, weights, kind, blur, slope)


def _descended(clouds: Clouds, task: Task) -> Descent:
    if not INTERPRETED:
        _get_ready(clouds, task)
    descent = Descent(clouds, task)
    for k in task.shown(range(len(task.steps) - 1)):
        descent.step(k)
    return descent


_ready: set[Any] = set()


def _get_ready(clouds: Clouds, task: Task) -> None:
    """Before the first problem of a kind, compile every kernel that it will take, side by side."""
    d = min(clouds.x.shape[-1], 2 * triton.CHUNK)
    key = (torch.cuda.current_device(), clouds.x.dtype, d, task.p, task.need_x or task.need_y, task.precision)
    if key in _ready or torch.cuda.is_current_stream_capturing():
        return

    def rehearse() -> None:
        descent = Descent(clouds, task)
        descent.step(0)
        descent.integral(descent.last())

    compile_together(rehearse)
    _ready.add(key)


class Descent:
    """The state of one descent on the card."""

    def __init__(self, clouds: Clouds, task: Task):
        x, a, y, b = clouds
        self.x, self.y, self.task = x, y, task
        self.need, steps = (task.need_x, task.need_y), task.steps
        self.batch, self.n, self.d = x.shape
        self.m, self.parts_of_clouds = y.shape[1], 4 if task.debias else 2
        self.device = x.device
        self.a, self.b = (weight if weight.stride(-1) == 1 else weight.contiguous() for weight in (a, b))
        self.reference = steps[-1][0][0] * 2 if self.d > triton.FMA_DIMENSIONS else FLAT
        epsilon = torch.full((1,), self.reference, dtype=torch.float64, device=x.device).expand(self.batch)
        self.prepared: Prepared = triton.prepare(Cost(x, y, None), epsilon)
        self.settings = [self._setting(steps, k) for k in range(len(steps))]
        self._begin()
        self.plans: dict[bool, Plan] = {}

    def _setting(self, steps: Sequence[Sequence[Step]], k: int) -> tuple[Any, ...]:
        """(table or None, numbers): what the kernels need to know of a step and of the temperature after it."""
        following = steps[min(k + 1, len(steps) - 1)]
        numbers = [self._numbers(*pair) for pair in zip(steps[k], following, strict=True)]
        if len(numbers) == 1:
            return None, numbers[0]
        return torch.tensor(numbers, dtype=torch.float32).to(self.device), numbers[0]

    def _numbers(self, step: Step, following: Step) -> tuple[float, ...]:
        epsilon, damping, keep = step
        share = LN_2 * epsilon * damping * (1 - keep)
        onward = LOG2E / following[0], self._scale(following[0])
        return self._scale(epsilon), LOG2E / epsilon, share, keep, *onward, damping

    def _scale(self, epsilon: float) -> float:
        """From prepared to base-2 units: of coordinates, or of squared distances (matrix units)."""
        if self.d > triton.FMA_DIMENSIONS:
            return self.reference / (2 * epsilon)
        return LOG2E / epsilon if self.task.p == 1 else math.sqrt(LOG2E / (2 * epsilon))

    def _begin(self) -> None:
        from .triton_symmetric_kernels import begin

        a, b = self.a, self.b
        rows, columns = self.prepared.rows, self.prepared.columns
        blocks = rows.blocks + columns.blocks
        state = torch.empty(5, self.batch, 2, blocks * PAD, device=self.device)
        self.logs, self.bias, self.next_bias, self.potential, self.next_potential = state.unbind()
        table, numbers = self.settings[0]
        args = (
            a, b, rows.half_norm, columns.half_norm, self.logs, self.bias, self.next_bias, self.potential,
            rows.half_norm if table is None else table, blocks, self.n, self.m, rows.blocks, columns.blocks,
            a.stride(0), b.stride(0), int(table is not None), numbers[0],
        )  # fmt: skip
        variant = (self.prepared.kind, a.data_ptr() % 16, b.data_ptr() % 16)
        launch(begin, blocks * self.batch, args, (self.prepared.kind, BLOCK), (("num_warps", 4),), variant)

    def step(self, k: int) -> None:
        """All softmins of a step."""
        self._launch(k, False, True, True)
        self._turn()

    def _turn(self) -> None:
        self.potential, self.next_potential = self.next_potential, self.potential
        self.bias, self.next_bias = self.next_bias, self.bias

    def last(self) -> Potentials:
        """The last step, with slopes where they are wanted."""
        k, few = len(self.settings) - 1, self.prepared.kind == FMA
        slopes = None
        if any(self.need):
            slopes = torch.empty(self.batch, 2, self.n + self.m, self.d, device=self.device)
        if few and slopes is not None:
            self._launch(k, True, *self.need, slopes)
        if slopes is None or not few or not all(self.need):
            left = (not few or not need for need in self.need)
            self._launch(k, False, *left)
        if not few and slopes is not None:
            self._wide_slopes(slopes)
        self._turn()
        return Potentials(self.potential, slopes, self.prepared.rows.blocks * PAD)

    def integral(self, found: Potentials) -> tuple[Tensor, ...]:
        """Values and gradients from the potentials and their slopes."""
        from .triton_symmetric_kernels import integrate

        task, rows, columns = self.task, self.prepared.rows, self.prepared.columns
        by_x, by_y = (
            torch.empty(points.shape if need else (0,), dtype=points.dtype, device=self.device)
            for points, need in zip((self.x, self.y), self.need, strict=True)
        )
        by_a, by_b = (torch.empty(self.batch, count, device=self.device) for count in (self.n, self.m))
        programs = (rows.blocks + columns.blocks) * (PAD // SHARE)
        partial = torch.empty(self.batch, programs, dtype=torch.float64, device=self.device)
        balanced = math.isinf(task.rho)
        strength = task.rho + task.steps[-1][0][0] / 2
        args = (
            found.values, found.values if found.slopes is None else found.slopes, self.a, self.b, by_a, by_b, by_x,
            by_y, partial, programs, self.n, self.m, rows.blocks, columns.blocks, self.d, self.a.stride(0),
            self.b.stride(0), int(balanced), int(task.debias), int(task.need_x), int(task.need_y),
            *((1.0, 1.0) if balanced else (task.rho, strength)),
        )  # fmt: skip
        variant = (self.x.dtype, *(tensor.data_ptr() % 16 for tensor in (self.a, self.b, by_x, by_y)))
        chunk = min(16, 1 << (self.d - 1).bit_length())
        launch(integrate, programs * self.batch, args, (SHARE, chunk), (("num_warps", 4),), variant)
        return partial.sum(1).float(), by_x, by_a, by_y, by_b

    def _launch(self, k: int, sloped: bool, for_x: bool, for_y: bool, slopes: Tensor | None = None) -> None:
        from .triton_symmetric_kernels import step

        plan = self.plans.get(sloped)
        if plan is None:
            plan = self.plans[sloped] = Plan(self, sloped)
        table, numbers = self.settings[k]
        prepared, nothing = self.prepared, plan.parts
        rows, columns = prepared.rows, prepared.columns
        tiles_x, tiles_y = plan.tiles_x * for_x, plan.tiles_y * for_y
        programs = tiles_x * plan.splits_y + tiles_y * plan.splits_x
        if self.parts_of_clouds == 4:
            programs += tiles_x * plan.splits_x + tiles_y * plan.splits_y
        args = (
            rows.first, rows.second, columns.first, columns.second, rows.half_norm, columns.half_norm, self.logs,
            self.potential, self.next_potential, self.bias, self.next_bias, nothing if slopes is None else slopes,
            plan.parts, plan.counters, prepared.slopes, nothing if table is None else table, programs, self.n, self.m,
            rows.blocks, columns.blocks, tiles_x, tiles_y, plan.splits_x, plan.splits_y, plan.tiles_each,
            plan.most_tiles, prepared.width // 64, int(table is not None), *numbers,
        )  # fmt: skip
        launch(step, programs * self.batch, args, plan.constants, plan.options, prepared.variant)

    def _wide_slopes(self, slopes: Tensor) -> None:
        """x_i − Σ_j p_ij y_j through the kernel of products."""
        centre = 0.5 * sum(points.mean(1, keepdim=True, dtype=torch.float32) for points in (self.x, self.y))
        x, y = (points.float() - centre for points in (self.x, self.y))
        offset = self.prepared.rows.blocks * PAD
        cases = ((x, slopes[:, :, : self.n], self.need[0]), (y, slopes[:, :, self.n :], self.need[1]))
        table, numbers = self.settings[-1]
        damping: Any = numbers[6] if table is None else table[:, 6, None, None]
        for side, (points, out, wanted) in enumerate(cases):
            for own in range(self.parts_of_clouds // 2 if wanted else 0):
                others = (x, y)[side ^ (1 - own)]
                mean = self._mean(side, side ^ (1 - own), self.bias[:, own], others, offset)
                torch.mul(points - mean, damping, out=out[:, own])

    def _mean(self, side: int, other: int, bias: Tensor, values: Tensor, offset: int) -> Tensor:
        """Σ_j p_ij V_j of the softmin with this bias."""
        from .triton_kernels import product

        both = self.prepared.rows, self.prepared.columns
        rows, columns = both[side], both[other]
        bias = (bias[:, offset:] if other else bias[:, :offset]).contiguous()
        width, across = self.d, min(triton.WIDEST, max(16, 1 << (self.d - 1).bit_length()))
        top, total = torch.empty(2, self.batch, rows.length, device=self.device)
        out = torch.empty(self.batch, rows.length, width, device=self.device)
        programs = -(-rows.length // 64) * -(-width // across)
        args = (
            rows.first, rows.second, columns.first, columns.second, bias, rows.half_norm, columns.half_norm, values,
            torch.ones_like(bias), top, total, out, self.prepared.slopes, programs, rows.length, columns.length, width,
            rows.blocks, columns.blocks, values.stride(0), self.prepared.width // 64, 0, 1, 1,
        )  # fmt: skip
        variant = (self.prepared.variant, top.data_ptr() % 16, total.data_ptr() % 16)
        constants = (*_constants(self.prepared, self.task.precision), 2, 1, 64, 64, across, 1, 0)
        launch(product, programs * self.batch, args, constants, PRODUCT_OPTIONS, variant)
        return out.div_(total[:, :, None])


class Plan:
    """How the pairs of one step are cut into programs."""

    def __init__(self, descent: Descent, sloped: bool):
        prepared, n, m = descent.prepared, descent.n, descent.m
        all_rows = descent.batch * descent.parts_of_clouds // 2 * (n + m)
        shape = shape_for(prepared, all_rows, sloped, descent.device)
        self.tiles_x, self.tiles_y = -(-n // shape.rows), -(-m // shape.rows)
        blocks_of_rows = descent.batch * descent.parts_of_clouds // 2 * (self.tiles_x + self.tiles_y)
        self.tiles_each = splits_for(shape, blocks_of_rows, max(n, m), descent.device)[1]
        each = shape.columns * self.tiles_each
        self.splits_x, self.splits_y = -(-n // each), -(-m // each)
        self.most_tiles = max(self.tiles_x, self.tiles_y)
        splits = max(self.splits_x, self.splits_y)
        sums = 1 + (descent.d if sloped else 0)
        room = blocks_of_rows * splits * sums * shape.rows if splits > 1 else 1
        self.parts = torch.empty(room, device=descent.device)
        self.counters = torch.zeros(descent.batch * 4 * self.most_tiles, dtype=torch.int32, device=descent.device)
        kind, *rest = _constants(prepared, descent.task.precision)
        self.constants = (kind, rest[0], descent.task.p, *rest[1:], shape.rows, shape.columns, shape.stages, sloped)
        limit = (("maxnreg", shape.registers),) if shape.registers and not INTERPRETED else ()
        self.options = (("num_warps", shape.warps), ("num_stages", shape.stages), *limit)


def shape_for(prepared: Prepared, rows: int, sloped: bool, device: torch.device) -> Shape:
    """The tile of one program, for so many rows in all."""
    if sloped:
        return SLOPED if prepared.width <= 3 else SLOPED_MANY
    return launch_shape(prepared.kind, prepared.width, rows, device)


def _constants(prepared: Prepared, precision: str) -> tuple[int, int, int, int]:
    """KIND, D (0 where the width is only known at run time), CHUNK and PRODUCTS of the kernels."""
    held, chunk = (prepared.width, prepared.width) if prepared.width <= triton.CHUNK else (0, 64)
    return prepared.kind, held, chunk, 1 if precision == "fast" else 3
