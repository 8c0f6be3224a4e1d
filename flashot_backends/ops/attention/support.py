"""Masks and segments: which tokens and which pairs take part."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashot_backends.ops.attention.layout import Layout

CAUSAL = (
    "mask: a causal (triangular) mask has no balanced plan. Rows and columns can only both carry their mass on the "
    "diagonal, so the plan creeps to the identity and the potentials diverge; use ordinary softmax attention there"
)


class Support(NamedTuple):
    """x_ids (P, n), y_ids (P, m) int32 or None together; mask (P or fewer, n, m) or None."""

    x_ids: jax.Array | None
    y_ids: jax.Array | None
    mask: jax.Array | None


def read_support(layout: Layout, n, m, mask, query_mask, key_mask, segments, massive) -> Support:
    """Reduce every kind of mask to one id per token, and a dense mask only where the caller brought one.

    massive: (query, key) bool vectors that are False where a token was given no mass, or None.
    """
    mask, query_mask, key_mask = _split_mask(mask, query_mask, key_mask, n, m)
    if query_mask is None and key_mask is not None and n == m:
        query_mask = key_mask  # self-attention: a padded token is neither a row nor a column
    queries = [vector for vector in (query_mask, massive[0]) if vector is not None]
    keys = [vector for vector in (key_mask, massive[1]) if vector is not None]
    dense = None if mask is None else layout.fold(mask, 2)
    if segments is None and not queries and not keys:
        return Support(None, None, dense)
    x_segments, y_segments = _segments(segments, n, m)
    return Support(_ids(layout, x_segments, queries, -1), _ids(layout, y_segments, keys, -2), dense)


def _ids(layout: Layout, segments, masks, dropped: int):
    keep = segments >= 0
    for mask in masks:
        keep = keep & mask
    return layout.spread(jnp.where(keep, segments, dropped).astype(jnp.int32))


def _segments(segments, n, m):
    if segments is None:
        return jnp.zeros(n, jnp.int32), jnp.zeros(m, jnp.int32)
    pair = segments if isinstance(segments, (tuple, list)) else (segments, segments)
    if len(pair) != 2:
        raise ValueError(f"segments: one vector of ids, or a pair (queries, keys), not {len(pair)} parts")
    ids = tuple(jnp.asarray(part) for part in pair)
    for name, part, length in zip(("queries", "keys"), ids, (n, m), strict=True):
        check_vector(f"segments ({name})", part, length)
        if not jnp.issubdtype(part.dtype, jnp.integer):
            raise TypeError(f"segments ({name}): integer ids (negative for padding), not {part.dtype}")
    return ids


def _split_mask(mask, query_mask, key_mask, n, m):
    """A mask that does not vary along rows or columns is a vector, and is streamed as one."""
    query_mask, key_mask = (_bool_vector(*item) for item in (("query_mask", query_mask, n), ("key_mask", key_mask, m)))
    if mask is None:
        return None, query_mask, key_mask
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask: bool, True where a pair may carry mass, not {mask.dtype}")
    if mask.ndim < 2 or mask.shape[-2] not in (1, n) or mask.shape[-1] not in (1, m):
        raise ValueError(f"mask: shape {mask.shape} does not broadcast to (..., {n}, {m})")
    if mask.shape[-2] == 1 and n > 1:
        return None, query_mask, _both(key_mask, jnp.broadcast_to(mask[..., 0, :], (*mask.shape[:-2], m)))
    if mask.shape[-1] == 1 and m > 1:
        return None, _both(query_mask, mask[..., 0]), key_mask
    _refuse_causal(mask)
    return mask, query_mask, key_mask


def _both(first, second):
    return second if first is None else first & second


def _bool_vector(name, vector, length):
    if vector is None:
        return None
    vector = jnp.asarray(vector)
    if vector.dtype != bool:
        raise TypeError(f"{name}: bool, True for real tokens, not {vector.dtype}")
    check_vector(name, vector, length)
    return vector


def check_vector(name, vector, length):
    """Raise unless the last axis counts the tokens."""
    if vector.ndim < 1 or vector.shape[-1] != length:
        raise ValueError(f"{name}: last axis must be {length}, got shape {vector.shape}")


def _refuse_causal(mask):
    """A traced mask cannot be looked at; a concrete one is, once, on the host."""
    if isinstance(mask, jax.core.Tracer) or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return
    square = np.asarray(mask).reshape(-1, *mask.shape[-2:])
    for one in (square, np.swapaxes(square, -1, -2)):
        if not np.triu(one, 1).any() and np.tril(one, -1).any():
            raise ValueError(CAUSAL)
