"""From a checked problem to its potentials, with the derivative that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from . import envelope, implicit, torch_ops
from .problem import Problem
from .solver import Control, State


class Run(NamedTuple):
    """How to solve: when to stop, which derivative and how exact, and the choice of kernels."""

    control: Control
    gradient: str
    gradient_tolerance: float | None
    precision: str
    backend: str

    def kernel(self, problem: Problem) -> tuple[str, str, str]:
        """What every streamed operation is told of the kernel."""
        narrow = f":{problem.narrow}" if problem.narrow else ""
        return problem.metric, self.precision + narrow, self.backend


class Outcome(NamedTuple):
    """What came of a problem."""

    state: State
    fixed: tuple[Tensor, Tensor] | None  # the potentials that values are differentiated through; None: the state's own
    again: Callable[..., Any] | None = None  # how the kernel would run the same once more, where it can


def run(problem: Problem, f: Tensor, how: Run) -> Outcome:
    """The outcome from row potentials f (B, n) on."""
    offsets = (None, None) if problem.reach is None or problem.offsets is None else problem.offsets
    tensors = (*problem[:5], f, problem.reach, *offsets)
    kernel = how.kernel(problem)
    if how.gradient == "unrolled":
        if torch_ops.solve.bare(tensors):
            found, again = torch_ops.outcome(tensors, how.control, kernel)
            return Outcome(State(*found), None, again)
        return Outcome(State(*torch_ops.solve(*tensors, *how.control, *kernel)), None)
    detached = (None if part is None else part.detach() for part in tensors)
    state = State(*torch_ops.solve(*detached, *how.control, *kernel))
    fixed = implicit.attach(problem, state.f, state.g, how.gradient_tolerance, kernel)
    shown = fixed if how.gradient == "implicit" else (envelope.held(fixed[0]), envelope.held(fixed[1]))
    return Outcome(state._replace(f=shown[0], g=shown[1]), fixed)
