"""Metrics, weighted features and labels of JAX points: against matrices of costs, and those against torch's."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

from . import sinkhorn_jax_cases as cases  # noqa: E402
from .sinkhorn_jax_cases import close  # noqa: E402

METRICS = ["sqeuclidean", "euclidean", "l1", "cosine", "inner"]
LABELS = np.arange(7) % 3, (np.arange(9) * 3) % 4
WHERE = {"tolerance": 0, "max_iterations": 4, "epsilon": 0.7, "acceleration": None}


@pytest.fixture(autouse=True)
def _float64():
    with cases.float64():
        yield


def inputs(metric, d=3, batch=(), dtype=None, extras=True):
    """The arrays of a PointCloud that have a gradient, by name."""
    given = {"x": cases.normal(*batch, 7, d, dtype=dtype), "y": cases.normal(*batch, 9, d, seed=1, dtype=dtype) + 0.5}
    if extras:
        given["feature_weights"] = abs(cases.normal(*batch, d, seed=2, dtype=dtype))
    if extras and metric not in ("euclidean", "l1"):
        given["table"] = cases.normal(*batch, 3, 4, seed=3, dtype=dtype)
    return given


def cost_of(metric, given, labels=LABELS):
    more = {"labels": labels, "label_weight": 1.5} if "table" in given else {}
    return PointCloud(**given, metric=metric, **more)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_dense_against_torch(metric, extras):
    torch = pytest.importorskip("torch")
    given = inputs(metric, extras=extras)
    theirs = {name: torch.from_numpy(np.array(part)) for name, part in given.items()}
    wanted = cost_of(metric, theirs, tuple(map(torch.from_numpy, LABELS))).dense()
    close(cost_of(metric, given).dense(), wanted)


def results(cost, reach):
    s = solve(cost, cases.weights(7), cases.weights(9, seed=1), reach=reach, **WHERE)
    waves = jnp.cos(jnp.arange(18.0)).reshape(9, 2)
    return s.f, s.g, s.plan(), s.apply(waves), s.linear_cost(), s.value(), s.value("entropy"), s.entropy(), s.error


def score(made, reach):
    found = results(made, reach)
    return sum((jnp.sin(part + k) ** 2).sum() for k, part in enumerate(found[:-1])), found


@pytest.mark.parametrize(("metric", "d", "reach", "backend"), [
    ("euclidean", 11, None, "chunked"), ("euclidean", 3, (2.0, 0.7), "jax_reference"),
    ("l1", 11, None, "jax_reference"), ("l1", 3, (2.0, 0.7), "chunked"), ("cosine", 3, None, "chunked"),
    ("inner", 3, (2.0, 0.7), "chunked"), ("sqeuclidean", 3, (2.0, 0.7), "chunked"),
])  # fmt: skip
def test_everything_against_the_matrix(metric, d, reach, backend, monkeypatch):
    """Values and gradients, by points, weights of features and the table, as through the matrix of costs."""
    monkeypatch.setenv("FLASHOT_BACKEND", backend)
    given = inputs(metric, d)

    def of(given, way):
        return score(way(cost_of(metric, given)), reach)

    compiled = jax.jit(jax.value_and_grad(of, has_aux=True), static_argnums=1)
    (_, found), gradients = compiled(given, lambda cost: cost)
    (_, wanted), right = compiled(given, lambda cost: DenseCost(cost.dense()))
    for mine, plain in zip(found, wanted, strict=True):
        close(mine, plain, rtol=1e-9)
    for name in given:
        close(gradients[name], right[name], rtol=1e-8)


@pytest.mark.parametrize("metric", ["l1", "inner"])
def test_softmin_of_a_batch(metric):
    given, epsilon = inputs(metric, batch=(2,)), jnp.asarray([0.5, 1.5])
    h = cases.normal(2, 9, seed=5).at[0, 3].set(-jnp.inf)

    def found(given, h, epsilon):
        return (softmin(cost_of(metric, given), h, epsilon) ** 2).sum()

    def plain(given, h, epsilon):
        scaled = h[:, None, :] - cost_of(metric, given).dense() / epsilon[:, None, None]
        return (jax.nn.logsumexp(scaled, -1) ** 2 * epsilon[:, None] ** 2).sum()

    mine, right = (jax.jit(jax.value_and_grad(of, (0, 1, 2)))(given, h, epsilon) for of in (found, plain))
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        close(one, jnp.where(jnp.isnan(other), 0, other), rtol=1e-9)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_transformations(metric):
    """jit takes a cost with all that it holds, vmap maps it, and elements equal their batch."""
    given = inputs(metric, batch=(3,))
    cost = cost_of(metric, given, [jnp.tile(part, (3, 1)) for part in LABELS])
    f, value = jax.jit(lambda cost: (solve(cost, **WHERE).f, solve(cost, **WHERE).value()))(cost)
    close(jax.jit(jax.vmap(lambda cost: solve(cost, **WHERE).value()))(cost), value)
    close(solve(cost_of(metric, {name: part[1] for name, part in given.items()}), **WHERE).f, f[1])


def test_what_is_shared_broadcasts():
    given = inputs("sqeuclidean") | {"x": cases.normal(2, 1, 7, 3), "table": cases.normal(3, 3, 4, seed=4)}
    cost = cost_of("sqeuclidean", given)
    assert cost.shape == (2, 3, 7, 9) == cost.dense().shape == cost.T.T.shape
    close(solve(cost, **WHERE).plan(), solve(DenseCost(cost.dense()), **WHERE).plan())
    close(cost.T.dense(), jnp.swapaxes(cost.dense(), -1, -2))


@pytest.mark.parametrize(("metric", "dtype"), [("cosine", "float32"), ("l1", "bfloat16"), ("inner", "float16")])
def test_narrow_inputs(metric, dtype):
    """Transforming the points rounds nothing below float32; gradients come in the inputs' dtype."""
    given = inputs(metric, d=12, dtype=dtype)
    wide = {name: part.astype("float64") for name, part in given.items()}
    run = jax.jit(jax.value_and_grad(lambda given: solve(cost_of(metric, given), **WHERE).value()))
    value, gradients = run(given)
    assert value.dtype == "float32" and {part.dtype.name for part in gradients.values()} == {dtype}
    close(value, solve(DenseCost(cost_of(metric, wide).dense()), **WHERE).value(), rtol=2e-5)


@pytest.mark.parametrize("metric", ["euclidean", "l1"])
def test_points_that_meet(metric):
    """Distances have no derivative where points meet: none is given, and nothing becomes NaN."""
    x = cases.normal(5, 3)

    def total(x):
        s = solve(PointCloud(x, jax.lax.stop_gradient(x), metric), epsilon=0.5, max_iterations=5, tolerance=0)
        return s.value() + (s.plan() ** 2).sum()

    assert bool(jnp.isfinite(jax.grad(total)(x)).all())


def test_second_derivatives():
    x, y = cases.normal(3, 2), cases.normal(4, 2, seed=1)

    def value(x, kind):
        cost = PointCloud(x, y, "euclidean")
        cost = cost if kind == "points" else DenseCost(cost.dense())
        return jnp.sin(solve(cost, **WHERE).f).sum()

    close(*(jax.jit(jax.hessian(value), static_argnums=1)(x, kind) for kind in ("points", "matrix")), rtol=1e-8)


def test_huge_and_tiny_points_have_directions():
    x, y = (cases.normal(k, 3, seed=k, dtype="float32") for k in (7, 9))
    found = solve(PointCloud(x * 1e30, y * 1e-30, "cosine"), **WHERE).plan()
    close(found, solve(PointCloud(x, y, "cosine"), **WHERE).plan(), rtol=1e-5)


T = np.ones((3, 4))
BAD = [
    ({"metric": "manhattan"}, ValueError, "metric is 'manhattan'"),
    ({"feature_weights": np.ones(2)}, ValueError, r"feature_weights has shape \(2,\); accepted is \(..., 3\)"),
    ({"feature_weights": -np.ones(3)}, ValueError, "feature_weights holds negative"),
    ({"feature_weights": np.ones(3, "float32")}, TypeError, "feature_weights has dtype float32"),
    ({"feature_weights": [1.0, 1.0, 1.0]}, TypeError, "feature_weights is a builtins.list"),
    ({"labels": LABELS}, ValueError, "labels is given without table"),
    ({"labels": LABELS, "table": T, "metric": "euclidean"}, ValueError, "labels are given with the metric 'euclidean'"),
    ({"labels": (LABELS[0], LABELS[0]), "table": T}, ValueError, r"labels of y have shape \(7,\)"),
    ({"labels": (LABELS[0], LABELS[1] / 2), "table": T}, TypeError, "labels of y have dtype float64"),
    ({"labels": (LABELS[0] + 1, LABELS[1]), "table": T}, ValueError, "labels of x go from 1 to 3; accepted are 0 to 2"),
    ({"labels": ([0] * 7, LABELS[1]), "table": T}, TypeError, "labels of x are a builtins.list"),
    ({"labels": LABELS, "table": T[0]}, ValueError, r"table has shape \(4,\)"),
    ({"labels": LABELS, "table": T * np.inf}, ValueError, "table holds NaN or infinite"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD)
def test_bad_arguments(arguments, kind, message):
    given = {"x": cases.normal(7, 3), "y": cases.normal(9, 3, seed=1)} | arguments
    with pytest.raises(kind, match=message):
        PointCloud(**given)


def test_a_point_without_direction():
    x, y = cases.normal(7, 3), cases.normal(9, 3, seed=1)
    with pytest.raises(ValueError, match=r"x holds NaN.*no point at the origin"):
        solve(PointCloud(x * 0, y, "cosine"), epsilon=1.0)
