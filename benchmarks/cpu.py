"""CPU: matrices and clouds through POT's functions, POT's own solvers beside "flash", in one process.

Run as a module with a system's name, it prints the peak memory above the inputs of one lazy solve.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import flashot_backends
from flashot_backends.kernels.sinkhorn import shapes

from .measure import Clock, cpu_times, fresh, peak_memory

Systems = dict[str, Callable[[], Any]]
FIXED: dict[str, Any] = {"stopThr": 0, "warn": False}


def rows(quick: bool = False, clock: Clock = time.perf_counter) -> list[dict[str, Any]]:
    """Run everything; ``quick`` runs small sizes, to see that it works."""
    return [row for measure in _cases(quick) for row in measure(clock)]


def _cases(quick: bool) -> Iterator[Callable[[Clock], list[dict[str, Any]]]]:
    flashot_backends.enable()
    scale, repeat = (10, 2) if quick else (1, 7)
    yield functools.partial(_dense, shapes.CPU_DENSE // scale, repeat)
    yield functools.partial(_lazy, shapes.CPU_LAZY[0] // scale, shapes.CPU_LAZY[1])
    against = [("n", n, d) for d, sizes in shapes.CPU_N.items() for n in sizes]
    against += [("d", n, d) for n, dimensions in shapes.CPU_D.items() for d in dimensions]
    for plot, n, d in against:
        yield functools.partial(_points, plot, n // scale, d, min(repeat, 3))


def clouds(n: int, d: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, float]:
    """Two clouds of unit variance or so, apart by a little, and a regularisation."""
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((n, d)), rng.standard_normal((n, d)) * 0.7 + 0.3
    return X.astype(dtype), Y.astype(dtype), shapes.EPSILON_PER_DIMENSION * d


def _dense(n: int, repeat: int, clock: Clock) -> list[dict[str, Any]]:
    import ot

    X, Y, reg = clouds(n, 3)
    a, M, iterations = ot.unif(n), ot.dist(X, Y), 20
    systems: Systems = {
        f"POT {method}" if method != "flash" else "flash": functools.partial(
            ot.sinkhorn, a, a, M, reg, method=method, numItermax=iterations, **FIXED
        )
        for method in ("sinkhorn_log", "sinkhorn", "flash")
    }
    return _measured("dense", n, 3, "float64", systems, iterations, repeat, clock)


def _lazy(n: int, d: int, clock: Clock) -> list[dict[str, Any]]:
    import ot

    X, Y, reg = clouds(n, d)
    solve = functools.partial(ot.bregman.empirical_sinkhorn2, X, Y, reg, isLazy=True, numIterMax=10, **FIXED)
    systems: Systems = {"POT isLazy": solve, "flash": functools.partial(solve, method="flash")}
    found = _measured("lazy", n, d, "float64", systems, 10, 3, clock, budget=80.0)
    for row in found:
        row["peak_bytes"] = int(fresh("cpu", row["system"], str(n), str(d)))
    return found


def _points(plot: str, n: int, d: int, repeat: int, clock: Clock) -> list[dict[str, Any]]:
    """Time against n or d: POT with a matrix while it is small, POT lazily, and ours lazily."""
    import ot

    found = []
    for dtype in ("float64", "float32"):
        X, Y, reg = clouds(n, d, dtype)
        solve = functools.partial(ot.bregman.empirical_sinkhorn2, X, Y, reg, isLazy=True, numIterMax=10, **FIXED)
        systems: Systems = {"flash": functools.partial(solve, method="flash")}
        if n <= 8000 and dtype == "float64":
            systems["POT isLazy"] = solve
        if n <= 4000 and dtype == "float64":
            M = ot.dist(X, Y)
            systems["POT sinkhorn_log"] = functools.partial(
                ot.sinkhorn2, [], [], M, reg, method="sinkhorn_log", numItermax=10, **FIXED
            )
        found += _measured(f"against {plot}", n, d, dtype, systems, 10, repeat, clock, budget=10.0)
    return found


def _measured(
    case: str,
    n: int,
    d: int,
    dtype: str,
    systems: Systems,
    iterations: int,
    repeat: int,
    clock: Clock,
    budget: float = 150.0,
) -> list[dict[str, Any]]:
    found = []
    for name, times in cpu_times(systems, repeat, budget, clock).items():
        seconds = statistics.median(times) / iterations
        print(f"{case:10s} n={n:6d} d={d:4d} {dtype} {name:18s} {seconds * 1e3:9.2f} ms an iteration", flush=True)
        row = {"case": case, "n": n, "d": d, "dtype": dtype, "system": name, "iteration": seconds}
        found.append({**row, "times": [round(seconds, 6) for seconds in times]})
    return found


def _memory(system: str, n: int, d: int) -> int:
    """Peak bytes above the inputs of one lazy solve, in a process that has solved a small one before."""
    import ot

    flashot_backends.enable()
    options = {"isLazy": True, "numIterMax": 2, **FIXED, **({"method": "flash"} if system == "flash" else {})}
    small, (X, Y, reg) = clouds(50, d), clouds(n, d)
    ot.bregman.empirical_sinkhorn2(*small, **options)
    before = peak_memory()
    ot.bregman.empirical_sinkhorn2(X, Y, reg, **options)
    return peak_memory() - before


if __name__ == "__main__":
    print(_memory(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
