"""What a solution answers: the plan as a matrix, and everything streamed against it."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import DenseCost, Solution, solve  # noqa: E402

from .sinkhorn_cases import INF, close, make, normal, plan, weights  # noqa: E402

KINDS = ["matrix", "points3", "points20"]
BATCHES = [(), (3,), (2, 2)]
backends = pytest.mark.parametrize("backend", ["torch", "reference"])
kinds = pytest.mark.parametrize("kind", KINDS)
batches = pytest.mark.parametrize("batch", BATCHES, ids=str)


def solved(kind, batch, backend, zeros=0, **options):
    """A solution with its matrix, weights and dense plan, well before convergence: nothing is right by chance."""
    cost, _, M = make(kind, batch=batch)
    a, b = weights(*batch, 7, zeros=zeros), weights(*batch, 9, seed=1, zeros=zeros)
    solution = solve(cost, a, b, epsilon=0.8, tolerance=0, max_iterations=2, backend=backend, **options)
    return solution, M, a, b, plan(M, a, b, solution.f, solution.g, 0.8)


@backends
@kinds
@batches
def test_plan_and_marginals(kind, batch, backend):
    solution, _, a, b, P = solved(kind, batch, backend)
    close(solution.plan(), P)
    rows, columns = solution.marginals()
    close(rows, P.sum(-1))
    close(columns, P.sum(-2))
    close(rows, a)
    close(solution.error, (columns - b).abs().sum(-1))
    assert solution.plan().shape == (*batch, 7, 9)


@backends
@kinds
@batches
def test_products(kind, batch, backend):
    solution, _, _, _, P = solved(kind, batch, backend)
    V, U = normal(*batch, 9, 4, seed=5), normal(*batch, 7, 4, seed=6)
    close(solution.apply(V), P @ V)
    close(solution.apply_transpose(U), P.mT @ U)
    close(solution.apply(V[..., 0]), (P @ V)[..., 0])
    close(solution.apply_transpose(U[..., 0]), (P.mT @ U)[..., 0])
    one = normal(9, 2, seed=5)
    close(solution.apply(one), P @ one)
    close(solution.apply(normal(9, seed=5)), P @ normal(9, seed=5))
    assert solution.apply(normal(*batch, 9, 0)).shape == (*batch, 7, 0)


@backends
@kinds
@batches
@pytest.mark.parametrize("zeros", [0, 2])
def test_values(kind, batch, backend, zeros):
    solution, M, a, b, P = solved(kind, batch, backend, zeros)
    linear = (P * M).sum((-1, -2))
    product = a[..., :, None] * b[..., None, :]
    kl = (torch.special.xlogy(P, P) - torch.special.xlogy(P, product) - P + product).sum((-1, -2))
    entropy = (torch.special.xlogy(P, P) - P).sum((-1, -2))
    close(solution.linear_cost(), linear)
    close(solution.value(), linear + 0.8 * kl)
    close(solution.value("kl"), linear + 0.8 * kl)
    close(solution.value("entropy"), linear + 0.8 * entropy)


@backends
def test_no_mass_and_no_way_are_exactly_zero(backend):
    M = normal(7, 9).abs()
    M[3, 4] = M[5, 2] = INF
    solution = solve(DenseCost(M), weights(7, zeros=1), weights(9, zeros=2), epsilon=0.8, backend=backend)
    P = solution.plan()
    assert (P[0] == 0).all() and (P[:, :2] == 0).all()
    assert P[3, 4] == P[5, 2] == 0
    assert (solution.apply(torch.ones(9).double())[0] == 0).all()
    close(solution.linear_cost(), (P * M.masked_fill(M == INF, 0)).sum())
    assert solution.value().isfinite() and solution.value("entropy").isfinite()


@backends
def test_value_is_what_pot_minimises(backend):
    ot = pytest.importorskip("ot")
    cost, _, M = make("points3")
    a, b = weights(7), weights(9, seed=1)
    solution = solve(cost, a, b, epsilon=0.5, tolerance=1e-12, backend=backend)
    for convention in ("kl", "entropy"):
        result = ot.solve(M.numpy(), a.numpy(), b.numpy(), reg=0.5, reg_type=convention, tol=1e-13, max_iter=10000)
        shift = 0.5 if convention == "entropy" else 0.0  # POT's entropy is Σ P log P, without the −1
        assert float(solution.value(convention)) == pytest.approx(float(result.value) - shift, rel=1e-8)
        assert float(solution.linear_cost()) == pytest.approx(float(result.value_linear), rel=1e-7)


@pytest.mark.parametrize("shape", [(8,), (8, 2), (3, 2, 9, 1), (2, 9, 1)], ids=str)
def test_values_of_the_wrong_shape(shape):
    solution = solved("matrix", (3,), "torch")[0]
    with pytest.raises(ValueError, match="V"):
        solution.apply(normal(*shape))


def test_other_bad_questions():
    solution = solved("matrix", (), "torch")[0]
    with pytest.raises(ValueError, match="convention"):
        solution.value("KL")
    with pytest.raises(TypeError, match="U is a"):
        solution.apply_transpose([1.0] * 7)
    with pytest.raises(TypeError, match="V has dtype int64"):
        solution.apply(torch.ones(9, dtype=torch.int64))


def test_its_looks():
    solution = solved("matrix", (), "torch")[0]
    assert isinstance(solution, Solution)
    assert "7×9" in repr(solution) and "iterations=2" in repr(solution)


def test_questions_share_one_precision():
    """float32 potentials answer in float32 and accept float64 values."""
    cost, _, _ = make("points3", dtype=torch.float32)
    solution = solve(cost, epsilon=1.0)
    assert solution.apply(normal(9)).dtype == solution.plan().dtype == solution.value().dtype == torch.float32
