"""What the newer scripts of this folder share: the clock and the deadline, one line for each fact, and JSON in $OUT.

``quick`` among the arguments, or QUICK=1 in the environment, means tiny sizes, and a CPU where there is no card: it shows that a script runs, nothing else.
SECONDS_LEFT in the environment is when to stop: what would take longer is left out, and says so.
"""

import json
import os
import sys
import time
from pathlib import Path

START, SECONDS = time.time(), float(os.environ.get("SECONDS_LEFT", "570"))
QUICK = "quick" in sys.argv or bool(os.environ.get("QUICK"))
WORDS = [word for word in sys.argv[1:] if word != "quick"]
sys.path.append(os.getcwd())
_found: list[dict] = []


def say(*parts):
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def time_for(seconds, what):
    """Whether so many seconds are left."""
    if QUICK or time.time() - START + seconds < SECONDS:
        return True
    fact("left out", what=str(what), needs=seconds)
    return False


def fact(name, /, **values):
    """One line of output and one row of $OUT/SCRIPT-PARTS.json, which is written anew each time."""
    _found.append({"fact": name, **values})
    say(name, " ".join(f"{key}={_short(value)}" for key, value in values.items()))
    folder = os.environ.get("OUT")
    if folder:
        title = "-".join([Path(sys.argv[0]).stem, *WORDS])
        (Path(folder) / f"{title}.json").write_text(json.dumps(_found, indent=1, default=str) + "\n")


def _short(value):
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        return "[" + " ".join(map(_short, value)) + "]"
    return str(value)


def failed(name, problem, **values):
    """A part that fails is a fact too."""
    fact(name, **values, failed=f"{type(problem).__name__}: {problem}"[:200])


def run(parts):
    """The parts that were asked for, or all."""
    unknown = [word for word in WORDS if word not in parts]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(parts)}, and quick")
    for word in WORDS or parts:
        try:
            parts[word]()
        except Exception as problem:
            failed(word, problem)
            if QUICK:
                raise


def timed(function, budget=4.0):
    """Milliseconds of one call from an idle queue and of one of many, seconds of the first, MB at the peak."""
    import torch

    if torch.cuda.is_available():
        from benchmarks.measure import gpu_times

        found = gpu_times(function, budget)
    else:
        start = time.perf_counter()
        function()
        seconds = time.perf_counter() - start
        found = {"first": seconds, "latency": seconds, "queued": seconds, "peak_bytes": 0}
    return {
        "latency_ms": 1e3 * found["latency"],
        "queued_ms": 1e3 * found["queued"],
        "first_s": found["first"],
        "peak_mb": found["peak_bytes"] / 2**20,
    }


def free():
    """Give memory back between rows."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def relative(found, exact):
    """The norm of the error over that of what is right."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def search_side_by_side():
    """Peers search launch shapes for each new size: let all candidates be compiled at once before they are timed.

    The times that decide are taken alone, as always; only the first call of a peer is shorter than its users see.
    """
    from concurrent.futures import ThreadPoolExecutor

    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    pruned = Autotuner.prune_configs

    def prune_configs(self, kwargs):
        configs = pruned(self, kwargs)

        def compiled(config):
            try:
                self.fn.run(*self.nargs.values(), **{**kwargs, "warmup": True}, **config.all_kwargs())
            except Exception:
                return  # the search meets it again, and knows what to do

        if len(configs) > 1:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compiled, configs))
        return configs

    Autotuner.prune_configs = prune_configs
