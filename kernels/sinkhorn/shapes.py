"""Problem sizes of the benchmarks, as data: n points a side in d dimensions; and the problems that iterations are
counted on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

GPU_POINTS = [(256, 2), (1024, 64), (4096, 64), (10_000, 3), (10_000, 64), (10_000, 512), (50_000, 64)]
GPU_BATCH = (64, 256, 64)  # problems, n, d
GPU_N = {3: [256, 1024, 4096, 16_384, 65_536], 64: [256, 1024, 4096, 16_384, 65_536]}  # d: n, for the plots
GPU_D = {10_000: [2, 3, 8, 16, 32, 64, 128, 256, 512, 1024]}  # n: d

CPU_DENSE = 2000
CPU_LAZY = (20_000, 3)
CPU_N = {3: [500, 1000, 2000, 4000, 8000, 16_000]}
CPU_D = {4000: [2, 3, 8, 32, 128, 512]}

EPSILON_PER_DIMENSION = 0.1  # for points of unit variance

# Tests: (rows, columns). Tiny ones for the interpreter, of one tile and of several; odd ones for a card, on both sides
# of every edge: tiles, padding, what fits in registers.
TEST_ONE_TILE = [(1, 1), (5, 7), (64, 128)]
TEST_TILES = [(70, 40), (3, 150)]
TEST_CARD = [(1, 1), (1, 1000), (1000, 1), (63, 129), (257, 255), (513, 511), (1024, 2000), (2049, 777), (3001, 5003)]
TEST_DIMENSIONS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 150]
TEST_CARD_DIMENSIONS = [1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 64, 100, 128, 129, 200, 300]

# Iterations to a marginal error: sizes that take seconds on a CPU, and minutes at most on a card.
ITERATIONS_CPU, ITERATIONS_CARD = 500, 10_000
ITERATIONS_ERRORS = (1e-3, 1e-6)
ITERATIONS_MOST = 5000


class Case(NamedTuple):
    """A kind of problem: points of a cloud, its weights, ε as a part of the median cost, and whether it is hard."""

    points: str  # "normal", "square", "cube", "clusters", "shared clusters", "apart", or "matrix" for a random one
    d: int
    epsilon: float
    hard: bool
    uneven: bool = False


PROBLEMS = {
    "easy": Case("normal", 3, 0.5, hard=False),
    "medium": Case("normal", 3, 0.05, hard=False),
    "high dimension": Case("normal", 100, 0.02, hard=False),
    "clouds apart": Case("apart", 3, 0.01, hard=False),
    "random matrix": Case("matrix", 0, 0.01, hard=False),
    "uneven weights": Case("cube", 3, 0.01, hard=True, uneven=True),
    "small epsilon": Case("square", 2, 3e-3, hard=True),
    "tiny epsilon": Case("square", 2, 1e-3, hard=True),
    "clusters": Case("clusters", 3, 0.02, hard=True),
    "clusters of unequal mass": Case("shared clusters", 3, 0.02, hard=True),
}


class Problem(NamedTuple):
    """Points (n, d) and (m, d), or a matrix (n, m); weights of mass 1; ε."""

    x: Tensor | None
    y: Tensor | None
    M: Tensor | None
    a: Tensor
    b: Tensor
    epsilon: float


def make_problem(name: str, n: int, dtype: Any = None, device: str = "cpu") -> Problem:
    """One of ``PROBLEMS`` with n rows and some more columns, in float64 if not said otherwise; always the same."""
    import torch

    case, m, generator = PROBLEMS[name], n + n // 8, torch.Generator().manual_seed(1)
    uniform = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, y, M = None, None, None
    if case.points == "matrix":
        M = uniform(n, m)
    else:
        x, y = _points(case, n, m, generator)
    a, b = ((uniform(count) ** 6 + 1e-6 if case.uneven else torch.ones(count).double()) for count in (n, m))
    epsilon = case.epsilon * _median_cost(x, y, M)
    x, y, M = (part if part is None else part.to(device, dtype or torch.float64) for part in (x, y, M))
    a, b = (part.to(device, dtype or torch.float64) for part in (a / a.sum(), b / b.sum()))
    return Problem(x, y, M, a, b, epsilon)


def _points(case: Case, n: int, m: int, generator: Any) -> tuple[Tensor, Tensor]:
    import torch

    uniform = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    if case.points in ("square", "cube"):
        return uniform(n, case.d), uniform(m, case.d)
    if case.points in ("clusters", "shared clusters"):
        centres = 3 * normal(2, 6, case.d)
        which = [torch.randint(6, (count,), generator=generator) for count in (n, m)]
        second = 0 if case.points == "shared clusters" else 1
        return centres[0][which[0]] + 0.1 * normal(n, case.d), centres[second][which[1]] + 0.1 * normal(m, case.d)
    shift = 6.0 if case.points == "apart" else 0.3
    return normal(n, case.d), 0.7 * normal(m, case.d) + shift


def _median_cost(x: Tensor | None, y: Tensor | None, M: Tensor | None) -> float:
    """The median of the costs among the first thousand points a side."""
    if M is not None:
        return float(M[:1000, :1000].median())
    assert x is not None and y is not None
    return float((x[:1000, None] - y[None, :1000]).square().sum(-1).median())
