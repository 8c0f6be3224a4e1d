"""A lazy cost where M goes: linear memory, a lazy plan, and slices for everybody else."""

import subprocess
import sys

import numpy as np
import pytest

from flashot_backends.adapters.pot import lazy_cost
from tests.memory import PEAK, linux

pytestmark = pytest.mark.usefixtures("lazy_tensors")


def test_it_is_a_lazy_tensor_of_the_host(pot, problem):
    lazy = lazy_cost(problem.X, problem.Y)
    assert isinstance(lazy, pot.utils.LazyTensor)
    assert lazy.shape == problem.M.shape
    for index in (slice(2, 5), (slice(None), slice(1, 4)), slice(None), (slice(3), slice(7, 9)), slice(4, 4)):
        np.testing.assert_allclose(lazy[index], problem.M[index], atol=1e-13)
    np.testing.assert_allclose(lazy[3], problem.M[3:4], atol=1e-13)
    np.testing.assert_allclose(lazy[3, 4], problem.M[3:4, 4:5], atol=1e-13)
    total = pot.utils.reduce_lazytensor(lazy, pot.backend.get_backend(problem.X).sum, axis=1, batch_size=5)
    np.testing.assert_allclose(total, problem.M.sum(1), rtol=1e-12)


def test_plan_is_lazy_and_the_hosts(pot, problem):
    plan, log = pot.sinkhorn(
        problem.a, problem.b, lazy_cost(problem.X, problem.Y), problem.reg, method="flash", log=True
    )
    expected, host_log = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, problem.reg, log=True)
    assert isinstance(plan, pot.utils.LazyTensor)
    assert plan.shape == expected.shape
    np.testing.assert_allclose(plan[:], expected, rtol=1e-8, atol=1e-13)
    np.testing.assert_allclose(plan[4:6, 2:9], expected[4:6, 2:9], rtol=1e-8, atol=1e-13)
    assert log["niter"] == host_log["niter"]
    np.testing.assert_allclose(log["log_v"], host_log["log_v"], rtol=1e-8, atol=1e-10)


def test_loss_is_the_hosts(pot, problem):
    lazy = lazy_cost(problem.X, problem.Y)
    expected = pot.sinkhorn2(problem.a, problem.b, problem.M, problem.reg, method="sinkhorn_log")
    assert pot.sinkhorn2(problem.a, problem.b, lazy, problem.reg, method="flash") == pytest.approx(expected, rel=1e-9)
    B = np.stack([problem.b, problem.b[::-1]], 1)
    expected = pot.sinkhorn2(problem.a, B, problem.M, problem.reg, method="sinkhorn_log")
    np.testing.assert_allclose(pot.sinkhorn2(problem.a, B, lazy, problem.reg, method="flash"), expected, rtol=1e-9)


def test_empty_weights_are_uniform(pot, problem):
    lazy = lazy_cost(problem.X, problem.Y)
    expected = pot.sinkhorn2([], [], problem.M, problem.reg, method="sinkhorn_log")
    assert pot.sinkhorn2([], [], lazy, problem.reg, method="flash") == pytest.approx(expected, rel=1e-9)


def test_points_far_from_the_origin_keep_their_digits(pot, problem):
    X, Y = ((points + 1000).astype(np.float32) for points in (problem.X, problem.Y))
    a, b = problem.a.astype(np.float32), problem.b.astype(np.float32)
    plan = pot.sinkhorn(a, b, lazy_cost(X, Y), np.float32(problem.reg), method="flash", stopThr=1e-6)
    M = ((X.astype(float)[:, None] - Y) ** 2).sum(-1)
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, M, problem.reg, stopThr=1e-6)
    np.testing.assert_allclose(plan[:], expected, atol=3e-5 * expected.max())
    assert plan[:].dtype == np.float32


def test_torch_points_and_their_gradients(pot, problem):
    torch = pytest.importorskip("torch")
    a, b, X, Y = (torch.tensor(t, requires_grad=True) for t in (problem.a, problem.b, problem.X, problem.Y))
    dense = ((X[:, None] - Y) ** 2).sum(-1)
    ours = pot.sinkhorn2(a, b, lazy_cost(X, Y), problem.reg, method="flash")
    hosts = pot.sinkhorn2(a, b, dense, problem.reg, method="sinkhorn_log")
    for mine, host in zip(
        torch.autograd.grad(ours, (a, b, X, Y)), torch.autograd.grad(hosts, (a, b, X, Y)), strict=True
    ):
        torch.testing.assert_close(mine, host, rtol=1e-6, atol=1e-9)
    block = pot.sinkhorn(a, b, lazy_cost(X, Y), problem.reg, method="flash")[2:4]
    plan = pot.sinkhorn(a, b, dense.detach(), problem.reg, method="sinkhorn_log")
    torch.testing.assert_close(block, plan[2:4], rtol=1e-7, atol=1e-12)
    (mine,) = torch.autograd.grad((block**2).sum(), X)
    dense = ((X[:, None] - Y) ** 2).sum(-1)
    (host,) = torch.autograd.grad((pot.sinkhorn(a, b, dense, problem.reg, method="sinkhorn_log")[2:4] ** 2).sum(), X)
    torch.testing.assert_close(mine, host, rtol=1e-6, atol=1e-9)


def test_jax_points(pot, problem):
    jnp = pytest.importorskip("jax").numpy
    a, b, X, Y = (jnp.asarray(array, jnp.float32) for array in (problem.a, problem.b, problem.X, problem.Y))
    block = pot.sinkhorn(a, b, lazy_cost(X, Y), problem.reg, method="flash", stopThr=1e-6)[:3]
    assert isinstance(block, jnp.ndarray)
    expected = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, problem.reg)[:3]
    np.testing.assert_allclose(block, expected, atol=1e-4 * expected.max())


def test_lists_of_points(pot):
    lazy = lazy_cost([[0.0], [1.0]], [[0.0], [1.0]])
    np.testing.assert_allclose(lazy[:], [[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("X", "Y", "metric", "error", "words"),
    [
        (np.zeros((3, 2)), np.zeros((3, 1)), "sqeuclidean", ValueError, r"X has shape \(3, 2\) and Y \(3, 1\)"),
        (np.zeros((3, 2)), np.zeros((3, 2)), "chebyshev", ValueError, "metric is 'chebyshev'.*sqeuclidean"),
        (np.zeros((3, 2)), np.zeros((3, 2), np.float32), "sqeuclidean", TypeError, "X has dtype.*Y"),
        (np.zeros((1, 3, 2)), np.zeros((3, 2)), "sqeuclidean", ValueError, r"X has shape \(1, 3, 2\)"),
        (np.zeros((3, 2), int), np.zeros((3, 2), int), "sqeuclidean", TypeError, "X has dtype int64"),
    ],
)
def test_bad_points(pot, X, Y, metric, error, words):
    with pytest.raises(error, match=words):
        lazy_cost(X, Y, metric)


def test_the_hosts_own_methods_refuse_it(pot, problem):
    with pytest.raises(ValueError, match=r"lazy cost.*method='flash'"):
        pot.sinkhorn(problem.a, problem.b, lazy_cost(problem.X, problem.Y), problem.reg)


def test_a_foreign_lazy_tensor_is_refused(pot, problem):
    lazy = pot.utils.LazyTensor((17, 23), lambda i, j, M: M[i, j], M=problem.M)
    with pytest.raises(TypeError, match=r"M is a .*LazyTensor.*lazy_cost"):
        pot.sinkhorn(problem.a, problem.b, lazy, problem.reg, method="flash")


MEMORY = PEAK + """
import numpy as np
import flashot_backends
flashot_backends.enable()
import ot
from flashot_backends.adapters.pot import lazy_cost

points = np.random.default_rng(0).random((12_000, 2))
ot.sinkhorn2([], [], lazy_cost(points[:500], points[:500]), 1.0, method="flash", numItermax=1)
before = peak()
plan = ot.sinkhorn([], [], lazy_cost(points, points), 1.0, method="flash", numItermax=1, warn=False)
loss = ot.sinkhorn2([], [], lazy_cost(points, points), 1.0, method="flash", numItermax=1)
assert plan.shape == (12_000, 12_000) and plan[5:7, :3].shape == (2, 3)
print(peak() - before)
"""


@linux
def test_memory_is_linear_in_the_points(pot):
    """The matrix alone would take 1 152 MB."""
    out = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 200


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
def test_metrics_of_the_host(pot, metric):
    """Far from the origin too, which matters to angles and must not to distances."""
    rng = np.random.default_rng(0)
    X, Y = rng.random((12, 3)) + 2, rng.random((9, 3)) + 2
    a, b = np.full(12, 1 / 12), np.full(9, 1 / 9)
    M, lazy = pot.dist(X, Y, metric=metric), lazy_cost(X, Y, metric)
    np.testing.assert_allclose(lazy[2:5], M[2:5], rtol=1e-9, atol=1e-12)
    reg = 0.1 * M.mean()
    plan = pot.sinkhorn(a, b, lazy, reg, method="flash", numItermax=200)
    np.testing.assert_allclose(plan[:], pot.sinkhorn(a, b, M, reg, method="sinkhorn_log", numItermax=200), rtol=1e-7)


def test_metrics_that_are_no_distances_of_the_host(pot):
    with pytest.raises(ValueError, match="metric is 'inner'"):
        lazy_cost(np.ones((3, 2)), np.ones((4, 2)), "inner")
