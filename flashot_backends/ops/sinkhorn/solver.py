"""The loop: alternating updates until the column marginal is right, and its exact derivative run backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import Cost, scaling

from ... import dispatch
from ...config import settings
from .problem import log_weights

ERROR_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda violation: violation.abs().sum(-1),
    "l2": lambda violation: violation.square().sum(-1).sqrt(),
}


def marginal_error(norm: str, b: Tensor, ratio: Tensor) -> Tensor:
    """‖Pᵀ1 − b‖, given present over wanted column sums; columns without mass say nothing."""
    return ERROR_NORMS[norm](torch.where(b > 0, b * (ratio - 1), 0.0))


class Request(NamedTuple):
    """What a kernel is asked to serve."""

    array: str
    device: str
    kind: str  # "points" or "matrix"
    dtype: torch.dtype
    metric: str
    shape: tuple[int, int, int]
    width: int = 0  # coordinates of a point


class Control(NamedTuple):
    """When to stop."""

    max_iterations: int
    tolerance: float
    check_every: int
    norm: str


class State(NamedTuple):
    """The outcome by batch element: potentials (B, n) and (B, m), iterations, error, and whether it is small."""

    f: Tensor
    g: Tensor
    iterations: Tensor
    error: Tensor
    converged: Tensor


def make_operator(x: Tensor, y: Tensor | None, epsilon: Tensor, metric: str, precision: str, backend: str) -> Any:
    """Have the kernel in charge prepare the costs."""
    cost = Cost(x, y, None, metric) if y is not None else Cost(None, None, x)
    kind = "matrix" if y is None else "points"
    request = Request("torch", x.device.type, kind, x.dtype, metric, cost.size, 0 if y is None else x.shape[-1])
    kernel = dispatch.select("sinkhorn", request, _names(backend))
    return kernel.operator(cost, epsilon, precision or settings().precision)


def _names(backend: str) -> str | tuple[str, ...] | None:
    names = tuple(backend.split("|")) if backend else None
    return names[0] if names is not None and len(names) == 1 else names


def iterate(operator: Any, a: Tensor, b: Tensor, f: Tensor, control: Control) -> State:
    """Alternate from the row potentials ``f``: columns, then rows, so that rows are exact at the end.

    Elements of the batch that have converged leave it; the others go on.
    """
    log_a, log_b = log_weights(a), log_weights(b)
    f = torch.where(a > 0, f, 0.0)
    out = _blank(operator)
    active = torch.arange(operator.batch, device=f.device)
    g = _columns(operator, log_a, f)
    for iteration in range(1, control.max_iterations + 1):
        before, (f, after, ratio) = f, operator.sweep(log_a, log_b, g, f)
        if looks(iteration, control):
            error = marginal_error(control.norm, b, ratio)
            stop = error < control.tolerance if iteration < control.max_iterations else torch.ones_like(error) > 0
            if bool(stop.any()):
                g_full = _with_massless(operator, log_a, log_b, g, before)
                _record(out, active[stop], f[stop], g_full[stop], iteration, error[stop], control.tolerance)
                keep = (~stop).nonzero()[:, 0]
                if len(keep) == 0:
                    break
                operator = operator.select(keep)
                active, f, after = active[keep], f[keep], after[keep]
                a, b, log_a, log_b = a[keep], b[keep], log_a[keep], log_b[keep]
        g = after
    return out


def looks(iteration: int, control: Control) -> bool:
    """Whether to look at the error after this iteration: the first, every ``check_every``-th from it, the last."""
    return (iteration - 1) % control.check_every == 0 or iteration == control.max_iterations


def _columns(operator: Any, log_a: Tensor, f: Tensor) -> Tensor:
    return operator.T.softmin(scaling(log_a, f, operator.epsilon))


def _with_massless(operator: Any, log_a: Tensor, log_b: Tensor, g: Tensor, f: Tensor) -> Tensor:
    """Sweeps pass over columns without mass; give them the potential that belongs to ``f``."""
    massless = log_b == -torch.inf
    if not bool(massless.any()):
        return g
    return torch.where(massless, _columns(operator, log_a, f), g)


def _blank(operator: Any) -> State:
    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=operator.device)

    batch, real = operator.batch, operator.dtype
    return State(
        new(batch, operator.rows, dtype=real),
        new(batch, operator.columns, dtype=real),
        new(batch, dtype=torch.int64),
        new(batch, dtype=real),
        new(batch, dtype=torch.bool),
    )


def _record(
    out: State, index: Tensor, f: Tensor, g: Tensor, iteration: int, error: Tensor, tolerance: float
) -> None:
    out.f[index], out.g[index] = f, g
    out.iterations[index] = iteration
    out.error[index], out.converged[index] = error, error < tolerance


class Gradients(NamedTuple):
    """Gradients by the cost's tensors (None where not asked for), the weights, ε (or None) and the starting point."""

    cost: tuple[Tensor, ...] | None
    a: Tensor
    b: Tensor
    epsilon: Tensor | None
    f: Tensor


def iterate_gradient(
    operator: Any, a: Tensor, b: Tensor, f: Tensor, iterations: Tensor, grad_f: Tensor, grad_g: Tensor,
    need_cost: bool, need_epsilon: bool,
) -> Gradients:
    """Vector-Jacobian product of ``iterate``: run it again keeping its potentials, then walk back through them.

    The loop is unrolled over its potentials, O((n + m) · iterations) numbers, never over pairs. Each half step back is
    the vector-Jacobian product of one softmin.
    """
    log_a, log_b = log_weights(a), log_weights(b)
    f = torch.where(a > 0, f, 0.0)
    fs, gs = _history(operator, log_a, log_b, f, int(iterations.max()))
    walk = _Walk(operator, log_a, log_b, need_cost, need_epsilon)
    adjoint_f = torch.zeros_like(f)
    for k in range(len(gs), 0, -1):
        ends_here = (iterations == k)[:, None]
        adjoint_f = adjoint_f + torch.where(ends_here, grad_f, 0.0)
        adjoint_g = torch.where(ends_here, grad_g, 0.0)
        adjoint_g = adjoint_g + walk.row_update(gs[k - 1], fs[k], adjoint_f)
        adjoint_f = walk.column_update(fs[k - 1], gs[k - 1], adjoint_g)
    by_a, by_b = (torch.where(w > 0, log / w, 0.0) for w, log in ((a, walk.by_log_a), (b, walk.by_log_b)))
    return Gradients(walk.cost, by_a, by_b, walk.by_epsilon, adjoint_f)


def _history(operator: Any, log_a: Tensor, log_b: Tensor, f: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Row potentials f_0 … f_K and column potentials g_1 … g_K of the loop, massless columns included."""
    fs, gs = [f], [_columns(operator, log_a, f)]
    for k in range(count):
        f, after, _ = operator.sweep(log_a, log_b, gs[k], fs[k])
        fs.append(f)
        if k + 1 < count:
            gs.append(after)
    if bool((log_b == -torch.inf).any()):
        gs = [_with_massless(operator, log_a, log_b, g, before) for g, before in zip(gs, fs, strict=False)]
    return fs, gs


class _Walk:
    """Sums up the gradients of the half steps that are passed on the way back."""

    def __init__(self, operator: Any, log_a: Tensor, log_b: Tensor, need_cost: bool, need_epsilon: bool):
        self.rows, self.columns, self.epsilon = operator, operator.T, operator.epsilon
        self.log_a, self.log_b = log_a, log_b
        self.need_cost, self.need_epsilon = need_cost, need_epsilon
        self.cost: tuple[Tensor, ...] | None = None
        self.by_log_a, self.by_log_b = torch.zeros_like(log_a), torch.zeros_like(log_b)
        self.by_epsilon = torch.zeros_like(self.epsilon) if need_epsilon else None

    def row_update(self, g: Tensor, f: Tensor, grad: Tensor) -> Tensor:
        """Pass f = softmin(log b + g/ε); return the gradient by g."""
        cost, by_h = self._pass(self.rows, self.log_b, g, f, grad)
        self.by_log_b += by_h
        self._add(cost)
        return by_h / self.epsilon[:, None]

    def column_update(self, f: Tensor, g: Tensor, grad: Tensor) -> Tensor:
        """Pass g = softmin(log a + f/ε) along columns; return the gradient by f."""
        cost, by_h = self._pass(self.columns, self.log_a, f, g, grad)
        self.by_log_a += by_h
        self._add(cost and _transposed(cost))
        return by_h / self.epsilon[:, None]

    def _pass(self, operator: Any, log_weight: Tensor, potential: Tensor, out: Tensor, grad: Tensor) -> Any:
        h = scaling(log_weight, potential, self.epsilon)
        cost, by_h, by_epsilon = softmin_gradient(operator, h, out, grad, self.need_cost, self.need_epsilon)
        if self.by_epsilon is not None:
            product = torch.where(by_h == 0, 0.0, by_h * potential)
            self.by_epsilon += by_epsilon - product.sum(-1) / self.epsilon**2
        return cost, by_h

    def _add(self, cost: tuple[Tensor, ...] | None) -> None:
        if cost is None:
            return
        if self.cost is None:
            self.cost = tuple(torch.zeros_like(part) for part in cost)
        for total, part in zip(self.cost, cost, strict=True):
            total += part


def softmin_gradient(
    operator: Any, h: Tensor, out: Tensor, grad: Tensor, need_cost: bool, need_epsilon: bool
) -> tuple[tuple[Tensor, ...] | None, Tensor, Tensor | None]:
    """Gradients of a softmin by the cost's tensors, h and ε; none through left-out columns and infinite results."""
    nowhere = out == torch.inf
    out, grad = torch.where(nowhere, 0.0, out), torch.where(nowhere, 0.0, grad)
    cost, by_h, by_epsilon = operator.softmin_gradient(h, out, grad, need_cost, need_epsilon)
    return cost, torch.where(h == -torch.inf, 0.0, by_h), by_epsilon


def _transposed(cost: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (cost[0].transpose(-1, -2),) if len(cost) == 1 else (cost[1], cost[0])
