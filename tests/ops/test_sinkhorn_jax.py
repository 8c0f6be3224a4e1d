"""The Sinkhorn operation on JAX arrays: values, stopping, batches, transformations, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

from . import sinkhorn_jax_cases as cases  # noqa: E402
from .sinkhorn_jax_cases import close  # noqa: E402


@pytest.fixture(autouse=True)
def _float64():
    with cases.float64():
        yield


def cost_of(kind, x, y):
    return PointCloud(x, y) if kind == "points" else DenseCost(cases.distances(x, y))


@pytest.mark.parametrize("backend", ["chunked", "jax_reference"])
@pytest.mark.parametrize("kind", ["points", "matrix"])
@pytest.mark.parametrize("zeros", [0, 2])
def test_against_the_plain_loop(kind, zeros, backend):
    x, y, a, b, epsilon = cases.problem(zeros)
    solution = solve(cost_of(kind, x, y), a, b, epsilon=epsilon, max_iterations=5, tolerance=0, backend=backend)
    M = cases.distances(x, y)
    f, g, plan = cases.loop(M, a, b, epsilon, 5)
    close(solution.f, f)
    close(solution.g, g)
    close(solution.plan(), plan)
    V, U = cases.normal(cases.COLUMNS, 2), cases.normal(cases.ROWS)
    close(solution.apply(V), plan @ V)
    close(solution.apply_transpose(U), plan.T @ U)
    close(solution.marginals()[0], a)
    close(solution.marginals()[1], plan.sum(0))
    close(solution.linear_cost(), (plan * M).sum())
    close(solution.error, abs(plan.sum(0) - b).sum())
    entropy = jnp.where(plan > 0, plan * jnp.log(jnp.where(plan > 0, plan, 1)), 0).sum()
    close(solution.value("entropy"), (plan * M).sum() + epsilon * (entropy - plan.sum()))
    ratio = jnp.where(plan > 0, plan / jnp.where(plan > 0, a[:, None] * b, 1), 1)
    close(solution.value(), (plan * M).sum() + epsilon * ((plan * jnp.log(ratio)).sum() - plan.sum() + 1))


@pytest.mark.parametrize(("kind", "acceleration"), [("points", None), ("points", "auto"), ("matrix", "auto")])
def test_against_the_torch_engine(kind, acceleration):
    pytest.importorskip("torch")
    x, y, a, b, _ = cases.problem(1, (2,))
    options = {"epsilon": np.array([0.05, 1.0]), "tolerance": 1e-8, "check_every": 3, "norm": "l2"}
    options |= {"acceleration": acceleration, "max_iterations": 3000}
    ours = solve(cost_of(kind, x, y), a, b, **options)
    numpy_cost = cost_of(kind, np.asarray(x), np.asarray(y))
    torchs = solve(numpy_cost, np.asarray(a), np.asarray(b), **options)
    assert ours.iterations.tolist() == torchs.iterations.tolist()
    assert ours.converged.tolist() == torchs.converged.tolist() == [True, True]
    for name in ("f", "g"):
        close(getattr(ours, name), getattr(torchs, name), rtol=1e-9)
    close(ours.errors, torchs.errors, rtol=1e-6, atol=1e-12)
    for name in ("value", "entropy", "linear_cost"):
        close(getattr(ours, name)(), getattr(torchs, name)(), rtol=1e-9)


def test_relaxed_iterations_are_fewer():
    x, y, a, b, _ = cases.problem()
    options = {"epsilon": 0.02, "tolerance": 1e-6, "max_iterations": 20000}
    relaxed, plain = (solve(PointCloud(x, y), a, b, acceleration=way, **options) for way in ("auto", None))
    assert bool(relaxed.converged) and bool(plain.converged)
    assert 3 * int(relaxed.iterations) < int(plain.iterations)
    close(relaxed.plan(), plain.plan(), rtol=0, atol=1e-5)


def test_stops_where_a_problem_alone_would():
    x, y, a, b, _ = cases.problem(0, (3,))
    epsilon = jnp.asarray([0.2, 5.0, 1.0])
    options = {"tolerance": 1e-5, "check_every": 4, "max_iterations": 150}
    together = solve(PointCloud(x, y), a, b, epsilon=epsilon, **options)
    assert len(set(together.iterations.tolist())) == 3
    for i in range(3):
        alone = solve(PointCloud(x[i], y[i]), a[i], b[i], epsilon=epsilon[i], **options)
        assert int(alone.iterations) == int(together.iterations[i])
        assert int(alone.iterations) == 150 or (int(alone.iterations) - 1) % 4 == 0
        close(alone.f, together.f[i])
        close(alone.error, together.error[i])


@pytest.mark.parametrize(("limit", "acceleration"), [(1, None), (2, None), (7, "overrelaxation"), (9, None)])
def test_the_limit_is_the_limit(limit, acceleration):
    x, y, a, b, _ = cases.problem()
    options = {"epsilon": 0.1, "max_iterations": limit, "check_every": 4, "acceleration": acceleration}
    watched = solve(PointCloud(x, y), a, b, tolerance=1e-14, **options)
    assert int(watched.iterations) == limit and not bool(watched.converged)
    close(watched.f, solve(PointCloud(x, y), a, b, tolerance=0, **options).f, rtol=1e-13)


def test_iterations_written_out(monkeypatch):
    """Several in one round of a loop, as on a CUDA device."""
    from flashot_backends.ops.sinkhorn import jax_loop

    x, y, a, b, epsilon = cases.problem()

    def run(x):
        s = solve(PointCloud(x, y), a, b, epsilon=epsilon, max_iterations=16, tolerance=1e-14, reach=(3.0, None))
        return s.value(), s.errors

    wanted = jax.tree.leaves(jax.value_and_grad(run, has_aux=True)(x))
    monkeypatch.setattr(jax_loop, "written_out", lambda: 4)
    jax.clear_caches()
    for one, other in zip(jax.tree.leaves(jax.value_and_grad(run, has_aux=True)(x)), wanted, strict=True):
        close(one, other, rtol=1e-12)
    jax.clear_caches()


def test_init_continues():
    x, y, a, b, epsilon = cases.problem(1)
    cost, options = PointCloud(x, y), {"epsilon": epsilon, "tolerance": 0}
    first = solve(cost, a, b, max_iterations=3, **options)
    then = solve(cost, a, b, max_iterations=4, init=(first.f, first.g), **options)
    close(then.f, solve(cost, a, b, max_iterations=7, **options).f)


def test_forbidden_pairs():
    x, y, a, b, epsilon = cases.problem()
    M = cases.distances(x, y).at[0, 1].set(jnp.inf).at[3, :4].set(jnp.inf)
    solution = solve(DenseCost(M), a, b, epsilon=epsilon, max_iterations=20, tolerance=0)
    f, _, plan = cases.loop(M, a, b, epsilon, 20)
    close(solution.f, f)
    close(solution.plan(), plan)
    close(solution.linear_cost(), jnp.where(plan > 0, plan * M, 0).sum())
    gradient = jax.grad(lambda M: solve(DenseCost(M), a, b, epsilon=epsilon, max_iterations=4, tolerance=0).value())(M)
    assert bool(jnp.isfinite(gradient).all()) and float(gradient[0, 1]) == 0


def test_one_matrix_for_many_histograms():
    x, y, _, _, epsilon = cases.problem()
    M, a, b = cases.distances(x, y), cases.weights(4, cases.ROWS), cases.weights(cases.COLUMNS, seed=2)
    solution = solve(DenseCost(M), a, b, epsilon=epsilon, max_iterations=5, tolerance=0)
    assert solution.f.shape == (4, cases.ROWS) and solution.plan().shape == (4, cases.ROWS, cases.COLUMNS)
    close(solution.g[2], cases.loop(M, a[2], b, epsilon, 5)[1])
    by_M = jax.grad(lambda M: solve(DenseCost(M), a, b, epsilon=epsilon, max_iterations=5, tolerance=0).f.sum())(M)
    close(by_M, jax.grad(lambda M: sum(cases.loop(M, a[i], b, epsilon, 5)[0].sum() for i in range(4)))(M))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_inputs_have_float32_potentials(dtype):
    x, y, a, b, _ = cases.problem()
    narrow = PointCloud(x.astype(dtype), y.astype(dtype))
    options = {"epsilon": 0.5, "max_iterations": 20, "tolerance": 0}
    solution = solve(narrow, a.astype("float32"), b.astype("float32"), **options)
    assert {part.dtype.name for part in (solution.f, solution.plan(), solution.value(), solution.error)} == {"float32"}
    wide = solve(PointCloud(*(part.astype(dtype).astype("float64") for part in (x, y))), a, b, **options)
    close(solution.f, wide.f, rtol=2e-6)
    if dtype == "bfloat16":
        gradient = jax.grad(lambda x: solve(PointCloud(x, narrow.y), **options).f.sum())(narrow.x)
        assert gradient.dtype == dtype


def test_far_from_the_origin():
    """float32 points keep their digits."""
    x, y, _, _, _ = cases.problem()
    x, y = (part.astype("float32") + jnp.float32(1e4) for part in (x, y))
    near = solve(PointCloud(x.astype("float64"), y.astype("float64")), epsilon=1.0, max_iterations=20, tolerance=0)
    far = solve(PointCloud(x, y), epsilon=1.0, max_iterations=20, tolerance=0)
    close(far.f, near.f, rtol=1e-5)


def test_strips(monkeypatch):
    from flashot_backends.kernels.sinkhorn import jax_blocks

    x, y = cases.normal(2, 53, 11), cases.normal(1, 31, 11, seed=1)
    h, epsilon = cases.normal(2, 31), jnp.asarray([0.5, 2.0])
    wanted = softmin(PointCloud(x, y), h, epsilon, backend="jax_reference")
    monkeypatch.setattr(jax_blocks, "STRIP_PAIRS", {"cpu": 2 * 31 * 9, "other": 0})
    jax.clear_caches()
    close(softmin(PointCloud(x, y), h, epsilon), wanted, rtol=1e-12)
    by_x = jax.grad(lambda x, backend: (softmin(PointCloud(x, y), h, epsilon, backend=backend) ** 2).sum())
    close(by_x(x, "chunked"), by_x(x, "jax_reference"), rtol=1e-11)
    jax.clear_caches()


def test_softmin():
    x, y, _, _, _ = cases.problem()
    h = cases.normal(4, cases.COLUMNS).at[:, 0].set(-jnp.inf)
    M = cases.distances(x, y)
    wanted = -0.5 * jax.nn.logsumexp(h[:, None, :] - M / 0.5, -1)
    for cost in (PointCloud(x, y), DenseCost(M)):
        close(softmin(cost, h, 0.5), wanted)
        close(softmin(cost, h[0], 0.5), wanted[0])
    assert softmin(DenseCost(M), jnp.full(cases.COLUMNS, -jnp.inf), 0.5).tolist() == [np.inf] * cases.ROWS


def test_transformations():
    """jit, vmap and pytrees: costs go in, solutions come out."""
    x, y, a, b, epsilon = cases.problem(1, (2,))
    options = {"max_iterations": 20, "tolerance": 1e-3}
    wanted = solve(PointCloud(x, y), a, b, epsilon=epsilon, **options)

    @jax.jit
    def compiled(cost, a, b, epsilon):
        return solve(cost, a, b, epsilon=epsilon, **options)

    solution = compiled(PointCloud(x, y), a, b, epsilon)
    close(solution.f, wanted.f)
    close(solution.apply(b), wanted.apply(b))
    mapped = jax.vmap(compiled, (0, 0, 0, None))(PointCloud(x, y), a, b, epsilon)
    assert mapped.iterations.tolist() == wanted.iterations.tolist()
    close(jax.vmap(lambda s: s.value())(mapped), wanted.value())
    close(jax.vmap(lambda cost: cost.dense())(PointCloud(x, y)), cases.distances(x, y))


REFUSED = {
    "acceleration": (
        lambda p: solve(PointCloud(*p[:2]), epsilon=1.0, acceleration="fast"), ValueError, "is 'fast'.*'annealing'"
    ),
    "dimension": (lambda p: PointCloud(p[0], p[1][:, :2]), ValueError, r"x has shape \(7, 3\) and y \(9, 2\)"),
    "dtypes": (lambda p: PointCloud(p[0], p[1].astype("float32")), TypeError, "x has dtype float64 and y float32"),
    "whole numbers": (lambda p: DenseCost(jnp.ones((2, 2), int)), TypeError, "M has dtype int64"),
    "rank": (lambda p: DenseCost(p[2]), ValueError, r"M has shape \(7,\)"),
    "length of a": (lambda p: solve(PointCloud(*p[:2]), p[3], p[3], epsilon=1.0), ValueError, r"a has shape \(9,\)"),
    "dtype of a": (lambda p: solve(PointCloud(*p[:2]), p[2].astype("float32"), epsilon=1.0), TypeError, "dtype"),
    "negative a": (lambda p: solve(PointCloud(*p[:2]), -p[2], p[3], epsilon=1.0), ValueError, "a holds -.*negative"),
    "masses": (lambda p: solve(PointCloud(*p[:2]), 2 * p[2], p[3], epsilon=1.0), ValueError, "masses of a"),
    "nan": (lambda p: solve(PointCloud(p[0] * jnp.nan, p[1]), epsilon=1.0), ValueError, "x holds NaN"),
    "nan in M": (lambda p: solve(DenseCost(jnp.full((2, 2), jnp.nan)), epsilon=1.0), ValueError, "M holds nan"),
    "epsilon": (lambda p: solve(PointCloud(*p[:2]), epsilon=0), ValueError, "epsilon is 0"),
    "epsilon array": (lambda p: solve(PointCloud(*p[:2]), epsilon=-p[4]), ValueError, "epsilon holds -0.5"),
    "norm": (lambda p: solve(PointCloud(*p[:2]), epsilon=1.0, norm="l3"), ValueError, "norm is 'l3'"),
    "gradient": (lambda p: solve(PointCloud(*p[:2]), epsilon=1.0, gradient="exact"), ValueError, "gradient is 'exact'"),
    "tolerance": (lambda p: solve(PointCloud(*p[:2]), epsilon=1.0, tolerance=-1), ValueError, "tolerance is -1"),
    "init": (lambda p: solve(PointCloud(*p[:2]), epsilon=1.0, init=(p[3], None)), ValueError, "init's f has shape"),
    "kernel": (lambda p: solve(PointCloud(*p[:2]), epsilon=1.0, backend="torch"), ValueError, "these are jax arrays"),
    "h": (lambda p: softmin(PointCloud(*p[:2]), p[2], 1.0), ValueError, r"h has shape \(7,\)"),
    "values": (lambda p: solve(PointCloud(*p[:2]), epsilon=1.0).apply(p[2]), ValueError, r"V has shape \(7,\)"),
    "a list": (lambda p: PointCloud(p[0], [[1.0]]), TypeError, "y is a builtins.list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        call(cases.problem())


def test_shapes_are_checked_inside_of_jit():
    x, y, a, _, _ = cases.problem()
    with pytest.raises(ValueError, match=r"b has shape \(7,\)"):
        jax.jit(lambda x: solve(PointCloud(x, y), a, a, epsilon=1.0).f)(x)


def test_torch_is_not_needed():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import jax.numpy as jnp; from flashot_backends.ops.sinkhorn import PointCloud, solve\n"
        "print(float(solve(PointCloud(jnp.ones((3, 2)), jnp.ones((4, 2))), epsilon=1.0).value()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout)) < 1e-6
