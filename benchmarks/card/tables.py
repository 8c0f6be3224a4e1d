"""The tables of docs/performance.md and docs/accuracy.md on one CUDA card, case by case, as far as there is time.

python benchmarks/card/tables.py [first] [points] [repeated] [large] [plots] [iterations] [accuracy] [peers] [quick]

By default all but peers, in this order.

``flashot bench cuda`` and ``python -m benchmarks.accuracy`` run the same cases and lose everything when their time is over;
this keeps what there is. What it writes to $OUT goes over the files of the same name in benchmarks/results/ (accuracy.md into
docs/accuracy.md), and ``flashot bench none`` then fills in the page (a cuda.json without ``plots`` loses its picture).

points      every size of the table, peers beside ours; iterations: each problem to both errors, ours first
first       our first call in a fresh process, nothing compiled before
repeated    50 000 x 64 a dozen times, with the card's clock and power
large       a million points a side at d = 3 and 64; memory after 10 and 1 000 iterations, forward and backward
accuracy    all rows by the Triton kernels, and the float64 rows by what runs float64 on a card
plots       time against n and against d, ours; peers: the same of flash-sinkhorn, which searches for each size
"""

import contextlib
import io
import json
import os
import subprocess
import time
import types
from pathlib import Path

from facts import QUICK, WORDS, fact, failed, free, run, say, search_side_by_side, time_for

import torch

from benchmarks import accuracy as errors
from benchmarks import gpu, iterations as counts
from benchmarks.measure import about, fresh
from flashot_backends.kernels.sinkhorn import shapes

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OUT = Path(os.environ.get("OUT", "."))
NOTE = "by benchmarks/card/tables.py: peers compile the candidates of their searches side by side"
_rows = {"cuda": [], "iterations-cuda": []}


def keep(name, rows, command, **more):
    """Add rows to the file of this name."""
    _rows[name] += rows
    device = torch.cuda.get_device_name() if CUDA else "no card"
    results = {**about(command, device), "note": NOTE, **more, "rows": _rows[name]}
    (OUT / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def quietly(function, *given):
    """What a function of benchmarks/ returns; it prints rows in its own way."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*given)


# ------------------------------------------------------------------------------------------------- flashot bench cuda


def measured(case, n, d, systems, known=None, problems=1):
    rows = quietly(gpu._case, case, n, d, systems, known, problems)
    for row in rows:
        shown = {"us": 1e6 * row["iteration"]} if "iteration" in row else {}
        shown |= {"us_queued": 1e6 * row["iteration_queued"]} if "iteration_queued" in row else {}
        shown |= {key: row[key] for key in ("first", "peak_bytes", "error", "failed") if row.get(key) is not None}
        fact(f"{case} {n} x {d}", system=row["system"], **shown)
    keep("cuda", rows, "flashot bench cuda")
    free()


def points():
    for n, d in shapes.GPU_POINTS:
        if time_for(12, f"points {n} x {d}"):
            measured("points", n, d, {**gpu._points(n, d), **gpu._matrix(n, d)}, gpu._errors(n, d))
    if time_for(5, "batch"):
        problems, n, d = shapes.GPU_BATCH
        X, Y, a, epsilon = gpu.clouds(n, d, (problems,))
        weights = a.expand(problems, n)
        solve = lambda: gpu.solve(gpu.PointCloud(X, Y), weights, weights, **gpu._fixed(epsilon))
        measured("batch", n, d, {"ours": solve}, problems=problems)


def plots(systems=("ours",)):
    cases = [("against n", n, d) for d, sizes in shapes.GPU_N.items() for n in sizes]
    cases += [("against d", n, d) for n, dimensions in shapes.GPU_D.items() for d in dimensions]
    for case, n, d in cases:
        if time_for(12, f"{case} {n} x {d}"):
            found = {name: run for name, run in gpu._points(n, d).items() if name.startswith(systems)}
            measured(case, n, d, found)


def first():
    for n, d in ((10_000, 3), (10_000, 64), (10_000, 3)):
        if time_for(15, f"first call at d = {d}"):
            seconds = float(fresh("gpu", str(n), str(d))) if CUDA else 0.0
            fact("first call in a fresh process", n=n, d=d, seconds=seconds)
            keep(
                "cuda",
                [{"case": "first call", "n": n, "d": d, "system": "ours", "first": seconds}],
                "flashot bench cuda",
            )


def repeated():
    """50 000 x 64 again and again: a card at its power limit is not a clock."""
    n, d = (60, 4) if QUICK else (50_000, 64)
    solve = gpu._points(n, d)["ours"]
    solve()
    for _ in range(2 if QUICK else 12):
        if not time_for(3, "repeated"):
            return
        fact(
            f"repeated {n} x {d}",
            ms_an_iteration=1e3 * gpu.gpu_times(solve)["queued"] / gpu.ITERATIONS,
            card=card_now(),
        )


def card_now():
    """Clock, power and temperature, read just after work."""
    if not CUDA:
        return ""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def large():
    """A million points a side; and peak memory after few and after many iterations, forward and backward."""
    for d in (3, 64):
        n = 200 if QUICK else 1_000_000
        if time_for(20, f"{n} x {d}"):
            spent("a million", n, d, 2, None)
    for gradient in (None, "implicit", "envelope", "unrolled"):
        for count in (10, 1000) if not QUICK else (3, 9):
            if time_for(8, f"memory, {gradient} {count}"):
                spent("memory", 100 if QUICK else 20_000, 3, count, gradient)


def spent(name, n, d, count, gradient):
    """Seconds and MB at the peak above the inputs, of a second call."""
    X, Y, a, epsilon = gpu.clouds(n, d)
    options = {"epsilon": epsilon, "max_iterations": count, "tolerance": 0.0, "acceleration": None}
    options |= {"gradient": gradient} if gradient else {}

    def once():
        x = X.clone().requires_grad_(gradient is not None)
        solution = gpu.solve(gpu.PointCloud(x, Y), a, a, **options)
        if gradient:
            torch.autograd.grad(solution.value(), x)
        if CUDA:
            torch.cuda.synchronize()

    try:
        if n < 10**6:
            once()
        free()
        base = torch.cuda.memory_allocated() if CUDA else 0
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        once()
        peak = torch.cuda.max_memory_allocated() - base if CUDA else 0
        fact(
            f"{name}, {n} x {d}",
            iterations=count,
            gradient=gradient or "none",
            seconds=time.perf_counter() - begun,
            peak_mb=peak / 2**20,
        )
    except Exception as problem:
        failed(f"{name}, {n} x {d}", problem, iterations=count, gradient=gradient)
    free()


# ------------------------------------------------------------------------------------- flashot bench cuda --iterations


def iterations():
    """Ours on every problem, then annealing and plain updates, then those that wait for the host or take seconds."""
    dtype = torch.float32
    n = 60 if QUICK else shapes.ITERATIONS_CARD
    clock = time.perf_counter
    for names, most in (
        (("ours",), 4),
        (("ours, annealing", "plain"), 8),
        (("averaged", "flash-sinkhorn fp32"), 30),
        (("POT sinkhorn_log",), 40),
    ):
        for problem, case in shapes.PROBLEMS.items():
            made = shapes.make_problem(problem, n, dtype, DEVICE)
            systems = counts.systems(made, True, clock)
            for name in names:
                for error in counts.ERRORS[dtype]:
                    if name not in systems or not time_for(most, f"{problem}, {name} to {error}"):
                        continue
                    try:
                        found = systems[name](made, error)
                    except Exception as trouble:
                        failed(problem, trouble, system=name)
                        continue
                    fact(problem, system=name, error=error, iterations=found.iterations, ms=1e3 * found.seconds)
                    row = {"problem": problem, "hard": case.hard, "n": n, "dtype": str(dtype), "system": name}
                    row |= {"error": error, "iterations": found.iterations, "seconds": found.seconds}
                    keep("iterations-cuda", [row], "flashot bench cuda --iterations", clock="wall")
            free()


# --------------------------------------------------------------------------------------------------------- accuracy


def accuracy():
    """The lines of docs/accuracy.md; $OUT/accuracy.md. Every row that is off by more than the CPU's table is printed."""
    count = 30 if QUICK else 300
    lines = [f"- {name}: {value}" for name, value in about("python benchmarks/card/tables.py accuracy", DEVICE).items()]
    lines += ["", errors.HEADER]
    started = time.time()
    for case in errors.cases(count):
        for dtype in case.dtypes:
            kernel = "torch" if dtype == torch.float64 or not CUDA else "triton"
            for scale in errors.SCALES:
                if not time_for(3, f"accuracy {case.name} {dtype} {scale}"):
                    return
                try:
                    lines.append(errors.row(case, dtype, scale, DEVICE, kernel))
                except Exception as problem:
                    failed(f"accuracy {case.name}", problem, dtype=str(dtype), scale=scale)
                (OUT / "accuracy.md").write_text("\n".join(lines) + "\n")
        say(lines[-1])
    fact("accuracy", rows=len(lines) - lines.index(errors.HEADER) - 1, seconds=time.time() - started)


def without_a_card():
    """The same code where there is none."""
    if CUDA:
        return
    here = lambda made: lambda *given, device=None, **more: made(*given, **more)
    gpu.torch = types.SimpleNamespace(
        cdist=torch.cdist,
        Tensor=torch.Tensor,
        Generator=lambda _: torch.Generator(),
        randn=here(torch.randn),
        full=here(torch.full),
        cuda=types.SimpleNamespace(get_device_name=lambda: "no card", empty_cache=lambda: None),
    )
    gpu.gpu_times = lambda function: {
        "first": 0.0,
        **dict.fromkeys(("latency", "queued"), seconds(function)),
        "peak_bytes": 0,
    }


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    say(torch.cuda.get_device_name() if CUDA else "no card", torch.__version__)
    search_side_by_side()
    if QUICK:
        shapes.GPU_POINTS, shapes.GPU_BATCH = [(40, 2)], (3, 20, 4)
        shapes.GPU_N, shapes.GPU_D, shapes.ITERATIONS_MOST = {3: [30]}, {}, 200
        without_a_card()
    parts = {
        "first": first,
        "points": points,
        "repeated": repeated,
        "large": large,
        "plots": plots,
        "iterations": iterations,
        "accuracy": accuracy,
    }
    run(parts | ({"peers": lambda: plots("flash-sinkhorn")} if QUICK or "peers" in WORDS else {}))
