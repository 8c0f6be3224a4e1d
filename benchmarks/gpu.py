"""One card: point clouds and matrices, ours beside flash-sinkhorn, POT and KeOps where they are installed.

Every system gets the same clouds (float32), uniform weights, one regularisation and a fixed number of iterations.
Run as a module with n and d, it prints the seconds of our first call in a fresh process, compilation included.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from flashot_backends.kernels.sinkhorn import shapes
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve

from .measure import fresh, gpu_times

ITERATIONS = 20
LARGEST_MATRIX = 21_000
# Measured ceilings of one H200, a second: bytes copied, float16 operations of products, exponentials.
H200 = {"bytes": 4.18e12, "products": 730e12, "exponentials": 4.06e12}
Systems = dict[str, Callable[[], Any]]


def rows(quick: bool = False, first: bool = True) -> list[dict[str, Any]]:
    """Run everything; ``quick`` leaves out the plots, ``first`` adds first calls in fresh processes."""
    found = []
    for n, d in shapes.GPU_POINTS:
        found += _case("points", n, d, {**_points(n, d), **_matrix(n, d)}, _errors(n, d))
    found += _batch(*shapes.GPU_BATCH)
    if first:
        for n, d in ((10_000, 3), (10_000, 64)):
            seconds = float(fresh("gpu", str(n), str(d)))
            print(f"first call in a fresh process, n={n} d={d}: {seconds:.1f} s", flush=True)
            found.append({"case": "first call", "n": n, "d": d, "system": "ours", "first": seconds})
    if not quick:
        cases = [("against n", n, d) for d, sizes in shapes.GPU_N.items() for n in sizes]
        cases += [("against d", n, d) for n, dimensions in shapes.GPU_D.items() for d in dimensions]
        for case, n, d in cases:
            found += _case(case, n, d, _points(n, d))
    return found


def floor(n: int, d: int, matrix: bool = False) -> float | None:
    """Seconds that an H200 needs at least for an iteration: exponentials, split products, or one read of the matrix."""
    if "H200" not in torch.cuda.get_device_name():
        return None
    if matrix:
        return max(4 * n * n / H200["bytes"], n * n / H200["exponentials"])
    products = 12 * n * n * d / H200["products"] if d > 8 else 0.0
    return max(products, 2 * n * n / H200["exponentials"])


def clouds(n: int, d: int, batch: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """X, Y, uniform weights and the regularisation."""
    generator = torch.Generator("cuda").manual_seed(0)
    X = torch.randn(*batch, n, d, device="cuda", generator=generator)
    Y = torch.randn(*batch, n, d, device="cuda", generator=generator) * 0.7 + 0.3
    return X, Y, torch.full((n,), 1 / n, device="cuda"), shapes.EPSILON_PER_DIMENSION * d


def _fixed(epsilon: float) -> dict[str, Any]:
    return {"epsilon": epsilon, "max_iterations": ITERATIONS, "tolerance": 0.0, "acceleration": None}


def _points(n: int, d: int) -> Systems:
    X, Y, a, epsilon = clouds(n, d)
    systems: Systems = {
        "ours": lambda: solve(PointCloud(X, Y), a, a, **_fixed(epsilon)),
        "ours, fast": lambda: solve(PointCloud(X, Y), a, a, precision="fast", **_fixed(epsilon)),
    }
    try:
        from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating as alternating
    except ImportError:
        pass
    else:
        for name, tf32 in (("fp32", False), ("tf32", True)):
            systems[f"flash-sinkhorn {name}"] = lambda tf32=tf32: alternating(  # type: ignore[misc]
                X, Y, a, a, eps=epsilon, n_iters=ITERATIONS, allow_tf32=tf32
            )
    try:
        import pykeops
    except ImportError:
        pass
    else:
        pykeops.set_verbose(False)
        systems["KeOps"] = lambda: _keops(X, Y, epsilon)
    return systems


def _matrix(n: int, d: int) -> Systems:
    if n > LARGEST_MATRIX:
        return {}
    X, Y, a, epsilon = clouds(n, d)
    M = torch.cdist(X, Y) ** 2
    systems: Systems = {"ours, matrix": lambda: solve(DenseCost(M), a, a, **_fixed(epsilon))}
    try:
        import ot
    except ImportError:
        return systems
    for method in ("sinkhorn_log", "sinkhorn"):
        systems[f"POT {method}"] = lambda method=method: ot.sinkhorn(  # type: ignore[misc]
            a, a, M, epsilon, method=method, numItermax=ITERATIONS, stopThr=0, warn=False
        )
    return systems


def _keops(X: torch.Tensor, Y: torch.Tensor, epsilon: float) -> torch.Tensor:
    from pykeops.torch import LazyTensor

    x, y = LazyTensor(X[:, None, :]), LazyTensor(Y[None, :, :])
    cost = ((x - y) ** 2).sum(-1)
    f, g = torch.zeros(len(X), 1, device="cuda"), torch.zeros(len(Y), 1, device="cuda")
    shift = epsilon * math.log(len(X))
    for _ in range(ITERATIONS):
        g = -epsilon * ((LazyTensor(f[:, None, :]) - cost) / epsilon).logsumexp(0).view(-1, 1) - shift
        f = -epsilon * ((LazyTensor(g[None, :, :]) - cost) / epsilon).logsumexp(1) - shift
    return f


def _errors(n: int, d: int) -> dict[str, float]:
    """Largest |f − f of float64| / ε of ours, up to a constant, after the same iterations."""
    if n > LARGEST_MATRIX:
        return {}
    X, Y, a, epsilon = clouds(n, d)
    exact = solve(PointCloud(X.double(), Y.double()), a.double(), a.double(), backend="torch", **_fixed(epsilon)).f
    M = torch.cdist(X.double(), Y.double()).square()
    costs = {"ours": (PointCloud(X, Y), "high"), "ours, fast": (PointCloud(X, Y), "fast"),
             "ours, matrix": (DenseCost(M.float()), "high")}  # fmt: skip
    found = {}
    for name, (cost, precision) in costs.items():
        off = solve(cost, a, a, precision=precision, **_fixed(epsilon)).f.double() - exact
        found[name] = float((off - off.mean()).abs().max()) / epsilon
    return found


def _case(
    case: str, n: int, d: int, systems: Systems, errors: dict[str, float] | None = None, problems: int = 1
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, function in systems.items():
        row = {"case": case, "n": n, "d": d, "system": name, "error": (errors or {}).get(name)}
        try:
            row |= _each(gpu_times(function))
        except Exception as problem:  # a peer that fails is a row too
            torch.cuda.empty_cache()
            row["failed"] = f"{type(problem).__name__}: {problem}"[:200]
        print({key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        found.append(row)
    for name, matrix in (("floor", False), ("floor, matrix", True)):
        least = floor(n, d, matrix)
        if least is not None and (not matrix or (n <= LARGEST_MATRIX and problems == 1)):
            found.append({"case": case, "n": n, "d": d, "system": name, "iteration": least * problems})
    return found


def _each(times: dict[str, float]) -> dict[str, float]:
    return {**times, "iteration": times["latency"] / ITERATIONS, "iteration_queued": times["queued"] / ITERATIONS}


def _batch(problems: int, n: int, d: int) -> list[dict[str, Any]]:
    X, Y, a, epsilon = clouds(n, d, (problems,))
    weights = a.expand(problems, n)
    ours = {"ours": lambda: solve(PointCloud(X, Y), weights, weights, **_fixed(epsilon))}
    return _case("batch", n, d, ours, problems=problems)


def _first(n: int, d: int) -> float:
    from .measure import _finished

    X, Y, a, epsilon = clouds(n, d)
    torch.cuda.synchronize()
    return _finished(lambda: solve(PointCloud(X, Y), a, a, **_fixed(epsilon)))


if __name__ == "__main__":
    print(_first(int(sys.argv[1]), int(sys.argv[2])))
