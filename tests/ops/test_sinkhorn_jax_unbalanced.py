"""Marginals of JAX problems that may be missed, and relaxed iterations: against torch's engine, which is tested by
itself, in the limits, and derivatives."""

import math
from functools import partial

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve  # noqa: E402

from . import sinkhorn_jax_cases as cases  # noqa: E402
from .sinkhorn_jax_cases import close  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_float64")
INF = math.inf
EVERYTHING = (0, 1, 2, 3, 4)


def problem(epsilon=0.1, rho=(2.0, 0.7)):
    """x, y, a, b, ε, with masses that differ where the problem allows that."""
    masses = (1.0, 1.0) if rho == (INF, INF) else (0.7, 1.9)
    x, y, a, b, _ = cases.problem()
    return x, y, masses[0] * a, masses[1] * b, jnp.asarray(epsilon)


def torch_solve(x, y, a, b, epsilon, metric="sqeuclidean", **options):
    """Torch's solution, and its inputs, which require gradients."""
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(np.asarray(part), requires_grad=True) for part in (x, y, a, b, epsilon)]
    return solve(PointCloud(*leaves[:2], metric), *leaves[2:4], epsilon=leaves[4], **options), leaves


@pytest.mark.parametrize("kind", ["points", "matrix"])
def test_a_batch_against_the_torch_engine(kind):
    """Reaches of rows differ, one of them is infinite; every problem stops and learns by itself."""
    torch = pytest.importorskip("torch")
    M, a, b = abs(cases.normal(4, 6, 5, seed=2)), cases.weights(6), cases.weights(5, seed=1)
    points = cases.normal(4, 6, 3), cases.normal(4, 5, 3, seed=1)
    rows = np.array([0.3, 2.0, 400.0, INF])
    options = {"epsilon": 0.05, "tolerance": 1e-9, "max_iterations": 5000}

    def run(to, reach):
        cost = DenseCost(to(M)) if kind == "matrix" else PointCloud(*map(to, points))
        return solve(cost, to(a), to(b), reach=reach, **options)

    ours = run(lambda array: array, (jnp.asarray(rows), 3.0))
    theirs = run(lambda array: torch.tensor(np.asarray(array)), (torch.tensor(rows), 3.0))
    assert ours.converged.all() and ours.iterations.tolist() == theirs.iterations.tolist()
    assert len(set(ours.iterations.tolist())) > 1
    for name in ("f", "g"):
        close(getattr(ours, name), getattr(theirs, name), rtol=1e-8)
    close(ours.value(), theirs.value(), rtol=1e-9)
    close(ours.plan(), theirs.plan(), rtol=1e-8)
    close(ours.errors, theirs.errors, rtol=1e-5, atol=1e-12)


CASES = [
    ((INF, INF), "overrelaxation", "sqeuclidean"), ((3.0, 0.7), None, "sqeuclidean"),
    ((3.0, 0.7), "overrelaxation", "inner"),
]  # fmt: skip


@pytest.mark.parametrize(("rho", "acceleration", "metric"), CASES, ids=str)
def test_gradients_are_those_of_the_iterations_run(rho, acceleration, metric, optimised):
    """Against torch's own unrolled gradients, which a replay of dense iterations confirms."""
    given = problem(rho=rho)
    options = {"reach": rho, "tolerance": 0, "max_iterations": 43, "acceleration": acceleration}

    def results(s, sin):
        return ((sin(s.f) ** 2).sum() + sin(s.g).sum(), s.linear_cost(), s.value(), s.value("entropy"), s.entropy())

    def loss(*given):
        s = solve(PointCloud(*given[:2], metric), *given[2:4], epsilon=given[4], **options)
        found = results(s, jnp.sin)
        return sum((k + 1) * part for k, part in enumerate(found)), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, EVERYTHING, has_aux=True))(*given)
    torch = pytest.importorskip("torch")
    solution, leaves = torch_solve(*given, metric, **options)
    wanted = results(solution, torch.sin)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs.detach(), rtol=1e-9)
    total = sum((k + 1) * part for k, part in enumerate(wanted))
    for mine, theirs in zip(gradients, torch.autograd.grad(total, leaves), strict=True):
        close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_gradients_of_few_iterations_by_finite_differences(optimised):
    """Nothing has converged: an error in one half step shows. Before the second look, factors are constants."""
    x, y, a, b, epsilon = problem(0.3)
    directions = [cases.normal(*part.shape, seed=7) * 0.1 for part in (x, y, a, b, epsilon)]

    def loss(t):
        x_, y_, a_, b_, _ = (part + t * way for part, way in zip((x, y, a, b, epsilon), directions, strict=True))
        options = {"max_iterations": 7, "tolerance": 0, "acceleration": "overrelaxation"}
        init = jnp.sin(x_[:, 0]), None
        s = solve(PointCloud(x_, y_, "inner"), a_, b_, epsilon=epsilon, reach=(2.0, 0.7), init=init, **options)
        return (jnp.sin(s.f) ** 2).sum() + (s.g**2).sum()

    close(jax.jit(jax.grad(loss))(0.0), (loss(1e-5) - loss(-1e-5)) / 2e-5, rtol=1e-7)


def test_three_ways_to_differentiate_agree(optimised):
    """Through relaxed iterations and translations, through the fixed point, through the dual's optimum, and around."""
    rho = (2.0, INF)
    given = problem(0.4, rho)

    def value(gradient, *given):
        options = {"epsilon": given[4], "reach": rho, "tolerance": 1e-13, "gradient": gradient}
        s = solve(PointCloud(*given[:2], "inner"), *given[2:4], **options)
        return s.value()

    compiled = jax.jit(jax.value_and_grad(value, (1, 2, 3, 4, 5)), static_argnums=0)
    of = {way: compiled(way, *given)[1] for way in ("unrolled", "implicit", "envelope")}
    for unrolled, implicit, envelope in zip(*of.values(), strict=True):
        close(unrolled, implicit, rtol=1e-8)
        close(unrolled, envelope, rtol=1e-8)
    for k, gradient in enumerate(of["envelope"]):
        way = cases.normal(*given[k].shape, seed=3)
        moved = [compiled("envelope", *given[:k], given[k] + t * way, *given[k + 1 :])[0] for t in (1e-5, -1e-5)]
        close((gradient * way).sum(), (moved[0] - moved[1]) / 2e-5, rtol=1e-6)


def test_implicit_gradients_of_potentials(optimised):
    """Free sides determine f and g; a problem of the batch is balanced, and a row has no mass."""
    x, y, a, b, epsilon = problem(0.4, (INF, INF))
    a = a.at[0].set(0) / (1 - a[0])
    reach = jnp.asarray([2.0, 30.0, INF]), jnp.asarray([0.7, INF, INF])

    def loss(gradient, *given):
        options = {"epsilon": given[4], "reach": reach, "tolerance": 1e-13, "gradient": gradient}
        s = solve(PointCloud(*given[:2], "inner"), *given[2:4], gradient_tolerance=1e-13, **options)
        return (jnp.sin(s.f[:2]) ** 2).sum() + (s.g[:2] ** 2).sum() + (s.apply(given[3]) ** 2).sum()

    compiled = jax.jit(jax.grad(loss, (1, 2, 3, 4, 5)), static_argnums=0)
    of = [compiled(way, x, y, a, b, epsilon) for way in ("unrolled", "implicit")]
    for unrolled, implicit in zip(*of, strict=True):
        close(unrolled, implicit, rtol=1e-7)


def test_envelope_is_of_the_minimum_alone():
    x, y, a, b, epsilon = problem()
    for what in (lambda s: s.f.sum(), lambda s: s.value("entropy"), lambda s: s.entropy()):
        with pytest.raises(NotImplementedError, match=r"value\(\) alone"):
            jax.grad(
                lambda x, what=what: what(
                    solve(PointCloud(x, y, "inner"), a, b, epsilon=epsilon, reach=2.0, gradient="envelope")
                )
            )(x)


def test_limits_of_the_reach():
    x, y, a, b, _ = problem(rho=(INF, INF))
    options = {"epsilon": 0.3, "tolerance": 1e-11, "max_iterations": 5000}
    binding = solve(PointCloud(x, y), a, b, **options)
    for reach in (None, INF, (INF, None)):
        same = solve(PointCloud(x, y), a, b, reach=reach, **options)
        close(same.f, binding.f, rtol=1e-13)
        assert int(same.iterations) == int(binding.iterations)
    close(solve(PointCloud(x, y), a, b, reach=jnp.asarray(INF), **options).plan(), binding.plan(), rtol=1e-9)
    options["tolerance"] = 1e-8
    close(solve(PointCloud(x, y), a, b, reach=1e7, **options).plan(), binding.plan(), rtol=1e-6)
    free = a[:, None] * b * jnp.exp(-cases.distances(x, y) / 0.3)
    close(solve(PointCloud(x, y), a, b, reach=1e-9, **options).plan(), free, rtol=1e-6)


@pytest.mark.parametrize("reach", [3e3, (None, 3e5)], ids=str)
def test_converges_as_fast_as_with_binding_marginals(reach):
    """Without the translation, iterations grow with ρ/ε."""
    x, y = cases.normal(20, 3), cases.normal(22, 3, seed=1)
    options = {"epsilon": 0.3, "max_iterations": 4000, "acceleration": None, "tolerance": 1e-9}
    free = solve(PointCloud(x, y), jnp.full(20, 1 / 20), jnp.full(22, 3 / 22), reach=reach, **options)
    binding = solve(PointCloud(x, y), *free.marginals(), **options)
    assert bool(free.converged) and int(free.iterations) <= int(binding.iterations) + 20


def test_what_may_go_nowhere_is_given_up(optimised):
    M = abs(cases.normal(5, 6)).at[1].set(INF).at[:, 2].set(INF)
    a, b, rows, columns = cases.weights(5), cases.weights(6, seed=1), np.array([0, 2, 3, 4]), np.array([0, 1, 3, 4, 5])
    options = {"epsilon": 0.3, "reach": (2.0, 1.5), "tolerance": 1e-10, "max_iterations": 3000, "acceleration": None}
    solution = solve(DenseCost(M), a, b, **options)
    real = solve(DenseCost(M[rows][:, columns]), a[rows], b[columns], **options)
    assert bool(solution.converged)
    close(solution.plan()[rows][:, columns], real.plan())
    assert bool((solution.plan()[1] == 0).all()) and bool((solution.plan()[:, 2] == 0).all())
    unmoved = a.sum() * b.sum() - a[rows].sum() * b[columns].sum()
    close(solution.value(), real.value() + 2 * a[1] + 1.5 * b[2] + 0.3 * unmoved)

    @partial(jax.jit, static_argnums=0)
    @partial(jax.grad, argnums=(1, 2))
    def gradients(gradient, M, a):
        return solve(DenseCost(M), a, b, gradient=gradient, **options).value()

    for way in ("unrolled", "implicit", "envelope"):
        by_M, by_a = gradients(way, M, a)
        assert bool(jnp.isfinite(by_M).all()) and bool(jnp.isfinite(by_a).all())
        close(by_M[rows][:, columns], real.plan(), rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes(dtype):
    x, y, a, b, _ = problem()
    x, y = x.astype(dtype), y.astype(dtype)
    options = {"epsilon": 1.0, "reach": (2.0, 0.7)}
    solution = solve(PointCloud(x, y), a.astype("float32"), b.astype("float32"), tolerance=1e-5, **options)
    wanted = solve(PointCloud(x.astype("float64"), y.astype("float64")), a, b, tolerance=1e-10, **options)
    assert bool(solution.converged) and solution.f.dtype == solution.value().dtype == "float32"
    close(solution.plan(), wanted.plan(), rtol=1e-4, atol=1e-6)


def test_transformations(optimised):
    """vmap over reaches equals the batch; jit and grad go around it."""
    x, y, a, b, epsilon = problem()
    reach = jnp.asarray([0.5, 20.0])

    def value(x, reach):
        return solve(PointCloud(x, y), a, b, epsilon=epsilon, reach=reach, tolerance=1e-9).value()

    def mapped(x, reach):
        values = jax.vmap(value, (None, 0))(x, reach)
        return values.sum(), values

    together, by_x = jax.jit(jax.value_and_grad(lambda x: value(x, reach).sum()))(x)
    (total, values), found = jax.jit(jax.value_and_grad(mapped, (0, 1), has_aux=True))(x, reach)
    close(total, together)
    close(found[0], by_x, rtol=1e-8)
    assert found[1].tolist() == [0, 0] and float(values[0]) != float(values[1])


BAD = [
    (-1.0, ValueError, "reach is -1.0; accepted are positive numbers"),
    ((1.0, 2.0, 3.0), ValueError, "reach has 3 entries"),
    ("far", TypeError, "reach is 'far'"),
    (np.array([1.0, -2.0]), ValueError, "reach holds a number that is not positive"),
    (np.ones(3), ValueError, "reach"),
    ([[1.0], 2.0], TypeError, "reach is a builtins.list"),
]


@pytest.mark.parametrize(("reach", "kind", "message"), BAD)
def test_bad_reaches(reach, kind, message):
    with pytest.raises(kind, match=message):
        solve(DenseCost(abs(cases.normal(2, 3, 4))), epsilon=1.0, reach=reach)


def test_masses_must_agree_where_both_marginals_are_binding():
    cost, a, b = DenseCost(abs(cases.normal(2, 3, 4))), cases.weights(3), 2 * cases.weights(4)
    with pytest.raises(ValueError, match="masses of a and b differ"):
        solve(cost, a, b, epsilon=1.0, reach=np.array([1.0, INF]))
    assert solve(cost, a, b, epsilon=1.0, reach=np.array([1.0, 2.0])).converged.all()
