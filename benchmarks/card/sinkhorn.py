"""Sinkhorn's own loop on one CUDA card: errors against float64 beside the host's loop, times of an iteration, strips.

python benchmarks/card/sinkhorn.py [check] [time] [strips] [gradients] [small]   (default: all; about three minutes)

`check`   annealing, a reach with terms of one side, looks at every iteration: by the card's own loop and steered by the
          host, both in float32, from the host's loop in float64.
`time`    milliseconds of an iteration and of a whole solve, the card's own loop and the host's.
`strips`  milliseconds of an iteration with rows in registers (one exponential for both updates), in the shape that they
          take and in that of longer rows, and without. Where they lose, ``triton.Strips.fit`` is to refuse them, as it
          does more than 10 240 columns of five to eight coordinates.

`gradients`  value and unrolled gradient of ten iterations, and how long the card works for that by torch's profiler.
`small`   microseconds of an iteration of a call like the one before, by the clock of .bench/ot_gpu.py, and of the host.

SECONDS_LEFT in the environment is when to stop: what would take longer is left out, and says so.
"""

import contextlib
import sys
import time
import types
from pathlib import Path

from facts import say, time_for

import torch

from flashot_backends.kernels.sinkhorn import triton, triton_loop
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, repeat, solve

DEVICE = "cuda"
ANNEAL = {"acceleration": "annealing", "tolerance": 1e-4, "max_iterations": 600}
RELAX = {"acceleration": "overrelaxation", "tolerance": 1e-5, "max_iterations": 400}


def cloud(n, d, seed, batch=()):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.rand(*batch, n, d, device=DEVICE, generator=generator, dtype=torch.float64)


def make(kind, n, m, dtype, batch=()):
    """A cost, by the number of coordinates or a name: "matrix", "inner", "labels"."""
    d = kind if isinstance(kind, int) else 3
    x, y = (part.to(dtype) for part in (cloud(n, d, 0, batch), cloud(m, d, 1, batch)))
    if kind == "matrix":
        return DenseCost(torch.cdist(x.double(), y.double()).square().to(dtype))
    if kind == "labels":
        labels = torch.arange(n, device=DEVICE) % 4, torch.arange(m, device=DEVICE) % 3
        return PointCloud(x, y, labels=labels, table=cloud(4, 3, 2).to(dtype))
    return PointCloud(x, y, metric="inner" if kind == "inner" else "sqeuclidean")


@contextlib.contextmanager
def steered(by_host):
    """Whether the host steers what the card could."""
    before, triton.Fused.whole_loop = triton.Fused.whole_loop, not by_host
    try:
        yield
    finally:
        triton.Fused.whole_loop = before


CHECKS = [  # name, kind, ε of a coordinate, options
    ("annealing, 3 coordinates", 3, 1e-3, ANNEAL),
    ("annealing, 64 coordinates", 64, 1e-3, ANNEAL),
    ("annealing, a matrix", "matrix", 1e-3, ANNEAL),
    ("annealing, a reach", 3, 1e-3, ANNEAL | {"reach": (0.5, 2.0)}),
    ("annealing, inner, a reach", "inner", 1e-3, ANNEAL | {"reach": 1.0}),
    ("inner, a reach", "inner", 0.02, RELAX | {"reach": (0.5, 2.0)}),
    ("labels, a reach", "labels", 0.02, RELAX | {"reach": (0.5, 2.0)}),
    ("every iteration looked at", 3, 0.02, RELAX | {"reach": (0.5, 2.0), "check_every": 1}),
    ("every iteration, labels", "labels", 0.02, RELAX | {"reach": (0.5, 2.0), "check_every": 1}),
]


def check():
    """Iterations, error, and how far potentials are from float64's, in ε."""
    for n, m in ((400, 500), (3000, 3500)):
        for name, kind, epsilon, options in CHECKS:
            if not time_for(6, f"checking {name}"):
                return
            options = options | {"epsilon": epsilon * (kind if isinstance(kind, int) else 3)}
            wanted = solve(make(kind, n, m, torch.float64), **options)
            row = [f"{n} x {m}, {name}: float64 {int(wanted.iterations)} iterations, error {float(wanted.error):.1e}"]
            for who, by_host in (("card", False), ("host", True)):
                with steered(by_host):
                    found = solve(make(kind, n, m, torch.float32), backend="triton", **options)
                f, g = found.f.double() - wanted.f, found.g.double() - wanted.g
                shift = 0.0 if "reach" in options else f.mean()
                away = max(float((f - shift).abs().max()), float((g + shift).abs().max())) / options["epsilon"]
                row.append(f"{who} {int(found.iterations)}, {float(found.error):.1e}, {away:.1e} ε off")
            say("; ".join(row))


def forget():
    """Loops and layouts of earlier solves, which may have been told to run otherwise."""
    triton_loop._kept.clear()
    repeat._plans.clear()


def milliseconds(run, calls=3):
    """Of one call; the best of some."""
    run()
    best = float("inf")
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def iteration(cost, more=100, **options):
    """Milliseconds of one iteration: what ``more`` of them take longer than ten."""
    forget()
    few, many = (
        milliseconds(lambda: solve(cost, tolerance=0, backend="triton", max_iterations=count, **options))  # noqa: B023
        for count in (10, 10 + more)
    )
    return (many - few) / more


TIMES = [  # name, kind, n, ε, options
    ("annealing, 3 coordinates", 3, 10_000, 3e-3, ANNEAL | {"tolerance": 0, "max_iterations": 200}),
    ("annealing, 64 coordinates", 64, 10_000, 64e-3, ANNEAL | {"tolerance": 0, "max_iterations": 200}),
    ("annealing, 1 000 points", 3, 1000, 3e-3, ANNEAL | {"tolerance": 0, "max_iterations": 200}),
    ("inner, a reach", "inner", 10_000, 0.06, RELAX | {"tolerance": 0, "max_iterations": 100, "reach": (0.5, 2.0)}),
    ("labels, a reach", "labels", 10_000, 0.06, RELAX | {"tolerance": 0, "max_iterations": 100, "reach": 1.0}),
    ("every iteration looked at", 3, 10_000, 0.06,
     RELAX | {"tolerance": 0, "max_iterations": 100, "reach": 1.0, "check_every": 1}),
]  # fmt: skip


def times():
    """A whole solve, and that over its iterations."""
    for name, kind, n, epsilon, options in TIMES:
        if not time_for(8, f"timing {name}"):
            return
        cost, row = make(kind, n, n, torch.float32), [f"{n} points, {name}, {options['max_iterations']} iterations"]
        for who, by_host in (("card", False), ("host", True)):
            forget()
            with steered(by_host):
                run = lambda: solve(cost, epsilon=epsilon, backend="triton", **options)  # noqa: B023, E731
                found = milliseconds(run, 1 if by_host else 3)
            row.append(f"{who} {found:.2f} ms, {found / options['max_iterations']:.4f} an iteration")
        say("; ".join(row))


def strips():
    """With and without rows in registers; and for rows of middle length, in the shape of longer ones."""
    fit, long, cases = triton.Strips.fit, triton.Strips.LONG, []
    cases += [(d, 10_000, 10_240, {}) for d in (5, 8)]
    cases += [(kind, 10_000, m, {}) for kind in (1, 3, 4, "matrix") for m in (10_240, 12_288)]
    cases += [(kind, 10_000, m, {"reach": (0.5, 2.0)}) for kind in (1, 3, 5, 8, "matrix") for m in (10_000, 16_384)]
    cases += [(kind, 10_000, 10_000, {"reach": (0.5, 2.0)}) for kind in ("inner", "labels")]
    for kind, n, m, options in cases:
        if not time_for(4, f"strips of {kind}, {m} columns"):
            return
        cost, found = make(kind, n, m, torch.float32), []
        for with_strips, shorter in ((True, long), (False, long), (True, dict.fromkeys(long, 10_000))):
            triton.Strips.fit = fit if with_strips else classmethod(lambda cls, op: False)
            triton.Strips.LONG = shorter
            try:
                found.append(iteration(cost, epsilon=0.05 * (kind if isinstance(kind, int) else 3), **options))
            finally:
                triton.Strips.fit, triton.Strips.LONG = fit, long
        what = f"{kind}, {n} x {m}{', a reach' if options else ''}"
        loses = ", STRIPS LOSE" if found[0] > found[1] else ""
        say(f"{what}: strips {found[0]:.4f} ms, as if long {found[2]:.4f}, two passes {found[1]:.4f}{loses}")


def gradients():
    """Of the sum of all potentials by one cloud, or by the matrix."""
    for kind, n in ((3, 1000), (3, 10_000), (64, 10_000), ("matrix", 10_000)):
        if not time_for(8, f"gradients of {kind}, {n}"):
            return
        cost, epsilon = make(kind, n, n, torch.float32), 0.1 * (kind if isinstance(kind, int) else 1)
        leaf = cost.tensors[0].requires_grad_()

        def run():
            leaf.grad = None  # noqa: B023
            found = solve(cost, epsilon=epsilon, max_iterations=10, tolerance=0.0)  # noqa: B023
            (found.f.sum() + found.g.sum()).backward()

        whole = milliseconds(run, 6)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        worked = sum(event.device_time_total for event in profile.key_averages()) / 1e3
        say(f"{n} points, {kind}: {whole:.2f} ms, of which the card works {worked:.2f}")


def small():
    """Twenty iterations a call."""
    clock, text = types.ModuleType("ot_gpu"), Path(".bench/ot_gpu.py").read_text()
    exec(compile(text, "ot_gpu", "exec"), vars(clock))
    for n, d in ((256, 2), (1024, 64), (4096, 64), (10_000, 3)):
        for kind in (d, "matrix"):
            if not time_for(4, f"{n} points, {kind}"):
                return
            cost, a = make(kind, n, n, torch.float32), torch.full((n,), 1 / n, device=DEVICE)
            run = lambda: solve(cost, a, a, epsilon=0.1, max_iterations=20, tolerance=0.0)  # noqa: B023, E731
            found = [clock.bench(run) for _ in range(3)]
            start = time.perf_counter()
            for _ in range(100):
                run()
            host = (time.perf_counter() - start) / 100
            torch.cuda.synchronize()
            one, queued = (50 * min(row[key] for row in found) for key in ("ms", "queued"))
            say(f"{n} points, {kind}: {one:.1f} µs an iteration in one call, {queued:.1f} queued; a call {1e6 * host:.0f} µs")


PARTS = {"check": check, "time": times, "strips": strips, "gradients": gradients, "small": small}
if __name__ == "__main__":
    say(torch.cuda.get_device_name(), torch.__version__)
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
    forget()
