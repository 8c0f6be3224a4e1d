"""The Equinox layer: drop-in shape and weights, masks, dustbin, refusals, and a swap into a model that exists."""

import pytest

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402

from flashot_backends.adapters.equinox import SinkhornAttention, swap_attention  # noqa: E402
from flashot_backends.ops.attention import sinkhorn_attention  # noqa: E402

KEY = jax.random.key(0)
SOFTMAX = {"base_steps": 0, "tail_steps": 0.5, "last_update": "rows"}


def tokens(n=7, size=8, seed=1):
    return jax.random.normal(jax.random.key(seed), (n, size))


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.out)(x + self.attention(x, x, x))


def block():
    return Block(eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=KEY), eqx.nn.Linear(8, 3, key=KEY))


@pytest.mark.parametrize("mask", [None, "two", "three"])
def test_softmax_schedule_is_the_host_layer(mask):
    host = eqx.nn.MultiheadAttention(2, 8, 6, 5, 9, qk_size=3, vo_size=4, use_output_bias=True, key=KEY)
    ours = SinkhornAttention(2, 8, 6, 5, 9, qk_size=3, vo_size=4, use_output_bias=True, key=KEY, **SOFTMAX)
    keep = jax.random.bernoulli(KEY, 0.7, (2, 7, 4)).at[:, :, 0].set(True)
    mask = {None: None, "two": keep[0], "three": keep}[mask]
    arguments = tokens(7, 8), tokens(4, 6), tokens(4, 5, 2), mask
    assert jnp.abs(ours(*arguments) - host(*arguments)).max() < 1e-5


def test_one_line_swaps_every_layer_and_keeps_the_weights():
    model = block()
    swapped = swap_attention(model, epsilon=0.5)
    assert isinstance(swapped.attention, SinkhornAttention)
    assert isinstance(swapped.attention, eqx.nn.MultiheadAttention)
    assert (swapped.attention.query_proj.weight == model.attention.query_proj.weight).all()
    assert jnp.abs(swapped(tokens()) - model(tokens())).max() > 1e-3
    assert jnp.abs(swap_attention(model, **SOFTMAX)(tokens()) - model(tokens())).max() < 1e-5
    by_hand = eqx.tree_at(lambda m: m.attention, model, SinkhornAttention(2, 8, use_query_bias=True, key=KEY))
    assert by_hand(tokens()).shape == (7, 3)


def test_padding_by_vector_by_dense_mask_and_by_cutting_agree():
    layer, x = SinkhornAttention(2, 8, key=KEY), tokens()
    keep = jnp.arange(7) < 5
    by_vector = layer(x, x, x, key_mask=keep)[:5]
    by_mask = layer(x, x, x, keep[:, None] & keep[None, :])[:5]
    cut = layer(x[:5], x[:5], x[:5])
    assert jnp.abs(by_vector - cut).max() < 1e-5
    assert jnp.abs(by_mask - cut).max() < 1e-5


@pytest.mark.parametrize("dustbin", [None, "token", pytest.param("score", marks=pytest.mark.slow)])
def test_filter_jit_grad_and_vmap(dustbin):
    layer = SinkhornAttention(2, 8, epsilon=jnp.asarray(0.8), dustbin=dustbin, window=4, key=KEY)
    x = jnp.stack([tokens(seed=1), tokens(seed=2)])

    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(layer):
        return (jax.vmap(lambda x: layer(x, x, x))(x) ** 2).sum()

    leaves = jax.tree.leaves(gradients(layer))
    assert len(leaves) == 5 + {None: 0, "token": 3, "score": 1}[dustbin]
    assert all(jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0 for leaf in leaves)


def test_unmatched_mass_and_process_heads():
    layer, x = SinkhornAttention(2, 8, dustbin="score", key=KEY), tokens()
    out, (rows, columns) = layer(x, x, x, return_unmatched=True)
    assert (out.shape, rows.shape, columns.shape) == ((7, 8), (2, 7), (2, 7))
    assert ((rows > 0) & (rows < 1)).all()
    plan = layer.plan(x, x)
    assert jnp.allclose(plan.sum(-2) + columns, 1, atol=1e-5)
    assert jnp.allclose(plan.sum(-1) + rows, 1, atol=1e-2)
    doubled = layer(x, x, x, process_heads=lambda q, k, v: (q, k, 2 * v))
    assert jnp.allclose(doubled, 2 * layer(x, x, x), atol=1e-5)
    with pytest.raises(ValueError, match="process_heads"):
        layer(x, x, x, process_heads=lambda q, k, v: (q[:2], k, v))


def test_against_the_operation():
    layer, x = SinkhornAttention(2, 8, epsilon=0.4, window=3, key=KEY), tokens()
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    heads = [jax.vmap(part)(x).reshape(7, 2, 4).swapaxes(0, 1) for part in projections]
    wanted = sinkhorn_attention(*heads, epsilon=0.4, window=3).swapaxes(0, 1).reshape(7, 8)
    assert jnp.allclose(layer(x, x, x), jax.vmap(layer.output_proj)(wanted), atol=1e-6)


def test_refusals_say_why():
    x = tokens()
    with pytest.raises(ValueError, match="no balanced plan"):
        SinkhornAttention(2, 8, key=KEY)(x, x, x, jnp.tril(jnp.ones((7, 7), bool)))
    with pytest.raises(ValueError, match="dropout"):
        SinkhornAttention(2, 8, dropout_p=0.1, key=KEY)
    with pytest.raises(ValueError, match="dropout"):
        swap_attention(eqx.nn.MultiheadAttention(2, 8, dropout_p=0.1, key=KEY))
    still = SinkhornAttention(2, 8, dropout_p=0.1, inference=True, key=KEY)
    assert still(x, x, x).shape == (7, 8)
    with pytest.raises(ValueError, match="dropout"):
        still(x, x, x, inference=False)
    with pytest.raises(ValueError, match="dustbin"):
        SinkhornAttention(2, 8, dustbin="bin", key=KEY)
    with pytest.raises(TypeError, match="unknown options"):
        swap_attention(block(), windw=3)
    with pytest.raises(ValueError, match="random key"):
        swap_attention(block(), dustbin="token")
