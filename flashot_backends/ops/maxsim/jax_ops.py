"""MaxSim for JAX arrays, with gradient: checks, one form for every way of asking, and the rule of differentiation.

Source: Khattab and Zaharia, "ColBERT", 2020, equation 3. Needs jax and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def maxsim(
    queries,
    documents,
    queries_mask=None,
    documents_mask=None,
    masked="exclude",
    pairs=False,
    *,
    mean=False,
    normalize=False,
    floors=None,
    backend=None,
):
    """As `flashot_backends.ops.maxsim.maxsim`, which calls it for JAX arrays and says what the arguments mean.

    Works under `jit`, `grad` and `vmap`, and in second derivatives in the chunked kernel. Lists are padded to their
    longest item, candidate lists to the longest list too; where lengths differ much, pass padded arrays in groups.
    """
    if masked not in ("exclude", "zero"):
        raise ValueError(f'masked is {masked!r}; it may be "exclude" or "zero"')
    sets = _is_list(documents) and len(documents) > 0 and _is_list(documents[0])
    counts = [len(group) for group in documents] if sets else None
    queries, queries_mask = _read("queries", queries, queries_mask, (3,))
    documents, documents_mask = _read("documents", documents, documents_mask, (3, 4))
    queries, documents = _agree(queries, documents)
    form = _form(queries, documents, pairs)
    floors = _floors(floors, documents)
    if normalize:
        queries, documents = _unit(queries), _unit(documents)
    masks = form.grouped(queries_mask, documents_mask)
    queries, documents = form.grouped(queries, documents)
    tokens = Tokens(queries, documents, masks[0], masks[1], form.grouped(None, floors)[1])
    scores = _score(_kernel(tokens, backend), masked, tokens)
    scores = form.shaped(scores / _counts(tokens)[:, None, :] if mean else scores)
    return scores if counts is None else [scores[i, :count] for i, count in enumerate(counts)]


def topk(queries, documents, k, **options):
    """As `flashot_backends.ops.maxsim.topk`, for JAX arrays."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}; it must be a positive integer")
    scores = maxsim(queries, documents, **options)
    if not isinstance(scores, list):
        return _best(scores, k)
    found = [_best(row, k) for row in scores]
    return [values for values, _ in found], [places for _, places in found]


def _best(scores, k):
    return jax.lax.top_k(scores, min(k, scores.shape[-1]))  # stable: the lower of equal places comes first


# --- reading ----------------------------------------------------------------------------------------------------------


def _is_list(value) -> bool:
    return isinstance(value, (list, tuple))


def _read(name, value, mask, dimensions):
    """One padded array and its mask, from an array or a list of (tokens, d) or a list of such lists."""
    if _is_list(value):
        return _padded(name, value, mask)
    if not hasattr(value, "dtype") or not hasattr(value, "ndim"):
        raise TypeError(f"{name} is a {type(value).__name__}; it may be an array or a list of arrays")
    if value.ndim not in dimensions:
        wanted = " or ".join(f"{n}-dimensional" for n in dimensions)
        raise ValueError(f"{name} has shape {value.shape}; it must be {wanted}, (..., tokens, d)")
    if mask is None:
        return jnp.asarray(value), None
    mask = jnp.asarray(mask)
    if mask.shape != value.shape[:-1]:
        raise ValueError(f"{name}_mask has shape {mask.shape}; {name} ask for {value.shape[:-1]}")
    return jnp.asarray(value), mask if mask.dtype == bool else mask != 0


def _padded(name, items, mask):
    sets = len(items) > 0 and _is_list(items[0])
    groups = list(items) if sets else [items]
    masks = [None] * len(groups) if mask is None else list(mask) if sets else [mask]
    flat = [item for group in groups for item in group]
    for item in flat:
        if getattr(item, "ndim", None) != 2:
            raise TypeError(
                f"{name} holds {getattr(item, 'shape', type(item).__name__)}; every item must be (tokens, d)"
            )
        if item.shape[1] != flat[0].shape[1]:
            raise ValueError(f"{name} mix embedding sizes {flat[0].shape[1]} and {item.shape[1]}")
    if not flat:
        raise ValueError(f"{name} is an empty list; its embedding size is unknown")
    for group, own in zip(groups, masks, strict=True):
        if own is not None and len(own) != len(group):
            raise ValueError(f"{name}_mask has {len(own)} items, {name} have {len(group)}")
    tokens, keep = _filled(groups, masks)
    return (tokens, keep) if sets else (tokens[0], keep[0])


def _filled(groups, masks):
    """(groups, longest group, longest item, d), and True where an item reaches; on the host unless traced."""
    flat = [item for group in groups for item in group]
    size = len(groups), max(map(len, groups)), max(len(item) for item in flat)
    traced = any(isinstance(item, jax.core.Tracer) for item in flat)
    tokens: Any = jnp.zeros((*size, flat[0].shape[1]), flat[0].dtype)
    tokens = tokens if traced else np.array(tokens)
    keep: Any = np.zeros(size, bool)
    for i, group in enumerate(groups):
        for j, item in enumerate(group):
            at = (i, j, slice(len(item)))
            keep[at] = True if masks[i] is None else np.asarray(masks[i][j]) != 0
            if traced:
                tokens = tokens.at[at].set(item)
            else:
                tokens[at] = np.asarray(item)
    return jnp.asarray(tokens), jnp.asarray(keep)


def _agree(queries, documents):
    for name, array in (("queries", queries), ("documents", documents)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} have dtype {array.dtype}; accepted are float64, float32, float16 and bfloat16")
    if queries.shape[-1] != documents.shape[-1]:
        raise ValueError(f"queries have embedding size {queries.shape[-1]} and documents {documents.shape[-1]}")
    kind = jnp.promote_types(queries.dtype, documents.dtype)
    return queries.astype(kind), documents.astype(kind)


def _floors(floors, documents):
    if floors is None:
        return None
    floors, count = jnp.asarray(floors), int(np.prod(documents.shape[:-2]))
    if floors.shape != (count,):
        raise ValueError(f"floors has shape {floors.shape}; one value for each of {count} documents is needed")
    return floors.astype(bool).reshape(documents.shape[:-2])


def _unit(tokens):
    wide = tokens if tokens.dtype == jnp.float64 else tokens.astype(jnp.float32)
    square = (wide * wide).sum(-1, keepdims=True)
    length = jnp.sqrt(jnp.where(square > 0, square, 1))  # padding has none, and no infinite slope
    return (wide / jnp.maximum(length, 1e-12)).astype(tokens.dtype)


@dataclass(frozen=True)
class _Form:
    """all: one group; sets: (Q, C, tokens, d) documents, a group for each query; pairs: sets of one."""

    kind: str

    def grouped(self, queries, documents):
        """Both sides, tokens or masks or floors or None, with the group axis in front."""
        if self.kind == "all":
            return tuple(None if side is None else side[None] for side in (queries, documents))
        queries = None if queries is None else queries[:, None]
        return queries, documents if documents is None or self.kind == "sets" else documents[:, None]

    def shaped(self, scores):
        """(B, D, Q) → what the caller expects."""
        return {"all": lambda: scores[0].T, "sets": lambda: scores[:, :, 0], "pairs": lambda: scores[:, 0, 0]}[
            self.kind
        ]()


def _form(queries, documents, pairs) -> _Form:
    if documents.ndim == 4:
        if pairs:
            raise ValueError("pairs=True takes one document for each query; candidate sets were given")
        if len(documents) != len(queries):
            raise ValueError(f"documents hold {len(documents)} candidate sets for {len(queries)} queries")
        return _Form("sets")
    if pairs and len(queries) != len(documents):
        raise ValueError(f"pairs=True takes as many documents as queries; given {len(documents)} and {len(queries)}")
    return _Form("pairs" if pairs else "all")


# --- scoring ----------------------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """queries (B, Q, tokens, d), documents (B, D, tokens, d), their masks (bool or None), floors (B, D) or None."""

    queries: Any
    documents: Any
    queries_mask: Any
    documents_mask: Any
    floors: Any


class Request(NamedTuple):
    """What the dispatcher and the kernels' `applies` look at."""

    device: str
    dtype: str
    d: int
    array: str = "jax"


def _kernel(tokens: Tokens, backend):
    from flashot_backends.dispatch import select

    queries = tokens.queries
    concrete = not isinstance(queries, jax.core.Tracer)
    platform = next(iter(queries.devices())).platform if concrete else jax.default_backend()
    request = Request({"gpu": "cuda"}.get(platform, platform), str(queries.dtype), queries.shape[-1])
    return select("maxsim", request, backend)


def _counts(tokens: Tokens):
    """Number of query tokens that count, (B, Q), at least 1."""
    if tokens.queries_mask is None:
        return jnp.full(tokens.queries.shape[:2], max(tokens.queries.shape[2], 1))
    return jnp.maximum(tokens.queries_mask.sum(-1), 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _score(kernel, masked, tokens: Tokens):
    """Scores (B, D, Q)."""
    return _forward(kernel, masked, tokens, False)[0]


def _forward(kernel, masked, tokens: Tokens, record: bool):
    """Scores, and winners (B, D, Q, tokens) int32, −1 where nothing won."""
    queries, documents, keep, documents_mask, floors = tokens
    acc = jnp.float64 if queries.dtype == jnp.float64 else jnp.float32
    shape = queries.shape[0], documents.shape[1], *queries.shape[1:3]
    if 0 in (*shape, documents.shape[2]):
        value, winners = jnp.full(shape, -jnp.inf, acc), jnp.full(shape, -1, jnp.int32)
    elif masked == "zero" and documents_mask is not None:
        value, winners = kernel.best(queries, _without(documents, documents_mask), None, record)
    else:
        value, winners = kernel.best(queries, documents, documents_mask, record)
    if floors is not None:
        beaten = floors[:, :, None, None] & (value < 0)
        value, winners = jnp.where(beaten, 0, value), None if winners is None else jnp.where(beaten, -1, winners)
    value = value if keep is None else jnp.where(keep[:, None], value, 0)
    return value.sum(-1), _legal(winners, keep, documents_mask) if record else None


def _without(tokens, mask):
    return tokens if mask is None else jnp.where(mask[..., None], tokens, 0)


def _legal(winners, keep, documents_mask):
    """−1 for masked query tokens and where a masked document token won."""
    if keep is not None:
        winners = jnp.where(keep[:, None], winners, -1)
    if documents_mask is None or not documents_mask.size:
        return winners
    flat = winners.reshape(*winners.shape[:2], -1)
    alive = jnp.take_along_axis(documents_mask, jnp.maximum(flat, 0), -1)
    return jnp.where(alive, flat, -1).reshape(winners.shape)


def _forward_rule(kernel, masked, tokens):
    scores, winners = _forward(kernel, masked, tokens, True)
    return scores, (tokens, winners)


def _backward_rule(kernel, masked, residuals, gradient):
    tokens, winners = residuals
    queries = _without(tokens.queries, tokens.queries_mask)  # padding may hold anything, and 0 · inf is no number
    documents = _without(tokens.documents, tokens.documents_mask)
    if winners.size and documents.size:
        queries, documents = kernel.backward(queries, documents, winners, gradient)
    else:
        queries, documents = jnp.zeros_like(queries), jnp.zeros_like(documents)
    return (Tokens(queries, documents, None, None, None),)


_score.defvjp(_forward_rule, _backward_rule)
