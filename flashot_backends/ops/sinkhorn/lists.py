"""Lists of problems of different sizes: what every framework takes for one, and which sizes meet in a batch."""

from __future__ import annotations

from typing import Any

from .costs import DenseCost, PointCloud, pieces

# Sizes are rounded up to multiples of an eighth of the power of two below: at most an eighth of a side is padding.
STEPS = 8


def rounded(count: int) -> int:
    """The size of a batch that holds so many rows."""
    step = max(1, (1 << (count - 1).bit_length()) // (2 * STEPS))
    return -(-count // step) * step


def each(given: Any, name: str, count: int) -> list[Any]:
    """One entry for each problem."""
    if given is None:
        return [None] * count
    entries = pieces(given, name)
    if len(entries) != count:
        raise ValueError(f"{name} has {len(entries)} entries and the list {count} problems; accepted is one for each")
    return entries


def one_of(epsilon: Any, k: int, count: int) -> Any:
    """ε of one problem: a number for all, or one for each."""
    if isinstance(epsilon, list | tuple) or getattr(epsilon, "ndim", 0) == 1:
        if len(epsilon) != count:
            raise ValueError(f"epsilon has {len(epsilon)} entries for {count} problems; accepted is one for each")
        return epsilon[k]
    return epsilon


def check_entry(cost: Any, k: int) -> None:
    """Refuse what is no cost of one problem."""
    if not isinstance(cost, PointCloud | DenseCost) or cost.batch:
        shape = getattr(cost, "shape", type(cost).__name__)
        raise ValueError(f"problem {k} of the list is {shape}; accepted are PointCloud and DenseCost, (n, m)")


def check_alone(batch: tuple[int, ...], k: int) -> None:
    """Refuse arguments that make a batch of one problem."""
    if batch:
        raise ValueError(
            f"problem {k} of the list has leading axes {batch}; accepted are weights (n,) and (m,), one epsilon each "
            "or one for all, and reach as numbers"
        )
