"""Choices of single pairs, and the entropy: top-k entries of a plan, hard minima."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn import blocks  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, c_transform, softmin, solve  # noqa: E402

from .sinkhorn_cases import INF, close, make, normal, weights  # noqa: E402

backends = pytest.mark.parametrize("backend", ["torch", "reference"])
kinds = pytest.mark.parametrize("kind", ["matrix", "points3", "points20"])
batches = pytest.mark.parametrize("batch", [(), (3,), (2, 2)], ids=str)
METRICS = ["sqeuclidean", "euclidean", "l1", "cosine", "inner"]


@backends
@kinds
@batches
@pytest.mark.parametrize("k", [1, 4, 9])
def test_top_k(monkeypatch, kind, batch, backend, k):
    monkeypatch.setattr(blocks, "STRIP_CPU", 40)
    cost, _, _ = make(kind, batch=batch)
    a, b = weights(*batch, 7, zeros=1), weights(*batch, 9, seed=1, zeros=2)
    solution = solve(cost, a, b, epsilon=0.8, tolerance=0, max_iterations=2, backend=backend)
    P = solution.plan()
    for found, matrix in ((solution.top_k(k), P), (solution.top_k_transpose(min(k, 7)), P.mT)):
        count = found.values.shape[-1]
        close(found.values, matrix.topk(count, -1).values)
        close(matrix.gather(-1, found.indices), found.values)
        assert found.indices.dtype == torch.int64
        assert (found.indices.sort(-1).values.diff(dim=-1) > 0).all()  # no column twice


def test_top_k_has_the_gradient_of_the_plan():
    x, y = normal(7, 3).requires_grad_(), normal(9, 3, seed=1).requires_grad_()
    epsilon = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    solution = solve(PointCloud(x, y), epsilon=epsilon, tolerance=0, max_iterations=3)
    totals = solution.top_k(3).values.square().sum(), solution.plan().topk(3, -1).values.square().sum()
    for ours, right in zip(*(torch.autograd.grad(t, (x, y, epsilon), retain_graph=True) for t in totals), strict=True):
        close(ours, right)


def test_top_k_of_few_entries():
    """Forbidden pairs and columns without mass come last, as zeros, with finite gradients."""
    M = normal(4, 5).abs()
    M[0, 1:4] = INF
    M.requires_grad_()
    epsilon = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    solution = solve(DenseCost(M), None, weights(5, zeros=1), epsilon=epsilon)
    values, indices = solution.top_k(5)
    assert values[0].tolist()[1:] == [0.0] * 4 and int(indices[0, 0]) == 4
    assert all(by.isfinite().all() for by in torch.autograd.grad(values.square().sum(), (M, epsilon)))


@pytest.mark.parametrize("k", [0, 10, 1.5, True, None])
def test_bad_k(k):
    with pytest.raises(ValueError, match=r"k is .*; accepted is a whole number from 1 to 9"):
        solve(make("points3")[0], epsilon=1.0).top_k(k)


@backends
@pytest.mark.parametrize("convention", ["unrolled", "implicit"])
def test_entropy(backend, convention):
    cost, tensors, _ = make("points3")
    x = tensors[0].requires_grad_()
    solution = solve(cost, weights(7, zeros=1), weights(9), epsilon=0.8, backend=backend, gradient=convention)
    P = solution.plan()[1:]
    wanted = (P - torch.special.xlogy(P, P)).sum()
    close(solution.entropy(), wanted)
    close(*(torch.autograd.grad(out, x, retain_graph=True)[0] for out in (solution.entropy(), wanted)))
    close(solution.value("entropy"), solution.linear_cost() - 0.8 * solution.entropy())


@backends
@pytest.mark.parametrize("metric", METRICS)
@batches
def test_c_transform(monkeypatch, metric, batch, backend):
    monkeypatch.setattr(blocks, "STRIP_CPU", 40)
    x, y, g = normal(*batch, 7, 3).requires_grad_(), normal(9, 3, seed=1).requires_grad_(), normal(9, seed=2)
    g[3] = -INF
    g.requires_grad_()
    cost = PointCloud(x, y, metric)
    for one in (cost, DenseCost(cost.dense())):
        found = c_transform(one, g, backend=backend)
        wanted = (cost.dense() - g).min(-1)
        close(found.values, wanted.values)
        assert torch.equal(found.indices, wanted.indices)
        bys = [torch.autograd.grad(out.square().sum(), (x, y, g)) for out in (found.values, wanted.values)]
        for ours, right in zip(*bys, strict=True):
            close(ours, right)


def test_c_transform_is_the_limit_of_softmin():
    cost, g = PointCloud(normal(30, 4), normal(20, 4, seed=1)), normal(20, seed=2)
    close(softmin(cost, g / 1e-6, 1e-6), c_transform(cost, g).values, rtol=0, atol=1e-4)


def test_transposed_costs():
    labels, table = (torch.arange(7) % 3, torch.arange(9) % 4), normal(3, 4, seed=3)
    cost = PointCloud(normal(7, 3), normal(9, 3, seed=1), "cosine", normal(3).abs(), labels, table, 0.5)
    close(cost.T.dense(), cost.dense().mT)
    close(DenseCost(cost.dense()).T.dense(), cost.dense().mT)
    f = normal(7, seed=5)
    close(c_transform(cost.T, f).values, (cost.dense() - f[:, None]).amin(-2))


def test_c_transform_of_float32_far_away():
    """Values come from direct differences: a common offset costs no digits."""
    x, y = normal(50, 3).float() + 1000, normal(40, 3, seed=1).float() + 1000
    wanted = PointCloud(x.double(), y.double()).dense().min(-1)
    found = c_transform(PointCloud(x, y), torch.zeros(40))
    close(found.values, wanted.values, rtol=1e-6)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c_transform_of_a_tie(backend, dtype):
    """Far columns cost digits, so that either of two equal ones may be taken: its value is right, with its gradient."""
    x, y = torch.zeros(1, 4, dtype=dtype, requires_grad=True), torch.zeros(96, 4, dtype=dtype)
    y[:, 0] = 100
    y[0, 0], y[64, 0] = 1, -1
    found = c_transform(PointCloud(x, y), torch.zeros(96, dtype=dtype), backend=backend)
    assert found.values.item() == 1 and found.indices.item() in (0, 64)
    (by_x,) = torch.autograd.grad(found.values.sum(), x)
    assert torch.equal(by_x, -2 * y[found.indices])


def test_numpy_and_errors():
    x, y = normal(7, 3), normal(9, 3, seed=1)
    values, indices = c_transform(PointCloud(x.numpy(), y.numpy()), normal(9, seed=2).numpy())
    close(torch.from_numpy(values), c_transform(PointCloud(x, y), normal(9, seed=2)).values)
    assert indices.dtype.kind == "i"
    for cost in (PointCloud(x.numpy(), y.numpy()), DenseCost(normal(7, 9).numpy())):
        assert type(c_transform(cost.T, normal(7, seed=2).numpy()).values).__module__ == "numpy"
    with pytest.raises(ValueError, match="g has shape"):
        c_transform(PointCloud(x, y), normal(7))


def test_compile():
    x, y, g = normal(7, 3), normal(9, 3, seed=1), normal(9, seed=2)

    def outcome(x, g):
        solution = solve(PointCloud(x, y), epsilon=0.8)
        return c_transform(PointCloud(x, y), g).values.sum() + solution.top_k(3).values.sum() + solution.entropy()

    close(torch.compile(outcome, fullgraph=True, backend="aot_eager")(x, g), outcome(x, g))
