"""Iterations and time to a marginal error ‖Pᵀ1 − b‖₁: ours beside plain updates, averaged ones, and the peers' loops.

POT's and flash-sinkhorn's loops are plain updates that stop by other measures; they are given the number of iterations
that they need, and the clock decides. OTT-JAX stops by itself, by the same error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashot_backends.kernels.sinkhorn import shapes
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve
from flashot_backends.ops.sinkhorn.problem import log_weights
from flashot_backends.ops.sinkhorn.solver import make_operator

from .measure import Clock

ERRORS = {torch.float64: (1e-3, 1e-6), torch.float32: (1e-3, 1e-5)}  # float32 has no more digits in a sum of columns
LOOK, LONG = 10, 5.0


class Outcome(NamedTuple):
    """Iterations and seconds to an error; no iterations where the most did not do."""

    iterations: int | None
    seconds: float


System = Callable[[shapes.Problem, float], Outcome]


def rows(device: str, quick: bool = False, clock: Clock = time.perf_counter, n: int = 0) -> list[dict[str, Any]]:
    """Run every problem on every system that is there; ``quick`` runs small sizes, to see that it works."""
    on_card, found = device == "cuda", []
    size = n or (100 if quick else shapes.ITERATIONS_CARD if on_card else shapes.ITERATIONS_CPU)
    dtype = torch.float32 if on_card else torch.float64
    for name, case in shapes.PROBLEMS.items():
        problem = shapes.make_problem(name, size, dtype, device)
        for system, run in systems(problem, on_card, clock).items():
            for error in ERRORS[dtype]:
                outcome = run(problem, error)
                shown = f"{error:.0e} {outcome.iterations} {outcome.seconds * 1e3:10.1f} ms"
                print(f"{name:25s} {system:18s} {shown}", flush=True)
                row = {"problem": name, "hard": case.hard, "n": size, "dtype": str(dtype), "system": system}
                found.append({**row, "error": error, "iterations": outcome.iterations, "seconds": outcome.seconds})
    return found


def systems(problem: shapes.Problem, on_card: bool, clock: Clock) -> dict[str, System]:
    """The loops that take this problem."""
    found: dict[str, System] = {
        "plain": functools.partial(ours, acceleration=None, clock=clock),
        "averaged": functools.partial(averaged, clock=clock),
        "ours": functools.partial(ours, acceleration="auto", clock=clock),
        "ours, annealing": functools.partial(ours, acceleration="annealing", clock=clock),
    }
    for name, system, there in (
        ("POT sinkhorn_log", pot, True), ("OTT-JAX", ott, not on_card),
        ("flash-sinkhorn fp32", flash_sinkhorn, on_card and problem.x is not None),
    ):  # fmt: skip
        if there and _importable(MODULES[name]):
            found[name] = functools.partial(system, clock=clock)
    return found


MODULES = {"POT sinkhorn_log": "ot", "OTT-JAX": "ott", "flash-sinkhorn fp32": "flash_sinkhorn"}


def _importable(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def ours(problem: shapes.Problem, error: float, acceleration: str | None, clock: Clock, start: Any = None) -> Outcome:
    """This package's loop."""
    options = {"epsilon": problem.epsilon, "tolerance": error, "max_iterations": shapes.ITERATIONS_MOST}
    options |= {"acceleration": acceleration, "init": None if start is None else (start, None)}
    solution, seconds = _timed(lambda: solve(cost_of(problem), problem.a, problem.b, **options), clock)
    return Outcome(int(solution.iterations) if solution.converged else None, seconds)


def cost_of(problem: shapes.Problem) -> Any:
    """The problem's cost as the operation takes it."""
    return DenseCost(problem.M) if problem.M is not None else PointCloud(problem.x, problem.y)


def averaged(problem: shapes.Problem, error: float, clock: Clock) -> Outcome:
    """Both sides at once, halfway to where each would go, as GeomLoss does; looked at after one plain row update."""
    iterations, seconds = _timed(lambda: _averaged(problem, error), clock)
    return Outcome(iterations, seconds)


def _averaged(problem: shapes.Problem, error: float) -> int | None:
    x, y, M, a, b, epsilon = problem
    given = (M[None], None) if M is not None else (x[None], y[None])  # type: ignore[index]
    metric, eps = "matrix" if M is not None else "sqeuclidean", torch.tensor([epsilon], device=a.device).double()
    operator = make_operator(*given, eps, metric, "high", "")
    logs = log_weights(a[None]), log_weights(b[None])
    f, g = torch.zeros_like(logs[0]), torch.zeros_like(logs[1])
    for k in range(1, shapes.ITERATIONS_MOST + 1):
        rows, columns = operator.both(*logs, f, g)
        f, g = (f + rows) / 2, (g + columns) / 2
        if k % LOOK == 1 and _violation(operator, logs, f, g, b) < error:
            return k
    return None


def _violation(operator: Any, logs: Any, f: Any, g: Any, b: Any) -> float:
    swept = operator.sweep(*logs, g, f)
    return float((b * (swept.ratio[0] - 1)).abs().sum())


def pot(problem: shapes.Problem, error: float, clock: Clock) -> Outcome:
    """POT's log-domain loop from its own start, with a matrix."""
    import ot

    count = ours(problem, error, None, time.perf_counter, start=-problem.epsilon * problem.a.log()).iterations
    if count is None:
        return Outcome(None, float("nan"))
    M = cost_of(problem).dense()
    options = {"numItermax": count, "stopThr": 0, "warn": False, "log": True}
    run = functools.partial(ot.bregman.sinkhorn_log, problem.a, problem.b, M, problem.epsilon, **options)
    (plan, _), seconds = _timed(run, clock)
    left = float((plan.sum(0) - problem.b).abs().sum())
    assert left < 1.01 * error, f"POT is at {left} after {count} iterations"
    return Outcome(count, seconds)


def ott(problem: shapes.Problem, error: float, clock: Clock) -> Outcome:
    """OTT-JAX's loop as it comes, compiled before the clock starts."""
    import jax
    from ott.geometry import geometry, pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    jax.config.update("jax_enable_x64", problem.a.dtype == torch.float64)
    x, y, M, a, b = (None if part is None else jax.numpy.asarray(part.numpy()) for part in problem[:5])
    if M is not None:
        geom: Any = geometry.Geometry(M, epsilon=problem.epsilon)
    else:
        geom = pointcloud.PointCloud(x, y, epsilon=problem.epsilon)
    solver = jax.jit(sinkhorn.Sinkhorn(threshold=error, norm_error=1, max_iterations=shapes.ITERATIONS_MOST))
    transport = linear_problem.LinearProblem(geom, a, b)
    found, seconds = _timed(lambda: jax.block_until_ready(solver(transport)), clock)
    return Outcome(int(found.n_iters) if bool(found.converged) else None, seconds)


def flash_sinkhorn(problem: shapes.Problem, error: float, clock: Clock) -> Outcome:
    """flash-sinkhorn's alternating loop, float32 products."""
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating as alternating

    count = ours(problem, error, None, time.perf_counter).iterations
    if count is None:
        return Outcome(None, float("nan"))
    x, y, _, a, b, epsilon = problem
    run = functools.partial(alternating, x, y, a, b, eps=epsilon, n_iters=count, allow_tf32=False)
    return Outcome(count, _timed(run, clock)[1])


def _timed(run: Callable[[], Any], clock: Clock) -> tuple[Any, float]:
    """The result, and the seconds of a second call, as the first may compile; of the first if that took long."""
    for _ in range(2):
        start = clock()
        found = run()
        _wait()
        seconds = clock() - start
        if seconds > LONG:
            break
    return found, seconds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
