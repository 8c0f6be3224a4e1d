"""The symmetric loop: averaged updates under falling temperature, then one step that carries the derivative.

Feydy, "Geometric data analysis, beyond convolutions", 2020, algorithm 3.5, and Séjourné et al., "Sinkhorn divergences
for unbalanced optimal transport", 2019, for the damping. Everything runs in the kernels' unit of the cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sinkhorn.problem import log_weights
from ..sinkhorn.solver import make_operator
from . import stacked
from .schedule import Settings, Step, descent


class Side(NamedTuple):
    """One cloud's result, in the caller's unit: potentials (B, n) of the transport to the other cloud and to itself.

    The slopes (B, n, d) are the derivatives of the potentials by the cloud's points, the other points held. A cloud
    has no potential of its own without debiasing, and no slopes where none were asked for.
    """

    across: Tensor
    own: Tensor | None
    across_slope: Tensor | None
    own_slope: Tensor | None


class Costs(NamedTuple):
    """Prepared costs: x against y, x against itself, y against itself; the last two only for debiasing."""

    cross: Any
    xx: Any
    yy: Any

    def at(self, epsilon: Tensor) -> Costs:
        """Under another temperature."""
        return Costs(*(operator and operator.at(epsilon) for operator in self))


def anneal(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, settings: Settings, need_x: bool, need_y: bool, precision: str,
    backend: str,
) -> tuple[Side, Side]:
    """Run the descent on points (B, n, d), (B, m, d) with weights (B, n), (B, m)."""
    steps = descent(settings, x, y)
    if stacked.applies(x, y, settings):
        how = settings, need_x, need_y, precision, backend
        found = stacked.anneal(x, a, y, b, steps, _shown(steps, settings), *how)
        return _side(found, 0, x.shape[1]), _side(found, 1, y.shape[1])
    logs = log_weights(a), log_weights(b)
    costs = _costs(x, y, steps[0].epsilon * settings.unit, settings, precision, backend)
    duals = _start(costs, logs, steps[0])
    for step in _shown(steps, settings):
        costs = costs.at(step.epsilon * settings.unit)
        duals = averaged(costs, logs, duals, step)
    return last(costs, logs, duals, steps[-1], settings.unit, need_x, need_y)


def _side(found: stacked.Result, index: int, points: int) -> Side:
    (across, across_slope), (own, own_slope) = found.part(index, points), found.part(index + 2, points)
    assert across is not None
    return Side(across, own, across_slope, own_slope)


class Duals(NamedTuple):
    """The four potentials of the loop: of x and of y, then of each against itself."""

    f: Tensor
    g: Tensor
    own_f: Tensor | None
    own_g: Tensor | None


def _costs(x: Tensor, y: Tensor, epsilon: Tensor, settings: Settings, precision: str, backend: str) -> Costs:
    how = epsilon, settings.metric, precision, backend
    cross = make_operator(x, y, *how)
    if not settings.debias:
        return Costs(cross, None, None)
    return Costs(cross, make_operator(x, x, *how), make_operator(y, y, *how))


def _start(costs: Costs, logs: tuple[Tensor, Tensor], step: Step) -> Duals:
    log_a, log_b = logs
    f, g = costs.cross.softmin(log_b), costs.cross.T.softmin(log_a)
    own = (costs.xx.softmin(log_a), costs.yy.softmin(log_b)) if costs.xx is not None else (None, None)
    return Duals(*(_damped(potential, step) for potential in (f, g, *own)))


def averaged(costs: Costs, logs: tuple[Tensor, Tensor], duals: Duals, step: Step) -> Duals:
    """Halfway between the potentials and those that follow from them."""
    log_a, log_b = logs
    new = [*costs.cross.both(log_a, log_b, duals.f, duals.g), None, None]
    if costs.xx is not None:
        new[2:] = costs.xx.with_itself(log_a, duals.own_f), costs.yy.with_itself(log_b, duals.own_g)
    return Duals(*(_halfway(old, _damped(potential, step), step) for old, potential in zip(duals, new, strict=True)))


def _damped(potential: Tensor | None, step: Step) -> Tensor | None:
    return None if potential is None else (potential * step.damping).to(potential.dtype)


def _halfway(old: Tensor | None, new: Tensor | None, step: Step) -> Tensor | None:
    if old is None or new is None:
        return None
    middle = 0.5 * (old + new)
    return middle if step.begun is None else torch.where(step.begun, middle, old)


def last(
    costs: Costs, logs: tuple[Tensor, Tensor], duals: Duals, step: Step, unit: int, need_x: bool, need_y: bool
) -> tuple[Side, Side]:
    """All updates once more, from the potentials found, with the derivative of each potential by its own points."""

    def extrapolate(operator: Any, log_weight: Tensor, potential: Tensor | None, slope: bool) -> Any:
        if operator is None:
            return None, None
        h = log_weight + potential / operator.epsilon[:, None]
        value, tangent = operator.softmin_slope(h) if slope else (operator.softmin(h), None)
        tangent = None if tangent is None else (tangent * _column(step.damping) / unit).to(value.dtype)
        return (value * step.damping / unit).to(value.dtype), tangent

    log_a, log_b = logs
    f, slope_f = extrapolate(costs.cross, log_b, duals.g, need_x)
    g, slope_g = extrapolate(costs.cross.T, log_a, duals.f, need_y)
    own_f, own_slope_f = extrapolate(costs.xx, log_a, duals.own_f, need_x)
    own_g, own_slope_g = extrapolate(costs.yy, log_b, duals.own_g, need_y)
    return Side(f, own_f, slope_f, own_slope_f), Side(g, own_g, slope_g, own_slope_g)


def _column(damping: Tensor | float) -> Tensor | float:
    return damping[:, :, None] if isinstance(damping, Tensor) else damping


def _shown(steps: list[Step], settings: Settings) -> Any:
    """The steps, behind a progress bar where one was asked for."""
    if not settings.verbose:
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="annealing", unit="step")
