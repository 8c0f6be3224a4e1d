"""Tables and plots from the JSON files, put between the marks in ``docs/performance.md``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Results = dict[str, Any]

COLOURS = {"ours": "#c1440e", "flash": "#c1440e", "floor": "0.6"}
SEARCHING = "flash-sinkhorn"  # a peer that searches for launch shapes at every size: measured at the table's alone
OTHERS = ("#1f5f8b", "#4f9d69", "#8c6bb1", "#b8860b", "#5b5b5b")


def write(results: Path, docs: Path) -> None:
    """Fill in what has been measured; a section without results stays as it is."""
    page = docs / "performance.md"
    text = page.read_text(encoding="utf-8")
    for device, section in (("cpu", cpu_section), ("cuda", cuda_section)):
        path = results / f"{device}.json"
        if path.exists():
            measured = json.loads(path.read_text(encoding="utf-8"))
            body = section(measured) + plots(device, measured, docs / "images")
            text = _between(text, device, body)
        path = results / f"iterations-{device}.json"
        if path.exists():
            measured = json.loads(path.read_text(encoding="utf-8"))
            text = _between(text, f"iterations on {device}", iterations_section(measured))
    page.write_text(text, encoding="utf-8")
    print(page)


def cpu_section(results: Results) -> str:
    """The rows that have a target, as a table."""
    heads = "| problem | system | ms an iteration | its time / ours | peak memory above inputs |"
    lines = [_heading(results), heads, _rule(5)]
    for case, host, label in (("dense", "POT sinkhorn_log", "matrix"), ("lazy", "POT isLazy", "points")):
        found = [row for row in results["rows"] if row["case"] == case]
        ours = next(row for row in found if row["system"] == "flash")["iteration"]
        for row in found:
            size = f"{row['n']:,}".replace(",", " ")
            name = f"{label} {size}², d = {row['d']}, {row['dtype']}"
            ratio = f"{row['iteration'] / ours:.1f}" if row["system"] != "flash" else ""
            bold = "**" if row["system"] == host else ""
            cells = (name, row["system"], f"{row['iteration'] * 1e3:.2f}", f"{bold}{ratio}{bold}", _megabytes(row))
            lines.append(_line(*cells))
    return "\n".join(lines) + "\n"


def cuda_section(results: Results) -> str:
    """Microseconds an iteration, latency and queued, with memory and error."""
    heads = "| n, d | system | µs an iteration: one call | queued | first call | peak memory | error |"
    lines = [_heading(results), heads, _rule(7)]
    for row in results["rows"]:
        if row["case"] in ("points", "batch") and "iteration" in row:
            label = f"{row['n']}, {row['d']}" + (" (a batch)" if row["case"] == "batch" else "")
            times = (_micro(row, "iteration"), _micro(row, "iteration_queued"), _seconds(row))
            lines.append(_line(label, row["system"], *times, _megabytes(row), _error(row)))
    fresh = [row for row in results["rows"] if row["case"] == "first call"]
    firsts = [f"n = {row['n']}, d = {row['d']}: {row['first']:.1f} s" for row in fresh]
    if firsts:
        lines += ["", "Our first call in a fresh process, compilation included: " + "; ".join(firsts) + "."]
    failed = [f"{row['system']} at n = {row['n']}: {row['failed']}" for row in results["rows"] if "failed" in row]
    return "\n".join([*lines, *(["", "Failed: " + "; ".join(failed)] if failed else [])]) + "\n"


def iterations_section(results: Results) -> str:
    """Iterations to each error, and the time to the smallest: a line for each problem."""
    found = results["rows"]
    names = list(dict.fromkeys(row["system"] for row in found))
    n, dtype = found[0]["n"], found[0]["dtype"].removeprefix("torch.")
    size = f"{n} and {n + n // 8} points, {dtype}"
    lines = [_heading(results), f"{size}.\n", _line("problem", *names), _rule(len(names) + 1)]
    for problem in dict.fromkeys(row["problem"] for row in found):
        cells = [[row for row in found if (row["problem"], row["system"]) == (problem, name)] for name in names]
        lines.append(_line(problem, *(_counts(cell) for cell in cells)))
    return "\n".join(lines) + "\n"


def _counts(rows: list[Row]) -> str:
    counts = " / ".join("–" if row["iterations"] is None else str(row["iterations"]) for row in rows)
    done = bool(rows) and rows[-1]["iterations"] is not None
    return f"{counts}, {rows[-1]['seconds'] * 1e3:.0f} ms" if done else counts


def plots(device: str, results: Results, folder: Path) -> str:
    """Draw time against n and against d; return the markdown that shows the pictures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for axis, fixed in (("n", "d"), ("d", "n")) for panel in _panels(results["rows"], axis, fixed)]
    if not panels:
        return ""
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    drawn = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, *panel)
        handles, names = axes.get_legend_handles_labels()
        drawn |= dict(zip(names, handles, strict=True))
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncol=len(drawn), fontsize=9, frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"performance-{device}.png"
    figure.savefig(folder / name, dpi=90)
    return f"\n![time of an iteration against n and d](images/{name})\n"


def _panels(rows: list[Row], axis: str, fixed: str) -> list[tuple[str, str, list[Row]]]:
    rows = [row for row in rows if "iteration" in row]
    chosen = [row for row in rows if row["case"] == f"against {axis}"]
    values = sorted({row[fixed] for row in chosen})
    chosen += [row for row in rows if row["case"] == "points" and row["system"].startswith(SEARCHING)]
    return [(axis, f"{fixed} = {value}", [row for row in chosen if row[fixed] == value]) for value in values]


def _draw(axes: Any, axis: str, title: str, rows: list[Row]) -> None:
    others = iter(OTHERS)
    for name in dict.fromkeys(_label(row) for row in rows):
        line = sorted((row[axis], row["iteration"]) for row in rows if _label(row) == name)
        family = re.split("[ ,]", name)[0]
        colour = COLOURS.get(family) or next(others)
        axes.loglog(*zip(*line, strict=True), label=name, color=colour, linestyle=_style(name),
                    marker="" if family == "floor" else "o", markersize=4)  # fmt: skip
    axes.set(xlabel="points a side, n" if axis == "n" else "dimension, d", ylabel="seconds an iteration", title=title)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)


def _label(row: Row) -> str:
    return f"{row['system']}, {row['dtype']}" if "dtype" in row else str(row["system"])


def _style(name: str) -> str:
    return "--" if "float32" in name or "fast" in name or name == "floor" else "-"


def _heading(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    load = f", load average before {results['load']:.1f}" if results.get("load") is not None else ""
    made = f"`{results['command']}` on {results['device']}, {results['date']}{load}"
    made += ", seconds of processor time" if results.get("clock") == "cpu" else ""
    made += f" ({results['note']})" if results.get("note") else ""
    return f"{made}; Python {results['python']}, {versions}.\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def _micro(row: Row, key: str) -> str:
    return f"{row[key] * 1e6:.1f}" if key in row else ""


def _seconds(row: Row) -> str:
    return f"{row['first']:.2f} s" if "first" in row else ""


def _megabytes(row: Row) -> str:
    return f"{row['peak_bytes'] / 2**20:.1f} MB" if "peak_bytes" in row else ""


def _error(row: Row) -> str:
    return f"{row['error']:.0e}" if row.get("error") is not None else ""


def _between(text: str, name: str, body: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{body}{end}{after}"
