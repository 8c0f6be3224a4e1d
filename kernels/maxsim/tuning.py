"""Launch shapes from ``tuning.json``: data by class of card and size of problem, no search at run time.

For each direction and class of card ("sm90", else "default") the file holds rules; the first whose conditions hold
gives the launch: ``rows`` and ``length`` are upper bounds of the query rows in a tile's reach and of the longest
document; ``exact`` (float32), ``scaled`` (float16) and ``record`` must be equal.
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
    bounds = all(facts[name] <= rule[name] for name in ("rows", "length") if name in rule)
    return bounds and all(facts[name] == rule[name] for name in ("exact", "scaled", "record") if name in rule)


def _first(direction, device, **facts):
    for rule in _rules(direction, device):
        if _holds(rule, facts):
            return dict(rule["launch"])
    raise LookupError(f"tuning.json has no {direction} rule for {facts}")


def forward(device, rows, length, exact, record):
    """Launch of the forward kernel."""
    return _first("forward", device, rows=rows, length=length, exact=exact, record=record)


def backward(device, length, exact, scaled):
    """Launch of the backward kernel."""
    return _first("backward", device, length=length, exact=exact, scaled=scaled)
