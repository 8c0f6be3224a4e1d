"""The symmetric loop: averaged updates under falling temperature, then one step that carries the derivative.

Feydy, "Geometric data analysis, beyond convolutions", 2020, algorithm 3.5, and Séjourné et al., "Sinkhorn divergences
for unbalanced optimal transport", 2019, for the damping. Everything runs in the kernels' unit of the cost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn import whole
from flashot_backends.kernels.sinkhorn.blocks import Blocks

from ... import dispatch
from ...config import settings as session
from ..sinkhorn.problem import log_weights
from ..sinkhorn.solver import Request, _names, expect_kernels, make_operator
from . import fields as sparse
from .schedule import Settings, Step, damping, descent, extents, temperatures, together


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
    clouds = (x, a, y, b)
    kernel = in_one_go(x, y, settings.metric, backend)
    if kernel is not None:
        return sides(kernel.anneal(*task(kernel, clouds, settings, need_x, need_y, precision)), settings.debias, x, y)
    steps = descent(settings, x, y)
    logs = log_weights(a), log_weights(b)
    how = steps[0].epsilon * settings.unit, settings.metric, precision, backend
    cross = make_operator(x, y, *how)
    if isinstance(cross, Blocks) and whole.fits(*cross.cost.size, settings.debias, x.shape[-1]):
        pairs = whole.Points(x, y, *logs, settings.p, settings.debias)
        start = update(pairs, None, steps[0])
        return at_once(pairs, start, _shown(steps, settings), steps[-1], (x.shape[1], y.shape[1]), need_x, need_y)
    costs = _costs(cross, x, y, settings, how)
    fields = sparse.of(x, y, cross)
    duals = _start(costs, logs, steps[0], fields)
    for step in _shown(steps, settings):
        costs = costs.at(step.epsilon * settings.unit)
        duals = averaged(costs, logs, duals, step, fields)
    return last(costs, logs, duals, steps[-1], settings.unit, need_x, need_y, fields)


def in_one_go(x: Tensor, y: Tensor | None, metric: str, backend: str) -> Any:
    """The kernel for whole descents and norms, or None where the one in charge knows single reductions only.

    For points x and y, or for matrices of costs as x.
    """
    expect_kernels(x)
    if y is None:
        request = Request("torch", x.device.type, "matrix", x.dtype, "matrix", tuple(x.shape))  # type: ignore[arg-type]
    else:
        shape = x.shape[0], x.shape[1], y.shape[1]
        request = Request("torch", x.device.type, "points", x.dtype, metric, shape, x.shape[-1])
    try:
        kernel = dispatch.select("divergence", request, _names(backend))
    except dispatch.BackendError:
        return None
    return kernel if hasattr(kernel, "anneal") else None


def task(kernel: Any, clouds: Any, settings: Settings, need_x: bool, need_y: bool, precision: str) -> tuple[Any, Any]:
    """The problem, as such a kernel takes it. Measuring waits for the device, unless the kernel measures."""
    p, blur, scaling = settings.p, settings.blur, settings.scaling
    x, y, measured = clouds[0], clouds[2], None
    if not (settings.diameters or settings.each or settings.verbose):
        measured = (blur, scaling) if kernel.measures(x, y, p, blur, scaling, settings.debias) else None
    if measured is None:
        diameters = tuple(settings.diameters) or tuple(extents(x, y, settings.each))
        steps = _one_launch_each(p, blur, scaling, settings.rho, diameters)
    else:
        steps = (_last_step(settings.epsilon, settings.rho),)
    how = precision or session().precision, functools.partial(_shown, settings=settings) if settings.verbose else iter
    return kernel.Clouds(*clouds), kernel.Task(p, steps, settings.rho, settings.debias, need_x, need_y, *how, measured)


Numbers = tuple[float, float, float]  # temperature, damping, and how much of the potentials is kept


def _last_step(epsilon: float, rho: float) -> tuple[Numbers, ...]:
    return ((epsilon, damping(rho, epsilon), 0.0),)


@functools.lru_cache(maxsize=256)
def _one_launch_each(
    p: int, blur: float, scaling: float, rho: float, diameters: tuple[float, ...]
) -> tuple[tuple[Numbers, ...], ...]:
    """The start, the steps and the last update, as kernels take them."""
    tables, waits = together([temperatures(p, diameter, blur, scaling) for diameter in diameters])

    def numbers(k: int, keep: float) -> tuple[Numbers, ...]:
        return tuple(
            (table[k], damping(rho, table[k]), 1.0 if keep and wait > k else keep)
            for table, wait in zip(tables, waits, strict=True)
        )

    count = len(tables[0])
    return (numbers(0, 0.0), *(numbers(k, 0.5) for k in range(count)), numbers(count - 1, 0.0))


def sides(found: Any, debias: bool, x: Tensor, y: Tensor) -> tuple[Side, Side]:
    """Each cloud's part of what a kernel found."""

    def side(points: Tensor, first: int, first_slope: int) -> Side:
        count = points.shape[1]
        values = found.values[:, :, first : first + count]
        slopes = None if found.slopes is None else found.slopes[:, :, first_slope : first_slope + count]
        return Side(
            values[:, 0], values[:, 1] if debias else None, None if slopes is None else slopes[:, 0],
            slopes[:, 1] if debias and slopes is not None else None,
        )  # fmt: skip

    return side(x, 0, 0), side(y, found.offset, x.shape[1])


class Duals(NamedTuple):
    """The four potentials of the loop: of x and of y, then of each against itself."""

    f: Tensor
    g: Tensor
    own_f: Tensor | None
    own_g: Tensor | None


def _costs(cross: Any, x: Tensor, y: Tensor, settings: Settings, how: tuple[Tensor, str, str, str]) -> Costs:
    if not settings.debias:
        return Costs(cross, None, None)
    return Costs(cross, make_operator(x, x, *how), make_operator(y, y, *how))


def update(pairs: whole.Whole, potentials: Tensor | None, step: Step) -> Tensor:
    """What follows from potentials (B, softmins, longest), or from none."""
    softmins = pairs.softmins(potentials, step.epsilon.to(pairs.logs.dtype))
    return (softmins * _column(step.damping)).to(softmins.dtype)


def at_once(
    pairs: whole.Whole, potentials: Tensor, steps: Iterable[Step], end: Step, sizes: tuple[int, int], need_x: bool,
    need_y: bool,
) -> tuple[Side, Side]:
    """The same loop and last step on all pairs at once."""
    for step in steps:
        middle = torch.lerp(potentials, update(pairs, potentials, step), 0.5)
        potentials = middle if step.begun is None else torch.where(step.begun[:, :, None], middle, potentials)
    final, epsilon = update(pairs, potentials, end), end.epsilon.to(pairs.logs.dtype)

    def slope(k: int, need: bool) -> Tensor | None:
        return (pairs.slopes(potentials, epsilon, k) * _column(end.damping)).to(final.dtype) if need else None

    def side(k: int, need: bool) -> Side:
        across = final[:, k, : sizes[k]], slope(k, need)
        own = (final[:, k + 2, : sizes[k]], slope(k + 2, need)) if len(pairs.partners) > 2 else (None, None)
        return Side(across[0], own[0], across[1], own[1])

    return side(0, need_x), side(1, need_y)


def _start(costs: Costs, logs: tuple[Tensor, Tensor], step: Step, fields: sparse.Fields) -> Duals:
    log_a, log_b = logs
    if (found := sparse.updates(fields, costs.cross.exact_epsilon, logs, None, costs.xx is not None)) is not None:
        return Duals(*(_damped(potential, step) for potential in found))
    f, g = costs.cross.softmin(log_b), costs.cross.T.softmin(log_a)
    own = (costs.xx.softmin(log_a), costs.yy.softmin(log_b)) if costs.xx is not None else (None, None)
    return Duals(*(_damped(potential, step) for potential in (f, g, *own)))


def averaged(
    costs: Costs, logs: tuple[Tensor, Tensor], duals: Duals, step: Step, fields: sparse.Fields = sparse.NOTHING
) -> Duals:
    """Halfway between the potentials and those that follow from them."""
    log_a, log_b = logs
    new: Any = sparse.updates(fields, costs.cross.exact_epsilon, logs, duals, costs.xx is not None)
    if new is None:
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
    costs: Costs, logs: tuple[Tensor, Tensor], duals: Duals, step: Step, unit: int, need_x: bool, need_y: bool,
    fields: sparse.Fields = sparse.NOTHING,
) -> tuple[Side, Side]:
    """All updates once more, from the potentials found, with the derivative of each potential by its own points."""
    log_a, log_b = logs

    def ending(value: Tensor | None, tangent: Tensor | None) -> Any:
        value = None if value is None else (value * step.damping / unit).to(log_a.dtype)
        return value, None if tangent is None else (tangent * _column(step.damping) / unit).to(log_a.dtype)

    found = sparse.ends(fields, costs.cross.exact_epsilon, logs, duals, (need_x, need_y))
    if found is not None:
        (f, slope_f), (g, slope_g), own_f, own_g = (ending(*each) for each in zip(*found, strict=True))
        return Side(f, own_f[0], slope_f, own_f[1]), Side(g, own_g[0], slope_g, own_g[1])

    def extrapolate(operator: Any, log_weight: Tensor, potential: Tensor | None, slope: bool) -> Any:
        if operator is None:
            return None, None
        h = log_weight + potential / operator.epsilon[:, None]
        return ending(*(operator.softmin_slope(h) if slope else (operator.softmin(h), None)))

    f, slope_f = extrapolate(costs.cross, log_b, duals.g, need_x)
    g, slope_g = extrapolate(costs.cross.T, log_a, duals.f, need_y)
    own_f, own_slope_f = extrapolate(costs.xx, log_a, duals.own_f, need_x)
    own_g, own_slope_g = extrapolate(costs.yy, log_b, duals.own_g, need_y)
    return Side(f, own_f, slope_f, own_slope_f), Side(g, own_g, slope_g, own_slope_g)


def _column(damping: Tensor | float) -> Tensor | float:
    return damping[:, :, None] if isinstance(damping, Tensor) else damping


def _shown(steps: Any, settings: Settings) -> Any:
    """The steps, behind a progress bar where one was asked for."""
    if not settings.verbose:
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="annealing", unit="step")
