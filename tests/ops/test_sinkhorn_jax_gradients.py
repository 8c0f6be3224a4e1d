"""Gradients of the Sinkhorn operation on JAX arrays, against JAX's own derivative of the plain loop."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

from . import sinkhorn_jax_cases as cases  # noqa: E402
from .sinkhorn_jax_cases import close  # noqa: E402

EVERYTHING = (0, 1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _float64():
    with cases.float64():
        yield


def score(f, g, plan, cost, values):
    """A number that every result has a part in."""
    waves = jnp.cos(jnp.arange(values.size).reshape(values.shape))
    moved = jnp.einsum("nm,mk->nk", plan, values) if not callable(plan) else plan(values)
    of_potentials = (jnp.sin(f) ** 2).sum() + (g * waves[:, 0]).sum()
    return (moved * waves[: moved.shape[0]]).sum() + of_potentials + cost**2


def ours(x, y, a, b, epsilon, iterations, kind="points", shift=0.0, **options):
    cost = PointCloud(x, y) if kind == "points" else DenseCost(cases.distances(x, y))
    init = None if shift is None else (x[:, 0] * shift, None)
    s = solve(cost, a, b, epsilon=epsilon, max_iterations=iterations, tolerance=0, init=init, **options)
    f, g = (s.f, s.g) if options.get("gradient") != "implicit" else (s.f - a @ s.f, s.g - b @ s.g)
    return score(f, g, s.apply, s.linear_cost() + s.value(), y)


def _mass(weights):
    """Weights of zero have no derivative."""
    return jnp.where(weights > 0, weights, 0).sum()


def plain(x, y, a, b, epsilon, iterations, shift=0.0, centred=False):
    M = cases.distances(x, y)
    f, g, plan = cases.loop(M, a, b, epsilon, iterations, x[:, 0] * shift)
    linear = (plan * M).sum()
    ratio = jnp.where(plan > 0, plan / jnp.where(plan > 0, a[:, None] * b, 1), 1)
    value = linear + epsilon * ((plan * jnp.log(ratio)).sum() - plan.sum() + _mass(a) * _mass(b))
    f, g = (f - a @ f, g - b @ g) if centred else (f, g)
    return score(f, g, plan, linear + value, y)


@pytest.mark.parametrize(("kind", "zeros", "iterations"), [("points", 0, 1), ("points", 2, 6), ("matrix", 2, 6)])
def test_unrolled(kind, zeros, iterations):
    z = cases.problem(zeros)
    found = jax.value_and_grad(ours, EVERYTHING)(*z, iterations, kind, 0.3)
    wanted = jax.value_and_grad(plain, EVERYTHING)(*z, iterations, 0.3)
    for mine, plains in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(mine, plains, rtol=1e-10)


def test_unrolled_with_early_stopping_in_a_batch():
    """Each problem's gradient is that of its own iterations; under jit, vmap and grad alike."""
    x, y, a, b, _ = cases.problem(1, (2,))
    epsilon = jnp.asarray([0.3, 1.0])
    options = {"tolerance": 1e-3, "check_every": 3, "max_iterations": 90, "acceleration": None}

    def loss(x, y, a, b, epsilon):
        s = solve(PointCloud(x, y), a, b, epsilon=epsilon, **options)
        return (jnp.sin(s.f) ** 2).sum() + s.linear_cost().sum()

    counts = solve(PointCloud(x, y), a, b, epsilon=epsilon, **options).iterations.tolist()
    assert len(set(counts)) == 2
    found = jax.grad(loss, EVERYTHING)(x, y, a, b, epsilon)
    mapped = jax.jit(jax.vmap(jax.grad(loss, EVERYTHING)))(x, y, a, b, epsilon)

    def alone(i, *z):
        M = cases.distances(*z[:2])
        f, _, plan = cases.loop(M, *z[2:], counts[i])
        return (jnp.sin(f) ** 2).sum() + (plan * M).sum()

    for i in range(2):
        wanted = jax.grad(lambda *z, i=i: alone(i, *z), EVERYTHING)(x[i], y[i], a[i], b[i], epsilon[i])
        for mine, others, plains in zip(found, mapped, wanted, strict=True):
            close(mine[i], plains, rtol=1e-9)
            close(others[i], plains, rtol=1e-9)


def centred(gradients):
    """Gradients by weights are meant along changes that keep the mass, where there is mass."""
    x, y, a, b, epsilon = gradients
    return x, y, *(jnp.diff(part[2:]) for part in (a, b)), epsilon


@pytest.mark.parametrize("zeros", [0, 2])
def test_implicit(zeros):
    z = cases.problem(zeros)
    found = jax.grad(ours, EVERYTHING)(*z, 600, "points", None, gradient="implicit", gradient_tolerance=1e-12)
    wanted = jax.grad(lambda *z: plain(*z, 600, centred=True), EVERYTHING)(*z)
    for mine, plains in zip(centred(found), centred(wanted), strict=True):
        close(mine, plains, rtol=1e-8)


@pytest.mark.parametrize("convention", ["kl", "entropy"])
def test_envelope(convention):
    z = cases.problem(1)

    def value(gradient, x, y, a, b, epsilon):
        options = {"max_iterations": 600, "tolerance": 0, "gradient": gradient}
        return solve(PointCloud(x, y), a, b, epsilon=epsilon, **options).value(convention)

    found, wanted = (jax.grad(value, (1, 2, 3, 4, 5))(way, *z) for way in ("envelope", "unrolled"))
    for mine, unrolled in zip(centred(found), centred(wanted), strict=True):
        close(mine, unrolled, rtol=1e-9)
    for way in (found, wanted):
        assert way[2][0] == way[3][0] == 0, "by weights of zero"


@pytest.mark.parametrize("what", [lambda s: s.f.sum(), lambda s: s.plan()[0, 0], lambda s: s.linear_cost()])
def test_envelope_is_of_the_value_alone(what):
    x, y, a, b, epsilon = cases.problem()
    with pytest.raises(NotImplementedError, match=r"value\(\) alone"):
        jax.grad(lambda x: what(solve(PointCloud(x, y), a, b, epsilon=epsilon, gradient="envelope")))(x)


def test_finite_differences():
    x, y, a, b, epsilon = cases.problem()
    direction = cases.normal(*x.shape, seed=5)

    def value(t):
        return solve(PointCloud(x + t * direction, y), a, b, epsilon=epsilon, max_iterations=9, tolerance=0).value()

    close(jax.grad(value)(0.0), (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-8)


def test_softmin():
    x, y, _, _, epsilon = cases.problem()
    h = cases.normal(cases.COLUMNS).at[0].set(-jnp.inf)

    def wanted(x, y, h, epsilon):
        M = cases.distances(x, y)
        return jnp.sin(-epsilon * jax.nn.logsumexp(h[1:] - M[:, 1:] / epsilon, -1)).sum()

    def found(x, y, h, epsilon):
        return jnp.sin(softmin(PointCloud(x, y), h, epsilon)).sum()

    pairs = zip(*(jax.grad(loss, (0, 1, 2, 3))(x, y, h, epsilon) for loss in (found, wanted)), strict=True)
    for mine, plains in pairs:
        close(mine, plains)


def second(x):
    y, a, b, epsilon = cases.problem()[1:]
    f = solve(PointCloud(x, y), a, b, epsilon=epsilon, max_iterations=3, tolerance=0).f
    return jnp.sin(f).sum()


@pytest.mark.slow
def test_second_derivatives_forward_over_reverse():
    x, y, a, b, epsilon = cases.problem()
    wanted = jax.hessian(lambda x: jnp.sin(cases.loop(cases.distances(x, y), a, b, epsilon, 3)[0]).sum())(x)
    close(jax.hessian(second)(x), wanted, rtol=1e-9)


def test_second_derivatives_in_reverse_are_refused():
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: jax.grad(second)(x).sum())(cases.problem()[0])


def test_memory_grows_with_the_root_of_the_iterations():
    """Temporary memory of a compiled gradient, from the compiler."""
    x, y = cases.normal(2000, 2), cases.normal(2000, 2, seed=1)

    def temporary(iterations):
        loss = lambda x: solve(PointCloud(x, y), epsilon=0.5, max_iterations=iterations, tolerance=0).value()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(16), temporary(1600)
    assert many - few < 2000 * 8 * 6 * np.sqrt(1600)
    assert many < 30e6  # a matrix takes 32 MB
