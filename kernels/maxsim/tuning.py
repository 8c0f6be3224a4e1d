"""Launch shapes from ``tuning.json``: data by class of card and size of problem, no search at run time.

For each direction and class of card ("sm90", else "default") the file holds rules; the first whose conditions hold
gives the launch: ``rows``, ``length`` and ``maxima`` are upper bounds of the query rows in a tile's reach, of the
longest document, and of the query tokens times the documents they meet; ``exact`` (float32), ``scaled`` (float16),
``record`` and ``half`` ("queries", "documents" or "both" gradients in a launch) must be equal.
"""

import json
from functools import lru_cache
from pathlib import Path

import torch


@lru_cache
def _table():
    return json.loads(Path(__file__).with_name("tuning.json").read_text())


@lru_cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; of a usual one where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _rules(direction, device):
    table = _table()[direction]
    if device.type != "cuda":
        return table["default"]
    major, minor = capability(device.index or 0)
    return table.get(f"sm{major}{minor}", []) + table["default"]


def _holds(rule, facts):
    bounds = all(facts[name] <= rule[name] for name in ("rows", "length", "maxima") if name in rule)
    return bounds and all(facts[name] == rule[name] for name in ("exact", "scaled", "record", "half") if name in rule)


def _first(direction, device, **facts):
    for rule in _rules(direction, device):
        if _holds(rule, facts):
            return dict(rule["launch"])
    raise LookupError(f"tuning.json has no {direction} rule for {facts}")


def forward(device, rows, length, exact, record, maxima):
    """Launch of the forward kernel."""
    return _first("forward", device, rows=rows, length=length, exact=exact, record=record, maxima=maxima)


def backward(device, length, exact, scaled, half):
    """Launch of the backward kernel."""
    return _first("backward", device, length=length, exact=exact, scaled=scaled, half=half)
