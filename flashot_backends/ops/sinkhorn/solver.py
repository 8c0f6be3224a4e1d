"""The loop: alternating updates until the column marginal is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels import ahead
from flashot_backends.kernels.sinkhorn.operator import Cost, Sweep

from ... import dispatch
from ...config import settings
from . import acceleration
from .acceleration import STAGE_ITERATIONS, Pace
from .duals import Duals, stage_of_annealing
from .problem import log_weights
from .unbalanced import Penalty, without_the_unreachable

ERROR_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda violation: violation.abs().sum(-1),
    "l2": lambda violation: violation.square().sum(-1).sqrt(),
}


def marginal_error(norm: str, b: Tensor, ratio: Tensor, wanted: Tensor | float = 1.0) -> Tensor:
    """‖Pᵀ1 − b · wanted‖, given present column sums over b; columns without mass say nothing."""
    return ERROR_NORMS[norm](torch.where(b > 0, b * (ratio - wanted), 0.0))


class Request(NamedTuple):
    """What a kernel is asked to serve."""

    array: str
    device: str
    kind: str  # "points" or "matrix"
    dtype: torch.dtype
    metric: str
    shape: tuple[int, int, int]
    width: int = 0  # coordinates of a point


class Control(NamedTuple):
    """When to stop, and how to get there."""

    max_iterations: int
    tolerance: float
    check_every: int
    norm: str
    acceleration: str = ""

    @property
    def relaxes(self) -> bool:
        """Whether updates are over-relaxed. A tolerance of 0 asks for so many iterations: "auto" runs them plain."""
        asked = self.acceleration in ("overrelaxation", "annealing")
        return asked or (self.acceleration == "auto" and self.tolerance > 0)

    @property
    def anneals(self) -> bool:
        """Whether stages under larger ε come first."""
        return self.acceleration == "annealing"

    @property
    def first_gap(self) -> float:
        """What over-relaxation starts from; 1 for plain iterations."""
        return acceleration.first_gap(self.check_every) if self.relaxes else 1.0

    @property
    def looks(self) -> int:
        """How often plain iterations are looked at, at most."""
        return self.slot(self.max_iterations) + 1

    def slot(self, iteration: int) -> int:
        """The place in the history of a look after this iteration."""
        return -((1 - iteration) // self.check_every)


class State(NamedTuple):
    """The outcome by batch element: potentials (B, n) and (B, m), iterations, error, and whether it is small.

    By batch element and look, (B, looks): the error, NaN where nothing was looked at, and the gap that relaxes the
    iterations after it, 1 for plain ones. ``stages`` of annealing, (B,), count among the iterations.
    """

    f: Tensor
    g: Tensor
    iterations: Tensor
    error: Tensor
    converged: Tensor
    errors: Tensor
    gaps: Tensor
    stages: Tensor


def expect_kernels(x: Tensor) -> None:
    """Begin what Triton does before its first kernel, where its kernels may serve: they leave float64 to others."""
    if x.is_cuda and x.dtype != torch.float64:
        ahead.begin()


def make_operator(x: Tensor, y: Tensor | None, epsilon: Tensor, metric: str, precision: str, backend: str) -> Any:
    """Have the kernel in charge prepare the costs.

    ``precision`` may name a dtype after a colon: that of costs that are held wider, for gradients to add up there.
    """
    expect_kernels(x)
    precision, _, narrow = precision.partition(":")
    if narrow:
        x, y = (None if part is None else part.to(getattr(torch, narrow)) for part in (x, y))  # type: ignore[assignment]
    cost = Cost(x, y, None, metric) if y is not None else Cost(None, None, x)
    kind = "matrix" if y is None else "points"
    request = Request("torch", x.device.type, kind, x.dtype, metric, cost.size, 0 if y is None else x.shape[-1])
    kernel = dispatch.select("sinkhorn", request, _names(backend))
    return kernel.operator(cost, epsilon, precision or settings().precision)


def _names(backend: str) -> str | tuple[str, ...] | None:
    names = tuple(backend.split("|")) if backend else None
    return names[0] if names is not None and len(names) == 1 else names


class Missed(NamedTuple):
    """What it costs to miss marginals: the reaches (B, 2) of rows and columns, infinite where balanced, and the cost's
    terms of its row (B, n) or its column (B, m) alone, if there are such."""

    reach: Tensor
    offsets: tuple[Tensor, Tensor] | None

    def select(self, index: Tensor | slice) -> Missed:
        """Of some problems."""
        offsets = self.offsets
        return Missed(self.reach[index], None if offsets is None else (offsets[0][index], offsets[1][index]))


def on_device(
    operator: Any, a: Tensor, b: Tensor, f: Tensor, control: Control, inspect: Callable[[dict[str, float]], None],
    missed: Missed | None = None,
) -> State | None:
    """``iterate`` by the loop that a kernel has of its own, or None if it has none that serves this."""
    hard = control.anneals or (missed is not None and (missed.offsets is not None or control.check_every == 1))
    if hard and not operator.whole_loop:
        return None
    if missed is not None:
        a, b = without_the_unreachable(operator, a, b)
    if control.anneals:
        return _annealed(operator, a, b, f, control, inspect, missed)
    found = operator.iterate(a, b, f, *control[:4], control.first_gap, inspect, *_missed(missed))
    return None if found is None else State(*(*found, torch.zeros_like(found[2])))


def _missed(missed: Missed | None) -> tuple[Any, ...]:
    """As a kernel takes it."""
    if missed is None:
        return (None,)
    return (missed.reach,) if missed.offsets is None else tuple(missed)


def _annealed(
    operator: Any, a: Tensor, b: Tensor, f: Tensor, control: Control, inspect: Callable[[dict[str, float]], None],
    missed: Missed | None,
) -> State:
    """Stages, then the rest of the iterations; together go problems with equally many stages."""
    stages, out = _stages(operator, control), _blank(operator, control)
    counts = stages.unique().tolist()
    for count in counts:
        index: Any = slice(None) if len(counts) == 1 else (stages == count).nonzero()[:, 0].to(f.device)
        part = operator if len(counts) == 1 else operator.select(index)
        given, some = (a[index], b[index]), missed and missed.select(index)
        start, spent = f[index], STAGE_ITERATIONS * count
        if count:
            gap = float(acceleration.stage_gap())
            how = count, acceleration.STAGE_FACTOR, STAGE_ITERATIONS, gap
            start = part.anneal(*given, start, *how, *_missed(some))
        limit = control.max_iterations - spent
        found = part.iterate(*given, start, limit, *control[1:4], control.first_gap, inspect, *_missed(some))
        for table, value in zip(out, (*found[:2], found[2] + spent, *found[3:5]), strict=False):
            table[index] = value
        for table, value in zip((out.errors, out.gaps), found[5:], strict=True):
            table[index, : value.shape[1]] = value
        out.stages[index] = count
    return out


def iterate(operator: Any, a: Tensor, b: Tensor, f: Tensor, control: Control, penalty: Penalty | None = None) -> State:
    """Alternate from the row potentials ``f``: columns, then rows, so that rows are exact at the end.

    Elements of the batch that have converged leave it; the others go on.
    """
    a, b = (a, b) if penalty is None else without_the_unreachable(operator, a, b)
    duals = Duals(operator, log_weights(a), log_weights(b), penalty)
    loop = Loop(duals, b, torch.where(a > 0, f, 0.0), control)
    loop.anneal(_stages(operator, control))
    return loop.run()


def _stages(operator: Any, control: Control) -> Tensor:
    """How many stages of annealing each problem begins with."""
    if operator.batch == 0 or not control.anneals:
        return torch.zeros(operator.batch, dtype=torch.int64)
    return acceleration.stages(acceleration.deviation(operator.cost), operator.exact_epsilon, control.max_iterations)


class Loop:
    """The iterations of a batch, from look to look."""

    def __init__(self, duals: Duals, b: Tensor, f: Tensor, control: Control):
        self.duals, self.b, self.f, self.g, self.control = duals, b, f, torch.zeros_like(b), control
        batch = len(f)
        self.iteration, self.out = 0, _blank(duals.operator, control)
        self.active, self.limit = torch.arange(batch), torch.full((batch,), control.max_iterations)
        self.pace = acceleration.start(batch, control.check_every, control.relaxes, duals.floor())

    def anneal(self, stages: Tensor) -> None:
        """Start where larger regularisations lead. Their iterations count."""
        self.limit = self.limit - STAGE_ITERATIONS * stages
        self.out.stages.copy_(stages)
        for stage in range(int(stages.max()) if len(stages) else 0, 0, -1):
            index = (stages >= stage).nonzero()[:, 0].to(self.f.device)
            everybody = torch.ones_like(index, dtype=torch.bool)
            found = [self.f[index]]
            for _, after in stage_of_annealing(self.duals.select(index), found[0], stage, everybody):
                found = [after]
            self.f[index] = found[0]

    def run(self) -> State:
        """Iterate until nobody is left."""
        if len(self.active):
            self.g = self.duals.plain_columns(self.f)
            self._plan_cycle()
        while len(self.active):
            self.step()
        return self.out

    def step(self) -> None:
        """One iteration."""
        self.iteration += 1
        looking = self.iteration == self.next_look
        if looking and self.duals.penalty is not None:
            shift = self.duals.translation(self.f, self.g, self._due(self.iteration))
            self.f, self.g = self.f + shift, self.g - shift
        before, swept = self.f, self.duals.sweep(self.g, self.f, self._omega(0))
        self.f, softmin = swept.f, swept.g
        if looking:
            softmin = softmin[self._look(self._due(self.iteration), before, swept)]
        if len(self.active):
            self.g = self.duals.columns(self.g, softmin, self._omega(1))

    def _due(self, iteration: int) -> Tensor:
        return acceleration.due(self.pace, iteration, self.limit)

    def _omega(self, later: int) -> Tensor | None:
        """The factors (B, 1) of this iteration's row update (0) or column update (1); None where nothing is relaxed."""
        if self.omegas is None:
            return None
        place = 2 * (self.iteration - self.begun) + later - 1
        return self.omegas[:, place : place + 1]

    def _plan_cycle(self) -> None:
        """When somebody is looked at next, and all factors until then: from the columns now to the rows there.

        The rows of a look are plain. So are the columns before a translation, or else it would leave something of
        what it is to remove.
        """
        pace, self.begun = self.pace, self.iteration
        self.next_look = int(torch.minimum(pace.last + pace.cycle, self.limit).min())
        self.omegas: Tensor | None = None
        if not self.control.relaxes:
            return
        steps = 2 * (self.iteration - pace.last)[:, None] + torch.arange(1, 2 * (self.next_look - self.iteration) + 1)
        omegas = acceleration.omega(pace.gap[:, None], pace.previous[:, None], steps)
        omegas[self._due(self.next_look), -1 if self.duals.penalty is None else -2 :] = 1.0
        self.omegas = omegas.to(self.f.device, self.f.dtype)

    def _look(self, looked: Tensor, before: Tensor, swept: Sweep) -> Tensor:
        """Find the errors, let go who is done, and return who goes on."""
        assert swept.ratio is not None
        error = self._error(swept.ratio)
        seen = error.double().cpu()
        done = looked & ((seen < self.control.tolerance) | (self.limit == self.iteration))
        self._note(self.out.errors, looked, error)
        keep = (~done).nonzero()[:, 0]
        if bool(done.any()):
            self._record(done, before, error)
            self._select(keep)
        if len(self.active):
            self._learn(looked[keep], seen[keep])
            self._plan_cycle()
        return keep.to(self.f.device)

    def _error(self, ratio: Tensor) -> Tensor:
        penalty = self.duals.penalty
        wanted: Tensor | float = 1.0 if penalty is None else penalty.columns.lost(self.g).exp()
        return marginal_error(self.control.norm, self.b, ratio, wanted)

    def _note(self, table: Tensor, looked: Tensor, values: Tensor) -> None:
        """Write what a look found into the history."""
        where = looked.nonzero()[:, 0]
        found = values[where.to(values.device)].to(table.device, table.dtype)
        table[self.active[where].to(table.device), self.control.slot(self.iteration)] = found

    def _record(self, done: Tensor, before: Tensor, error: Tensor) -> None:
        """Hand over the results of those who are done."""
        out, where = self.out, done.nonzero()[:, 0]
        index, place = self.active[where].to(self.f.device), where.to(self.f.device)
        out.f[index], out.g[index] = self.f[place], with_massless(self.duals, self.g, before)[place]
        out.iterations[index] = self.iteration + STAGE_ITERATIONS * out.stages[index]
        out.error[index], out.converged[index] = error[place], error[place] < self.control.tolerance

    def _select(self, keep: Tensor) -> None:
        """Go on with some problems."""
        index = keep.to(self.f.device)
        self.active, self.limit, self.pace = self.active[keep], self.limit[keep], self.pace.select(keep)
        self.b, self.f, self.g = self.b[index], self.f[index], self.g[index]
        if len(keep):
            self.duals = self.duals.select(index)

    def _learn(self, looked: Tensor, seen: Tensor) -> None:
        """Set the pace by the errors seen."""
        if self.control.relaxes:
            learnt = acceleration.learn(self.pace, seen, self.iteration, self.control.check_every, self.duals.floor())
        else:
            learnt = self.pace._replace(last=torch.full_like(self.pace.last, self.iteration))
        self.pace = Pace(*(torch.where(looked, new, old) for new, old in zip(learnt, self.pace, strict=True)))
        self._note(self.out.gaps, looked, self.pace.gap)


def with_massless(duals: Duals, g: Tensor, f: Tensor) -> Tensor:
    """Sweeps pass over columns without mass; give them the potential that belongs to ``f``."""
    massless = duals.log_b == -torch.inf
    return torch.where(massless, duals.plain_columns(f), g) if bool(massless.any()) else g


def _blank(operator: Any, control: Control) -> State:
    def new(*shape: int, dtype: torch.dtype, value: float = 0) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=operator.device)

    batch, real, whole = operator.batch, operator.dtype, torch.int64
    return State(
        new(batch, operator.rows, dtype=real), new(batch, operator.columns, dtype=real), new(batch, dtype=whole),
        new(batch, dtype=real), new(batch, dtype=torch.bool), *_history(operator, control), new(batch, dtype=whole),
    )  # fmt: skip


def _history(operator: Any, control: Control) -> tuple[Tensor, Tensor]:
    """The tables of errors and of gaps, before anything was looked at."""
    shape, table = (operator.batch, control.looks), operator.epsilon.new_full
    return table(shape, math.nan), table(shape, 1.0)


def softmin_gradient(
    operator: Any, h: Tensor, out: Tensor, grad: Tensor, need_cost: bool, need_epsilon: bool
) -> tuple[tuple[Tensor, ...] | None, Tensor, Tensor | None]:
    """Gradients of a softmin by the cost's tensors, h and ε; none through left-out columns and infinite results."""
    nowhere = out == torch.inf
    out, grad = torch.where(nowhere, 0.0, out), torch.where(nowhere, 0.0, grad)
    cost, by_h, by_epsilon = operator.softmin_gradient(h, out, grad, need_cost, need_epsilon)
    return cost, torch.where(h == -torch.inf, 0.0, by_h), by_epsilon
