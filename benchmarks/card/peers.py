"""../shared/bench on one CUDA card: every system in one run, size by size, as far as there is time.

python benchmarks/card/peers.py [ot] [geomloss] [maxsim] [quick]   (default: all; five minutes)

Needs .bench (a copy of ../shared/bench) and the wheels of POT, GeomLoss, flash-sinkhorn, flash-maxsim and
late-interaction-kernels: see prepare.py. The cases, systems and clocks are those of the scripts there. Added: torch.compile of
PyLate's einsum, a step of 1 024 x 1 024, and that a peer's search for launch shapes compiles its candidates side by side, so
that a first call says less than its users wait.
"""

import os
import sys
import types
from pathlib import Path

from facts import QUICK, fact, failed, free, relative, run, say, search_side_by_side, time_for, timed

import torch

CUDA = torch.cuda.is_available()
OT = "10000x64,10000x3,1024x64,256x2,50000x64,4096x64,10000x512,20000x128" if not QUICK else "40x2,30x64"
GEOMLOSS = [  # batch, points, dimensions, blur, debias
    (0, 1000, 3, 0.05, True),
    (0, 10000, 3, 0.05, True),
    (16, 1000, 3, 0.05, True),
    (0, 10000, 64, 0.3, False),
    (0, 50000, 3, 0.05, True),
]
SCORES = [(1, 32, 10000, 180), (1, 32, 10000, 300), (32, 32, 1000, 300), (1, 32, 100, 180), (1, 1024, 10000, 1024)]
STEPS = [(64, 32, 256, 300), (32, 32, 32, 180), (1024, 32, 1024, 180), (16, 512, 16, 1024)]


def load(name):
    """A module of ../shared/bench; without a card it is told so."""
    text = (Path(".bench") / f"{name}.py").read_text().replace("\nmain()\n", "\n")
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text if CUDA else text.replace('"cuda"', '"cpu"'), name, "exec"), vars(module))
    if not CUDA:
        module.bench = bench
    return module


def bench(function):
    """Their keys, without a card."""
    found = timed(function)
    ms = found["latency_ms"]
    return {"queued": ms, "ms": ms, "min": ms, "max": ms, "first_s": found["first_s"], "peak_mb": 0.0}


def row(name, system, module, function, **values):
    """Measure one system."""
    try:
        found = module.bench(function)
        more = {key: value(found) for key, value in values.items() if callable(value)}
        fact(name, system=system, **{**values, **more}, **found)
        return True
    except Exception as problem:
        failed(name, problem, system=system)
        return False
    finally:
        free()


def ot():
    module, iterations = load("ot_gpu"), 20
    for size in OT.split(","):
        n, d = map(int, size.split("x"))
        if not time_for(25, f"ot {size}"):
            continue
        for system, function in module.systems(n, n, d, 0.1 * d, iterations).items():
            if time_for(12, f"ot {size} {system}"):
                each = lambda found: 1e3 * found["queued"] / iterations
                row(
                    f"ot {size}",
                    system,
                    module,
                    function,
                    us_an_iteration=lambda found: 1e3 * found["ms"] / iterations,
                    us_queued=each,
                )


def geomloss():
    load("ot_gpu")
    module = load("geomloss_gpu")
    import geomloss as host

    import flashot_backends

    flashot_backends.enable()
    for B, n, d, blur, debias in GEOMLOSS:
        n = n // 100 if QUICK else n
        name = f"geomloss {B} x {n} x {d}"
        if not time_for(15, name):
            continue
        x, y = module.cloud(B, n, d, 1), module.cloud(B, n, d, 2) * 0.8 + 0.1
        options = {"blur": blur, "scaling": 0.5, "debias": debias}
        losses = {"ours": host.SamplesLoss("sinkhorn", p=2, backend="flash", **options)}
        if n <= 10000:
            losses["tensorized"] = host.SamplesLoss("sinkhorn", p=2, backend="tensorized", **options)
        try:
            import flash_sinkhorn

            for tf32 in (True, False):
                losses[f"flash-sinkhorn tf32={tf32}"] = flash_sinkhorn.SamplesLoss(
                    "sinkhorn", half_cost=True, normalize=True, allow_tf32=tf32, **options
                )
        except Exception as problem:
            failed(name, problem, system="flash-sinkhorn")
        exact = module.step(losses["tensorized"], x.double(), y.double())() if "tensorized" in losses else None
        for system, loss in losses.items():
            if time_for(12, f"{name} {system}"):
                step = module.step(loss, x.float(), y.float())
                if row(name, system, module, step, blur=blur, debias=debias) and exact is not None:
                    errors = [relative(one, other) for one, other in zip(step(), exact, strict=True)]
                    fact(name, system=system, errors_of_value_and_gradient=errors)


def maxsim():
    load("ot_gpu")
    module = load("maxsim_gpu")
    plain = module.naive
    for kind, case, shapes, dtype in (
        ("infer", module.infer_case, SCORES, torch.float16),
        ("train", module.train_case, STEPS, torch.bfloat16),
    ):
        for shape in shapes:
            if QUICK:
                shape = tuple(max(1, extent // 30) for extent in shape)
            queries, tokens, documents, length = shape
            name = f"maxsim {kind} {queries} x {documents}, {tokens} x {length}"
            if not time_for(20, name):
                continue
            systems = case(queries, tokens, documents, length, 128, dtype)
            if CUDA:
                torch._dynamo.reset()
            module.naive = compiled = torch.compile(plain, dynamic=False) if CUDA else plain
            systems["torch.compile"] = case(queries, tokens, documents, length, 128, dtype)["torch einsum"]
            for system, function in systems.items():
                if time_for(10, f"{name} {system}"):
                    module.naive = compiled if system == "torch.compile" else plain
                    row(name, system, module, function)
            module.naive = plain
            free()


if __name__ == "__main__":
    say(torch.cuda.get_device_name() if CUDA else "no card", torch.__version__, f"{os.cpu_count()} cores")
    search_side_by_side()
    run({"ot": ot, "geomloss": geomloss, "maxsim": maxsim})
