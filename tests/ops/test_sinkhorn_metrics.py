"""Metrics, weighted features and labels: against matrices of costs, and those against scipy."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

from .sinkhorn_cases import INF, close, normal, weights  # noqa: E402

backends = pytest.mark.parametrize("backend", ["torch", "reference"])
SCIPY = {"sqeuclidean": "sqeuclidean", "euclidean": "euclidean", "l1": "cityblock", "cosine": "cosine"}
CASES = ["sqeuclidean", "euclidean", "l1", "cosine", "inner"]
PARTS = ["plain", "features", "labels", "both"]
A, B = weights(7), weights(9, seed=1)
WHERE = {"tolerance": 0, "max_iterations": 4, "epsilon": 0.7}


def inputs(metric, part, d=3, batch=(), dtype=torch.float64):
    """Keyword arguments of a PointCloud, with the tensors among them that have a gradient."""
    given = {"x": normal(*batch, 7, d, dtype=dtype), "y": normal(*batch, 9, d, seed=1, dtype=dtype) + 0.5}
    if part in ("features", "both"):
        given["feature_weights"] = normal(*batch, d, seed=2, dtype=dtype).abs()
    if part in ("labels", "both"):
        given["table"] = normal(*batch, 3, 4, seed=3, dtype=dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    if "table" in given:
        given |= {"labels": (torch.arange(7) % 3, (torch.arange(9) * 3) % 4), "label_weight": 1.5}
    return given | {"metric": metric}, list(leaves.values())


def cases(metrics=CASES, parts=PARTS):
    return [(m, p) for m in metrics for p in parts if p in ("plain", "features") or m not in ("euclidean", "l1")]


@pytest.mark.parametrize("metric", SCIPY)
@pytest.mark.parametrize("weighted", [False, True])
def test_dense_against_scipy(metric, weighted):
    distance = pytest.importorskip("scipy.spatial.distance")
    given, _ = inputs(metric, "features" if weighted else "plain")
    w = {"w": given["feature_weights"].detach().numpy()} if weighted else {}
    wanted = distance.cdist(given["x"].detach().numpy(), given["y"].detach().numpy(), SCIPY[metric], **w)
    close(PointCloud(**given).dense(), torch.from_numpy(wanted))


def test_dense_of_products_and_labels():
    given, _ = inputs("inner", "both")
    x, y, w, table = (given[name] for name in ("x", "y", "feature_weights", "table"))
    rows, columns = given["labels"]
    wanted = [[1.5 * table[rows[i], columns[j]] - (w * x[i] * y[j]).sum() for j in range(9)] for i in range(7)]
    close(PointCloud(**given).dense(), torch.stack([torch.stack(row) for row in wanted]))
    assert PointCloud(x, y, "cityblock").metric == "l1"


QUESTIONS = {
    "f": lambda s: s.f * A,
    "g": lambda s: s.g * B,
    "plan": lambda s: s.plan().square(),
    "apply": lambda s: s.apply(B).square(),
    "linear_cost": lambda s: s.linear_cost(),
    "kl": lambda s: s.value(),
    "entropy": lambda s: s.value("entropy"),
}


@backends
@pytest.mark.parametrize(("metric", "part", "d"), [(*case, 3) for case in cases()] + [(m, "plain", 12) for m in CASES])
def test_everything_against_the_matrix(metric, part, d, backend):
    """Values and gradients, by points, weights of features and the table, as through the matrix of costs."""
    given, leaves = inputs(metric, part, d)
    solution = solve(PointCloud(**given), A, B, **WHERE, backend=backend)
    wanted = solve(DenseCost(PointCloud(**given).dense()), A, B, **WHERE)
    close(solution.plan(), wanted.plan(), rtol=1e-9)
    for question in QUESTIONS.values():
        ours, theirs = question(solution), question(wanted)
        close(ours, theirs, rtol=1e-9)
        one, other = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for out in (ours, theirs))
        for mine, right in zip(one, other, strict=True):
            close(mine, right, rtol=1e-8)


@backends
@pytest.mark.parametrize(("metric", "part"), cases(parts=["plain", "both"]))
def test_softmin(metric, part, backend):
    given, leaves = inputs(metric, part, batch=(2,))
    h = normal(2, 9, seed=5)
    h[0, 3] = -INF
    epsilon = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    found = softmin(PointCloud(**given), h, epsilon, backend=backend)
    wanted = -epsilon[:, None] * torch.logsumexp(
        h[:, None, :] - PointCloud(**given).dense() / epsilon[:, None, None], -1
    )
    close(found, wanted)
    leaves = [*leaves, epsilon]
    one, other = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, wanted))
    for mine, right in zip(one, other, strict=True):
        close(mine, right, rtol=1e-9)


@pytest.mark.parametrize(("metric", "part"), cases(parts=["plain", "both"]))
def test_batches_and_their_elements(metric, part):
    given, _ = inputs(metric, part, batch=(3,))
    together = solve(PointCloud(**given), A, B, **WHERE)
    for k in range(3):
        alone = {name: value[k] if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        solution = solve(PointCloud(**alone), A, B, **WHERE)
        close(together.plan()[k], solution.plan())
        close(together.value()[k], solution.value())
        close(together.f[k], solution.f)


def test_what_is_shared_broadcasts():
    given, _ = inputs("sqeuclidean", "both")
    given["x"] = normal(2, 1, 7, 3)
    given["table"] = normal(3, 3, 4, seed=4)
    cost = PointCloud(**given)
    assert cost.shape == (2, 3, 7, 9) == tuple(cost.dense().shape)
    close(solve(cost, **WHERE).plan(), solve(DenseCost(cost.dense()), **WHERE).plan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("metric", "part"), cases(parts=["plain", "labels"]))
def test_narrow_inputs(metric, part, dtype):
    """Transforming the points rounds nothing below float32."""
    given, leaves = inputs(metric, part, d=12, dtype=dtype)
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    a, b = A.float(), B.float()
    found = solve(PointCloud(**given), a, b, **WHERE | {"epsilon": 2.0})
    wanted = solve(DenseCost(PointCloud(**exact).dense()), a.double(), b.double(), **WHERE | {"epsilon": 2.0})
    assert found.plan().dtype == torch.float32
    close(found.plan(), wanted.plan(), rtol=2e-5, atol=1e-8)
    for gradient, leaf in zip(torch.autograd.grad(found.value(), leaves), leaves, strict=True):
        assert gradient.dtype == leaf.dtype


def meeting(metric, d, dtype=torch.float64, offset=0.0):
    """Points that are there twice on one side, on both, or share some coordinates, and others: x, y and their cost."""
    x, y = normal(7, d, dtype=dtype) + offset, normal(9, d, seed=1, dtype=dtype) + offset
    x[1], y[:3], y[4, : d // 2] = x[0], x[[0, 2, 2]], x[3, : d // 2]
    leaves = [x.requires_grad_(), y.requires_grad_()]
    return leaves, PointCloud(*leaves, metric)


@backends
@pytest.mark.parametrize("metric", ["euclidean", "l1", "sqeuclidean"])
@pytest.mark.parametrize("d", [3, 20])
@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_points_that_meet(metric, d, gradient, backend):
    """A distance of nothing has no slope: such a pair adds nothing, the others what they do."""
    leaves, cost = meeting(metric, d)
    options = {"epsilon": 0.8 * d**0.5, "tolerance": 1e-14, "max_iterations": 3000, "gradient": gradient}
    found = solve(cost, A, B, **options, backend=backend)
    wanted = solve(DenseCost(cost.dense()), A, B, **options | {"gradient": "unrolled"})
    # Where distances come from products, those of points that meet are off by the root of what the products round.
    near = 1e-8 if d == 3 or metric != "euclidean" or backend == "reference" else 3e-7
    questions = [lambda s: s.value(), lambda s: s.value("entropy")]
    questions += [] if gradient == "envelope" else [lambda s: s.plan().square().sum() + s.linear_cost()]
    for question in questions:
        bys = [torch.autograd.grad(question(s), leaves, retain_graph=True) for s in (found, wanted)]
        for ours, right in zip(*bys, strict=True):
            close(ours, right, rtol=near)


@pytest.mark.parametrize("metric", ["euclidean", "l1"])
def test_where_points_meet_the_slope_is_the_mean_of_both_sides(metric):
    (x, y), cost = meeting(metric, 3)
    options = {"epsilon": 0.5, "tolerance": 1e-14, "max_iterations": 3000}
    found = torch.autograd.grad(solve(cost, A, B, **options).value(), x)[0]
    for seed in range(5):
        along, step = normal(7, 3, seed=seed), 1e-6  # off by as much: both sides have their own curvature
        with torch.no_grad():
            up, down = (solve(PointCloud(x + k * step * along, y, metric), A, B, **options).value() for k in (1, -1))
        close((found * along).sum(), (up - down) / (2 * step), rtol=1e-6)


@backends
@pytest.mark.parametrize("metric", ["euclidean", "l1", "sqeuclidean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("d", "offset"), [(3, 0.0), (3, 50.0), (20, 0.0)])
def test_narrow_points_that_meet(metric, dtype, d, offset, backend):
    """Gradients have the dtype of the points and its accuracy, against float64 on the same points."""
    leaves, cost = meeting(metric, d, dtype, offset)
    exact = [part.detach().double().requires_grad_() for part in leaves]
    a, b, options = A.float(), B.float(), {"epsilon": d**0.5, "tolerance": 0, "max_iterations": 40}
    digits = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for gradient in ("unrolled", "envelope"):
        found = solve(cost, a, b, **options, gradient=gradient, backend=backend)
        wanted = solve(DenseCost(PointCloud(*exact, metric).dense()), a.double(), b.double(), **options)
        questions = [lambda s: s.value()]
        questions += [lambda s: 100 * s.plan().square().sum()] if gradient == "unrolled" else []
        for question in questions:
            ours = torch.autograd.grad(question(found), leaves, retain_graph=True)
            theirs = torch.autograd.grad(question(wanted), exact, retain_graph=True)
            for part, one, right in zip(leaves, ours, theirs, strict=True):
                assert one.dtype == part.dtype
                assert (one.double() - right).norm() <= digits * right.norm()


@pytest.mark.parametrize("metric", ["cosine", "sqeuclidean"])
def test_scale_and_offset(metric):
    """Cosines of huge and tiny points; labels far larger than the features."""
    x, y = normal(7, 3, dtype=torch.float32), normal(9, 3, seed=1, dtype=torch.float32)
    if metric == "cosine":
        found = solve(PointCloud(x * 1e30, y * 1e-30, "cosine"), **WHERE).plan()
        close(found, solve(PointCloud(x, y, "cosine"), **WHERE).plan(), rtol=1e-5)
        return
    table, labels = 1e4 + normal(3, 4, seed=3, dtype=torch.float32), (torch.arange(7) % 3, torch.arange(9) % 4)
    found = solve(PointCloud(x, y, labels=labels, table=table), **WHERE)
    exact = PointCloud(x.double(), y.double(), labels=labels, table=table.double()).dense()
    close(found.plan(), solve(DenseCost(exact), **WHERE).plan(), rtol=2e-4)


x, y = normal(7, 3), normal(9, 3, seed=1)
T, L = normal(3, 4), (torch.arange(7) % 3, torch.arange(9) % 4)
BAD = [
    ({"metric": "manhattan"}, ValueError, "metric is 'manhattan'"),
    ({"feature_weights": normal(2)}, ValueError, r"feature_weights has shape \(2,\); accepted is \(..., 3\)"),
    ({"feature_weights": normal(5, 3).abs()}, None, ""),
    ({"x": normal(4, 7, 3), "feature_weights": normal(5, 3).abs()}, ValueError, "leading axes of x"),
    ({"feature_weights": -normal(3).abs()}, ValueError, "feature_weights holds negative"),
    ({"feature_weights": torch.full((3,), INF).double()}, ValueError, "feature_weights holds"),
    ({"feature_weights": normal(3).abs().float()}, TypeError, "feature_weights has dtype torch.float32"),
    ({"feature_weights": [1.0, 1.0, 1.0]}, TypeError, "feature_weights is a"),
    ({"labels": L}, ValueError, "labels is given without table"),
    ({"table": T}, ValueError, "table is given without labels"),
    ({"labels": L, "table": T, "metric": "euclidean"}, ValueError, "labels are given with the metric 'euclidean'"),
    ({"labels": L[0], "table": T}, TypeError, "labels is a Tensor"),
    ({"labels": (L[0], L[0]), "table": T}, ValueError, r"labels of y have shape \(7,\); accepted is \(..., 9\)"),
    ({"labels": (L[0], L[1].double()), "table": T}, TypeError, "labels of y have dtype torch.float64"),
    ({"labels": (L[0] + 1, L[1]), "table": T}, ValueError, "labels of x go from 1 to 3; accepted are 0 to 2"),
    ({"labels": (L[0], L[1] - 1), "table": T}, ValueError, "labels of y go from -1 to 2"),
    ({"labels": L, "table": T[0]}, ValueError, r"table has shape \(4,\)"),
    ({"labels": L, "table": T / 0}, ValueError, "table holds NaN or infinite"),
    ({"labels": L, "table": T, "label_weight": INF}, ValueError, "label_weight is inf"),
    ({"labels": L, "table": T.to("meta")}, ValueError, "table is on meta and x on cpu"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD)
def test_bad_arguments(arguments, kind, message):
    given = {"x": x, "y": y} | arguments
    if kind is None:
        assert PointCloud(**given).shape == (5, 7, 9)
        return
    with pytest.raises(kind, match=message):
        PointCloud(**given)


def test_a_point_without_direction():
    with pytest.raises(ValueError, match=r"x holds NaN.*no point at the origin"):
        solve(PointCloud(x * 0, y, "cosine"), epsilon=1.0)


def test_numpy_arrays():
    given = {"feature_weights": normal(3).abs().numpy(), "labels": tuple(k.numpy() for k in L), "table": T.numpy()}
    found = solve(PointCloud(x.numpy(), y.numpy(), **given), epsilon=1.0)
    wanted = solve(PointCloud(x, y, feature_weights=normal(3).abs(), labels=L, table=T), epsilon=1.0)
    close(torch.from_numpy(found.plan()), wanted.plan())


def test_compile_and_transforms():
    def value(x, table):
        return solve(PointCloud(x, y, "cosine", labels=L, table=table), **WHERE).value()

    close(torch.compile(value, fullgraph=True, backend="aot_eager")(x, T), value(x, T))
    found = torch.func.grad(value, argnums=(0, 1))(x, T)
    leaves = [x.clone().requires_grad_(), T.clone().requires_grad_()]
    for ours, right in zip(found, torch.autograd.grad(value(*leaves), leaves), strict=True):
        close(ours, right)
