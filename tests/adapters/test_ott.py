"""OTT-JAX on our kernels: the host's solvers, problems and gradients, against its own dense mode in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ott", reason="needs ott-jax")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from ott.geometry import costs, pointcloud  # noqa: E402
from ott.problems.linear import linear_problem  # noqa: E402
from ott.solvers.linear import implicit_differentiation, sinkhorn  # noqa: E402

import flashot_backends  # noqa: E402
from flashot_backends.adapters import ott as adapter  # noqa: E402

N, M = 19, 23


@pytest.fixture(autouse=True)
def _host():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation
    flashot_backends.enable()
    yield
    flashot_backends.disable()
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_x64", before)


def clouds(seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.random(N), rng.random(M)
    a[0] = b[3] = 0
    x, y = rng.normal(size=(N, 3)), rng.normal(size=(M, 3))
    return tuple(jnp.asarray(part) for part in (x, y, a / a.sum(), b / b.sum()))


def outcome(how, x, y, a, b, tau=1.0, solver=None, **geometry):
    geometry = {"epsilon": 0.5, **geometry}
    geom = pointcloud.PointCloud(x, y, batch_size=how, **geometry)
    problem = linear_problem.LinearProblem(geom, a, b, tau_a=tau, tau_b=tau)
    return sinkhorn.Sinkhorn(**{"threshold": 1e-4, "max_iterations": 300, **(solver or {})})(problem)


CASES = {
    "plain": {},
    "epsilon of the host": {"epsilon": None},
    "relative epsilon": {"epsilon": 0.05, "relative_epsilon": "mean"},
    "scaled by the mean": {"scale_cost": "mean"},
    "scaled by the largest": {"scale_cost": "max_cost"},
    "unbalanced": {"tau": 0.9},
    "another cost": {"cost_fn": costs.PNormP(1.5)},
    "scalings": {"solver": {"lse_mode": False}},
    "unrolled": {"solver": {"implicit_diff": None, "max_iterations": 40}},
    "implicit": {"solver": {"implicit_diff": implicit_differentiation.ImplicitDiff()}},
}


QUICK = ("epsilon of the host", "unbalanced", "unrolled", "implicit")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_solver_and_gradients(case):
    x, y, a, b = clouds()

    def loss(how, x, y, b):
        out = outcome(how, x, y, a, b, **CASES[case])
        return out.reg_ot_cost + (out.apply(y.T, axis=1) ** 2).sum(), out

    found, wanted = (
        jax.jit(jax.value_and_grad(loss, (1, 2, 3), has_aux=True), static_argnums=0)(how, x, y, b)
        for how in ("flash", None)
    )
    (value, out), (host_value, host) = found[0], wanted[0]
    assert type(out.geom) is adapter.PointCloud and type(host.geom) is pointcloud.PointCloud
    assert int(out.n_iters) == int(host.n_iters)
    np.testing.assert_allclose(value, host_value, rtol=1e-10)
    np.testing.assert_allclose(out.errors, host.errors, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(out.matrix, host.matrix, rtol=1e-9, atol=1e-13)
    for mine, hosts in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(mine, hosts, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("cost_fn", [costs.SqEuclidean(), costs.Cosine()])
def test_kernels(axis, cost_fn):
    x, y, a, b = clouds()
    dense, ours = (pointcloud.PointCloud(x, y, cost_fn, how, 2.0, epsilon=0.3) for how in (None, "flash"))
    f, g = jnp.log(a), jnp.log(b)
    vec = jnp.cos(jnp.arange(N if axis == 0 else M))
    for weights in (None, vec, 0 * vec):
        (mine, sign), (hosts, host_sign) = (geom.apply_lse_kernel(f, g, 0.4, weights, axis) for geom in (ours, dense))
        alive = jnp.isfinite(f if axis == 1 else g)  # where the host subtracts an infinite potential, it says −∞
        np.testing.assert_allclose(mine[alive], hosts[alive], rtol=1e-10)
        if weights is not None:
            np.testing.assert_array_equal(sign[alive], host_sign[alive])
    np.testing.assert_allclose(ours.apply_kernel(vec, 0.3, axis), dense.apply_kernel(vec, 0.3, axis), rtol=1e-10)
    np.testing.assert_allclose(ours.apply_cost(vec, axis), dense.apply_cost(vec, axis), rtol=1e-10)
    np.testing.assert_allclose(ours.apply_square_cost(vec, axis), dense.apply_square_cost(vec, axis), rtol=1e-10)


def test_a_point_cloud_stays_what_it_is():
    x, y, *_ = clouds()
    geom = pointcloud.PointCloud(x, y, batch_size="flash", epsilon=0.1)
    for other in (jax.tree.map(lambda leaf: 2 * leaf, geom), geom.subset(jnp.arange(4), None), geom.copy_epsilon(geom)):
        assert type(other) is adapter.PointCloud and other.is_online
    assert isinstance(geom, pointcloud.PointCloud) and 1 <= geom.batch_size <= N
    assert type(adapter.PointCloud(x, y)) is adapter.PointCloud and adapter.PointCloud(x, y).is_online
    assert not adapter.PointCloud(x, y, batch_size=None).is_online


def test_vmap():
    x, y, a, b = clouds()
    many = jnp.stack([x, 2 * x, x + 1])
    cost = lambda how, x: outcome(how, x, y, a, b).reg_ot_cost  # noqa: E731
    found, wanted = (jax.vmap(lambda x, how=how: cost(how, x))(many) for how in ("flash", None))
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_the_hosts_own_classes_are_left_alone():
    x, y, *_ = clouds()
    assert type(pointcloud.PointCloud(x, y)) is pointcloud.PointCloud
    assert type(pointcloud.PointCloud(x, y, batch_size=5)) is pointcloud.PointCloud
    with flashot_backends.use(substitute=["ott"]):
        assert type(pointcloud.PointCloud(x, y)) is pointcloud.PointCloud
        online = pointcloud.PointCloud(x, y, batch_size=5)
        assert type(online) is adapter.PointCloud and online.batch_size == 5
    flashot_backends.disable()
    with pytest.raises(TypeError):
        pointcloud.PointCloud(x, y, batch_size="flash")


def test_bad_batch_sizes():
    x, y, *_ = clouds()
    for make in (pointcloud.PointCloud, adapter.PointCloud):
        with pytest.raises(ValueError, match=r"batch_size is 'flahs'.*'flash'"):
            make(x, y, batch_size="flahs")


@pytest.mark.parametrize("first", ["import ott.geometry.pointcloud", "from flashot_backends.adapters import ott"])
def test_either_import_comes_first(first):
    code = (
        "import warnings; warnings.simplefilter('error', RuntimeWarning)\n"
        f"import flashot_backends; flashot_backends.enable()\n{first}\n"
        "import jax.numpy as jnp; from ott.geometry import pointcloud\n"
        "print(type(pointcloud.PointCloud(jnp.ones((3, 2)), batch_size='flash')).__module__)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "flashot_backends.adapters.ott", done.stderr


def test_an_unchanged_script():
    """Its online mode is ours under ``substitute``; the dense one is the host's."""
    root = Path(__file__).parents[2]
    script = str(root / "tests" / "hosts" / "ott_online.py")

    def run(*arguments, **environment):
        env = {**os.environ, "PYTHONPATH": str(root), **environment}
        command = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-m", "flashot_backends", script, "16", FLASHOT_SUBSTITUTE="ott") == run(script)


def test_memory_is_linear():
    """Temporary memory of a compiled solve and of its gradient, from the compiler."""
    x, y = (jnp.asarray(np.random.default_rng(seed).normal(size=(2000, 2))) for seed in (0, 1))
    uniform = jnp.full(2000, 1 / 2000)
    loss = lambda x: outcome("flash", x, y, uniform, uniform).reg_ot_cost  # noqa: E731
    for function in (loss, jax.grad(loss)):
        needed = jax.jit(function).lower(x).compile().memory_analysis().temp_size_in_bytes
        assert needed < 16e6  # a matrix takes 32 MB
