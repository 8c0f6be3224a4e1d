"""The TPU kernels without a TPU: values through the interpreter with race detection, lowering, and compilation."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from flashot_backends.kernels.attention import chunked, pallas_tpu  # noqa: E402
from flashot_backends.ops.attention import api, sinkhorn_attention  # noqa: E402
from tests.kernels import ahead_of_time  # noqa: E402
from tests.ops.attention import cases  # noqa: E402

N = 140
SUPPORTS = {
    "dense": ({}, N),
    "band": ({"window": 17}, N),
    "padding": ({"key_mask": jnp.arange(N) < N - 9}, N),
    "rectangular": ({}, N + 30),
    "segments": ({"segments": jnp.arange(N) // 50}, N),
    "mask": ({"mask": (jnp.arange(N)[:, None] - jnp.arange(N)) % N < 57, "bias": jnp.cos(jnp.arange(N))[:, None]}, N),
}


def loss_and_gradients(monkeypatch, kernel, kind, bin_kind, interpret=True, **steps):
    monkeypatch.setattr(api, "choose", lambda request, backend: kernel)
    monkeypatch.setattr(pallas_tpu, "interpret", interpret)
    options, m = SUPPORTS[kind]
    q, k, v = cases.tokens(n=N, m=m, lead=(), dtype=jnp.float32)

    def loss(q, k, v, parts):
        bin_ = cases.dustbin(bin_kind, parts)
        out = sinkhorn_attention(q, k, v, epsilon=0.7, dustbin=bin_, **{"base_steps": 2, **steps}, **options)
        return (out**2).sum()

    return jax.value_and_grad(loss, (0, 1, 2, 3))(jnp.stack([q, q + 1]), k[None], v[None], cases.parts(dtype=q.dtype))


KINDS = [
    ("band", "token"),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [("mask", None), *cases.KERNEL_KINDS]),
]


@pytest.mark.parametrize(("kind", "bin_kind"), KINDS)
def test_the_interpreter_agrees_with_the_chunked_tier(monkeypatch, kind, bin_kind):
    got, wanted = (loss_and_gradients(monkeypatch, kernel, kind, bin_kind) for kernel in (pallas_tpu, chunked))
    assert cases.worst_error(got, wanted) < 5e-6


@pytest.mark.slow
def test_two_passes_where_a_strip_would_not_fit(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "STRIP_BYTES", 1)
    got, wanted = (loss_and_gradients(monkeypatch, kernel, "band", "token") for kernel in (pallas_tpu, chunked))
    assert cases.worst_error(got, wanted) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "band"])
def test_no_races(monkeypatch, kind):
    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    careful = pltpu.InterpretParams(detect_races=True)
    got = loss_and_gradients(monkeypatch, pallas_tpu, kind, None, careful, base_steps=1, tail_steps=1)
    wanted = loss_and_gradients(monkeypatch, chunked, kind, None, base_steps=1, tail_steps=1)
    assert cases.worst_error(got, wanted) < 5e-6
    assert not interpreter.races.races_found


def lowered_for_tpu(monkeypatch, dtype, **options):
    monkeypatch.setattr(api, "choose", lambda request, backend: pallas_tpu)
    shape = jax.ShapeDtypeStruct((1, 2, 1000, 64), dtype)

    def loss(*arrays):
        return (sinkhorn_attention(*arrays, **options) ** 2).astype(jnp.float32).sum()

    return jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["tpu"])(shape, shape, shape)


@pytest.mark.parametrize("options", [{}, {"window": 100, "tail_steps": 1.5}])
def test_export_for_tpu(monkeypatch, options):
    assert "tpu_custom_call" in lowered_for_tpu(monkeypatch, jnp.bfloat16, **options).mlir_module()


COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from flashot_backends.kernels.attention import pallas_tpu
from flashot_backends.ops.attention import api, sinkhorn_attention
api.choose = lambda request, backend: pallas_tpu
for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"):
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    for dtype, options in ((jnp.bfloat16, {}), (jnp.float32, {"window": 1000})):
        shape = jax.ShapeDtypeStruct((1, 2, 32768, 64), dtype, sharding=SingleDeviceSharding(device))
        loss = lambda *t: (sinkhorn_attention(*t, **options) ** 2).astype(jnp.float32).sum()
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 512 << 20
        print("compiled", name, dtype.__name__)
jax.config.update("jax_enable_x64", True)
jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
print("compiled with float64 at hand")
"""


@pytest.mark.slow
@ahead_of_time.needs_libtpu
def test_ahead_of_time_compilation_at_32768_tokens():
    """Catches what lowering does not: scoped memory, layouts."""
    ahead_of_time.check(COMPILE, 7)


def test_reasons():
    request = api.AttentionRequest("tpu", "float64", 1, 8, 8, 4, 4, None, False, False)
    assert "float64" in pallas_tpu.applies(request)
    for field, value, word in (("d", 1024, "512"), ("e", 600, "512")):
        changed = {**request.__dict__, "dtype": "float32", field: value}
        assert word in pallas_tpu.applies(api.AttentionRequest(**changed))
