"""The Flax attention functions and modules, nnx and linen."""

import pytest

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx  # noqa: E402

from flashot_backends.adapters.flax import (  # noqa: E402
    LinenSinkhornAttention,
    SinkhornAttention,
    make_sinkhorn_attention_fn,
)

SOFTMAX = {"base_steps": 0, "tail_steps": 0.5, "last_update": "rows"}
KEY = jax.random.key(0)


def tokens(n=7, batch=3, seed=1):
    return jax.random.normal(jax.random.key(seed), (batch, n, 8))


def padding(n=7):
    return jnp.arange(n) < jnp.asarray([4, 7, 6])[:, None]


def nnx_layer(**keywords):
    return nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **keywords)


def test_softmax_schedule_is_the_host_in_nnx():
    x, y = tokens(), tokens(5, seed=2)
    mask = nnx.make_attention_mask(jnp.ones((3, 7)), jnp.arange(5) < jnp.asarray([2, 5, 4])[:, None])
    ours = nnx_layer(attention_fn=make_sinkhorn_attention_fn(**SOFTMAX))
    assert jnp.abs(ours(x, y, mask=mask) - nnx_layer()(x, y, mask=mask)).max() < 1e-5


def test_softmax_schedule_is_the_host_in_linen():
    """linen filters keyword arguments by signature: the mask must arrive, also as floats."""
    x, y = tokens(), tokens(5, seed=2)
    mask = linen.make_attention_mask(jnp.ones((3, 7)), jnp.arange(5) < jnp.asarray([2, 5, 4])[:, None])
    assert mask.dtype == jnp.float32
    host = linen.MultiHeadDotProductAttention(2)
    parameters = host.init(KEY, x, y)
    ours = host.clone(attention_fn=make_sinkhorn_attention_fn(**SOFTMAX))
    assert jnp.abs(ours.apply(parameters, x, y, mask=mask) - host.apply(parameters, x, y, mask=mask)).max() < 1e-5
    module = LinenSinkhornAttention(2, **SOFTMAX)
    assert jnp.abs(module.apply(parameters, x, y, mask=mask) - host.apply(parameters, x, y, mask=mask)).max() < 1e-5


def test_one_line_swap_into_an_existing_nnx_model():
    class Model(nnx.Module):
        def __init__(self):
            self.attention = nnx_layer()

        def __call__(self, x):
            return x + self.attention(x)

    model, x = Model(), tokens()
    before = model(x)
    model.attention.attention_fn = make_sinkhorn_attention_fn(epsilon=0.5, window=3)
    assert jnp.abs(model(x) - before).max() > 1e-4
    gradients = nnx.jit(nnx.grad(lambda model: (model(x) ** 2).sum()))(model)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_padding_masks_of_both_shapes_equal_cutting():
    layer, x, keep = nnx_layer(attention_fn=make_sinkhorn_attention_fn()), tokens(), padding()
    square = layer(x, mask=nnx.make_attention_mask(keep, keep))
    by_key = layer(x, mask=keep[:, None, None, :])
    for element, length in enumerate((4, 7, 6)):
        cut = layer(x[element : element + 1, :length])[0]
        assert jnp.abs(square[element, :length] - cut).max() < 1e-5
        assert jnp.abs(by_key[element, :length] - cut).max() < 1e-5


def test_grouped_keys_arrive_unrepeated():
    attend = make_sinkhorn_attention_fn(epsilon=0.7)
    q, k, v = (jax.random.normal(jax.random.key(s), (2, 6, h, 4)) for s, h in ((1, 4), (2, 2), (3, 2)))
    repeated = attend(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2))
    assert jnp.abs(attend(q, k, v) - repeated).max() < 1e-5


@pytest.mark.parametrize("dustbin", [None, "token", pytest.param("score", marks=pytest.mark.slow)])
def test_modules_learn_their_dustbin(dustbin):
    x, count = tokens(), {None: 0, "token": 3, "score": 1}[dustbin]
    layer = SinkhornAttention(2, 8, rngs=nnx.Rngs(0), dustbin=dustbin, window=4)
    gradients = nnx.jit(nnx.grad(lambda layer: (layer(x) ** 2).sum()))(layer)
    leaves = jax.tree.leaves(gradients)
    assert len(leaves) == 8 + count
    assert all(jnp.isfinite(leaf).all() for leaf in leaves)
    module = LinenSinkhornAttention(2, dustbin=dustbin, window=4)
    parameters = module.init(KEY, x, x)
    gradients = jax.jit(jax.grad(lambda p: (module.apply(p, x, x) ** 2).sum()))(parameters)
    bins = [name for name in gradients["params"] if name.startswith("dustbin")]
    assert len(bins) == count
    assert all(jnp.abs(gradients["params"][name]).max() > 0 for name in bins)


def test_nnx_module_survives_split_and_merge():
    x, layer = tokens(), SinkhornAttention(2, 8, rngs=nnx.Rngs(0), dustbin="score", epsilon=0.6)
    before = layer(x)
    assert (nnx.merge(*nnx.split(layer))(x) == before).all()
    layer.dustbin_score[...] = jnp.full(2, 5.0)
    assert jnp.abs(layer(x) - before).max() > 1e-3


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"is_causal": True}, "is_causal"),
        ({"dropout_rate": 0.1}, "dropout_rate"),
        ({"module": object()}, "sow_weights"),
        ({"mask": jnp.tril(jnp.ones((6, 6)))}, "no balanced plan"),
    ],
)
def test_refusals_say_why(keywords, message):
    x = jnp.ones((6, 2, 4))
    with pytest.raises(ValueError, match=message):
        make_sinkhorn_attention_fn()(x, x, x, **keywords)


def test_decoding_is_refused():
    attend = make_sinkhorn_attention_fn()
    with pytest.raises(ValueError, match="decode"):
        attend(jnp.ones((1, 2, 4)), jnp.ones((6, 2, 4)), jnp.ones((6, 2, 4)))
    with pytest.raises(ValueError, match="decode"):
        SinkhornAttention(2, 8, rngs=nnx.Rngs(0), decode=True)
    with pytest.raises(ValueError, match="decode"):
        LinenSinkhornAttention(2, decode=True).init(KEY, tokens(), tokens())
    assert attend(*(jnp.ones((6, 2, 4)),) * 3, dropout_rate=0.1, deterministic=True).shape == (6, 2, 4)
