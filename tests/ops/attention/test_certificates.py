"""The certificates bound what they claim."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from flashot_backends.ops.attention import (
    bias_certificate,
    contraction_certificate,
    select_tail_depth,
    sinkhorn_attention,
)
from tests.ops.attention import cases


def score_bias(q, k, v, cotangent, base, tail, **options):
    """‖dS_full − dS_tail‖₁ for each problem, from the gradient of a zero bias."""

    def gradient(base_steps, tail_steps):
        steps = {"base_steps": base_steps, "tail_steps": tail_steps, "backend": "reference"}

        def loss(bias):
            return (sinkhorn_attention(q, k, v, bias=bias, **steps, **options) * cotangent).sum()

        return jax.grad(loss)(jnp.zeros((*q.shape[:-1], k.shape[-2])))

    epsilon = options.get("epsilon", 1.0)  # bias / epsilon is what the scores see
    return epsilon * jnp.abs(gradient(0, base + tail) - gradient(base, tail)).sum((-1, -2))


@pytest.mark.parametrize("tail", [0.5, 1, 2])
@pytest.mark.parametrize("kind", ["dense", "band", "padding", "segments"])
def test_the_bound_holds(x64, kind, tail):
    options, _ = cases.support(kind)
    q, k, v = cases.tokens()
    cotangent = cases.normal(9, *v.shape)
    options = {**options, "epsilon": 1.5}
    bound = bias_certificate(q, k, v, cotangent, base_steps=6, tail_steps=tail, backend="chunked", **options)
    true = score_bias(q, k, v, cotangent, 6, tail, **options)
    assert (true <= bound.bound * (1 + 1e-9)).all()
    assert (true > 0).all()
    assert (bound.kappa == 1).all() == (kind == "band")


def test_the_bound_is_tight_where_scores_are_flat(x64):
    q, k, v = cases.tokens()
    cotangent = cases.normal(9, *v.shape)
    options = {"epsilon": 20.0, "base_steps": 6, "tail_steps": 1}
    bound = bias_certificate(q, k, v, cotangent, backend="chunked", **options)
    true = score_bias(q, k, v, cotangent, 6, 1, epsilon=20.0)
    assert (bound.bound < 2 * true).all()


@pytest.mark.parametrize("bin_kind", [None, "token", "score"])
def test_the_diameter_bounds_every_cross_difference(x64, bin_kind):
    q, k, _ = cases.tokens(n=5, m=5, lead=())
    parts = cases.parts()
    scores = q @ k.T / 5**0.5 / 0.7
    if bin_kind == "token":
        scores = jnp.concatenate([q, parts[0][None]]) @ jnp.concatenate([k, parts[1][None]]).T / 5**0.5 / 0.7
    if bin_kind == "score":
        scores = jnp.pad(scores, (0, 1), constant_values=parts[3] / 0.7)
    true = max(
        scores[i, j] + scores[p, r] - scores[i, r] - scores[p, j]
        for i, p in itertools.combinations(range(scores.shape[0]), 2)
        for j, r in itertools.permutations(range(scores.shape[1]), 2)
    )
    certificate = contraction_certificate(q, k, epsilon=0.7, dustbin=cases.dustbin(bin_kind, parts))
    assert true <= certificate.diameter
    assert jnp.allclose(certificate.kappa + certificate.gap, 1)


def test_exact_bias_falls_with_the_tail_and_selects_a_depth(x64):
    q, k, v = cases.tokens(n=24, m=24, lead=())
    cotangent = cases.normal(9, *v.shape)
    options = {"epsilon": 1.0, "base_steps": 15, "backend": "chunked"}
    biases = [
        float(bias_certificate(q, k, v, cotangent, mode="exact", tail_steps=steps, **options).relative)
        for steps in (1, 2, 4)
    ]
    assert biases[0] > 3 * biases[1] > 9 * biases[2] > 0
    depth = select_tail_depth(q, k, v, cotangent, tolerance=1.01 * biases[1], **options)
    assert (depth.tail_steps, depth.within_tolerance) == (2, True)
    assert not select_tail_depth(q, k, v, cotangent, tolerance=0.0, max_tail=1, **options).within_tolerance


def test_modes_are_checked():
    q, k, v = cases.tokens(lead=(), dtype=jnp.float32)
    with pytest.raises(ValueError, match="mode"):
        bias_certificate(q, k, v, v, mode="guess")
