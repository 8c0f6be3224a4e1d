"""Sinkhorn attention as an Equinox layer that goes where `equinox.nn.MultiheadAttention` went.

Equinox has no hook for the attention itself, so this is a layer: the same fields, constructor and call, and the same
weights. `swap_attention(model)` exchanges every layer of a model that already exists.
"""

from __future__ import annotations

import copy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from flashot_backends.ops.attention import DustbinScore, DustbinToken, sinkhorn_attention, transport_plan

_DROPOUT = (
    "dropout on attention weights needs the dense weights, which are never formed; use dropout_p=0 (and an "
    "equinox.nn.Dropout on the output if you want noise)"
)


class SinkhornAttention(eqx.nn.MultiheadAttention):
    """Multi-head attention whose weights are a balanced transport plan (arXiv 2605.08123).

    Takes the arguments of `equinox.nn.MultiheadAttention` and, by keyword, those of
    `flashot_backends.ops.attention.sinkhorn_attention` that belong to a layer. There is no causal form: a causal mask
    has no balanced plan and is refused.

    Args:
        epsilon: temperature; a float is a constant, an array is a trainable leaf.
        base_steps, tail_steps, last_update, window, backend: as in `sinkhorn_attention`.
        dustbin: None, "token" (a learned query, key and value per head) or "score" (a learned score per head).
        capacity: masses of the dustbin's row and column; None for the defaults of `DustbinToken` and `DustbinScore`.
    """

    epsilon: Any
    dustbin_query: jax.Array | None
    dustbin_key: jax.Array | None
    dustbin_value: jax.Array | None
    dustbin_score: jax.Array | None
    base_steps: float = eqx.field(static=True)
    tail_steps: float = eqx.field(static=True)
    last_update: str = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    capacity: tuple[float, float] | None = eqx.field(static=True)
    backend: Any = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        *sizes,
        epsilon: Any = 1.0,
        base_steps: float = 15,
        tail_steps: float = 2,
        last_update: str = "columns",
        window: int | None = None,
        dustbin: str | None = None,
        capacity: tuple[float, float] | None = None,
        backend: Any = None,
        key,
        **keywords,
    ):
        super().__init__(num_heads, query_size, *sizes, key=key, **keywords)
        self._add(
            jax.random.fold_in(key, 1), epsilon=epsilon, base_steps=base_steps, tail_steps=tail_steps,
            last_update=last_update, window=window, dustbin=dustbin, capacity=capacity, backend=backend,
        )  # fmt: skip

    @classmethod
    def from_attention(cls, attention: eqx.nn.MultiheadAttention, *, key=None, **options) -> SinkhornAttention:
        """Take over the weights of an existing layer. `key` is needed only for a token dustbin."""
        layer = object.__new__(cls)
        for name in eqx.nn.MultiheadAttention.__dataclass_fields__:
            object.__setattr__(layer, name, copy.copy(getattr(attention, name)))
        given = {"epsilon": 1.0, "base_steps": 15, "tail_steps": 2, "last_update": "columns", "window": None}
        given |= {"dustbin": None, "capacity": None, "backend": None}
        if options.keys() - given.keys():
            raise TypeError(f"from_attention: unknown options {sorted(options.keys() - given.keys())}")
        layer._add(key, **{**given, **options})
        return layer

    def _add(self, key, *, dustbin, capacity, **options):
        _refuse_dropout(self.dropout, None)
        for name, value in {**options, "capacity": None if capacity is None else tuple(capacity)}.items():
            object.__setattr__(self, name, value)
        parts = _dustbin_parts(dustbin, self, key)
        for name in ("query", "key", "value", "score"):
            object.__setattr__(self, f"dustbin_{name}", parts.get(name))

    def __call__(
        self,
        query,
        key_,
        value,
        mask=None,
        *,
        key=None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads=None,
        query_mask=None,
        key_mask=None,
        return_unmatched: bool = False,
    ):
        """Attend, unbatched; use `jax.vmap` for a batch.

        Args:
            query: (q_seq, query_size).
            key_: (kv_seq, key_size).
            value: (kv_seq, value_size).
            mask: bool (q_seq, kv_seq) or (num_heads, q_seq, kv_seq), True keeps.
            key: not used; dropout is refused.
            inference: as in `equinox.nn.Dropout`.
            deterministic: the host's older name of `inference`.
            process_heads: as in `equinox.nn.MultiheadAttention`.
            query_mask: bool (q_seq,), True for real tokens.
            key_mask: bool (kv_seq,). In self-attention it masks the queries as well. Prefer it to a dense mask: it is
                a vector.
            return_unmatched: also return the mass sent to the dustbin, (num_heads, q_seq) and (num_heads, kv_seq).

        Returns (q_seq, output_size).
        """
        _refuse_dropout(self.dropout, inference if deterministic is None else deterministic)
        projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
        heads = [self._project(*pair) for pair in projections]
        heads = heads if process_heads is None else _processed(process_heads, heads)
        q, k, v = (head.swapaxes(0, 1) for head in heads)
        masks = {"mask": mask, "query_mask": query_mask, "key_mask": key_mask}
        result = sinkhorn_attention(q, k, v, return_unmatched=return_unmatched, **masks, **self._options())
        out, unmatched = result if return_unmatched else (result, None)
        out = jax.vmap(self.output_proj)(out.swapaxes(0, 1).reshape(query.shape[0], -1))
        return (out, unmatched) if return_unmatched else out

    def plan(self, query, key_, mask=None, *, query_mask=None, key_mask=None):
        """Return the weights themselves, (num_heads, q_seq, kv_seq) and dense: for looking at small ones."""
        pairs = (self.query_proj, query), (self.key_proj, key_)
        heads = (self._project(*pair).swapaxes(0, 1) for pair in pairs)
        return transport_plan(*heads, mask=mask, query_mask=query_mask, key_mask=key_mask, **self._options())

    def _options(self):
        names = ("epsilon", "base_steps", "tail_steps", "last_update", "window", "backend")
        return {**{name: getattr(self, name) for name in names}, "dustbin": self._dustbin()}

    def _dustbin(self):
        if self.dustbin_score is not None:
            return DustbinScore(self.dustbin_score, self.capacity)
        if self.dustbin_query is not None:
            return DustbinToken(self.dustbin_query, self.dustbin_key, self.dustbin_value, self.capacity)
        return None


def swap_attention(model, *, key=None, **options):
    """Exchange every `equinox.nn.MultiheadAttention` inside `model` for Sinkhorn attention with the same weights.

    Args:
        model: any pytree.
        key: a JAX random key, needed only for a token dustbin.
        **options: the keywords of `SinkhornAttention`.
    """
    count = iter(range(1 << 30))

    def swap(part):
        if not _is_plain(part):
            return part
        own = None if key is None else jax.random.fold_in(key, next(count))
        return SinkhornAttention.from_attention(part, key=own, **options)

    return jax.tree.map(swap, model, is_leaf=_is_plain)


def _is_plain(part) -> bool:
    return isinstance(part, eqx.nn.MultiheadAttention) and not isinstance(part, SinkhornAttention)


def _processed(process_heads, heads):
    new = process_heads(*heads)
    if [head.shape for head in new] != [head.shape for head in heads]:
        raise ValueError("process_heads must not change the shape of the heads.")
    return new


def _refuse_dropout(dropout, inference):
    off = dropout.inference if inference is None else inference
    if dropout.p and not off:
        raise ValueError(_DROPOUT)


def _dustbin_parts(kind, layer, key) -> dict[str, jax.Array]:
    if kind is None:
        return {}
    dtype = layer.query_proj.weight.dtype
    if kind == "score":
        return {"score": jnp.ones(layer.num_heads, dtype)}
    if kind != "token":
        raise ValueError(f'dustbin: None, "token" or "score", not {kind!r}')
    if key is None:
        raise ValueError("key: a token dustbin is drawn at random and needs a JAX random key")
    sizes = {"query": layer.qk_size, "key": layer.qk_size, "value": layer.vo_size}
    keys = dict(zip(sizes, jax.random.split(key, 3), strict=True))
    return {
        name: jax.random.normal(keys[name], (layer.num_heads, size), dtype) / size**0.5 for name, size in sizes.items()
    }
