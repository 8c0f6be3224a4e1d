"""The exact tail adjoint against automatic differentiation of the plain unrolled surrogate."""

import jax
import jax.numpy as jnp
import pytest

from flashot_backends.ops.attention import sinkhorn_attention
from tests.ops.attention import cases


def loss_and_gradients(values, backend, kind, bin_kind, options):
    keywords, _ = cases.support(kind)
    masses = {name: keywords.pop(name) for name in ("query_mass", "key_mass") if name in keywords}
    extra = dict(options)

    def loss(values):
        q, k, v, epsilon, bias, parts, mass = values
        bin_ = cases.dustbin(bin_kind, parts)
        scaled = {name: array * mass for name, array in masses.items()}
        out = sinkhorn_attention(
            q, k, v, epsilon=epsilon, bias=bias, dustbin=bin_, return_unmatched=bin_ is not None, backend=backend,
            **keywords, **scaled, **extra,
        )  # fmt: skip
        out, unmatched = out if bin_ is not None else (out, ())
        weights = [cases.normal(7 + seed, *part.shape, dtype=part.dtype) for seed, part in enumerate((out, *unmatched))]
        return sum((part * weight).sum() for part, weight in zip((out, *unmatched), weights, strict=True))

    return jax.value_and_grad(loss)(values)


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def problem(kind, dtype=jnp.float64, bias=False):
    m = cases.support(kind)[1]
    q, k, v = cases.tokens(m=m, dtype=dtype)
    bias = cases.normal(8, 11, m, dtype=dtype) if bias else None
    return q, k, v, jnp.asarray(0.6, dtype), bias, cases.parts(dtype=dtype), jnp.ones((), dtype)


def error(values, kind, bin_kind, **options):
    options = tuple({"base_steps": 4, **options}.items())
    return cases.worst_error(
        loss_and_gradients(values, "chunked", kind, bin_kind, options),
        loss_and_gradients(values, "reference", kind, bin_kind, options),
    )


@pytest.mark.parametrize("last", ["columns", "rows"])
@pytest.mark.parametrize("steps", [2, *slow(1, 3, 4)])
@pytest.mark.parametrize("kind", cases.SUPPORTS)
def test_supports(x64, kind, steps, last):
    assert error(problem(kind), kind, None, tail_steps=steps, last_update=last) <= 1e-12


@pytest.mark.parametrize("last", ["columns", *slow("rows")])
@pytest.mark.parametrize("kind", ["band", *slow("dense", "padding", "mask", "rectangular")])
@pytest.mark.parametrize("bin_kind", cases.DUSTBINS[1:])
def test_dustbins(x64, bin_kind, kind, last):
    assert error(problem(kind), kind, bin_kind, last_update=last) <= 1e-12


@pytest.mark.parametrize("last", ["columns", "rows"])
@pytest.mark.parametrize(("base", "tail"), [(0, 0.5), (2.5, 0.5), (1.5, 1.5), (0, 4.5)])
@pytest.mark.parametrize("bin_kind", [None, *slow("token")])
def test_half_steps(x64, bin_kind, base, tail, last):
    assert error(problem("band"), "band", bin_kind, base_steps=base, tail_steps=tail, last_update=last) <= 1e-12


@pytest.mark.parametrize("kind", ["band", *slow("dense", "mask")])
def test_bias(x64, kind):
    assert error(problem(kind, bias=True), kind, "score") <= 1e-12


@pytest.mark.parametrize(("epsilon", "tolerance"), [(1.0, 2e-6), (0.1, 2e-5), (0.02, 4e-4)])
@pytest.mark.parametrize("bin_kind", [None, "token"])
def test_float32_against_float64(x64, bin_kind, epsilon, tolerance):
    """Each entry against the largest of its array; about ten times ATTENTION.md's errors, which are averages."""
    wanted = problem("band")
    wanted = (*wanted[:3], jnp.asarray(epsilon), *wanted[4:])
    single = jax.tree.map(lambda array: array.astype(jnp.float32), wanted)
    options = (("base_steps", 15),)
    got = loss_and_gradients(single, "chunked", "band", bin_kind, options)
    assert jax.tree.leaves(got)[0].dtype == jnp.float32
    wanted = loss_and_gradients(wanted, "reference", "band", bin_kind, options)
    assert cases.worst_error(got[1][:3], wanted[1][:3]) <= tolerance


def test_bfloat16_is_close_and_keeps_its_dtype(x64):
    rounded = jax.tree.map(lambda array: array.astype(jnp.bfloat16), cases.tokens(n=32, m=32, d=16, e=16))

    def gradients(q, k, v, backend):
        def loss(*t):
            return (sinkhorn_attention(*t, epsilon=0.5, backend=backend) ** 2).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    got = gradients(*rounded, "chunked")
    assert {array.dtype for array in got} == {jnp.dtype(jnp.bfloat16)}
    wanted = gradients(*(array.astype(jnp.float64) for array in rounded), "reference")
    assert cases.worst_error([g.astype(jnp.float64) for g in got], wanted) < 2e-2


def test_gradient_of_a_gradient(x64):
    q, k, v = cases.tokens(lead=())
    weights = cases.normal(9, 11, 5)

    def second(backend):
        def first(q):
            return jax.grad(lambda q: (sinkhorn_attention(q, k, v, base_steps=3, backend=backend) ** 2).sum())(q)

        return jax.grad(lambda q: (first(q) * weights).sum())(q)

    assert cases.worst_error(second("chunked"), second("reference")) <= 1e-12


@pytest.mark.slow
def test_small_strips_change_nothing(x64, monkeypatch):
    """Several strips, an uneven last one, and columns cut by the band."""
    from flashot_backends.kernels.attention import chunked

    monkeypatch.setattr(chunked, "STRIP_SCORES", {"cpu": 1, "other": 1})
    for kind, bin_kind in [("dense", None), ("band", "token"), ("band+padding", None), ("mask", "score")]:
        assert error(problem(kind, bias=True), kind, bin_kind) <= 1e-12


def test_rows_of_the_score_gradient_sum_to_zero(x64):
    """Adding a constant to a row of scores changes nothing; a bias has the gradient of the scores."""
    q, k, v = cases.tokens(lead=())
    weights = cases.normal(9, 11, 3)

    def loss(bias):
        return (sinkhorn_attention(q, k, v, bias=bias, window=3, backend="chunked") * weights).sum()

    gradient = jax.grad(loss)(jnp.zeros((11, 11)))
    assert jnp.abs(gradient.sum(1)).max() < 1e-13 * jnp.abs(gradient).max() * 11
    off = abs(jnp.arange(11)[:, None] - jnp.arange(11)[None, :]) > 3
    assert (gradient[off] == 0).all()
    assert jnp.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("bin_kind", [None, "token"])
@pytest.mark.parametrize("window", [None, 3])
def test_padding_gets_exactly_nothing(window, bin_kind):
    q, k, v = cases.tokens(lead=(), dtype=jnp.float32)
    keep = jnp.arange(11) < 7
    bin_ = cases.dustbin(bin_kind, cases.parts(dtype=jnp.float32))

    def loss(q, k, v):
        out = sinkhorn_attention(q, k, v, key_mask=keep, window=window, dustbin=bin_, backend="chunked")
        return (out**2).sum(), out

    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    assert all((array[7:] == 0).all() for array in (out, *gradients))
    if bin_ is None:
        short = sinkhorn_attention(q[:7], k[:7], v[:7], window=window, backend="chunked")
        assert jnp.allclose(out[:7], short, atol=1e-6)
