"""Annealing on the card: a queue of launches that leads from stage to stage, each under a smaller ε, and waits for
nobody.

All stages run in the same buffers, one after the other: of the points under the present ε, of the potentials, and of ε
itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import triton
from .launch import Launch
from .triton_loop import Control, Vectors, in_rows, penalties


class Schedule(NamedTuple):
    """So many stages, the factor between their ε, the iterations of each, and the gap that those are relaxed by."""

    stages: int
    factor: float
    iterations: int
    gap: float


class Stages(Vectors):
    """The stages of a batch of problems, as many for each."""

    steady = True

    def __init__(
        self, op: triton.Fused, a: Tensor, b: Tensor, f: Tensor, schedule: Schedule, reach: Tensor | None = None,
        offsets: tuple[Tensor, Tensor] | None = None,
    ):  # fmt: skip
        self.schedule, self.reach, self.exact_epsilon = schedule, reach, op.exact_epsilon
        self.control = Control(schedule.iterations, 0.0, schedule.iterations, 0, schedule.gap)
        self.epsilon, self.penalty = torch.empty_like(op.exact_epsilon), op.zeros(op.batch, 8).float()
        self.f = torch.empty(f.shape, device=op.device).copy_(f)
        self._cool(schedule.stages)
        op = triton.Fused(op.cost, self.epsilon, op.precision)
        super().__init__(op, offsets, self.epsilon)
        self.done, self.gaps, self.cycles = op.zeros(op.batch), op.new(op.batch, 2), op.zeros(op.batch, 2)
        self.column_gaps = self.gaps
        self.slopes, self.preparation = op.prepared.slopes, op.prepared.launches
        self.enter, self.leave = self._enter(op, in_rows(a), in_rows(b)), self._leave(op)
        self.first, self.steps, self.last = self._steps(op)
        self.translate = None if reach is None else self._translate(op)

    def run(self) -> Tensor:
        """Launch all stages; what is prepared is prepared for the first of them."""
        for stage in range(self.schedule.stages, 0, -1):
            if stage < self.schedule.stages:
                self._prepare(stage)
            self._stage()
        return self.f

    def _stage(self) -> None:
        self.enter()
        for one in self.lay:
            one()
        self.first(0)
        for k in range(1, self.schedule.iterations):
            self.steps[min(k, 2 + k % 2)](k)
        self.last(self.schedule.iterations)
        if self.translate is not None:
            self.translate(self.schedule.iterations)
        self.leave()

    def _cool(self, stage: int) -> None:
        """Set ε and what follows from it."""
        torch.mul(self.exact_epsilon, self.schedule.factor**stage, out=self.epsilon)
        if self.reach is not None:
            self.penalty.copy_(penalties(self.reach, self.epsilon, self.control))

    def _prepare(self, stage: int) -> None:
        """Prepare the costs for a stage's ε."""
        self._cool(stage)
        if self.preparation:
            for one in self.preparation:
                one()
        else:
            self.slopes.copy_(triton.slopes_of(self.epsilon))

    def _enter(self, op: triton.Fused, a: Tensor, b: Tensor) -> Launch:
        from .triton_kernels import enter

        rows, columns = op.prepared.rows, op.prepared.columns
        programs = rows.blocks + columns.blocks
        args = (
            a, b, self.f, self.epsilon, rows.half_norm, self.u, self.log_a, self.log_b, self.row_bias,
            self.column_bias, self.gaps, self.penalty, self.schedule.gap, programs, rows.length, columns.length,
            rows.blocks, columns.blocks, a.stride(0), b.stride(0), self.epsilon.stride(0),
        )  # fmt: skip
        constants, variant = (op.prepared.kind, triton.BLOCK), (a.data_ptr() % 16, b.data_ptr() % 16)
        return Launch(enter, programs * op.batch, args, constants, (("num_warps", 4),), variant)

    def _leave(self, op: triton.Fused) -> Launch:
        from .triton_kernels import leave

        rows = op.prepared.rows
        args = (self.u, rows.half_norm, self.epsilon, self.f, rows.blocks, rows.length, self.epsilon.stride(0))
        constants = (op.prepared.kind, triton.BLOCK)
        return Launch(leave, rows.blocks * op.batch, args, constants, (("num_warps", 4),))
