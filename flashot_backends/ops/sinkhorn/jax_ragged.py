"""Lists of JAX problems of different sizes: those of similar size are solved as one batch, padded without mass.

Sizes are known where a call is traced, so all this works inside of ``jit``, ``grad`` and ``vmap`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import framework
from .costs import DenseCost, PointCloud
from .jax_problem import checked_start, reaches, regularisation, weights
from .jax_solution import Solution
from .lists import check_alone, check_entry, each, one_of, rounded


class Entry(NamedTuple):
    """A problem of the list: a (n,), b (m,), ε () and the row potentials (n,) to start from."""

    cost: PointCloud | DenseCost
    a: jax.Array
    b: jax.Array
    epsilon: jax.Array
    f: jax.Array | None

    @property
    def size(self) -> tuple[int, int]:
        """(n, m)."""
        return self.cost.shape[-2], self.cost.shape[-1]

    @property
    def room(self) -> tuple[int, int]:
        """(n, m) with what is padded."""
        return rounded(self.size[0]), rounded(self.size[1])

    @property
    def kind(self) -> tuple[Any, ...]:
        """What problems of one batch have in common."""
        cost = self.cost
        if isinstance(cost, DenseCost):
            return cost.M.dtype, self.room
        extras = [part if part is None else (part.shape, part.dtype) for part in (cost.feature_weights, cost.table)]
        return cost.metric, cost.x.dtype, cost.x.shape[-1], *extras, cost.label_weight, self.room


def solve(
    costs: Sequence[Any], a: Any, b: Any, epsilon: Any, reach: Any, init: Any, solved: Callable[..., Solution]
) -> list[Solution]:
    """Solve every problem of a list; weights, starting points and ε are lists too, or one ε for all.

    ``solved(cost, a, b, epsilon, reach, init, sizes)`` solves a batch of them.
    """
    count = len(costs)
    sides = [each(given, name, count) for given, name in ((a, "a"), (b, "b"), (init, "init"))]
    entries = [
        _entry(k, cost, mine, one_of(epsilon, k, count), reach)
        for k, (cost, *mine) in enumerate(zip(costs, *sides, strict=True))
    ]
    alike: dict[Any, list[int]] = {}
    for k, entry in enumerate(entries):
        alike.setdefault(entry.kind, []).append(k)
    solutions: list[Any] = [None] * count
    for members in alike.values():
        parts = _together([entries[k] for k in members], reach, solved)
        for k, part in zip(members, parts, strict=True):
            solutions[k] = part
    return solutions


def _entry(k: int, cost: Any, sides: Sequence[Any], epsilon: Any, reach: Any) -> Entry:
    """Check one problem, with a, b and init as its sides; its numbers are looked at with those of its batch."""
    a, b, init = sides
    check_entry(cost, k)
    if framework(cost.tensors[0]) != "jax":
        raise TypeError(f"problem {k} of the list holds no JAX arrays, and others do; accepted are those of one kind")
    n, m = cost.shape
    if n == 0 or m == 0:
        raise ValueError(f"problem {k} of the list is {cost.shape}; accepted are at least one row and one column")
    a_, b_ = weights(a, "a", n, cost), weights(b, "b", m, cost)
    epsilon_, reach_ = regularisation(epsilon, a_.dtype), reaches(reach, a_.dtype)
    f = None if init is None else checked_start(init, n, m).astype(a_.dtype)
    batches = [a_.shape[:-1], b_.shape[:-1], epsilon_.shape]
    batches += [] if reach_ is None else [reach_.shape[:-1]]
    batches += [] if f is None else [f.shape[:-1]]
    for batch in batches:
        check_alone(batch, k)
    return Entry(cost, a_, b_, epsilon_, f)


def _together(entries: list[Entry], reach: Any, solved: Callable[..., Solution]) -> list[Solution]:
    """Solve problems of one kind as a batch."""
    n, m = entries[0].room
    a, b = jnp.stack([_padded(e.a, n) for e in entries]), jnp.stack([_padded(e.b, m) for e in entries])
    epsilon, init = jnp.stack([e.epsilon for e in entries]), None
    if any(e.f is not None for e in entries):
        init = jnp.stack([jnp.zeros(n, a.dtype) if e.f is None else _padded(e.f, n) for e in entries]), None
    sizes = [e.size for e in entries]
    rows, columns = (jnp.asarray(side) for side in zip(*sizes, strict=True))
    return solved(_batch([e.cost for e in entries], n, m), a, b, epsilon, reach, init, (rows, columns)).parts(sizes)


def _batch(costs: list[Any], n: int, m: int) -> PointCloud | DenseCost:
    """One cost for all, (len(costs), n, m)."""
    first = costs[0]
    if isinstance(first, DenseCost):
        return DenseCost(jnp.stack([_padded(_padded(cost.M, n), m, 1) for cost in costs]))

    def joined(name: str) -> Any:
        return None if getattr(first, name) is None else jnp.stack([getattr(cost, name) for cost in costs])

    x, y = jnp.stack([_filled(cost.x, n) for cost in costs]), jnp.stack([_filled(cost.y, m) for cost in costs])
    labels = None
    if first.labels is not None:
        labels = tuple(jnp.stack([_filled(cost.labels[k], (n, m)[k]) for cost in costs]) for k in (0, 1))
    return PointCloud(x, y, first.metric, joined("feature_weights"), labels, joined("table"), first.label_weight)


@partial(jax.jit, static_argnums=(1, 2))
def _padded(array: jax.Array, size: int, axis: int = 0) -> jax.Array:
    """Append zeros."""
    return jnp.pad(array, [(0, size - count if k == axis else 0) for k, count in enumerate(array.shape)])


@partial(jax.jit, static_argnums=1)
def _filled(array: jax.Array, size: int) -> jax.Array:
    """Append copies of the first point or label, which every metric takes and which need no other range of numbers."""
    more = jax.lax.stop_gradient(array[:1])
    return jnp.concatenate([array, jnp.broadcast_to(more, (size - len(array), *array.shape[1:]))])
