"""Time, memory and the rows that are written down."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PACKAGES = ("flashot-backends", "torch", "triton", "numpy", "POT", "flash-sinkhorn", "pykeops", "geomloss",
            "jax", "ott-jax")  # fmt: skip


Clock = Callable[[], float]


def cpu_times(
    systems: Mapping[str, Callable[[], Any]], repeat: int, budget: float = 60.0, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each call. The systems take turns, so that a busy machine is busy for all of them.

    A system that has used up its budget of seconds is not called again.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    for function in systems.values():
        _seconds(function, clock)
    for _ in range(repeat):
        for name, function in systems.items():
            if not times[name] or sum(times[name]) + times[name][-1] < budget:
                times[name].append(_seconds(function, clock))
    return times


def _seconds(function: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    start = clock()
    function()
    return clock() - start


def gpu_times(function: Callable[[], Any], budget: float = 8.0) -> dict[str, float]:
    """Seconds of the first call, of one call from an idle queue (median), of calls back to back; and peak bytes."""
    import torch

    first, second = _finished(function), _finished(function)
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    latency = [_events(function, 1) for _ in range(max(1, min(9, int(budget / 2 / max(second, 1e-6)))))]
    peak = torch.cuda.max_memory_allocated() - base
    queued = _events(function, max(1, min(20, int(budget / 4 / max(second, 1e-6)))))
    return {"first": first, "latency": statistics.median(latency), "queued": queued, "peak_bytes": peak}


def _finished(function: Callable[[], Any]) -> float:
    import torch

    def call() -> None:
        function()
        torch.cuda.synchronize()

    return _seconds(call)


def _events(function: Callable[[], Any], calls: int) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def fresh(module: str, *arguments: str) -> str:
    """The last line that one of our modules prints when it is run in a process of its own, nothing compiled before."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", f"flashot_backends.benchmarks.{module}", *arguments]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes; what its parent held does not count."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])  # type: ignore[index]
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def about(command: str, device: str) -> dict[str, Any]:
    """When, where and with which versions a run was made."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    threads = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    return {
        "date": date.today().isoformat(),
        "command": " ".join([*threads, command]),
        "device": device,
        "python": platform.python_version(),
        "versions": versions,
        "load": load,
    }
