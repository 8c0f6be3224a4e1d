"""What one call computes: the schedule of half-steps, and the arrays of P problems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from flashot_backends.kernels.attention.pairs import Pairs

OTHER = {"rows": "columns", "columns": "rows"}


@dataclass(frozen=True)
class Schedule:
    """`base` stopped and then `tail` differentiable half-steps, alternating, the last one on side `last`."""

    base: int
    tail: int
    last: str = "columns"

    @property
    def tail_sides(self) -> tuple[str, ...]:
        """The side that each half-step of the tail updates."""
        return tuple(_side_back(self.last, self.tail - 1 - step) for step in range(self.tail))

    @property
    def base_sides(self) -> tuple[str, ...]:
        """The side that each half-step of the base updates."""
        return tuple(_side_back(OTHER[self.tail_sides[0]], self.base - 1 - step) for step in range(self.base))


def _side_back(last: str, steps: int) -> str:
    return last if steps % 2 == 0 else OTHER[last]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["right", "below", "corner", "value"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Border:
    """The dustbin as one more row and column of scores, kept as vectors so that the block of pairs stays a plain (n,
    m).

    right: (P, n) scores of each row with the dustbin, below: (P, m) scores of each column with it, −inf where the token
    is inactive; corner: (P,); value: (P, e) what the dustbin contributes to the rows that attend to it.
    """

    right: jax.Array
    below: jax.Array
    corner: jax.Array
    value: jax.Array

    @property
    def T(self) -> Border:  # noqa: N802
        """The border seen from the columns."""
        return Border(self.below, self.right, self.corner, self.value)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pairs", "values", "log_a", "log_b", "border"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Problem:
    """pairs; values (P or fewer, m, e); log targets (P, n or n + 1) and (P, m or m + 1), dustbin last; border or
    None."""

    pairs: Pairs
    values: jax.Array
    log_a: jax.Array
    log_b: jax.Array
    border: Border | None = None
