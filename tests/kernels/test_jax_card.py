"""The Pallas kernels on a real card, against float64: what XLA and Triton make of them cannot be seen on a CPU."""

import pytest

jax = pytest.importorskip("jax")
if jax.default_backend() != "gpu":
    pytest.skip("jax sees no CUDA device", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402

from flashot_backends.ops.attention import sinkhorn_attention  # noqa: E402
from flashot_backends.ops.maxsim.jax_ops import maxsim  # noqa: E402
from tests.ops.attention import cases  # noqa: E402
from tests.ops.attention.conftest import x64  # noqa: E402, F401

pytestmark = pytest.mark.gpu
LENGTH = 500
SUPPORTS = {
    "dense": {},
    "band": {"window": 70},
    "padding": {"key_mask": jnp.arange(LENGTH) < 390},
    "segments": {"segments": jnp.arange(LENGTH) // 130},
}


def rounded(arrays, dtype):
    return [array.astype(dtype) for array in arrays]


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("bin_kind", [None, "token", "score"])
@pytest.mark.parametrize("kind", SUPPORTS)
def test_attention(x64, kind, bin_kind, dtype, tolerance):  # noqa: F811
    if kind == "segments" and bin_kind:
        pytest.skip("refused together")

    def gradients(backend, tokens, parts):
        def loss(q, k, v, parts):
            options = {"dustbin": cases.dustbin(bin_kind, parts), "base_steps": 3, **SUPPORTS[kind]}
            out = sinkhorn_attention(q, k, v, epsilon=0.5, backend=backend, **options)
            return (out.astype(jnp.float64) * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*tokens, parts)

    tokens = rounded((cases.normal(i, 2, h, LENGTH, 64) for i, h in ((1, 4), (2, 2), (3, 2))), dtype)
    parts = tuple(rounded(cases.parts(64, 64), dtype))
    got, plain = gradients("pallas_gpu", tokens, parts), gradients("chunked", tokens, parts)
    wanted = jax.tree.leaves(gradients("reference", rounded(tokens, jnp.float64), tuple(rounded(parts, jnp.float64))))
    error, usual = (cases.worst_error(rounded(jax.tree.leaves(one), jnp.float64), wanted) for one in (got, plain))
    assert error < (tolerance if dtype == jnp.float32 else max(tolerance, 1.5 * usual)), usual


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("pairs", [False, True])
def test_maxsim(x64, pairs, dtype, tolerance):  # noqa: F811
    tokens = rounded((cases.normal(1, 12, 32, 96), cases.normal(2, 12, 170, 96)), dtype)
    mask = jnp.arange(170) < jnp.linspace(20, 170, 12)[:, None]

    def gradients(backend, tokens):
        def loss(q, d):
            scores = maxsim(q, d, documents_mask=mask, pairs=pairs, backend=backend)
            return (scores * jnp.cos(jnp.arange(scores.size)).reshape(scores.shape)).sum(), scores

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*tokens)

    got = rounded(jax.tree.leaves(gradients("pallas_gpu", tokens)), jnp.float64)
    wanted = jax.tree.leaves(gradients("chunked", rounded(tokens, jnp.float64)))
    assert cases.worst_error(got, wanted) < tolerance
