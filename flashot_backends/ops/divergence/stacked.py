"""The same loop with all its softmins in one batch: x against y, y against x, and both against themselves.

On a card a launch costs as much as a small cloud, so an iteration is one softmin of four times the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sinkhorn.problem import log_weights
from ..sinkhorn.solver import make_operator
from .schedule import Settings, Step

# Clouds are padded to one size. That must not cost more than it saves.
MOST_PADDING = 1.25


def applies(x: Tensor, y: Tensor, settings: Settings) -> bool:
    """Whether a kernel will serve that makes no more of the parts together than of each alone."""
    n, m = x.shape[1], y.shape[1]
    fused = x.device.type == "cuda" and settings.metric == "sqeuclidean" and x.dtype != torch.float64
    return fused and max(n, m) <= MOST_PADDING * min(n, m)


class Result:
    """Potentials (P B, n) of the P parts, damped and in the caller's unit, and their slopes where asked for."""

    def __init__(self, count: int, batch: int, potentials: Tensor, slopes: dict[int, Tensor]):
        self.count, self.batch, self.potentials, self.slopes = count, batch, potentials, slopes

    def part(self, index: int, points: int) -> tuple[Tensor | None, Tensor | None]:
        """Potential and slope of one part, without the padding."""
        if index >= self.count:
            return None, None
        slope = self.slopes.get(index)
        potential = self.potentials[index * self.batch : (index + 1) * self.batch, :points]
        return potential, None if slope is None else slope[:, :points]


def anneal(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, steps: list[Step], shown: Any, settings: Settings, need_x: bool,
    need_y: bool, precision: str, backend: str,
) -> Result:
    """Run the descent. Parts 0 and 1 are the potentials of x and y, 2 and 3 each one's own."""
    count, batch, size = 4 if settings.debias else 2, x.shape[0], max(x.shape[1], y.shape[1])
    x, y = (torch.cat([part, part[:, :1].expand(-1, size - part.shape[1], -1)], 1) for part in (x, y))
    log_a, log_b = (_padded(log_weights(weight), size) for weight in (a, b))
    logs = torch.cat([log_b, log_a, log_a, log_b][:count])
    points = torch.cat([x, y, x, y][:count]), torch.cat([y, x, x, y][:count])
    first, end = (_repeated(step, count) for step in (steps[0], steps[-1]))
    operator = make_operator(*points, first.epsilon * settings.unit, settings.metric, precision, backend)
    duals = operator.softmin(logs) * first.damping
    for step in (_repeated(step, count) for step in shown):
        operator = operator.at(step.epsilon * settings.unit)
        new = operator.softmin(logs + _swapped(duals, batch) / operator.epsilon[:, None]) * step.damping
        middle = (0.5 * (duals + new)).to(logs.dtype)
        duals = middle if step.begun is None else torch.where(step.begun, middle, duals)
    h = logs + _swapped(duals, batch) / operator.epsilon[:, None]
    wanted = [part for part in range(count) if (need_x, need_y)[part % 2]]
    return _extrapolated(operator, h, end, settings.unit, wanted, count, batch)


def _extrapolated(
    operator: Any, h: Tensor, step: Step, unit: int, wanted: list[int], count: int, batch: int
) -> Result:
    """The last softmins, with slopes for the wanted parts only."""
    damping = step.damping / unit
    if not wanted:
        return Result(count, batch, (operator.softmin(h) * damping).to(h.dtype), {})
    chosen, rest = _rows(wanted, batch, h), _rows([k for k in range(count) if k not in wanted], batch, h)
    whole = len(wanted) == count
    found = (operator if whole else operator.select(chosen)).softmin_slope(h[chosen])
    potentials = torch.empty_like(h).index_copy_(0, chosen, found.value)
    if not whole:
        potentials.index_copy_(0, rest, operator.select(rest).softmin(h[rest]))
    scale = damping[chosen][:, :, None] if isinstance(damping, Tensor) else damping
    slopes = (found.slope * scale).to(h.dtype).split(batch)
    return Result(count, batch, (potentials * damping).to(h.dtype), dict(zip(wanted, slopes, strict=True)))


def _rows(parts: list[int], batch: int, like: Tensor) -> Tensor:
    """Where these parts lie in the stack."""
    each = torch.arange(batch, device=like.device)
    return torch.cat([each + part * batch for part in parts] or [each[:0]])


def _padded(log_weight: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(log_weight, (0, size - log_weight.shape[1]), value=-torch.inf)


def _swapped(duals: Tensor, batch: int) -> Tensor:
    """For each part, the potential that it follows from: the other cloud's, or its own."""
    return torch.cat([duals[batch : 2 * batch], duals[:batch], duals[2 * batch :]])


def _repeated(step: Step, count: int) -> Step:
    damping = step.damping.repeat(count, 1) if isinstance(step.damping, Tensor) else step.damping
    return Step(step.epsilon.repeat(count), damping, None if step.begun is None else step.begun.repeat(count, 1))
