"""Problems of different sizes in few launches: those of similar size are solved as one batch, padded without mass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .control import starting_point
from .costs import DenseCost, PointCloud
from .lists import check_alone, check_entry, each, one_of, rounded
from .problem import Problem, make_problem
from .run import Run, run
from .solution import Solution
from .solver import State


def solve(
    costs: Sequence[PointCloud | DenseCost], a: Any, b: Any, epsilon: Any, reach: Any, init: Any, how: Run
) -> list[Solution]:
    """Solve every problem of a list; weights, starting points and ε are lists too, or one ε for all."""
    count = len(costs)
    sides = [each(given, name, count) for given, name in ((a, "a"), (b, "b"), (init, "init"))]
    problems, starts = [], []
    for k, (cost, a_k, b_k, init_k) in enumerate(zip(costs, *sides, strict=True)):
        check_entry(cost, k)
        problems.append(make_problem(cost, a_k, b_k, one_of(epsilon, k, count), reach))
        check_alone(problems[-1].batch, k)
        starts.append(starting_point(problems[-1], init_k))
    solutions: list[Any] = [None] * count
    padding = how.control.acceleration != "annealing"  # which reads off all costs of a problem where to begin
    for members in _alike(problems, padding).values():
        together = _stacked([problems[k] for k in members])
        start = torch.cat([_padded(starts[k], together.a.shape[-1]) for k in members])
        state, fixed, _ = run(together, start, how)
        for position, k in enumerate(members):
            solutions[k] = _cut(costs[k], problems[k], state, fixed, position, how)
    return solutions


def _alike(problems: list[Problem], padding: bool) -> dict[Any, list[int]]:
    """Positions of problems that one batch can hold without much padding, or without any."""
    found: dict[Any, list[int]] = {}
    for k, problem in enumerate(problems):
        width = None if problem.y is None else problem.x.shape[-1]
        kind = problem.metric, problem.x.dtype, problem.narrow, problem.x.device, width, problem.offsets is None
        size = problem.a.shape[-1], problem.b.shape[-1]
        size = (rounded(size[0]), rounded(size[1])) if padding else size
        found.setdefault((*kind, problem.rho, *size), []).append(k)
    return found


def _stacked(problems: list[Problem]) -> Problem:
    """One batch of problems, as long as the longest of them."""
    first = problems[0]
    if len(problems) == 1:
        return first
    n, m = max(problem.a.shape[-1] for problem in problems), max(problem.b.shape[-1] for problem in problems)

    def joined(side: Callable[[Problem], Tensor | None], size: int = 0) -> Any:
        parts = [side(problem) for problem in problems]
        return None if parts[0] is None else torch.cat([_padded(part, size) if size else part for part in parts])

    points = first.y is not None
    terms = joined(lambda p: p.offsets and p.offsets[0], n), joined(lambda p: p.offsets and p.offsets[1], m)
    return first._replace(
        x=joined(lambda p: _filled(p.x, n) if points else _padded(_padded(p.x, m), n, 1)),
        y=joined(lambda p: _filled(p.y, m) if points else None),
        a=joined(lambda p: p.a, n),
        b=joined(lambda p: p.b, m),
        epsilon=joined(lambda p: p.epsilon),
        batch=(len(problems),),
        offsets=None if terms[0] is None else terms,
        weighted=True,  # what is padded has no mass
        reach=joined(lambda p: p.reach),
    )


def _padded(tensor: Tensor, size: int, axis: int = -1) -> Tensor:
    """Append zeros."""
    missing = size - tensor.shape[axis]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)


def _filled(points: Any, size: int) -> Tensor:
    """Append the cloud's mean, which moves neither its centre nor its extent."""
    missing = size - points.shape[1]
    if missing == 0:
        return points
    mean = points.detach().double().mean(1, keepdim=True).to(points.dtype)
    return torch.cat([points, mean.expand(-1, missing, -1)], 1)


class _Slice(NamedTuple):
    position: int
    rows: int
    columns: int

    def of(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The potentials of one problem, as a batch of one."""
        one = slice(self.position, self.position + 1)
        return first[one, : self.rows], second[one, : self.columns]


def _cut(cost: Any, problem: Problem, state: State, fixed: Any, position: int, how: Run) -> Solution:
    cut = _Slice(position, problem.a.shape[-1], problem.b.shape[-1])
    f, g = cut.of(state.f, state.g)
    alone = State(f, g, *(part[position : position + 1] for part in state[2:]))
    return Solution(cost, problem, alone, how.kernel(problem), None if fixed is None else cut.of(*fixed))
