"""MaxSim for JAX arrays in blocks of documents, pure JAX: the default on a CPU, and the fallback everywhere.

All JAX kernels share one form. Queries (B, Q, tokens, d), documents (B, D, tokens, d): in each of B groups every query
meets every document (candidates given per query are one group for each query). Masks are bool, shaped as the tokens, or
None; `floors` (B, D) bool or None: the document also holds an unseen token of similarity 0.

`best(queries, documents, mask, record)` gives the largest similarity of each query token in each document, (B, D, Q,
tokens) in float32 (float64 for float64), −inf where all of a document is masked, and, if asked for, its place, the
first among equals. `backward(queries, documents, winners, gradient)` gives the gradients of both sides for winners
(B, D, Q, tokens), negative where nothing won, and a gradient (B, D, Q) of the scores; masked tokens are zero there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

#: Similarities held at once.
BLOCK = {"cpu": 1 << 21, "other": 1 << 26}


def applies(request) -> str | None:
    """A reason why this kernel cannot serve `request`, or None."""
    return None


def best(queries, documents, mask, record: bool):
    """Largest similarities and their places; see the module."""

    def visit(carry, part):
        similar = _similar(queries, *part)
        places = jnp.argmax(similar, -1).astype(jnp.int32) if record else None
        return carry, (similar.max(-1), places)

    return _over_documents(queries, documents, (mask,), visit, None)[1]


def backward(queries, documents, winners, gradient):
    """Gradients of both sides; see the module. Sums in a fixed order, nothing is scattered."""
    acc = accumulation(queries)
    wide = queries.astype(acc)

    def visit(total, part):
        block, won, slope = part
        chosen = won[..., None] == jnp.arange(block.shape[2])
        chosen = jnp.where(chosen, slope[..., None, None], 0).astype(acc)
        total = total + _product("bdqtj,bdjc->bqtc", chosen, block.astype(acc))
        return total, _product("bdqtj,bqtc->bdjc", chosen, wide)

    start = jnp.zeros(queries.shape, acc)
    to_queries, to_documents = _over_documents(queries, documents, (winners, gradient), visit, start)
    return to_queries.astype(queries.dtype), to_documents.astype(documents.dtype)


def accumulation(array):
    """The dtype of sums and scores."""
    return jnp.float64 if array.dtype == jnp.float64 else jnp.float32


def _similar(queries, documents, mask):
    similar = _product("bqtc,bdjc->bdqtj", queries, documents)
    return similar if mask is None else jnp.where(mask[:, :, None, None, :], similar, -jnp.inf)


def _product(pattern, left, right):
    kind = accumulation(left)
    return jnp.einsum(pattern, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=kind)


def _over_documents(queries, documents, others, visit, carry):
    """Visit blocks of documents with the matching blocks of `others`; the results come back in order, each once.

    The last block is filled up with documents of zeros.
    """
    count = documents.shape[1]
    each = queries.shape[0] * queries.shape[1] * queries.shape[2] * documents.shape[2]
    size = max(1, BLOCK["cpu" if jax.default_backend() == "cpu" else "other"] // max(each, 1))
    if size >= count:
        return visit(carry, (documents, *others))
    blocks = -(-count // size)
    parts = jax.tree.map(lambda array: _blocks(array, blocks, size), (documents, *others))
    carry, found = lax.scan(visit, carry, parts)
    return carry, jax.tree.map(lambda array: _joined(array, count), found)


def _blocks(array, blocks, size):
    """(B, D, …) → (blocks, B, size, …)."""
    missing = blocks * size - array.shape[1]
    full = jnp.pad(array, [(0, missing if axis == 1 else 0) for axis in range(array.ndim)])
    return jnp.moveaxis(full.reshape(full.shape[0], blocks, size, *full.shape[2:]), 1, 0)


def _joined(array, count):
    whole = jnp.moveaxis(array, 0, 1)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :count]
