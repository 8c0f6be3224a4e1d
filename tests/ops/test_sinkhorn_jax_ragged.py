"""Lists of JAX problems of different sizes: each is what torch's engine finds for it alone."""

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.kernels.sinkhorn.jax_pairs import prepare  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, jax_acceleration, jax_ops, solve  # noqa: E402
from flashot_backends.ops.sinkhorn.jax_metrics import kernel_form  # noqa: E402

from . import sinkhorn_jax_cases as cases  # noqa: E402
from .sinkhorn_jax_cases import close  # noqa: E402

SIZES = [(17, 20), (5, 3), (18, 19), (18, 20)]
COUNT = len(SIZES)
EPSILONS = [0.05 + 0.02 * k for k in range(COUNT)]


@pytest.fixture(autouse=True)
def _float64():
    with cases.float64():
        yield


def clouds():
    return [cases.normal(n, 3, seed=k) for k, (n, _) in enumerate(SIZES)], [
        cases.normal(m, 3, seed=20 + k) for k, (_, m) in enumerate(SIZES)
    ]


def histograms():
    return [cases.weights(n, seed=k) for k, (n, _) in enumerate(SIZES)], [
        cases.weights(m, seed=9 + k, zeros=1) for k, (_, m) in enumerate(SIZES)
    ]


def costs(kind, xs, ys):
    if kind == "matrix":
        return DenseCost.ragged([cases.distances(x, y).at[0, 0].set(jnp.inf) for x, y in zip(xs, ys, strict=True)])
    labels = [np.arange(len(x)) % 3 for x in xs], [np.arange(len(y)) % 2 for y in ys]
    features, table = jnp.asarray([0.5, 1.0, 2.0]), cases.normal(3, 2, seed=9)
    return PointCloud.ragged(xs, ys, "cosine", features, labels, table)


def in_numpy(cost):
    if isinstance(cost, DenseCost):
        return DenseCost(np.asarray(cost.M))
    parts = (cost.x, cost.y, cost.feature_weights, cost.labels, cost.table)
    x, y, features, labels, table = jax.tree.map(np.asarray, parts)
    return PointCloud(x, y, cost.metric, features, labels, table, cost.label_weight)


def deviation(cost):
    form = kernel_form(cost)
    pairs = prepare(form.x[None], form.y[None], jnp.ones(1), form.metric)
    return float(jax_acceleration.deviation(pairs, None)[0])


STOPPING = {"acceleration": None, "tolerance": 1e-8, "max_iterations": 330}
MISSING = {"acceleration": "annealing", "reach": (2.0, None), "tolerance": 1e-8}
CASES = [
    pytest.param("points", MISSING, [0, 2, 3], marks=pytest.mark.slow),
    ("matrix", STOPPING, [0, 1, 2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "which"), CASES)
def test_each_is_as_alone(kind, options, which, monkeypatch):
    batches, solved = [], jax_ops._solved
    monkeypatch.setattr(jax_ops, "_solved", lambda *given: batches.append(given[3].shape) or solved(*given))
    parts = (clouds()[0], clouds()[1], *histograms(), EPSILONS)
    xs, ys, a, b, epsilons = ([part[k] for k in which] for part in parts)
    together = costs(kind, xs, ys)
    if kind == "points":  # so near to another number of stages that padding must not count
        epsilons = [0.999 * deviation(cost) / 4**k for k, cost in zip((1, 2, 2), together, strict=True)]
    found = solve(together, a, b, epsilon=epsilons, **options)
    assert batches == [(len(which) - (1 in which), 18, 20), *[(1, 5, 3)] * (1 in which)]
    for k, (solution, cost) in enumerate(zip(found, together, strict=True)):
        alone = solve(in_numpy(cost), np.asarray(a[k]), np.asarray(b[k]), epsilon=epsilons[k], **options)
        assert int(solution.iterations) == int(alone.iterations)
        assert "{}×{}, ".format(*SIZES[which[k]]) in repr(solution)
        close(solution.f, alone.f, rtol=1e-8)
        close(solution.g, alone.g, rtol=1e-8)
        close(solution.errors, alone.errors, rtol=1e-5, atol=1e-12)
        close(solution.plan(), alone.plan(), rtol=1e-8)
        close(solution.value(), alone.value())
        for mine, theirs in zip(solution.marginals(), alone.marginals(), strict=True):
            close(mine, theirs)
        V = b[k][:, None] if kind == "matrix" else b[k]
        close(solution.apply(V), alone.apply(np.asarray(V)), rtol=1e-8)
        close(solution.apply_transpose(a[k]), alone.apply_transpose(np.asarray(a[k])), rtol=1e-8)


@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_gradients_inside_of_jit(gradient):
    (xs, ys), (a, b) = clouds(), histograms()
    options = {"epsilon": 3.0, "gradient": gradient, "tolerance": 0, "max_iterations": 60}
    given = xs[2:], ys[2:], b[2:]

    def loss(xs, ys, b):
        return sum(s.value() for s in solve(PointCloud.ragged(xs, ys), a[2:], b, **options))

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
    for k, (mine, one) in enumerate(zip(zip(*found, strict=True), zip(*given, strict=True), strict=True)):
        leaves = [torch.tensor(np.asarray(part), requires_grad=True) for part in one]
        s = solve(PointCloud(*leaves[:2]), torch.tensor(np.asarray(a[2 + k])), leaves[2], **options)
        for ours, right in zip(mine, torch.autograd.grad(s.value(), leaves), strict=True):
            way = slice(1, None) if ours.ndim == 1 else slice(None)  # where b has no mass, changes of it are one-sided
            pair = [np.asarray(part)[way] for part in (ours, right)]
            close(*(part - part.mean() if part.ndim == 1 else part for part in pair), rtol=1e-8)


def test_starting_points():
    (xs, ys), options = clouds(), {"epsilon": 3 + jnp.asarray(EPSILONS), **STOPPING}
    first = solve(costs("matrix", xs, ys), **options)
    init = [(s.f, s.g) for s in first]
    again = solve(costs("matrix", xs, ys), init=[*init[:3], None], **options)
    assert [int(s.iterations) for s in again[:3]] == [1, 1, 1] and int(again[3].iterations) == int(first[3].iterations)


XS, YS = [np.ones((3, 2)), np.ones((4, 2))], [np.ones((5, 2)), np.ones((6, 2))]
BAD = [
    ({"a": [np.ones(3) / 3]}, ValueError, "a has 1 entries and the list 2 problems"),
    ({"a": np.ones((2, 3)) / 3}, TypeError, "a is a ndarray; accepted is a list"),
    ({"a": [np.ones(3) / 3, np.ones(3) / 3]}, ValueError, r"a has shape \(3,\); accepted is \(..., 4\)"),
    ({"a": [np.ones((2, 3)) / 3, None]}, ValueError, r"problem 0 of the list has leading axes \(2,\)"),
    ({"b": [np.ones(5) / 5, -np.ones(6) / 6]}, ValueError, "b holds -0.16"),
    ({"epsilon": [1.0]}, ValueError, "epsilon has 1 entries for 2 problems"),
    ({"epsilon": [1.0, -1.0]}, ValueError, "epsilon is -1.0"),
    ({"reach": np.ones(2)}, ValueError, r"leading axes \(2,\)"),
    ({"init": [(np.ones(5), None), None]}, ValueError, r"init's f has shape \(5,\); accepted is \(..., 3\)"),
    ({"acceleration": "fast"}, ValueError, "acceleration is 'fast'"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_bad_arguments(change, kind, message):
    given = PointCloud.ragged(*([jnp.asarray(part) for part in side] for side in (XS, YS)))
    with pytest.raises(kind, match=message):
        solve(given, **{"epsilon": 1.0, "max_iterations": 3, "tolerance": 0} | change)


def test_bad_lists():
    one = PointCloud(jnp.ones((3, 2)), jnp.ones((4, 2)))
    batch = PointCloud(jnp.ones((2, 3, 2)), jnp.ones((4, 2)))
    for wrong, kind, message in (
        (batch, ValueError, r"problem 1 of the list is \(2, 3, 4\)"),
        (jnp.ones(3), ValueError, r"problem 1 of the list is \(3,\)"),
        (PointCloud(XS[0], YS[0]), TypeError, "problem 1 of the list holds no JAX arrays"),
        (PointCloud(jnp.ones((0, 2)), jnp.ones((4, 2))), ValueError, r"problem 1 .* at least one row"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            solve([one, wrong], epsilon=1.0)
