"""The CUDA kernels on a CPU: values through the interpreter, and lowering to Triton."""

import itertools

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from flashot_backends.kernels.attention import chunked, pallas_gpu  # noqa: E402
from flashot_backends.kernels.attention.pairs import Pairs  # noqa: E402
from flashot_backends.kernels.attention.tuning import gpu_blocks  # noqa: E402
from flashot_backends.ops.attention import api, sinkhorn_attention  # noqa: E402
from tests.ops.attention import cases  # noqa: E402

N = 40
SUPPORTS = {
    "dense": ({}, N),
    "band": ({"window": 7}, N),
    "padding": ({"key_mask": jnp.arange(N) < N - 9}, N),
    "rectangular": ({}, N + 30),
    "segments": ({"segments": jnp.arange(N) // 13}, N),
    "mask": ({"mask": (jnp.arange(N)[:, None] - jnp.arange(N)) % N < 17, "bias": cases.normal(8, N, N)}, N),
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


KINDS = [
    ("band", "token"),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [("mask", None), *cases.KERNEL_KINDS]),
]


@pytest.mark.parametrize(("kind", "bin_kind"), KINDS)
def test_the_interpreter_agrees_with_the_chunked_tier(monkeypatch, kind, bin_kind):
    got, wanted = (loss_and_gradients(monkeypatch, kernel, kind, bin_kind) for kernel in (pallas_gpu, chunked))
    assert cases.worst_error(got, wanted) < 5e-6


@pytest.mark.slow
def test_rows_last_and_deep_tails(monkeypatch):
    steps = {"tail_steps": 3.5, "last_update": "rows"}
    got, wanted = (loss_and_gradients(monkeypatch, kernel, "band", None, **steps) for kernel in (pallas_gpu, chunked))
    assert cases.worst_error(got, wanted) < 5e-6


def test_large_programs(monkeypatch):
    """Those that problems of many tokens have, on problems of few."""
    wanted = gpu_blocks("_half_step_kernel", 1, 64, 8, 4096, 4096, True)
    assert wanted == (128, 128, 4, 2)
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    q, k = (cases.normal(seed, 2, 200, 64, dtype=jnp.bfloat16) for seed in (1, 2))
    ids = jnp.where(jnp.arange(200) < 170, 0, -1) * jnp.ones((2, 1), jnp.int32)
    pairs = Pairs(q, k, jnp.full(2, 0.125), ids, 2 * ids, packed=False)
    w, target = (cases.normal(seed, 2, 200, dtype=jnp.float32) for seed in (3, 4))
    found = []
    for blocks in (wanted, (64, 64, 4, 3)):
        monkeypatch.setattr(pallas_gpu, "gpu_blocks", lambda *_, blocks=blocks: blocks)
        found.append(pallas_gpu.half_step(pallas_gpu.prepare(pairs), w, target, None, 0 * w))
    found.append(chunked.half_step(chunked.prepare(pairs), w, target, None, 0 * w))
    for one in found[:2]:
        assert cases.worst_error(one, found[2]) < 2e-6


@pytest.mark.parametrize("guess", [0.0, 200.0, -200.0])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_a_bad_guess_costs_no_digits(monkeypatch, size, guess):
    """Sums that overflow or vanish around the guess are taken again around their maximum."""
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    q, k, _ = cases.tokens(n=N, m=N, dtype=jnp.float32)
    ids = jnp.where(jnp.arange(N) < 33, 0, -1) * jnp.ones((2, 1), jnp.int32)
    pairs = Pairs(q * size, k * size, jnp.ones(2), ids, 2 * ids, packed=False)
    w, target = cases.normal(4, 2, N, dtype=jnp.float32), cases.normal(5, 2, N, dtype=jnp.float32)
    got = pallas_gpu.half_step(pallas_gpu.prepare(pairs), w, target, None, jnp.full((2, N), guess))
    wanted = chunked.half_step(pairs, w, target, None, None)
    assert jnp.abs(got - wanted).max() < 2e-6 * jnp.abs(wanted).max()
    assert (got[:, 33:] == 0).all()


def test_a_wide_range_of_float32_keeps_its_digits(monkeypatch):
    """Values far apart in size: the two float16 parts share one unit and the plan has one for every row."""
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    q, k, v = cases.tokens(n=N, m=N, dtype=jnp.float32)
    pairs, v = Pairs(q, k, jnp.ones(2)), v * 10.0 ** jnp.linspace(-2, 6, N)[:, None]
    u = jnp.linspace(-20, 10, N) * jnp.ones((2, 1))
    zeros = jnp.zeros((2, N))
    got = pallas_gpu.apply(pallas_gpu.prepare(pairs), u, zeros, v)
    wanted = chunked.apply(pairs, u, zeros, v)
    assert (jnp.abs(got - wanted).max(-1) < 3e-6 * jnp.abs(wanted).max(-1)).all()


@pytest.mark.parametrize("over_keys", [pytest.param(True, marks=pytest.mark.slow), False])
def test_vmap_twice(monkeypatch, over_keys):
    """More problems, not more axes of the grid; keys that are not mapped over get the sum of the gradients."""
    monkeypatch.setattr(api, "choose", lambda request, backend: pallas_gpu)
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    q, k, v = (cases.normal(seed, 2, 2, heads, 20, 8, dtype=jnp.float32) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    k, v = (k, v) if over_keys else (k[:1, :1] + 0 * k, v[:1, :1] + 0 * v)

    def one(q, k, v):
        return sinkhorn_attention(q, k, v, window=6, base_steps=0, tail_steps=1)

    axes = (0, 0, 0) if over_keys else (0, None, None)

    def loss(q, k, v):
        return (jax.vmap(jax.vmap(one, axes), axes)(q, k, v) ** 2).sum()

    wanted = jax.grad(lambda *t: (one(*t) ** 2).sum(), (0, 1, 2))(q, k, v)
    got = jax.grad(loss, (0, 1, 2))(q, *((k, v) if over_keys else (k[0, 0], v[0, 0])))
    wanted = wanted if over_keys else (wanted[0], *(g.sum((0, 1)) for g in wanted[1:]))
    assert cases.worst_error(got, wanted) < 2e-6


@pytest.mark.parametrize("kernel", [chunked, pallas_gpu], ids=["chunked", "gpu"])
def test_float16_plans_of_long_rows_do_not_vanish(monkeypatch, kernel):
    """Entries of a plan are about 1 / tokens, and those of its gradient smaller still: too small for float16."""
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    q, k, v = (array.astype(jnp.float16) for array in cases.tokens(n=N, m=N, dtype=jnp.float32))
    left, u, zeros = 1e-3 * v, jnp.full((2, N), -14.0), jnp.zeros((2, N))
    terms = jnp.zeros((2, N, 1))

    def results(kernel, kind):
        laid = kernel.prepare(Pairs(q.astype(kind), k.astype(kind), jnp.ones(2)))
        values = v.astype(kind)
        return kernel.apply(laid, u, zeros, values), kernel.pull(
            laid, u, zeros, left.astype(kind), values, terms, terms
        )

    assert cases.worst_error(results(kernel, jnp.float16), results(chunked, jnp.float32)) < 2e-3


def test_float32_stays_float32_where_float64_is_on(x64, monkeypatch):
    got, wanted = (
        loss_and_gradients(monkeypatch, kernel, "padding", None, base_steps=0, tail_steps=0.5)
        for kernel in (pallas_gpu, chunked)
    )
    assert cases.worst_error(got, wanted) < 5e-6


@pytest.mark.parametrize(("dtype", "d"), [(jnp.bfloat16, 64), (jnp.float32, 80)])
def test_forward_and_backward_lower_to_triton(monkeypatch, dtype, d):
    monkeypatch.setattr(api, "choose", lambda request, backend: pallas_gpu)
    shape = jax.ShapeDtypeStruct((1, 2, 500, d), dtype)

    def loss(*arrays):
        return (sinkhorn_attention(*arrays, window=100) ** 2).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape, shape, shape).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "triton" in text
    assert (
        text.count("xla.gpu.triton") <= 5
    )  # the half-steps share one, or every call would wait for a dozen compilations


def test_reasons():
    request = api.AttentionRequest("cuda", "float64", 1, 8, 8, 4, 4, None, False, False)
    assert "float64" in pallas_gpu.applies(request)
    for field, value, word in (("d", 512, "256"), ("e", 300, "256")):
        changed = {**request.__dict__, "dtype": "float32", field: value}
        assert word in pallas_gpu.applies(api.AttentionRequest(**changed))
    assert pallas_gpu.applies(api.AttentionRequest(**{**request.__dict__, "dtype": "bfloat16"})) is None


@pytest.mark.parametrize(("problems", "rows"), [(1, 16), (1, 4096), (8, 4096), (64, 128)])
@pytest.mark.parametrize("features", [16, 64, 128, 256])
def test_launch_shapes_fit(features, rows, problems):
    """Powers of two that divide the padded length, and matrix products of at least 16 a side."""
    for kernel in ("_half_step_kernel", "_matvec_kernel", "_apply_kernel", "_pull_kernel"):
        for parts, simple in itertools.product((1, 2), (False, True)):
            height, width, warps, _ = gpu_blocks(kernel, parts, features, problems, rows, rows, simple)
            assert rows % height == 0 == rows % width
            assert min(height, width) >= 16
            assert warps in (4, 8)
