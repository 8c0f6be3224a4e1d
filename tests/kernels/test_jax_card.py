"""The Pallas kernels on a real card, against float64: what XLA and Triton make of them cannot be seen on a CPU."""

import pytest

jax = pytest.importorskip("jax")
if jax.default_backend() != "gpu":
    pytest.skip("jax sees no CUDA device", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.kernels.sinkhorn import pallas_gpu  # noqa: E402
from flashot_backends.kernels.sinkhorn.jax_pairs import prepare  # noqa: E402
from flashot_backends.ops.attention import sinkhorn_attention  # noqa: E402
from flashot_backends.ops.maxsim.jax_ops import maxsim  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402
from tests.kernels import sinkhorn_pallas_cases  # noqa: E402
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


SINKHORN = sinkhorn_pallas_cases.SMALL | sinkhorn_pallas_cases.OTHERS


@pytest.mark.parametrize("name", SINKHORN)
def test_sinkhorn_matrices_and_metrics(name):
    sinkhorn_pallas_cases.check(pallas_gpu, **SINKHORN[name], optimized=True)


def test_sinkhorn_softmin_of_a_matrix_chooses_the_kernel():
    M = jnp.ones((300, 200))
    found = softmin(DenseCost(M), jnp.zeros(200), 1.0, backend="pallas_gpu")
    np.testing.assert_allclose(found, 1 - np.log(200.0), rtol=1e-6)


@pytest.mark.parametrize("kind", ["matrix", "bfloat16", "euclidean", "l1", "l1 of many"])
def test_sinkhorn_solutions(x64, kind):  # noqa: F811
    """Values, potentials, P V and their gradients in float32, against float64 by streamed JAX."""
    n, m = 600, 777
    d, epsilon = (20, 3.0) if kind == "l1 of many" else (3, 0.3)
    x, y = sinkhorn_pallas_cases.points(1, n, m, d)
    given = (x[0], y[0])
    if kind in ("matrix", "bfloat16"):
        dtype = jnp.bfloat16 if kind == "bfloat16" else jnp.float32
        given = (jnp.asarray(sinkhorn_pallas_cases.costs(x, y, "euclidean")[0], dtype),)
    b, towards = np.where(np.arange(m) == 4, 0, 1 / (m - 1)), np.cos(np.arange(m))

    def gradients(backend, wide, given):
        def value(*parts):
            metric = kind.split()[0]
            cost = DenseCost(*parts) if len(parts) == 1 else PointCloud(*parts, metric)
            options = {"max_iterations": 20, "tolerance": 0, "acceleration": None, "backend": backend}
            solution = solve(cost, b=jnp.asarray(b, wide), epsilon=epsilon, **options)
            moved = solution.apply(jnp.asarray(towards, wide))
            return solution.value() + moved.sum(), (solution.f, moved)

        return jax.jit(jax.value_and_grad(value, tuple(range(len(given))), has_aux=True))(*given)

    found = gradients("pallas_gpu", jnp.float32, given)
    wanted = gradients("chunked", jnp.float64, rounded(given, jnp.float64))
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        bound, size = 5e-3 if got.dtype == jnp.bfloat16 else 2e-5, float(abs(exact).max())
        np.testing.assert_allclose(got.astype(jnp.float64), exact, atol=bound * size, rtol=0)


def test_sinkhorn_matrix_beyond_32_bits():
    """Offsets of a matrix of 4.4 GB, both ways."""
    n, m = 34_000, 32_500
    i, j = jnp.arange(n, dtype=jnp.float32), jnp.arange(m, dtype=jnp.float32)
    M = jnp.cos(i[:, None] * 0.37 + j[None, :] * 0.11)[None]
    pairs = prepare(M, None, jnp.ones(1))
    for side in (pairs, pairs.T):
        h = jnp.sin(jnp.arange(side.columns) * 1.0)[None]
        found = jax.jit(pallas_gpu.lse)(side, h)
        wanted = jax.jit(lambda side, h: jax.nn.logsumexp(h[:, None, :] - side.costs, -1))(side, h)
        np.testing.assert_allclose(found, wanted, atol=2e-5)
