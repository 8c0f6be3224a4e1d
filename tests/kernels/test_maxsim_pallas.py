"""MaxSim's Pallas kernels on a CPU: the interpreter against the chunked kernel, lowering for CUDA and for TPU."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from flashot_backends.kernels.maxsim import jax_blocks, pallas_gpu, pallas_tpu  # noqa: E402
from flashot_backends.ops.maxsim import jax_ops  # noqa: E402
from tests.kernels import ahead_of_time  # noqa: E402

BOTH = pytest.mark.parametrize("kernel", [pallas_gpu, pallas_tpu], ids=["gpu", "tpu"])
SIZES = {"all": (3, 5), "sets": (3, 2), "pairs": (3, 3)}


def problem(kind, tokens=9, length=150, d=24, dtype=jnp.float32):
    """Odd sizes, holes in both masks, one document with a single token and ties between the first two."""
    rng = np.random.default_rng(0)
    count, owned = SIZES[kind]
    lead = (count, owned) if kind == "sets" else (owned,)
    documents = rng.normal(size=(*lead, length, d))
    documents[..., 1, :] = documents[..., 0, :]
    mask = rng.random((*lead, length)) < 0.8
    mask[(0,) * len(lead)] = np.arange(length) == 3
    queries, keep = rng.normal(size=(count, tokens, d)), rng.random((count, tokens)) < 0.8
    return jnp.asarray(queries, dtype), jnp.asarray(documents, dtype), jnp.asarray(keep), jnp.asarray(mask)


def values_and_gradients(monkeypatch, kernel, kind, masked, dtype=jnp.float32, masks=True):
    monkeypatch.setattr(jax_ops, "_kernel", lambda tokens, backend: kernel)
    if kernel is not jax_blocks:
        monkeypatch.setattr(kernel, "interpret", True)
    queries, documents, *keep = problem(kind, dtype=dtype)

    def loss(queries, documents):
        given = keep if masks else (None, None)
        scores = jax_ops.maxsim(queries, documents, *given, masked, kind == "pairs")
        return (scores * jnp.cos(jnp.arange(scores.size)).reshape(scores.shape)).sum(), scores

    (_, scores), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(queries, documents)
    return scores, *(g.astype(jnp.float32) for g in gradients)


@BOTH
@pytest.mark.parametrize(("kind", "masked"), [("all", "zero"), ("sets", "exclude"), ("pairs", "exclude")])
def test_the_interpreter_agrees_with_the_chunked_kernel(monkeypatch, kernel, kind, masked):
    got, wanted = (values_and_gradients(monkeypatch, k, kind, masked) for k in (kernel, jax_blocks))
    for one, other in zip(got, wanted, strict=True):
        assert jnp.abs(one - other).max() <= 2e-6 * jnp.abs(other).max()


@BOTH
def test_bfloat16_without_masks(monkeypatch, kernel):
    got, wanted = (
        values_and_gradients(monkeypatch, k, "all", "exclude", jnp.bfloat16, masks=False) for k in (kernel, jax_blocks)
    )
    assert jnp.abs(got[0] - wanted[0]).max() <= 1e-6 * jnp.abs(wanted[0]).max()
    for one, other in zip(got[1:], wanted[1:], strict=True):  # both round to bfloat16 at the end
        assert jnp.abs(one - other).max() <= 2**-8 * jnp.abs(other).max()


def test_gathering_some_documents_at_a_time(monkeypatch):
    wanted = values_and_gradients(monkeypatch, jax_blocks, "all", "exclude")
    for block in (1, 9 * 3 * 24 * 2):
        monkeypatch.setattr(pallas_gpu, "BLOCK", block)
        got = values_and_gradients(monkeypatch, pallas_gpu, "all", "exclude")
        assert jnp.abs(got[1] - wanted[1]).max() <= 2e-6 * jnp.abs(wanted[1]).max()


@BOTH
def test_vmap(monkeypatch, kernel):
    monkeypatch.setattr(jax_ops, "_kernel", lambda tokens, backend: kernel)
    monkeypatch.setattr(kernel, "interpret", True)
    queries, documents, keep, mask = problem("all", length=40)

    def loss(queries, documents):
        one = jax.vmap(lambda q, k: jax_ops.maxsim(q[None], documents, k[None], mask)[0])
        return (one(queries, keep) ** 2).sum()

    def plain(queries, documents):
        return (jax_ops.maxsim(queries, documents, keep, mask) ** 2).sum()

    got, wanted = (jax.jit(jax.grad(f, (0, 1)))(queries, documents) for f in (loss, plain))
    for one, other in zip(got, wanted, strict=True):
        assert jnp.abs(one - other).max() <= 2e-6 * jnp.abs(other).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowering(monkeypatch, dtype):
    shapes = jax.ShapeDtypeStruct((64, 32, 128), dtype), jax.ShapeDtypeStruct((20, 180, 128), dtype)
    mask = jax.ShapeDtypeStruct((20, 180), bool)

    def gradients(queries, documents, mask):
        return jax.grad(lambda *t: jax_ops.maxsim(*t, documents_mask=mask).sum(), (0, 1))(queries, documents)

    monkeypatch.setattr(jax_ops, "_kernel", lambda tokens, backend: pallas_gpu)
    text = jax.jit(gradients).trace(*shapes, mask).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2
    monkeypatch.setattr(jax_ops, "_kernel", lambda tokens, backend: pallas_tpu)
    again = jax.export.export(jax.jit(lambda *t: gradients(*t)), platforms=["tpu"])(*shapes, mask)
    assert "tpu_custom_call" in again.mlir_module()


COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from flashot_backends.kernels.maxsim import pallas_tpu
from flashot_backends.ops.maxsim import jax_ops
jax_ops._kernel = lambda tokens, backend: pallas_tpu
for name, dtype, wide in (("v5e:2x2", "bfloat16", False), ("v6e:2x2", "float32", False), ("v6e:2x2", "float32", True)):
    jax.config.update("jax_enable_x64", wide)
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    given = [((4, 32, 128), dtype), ((16, 180, 128), dtype), ((16, 180), "bool")]
    given = [jax.ShapeDtypeStruct(*each, sharding=SingleDeviceSharding(device)) for each in given]
    loss = lambda q, d, mask: jax_ops.maxsim(q, d, documents_mask=mask).sum()
    jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile()
    print("compiled", name, dtype, wide)
"""


@pytest.mark.slow
@ahead_of_time.needs_libtpu
def test_ahead_of_time_compilation():
    """Catches what lowering does not, such as numbers of 64 bits."""
    ahead_of_time.check(COMPILE, 3)


def test_reasons():
    request = jax_ops.Request("cuda", "float64", 128)
    for kernel in (pallas_gpu, pallas_tpu):
        assert "float64" in kernel.applies(request)
        assert "features" in kernel.applies(request._replace(dtype="float32", d=4096))
        assert kernel.applies(request._replace(dtype="bfloat16")) is None
