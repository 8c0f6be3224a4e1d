"""Steps over squared distances that do not visit every pair: over cells at large temperatures, over blocks at small.

What either leaves out of a sum is bounded by what float32 (float64) rounds, and either is taken where it is quicker.
Potentials are those of the operators here, for the cost |x − y|²; both kernels count half of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn import far, near
from flashot_backends.kernels.sinkhorn.blocks import Blocks

Potentials = tuple[Tensor | None, ...]
CLEARLY = 1.2  # times quicker than all pairs, as estimated
SLOPES = 1.6  # how much more derivatives slow blocks down than all pairs


class Fields(NamedTuple):
    """Both ways for each element of a batch; none where they can never pay."""

    far: list[far.Field]
    near: list[near.Field]

    def __bool__(self) -> bool:
        return bool(self.far or self.near)


NOTHING = Fields([], [])


def of(x: Tensor, y: Tensor | None, operator: Any) -> Fields:
    """For points (B, n, d) and (B, m, d) that are served by streamed torch."""
    if y is None or not isinstance(operator, Blocks) or operator.cost.metric != "sqeuclidean":
        return NOTHING
    return Fields(far.fields(x, y), near.fields(x, y))


def updates(
    fields: Fields, epsilon: Tensor, logs: tuple[Tensor, Tensor], duals: Potentials | None, debias: bool
) -> list[Tensor | None] | None:
    """The four potentials (B, ·), float64, that follow from four or none; None where all pairs are quicker.

    ``epsilon`` (B,) is the operators'.
    """
    if not fields:
        return None
    epsilons = (0.5 * epsilon).tolist()
    seconds = [field.seconds(each, debias) for field, each in zip(fields.far, epsilons, strict=False)]
    afar = bool(seconds) and all(
        CLEARLY * each < field.dense(debias) for each, field in zip(seconds, fields.far, strict=True)
    )
    found = None
    if duals is not None:
        budgets = [field.dense(debias) / CLEARLY for field in fields.near]
        if afar:
            budgets = [min(pair) for pair in zip(budgets, seconds, strict=False)]
        found = _nearby(fields.near, epsilons, logs, duals, budgets, (False, False))
    if found is not None:
        return _stacked([[softmin.value for softmin in each] for each in found], epsilon)
    return _from_afar(fields.far, epsilons, logs, duals, debias) if afar else None


def ends(
    fields: Fields, epsilon: Tensor, logs: tuple[Tensor, Tensor], duals: Potentials, slopes: tuple[bool, bool]
) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
    """The potentials that follow, with their derivatives (B, ·, d) by the points of x and of y where asked for."""
    epsilons = (0.5 * epsilon).tolist() if fields.near else []
    slower = CLEARLY * (SLOPES if any(slopes) else 1)
    budgets = [2 * field.dense(duals[2] is not None) / slower for field in fields.near]  # no exponential serves twice
    found = _nearby(fields.near, epsilons, logs, duals, budgets, slopes)
    if found is None:
        return None
    values = _stacked([[softmin.value for softmin in each] for each in found], epsilon)
    parts = [[each[k].slope for each in found] for k in range(len(found[0]))]
    tangents = [None if part[0] is None else 2 * torch.stack(part) for part in parts]  # type: ignore[arg-type]
    return values, tangents + [None] * (4 - len(tangents))


def _stacked(found: list[list[Tensor]], epsilon: Tensor) -> list[Tensor | None]:
    out = [torch.stack(part) * epsilon[:, None] for part in zip(*found, strict=True)]
    return out + [None] * (4 - len(out))


def _nearby(
    fields: list[near.Field], epsilons: list[float], logs: tuple[Tensor, Tensor], duals: Potentials,
    budgets: list[float], slopes: tuple[bool, bool],
) -> list[list[near.Softmin]] | None:
    """Over blocks, if it is within so many seconds for each element."""
    if not fields or not all(field.may_pay(each) for field, each in zip(fields, epsilons, strict=True)):
        return None
    found = []
    for b, (field, epsilon, budget) in enumerate(zip(fields, epsilons, budgets, strict=True)):
        potentials = [dual[b].double() / (2 * epsilon) for dual in duals if dual is not None]
        weights = [logs[k % 2][b].double().exp() for k in range(len(potentials))]
        each = field.softmins(epsilon, weights, potentials, budget, slopes)
        if each is None:
            return None
        found.append(each)
    return found


def _from_afar(
    fields: list[far.Field], epsilons: list[float], logs: tuple[Tensor, Tensor], duals: Potentials | None, debias: bool
) -> list[Tensor | None]:
    """Over cells."""
    biases: Any = (logs[1], logs[0], *(logs if debias else ()))
    if duals is not None:
        scale = 0.5 / torch.tensor(epsilons, dtype=torch.float64, device=logs[0].device)[:, None]
        partners = duals[1], duals[0], duals[2], duals[3]
        biases = [log + dual * scale for log, dual in zip(biases, partners, strict=False) if dual is not None]
    each = [
        field.softmins(epsilon, tuple(h[b] for h in biases))
        for b, (field, epsilon) in enumerate(zip(fields, epsilons, strict=True))
    ]
    found: list[Tensor | None] = [2 * torch.stack(part) for part in zip(*each, strict=True)]
    return found + [None] * (4 - len(found))
