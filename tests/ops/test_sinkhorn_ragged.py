"""Lists of problems of different sizes: each is what it would be alone."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, ragged, solve  # noqa: E402

from .sinkhorn_cases import close, normal, weights  # noqa: E402

SIZES = [(7, 9), (40, 33), (38, 35), (8, 9), (1, 5), (37, 33), (300, 2)]
XS = [normal(n, 3, seed=k) for k, (n, _) in enumerate(SIZES)]
YS = [normal(m, 3, seed=20 + k) for k, (_, m) in enumerate(SIZES)]
AS = [weights(n, seed=k) for k, (n, _) in enumerate(SIZES)]
BS = [weights(m, seed=k) for k, (_, m) in enumerate(SIZES)]
OPTIONS = {"tolerance": 1e-9, "max_iterations": 500}


def costs(kind, xs=XS, ys=YS):
    if kind == "matrix":
        return DenseCost.ragged([PointCloud(x, y).dense() for x, y in zip(xs, ys, strict=True)])
    if kind == "labels":
        labels = [torch.arange(len(x)) % 3 for x in xs], [torch.arange(len(y)) % 2 for y in ys]
        return PointCloud.ragged(xs, ys, labels=labels, table=normal(3, 2, seed=9))
    return PointCloud.ragged(xs, ys, kind)


@pytest.mark.parametrize("kind", ["sqeuclidean", "matrix", "labels", "l1", "cosine"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reach", [None, 2.0])
def test_each_is_as_alone(kind, weighted, reach):
    given = (AS, BS) if weighted else (None, None)
    epsilons = [0.5 + 0.1 * k for k in range(len(SIZES))]
    found = solve(costs(kind), *given, epsilon=epsilons, reach=reach, **OPTIONS)
    for k, (solution, cost) in enumerate(zip(found, costs(kind), strict=True)):
        one = (AS[k], BS[k]) if weighted else ()
        alone = solve(cost, *one, epsilon=epsilons[k], reach=reach, **OPTIONS)
        assert solution.f.shape == (SIZES[k][0],) and solution.plan().shape == SIZES[k]
        assert int(solution.iterations) == int(alone.iterations) and bool(solution.converged)
        close(solution.plan(), alone.plan(), rtol=1e-8)
        close(solution.f[:, None] + solution.g, alone.f[:, None] + alone.g, rtol=1e-8)
        close(solution.value(), alone.value())
        close(solution.apply(YS[k]), alone.apply(YS[k]), rtol=1e-8)


@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
@pytest.mark.parametrize("kind", ["sqeuclidean", "matrix"])
def test_gradients(kind, gradient):
    xs, ys, bs = ([part.clone().requires_grad_() for part in parts] for parts in (XS, YS, BS))
    together = solve(costs(kind, xs, ys), None, bs, epsilon=0.6, gradient=gradient, **OPTIONS)
    total = sum(s.value() for s in together)
    pairs = zip(costs(kind, xs, ys), bs, strict=True)
    separate = sum(solve(c, None, b, epsilon=0.6, gradient=gradient, **OPTIONS).value() for c, b in pairs)
    leaves = [*xs, *ys, *bs]
    for ours, right in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(separate, leaves), strict=True):
        one, other = (by - by.mean() if by.ndim == 1 else by for by in (ours, right))
        close(one, other, rtol=1e-7)


def test_jagged_tensors():
    xs, ys = (torch.nested.nested_tensor(parts, layout=torch.jagged) for parts in (XS, YS))
    a = torch.nested.nested_tensor(AS, layout=torch.jagged)
    found = solve(PointCloud.ragged(xs, ys), a, epsilon=0.7)
    for k, solution in enumerate(found):
        close(solution.plan(), solve(PointCloud(XS[k], YS[k]), AS[k], epsilon=0.7).plan(), rtol=1e-6, atol=1e-9)


def test_starting_points():
    first = solve(costs("sqeuclidean"), epsilon=0.5, **OPTIONS)
    again = solve(costs("sqeuclidean"), epsilon=0.5, init=[(s.f, s.g) for s in first], **OPTIONS)
    assert all(int(s.iterations) == 1 for s in again)


def test_little_is_padded():
    """A side grows by an eighth at most; similar sizes meet in one batch."""
    for count in range(1, 3000):
        assert count <= ragged.rounded(count) <= count + max(0, (count - 1) // 8)
    assert ragged.rounded(38) == ragged.rounded(40) and ragged.rounded(33) == ragged.rounded(35)
    assert len({ragged.rounded(count) for count in range(1, 100_000)}) < 120


def test_no_problems():
    assert solve([], epsilon=1.0) == []


BAD = [
    (lambda: PointCloud.ragged(XS, YS[:2]), ValueError, "x, y and labels have"),
    (lambda: PointCloud.ragged(XS[0], YS), TypeError, "x is a Tensor; accepted is a list"),
    (lambda: PointCloud([XS[0]], YS), TypeError, "x is a builtins.list"),
    (lambda: solve(costs("l1"), AS[:2], epsilon=1.0), ValueError, "a has 2 entries and the list 7 problems"),
    (lambda: solve(costs("l1"), AS[0], epsilon=1.0), TypeError, "a is a Tensor; accepted is a list"),
    (lambda: solve(costs("l1"), epsilon=[1.0, 2.0]), ValueError, "epsilon has 2 entries for 7 problems"),
    (lambda: solve(costs("l1"), epsilon=1.0, reach=torch.ones(7)), ValueError, "leading axes"),
    (lambda: solve([PointCloud(XS[0].expand(2, 7, 3), YS[0])], epsilon=1.0), ValueError, r"problem 0 .* \(2, 7, 9\)"),
    (lambda: solve([XS[0]], epsilon=1.0), ValueError, "problem 0 of the list is"),
    (lambda: solve(costs("l1"), [*AS[:-1], -AS[-1]], epsilon=1.0), ValueError, "a holds -"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_arguments(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
