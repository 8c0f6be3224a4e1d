"""``flashot demo``: one plain POT script, run three ways, and what came of it as a table and a picture.

The script, ``examples/colour_transfer.py``, gives two photographs each other's colours. Each run is a fresh process:
Python alone with the host's own solver, then ``python -m flashot_backends`` with the method "flash".
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

NEEDED = {"ot": "POT", "sklearn": "scikit-learn", "torch": "torch", "PIL": "pillow", "matplotlib": "matplotlib"}
PICTURE = "flashot-demo.png"
REDUCE_CPU, REDUCE_CUDA = (10, 3), (4, 1)  # blocks of pixels that are averaged: what the host can hold, and full size
QUICK = (40, 20)
_PROGRESS = re.compile(r"\s*(\d+)\|")  # POT's own verbose lines: "   20|1.234567e-03|"


class Way(NamedTuple):
    """One way to run the script."""

    label: str
    flash: bool
    lazy: bool
    reduce: int

    def command(self, iterations: int, folder: Path) -> list[str]:
        """What to start."""
        host = [sys.executable, "-u"]
        method = "flash" if self.flash else "sinkhorn_log"
        if self.flash:
            host += ["-m", "flashot_backends"]
        options = ["--method", method, "--reduce", str(self.reduce), "--iterations", str(iterations)]
        outputs = ["--picture", str(folder / "all.png"), "--numbers", str(folder / "numbers.npz")]
        return [*host, str(script()), *options, *outputs, *(["--lazy"] if self.lazy else [])]


class Outcome(NamedTuple):
    """What a run wrote down: images (height, width, 3) in [0, 1], seconds, bytes, and the error of the marginals."""

    way: Way
    source: Any
    target: Any
    source_moved: Any
    target_moved: Any
    seconds: float
    memory: float
    error: float
    device: str

    @property
    def pixels(self) -> str:
        """How many are matched with how many."""
        count, other = (image.shape[0] * image.shape[1] for image in (self.source, self.target))
        return f"{count:,} × {other:,}".replace(",", " ")

    @property
    def matrix(self) -> int:
        """Bytes of one float32 matrix of all pairs."""
        return 4 * self.source[..., 0].size * self.target[..., 0].size

    def differs(self, other: Outcome) -> float:
        """The largest difference of a colour, of 255 steps."""
        pairs = ((self.source_moved, other.source_moved), (self.target_moved, other.target_moved))
        return max(float(abs(mine - theirs).max()) * 255 for mine, theirs in pairs)


def main(arguments: list[str] | None = None) -> None:
    """Run the demo with these arguments of the command line."""
    options = _parser().parse_args(arguments)
    _check_installed()
    small, full = QUICK if options.quick else REDUCE_CUDA if _has_card() else REDUCE_CPU
    ways = (
        Way("sinkhorn_log", False, False, small),
        Way("flash", True, False, small),
        Way("flash, lazy", True, True, full),
    )
    outcomes = _run_all(ways, options.iterations)
    _print_table(outcomes)
    draw(outcomes, options.out)
    print(f"picture: {options.out}")


def script() -> Path:
    """Where the script lies: in a checkout's examples/, or in the installed package."""
    examples = importlib.import_module("flashot_backends.examples")
    return Path(next(iter(examples.__path__))) / "colour_transfer.py"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashot demo",
        description="Run one plain POT script three ways: colours of two photographs, exchanged by optimal transport.",
    )
    parser.add_argument("--out", type=Path, default=Path(PICTURE), help="the picture to write (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=60, help="a multiple of ten (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few hundred pixels, to see that everything works")
    return parser


def _check_installed() -> None:
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f'flashot demo needs {", ".join(missing)}: pip install "flashot-backends[demo]"\n'
            f'(in a checkout: pip install -e ".[demo]")',
            file=sys.stderr,
        )
        raise SystemExit(2)


def _has_card() -> bool:
    import torch

    return bool(torch.cuda.is_available())


# Running


def _run_all(ways: tuple[Way, ...], iterations: int) -> list[Outcome]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()
    with Progress(*columns) as progress:
        tasks = [progress.add_task(way.label, total=None, start=False, state="waits") for way in ways]
        return [_run(way, iterations, progress, task) for way, task in zip(ways, tasks, strict=True)]


def _run(way: Way, iterations: int, progress: Any, task: Any) -> Outcome:
    progress.start_task(task)
    progress.update(task, state="starts", total=iterations)
    with tempfile.TemporaryDirectory() as name:
        for line in _lines(way.command(iterations, Path(name)), progress):
            found = _PROGRESS.match(line)
            if found:
                done = min(int(found[1]) // 10 * 10, iterations)
                progress.update(task, completed=done, state=f"iteration {done}")
        outcome = _read(way, Path(name) / "numbers.npz")
    progress.update(task, completed=iterations, state=outcome.pixels)
    progress.stop_task(task)
    return outcome


def _lines(command: list[str], progress: Any) -> Iterator[str]:
    """What the program prints, as it does; stops the demo with all of it when the program fails."""
    with subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            yield line
    if process.returncode:
        progress.stop()
        print(f"{' '.join(command)}\nended with {process.returncode}:\n{''.join(said[-40:])}", file=sys.stderr)
        raise SystemExit(1)


def _environment() -> dict[str, str]:
    """Ours, without the switches of an earlier `flashot run`; idle threads sleep instead of spinning."""
    drop = ("FLASHOT_ENABLE", "FLASHOT_WATCH", "FLASHOT_SUBSTITUTE")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment["PYTHONIOENCODING"] = "utf-8"
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").exists():  # a checkout, which may not be installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    return environment


def _read(way: Way, path: Path) -> Outcome:
    import numpy as np

    with np.load(path) as numbers:
        source, target, *moved = (numbers[name] for name in ("source", "target", "source_moved", "target_moved"))
        seconds, memory, error = (float(numbers[name]) for name in ("seconds", "memory", "error"))
        return Outcome(way, source, target, moved[0], moved[1], seconds, memory, error, str(numbers["device"]))


# Showing


def _print_table(outcomes: list[Outcome]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading, side in zip(_HEADINGS, ("left", *["right"] * 5), strict=True):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for outcome in outcomes:
        table.add_row(*_row(outcome, outcomes[0]))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    console.print(f"on {_where(outcomes[0].device)}; {_FOOTNOTE}")


_HEADINGS = ("method", "pixels", "time", "memory", "marginals", "against POT")
_FOOTNOTE = (
    "memory: peak above the inputs; marginals: their L1 error;\n"
    "against POT: largest difference of a colour, of 255; matrix: what one of all pairs would take in float32"
)


def _row(outcome: Outcome, host: Outcome) -> tuple[str, ...]:
    if outcome is host:
        agreement = ""
    elif outcome.source.shape == host.source.shape:
        agreement = f"{outcome.differs(host):.4f}"
    else:
        agreement = f"matrix: {_bytes(outcome.matrix)}"
    time, memory = f"{outcome.seconds:.1f} s", _bytes(outcome.memory)
    return outcome.way.label, outcome.pixels, time, memory, f"{outcome.error:.0e}", agreement


def _bytes(count: float) -> str:
    megabytes = max(count, 0) / 2**20
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1024:.1f} GB"


def _where(device: str) -> str:
    if device != "cuda":
        return f"{os.cpu_count()} CPU cores"
    import torch

    return str(torch.cuda.get_device_name())


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Write the picture: both photographs, and the colours exchanged as each run did it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    host, flash, full = outcomes
    figure = Figure(figsize=(11, 6.05), facecolor="white")
    FigureCanvasAgg(figure)
    edges = {"left": 0.008, "right": 0.992, "top": 0.915, "bottom": 0.095, "wspace": 0.02, "hspace": 0.025}
    grid = figure.subplots(2, 3, gridspec_kw=edges)
    top = (full.source, host.source_moved, full.source_moved)
    bottom = (full.target, host.target_moved, full.target_moved)
    titles = ("two photographs", _title("POT, sinkhorn_log", host), _title('POT, method="flash"', full))
    for axes, images in zip(grid, (top, bottom), strict=True):
        for axis, image in zip(axes, images, strict=True):
            axis.imshow(image, interpolation="nearest", aspect="auto")
            axis.set_axis_off()
    for axis, title in zip(grid[0], titles, strict=True):
        axis.set_title(title, fontsize=10.5, loc="left")
    figure.text(0.008, 0.02, _caption(host, flash, full), fontsize=9, color="0.35", va="bottom")
    figure.savefig(path, dpi=110)


def _title(name: str, outcome: Outcome) -> str:
    return f"{name}\n{outcome.pixels} pixels, {outcome.seconds:.1f} s, {_bytes(outcome.memory)}"


def _caption(host: Outcome, flash: Outcome, full: Outcome) -> str:
    return (
        f"Optimal transport between the colours of two photographs, one unchanged POT script, "
        f"on {_where(full.device)}.\n"
        f"At POT's {host.pixels} pixels, flash took {flash.seconds:.1f} s and {_bytes(flash.memory)}; "
        f"its colours differ by at most {flash.differs(host):.4f} of 255. Photographs: scikit-learn."
    )
