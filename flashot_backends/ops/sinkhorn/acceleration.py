"""Fewer iterations, with the same fixed point: over-relaxation by Chebyshev's polynomials, and falling ε before it.

Near its limit an alternating iteration is linear, with eigenvalues between 0 and some λ < 1 (Peyré and Cuturi,
"Computational Optimal Transport", 2019, remark 4.14). Relaxing every half step by the factors ω_h of Golub and Varga,
"Chebyshev semi-iterative methods", Numerische Mathematik 3, 1961, divides all errors by T_2N(1/√λ) or more in N
iterations, the best that any N iterations can promise. Over-relaxed Sinkhorn with one factor is Thibault et al.,
"Overrelaxed Sinkhorn-Knopp", 2017; what the best factor is, Lehmann et al., "A note on overrelaxation in the Sinkhorn
algorithm", 2021. λ is not known: it is read off the errors, as Hageman and Young, "Applied Iterative Methods", 1981,
chapter 5, do.

A problem decides only where its error is looked at, from four numbers of its own, so the same rule runs on a device.
Iterations between two looks are a cycle. A look begins with a plain row update, so rows are exact there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import Cost

from .pacing import (
    ENOUGH_FACTOR,
    FIRST_FACTOR,
    GROWTH,
    LEAST_FACTOR,
    LONGEST_CYCLE,
    MOST_STAGES,
    STAGE_FACTOR,
    STAGE_ITERATIONS,
    WIDEST_GAP,
)

STRIP = 1 << 20  # elements of a matrix looked at together


class Pace(NamedTuple):
    """What a problem remembers from one look to the next, (B,) each, on the host."""

    gap: Tensor  # √(1 − λ), float64; 1 relaxes nothing
    previous: Tensor  # the one before the last look: the column update after it may not wait for the error
    cycle: Tensor  # iterations from look to look
    last: Tensor  # the iteration of the last look
    error: Tensor  # the error there, float64; infinite before the first look

    def select(self, index: Tensor) -> Pace:
        """Of some problems."""
        return Pace(*(part[index] for part in self))


def start(batch: int, check_every: int, accelerated: bool, floor: Tensor) -> Pace:
    """Before the first iteration, which is the first look."""
    cycle = torch.full((batch,), check_every)
    gap = floor.clamp(min=first_gap(check_every)) if accelerated else torch.ones_like(floor)
    return Pace(gap, gap, cycle, 1 - cycle, torch.full((batch,), math.inf, dtype=torch.float64))


def first_gap(check_every: int) -> float:
    """The gap that a first cycle relaxes by, before there is an error to learn from."""
    return math.tanh(math.acosh(FIRST_FACTOR) / (2 * check_every))


def due(pace: Pace, iteration: int, limit: Tensor) -> Tensor:
    """Which problems are looked at after this iteration: where the cycle ends, and where the iterations do."""
    return (pace.last + pace.cycle == iteration) | (limit == iteration)


def learn(pace: Pace, error: Tensor, iteration: int, check_every: int, floor: Tensor) -> Pace:
    """The pace after a look that found this error.

    In a cycle of N iterations at λ = 1 − gap², an error of an eigenvalue up to λ is divided by T_2N(1/√λ) = cosh(2Nθ)
    with tanh θ = gap. If the error was divided by less, say by cosh(2Nθ)/z, then there is a larger eigenvalue: the one
    with T_2N(√(λ'/λ)) = z. In logarithms, since these polynomials outgrow numbers.

    An error that did not fall at all is mostly rounding, which over-relaxation multiplies; a cycle with the first gap,
    much nearer to plain updates, leaves little of it.
    """
    divided = torch.where(error < pace.error, error / pace.error, 1.0)
    log_z = _log_factor(pace.gap, 2 * pace.cycle) + divided.log()
    acosh = log_z + (1 - torch.exp(-2 * log_z)).clamp(min=0).sqrt().log1p()
    square = pace.gap**2 - (1 - pace.gap**2) * torch.sinh(acosh / (2 * pace.cycle)) ** 2  # 1 − λ'
    gap = torch.where(log_z > 0, square.clamp(min=0).sqrt(), (GROWTH * pace.gap).clamp(max=WIDEST_GAP))
    cycle = _next_cycle(pace.cycle, gap, iteration, check_every)
    anew = _gap(FIRST_FACTOR, cycle)
    stalled = (error >= pace.error) & (pace.gap < anew)
    gap = torch.maximum(torch.where(stalled, anew, gap), torch.maximum(_gap(LEAST_FACTOR, cycle), floor))
    first = pace.error == math.inf
    gap, cycle = torch.where(first, pace.gap, gap), torch.where(first, pace.cycle, cycle)
    return Pace(gap, pace.gap, cycle, torch.full_like(pace.last, iteration), error)


def _next_cycle(cycle: Tensor, gap: Tensor, iteration: int, check_every: int) -> Tensor:
    longest = min(max(check_every, LONGEST_CYCLE), iteration // 2)
    longer = (gap < _gap(LEAST_FACTOR, cycle)) & (2 * cycle <= longest)
    shorter = (cycle > check_every) & (_log_factor(gap, cycle) > math.log(ENOUGH_FACTOR))
    return torch.where(longer, 2 * cycle, torch.where(shorter, cycle // 2, cycle))


def _log_factor(gap: Tensor, half_steps: Tensor) -> Tensor:
    """log T_h(1/√λ), of what h half steps divide errors by."""
    exponent = half_steps * torch.atanh(gap)
    return exponent + torch.log(0.5 + 0.5 * torch.exp(-2 * exponent))


def _gap(factor: float, cycle: Tensor) -> Tensor:
    """The gap at which a cycle divides errors by this factor."""
    return torch.tanh(math.acosh(factor) / (2 * cycle.double()))


def omega(gap: Tensor, previous: Tensor, half_step: Tensor) -> Tensor:
    """Chebyshev's factor of the h-th half step after a look, whose own row update is h = 0; h = 1 has the previous gap.

    ω_0 = 1, ω_1 = 1/(1 − λ/2), ω_h = 1/(1 − λ ω_{h−1}/4), in closed form with q = (1 − gap)/(1 + gap).
    """
    gap = torch.where(half_step > 1, gap, previous)
    q = (1 - gap) / (1 + gap)
    return torch.where(half_step > 0, (1 + q) * (1 + q**half_step) / (1 + q ** (half_step + 1)), 1.0)


def stages(deviation: Tensor, epsilon: Tensor, max_iterations: int) -> Tensor:
    """How often ε may be multiplied by four before it is as large as the costs' deviation, (B,) int64 on the host.

    At most half of the iterations are spent on them.
    """
    ratio = (deviation.double() / epsilon.double()).cpu()
    ratio = torch.where(ratio.isfinite(), ratio, 1.0)
    count = (ratio.clamp(min=1).log2() / math.log2(STAGE_FACTOR)).floor().long()
    return count.clamp(max=min(MOST_STAGES, max_iterations // (2 * STAGE_ITERATIONS)))


def stage_gap() -> Tensor:
    """The gap that a stage relaxes by: there is no error to learn from."""
    return _gap(LEAST_FACTOR, torch.tensor([STAGE_ITERATIONS]))


def deviation(cost: Cost) -> Tensor:
    """How much the costs of a batch vary, (B,), about: as far as potentials cannot absorb it."""
    if cost.matrix is not None:
        return torch.stack([_deviation_of_matrix(matrix) for matrix in cost.matrix])
    assert cost.x is not None and cost.y is not None
    clouds = [points.double() - points.double().mean(1, keepdim=True) for points in (cost.x, cost.y)]
    if cost.metric == "l1":
        return sum(points.abs().sum(-1).mean(-1) for points in clouds)  # type: ignore[return-value]
    squares = sum(points.square().sum(-1).mean(-1) for points in clouds)
    return squares if cost.metric == "sqeuclidean" else squares.sqrt()  # type: ignore[union-attr, return-value]


def _deviation_of_matrix(matrix: Tensor) -> Tensor:
    """The standard deviation of the finite entries, some rows at a time."""
    count, total, squares = torch.zeros(3, dtype=torch.float64, device=matrix.device).unbind()
    centre = matrix[0][matrix[0].isfinite()].double().mean().nan_to_num()
    for rows in matrix.split(max(1, STRIP // matrix.shape[-1])):
        finite = rows.isfinite()
        rows = torch.where(finite, rows.double() - centre, 0.0)
        count, total, squares = count + finite.sum(), total + rows.sum(), squares + rows.square().sum()
    return (squares / count - (total / count) ** 2).clamp(min=0).sqrt()
