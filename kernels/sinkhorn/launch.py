"""Launch shapes: a table by card and size, and what to do where the table is silent. Nothing is searched at run time."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

KINDS = ("dot", "fma", "matrix")
PROCESSORS = 108  # assumed where no card can be asked


class Shape(NamedTuple):
    """A tile of pairs, the warps that share it, the depth of its pipeline, and how many fit on a multiprocessor."""

    rows: int
    columns: int
    warps: int
    stages: int
    resident: int


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    """The measured shapes: by card class, then by kind and size bucket."""
    return json.loads(Path(__file__).with_name("tuning.json").read_text())  # type: ignore[no-any-return]


def launch_shape(kind: int, dimension: int, batch: int, n: int, m: int, device: torch.device) -> Shape:
    """The tile for one update: the card's own entry for this kind and size, or the default's."""
    names = [f"{KINDS[kind]}-{dimension_bucket(kind, dimension)}-{size_bucket(batch * n)}"]
    names.append(names[0].rpartition("-")[0])
    for card in (card_class(device), "default"):
        entries = table().get(card, {})
        for name in names:
            if name in entries:
                return Shape(*entries[name])
    raise KeyError(f"tuning.json has no default for {names[-1]}")


def dimension_bucket(kind: int, dimension: int) -> str:
    """Coordinates, in classes."""
    if kind != 0:
        return "any"
    return next(name for limit, name in ((32, "32"), (64, "64"), (128, "128"), (1 << 30, "wide")) if dimension <= limit)


def size_bucket(rows: int) -> str:
    """Rows of the whole batch, in classes."""
    return "small" if rows <= 4096 else "large"


@functools.cache
def card_class(device: torch.device) -> str:
    """The table's name for a card."""
    if device.type != "cuda":
        return "default"
    name = torch.cuda.get_device_name(device).lower()
    return next((card for card in table() if card in name), "default")


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a card."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def splits_for(shape: Shape, blocks: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts to cut the columns, and how many tiles each takes.

    A grid fills the card in waves; the last wave should be full. Each extra part costs a partial sum and a start.
    """
    slots = processors(device) * shape.resident
    tiles = -(-columns // shape.columns)
    best: tuple[float, int, int] = (float("inf"), 1, tiles)
    for splits in range(1, min(tiles, 64) + 1):
        each = -(-tiles // splits)
        used = -(-tiles // each)
        waves = -(-blocks * used // slots)
        cost = waves * (each + 1.5)  # tiles one after another, and what a program costs besides
        best = min(best, (cost, used, each))
    return best[1], best[2]
