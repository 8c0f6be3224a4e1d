"""Marginals that may be missed: against POT, against a minimiser in float64, in the limits, and derivatives."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flashot_backends.kernels.sinkhorn.operator import relaxed  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve  # noqa: E402

from .sinkhorn_cases import INF, close, damp, distances, make, normal, plan, replay, rows_of, weights  # noqa: E402

both = pytest.mark.parametrize("backend", ["torch", "reference"])
KINDS = ["matrix", "points3"]
REACHES = [(0.4, 0.4), (3.0, 0.7), (50.0, 50.0), (2.0, INF), (INF, 0.5)]
reaches = pytest.mark.parametrize("rho", REACHES, ids=str)
EPSILON = 0.3
few = hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
many = hypothesis.settings(max_examples=500, deadline=None, derandomize=True)


def divergence(p, q):
    """KL(p | q) with the masses."""
    return (torch.xlogy(p, p) - torch.where(p > 0, p * q.clamp(min=1e-300).log(), 0.0) - p + q).sum()


def objective(P, M, a, b, epsilon, rho, entropy=False):
    """What is minimised, by its definition."""
    total = (P * M).sum() + sum(r * divergence(p, w) for r, p, w in zip(rho, (P.sum(1), P.sum(0)), (a, b), strict=True)
                                if r != INF)  # fmt: skip
    if entropy:
        return total + epsilon * (torch.xlogy(P, P) - P).sum()
    return total + epsilon * divergence(P, a[:, None] * b)


def masses(rho):
    """Weights of unlike mass where the problem allows that."""
    a, b = 0.7 * weights(7), 1.9 * weights(9, seed=1)
    return (a, b) if rho[0] != INF or rho[1] != INF else (a, b * a.sum() / b.sum())


@both
@reaches
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceleration", ["auto", None, "annealing"])
def test_meets_the_conditions_of_the_optimum(backend, rho, kind, acceleration):
    cost, _, M = make(kind)
    a, b = masses(rho)
    options = {"tolerance": 1e-11, "max_iterations": 5000, "acceleration": acceleration, "backend": backend}
    solution = solve(cost, a, b, epsilon=EPSILON, reach=rho, **options)
    assert solution.converged
    P = plan(M, a, b, solution.f, solution.g, EPSILON)
    close(solution.plan(), P)
    close(P.sum(1), a * torch.exp(-solution.f / rho[0]), rtol=1e-9)
    close(P.sum(0), b * torch.exp(-solution.g / rho[1]), rtol=1e-9)
    close(solution.value(), objective(P, M, a, b, EPSILON, rho))
    close(solution.value("entropy"), objective(P, M, a, b, EPSILON, rho, entropy=True))


@reaches
def test_no_plan_is_better(rho):
    """Against a general minimiser over log P, scaled to the marginals that are binding."""
    optimize = pytest.importorskip("scipy.optimize")
    M, (a, b) = normal(3, 4).abs(), (0.7 * weights(3), 1.2 * weights(4, seed=1))
    solution = solve(DenseCost(M), a, b, epsilon=EPSILON, reach=rho, tolerance=1e-12, max_iterations=5000)

    def shaped(z):
        """A plan that keeps to what is binding."""
        P = torch.exp(z.reshape(3, 4))
        P = P * (a / P.sum(1))[:, None] if rho[0] == INF else P
        return P * (b / P.sum(0)) if rho[1] == INF else P

    def judged(z):
        z = torch.from_numpy(z).requires_grad_()
        value = objective(shaped(z), M, a, b, EPSILON, rho)
        (grad,) = torch.autograd.grad(value, z)
        return float(value.detach()), grad.numpy()

    found = optimize.minimize(judged, np.zeros(12), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    close(solution.value(), torch.tensor(found.fun, dtype=torch.float64), rtol=1e-8)
    close(solution.plan(), shaped(torch.from_numpy(found.x)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rho", [(0.4, 0.4), (3.0, 0.7), (1.0, INF)], ids=str)
def test_against_pot(rho):
    ot = pytest.importorskip("ot")
    _, _, M = make("points3")
    a, b = 0.7 * weights(7), 1.9 * weights(9, seed=1)
    wanted = ot.unbalanced.sinkhorn_unbalanced(
        a.numpy(), b.numpy(), M.numpy(), EPSILON, [float(part) for part in rho], reg_type="kl", method="sinkhorn",
        numItermax=20000, stopThr=1e-14,
    )  # fmt: skip
    solution = solve(DenseCost(M), a, b, epsilon=EPSILON, reach=rho, tolerance=1e-12, max_iterations=5000)
    close(solution.plan(), torch.from_numpy(wanted), rtol=1e-7)


@both
@pytest.mark.parametrize("reach", [3e1, 3e3, 3e5, (3e1, None), (None, 3e5)], ids=str)
def test_converges_as_fast_as_with_binding_marginals(backend, reach):
    """Without the translation, iterations grow with ρ/ε: to 3e5 here. The plan's own marginals say what is meant."""
    cost, _, _ = make("points3", n=20, m=22)
    options = {"epsilon": EPSILON, "max_iterations": 4000, "acceleration": None, "backend": backend}
    a, b = torch.full((20,), 1 / 20).double(), torch.full((22,), 3 / 22).double()
    free = solve(cost, a, b, reach=reach, tolerance=1e-9, **options)
    binding = solve(cost, *free.marginals(), tolerance=1e-9, **options)
    assert free.converged and free.iterations <= binding.iterations + 20


def test_the_error_is_the_gradient_of_the_dual():
    cost, _, M = make("matrix")
    rho, (a, b) = (2.0, 0.7), masses((2.0, 0.7))
    solution = solve(cost, a, b, epsilon=EPSILON, reach=rho, tolerance=0, max_iterations=3, acceleration=None)
    f, g = solution.f, solution.g.clone().requires_grad_()
    dual = -rho[0] * (a * torch.exp(-f / rho[0])).sum() - rho[1] * (b * torch.exp(-g / rho[1])).sum()
    dual = dual - EPSILON * (plan(M, a, b, f, g, EPSILON)).sum()
    close(solution.error, torch.autograd.grad(dual, g)[0].abs().sum(), rtol=1e-8)
    close(f, damp(rows_of(M, b, g.detach(), EPSILON), EPSILON, rho[0]))


def test_limits_of_the_reach():
    cost, _, _ = make("points3")
    a, b = weights(7), weights(9, seed=1)
    options = {"epsilon": EPSILON, "tolerance": 1e-11, "max_iterations": 5000}
    binding = solve(cost, a, b, **options)
    for reach in (None, INF, (INF, None)):
        same = solve(cost, a, b, reach=reach, **options)
        close(same.f, binding.f)
        assert same.iterations == binding.iterations
    options["tolerance"] = 1e-8  # f is ρ times a small number, and rounded so
    close(solve(cost, a, b, reach=1e7, **options).plan(), binding.plan(), rtol=1e-6)
    mean = (0.7 * 1.9) ** 0.5  # an infinite price on both sides' relative miss: the geometric mean of the masses
    close(solve(cost, 0.7 * a, 1.9 * b, reach=1e7, **options).plan(), mean * binding.plan(), rtol=1e-5)
    free = a[:, None] * b * torch.exp(-cost.dense() / EPSILON)  # what no marginal asks for
    close(solve(cost, a, b, reach=1e-9, **options).plan(), free, rtol=1e-6)


@pytest.mark.parametrize("metric", ["sqeuclidean", "inner"])
def test_mass_follows_the_price(metric):
    """Terms of the cost that depend on one side alone matter here, as they never do for binding marginals."""
    x, y = normal(7, 3), normal(9, 3, seed=1)
    cost, (a, b), rho = PointCloud(x, y, metric), masses((2.0, 0.7)), (2.0, 0.7)
    M = distances(x, y) if metric == "sqeuclidean" else -x @ y.T
    solution = solve(cost, a, b, epsilon=EPSILON, reach=rho, tolerance=1e-11, max_iterations=5000)
    dense = solve(DenseCost(M), a, b, epsilon=EPSILON, reach=rho, tolerance=1e-11, max_iterations=5000)
    assert solution.converged
    close(solution.plan(), dense.plan(), rtol=1e-9)
    close(solution.value(), dense.value(), rtol=1e-9)
    close(solution.f, dense.f, rtol=1e-8)


@both
def test_batches_of_reaches(backend):
    M, a, b = normal(4, 6, 5, seed=2).abs(), weights(6), 2 * weights(5, seed=1)
    rows = torch.tensor([0.3, 2.0, 40.0, 5.0], dtype=torch.float64)
    options = {"epsilon": 0.2, "tolerance": 1e-9, "max_iterations": 5000, "backend": backend}
    together = solve(DenseCost(M), a, b, reach=(rows, 3.0), **options)
    for k in range(4):
        alone = solve(DenseCost(M[k]), a, b, reach=(float(rows[k]), 3.0), **options)
        assert alone.iterations == together.iterations[k]
        close(together.f[k], alone.f, rtol=1e-9)
    mixed = torch.tensor([INF, 2.0], dtype=torch.float64)
    some = solve(DenseCost(M[:2]), a, b / 2, reach=(mixed, mixed), **options)
    close(some.f[0], solve(DenseCost(M[0]), a, b / 2, **options).f, rtol=1e-9)
    assert solve(DenseCost(M[0]), a, b, reach=rows, **options).f.shape == (4, 6)


@both
def test_what_may_go_nowhere_is_given_up(backend):
    M = normal(5, 6).abs()
    M[1] = INF
    M[:, 2] = INF
    a, b, kept_rows, kept_columns = weights(5), weights(6, seed=1), [0, 2, 3, 4], [0, 1, 3, 4, 5]
    options = {"epsilon": 0.3, "reach": (2.0, 1.5), "tolerance": 1e-10, "max_iterations": 3000, "backend": backend}
    solution = solve(DenseCost(M), a, b, **options)
    real = solve(DenseCost(M[kept_rows][:, kept_columns]), a[kept_rows], b[kept_columns], **options)
    assert solution.converged
    close(solution.plan()[kept_rows][:, kept_columns], real.plan())
    assert (solution.plan()[1] == 0).all() and (solution.plan()[:, 2] == 0).all()
    unmoved = a.sum() * b.sum() - a[kept_rows].sum() * b[kept_columns].sum()
    close(solution.value(), real.value() + 2 * a[1] + 1.5 * b[2] + 0.3 * unmoved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes(dtype):
    cost, _, M = make("points3", dtype=dtype)
    a, b = (part.float() for part in masses((2.0, 0.7)))
    solution = solve(cost, a, b, epsilon=1.0, reach=(2.0, 0.7), tolerance=1e-5)
    wanted = solve(DenseCost(M), a.double(), b.double(), epsilon=1.0, reach=(2.0, 0.7), tolerance=1e-10)
    assert solution.converged and solution.f.dtype == torch.float32
    close(solution.plan(), wanted.plan(), rtol=1e-4, atol=1e-6)
    close(solution.value(), wanted.value(), rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- derivatives


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rho", [(3.0, 0.7), (2.0, INF), (INF, 0.5)], ids=str)
@pytest.mark.parametrize("acceleration", [None, "overrelaxation", "annealing"])
def test_gradients_are_those_of_the_iterations_run(backend, kind, rho, acceleration):
    _, tensors, _ = make(kind)
    epsilon = torch.tensor(0.1, dtype=torch.float64)
    parts = [part.clone().requires_grad_() for part in (*tensors, *masses(rho), epsilon, 0.1 * normal(7, seed=2))]
    *tensors, a, b, epsilon, start = parts
    cost = DenseCost(*tensors) if kind == "matrix" else PointCloud(*tensors)
    options = {"tolerance": 0, "max_iterations": 43, "acceleration": acceleration, "backend": backend}
    solution = solve(cost, a, b, epsilon=epsilon, reach=rho, init=(start, None), **options)
    U, V = normal(7, seed=8), normal(9, seed=7)
    found = torch.autograd.grad((solution.f * U).sum() + (solution.g * V).sum(), parts)
    M = tensors[0] if kind == "matrix" else distances(*tensors)
    f, g = replay(M, a, b, epsilon, solution, start, rho=rho, stages=int(solution._state.stages))
    close(solution.f, f, rtol=1e-8)
    wanted = torch.autograd.grad((f * U).sum() + (g * V).sum(), parts)
    for ours, right in zip(found, wanted, strict=True):
        close(ours, right, rtol=1e-7, atol=1e-9)


def test_gradients_of_few_iterations():
    """Nothing has converged, so the factors of the first cycle show; a short reach sets them here."""
    x, y, a, b = normal(7, 3).requires_grad_(), normal(9, 3, seed=1), 0.7 * weights(7), 1.9 * weights(9, seed=1)
    options = {"epsilon": 0.3, "reach": (2.0, 0.3), "tolerance": 0, "max_iterations": 3}

    def total(x):
        solution = solve(PointCloud(x, y), a, b, acceleration="overrelaxation", **options)
        return solution.f.square().sum() + solution.g.square().sum()

    assert torch.autograd.gradcheck(total, x, eps=1e-6, atol=1e-7, rtol=1e-6, fast_mode=True)


@reaches
def test_finite_differences_of_the_value(rho):
    """Iterated to convergence, the value has the derivative of the minimum."""
    x, y = normal(4, 2), normal(5, 2, seed=1)
    a, b = (0.7 * weights(4), 1.3 * weights(5, seed=1))
    epsilon = torch.tensor(0.5, dtype=torch.float64)

    def value(x, y, a, b, epsilon):
        return solve(PointCloud(x, y), a, b, epsilon=epsilon, reach=rho, tolerance=1e-13, max_iterations=600).value()

    parts = [part.requires_grad_() for part in (x, y, a, b, epsilon)]
    assert torch.autograd.gradcheck(value, parts, eps=1e-5, atol=1e-6, rtol=1e-5, fast_mode=True)


@reaches
def test_three_ways_to_differentiate_agree(rho):
    """Through relaxed iterations and translations, through the fixed point, and through the dual's optimum."""
    x, y, (a, b) = normal(7, 3), normal(9, 3, seed=1), masses(rho)
    parts = [part.requires_grad_() for part in (x, y, a, b, torch.tensor(0.4, dtype=torch.float64))]
    found = {}
    for gradient in ("unrolled", "implicit", "envelope"):
        solution = solve(PointCloud(x, y), a, b, epsilon=parts[4], reach=rho, tolerance=1e-13, gradient=gradient)
        assert solution.converged
        found[gradient] = torch.autograd.grad(solution.value(), parts)
    for unrolled, implicit, envelope in zip(*found.values(), strict=True):
        close(unrolled, implicit, rtol=1e-8)
        close(unrolled, envelope, rtol=1e-8)


def test_gradients_by_terms_of_one_side():
    """The inner product's cost holds terms that kernels do not see."""
    x, y = normal(6, 3).requires_grad_(), normal(7, 3, seed=1).requires_grad_()
    a, b = 0.7 * weights(6), 1.9 * weights(7, seed=1)
    options = {"epsilon": 0.4, "reach": (2.0, 0.7), "tolerance": 0, "max_iterations": 25}
    options |= {"acceleration": "overrelaxation"}
    solution = solve(PointCloud(x, y, "inner"), a, b, init=(torch.zeros(6).double(), None), **options)
    found = torch.autograd.grad(solution.f.square().sum() + solution.g.square().sum(), (x, y))
    f, g = replay(-x @ y.T, a, b, 0.4, solution, rho=(2.0, 0.7))
    close(solution.f, f, rtol=1e-8)
    wanted = torch.autograd.grad(f.square().sum() + g.square().sum(), (x, y))
    for ours, right in zip(found, wanted, strict=True):
        close(ours, right, rtol=1e-7)


# ------------------------------------------------------------------------------------------------------ properties


@st.composite
def problems(draw):
    n, m, seed = draw(st.integers(1, 10)), draw(st.integers(1, 10)), draw(st.integers(0, 2**31))
    x, y = normal(n, 2, seed=seed), normal(m, 2, seed=seed + 1)
    a = draw(st.sampled_from([0.3, 1.0, 5.0])) * weights(n, seed=seed, zeros=draw(st.integers(0, n - 1)))
    b = weights(m, seed=seed + 1, zeros=draw(st.integers(0, m - 1)))
    rho = draw(st.sampled_from([(1.0, 1.0), (0.1, 10.0), (100.0, 100.0), (5.0, INF), (INF, 0.5)]))
    return x, y, a, b, draw(st.sampled_from([0.1, 0.5, 3.0])), rho


def solved(x, y, a, b, epsilon, rho, **options):
    options |= {"tolerance": 1e-11, "max_iterations": 5000}
    solution = solve(PointCloud(x, y), a, b, epsilon=epsilon, reach=rho, **options)
    hypothesis.assume(solution.converged)
    return solution


@many
@given(st.floats(-3, 3), st.floats(-60, 60), st.floats(0, 1))
def test_no_relaxed_half_step_lowers_the_dual(scale, distance, part):
    """From a potential that is ``distance`` ε off, whatever the reach, by the largest factor that it can meet."""
    rho, epsilon, target = 10.0**scale, 1.0, torch.zeros(1, 1, dtype=torch.float64)
    gap = (1 - rho / (rho + epsilon)) ** 0.5
    q = (1 - gap) / (1 + gap)
    omega = torch.full((1, 1), 1 + part * 2 * q / (1 + q**2), dtype=torch.float64)
    old = torch.full((1, 1), distance, dtype=torch.float64)
    new = relaxed(old, target, omega, torch.ones(1, 1, dtype=torch.float64))

    def loss(t):
        """ρ e^(−t/ρ) + ε e^(t/ε), least at the target."""
        return rho * torch.special.expm1(-t / rho) + epsilon * torch.special.expm1(t / epsilon)

    assert loss(new) <= loss(old) * (1 + 1e-12) + 1e-12


@few
@given(problems())
def test_exchanging_the_sides_transposes(problem):
    x, y, a, b, epsilon, rho = problem
    one, other = solved(x, y, a, b, epsilon, rho), solved(y, x, b, a, epsilon, rho[::-1])
    close(one.plan(), other.plan().T, rtol=1e-7, atol=1e-9)
    close(one.value(), other.value(), rtol=1e-8)


@few
@given(problems(), st.sampled_from([1e-3, 7.0, 1e4]))
def test_the_unit_of_cost_does_not_matter(problem, unit):
    x, y, a, b, epsilon, rho = problem
    one = solved(x, y, a, b, epsilon, rho)
    scaled = solved(x * unit**0.5, y * unit**0.5, a, b, epsilon * unit, tuple(part * unit for part in rho))
    close(one.plan(), scaled.plan(), rtol=1e-7, atol=1e-9)
    close(one.value() * unit, scaled.value(), rtol=1e-8, atol=1e-9)


@few
@given(problems(), st.integers(0, 2**31), st.sampled_from([0.0, 30.0]))
def test_order_place_and_copies_of_points_do_not_matter(problem, seed, offset):
    x, y, a, b, epsilon, rho = problem
    generator = torch.Generator().manual_seed(seed)
    p = torch.randperm(2 * len(a), generator=generator)
    moved = solved((x.repeat(2, 1) + offset)[p], y + offset, (a.repeat(2) / 2)[p], b, epsilon, rho)
    one = solved(x, y, a, b, epsilon, rho)
    close(moved.f, one.f.repeat(2)[p], rtol=1e-6, atol=1e-7)
    close(moved.value(), one.value(), rtol=1e-8)


@few
@given(problems())
def test_relaxed_and_plain_iterations_end_at_one_plan(problem):
    _, _, a, b, *_ = problem
    one, other = solved(*problem), solved(*problem, acceleration=None)
    close(one.plan(), other.plan(), rtol=1e-7, atol=1e-9)
    assert one.iterations <= other.iterations + 10
    assert (one.plan()[a == 0] == 0).all() and (one.plan()[:, b == 0] == 0).all()


# ---------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("reach", "kind", "message"),
    [
        (-1.0, ValueError, "reach is -1.0; accepted are positive numbers"),
        (0, ValueError, "reach is 0"),
        ((1.0, 2.0, 3.0), ValueError, "reach has 3 entries"),
        ("far", TypeError, "reach is 'far'"),
        (torch.tensor([1.0, -2.0]), ValueError, "reach holds a number that is not positive"),
        (torch.ones(3), ValueError, "reach"),
    ],
    ids=str,
)
def test_bad_reaches(reach, kind, message):
    cost = DenseCost(normal(2, 3, 4).abs())
    with pytest.raises(kind, match=message):
        solve(cost, epsilon=1.0, reach=reach)


def test_masses_must_agree_where_both_marginals_are_binding():
    cost, a, b = DenseCost(normal(2, 3, 4).abs()), weights(3), 2 * weights(4)
    with pytest.raises(ValueError, match=r"masses of a and b differ.*any with a reach"):
        solve(cost, a, b, epsilon=1.0)
    with pytest.raises(ValueError, match="masses of a and b differ"):
        solve(cost, a, b, epsilon=1.0, reach=torch.tensor([1.0, INF]))
    assert solve(cost, a, b, epsilon=1.0, reach=torch.tensor([1.0, 2.0])).converged.all()
