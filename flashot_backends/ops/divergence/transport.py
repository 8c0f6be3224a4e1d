"""Annealed transport with a given number of steps, and derivatives of its value that are those of the problem.

The same averaged updates as the divergence, but the descent starts from the solution at infinite temperature and
follows the temperatures it is given. At convergence the derivatives are exact (envelope theorem), unbalanced ones too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn import whole
from flashot_backends.kernels.sinkhorn.blocks import Blocks

from ...config import settings as session
from ..sinkhorn.problem import log_weights
from ..sinkhorn.solver import make_operator
from ..sinkhorn.torch_ops import StreamedOp, apply
from . import fields as sparse
from .loop import Costs, Duals, Side, at_once, averaged, in_one_go, last, sides
from .schedule import Step, damping
from .torch_ops import or_nothing, refuse_second


class Transport(NamedTuple):
    """Values (B,), potentials (B, n) and (B, m) across, and of each cloud against itself (no elements without debias).

    Only the values can be differentiated.
    """

    value: Tensor
    f: Tensor
    g: Tensor
    own_f: Tensor
    own_g: Tensor


def transport(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilons: Sequence[Sequence[float]], rho: float | None = None,
    debias: bool = False, precision: str | None = None, backend: str = "",
) -> Transport:
    """Solve entropic transport, balanced or with KL penalties ρ on the marginals, and give its value.

    Parameters
    ----------
    x, y : (B, n, d) and (B, m, d)
        Points, for the cost |x − y|²; or a matrix of costs (B, n, m) as x, and None as y.
    a, b : (B, n) and (B, m)
        Weights. Balanced transport needs equal masses.
    epsilons : for each step, one temperature for all elements or one for each
        The last is the problem's regularisation.
    rho : float, optional
        None for balanced transport.
    debias : bool
        Take half the value of each cloud against itself off, for points only.
    """
    if debias and y is None:
        raise ValueError("debias is True and the cost is a matrix; accepted with it are points")
    need = [part is not None and part.requires_grad and torch.is_grad_enabled() for part in (x, y)]
    table = [[float(value) for value in step] for step in epsilons]
    flat = [value for step in table for value in step]
    found = transport_op(
        x, y, a, b, flat, len(table[0]), math.inf if rho is None else rho, debias, *need, precision or "", backend
    )
    return Transport(*found[:5])


def temperatures(widest: float, epsilon: float, count: int) -> list[float]:
    """Geometric steps from the widest difference of costs down to ε, which is the last of them."""
    return [epsilon] if count == 1 else np.geomspace(max(widest, epsilon), epsilon, count).tolist()  # type: ignore[no-any-return]


def product(rows: Any, columns: Any, epsilon: float, values: Tensor) -> Tensor:
    """P V, streamed: (B, m, k) to (B, n, k), for P_ij = a_i b_j exp((f_i + g_j − |x_i − y_j|²)/ε).

    ``rows`` is (x, f, a) and ``columns`` (y, g, b); None for both weights leaves them out.
    """
    (x, f, a), (y, g, b) = rows, columns
    flat = torch.full((x.shape[0],), epsilon, dtype=torch.float64, device=x.device)
    s, t = (f / epsilon, g / epsilon) if a is None else (log_weights(a) + f / epsilon, log_weights(b) + g / epsilon)
    return apply(x, y, s, t, flat, values, "sqeuclidean", "", "")


@StreamedOp
def transport_op(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilons: Sequence[float], together: int, rho: float,
    debias: bool, need_x: bool, need_y: bool, precision: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values, the four potentials, and the values' gradients by x (or the matrix), y, a and b."""
    table = [epsilons[k : k + together] for k in range(0, len(epsilons), together)]
    start = _start(x, y, a, b, _step(table[0], rho, a), debias)
    kernel = in_one_go(x, y, "sqeuclidean", backend)
    if kernel is None:
        both = _stepwise(x, y, a, b, table, rho, start, need_x, need_y, (precision, backend))
    else:
        both = _at_once(kernel, x, y, a, b, table, rho, start, need_x, need_y, precision)
    epsilon = _step(table[-1], rho, a).epsilon[:, None]
    masses = b.sum(-1, keepdim=True).double(), a.sum(-1, keepdim=True).double()
    parts = [_part(side, w, mass, epsilon, rho) for side, w, mass in zip(both, (a, b), masses, strict=True)]
    by_x = parts[0].by_points
    if need_x and y is None:
        operator = _operator(x, None, _step(table[-1], rho, a), (precision, backend))
        by_x = _plan(operator, (log_weights(a), log_weights(b)), both)
    own = (or_nothing(side.own, a) for side in both)
    gradients = (or_nothing(by_x, a).to(x.dtype), or_nothing(parts[1].by_points, a).to(x.dtype))
    value = (parts[0].value + parts[1].value).to(a.dtype)
    return value, both[0].across, both[1].across, *own, *gradients, parts[0].by_weight, parts[1].by_weight  # type: ignore[return-value]


def _stepwise(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, table: Sequence[Sequence[float]], rho: float, duals: Duals,
    need_x: bool, need_y: bool, how: tuple[str, str],
) -> tuple[Side, Side]:
    """One step after the other."""
    steps = [_step(each, rho, a) for each in table]
    logs = log_weights(a), log_weights(b)
    debias = duals.own_f is not None
    cross = _operator(x, y, steps[0], how)
    if isinstance(cross, Blocks) and whole.fits(*cross.cost.size, debias, x.shape[-1] if y is not None else 1):
        return _all_pairs(x, y, logs, steps, duals, need_x and y is not None, need_y)
    own = (_operator(points, points, steps[0], how) if debias else None for points in (x, y))
    costs, fields = Costs(cross, *own), sparse.of(x, y, cross)
    for step in steps:
        costs = costs.at(step.epsilon)
        duals = averaged(costs, logs, duals, step, fields)
    return last(costs, logs, duals, steps[-1], 1, need_x and y is not None, need_y, fields)


def _all_pairs(
    x: Tensor, y: Tensor | None, logs: tuple[Tensor, Tensor], steps: Sequence[Step], duals: Duals, need_x: bool,
    need_y: bool,
) -> tuple[Side, Side]:
    """The same for few pairs. Of points |x − y|²/2 is counted: half of everything here."""
    unit = 1.0 if y is None else 0.5
    if y is None:
        pairs = whole.Whole((x, x.mT), logs[::-1])
    else:
        pairs = whole.Points(x, y, *logs, 2, duals.own_f is not None)
    steps = [step._replace(epsilon=unit * step.epsilon) for step in steps]
    start = unit * pairs.stack([potential for potential in duals if potential is not None])
    sizes = logs[0].shape[1], logs[1].shape[1]
    return _times(1 / unit, at_once(pairs, start, steps, steps[-1], sizes, need_x, need_y))


def _times(factor: float, both: tuple[Side, Side]) -> tuple[Side, Side]:
    return tuple(Side(*(None if part is None else factor * part for part in side)) for side in both)  # type: ignore[return-value]


def _at_once(
    kernel: Any, x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, table: Sequence[Sequence[float]], rho: float,
    duals: Duals, need_x: bool, need_y: bool, precision: str,
) -> tuple[Side, Side]:
    """The same by a kernel for whole descents. Of points it counts |x − y|²/2: half of everything here."""
    unit = 1.0 if y is None else 0.5

    def numbers(each: Sequence[float], keep: float) -> tuple[tuple[float, float, float], ...]:
        return tuple((unit * epsilon, damping(rho, epsilon), keep) for epsilon in each)

    steps = (*(numbers(each, 0.5) for each in table), numbers(table[-1], 0.0))
    if y is None:
        f, g = kernel.anneal_matrices(x, a, b, steps, duals.f, duals.g)
        return Side(f, None, None, None), Side(g, None, None, None)
    start = tuple(None if potential is None else unit * potential for potential in duals)
    debias, how = duals.own_f is not None, precision or session().precision
    todo = kernel.Task(2, steps, unit * rho, debias, need_x, need_y, how, start=start)
    return _times(1 / unit, sides(kernel.anneal(kernel.Clouds(x, a, y, b), todo), debias, x, y))


def _step(epsilons: Sequence[float], rho: float, like: Tensor) -> Step:
    """The step at one temperature for all elements, or one for each."""
    epsilon = torch.tensor(epsilons, dtype=torch.float64, device=like.device).expand(len(like))
    return Step(epsilon, 1.0 if math.isinf(rho) else damping(rho, epsilon)[:, None], None)


def _operator(x: Tensor, y: Tensor | None, step: Step, how: tuple[str, str]) -> Any:
    return make_operator(x, y, step.epsilon, "matrix" if y is None else "sqeuclidean", *how)


def _start(x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, step: Step, debias: bool) -> Duals:
    """The potentials at infinite temperature: mean costs, less half of their own mean.

    For points GeomLoss takes off half of each point's share in that mean instead; both lead to the same fixed point,
    and we take its way, so that the iterates are the same.
    """

    def start(rows: Tensor, columns: Tensor | None, weight: Tensor, other: Tensor) -> Tensor:
        mean = mean_cost(rows, columns, other)
        share = weight * mean
        return ((mean - 0.5 * (share.sum(-1, keepdim=True) if y is None else share)) * step.damping).to(a.dtype)

    own = (start(x, x, a, a), start(y, y, b, b)) if debias and y is not None else (None, None)
    g = start(x.transpose(-1, -2), None, b, a) if y is None else start(y, x, b, a)
    return Duals(start(x, y, a, b), g, *own)


def mean_cost(x: Tensor, y: Tensor | None, weight: Tensor) -> Tensor:
    """Σ_j w_j C_ij / Σ_j w_j, (B, n), in float64; from two moments of the points."""
    shares = (weight.double() / weight.sum(-1, keepdim=True, dtype=torch.float64))[:, :, None]
    if y is None:
        return torch.cat([part.double() @ shares for part in x.split(4096, 1)], 1)[:, :, 0]
    centre = (y.double() * shares).sum(1, keepdim=True)
    spread = ((y.double() - centre).square() * shares).sum((1, 2))
    return (x.double() - centre).square().sum(-1) + spread[:, None]


class Part(NamedTuple):
    """One cloud's share of the values (B,), and its gradients by the cloud's points and weights."""

    value: Tensor
    by_points: Tensor | None
    by_weight: Tensor


def _part(side: Side, weight: Tensor, other_mass: Tensor, epsilon: Tensor, rho: float) -> Part:
    """Séjourné et al., 2019, proposition 12, and the derivatives of the dual problem at its optimum."""
    if math.isinf(rho):
        phi = side.across.clone() if side.own is None else side.across - side.own  # ops return no tensor twice
        by_points = _slopes(side, weight, lambda potential: torch.ones_like(potential))
        return Part((weight * phi).sum(-1, dtype=torch.float64), by_points, phi)

    def left(potential: Tensor) -> Tensor:
        return torch.exp(-potential / rho)

    if side.own is None:
        offsets = 1 - left(side.across), other_mass - left(side.across)
    else:
        offsets = (left(side.own) - left(side.across),) * 2
    value = (weight * (rho * offsets[0] + epsilon / 2 * offsets[1])).sum(-1)
    by_weight = (rho * offsets[0] + epsilon * offsets[1]).to(weight.dtype)
    strength = (rho + epsilon) / rho
    return Part(value, _slopes(side, weight, lambda potential: strength * left(potential)), by_weight)


def _slopes(side: Side, weight: Tensor, rate: Any) -> Tensor | None:
    if side.across_slope is None:
        return None
    total = side.across_slope * (weight * rate(side.across))[:, :, None]
    if side.own is not None and side.own_slope is not None:
        total = total - side.own_slope * (weight * rate(side.own))[:, :, None]
    return total


def _plan(operator: Any, logs: tuple[Tensor, Tensor], sides: tuple[Side, Side]) -> Tensor:
    """The plan: the gradient by a matrix of costs."""
    scalings = (log + side.across / operator.epsilon[:, None] for log, side in zip(logs, sides, strict=True))
    found: Tensor = operator.weighted(*scalings, alpha=torch.ones_like(logs[0])).cost[0]
    return found


@transport_op.fake
def _(x, y, a, b, epsilons, together, rho, debias, need_x, need_y, precision, backend):  # type: ignore[no-untyped-def]
    nothing = a.new_empty(0)
    own = (torch.empty_like(a), torch.empty_like(b)) if debias else (nothing, a.new_empty(0))
    by_x = torch.empty_like(x) if need_x else x.new_empty(0)
    by_y = torch.empty_like(y) if need_y and y is not None else x.new_empty(0)
    potentials = torch.empty_like(a), torch.empty_like(b)
    return a.new_empty(a.shape[0]), *potentials, *own, by_x, by_y, torch.empty_like(a), torch.empty_like(b)


@StreamedOp
def transport_backward(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, grad: Tensor, by_x: Tensor, by_y: Tensor, by_a: Tensor,
    by_b: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by x, y, a and b, given the gradient by the values. Not differentiable, by any input."""
    by_x, by_y = (by * grad.to(by.dtype)[:, None, None] if by.numel() else by.clone() for by in (by_x, by_y))
    return by_x, by_y, by_a * grad[:, None], by_b * grad[:, None]


@transport_backward.fake
def _(x, y, a, b, grad, *gradients):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(part) for part in gradients)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], *output[5:])
    ctx.mark_non_differentiable(*output[1:])


def _grad(ctx: Any, grad: Tensor, *_: Any) -> Any:
    x, y, a, b, *gradients = ctx.saved_tensors
    by_x, by_y, by_a, by_b = transport_backward(x, y, a, b, grad, *gradients)
    need = ctx.needs_input_grad
    return by_x if need[0] else None, by_y if need[1] else None, by_a, by_b, *[None] * 8


transport_op.derivative(_grad, _setup)
transport_backward.derivative(refuse_second)
