"""Updates of the potentials: what a loop is made of, and what its derivative walks back through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import Rule, Sweep, scaling

from . import acceleration
from .unbalanced import Penalty


class Duals(NamedTuple):
    """The dual of a batch of problems: costs under some ε, logarithms of the weights, penalties."""

    operator: Any
    log_a: Tensor
    log_b: Tensor
    penalty: Penalty | None

    def select(self, index: Tensor) -> Duals:
        """Of some problems."""
        penalty = self.penalty and self.penalty.select(index)
        return Duals(self.operator.select(index), self.log_a[index], self.log_b[index], penalty)

    def at(self, factor: float) -> Duals:
        """Under ε times a factor."""
        return self._replace(operator=self.operator.at(self.operator.exact_epsilon * factor))

    def row_rule(self, omega: Tensor | None) -> Rule | None:
        """How row potentials follow; None where they are their softmin."""
        if self.penalty is not None:
            return self.penalty.rows.rule(self.operator.epsilon, omega)
        return None if omega is None else Rule(omega)

    def column_rule(self, omega: Tensor | None) -> Rule:
        """How column potentials follow."""
        if self.penalty is not None:
            return self.penalty.columns.rule(self.operator.epsilon, omega)
        return Rule(omega)

    def columns_of(self, f: Tensor) -> Tensor:
        """The softmin of the columns that belongs to f."""
        return self.operator.T.softmin(scaling(self.log_a, f, self.operator.epsilon))  # type: ignore[no-any-return]

    def plain_columns(self, f: Tensor) -> Tensor:
        """The column potentials that follow from f, also where there is no mass."""
        return self.column_rule(None).target(self.columns_of(f))

    def sweep(self, g: Tensor, f: Tensor, omega: Tensor | None) -> Sweep:
        """Rows from g, then the columns' softmin."""
        return self.operator.sweep(self.log_a, self.log_b, g, f, self.row_rule(omega))  # type: ignore[no-any-return]

    def columns(self, g: Tensor, softmin: Tensor, omega: Tensor | None) -> Tensor:
        """The columns that follow from their softmin."""
        return self.column_rule(omega).follow(g, softmin, self.operator.epsilon)

    def translation(self, f: Tensor, g: Tensor, where: Tensor) -> Tensor:
        """By how much (B, 1) f is to grow and g to fall, in some of the problems."""
        assert self.penalty is not None
        best = self.penalty.translation(self.log_a, self.log_b, f, g)
        return torch.where(where.to(best.device)[:, None], best, 0.0)

    def floor(self) -> Tensor:
        """The least gap that each of these problems can have, (B,) float64 on the host."""
        if self.penalty is None:
            return torch.zeros(len(self.log_a), dtype=torch.float64)
        return (1 - self.penalty.contraction(self.operator.epsilon).double()).clamp(min=0).sqrt().cpu()


class Row(NamedTuple):
    """A row update: f from g, its softmin, and the old f where it is relaxed. Some problems may sit it out."""

    duals: Duals
    old: Tensor
    given: Tensor
    softmin: Tensor
    omega: Tensor | None
    taking_part: Tensor | None


class Column(NamedTuple):
    """A column update: g from f, its softmin, and the old g where it is relaxed."""

    duals: Duals
    old: Tensor
    given: Tensor
    softmin: Tensor
    omega: Tensor | None


class Shift(NamedTuple):
    """A translation: f grows and g falls, both from what is given."""

    duals: Duals
    f: Tensor
    g: Tensor
    where: Tensor


Update = Row | Column | Shift


def stage_of_annealing(duals: Duals, f: Tensor, stage: int, taking_part: Tensor) -> Iterator[tuple[Update, Tensor]]:
    """Updates under ε times a power of four, and the row potentials that each ends with."""
    duals = duals.at(acceleration.STAGE_FACTOR**stage)
    gap, last = torch.maximum(acceleration.stage_gap(), duals.floor()), 2 * acceleration.STAGE_ITERATIONS - 1
    g, softmin = torch.zeros_like(duals.log_b), duals.columns_of(f)
    for h in range(0, last, 2):
        omega = _column(acceleration.omega(gap, gap, torch.tensor(h)), f)
        update: Update = Column(duals, g, f, softmin, omega)
        g = duals.columns(g, softmin, omega)
        yield update, f
        omega = _column(acceleration.omega(gap, gap, torch.tensor(h + 1)), f) if h + 1 < last else None
        swept = duals.sweep(g, f, omega)
        update, softmin = Row(duals, f, g, swept.softmin, omega, taking_part), swept.g
        f = torch.where(taking_part[:, None], swept.f, f)
        yield update, f
    if duals.penalty is not None:
        shift = duals.translation(f, g, taking_part)
        yield Shift(duals, f, g, taking_part), f + shift


def _column(omega: Tensor, like: Tensor) -> Tensor:
    return omega[:, None].to(like.device, like.dtype)
