"""Annealing of JAX problems: torch's rule, whose loop and derivative are tested by replaying dense iterations."""

import math

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.kernels.sinkhorn.jax_pairs import prepare  # noqa: E402
from flashot_backends.ops.sinkhorn import (  # noqa: E402
    DenseCost,
    PointCloud,
    acceleration,
    jax_acceleration,
    jax_annealing,
    jax_loop,
    jax_problem,
    solve,
)
from flashot_backends.ops.sinkhorn.jax_metrics import kernel_form  # noqa: E402
from flashot_backends.ops.sinkhorn.problem import make_problem  # noqa: E402

from . import sinkhorn_jax_cases as cases  # noqa: E402
from .sinkhorn_jax_cases import close  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_float64")
INF = math.inf


def compare(loss, given):
    """Values, what was run, and gradients by everything: ours against torch's. ``loss(sin, *given)`` is (loss, s)."""
    everything = tuple(range(len(given)))
    ours = jax.jit(jax.value_and_grad(lambda *given: loss(jnp.sin, *given), everything, has_aux=True))
    (value, s), gradients = ours(*given)
    leaves = [torch.tensor(np.asarray(part), requires_grad=True) for part in given]
    wanted, t = loss(torch.sin, *leaves)
    assert s.iterations.tolist() == t.iterations.tolist() and s.converged.tolist() == t.converged.tolist()
    close(value, wanted.detach(), rtol=1e-9)
    for name in ("f", "g"):
        close(getattr(s, name), getattr(t, name).detach(), rtol=1e-9)
    close(s.errors, t.errors, rtol=1e-6, atol=1e-12)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, leaves), strict=True):
        close(mine, theirs, rtol=1e-7, atol=1e-9)
    return t._state.stages.tolist()


def test_with_reaches_and_gradients_of_the_iterations_run(optimised):
    """Problems have 0, 1 and 2 stages; their limits, 43, 33 and 23, lie between looks."""
    x, y = cases.normal(3, cases.ROWS, 2), cases.normal(3, cases.COLUMNS, 2, seed=1)
    a, b = 0.7 * cases.weights(cases.ROWS, zeros=1), 1.9 * cases.weights(cases.COLUMNS, seed=1)
    epsilon = jnp.asarray([2.0, 0.3, 0.05])

    def loss(sin, x, y, a, b, epsilon, start):
        options = {"reach": (3.0, 0.7), "tolerance": 0, "max_iterations": 43, "acceleration": "annealing"}
        s = solve(PointCloud(x, y, "inner"), a, b, epsilon=epsilon, init=(start, None), **options)
        return (sin(s.f) ** 2).sum() + sin(s.g).sum(), s

    assert compare(loss, (x, y, a, b, epsilon, 0.1 * cases.normal(cases.ROWS, seed=2))) == [0, 1, 2]


def test_forbidden_pairs_and_iterations_written_out(optimised, monkeypatch):
    """Binding marginals, several iterations in a round as on a CUDA device, and some problems that converge."""
    for module in (jax_annealing, jax_loop):
        monkeypatch.setattr(module, "written_out", lambda: 2)
    M = abs(cases.normal(3, 6, 5)).at[:, 1, :2].set(INF).at[:, 0, 0].set(INF)
    a, b, epsilon = cases.weights(6), cases.weights(5, seed=1, zeros=1), jnp.asarray([0.02, 0.05, 1.0])

    def loss(sin, M, a, b, epsilon):
        options = {"tolerance": 1e-3, "max_iterations": 58, "check_every": 7, "acceleration": "annealing"}
        s = solve(DenseCost(M), a, b, epsilon=epsilon, **options)
        return (sin(s.f) ** 2).sum() + sin(s.g).sum(), s

    jax.clear_caches()
    stages = compare(loss, (M, a, b, epsilon))
    jax.clear_caches()
    assert stages[0] == 2 and stages[2] == 0


def test_inside_of_vmap():
    """Each lane anneals as a problem of a batch does."""
    x, y = cases.normal(3, cases.ROWS, 2), cases.normal(3, cases.COLUMNS, 2, seed=1)
    epsilon = jnp.asarray([2.0, 0.3, 0.01])

    def solved(x, y, epsilon):
        return solve(PointCloud(x, y), epsilon=epsilon, tolerance=1e-6, acceleration="annealing")

    mapped, batch = jax.jit(jax.vmap(solved))(x, y, epsilon), solved(*map(np.asarray, (x, y, epsilon)))
    assert mapped.iterations.tolist() == batch.iterations.tolist() and batch._state.stages.tolist()[2] > 2
    close(mapped.f, batch.f, rtol=1e-9)
    close(mapped.errors, batch.errors, rtol=1e-5, atol=1e-12)


def test_few_iterations_have_no_stages():
    def control(count, acceleration):
        return jax_problem.checked_control(count, 0, 10, "l1", acceleration, None, "unrolled", None)

    assert control(19, "annealing") == control(19, "overrelaxation")
    assert [control(count, "annealing").stages for count in (20, 79, 80, 10**6)] == [1, 3, 4, 20]


@pytest.mark.parametrize("kind", ["sqeuclidean", "euclidean", "l1", "cosine", "labels", "matrix"])
def test_stages_are_those_of_torch(kind):
    """In float32 too; padding does not count."""
    x, y = np.random.default_rng(0).normal(size=(2, 6, 3)), np.random.default_rng(1).normal(size=(2, 5, 3)) + 3
    x[1] *= 40

    def cost_of(to):
        if kind == "matrix":
            M = ((x[:, :, None] - y[:, None]) ** 2).sum(-1)
            M[:, 2, 3] = INF
            return DenseCost(to(M))
        labels = {"labels": (np.arange(6) % 2, np.arange(5) % 3), "table": to(x[0, :2] * 9)} if kind == "labels" else {}
        return PointCloud(to(x), to(y), "inner" if labels else kind, **labels)

    problem = make_problem(cost_of(lambda array: array), None, None, 1.0, None)
    parts = (None, None, problem.x) if problem.y is None else (problem.x, problem.y, None)
    wanted = acceleration.deviation(acceleration.Cost(*parts, problem.metric))
    form = kernel_form(cost_of(lambda array: jnp.asarray(array, "float32")))
    pairs = prepare(form.x, form.y, jnp.ones(2, "float32"), form.metric)
    close(jax_acceleration.deviation(pairs, None), wanted, rtol=1e-5)
    more = [None if part is None else jnp.pad(part, ((0, 0), (0, 2), (0, 3 * (kind == "matrix")))) for part in form[:2]]
    padded, sizes = prepare(*more, pairs.epsilon, form.metric), (jnp.full(2, 6), jnp.full(2, 5))
    close(jax_acceleration.deviation(padded, sizes), wanted, rtol=1e-5)
    for epsilon in (1e-3, 0.1, 1e9, 1e-20):
        found = jax_acceleration.stages(pairs._replace(epsilon=jnp.full(2, epsilon, "float32")), 20, None)
        assert found.tolist() == acceleration.stages(wanted, torch.full((2,), epsilon), 10**6).tolist()
