"""Arrays of any framework and layout: the same numbers, answered in kind."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops import arrays  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

from .sinkhorn_cases import close, normal, weights  # noqa: E402

X, Y = normal(6, 3).numpy(), normal(5, 3, seed=1).numpy()
A, B = weights(6).numpy(), weights(5, seed=1).numpy()
M = np.abs(normal(6, 5).numpy())
OPTIONS = {"epsilon": 1.0, "tolerance": 0, "max_iterations": 5}
WANTED = solve(DenseCost(torch.from_numpy(M)), torch.from_numpy(A), torch.from_numpy(B), **OPTIONS)


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def in_a_record(array):
    """Every number of the array beside a short one: strides that are no multiple of the item."""
    record = np.zeros(array.shape, dtype=[("value", array.dtype), ("other", "i2")])
    record["value"] = array
    return record["value"]


LAYOUTS = {
    "contiguous": lambda a: a,
    "read-only": frozen,
    "negative strides": lambda a: a[::-1].copy()[::-1],
    "column-major": np.asfortranarray,
    "every other": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "little-endian": lambda a: a.astype(a.dtype.newbyteorder("<")),
    "in a record": in_a_record,
    "unaligned": lambda a: np.frombuffer(b"\0" + a.tobytes(), dtype=a.dtype, offset=1).reshape(a.shape),
    "subclass": lambda a: a.view(np.memmap),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_numpy(layout):
    change = LAYOUTS[layout]
    before = M.copy()
    solution = solve(DenseCost(change(M)), change(A), change(B), init=(change(0 * A), change(0 * B)), **OPTIONS)
    assert isinstance(solution.f, np.ndarray) and solution.f.dtype == np.float64
    close(torch.from_numpy(solution.f), WANTED.f, rtol=1e-13)
    close(torch.from_numpy(solution.apply(change(B))), WANTED.apply(torch.from_numpy(B)), rtol=1e-13)
    assert (before == M).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_points(layout):
    change = LAYOUTS[layout]
    wanted = solve(PointCloud(torch.from_numpy(X), torch.from_numpy(Y)), **OPTIONS)
    close(torch.from_numpy(solve(PointCloud(change(X), change(Y)), **OPTIONS).g), wanted.g, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_of_numpy(dtype):
    potential = np.float64 if dtype == np.float64 else np.float32
    solution = solve(DenseCost(M.astype(dtype)), A.astype(potential), B.astype(potential), **OPTIONS)
    everything = [solution.f, solution.g, solution.error, solution.plan(), *solution.marginals(), solution.value()]
    everything += [solution.linear_cost(), solution.apply(B), solution.apply_transpose(A)]
    for result in everything:
        assert isinstance(result, np.ndarray) and result.dtype == potential
    assert solution.iterations.dtype == np.int64 and solution.converged.dtype == np.bool_
    tolerance = {np.float16: 2e-3, np.float32: 1e-6, np.float64: 1e-13}[dtype]
    close(torch.from_numpy(solution.f), WANTED.f, rtol=tolerance)


LAYOUTS_OF_TORCH = {
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "odd offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS_OF_TORCH)
def test_layouts_of_torch(layout, backend):
    change = LAYOUTS_OF_TORCH[layout]
    m, a, b, x, y = (change(torch.from_numpy(part)) for part in (M, A, B, X, Y))
    close(solve(DenseCost(m), a, b, backend=backend, **OPTIONS).f, WANTED.f, rtol=1e-13)
    points = solve(PointCloud(x, y), a, b, backend=backend, **OPTIONS)
    plain = solve(PointCloud(X, Y), A, B, **OPTIONS)
    close(points.g, torch.from_numpy(plain.g), rtol=1e-13)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_expanded(backend):
    """A batch that lies in memory once."""
    m, a = torch.from_numpy(M).expand(3, 6, 5), torch.from_numpy(A).expand(3, 6)
    solution = solve(DenseCost(m), a, torch.from_numpy(B), backend=backend, **OPTIONS)
    close(solution.f, WANTED.f.expand(3, 6), rtol=1e-13)
    x = torch.from_numpy(X)[:1].expand(6, 3)
    solution = solve(PointCloud(x, torch.from_numpy(Y)), backend=backend, **OPTIONS)
    wanted = solve(PointCloud(x.clone(), torch.from_numpy(Y)), backend=backend, **OPTIONS)
    close(solution.g, wanted.g, rtol=1e-13)


def test_kinds_may_be_mixed():
    """The answer is of the cost's kind."""
    solution = solve(DenseCost(torch.from_numpy(M)), A, B, epsilon=np.array(1.0), tolerance=0, max_iterations=5)
    assert isinstance(solution.f, torch.Tensor)
    close(solution.f, WANTED.f)
    assert isinstance(solution.apply(B), torch.Tensor)


def test_softmin_answers_in_kind():
    out = softmin(DenseCost(M), 0 * B, 1.0)
    assert isinstance(out, np.ndarray)
    np.testing.assert_allclose(out, -np.log(np.exp(-M).sum(-1)), rtol=1e-13)


def test_zero_dimensional_answers():
    solution = solve(DenseCost(M), **OPTIONS)
    assert solution.error.shape == solution.iterations.shape == solution.value().shape == ()
    assert float(solution.value()) and int(solution.iterations) == 5


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self):
        self.jax = pytest.importorskip("jax")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_dtypes(self, dtype):
        jnp = self.jax.numpy
        a, b = jnp.asarray(A, "float32"), jnp.asarray(B, "float32")
        solution = solve(DenseCost(jnp.asarray(M, dtype)), a, b, **OPTIONS)
        tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[dtype]
        for result in (solution.f, solution.plan(), solution.value(), solution.error):
            assert isinstance(result, self.jax.Array) and result.dtype == jnp.float32
        assert solution.converged.dtype == jnp.bool_
        np.testing.assert_allclose(np.asarray(solution.f), WANTED.f.numpy(), atol=tolerance)
        found = solution.apply(jnp.asarray(B, "float32"))
        np.testing.assert_allclose(np.asarray(found), WANTED.apply(torch.from_numpy(B)).numpy(), atol=tolerance)

    def test_float64(self):
        """float64 stays float64 where JAX has it."""
        enable_x64 = self.jax.enable_x64 if hasattr(self.jax, "enable_x64") else self.jax.experimental.enable_x64
        with enable_x64(True):
            solution = solve(PointCloud(self.jax.numpy.asarray(X), self.jax.numpy.asarray(Y)), **OPTIONS)
            assert solution.f.dtype == self.jax.numpy.float64
            wanted = solve(PointCloud(X, Y), **OPTIONS)
            np.testing.assert_allclose(np.asarray(solution.f), wanted.f, rtol=1e-13)

    def test_epsilon(self):
        solution = solve(DenseCost(M), epsilon=self.jax.numpy.float32(1.0), tolerance=0, max_iterations=5)
        np.testing.assert_allclose(solution.f, solve(DenseCost(M), **OPTIONS).f)


def test_frameworks_that_cannot_be_served(monkeypatch):
    kind = type("EagerTensor", (), {"__module__": "tensorflow.python.framework.ops"})
    assert arrays.framework(kind()) == "tensorflow"
    with pytest.raises(TypeError, match="M is a tensorflow"):
        DenseCost(kind())
    assert arrays.framework([1.0]) is None
    assert arrays.framework(np.float32(1)) is None


def test_a_framework_is_not_imported_to_be_recognised(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert arrays.framework(M) == "numpy"
    monkeypatch.delitem(sys.modules, "torch")
    assert arrays.framework(M) == "numpy"
    assert "torch" not in sys.modules
