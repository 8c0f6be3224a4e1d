"""Sinkhorn attention for Flax, nnx and linen: an `attention_fn`, and modules where the dustbin is learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flashot_backends.ops.attention import DustbinScore, DustbinToken, sinkhorn_attention

_WEIGHTS = "sow_weights: the dense weights are never formed; attend to an identity matrix if you want to see a plan"
_DROPOUT = (
    "dropout_rate: dropout on attention weights needs the dense weights, which are never formed; use dropout_rate=0 or "
    "deterministic=True"
)
_CAUSAL = "is_causal: a causal mask has no balanced plan; use softmax attention there"
_DECODE = (
    "decode: a single query would have to take the mass of every key, whatever the scores are, so there is no step-by-"
    "step decoding with a balanced plan; use softmax attention there"
)


def make_sinkhorn_attention_fn(
    *,
    epsilon: Any = 1.0,
    base_steps: float = 15,
    tail_steps: float = 2,
    last_update: str = "columns",
    window: int | None = None,
    dustbin: DustbinToken | DustbinScore | None = None,
    backend: Any = None,
) -> Callable:
    """Return an `attention_fn` for `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

    All arguments are those of `flashot_backends.ops.attention.sinkhorn_attention`. The function takes query
    (…, q, heads, d), key and value (…, kv, key heads, d), `mask` and `bias` broadcasting to (…, heads, q, kv), and
    refuses dropout, causal attention and single-query decoding. A mask (batch, 1, 1, kv) with q = kv is taken for
    padding and masks the queries too; pass one made with `make_attention_mask` if the two sequences only happen to be
    equally long. `precision` is not used: float32 inputs get float32-grade scores.
    """
    options = {
        "epsilon": epsilon, "base_steps": base_steps, "tail_steps": tail_steps, "last_update": last_update,
        "window": window, "dustbin": dustbin, "backend": backend,
    }  # fmt: skip

    def sinkhorn_attention_fn(  # every parameter is named: linen drops the keywords it does not find here
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
    ):
        _refuse(query, key, dropout_rate, deterministic, module, is_causal)
        heads = [_heads_first(array, dtype) for array in (query, key, value)]
        mask = None if mask is None else jnp.asarray(mask).astype(bool)
        out = sinkhorn_attention(*heads, mask=mask, bias=bias, **options)
        return jnp.swapaxes(out, -2, -3)

    return sinkhorn_attention_fn


def _heads_first(array, dtype):
    array = array if dtype is None else array.astype(dtype)
    return jnp.swapaxes(array, -2, -3)


def _refuse(query, key, dropout_rate, deterministic, module, is_causal):
    checks = (
        (is_causal, _CAUSAL),
        (dropout_rate and not deterministic, _DROPOUT),
        (module is not None, _WEIGHTS),
        (query.shape[-3] == 1 < key.shape[-3], _DECODE),
    )
    for refused, reason in checks:
        if refused:
            raise ValueError(reason)


def _checked(kind: str | None) -> str | None:
    if kind not in (None, "token", "score"):
        raise ValueError(f'dustbin: None, "token" or "score", not {kind!r}')
    return kind


def _shapes(kind: str, heads: int, size: int) -> dict[str, tuple[int, ...]]:
    return {"score": (heads,)} if kind == "score" else dict.fromkeys(("query", "key", "value"), (heads, size))


def _assemble(kind: str | None, parts: dict, capacity):
    if kind is None:
        return None
    if kind == "score":
        return DustbinScore(parts["score"], capacity)
    return DustbinToken(parts["query"], parts["key"], parts["value"], capacity)


class SinkhornAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` on a balanced transport plan, with a dustbin to learn.

    Takes the host's arguments but `attention_fn` and `decode`, and by keyword `epsilon`, `base_steps`, `tail_steps`,
    `last_update`, `window` and `backend` as in `sinkhorn_attention`, and

    Args:
        dustbin: None, "token" (a learned query, key and value per head) or "score" (a learned score per head).
        capacity: masses of the dustbin's row and column; None for the defaults.
    """

    def __init__(self, num_heads, in_features, *features, dustbin=None, capacity=None, rngs, **keywords):
        names = ("epsilon", "base_steps", "tail_steps", "last_update", "window", "backend")
        self.sinkhorn_options = tuple((name, keywords.pop(name)) for name in names if name in keywords)
        self.dustbin, self.capacity = _checked(dustbin), capacity
        if keywords.get("decode"):
            raise ValueError(_DECODE)
        super().__init__(num_heads, in_features, *features, rngs=rngs, **{"decode": False, **keywords})
        shapes = {} if dustbin is None else _shapes(dustbin, self.num_heads, self.head_dim)
        for name, shape in shapes.items():
            setattr(self, f"dustbin_{name}", nnx.Param(_initial(name, rngs.params(), shape, self.param_dtype)))

    @property
    def attention_fn(self):
        """Built at each call, so that it holds the dustbin's current values."""
        names = ("query", "key", "value", "score")
        parts = {name: getattr(self, f"dustbin_{name}")[...] for name in names if hasattr(self, f"dustbin_{name}")}
        dustbin = _assemble(self.dustbin, parts, self.capacity)
        return make_sinkhorn_attention_fn(dustbin=dustbin, **dict(self.sinkhorn_options))

    @attention_fn.setter
    def attention_fn(self, _):
        """The host's constructor stores its default here."""


def _initial(name, key, shape, dtype):
    return jnp.ones(shape, dtype) if name == "score" else jax.random.normal(key, shape, dtype) / shape[-1] ** 0.5


class LinenSinkhornAttention(linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` on a balanced transport plan, with a dustbin to learn.

    The host's fields and parameters keep their names, so that a trained model's parameters load. `attention_fn` and
    `decode` are not used. The further fields are those of `SinkhornAttention`.
    """

    epsilon: Any = 1.0
    base_steps: float = 15
    tail_steps: float = 2
    last_update: str = "columns"
    window: int | None = None
    backend: Any = None
    dustbin: str | None = None
    capacity: tuple[float, float] | None = None

    @linen.compact
    def __call__(self, inputs_q, *args, **keywords):
        """Attend; arguments and result as the host's."""
        if self.decode:
            raise ValueError(_DECODE)
        features = self.qkv_features or inputs_q.shape[-1]
        dustbin = self._dustbin(features // self.num_heads)
        before = self.attention_fn
        attend = make_sinkhorn_attention_fn(
            epsilon=self.epsilon, base_steps=self.base_steps, tail_steps=self.tail_steps,
            last_update=self.last_update, window=self.window, dustbin=dustbin, backend=self.backend,
        )  # fmt: skip
        object.__setattr__(self, "attention_fn", attend)  # this instance lives for one call of one apply
        try:
            return super().__call__(inputs_q, *args, **keywords)
        finally:
            object.__setattr__(self, "attention_fn", before)

    def _dustbin(self, size: int):
        kind = _checked(self.dustbin)
        if kind is None:
            return None
        parts = {
            name: self.param(
                f"dustbin_{name}", lambda key, name=name, shape=shape: _initial(name, key, shape, jnp.float32)
            )
            for name, shape in _shapes(kind, self.num_heads, size).items()
        }
        return _assemble(kind, parts, self.capacity)
