"""Every kind of array comes back as it came: kind, dtype, device; and what is refused says why."""

import numpy as np
import pytest

import flashot_backends


def as_torch(*arrays, dtype=None):
    torch = pytest.importorskip("torch")
    return [torch.as_tensor(array, dtype=dtype and getattr(torch, dtype)) for array in arrays]


@pytest.fixture
def jnp():
    """``jax.numpy`` with float64."""
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # most of these tests' time is compilation
    yield jax.numpy
    jax.config.update("jax_enable_x64", before)
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-9), ("float32", 2e-5), ("float16", 5e-3)])
def test_numpy_dtype(pot, problem, dtype, close):
    a, b, M = (array.astype(dtype) for array in (problem.a, problem.b, problem.M))
    plan, log = pot.sinkhorn(a, b, M, 0.1, method="flash", log=True, stopThr=1e-6)
    loss = pot.sinkhorn2(a, b, M, 0.1, method="flash", stopThr=1e-6)
    assert type(plan) is np.ndarray
    assert plan.dtype == loss.dtype == dtype
    assert log["log_u"].dtype == (dtype if dtype != "float16" else "float32")
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, 0.1, stopThr=1e-6)
    np.testing.assert_allclose(plan, expected, rtol=close * 10, atol=close * expected.max())
    np.testing.assert_allclose(loss, (expected * problem.M).sum(), rtol=close)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_torch_dtype(pot, problem, dtype):
    a, b = as_torch(problem.a, problem.b, dtype=dtype if dtype != "bfloat16" else "float32")  # 8 bits hold no mass of 1
    (M,) = as_torch(problem.M, dtype=dtype)
    plan, log = pot.sinkhorn(a, b, M, 0.1, method="flash", log=True, stopThr=1e-6)
    loss = pot.sinkhorn2(a, b, M, 0.1, method="flash", stopThr=1e-6)
    assert plan.dtype == loss.dtype == M.dtype
    assert loss.shape == ()
    assert plan.device == M.device == log["v"].device
    assert all(err.shape == () for err in log["err"])
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, 0.1, stopThr=1e-6)
    close = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(plan.double(), expected, rtol=close * 10, atol=close * expected.max())


@pytest.mark.gpu
def test_torch_on_a_card(pot, problem):
    tensors = [tensor.cuda() for tensor in as_torch(problem.a, problem.b, problem.M)]
    plan, log = pot.sinkhorn(*tensors, problem.reg, method="flash", log=True)
    assert plan.device == log["log_v"].device == tensors[2].device
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, problem.reg)
    np.testing.assert_allclose(plan.cpu(), expected, rtol=1e-8, atol=1e-13)


@pytest.mark.gpu
def test_cupy(pot, problem):
    cupy = pytest.importorskip("cupy")
    arrays = [cupy.asarray(array) for array in (problem.a, problem.b, problem.M)]
    plan, log = pot.sinkhorn(*arrays, problem.reg, method="flash", log=True)
    assert type(plan) is type(log["u"]) is cupy.ndarray
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, problem.reg)
    np.testing.assert_allclose(cupy.asnumpy(plan), expected, rtol=1e-8, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_jax(pot, problem, jnp, dtype):
    arrays = [jnp.asarray(array, dtype) for array in (problem.a, problem.b, problem.M)]
    plan, log = pot.sinkhorn(*arrays, 0.1, method="flash", log=True, stopThr=1e-6)
    loss = pot.sinkhorn2(*arrays, 0.1, method="flash", stopThr=1e-6)
    assert isinstance(plan, jnp.ndarray)
    assert isinstance(log["log_u"], jnp.ndarray)
    assert plan.dtype == loss.dtype == dtype
    assert plan.devices() == arrays[2].devices()
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, 0.1, stopThr=1e-6)
    np.testing.assert_allclose(plan, expected, rtol=1e-4, atol=1e-9)


def plain_jax_loss(a, b, M, reg, iterations):
    """sinkhorn_log's iterations and ⟨P, M⟩, for JAX to differentiate; POT's own loop refuses tracers."""
    import jax

    def once(log_u, _):
        log_v = jax.numpy.log(b) - jax.nn.logsumexp(log_u[:, None] - M / reg, 0)
        return jax.numpy.log(a) - jax.nn.logsumexp(log_v[None] - M / reg, 1), log_v

    log_u, log_v = jax.lax.scan(once, 0 * a, length=iterations)
    return (jax.numpy.exp(log_u[:, None] + log_v[-1][None] - M / reg) * M).sum()


def test_jax_transformations(pot, problem, jnp, monkeypatch):
    """jit, grad and vmap, with no way through torch."""
    import jax

    monkeypatch.setattr("flashot_backends.ops.arrays.require_torch", lambda: pytest.fail("torch was asked for"))
    z = *(jnp.asarray(array) for array in (problem.a, problem.b, problem.M)), jnp.asarray(0.1)
    iterations = pot.sinkhorn(*z, method="sinkhorn_log", log=True, stopThr=1e-6)[1]["niter"] + 1
    loss = lambda *z: pot.sinkhorn2(*z, method="flash", stopThr=1e-6)  # noqa: E731
    wanted = jax.value_and_grad(plain_jax_loss, (0, 1, 2, 3))(*z, iterations)
    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*z)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-10)
    for mine, plain in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(jax.grad(loss, 2)(*z), wanted[1][2], rtol=1e-8, atol=1e-12)
    mapped = jax.vmap(lambda M: loss(z[0], z[1], M, 0.1))(jnp.stack([z[2], z[2][:, ::-1]]))
    np.testing.assert_allclose(mapped[0], wanted[0], rtol=1e-10)


def test_jax_log_needs_numbers(pot, problem, jnp):
    import jax

    a, b, M = (jnp.asarray(array) for array in (problem.a, problem.b, problem.M))
    with pytest.raises(TypeError, match=r"log=True.*jax.jit"):
        jax.jit(lambda M: pot.sinkhorn(a, b, M, 0.1, method="flash", log=True)[0])(M)


def test_integers_become_floats(pot):
    weights = np.array([0.5, 0.5])
    plan = pot.sinkhorn(weights, weights, np.array([[0, 1], [1, 0]]), 1, method="flash")
    assert plan.dtype == np.float64
    a, b = as_torch(weights, weights)
    (M,) = as_torch(np.array([[0, 1], [1, 0]]))
    assert pot.sinkhorn(a, b, M, 1, method="flash").dtype == a.dtype


def test_any_strides(pot, problem):
    expected = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash")
    fortran = np.asfortranarray(problem.M)
    ours = pot.sinkhorn(problem.a, problem.b, fortran, problem.reg, method="flash")
    np.testing.assert_allclose(ours, expected, rtol=1e-10)
    backwards = pot.sinkhorn(problem.a[::-1], problem.b, problem.M[::-1], problem.reg, method="flash")
    np.testing.assert_allclose(backwards[::-1], expected, rtol=1e-10)


def test_inputs_are_left_alone(pot, problem):
    before = [array.copy() for array in (problem.a, problem.b, problem.M)]
    for array in (problem.a, problem.b, problem.M):
        array.setflags(write=False)
    pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash")
    for array, copy in zip((problem.a, problem.b, problem.M), before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.usefixtures("lazy_tensors")
def test_numpy_through_another_device(pot, problem, monkeypatch):
    """The plumbing of numpy_device, with the processor in the role of the card."""
    pytest.importorskip("torch")
    from flashot_backends.adapters import pot_arrays as adapter

    moved = []
    monkeypatch.setattr(adapter, "_card", lambda: moved.append(1) or "cpu")
    expected = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash")
    assert not moved
    with flashot_backends.use(numpy_device="cuda"):
        plan, log = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash", log=True)
        losses = pot.sinkhorn2(problem.a, problem.b[:, None], problem.M, problem.reg, method="flash")
        lazy = adapter.lazy_cost(problem.X, problem.Y)
        block = pot.sinkhorn(problem.a, problem.b, lazy, problem.reg, method="flash")[:2]
        loss = pot.bregman.empirical_sinkhorn2(problem.X, problem.Y, problem.reg, isLazy=True, method="flash")
    assert moved
    assert {type(x) for x in (plan, log["log_u"], losses, block)} == {np.ndarray}
    assert type(loss) is np.float64
    np.testing.assert_allclose(plan, expected, rtol=1e-10)
    np.testing.assert_allclose(block, expected[:2], rtol=1e-6)


@pytest.mark.gpu
def test_numpy_through_the_card(pot, problem):
    with flashot_backends.use(numpy_device="cuda"):
        plan = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash")
    assert type(plan) is np.ndarray
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, problem.reg)
    np.testing.assert_allclose(plan, expected, rtol=1e-8, atol=1e-13)
