"""Annealed symmetric updates where the costs are matrices: in every step two softmins, and what follows from them."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, Launch
from .operator import Cost
from .triton import PAD, Fused, Update, on
from .triton_kernels import kernel, place
from .triton_symmetric import Steps, numbers_for, table_for
from .triton_symmetric_kernels import told_by


@kernel
def halfway(
    u_x, u_y, f, g, log_x, log_y, bias_x, bias_y, slopes, table,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, k: tl.int32, batch: tl.int32,
    listed: tl.int32, BLOCK: tl.constexpr,
):
    """f ← keep f + share · u for both sides, their biases, and the factor of the costs, at the temperature that comes.

    ``u`` holds −log₂ of the row sums. A program takes a block of rows of x, or of y.
    """
    b, block = place(programs)
    told, count, blocks = u_x, n, blocks_x
    out, log, bias, local = f, log_x, bias_x, block
    if block >= blocks_x:
        told, count, blocks = u_y, m, blocks_y
        out, log, bias, local = g, log_y, bias_y, block - blocks_x
    _, _, share, keep, next_bits, _, _ = told_by(table, k, b, batch, listed)
    lanes = local * BLOCK + tl.arange(0, BLOCK)
    inside, at = lanes < count, b * blocks * BLOCK + lanes
    old = tl.load(out + at, mask=inside, other=0.0)
    new = tl.where(share == 0.0, old, keep * old + share * tl.load(told + at, mask=inside, other=0.0))
    weight = tl.load(log + at)
    tl.store(out + at, new, mask=inside)
    tl.store(bias + at, tl.where(weight == float("-inf"), weight, weight + new * next_bits))
    if block == 0:
        tl.store(slopes + b, -next_bits)


def anneal(matrix: Tensor, a: Tensor, b: Tensor, steps: Steps, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the steps on matrices (B, n, m) with weights (B, n) and (B, m) from potentials that are given."""
    with on(matrix.device):
        return _anneal(matrix, a, b, steps, f, g)


def _anneal(matrix: Tensor, a: Tensor, b: Tensor, steps: Steps, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    batch, n, m = matrix.shape
    stream = 0 if INTERPRETED else torch._C._cuda_getCurrentRawStream(matrix.device.index)
    table = table_for(numbers_for(steps, 1, 0.0), matrix.device, stream)
    epsilon = torch.tensor([step[0] for step in steps[0]], dtype=torch.float64, device=matrix.device)
    op = Fused(Cost(None, None, matrix), epsilon.expand(batch))
    rows, columns = Side(op, a, f, table), Side(op.T, b, g, table)
    updates = rows.update(columns.bias), columns.update(rows.bias)
    tensors = (
        rows.sums, columns.sums, rows.potential, columns.potential, rows.log, columns.log, rows.bias, columns.bias,
        op.prepared.slopes, table,
    )  # fmt: skip
    programs = rows.blocks + columns.blocks
    numbers = programs, n, m, rows.blocks, columns.blocks, 0, batch, int(len(steps[0]) > 1)
    then = Launch(halfway, programs * batch, (*tensors, *numbers), (PAD,), (("num_warps", 4),), at=len(tensors) + 5)
    for k in range(len(steps)):
        for update in updates:
            update()
        then(k)
    return rows.potential[:, :n], columns.potential[:, :m]


class Side:
    """The rows of an operator: padded vectors (B, padded) of the logarithms of weights, potentials, biases and sums."""

    def __init__(self, op: Fused, weight: Tensor, potential: Tensor, table: Tensor):
        self.op, self.blocks, count = op, op.prepared.rows.blocks, weight.shape[1]
        self.log = op.new(op.batch, self.blocks * PAD).fill_(-torch.inf)
        self.log[:, :count] = weight.clamp(min=0).log2()
        self.potential = op.new(*self.log.shape).zero_()
        self.potential[:, :count] = potential
        self.bias = self.log + self.potential * table[0, :, 1, None]
        self.sums, self.rest = op.new(2, *self.log.shape).unbind()

    def update(self, bias: Tensor) -> Launch:
        """The launch that sums every row over the columns, which have this bias."""
        none, rest = self.op.zeros(self.op.batch), self.rest
        plain = self.op.new(self.op.batch, 8).zero_()  # neither damped nor relaxed
        return Update(self.op).bind(bias, self.sums, rest, self.sums, rest, rest, none, rest, none, plain)
