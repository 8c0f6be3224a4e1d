"""Leading axes: from anything that broadcasts to P flat problems and back, without repeating what heads share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Layout:
    """lead: the axes of all problems; with grouped heads the last one is split into (key heads, queries per key
    head)."""

    lead: tuple[int, ...]
    groups: int  # 1: no grouped heads

    @property
    def problems(self) -> int:
        """How many there are, P."""
        return math.prod(self.lead)

    def fold(self, array: jax.Array, inner: int) -> jax.Array:
        """(…, inner axes) → (P or fewer, inner axes): trailing shared leading axes stay shared."""
        axes, tail = self._split(array.shape[: array.ndim - inner]), array.shape[array.ndim - inner :]
        kept = len(axes)
        while kept and axes[kept - 1] == 1:
            kept -= 1
        full = jnp.broadcast_to(array.reshape(*axes[:kept], *tail), (*self.lead[:kept], *tail))
        return full.reshape(-1, *tail)

    def spread(self, array: jax.Array, inner: int = 1) -> jax.Array:
        """(…, inner axes) → (P, inner axes)."""
        axes, tail = self._split(array.shape[: array.ndim - inner]), array.shape[array.ndim - inner :]
        return jnp.broadcast_to(array.reshape(*axes, *tail), (*self.lead, *tail)).reshape(-1, *tail)

    def unfold(self, array: jax.Array) -> jax.Array:
        """(P, …) → (lead axes as the caller wrote them, …)."""
        lead = self.lead if self.groups == 1 else (*self.lead[:-2], self.lead[-2] * self.lead[-1])
        return array.reshape(*lead, *array.shape[1:])

    def _split(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        if self.groups > 1 and axes:
            axes = (*axes[:-1], *self._split_heads(axes[-1]))
        return (1,) * (len(self.lead) - len(axes)) + axes

    def _split_heads(self, heads: int) -> tuple[int, int]:
        keys = self.lead[-2]
        return {1: (1, 1), keys: (keys, 1)}.get(heads, (keys, self.groups))


def layout(q: jax.Array, k: jax.Array, v: jax.Array) -> Layout:
    """Read the leading axes of queries, keys and values; axis −3 may hold more query heads than key heads."""
    groups = _groups(q, k)
    lead_q, lead_k, lead_v = (array.shape[:-2] for array in (q, k, v))
    if groups > 1:
        lead_q = (*lead_q[:-1], k.shape[-3], groups)
        lead_k, lead_v = (*lead_k, 1), (*lead_v, 1)
    try:
        lead = jnp.broadcast_shapes(lead_q, lead_k, lead_v)
    except ValueError as error:
        raise ValueError(
            f"q, k, v: leading axes {q.shape[:-2]}, {k.shape[:-2]}, {v.shape[:-2]} do not broadcast, and the heads "
            f"(axis -3) of q are no multiple of those of k"
        ) from error
    return Layout(lead, groups)


def _groups(q, k) -> int:
    if min(q.ndim, k.ndim) < 3:
        return 1
    query_heads, key_heads = q.shape[-3], k.shape[-3]
    grouped = 1 < key_heads < query_heads and query_heads % key_heads == 0
    return query_heads // key_heads if grouped else 1
