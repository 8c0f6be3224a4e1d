"""The CUDA kernels on a CPU: values through the interpreter, and lowering to Triton."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from flashot_backends.kernels.attention import chunked, pallas_gpu  # noqa: E402
from flashot_backends.ops.attention import api, sinkhorn_attention  # noqa: E402
from tests.ops.attention import cases  # noqa: E402

N = 40
SUPPORTS = {
    "dense": ({}, N),
    "band": ({"window": 7}, N),
    "padding": ({"key_mask": jnp.arange(N) < N - 9}, N),
    "rectangular": ({}, N + 30),
    "segments": ({"segments": jnp.arange(N) // 13}, N),
}


def tokens(m, dtype=jnp.float32):
    """Grouped heads: two query heads for each key head."""
    q, k, v = cases.tokens(n=N, m=m, lead=(2,), dtype=dtype)
    return jnp.stack([q, q + 1], 1), k[:, None], v[:, None]


def loss_and_gradients(monkeypatch, kernel, kind, bin_kind, dtype=jnp.float32, **steps):
    monkeypatch.setattr(api, "choose", lambda request, backend: kernel)
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    options, m = SUPPORTS[kind]

    def loss(q, k, v, parts):
        bin_ = cases.dustbin(bin_kind, parts)
        out = sinkhorn_attention(q, k, v, epsilon=0.7, dustbin=bin_, **{"base_steps": 3, **steps}, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2, 3))(*tokens(m, dtype), cases.parts(dtype=dtype))


KINDS = [("band", "token"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in cases.KERNEL_KINDS)]


@pytest.mark.parametrize(("kind", "bin_kind"), KINDS)
def test_the_interpreter_agrees_with_the_chunked_tier(monkeypatch, kind, bin_kind):
    got, wanted = (loss_and_gradients(monkeypatch, kernel, kind, bin_kind) for kernel in (pallas_gpu, chunked))
    assert cases.worst_error(got, wanted) < 5e-6


@pytest.mark.slow
def test_rows_last_and_deep_tails(monkeypatch):
    steps = {"tail_steps": 3.5, "last_update": "rows"}
    got, wanted = (loss_and_gradients(monkeypatch, kernel, "band", None, **steps) for kernel in (pallas_gpu, chunked))
    assert cases.worst_error(got, wanted) < 5e-6


@pytest.mark.parametrize(("dtype", "d"), [(jnp.bfloat16, 64), (jnp.float32, 80)])
def test_forward_and_backward_lower_to_triton(monkeypatch, dtype, d):
    monkeypatch.setattr(api, "choose", lambda request, backend: pallas_gpu)
    shape = jax.ShapeDtypeStruct((1, 2, 500, d), dtype)

    def loss(*arrays):
        return (sinkhorn_attention(*arrays, window=100) ** 2).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape, shape, shape).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


def test_reasons():
    request = api.AttentionRequest("cuda", "float64", 1, 8, 8, 4, 4, None, False, False)
    assert "float64" in pallas_gpu.applies(request)
    for field, value, word in (("dense", True, "dense"), ("d", 512, "256")):
        changed = {**request.__dict__, "dtype": "float32", field: value}
        assert word in pallas_gpu.applies(api.AttentionRequest(**changed))
    assert pallas_gpu.applies(api.AttentionRequest(**{**request.__dict__, "dtype": "bfloat16"})) is None
