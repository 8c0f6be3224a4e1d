"""A call like an earlier one: the same layout and options, so that nothing is left to look at but the values.

A small solve takes a card less time than the host needs to check its arguments and to choose a kernel. Both depend on
nothing but shapes, strides, dtypes, devices, options and settings; what followed from those is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import dispatch
from ...config import settings
from .constants import kept
from .costs import DenseCost, PointCloud
from .problem import Problem, inspect_values, make_problem
from .solution import Solution
from .solver import State
from .streamed import plain

MOST = 64  # layouts that are remembered
PLAIN = {int, float, str, type(None)}  # options of other types are looked at in full every time


class Plan(NamedTuple):
    """What followed from a layout."""

    again: Callable[..., Any]  # the kernel's loop, once more
    how: tuple[str, str, str]
    sizes: tuple[int, int, int]
    start: Tensor
    weights: tuple[Tensor | None, Tensor | None]  # uniform ones, where none are given
    circumstances: tuple[Any, int]


_plans: dict[Any, Plan] = {}


def layout(cost: Any, a: Any, b: Any, epsilon: Any, options: tuple[Any, ...]) -> Any:
    """All that a plan follows from, or None where a call is not to be repeated.

    Repeated are solves on a card, of torch tensors that ask for no gradient and for nothing unusual.
    """
    if type(cost) is PointCloud:
        if cost.feature_weights is not None or cost.labels is not None or cost.metric != "sqeuclidean":
            return None
        given: tuple[Any, ...] = (cost.x, cost.y, a, b)
    elif type(cost) is DenseCost:
        given = (cost.M, a, b)
    else:
        return None
    first = given[0]
    if type(first) is not Tensor or not first.is_cuda or type(epsilon) not in (float, int):
        return None
    if not PLAIN.issuperset(map(type, options)):  # lists cannot be looked up, and True is not the number 1
        return None
    if not 0 < epsilon < math.inf or not plain(()) or torch.cuda.is_current_stream_capturing():
        return None
    recording, key = torch.is_grad_enabled(), [options, torch._C._cuda_getCurrentRawStream(first.device.index)]
    for part in given:
        if part is None:
            key.append(None)
            continue
        if type(part) is not Tensor or (recording and part.requires_grad):
            return None
        key += (part.shape, part.stride(), part.dtype, part.device, part.data_ptr() % 16)
    return (*key, given[0] is given[1], a is b)  # one tensor in two places is told from two tensors


def again(key: Any, cost: Any, a: Any, b: Any, epsilon: float) -> Solution | None:
    """The solution, if there is a plan and it still holds."""
    plan = _plans.get(key)
    if plan is None or plan.circumstances != _circumstances():
        return None
    tensors = cost.tensors
    device = tensors[0].device
    weights = (plan.weights[0] if a is None else a, plan.weights[1] if b is None else b)
    others = (kept(float(epsilon), torch.float64, device), *weights, plan.start)
    x, y = tensors if len(tensors) == 2 else (tensors[0], None)
    found = plan.again(tensors, others, plan.sizes, partial(inspect_values, x, y, *weights, others[0], None))
    if found is None:
        return None

    def parts() -> tuple[Any, ...]:
        with torch.no_grad():  # whatever is asked of the arrays since, nothing was recorded
            f, g, iterations, error, converged, errors, gaps = found.tensors()
            state = State(f, g, iterations, error, converged, errors, gaps, torch.zeros_like(iterations))
            return cost, make_problem(cost, a, b, epsilon), state, plan.how

    return Later(parts)


class Later(Solution):
    """A solution that is put together when it is first asked for something."""

    def __init__(self, parts: Callable[[], tuple[Any, ...]]):
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_state" in self.__dict__:
            raise AttributeError(f"a Solution has no attribute {name!r}")
        super().__init__(*self._parts())
        return getattr(self, name)


def keep(
    key: Any, cost: Any, a: Any, b: Any, problem: Problem, start: Tensor, run_again: Callable[..., Any],
    how: tuple[str, str, str],
) -> None:  # fmt: skip
    """Remember what followed from a layout, if what kernels saw is what was given."""
    flat = (problem.x, problem.a, problem.b) if problem.y is None else (problem.x, problem.y, problem.a, problem.b)
    for part, came in zip(flat, (*cost.tensors, a, b), strict=True):
        if came is not None and (part.data_ptr() != came.data_ptr() or part.dtype != came.dtype):
            return
    weights = (problem.a if a is None else None, problem.b if b is None else None)
    sizes = (len(problem.a), problem.a.shape[1], problem.b.shape[1])
    _plans[key] = Plan(run_again, how, sizes, start, weights, _circumstances())
    while len(_plans) > MOST:
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread takes some out
            _plans.pop(next(iter(_plans)), None)


def _circumstances() -> tuple[Any, int]:
    """What else the choice of a kernel depends on."""
    return settings(), dispatch.version()
