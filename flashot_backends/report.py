"""What ``flashot status`` prints: settings with their sources, hosts, kernels."""

from __future__ import annotations

import platform
import sys
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__, autoload, config, dispatch, hosts
from .plugins.manager import registry

_GOOD, _IDLE, _BAD = "green", "dim", "yellow"


def show(file: IO[str] | None = None) -> None:
    """Print the whole report to ``file`` (default: standard output)."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = 200  # a log file need not wrap
    console.print(_heading())
    for table in (_settings(), _hosts(), _kernels()):
        console.print()
        console.print(table)


def _heading() -> Text:
    text = Text.assemble(("flashot-backends ", "bold"), (__version__, "bold"), f"  Python {platform.python_version()}")
    torch = sys.modules.get("torch")
    if torch is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        text.append(f"  torch {torch.__version__} ({device})")
    text.append("\nin this process: ")
    text.append(*(("enabled", _GOOD) if hosts.is_enabled() else ("not enabled", _IDLE)))
    text.append("  autoload: ")
    text.append(*_autoload())
    return text


def _autoload() -> tuple[str, str]:
    path, unwatched = autoload.state()
    if path is None:
        return "off", _IDLE
    if unwatched:
        return f"on, but not for {', '.join(unwatched)}: run `flashot autoload on` again", _BAD
    return "on", _GOOD


def _settings() -> Table:
    table = _table("Settings", "key", "value", "from")
    for key, (value, source) in config.sources().items():
        table.add_row(key, _value(key, value), Text(source, style=_IDLE if source == "default" else ""))
    return table


def _value(key: str, value: Any) -> str:
    if key == "backend" and value is None:
        return "by priority"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _hosts() -> Table:
    table = _table("Hosts", "name", "distribution", "version", "tested", "default replaced", "state")
    substitute = config.settings().substitute
    for spec, version, state in hosts.report():
        style = _GOOD if state in ("adapted", "ready", "waits for its import") else _IDLE
        style = style if style == _GOOD or state in ("not installed", "adapted, switched off") else _BAD
        replaced = "yes" if spec.name in substitute else "no"
        table.add_row(spec.name, spec.distribution, version or "-", spec.versions, replaced, Text(state, style=style))
    return table


def _kernels() -> Table:
    table = _table("Kernels", "operation", "name", "arrays", "devices", "priority", "from", "state")
    last = None
    for spec, reason in dispatch.report():
        operation, last = (spec.operation if spec.operation != last else ""), spec.operation
        state = Text("available", style=_GOOD) if reason is None else Text(reason, style=_BAD)
        devices = ", ".join(sorted(spec.devices)) if spec.devices is not None else "any"
        arrays, owner = ", ".join(sorted(spec.arrays)), registry().owner(spec)
        table.add_row(operation, spec.name, arrays, devices, str(spec.priority), owner, state)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table
