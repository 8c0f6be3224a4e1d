"""``flashot bench`` in a checkout: measure, write ``benchmarks/results/``, and fill in ``docs/performance.md``."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from . import measure
from .measure import ROOT, about

RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmarks with these arguments of the command line."""
    parser = argparse.ArgumentParser(prog="flashot bench", description=__doc__)
    parser.add_argument("device", nargs="?", choices=("auto", "cpu", "cuda", "none"), default="auto",
                        help="what to measure; none only writes the report again (default: %(default)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes or fewer, to see that it works; no report")
    parser.add_argument("--clock", choices=tuple(measure.CLOCKS), default="wall",
                        help="cpu counts processor time, for a busy machine: set OMP_NUM_THREADS=1")  # fmt: skip
    parser.add_argument("--no-first", action="store_true", help="leave out first calls in fresh processes (cuda)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--iterations", action="store_true", help="iterations and time to a marginal error, instead")
    parser.add_argument("--no-report", action="store_true", help="leave docs/ as it is")
    options = parser.parse_args(arguments)
    device = _device(options.device)
    if device != "none":
        name = f"iterations-{device}" if options.iterations else device
        name += "-quick" if options.quick else ""
        _write(options.results / f"{name}.json", _measure(device, options))
    if not options.no_report and not options.quick:
        from .report import write

        write(options.results, ROOT / "docs")


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _measure(device: str, options: argparse.Namespace) -> dict[str, Any]:
    flags = [*(["--quick"] if options.quick else []), *(["--iterations"] if options.iterations else [])]
    flags += ["--clock", options.clock] if options.clock != "wall" else []
    command = shlex.join(["flashot", "bench", device, *flags])
    if options.iterations:
        return _measure_iterations(device, command, options)
    if device == "cuda":
        import torch

        from . import gpu

        found = gpu.rows(options.quick, not options.no_first)  # events on the card, whatever the clock
        return {**about(command, torch.cuda.get_device_name()), "rows": found}
    from . import cpu

    header = about(command, _processor())  # the load before we are part of it
    return {**header, "clock": options.clock, "rows": cpu.rows(options.quick, measure.CLOCKS[options.clock])}


def _measure_iterations(device: str, command: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from . import iterations

    header = about(command, torch.cuda.get_device_name() if device == "cuda" else _processor())
    found = iterations.rows(device, options.quick, measure.CLOCKS[options.clock])
    return {**header, "clock": options.clock, "rows": found}


def _processor() -> str:
    import os

    return f"{os.cpu_count()} CPU cores"


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
