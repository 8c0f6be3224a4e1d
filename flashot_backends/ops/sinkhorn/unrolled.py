"""The exact derivative of the iterations that were run: run them again, then walk back through every update.

The loop is unrolled over its potentials, O((n + m) · iterations) numbers, never over pairs. Each half step back is the
vector-Jacobian product of one softmin. Factors of over-relaxation and the number of stages are constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import acceleration
from .acceleration import STAGE_ITERATIONS
from .duals import Column, Duals, Row, Shift, Update, stage_of_annealing
from .problem import log_weights
from .solver import Control, softmin_gradient
from .unbalanced import Penalty, Side, without_the_unreachable


class Run(NamedTuple):
    """What is known of the iterations: their number (B,), errors and gaps (B, looks), stages of annealing (B,)."""

    iterations: Tensor
    errors: Tensor
    gaps: Tensor
    stages: Tensor


class Gradients(NamedTuple):
    """Gradients by the cost's tensors (None where not asked for), weights, ε (or None), start, offsets (or None)."""

    cost: tuple[Tensor, ...] | None
    a: Tensor
    b: Tensor
    epsilon: Tensor | None
    f: Tensor
    alpha: Tensor | None
    beta: Tensor | None


def iterate_gradient(
    operator: Any, a: Tensor, b: Tensor, f: Tensor, control: Control, penalty: Penalty | None, run: Run,
    grads: tuple[Tensor, Tensor], need_cost: bool, need_epsilon: bool,
) -> Gradients:
    """Vector-Jacobian product of ``iterate``, given the gradients (B, n) and (B, m) by its potentials."""
    weights = (a, b) if penalty is None else without_the_unreachable(operator, a, b)
    duals = Duals(operator, log_weights(weights[0]), log_weights(weights[1]), penalty)
    walk = _Walk(duals, grads, need_cost, need_epsilon)
    tape = list(_annealing(duals, torch.where(weights[0] > 0, f, 0.0), run))
    f = tape[-1][1] if tape else torch.where(weights[0] > 0, f, 0.0)
    ends = run.iterations.cpu() - STAGE_ITERATIONS * run.stages.cpu()
    steps = list(_main_loop(duals, f, control, run, ends))
    for update, end in reversed(steps):
        walk.back(update, end)
    for update, _ in reversed(tape):
        walk.back(update, None)
    walk.finish()
    by_logs = zip(weights, (walk.by_log_a, walk.by_log_b), strict=True)
    by_a, by_b = (torch.where(weight > 0, by / weight, 0.0) for weight, by in by_logs)
    return Gradients(walk.cost, by_a, by_b, walk.by_epsilon, walk.by_f, walk.by_alpha, walk.by_beta)


def _annealing(duals: Duals, f: Tensor, run: Run) -> Iterator[tuple[Update, Tensor]]:
    for stage in range(int(run.stages.max()) if len(run.stages) else 0, 0, -1):
        updates = list(stage_of_annealing(duals, f, stage, run.stages >= stage))
        yield from updates
        f = updates[-1][1]


def _main_loop(
    duals: Duals, f: Tensor, control: Control, run: Run, ends: Tensor
) -> Iterator[tuple[Update, Tensor | None]]:
    """The updates, and with a row update which problems end with it, (B,)."""
    replay = _Replay(control, run, ends, duals)
    g, omega = torch.zeros_like(duals.log_b), None
    massless = duals.log_b == -torch.inf
    some_massless = bool(massless.any())
    softmin = duals.columns_of(f)
    for k in range(1, max(ends.tolist(), default=0) + 1):
        if some_massless:  # sweeps pass over them; what they are plays a part at the end only
            softmin = torch.where(massless, duals.columns_of(f), softmin)
            omega = omega if omega is None else torch.where(massless, 1.0, omega)
        update: Update = Column(duals, g, f, softmin, omega)
        g = duals.columns(g, softmin, omega)
        yield update, None
        looked, omega = replay.look(k)
        if duals.penalty is not None and bool(looked.any()):
            yield Shift(duals, f, g, looked), None
            shift = duals.translation(f, g, looked)
            f, g = f + shift, g - shift
        swept = duals.sweep(g, f, omega)
        yield Row(duals, f, g, swept.softmin, omega, None), ends == k
        f, softmin, omega = swept.f, swept.g, replay.column(k)


class _Replay:
    """Which iterations were looked at, and the factors of relaxation that followed."""

    def __init__(self, control: Control, run: Run, ends: Tensor, duals: Duals):
        self.control, self.ends, self.like, self.translated = control, ends, run.errors, duals.penalty is not None
        self.never = torch.zeros(len(ends), dtype=torch.bool)
        self.seen, self.gaps = ~run.errors.isnan().cpu(), run.gaps.cpu()
        self.gap = duals.floor().clamp(min=control.first_gap)
        self.previous, self.last = self.gap, torch.zeros(len(ends), dtype=torch.int64)

    def look(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Whether (B,), and the factors (B, 1) of the row update."""
        if not (self.control.relaxes or self.translated):
            return self.never, None
        slot, looked = self.control.slot(k), self._looked(k)
        omega = torch.where(looked, 1.0, self._omega(2 * (k - self.last)))
        self.previous = torch.where(looked, self.gap, self.previous)
        self.gap = torch.where(looked, self.gaps[:, slot].double(), self.gap)
        self.last = torch.where(looked, k, self.last)
        return looked, self._column(omega)

    def column(self, k: int) -> Tensor | None:
        """The factors (B, 1) of the column update."""
        if not self.control.relaxes:
            return None
        omega = self._omega(2 * (k - self.last) + 1)
        return self._column(torch.where(self._looked(k + 1), 1.0, omega) if self.translated else omega)

    def _looked(self, k: int) -> Tensor:
        ending = self.ends == k
        at_slot = (k - 1) % self.control.check_every == 0 and k <= self.control.max_iterations
        return self.seen[:, self.control.slot(k)] | ending if at_slot else ending

    def _omega(self, half_step: Tensor) -> Tensor:
        return acceleration.omega(self.gap, self.previous, half_step)

    def _column(self, omega: Tensor) -> Tensor | None:
        if not self.control.relaxes:
            return None
        return omega[:, None].to(self.like.device, self.like.dtype)


class _Walk:
    """The way back: gradients by the present potentials, and what every half step adds to those by the inputs."""

    def __init__(self, duals: Duals, grads: tuple[Tensor, Tensor], need_cost: bool, need_epsilon: bool):
        self.grads, self.need_cost, self.need_epsilon = grads, need_cost, need_epsilon
        self.by_f, self.by_g = (torch.zeros_like(grad) for grad in grads)
        self.cost: tuple[Tensor, ...] | None = None
        self.by_log_a, self.by_log_b = torch.zeros_like(duals.log_a), torch.zeros_like(duals.log_b)
        self.epsilon = duals.operator.epsilon
        self.by_epsilon = torch.zeros_like(self.epsilon) if need_epsilon else None
        self.by_alpha, self.by_beta = self._offsets(duals.penalty)
        self.pulls: tuple[Any, Any] | None = None  # an operator, and what it has for many softmins

    def _offsets(self, penalty: Penalty | None) -> list[Tensor | None]:
        sides: tuple[Any, ...] = (None, None) if penalty is None else penalty
        return [None if side is None or side.offset is None else torch.zeros_like(side.offset) for side in sides]

    def back(self, update: Update, end: Tensor | None) -> None:
        """Pass one update; gradients by the result come in with the row update that ``end``s a problem."""
        if isinstance(update, Shift):
            self._shift(update)
        elif isinstance(update, Row):
            if end is not None and bool(end.any()):
                here, (grad_f, grad_g) = end[:, None].to(self.by_f.device), self.grads
                self.by_f = self.by_f + torch.where(here, grad_f, 0.0)
                self.by_g = self.by_g + torch.where(here, grad_g, 0.0)
            self._row(update)
        else:
            self._column(update)

    def _row(self, update: Row) -> None:
        passing: Tensor | float = 0.0
        by_f = self.by_f
        if update.taking_part is not None:
            taken = update.taking_part[:, None].to(by_f.device)
            by_f, passing = torch.where(taken, by_f, 0.0), torch.where(taken, 0.0, by_f)
        penalty = update.duals.penalty
        by_old, by_softmin, by_offset = self._follow(update, penalty and penalty.rows, by_f)
        self.by_g = self.by_g - self._softmin(update, update.duals.log_b, by_softmin, self.by_log_b)
        self.by_f = by_old if update.taking_part is None else passing + by_old
        if self.by_alpha is not None:
            self.by_alpha += by_offset

    def _column(self, update: Column) -> None:
        penalty = update.duals.penalty
        by_old, by_softmin, by_offset = self._follow(update, penalty and penalty.columns, self.by_g)
        self.by_f = self.by_f - self._softmin(update, update.duals.log_a, by_softmin, self.by_log_a, transposed=True)
        self.by_g = by_old
        if self.by_beta is not None:
            self.by_beta += by_offset

    def _follow(self, update: Row | Column, side: Side | None, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """Gradients by the old potential, the softmin and the offset; the one by ε is added up."""
        epsilon = update.duals.operator.epsilon[:, None]
        rule = side.rule(epsilon[:, 0]) if side is not None else None
        target = rule.target(update.softmin) if rule is not None else update.softmin
        by_old, by_target = torch.zeros_like(grad), grad
        if update.omega is not None:
            by_old, by_target, by_epsilon = relaxed_gradient(update.old, target, update.omega, epsilon, grad)
            self._add_epsilon(update, by_epsilon)
        if side is None or rule is None:
            return by_old, by_target, 0.0
        whole = update.softmin if side.offset is None else update.softmin + side.offset
        slope = torch.where(by_target == 0, 0.0, by_target * whole)
        self._add_epsilon(update, -side.tightness * rule.damping**2 * slope)  # type: ignore[operator]
        return by_old, rule.damping * by_target, (rule.damping - 1) * by_target  # type: ignore[operator]

    def _add_epsilon(self, update: Row | Column, by_epsilon: Tensor) -> None:
        """In a stage of annealing ε is the problem's times a constant."""
        if self.by_epsilon is not None:
            self.by_epsilon += by_epsilon.sum(-1) * update.duals.operator.epsilon / self.epsilon

    def finish(self) -> None:
        """Add up what has been put off."""
        if self.pulls is not None and self.pulls[1] is not None and self.need_cost:
            self._add_cost(self.pulls[1].cost())
        self.pulls = None

    def _softmin(
        self, update: Row | Column, log_weight: Tensor, grad: Tensor, by_log: Tensor, transposed: bool = False
    ) -> Tensor:
        """Pass a softmin of log weight + potential/ε: add to the gradient by the former.

        Returns Σ_i P_ij grad_i, which is taken from the gradient by the potential.
        """
        operator, given = update.duals.operator, update.given
        epsilon = operator.epsilon[:, None]
        if not self.need_epsilon:
            if self.pulls is None or self.pulls[0] is not operator:
                self.finish()
                self.pulls = operator, operator.pulls(self.need_cost)
            if self.pulls[1] is not None:
                shares = self.pulls[1].pull(transposed, log_weight, given, update.softmin, grad)
                by_log.addcmul_(epsilon, shares, value=-1)
                return shares  # type: ignore[no-any-return]
        operator = operator.T if transposed else operator
        h = torch.where(log_weight == -torch.inf, log_weight, log_weight + given / epsilon)
        cost, by_h, by_epsilon = softmin_gradient(operator, h, update.softmin, grad, self.need_cost, self.need_epsilon)
        if by_epsilon is not None:
            product = torch.where(by_h == 0, 0.0, by_h * given)
            self._add_epsilon(update, by_epsilon[:, None] - product.sum(-1, keepdim=True) / epsilon**2)
        if cost is not None:
            self._add_cost(_transposed(cost) if transposed else cost)
        by_log += by_h
        return -by_h / epsilon

    def _add_cost(self, cost: tuple[Tensor, ...]) -> None:
        if self.cost is None:
            self.cost = tuple(torch.zeros_like(part) for part in cost)
        for total, part in zip(self.cost, cost, strict=True):
            total += part

    def _shift(self, update: Shift) -> None:
        """Pass f + κ and g − κ: κ moves with the shares that points have of the masses that f and g ask for."""
        duals, penalty = update.duals, update.duals.penalty
        assert penalty is not None
        where = update.where[:, None].to(self.by_f.device)
        by_shift = (self.by_f.sum(-1) - self.by_g.sum(-1))[:, None] * penalty.both
        by_shift = torch.where(where, by_shift, 0.0)
        by_rows = by_shift * penalty.rows.shares(duals.log_a, update.f)
        by_columns = -by_shift * penalty.columns.shares(duals.log_b, update.g)
        self.by_log_a += by_rows
        self.by_log_b += by_columns
        by_rows, by_columns = -penalty.rows.tightness * by_rows, -penalty.columns.tightness * by_columns
        self.by_f, self.by_g = self.by_f + by_rows, self.by_g + by_columns
        if self.by_alpha is not None and self.by_beta is not None:
            self.by_alpha += by_rows
            self.by_beta += by_columns


def relaxed_gradient(
    old: Tensor, target: Tensor, omega: Tensor, epsilon: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``relaxed`` by old, target and ε, (B, n) each."""
    step = target - old
    t = torch.where(step.isfinite(), step, 0.0).clamp(min=0) / epsilon
    bounded = (step > 0) & (t.log1p() < (omega - 1) * t)
    beyond = torch.where(bounded, 1 / (1 + t), omega - 1)
    beyond = torch.where(step.isfinite(), beyond, 0.0)
    by_epsilon = torch.where(bounded & step.isfinite(), grad * (t.log1p() - t / (1 + t)), 0.0)
    return -beyond * grad, (1 + beyond) * grad, by_epsilon


def _transposed(cost: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (cost[0].transpose(-1, -2),) if len(cost) == 1 else (cost[1], cost[0])
