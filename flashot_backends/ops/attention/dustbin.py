"""The dustbin: somewhere for tokens to go that match nothing (SuperGlue's idea; arXiv 2605.08123's token)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.attention.pairs import Pairs
from flashot_backends.ops.attention.layout import Layout
from flashot_backends.ops.attention.problem import Border


@partial(jax.tree_util.register_dataclass, data_fields=["query", "key", "value", "capacity"], meta_fields=[])
@dataclass(frozen=True)
class DustbinToken:
    """One more token, appended to queries, keys and values; its own output row is dropped.

    query, key: (…, d), value: (…, e), leading axes broadcasting as those of q and k do (so (heads, d) for one per
    head).
    capacity: (mass of its row, mass of its column). None: the mean mass of the other tokens, so that without masses the
    result equals that of plain concatenation. Given, every token that was given no mass has mass 1.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    capacity: tuple | None = None


@partial(jax.tree_util.register_dataclass, data_fields=["score", "capacity"], meta_fields=[])
@dataclass(frozen=True)
class DustbinScore:
    """One learned score between the dustbin and everybody, itself included, and no value.

    score: scalar or leading axes, in units of q·k/√d (divided by epsilon with the rest).
    capacity: (mass of its row, mass of its column); None: as many as the active keys and the active queries, so that
    every token may go unmatched (SuperGlue, eq. 9).
    """

    score: jax.Array
    capacity: tuple | None = None


def read_border(layout: Layout, dustbin, pairs: Pairs, active, score_unit, width: int) -> Border:
    """The dustbin's scores with everybody. active: (P, n) and (P, m) bool. score_unit: (P,) 1/epsilon."""
    acc = pairs.scale.dtype
    if isinstance(dustbin, DustbinScore):
        score = layout.spread(jnp.asarray(dustbin.score, acc), 0) * score_unit
        right = left = score[:, None]
        corner, value = score, jnp.zeros((layout.problems, width), acc)
    else:
        query, key, value = (layout.spread(jnp.asarray(part)) for part in (dustbin.query, dustbin.key, dustbin.value))
        right, left = _scores(pairs, pairs.x, key), _scores(pairs, pairs.y, query)
        corner = (query.astype(acc) * key.astype(acc)).sum(-1) * pairs.scale
    right, below = (jnp.where(mask, part, -jnp.inf) for mask, part in zip(active, (right, left), strict=True))
    return Border(right, below, corner, value.astype(acc))


def _scores(pairs: Pairs, side, token):
    """scale · side·token, (P, length). side: (P or fewer, length, d), token: (P, d)."""
    grouped = token.reshape(side.shape[0], -1, token.shape[-1])
    acc = pairs.scale.dtype
    dots = jnp.einsum("sld,sgd->sgl", side, grouped, precision=lax.Precision.HIGHEST, preferred_element_type=acc)
    return dots.reshape(pairs.problems, -1) * pairs.scale[:, None]


def capacities(layout: Layout, dustbin, active, masses, acc):
    """Log masses of the dustbin's row and column, each (P, 1). active: bool (P, n) and (P, m); masses: as many
    floats."""
    if dustbin.capacity is not None:
        return tuple(jnp.log(layout.spread(jnp.asarray(part, acc), 0))[:, None] for part in dustbin.capacity)
    if isinstance(dustbin, DustbinScore):
        rows, columns = (jnp.maximum(side.sum(1, keepdims=True), 1).astype(acc) for side in active)
        return jnp.log(columns), jnp.log(rows)
    return tuple(jnp.log(_typical(*side)) for side in zip(active, masses, strict=True))


def _typical(active, mass):
    """The mean mass of the active tokens, (P, 1)."""
    total = jnp.where(active, mass, 0).sum(1, keepdims=True)
    return total / jnp.maximum(active.sum(1, keepdims=True), 1)
