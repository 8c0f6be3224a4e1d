"""Fewer iterations: the same fixed point, never worse, and the derivative of what was run."""

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flashot_backends.kernels.sinkhorn import shapes  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import relaxed  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve  # noqa: E402
from flashot_backends.ops.sinkhorn.unrolled import relaxed_gradient  # noqa: E402

from .sinkhorn_cases import INF, close, distances, factors_from, make, normal, plan, replay, sinkhorn, weights  # noqa: E402

both = pytest.mark.parametrize("backend", ["torch", "reference"])
kinds = pytest.mark.parametrize("kind", ["matrix", "points3"])
accelerations = pytest.mark.parametrize("acceleration", ["auto", "overrelaxation", "annealing"])
few = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)


def hard(n=30, m=35, epsilon=0.005, seed=0):
    """Points in the unit square under a small ε: some hundreds of plain iterations."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(count, 2, generator=generator, dtype=torch.float64) for count in (n, m))
    return PointCloud(x, y), weights(n), weights(m, seed=1), epsilon, distances(x, y)


@both
@accelerations
@pytest.mark.parametrize("check_every", [1, 7, 10])
def test_the_fixed_point_is_the_same_in_fewer_iterations(backend, acceleration, check_every):
    cost, a, b, epsilon, _ = hard()
    options = {"epsilon": epsilon, "tolerance": 1e-9, "max_iterations": 20000, "check_every": check_every}
    plain = solve(cost, a, b, acceleration=None, **options, backend=backend)
    fast = solve(cost, a, b, acceleration=acceleration, **options, backend=backend)
    assert plain.converged and fast.converged
    assert 3 * fast.iterations < plain.iterations
    close(fast.plan(), plain.plan(), rtol=0, atol=1e-8)
    close(fast.value(), plain.value(), rtol=1e-9)


@both
@kinds
def test_the_error_is_true_and_rows_are_exact(backend, kind):
    cost, _, M = make(kind)
    a, b = weights(7), weights(9, seed=1)
    for count in range(1, 34, 4):
        solution = solve(cost, a, b, epsilon=0.1, tolerance=0, max_iterations=count, acceleration="overrelaxation",
                         check_every=3, backend=backend)  # fmt: skip
        P = plan(M, a, b, solution.f, solution.g, 0.1)
        assert solution.iterations == count
        close(P.sum(1), a)
        close(solution.error, (P.sum(0) - b).abs().sum(), rtol=1e-8, atol=1e-14)


@both
@kinds
@pytest.mark.parametrize("count", [2, 13, 40])
def test_is_the_loop_that_the_recursion_of_chebyshev_gives(backend, kind, count):
    cost, _, M = make(kind)
    a, b, start = weights(7), weights(9, seed=1), normal(7, seed=5)
    options = {"tolerance": 0, "max_iterations": count, "acceleration": "overrelaxation", "check_every": 5}
    solution = solve(cost, a, b, epsilon=0.05, init=(start, None), backend=backend, **options)
    f, g = replay(M, a, b, 0.05, solution, start, check_every=5)
    close(solution.f, f, rtol=1e-9)
    close(solution.g, g, rtol=1e-9)
    if count > 2:
        assert not torch.allclose(solution.f, sinkhorn(M, a, b, 0.05, count, start)[0])


def test_factors_end_at_the_best_constant_one():
    """Young's 2/(1 + √(1 − λ)) for an eigenvalue λ."""
    factors = factors_from(0.1)
    last = [next(factors) for _ in range(200)][-1]
    assert last == pytest.approx(2 / (1 + 0.1))


@pytest.mark.parametrize("acceleration", ["auto", None])
def test_a_tolerance_of_zero_counts_plain_iterations(acceleration):
    cost, a, b, epsilon, M = hard()
    solution = solve(cost, a, b, epsilon=epsilon, tolerance=0, max_iterations=25, acceleration=acceleration)
    close(solution.f, sinkhorn(M, a, b, epsilon, 25)[0])
    assert solution.iterations == 25


def test_annealing_counts_and_leaves_room():
    cost, a, b, epsilon, M = hard(epsilon=0.002)
    for most in (15, 40, 200):
        solution = solve(cost, a, b, epsilon=epsilon, tolerance=0, max_iterations=most, acceleration="annealing")
        stages = int(solution._state.stages)
        assert solution.iterations == most
        assert 10 * stages <= most / 2
        f, g = replay(M, a, b, epsilon, solution, stages=stages)
        close(solution.f, f, rtol=1e-9)
        close(solution.g, g, rtol=1e-9)
    assert stages > 1


def test_annealing_pays_where_epsilon_is_tiny():
    cost, a, b, epsilon, M = hard(n=60, m=70, epsilon=1e-4)
    options = {"epsilon": epsilon, "tolerance": 1e-3, "max_iterations": 5000}
    annealed, relaxed_only = (solve(cost, a, b, acceleration=how, **options) for how in ("annealing", "auto"))
    assert annealed.converged and relaxed_only.converged
    assert 2 * annealed.iterations < relaxed_only.iterations
    dense = solve(DenseCost(M), a, b, acceleration="annealing", **options)
    assert dense._state.stages > 0 and dense.converged


def test_infinite_costs_do_not_stand_in_the_way_of_annealing():
    M = normal(6, 6).abs().masked_fill(torch.eye(6, dtype=torch.bool), INF)
    options = {"epsilon": 0.05, "tolerance": 1e-9, "max_iterations": 2000}
    annealed, plain = (solve(DenseCost(M), acceleration=how, **options) for how in ("annealing", None))
    assert annealed.converged and annealed._state.stages > 0
    close(annealed.plan(), plain.plan(), rtol=0, atol=1e-7)


@both
@pytest.mark.parametrize("acceleration", ["auto", "annealing"])
def test_elements_go_their_own_way(backend, acceleration):
    """Each element of a batch looks, learns and anneals as it does alone."""
    parts = [hard(seed=k) for k in range(4)]
    x, y = (torch.stack([getattr(part[0], name) for part in parts]) for name in "xy")
    a, b, epsilon = parts[0][1], parts[0][2], torch.tensor([0.5, 0.02, 0.005, 0.001], dtype=torch.float64)
    options = {"tolerance": 1e-5, "max_iterations": 3000, "check_every": 4, "backend": backend}
    options |= {"acceleration": acceleration}
    together = solve(PointCloud(x, y), a, b, epsilon=epsilon, **options)
    assert len(set(together.iterations.tolist())) > 2
    assert (together._state.stages[3] > 0) == (acceleration == "annealing")
    for k in range(4):
        alone = solve(PointCloud(x[k], y[k]), a, b, epsilon=float(epsilon[k]), **options)
        assert alone.iterations == together.iterations[k]
        close(together.f[k], alone.f, rtol=1e-9)
        torch.testing.assert_close(together.errors[k], alone.errors, rtol=1e-6, atol=1e-12, equal_nan=True)


def test_errors_are_kept():
    cost, a, b, epsilon, M = hard()
    solution = solve(cost, a, b, epsilon=epsilon, tolerance=0, max_iterations=25, acceleration=None)
    assert solution.errors.shape == (4,)
    for k, count in enumerate((1, 11, 21, 25)):
        f, g = sinkhorn(M, a, b, epsilon, count)
        close(solution.errors[k], (plan(M, a, b, f, g, epsilon).sum(0) - b).abs().sum())
    stopped = solve(cost, a, b, epsilon=1.0, tolerance=1e-2, max_iterations=100, acceleration=None)
    seen = stopped.errors[~stopped.errors.isnan()]
    close(seen[-1], stopped.error)
    assert len(seen) == (int(stopped.iterations) - 1) // 10 + 1


# ------------------------------------------------------------------------------------------------------ properties


@st.composite
def problems(draw):
    n, m, seed = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(0, 2**31))
    d = draw(st.sampled_from([1, 2, 5]))
    x, y = normal(n, d, seed=seed), normal(m, d, seed=seed + 1)
    if draw(st.booleans()):  # two clusters of different weight
        x[: n // 2] += 4
        y[: m // 3] += 4
    a = weights(n, seed=seed, zeros=draw(st.integers(0, n - 1)))
    b = weights(m, seed=seed + 1, zeros=draw(st.integers(0, m - 1)))
    return x, y, a, b, draw(st.sampled_from([0.03, 0.1, 0.5, 3.0]))


@few
@given(problems(), st.sampled_from([1e-3, 1e-6, 1e-9]), st.sampled_from([1, 4, 10]))
def test_never_later_than_plain_iterations_by_more_than_a_look(problem, tolerance, check_every):
    x, y, a, b, epsilon = problem
    options = {"epsilon": epsilon, "tolerance": tolerance, "check_every": check_every, "max_iterations": 3000}
    plain = solve(PointCloud(x, y), a, b, acceleration=None, **options)
    fast = solve(PointCloud(x, y), a, b, **options)
    hypothesis.assume(plain.converged)
    assert fast.converged
    assert fast.iterations <= plain.iterations + max(check_every, 10)
    close(fast.marginals()[0], a)
    close(fast.plan(), plain.plan(), rtol=0, atol=1e3 * tolerance)


def converged(x, y, a, b, epsilon):
    solution = solve(PointCloud(x, y), a, b, epsilon=epsilon, tolerance=1e-11, max_iterations=2000)
    hypothesis.assume(solution.converged)
    return solution


@few
@given(problems(), st.integers(0, 2**31), st.sampled_from([0.0, 50.0]), st.sampled_from([1e-3, 1.0, 1e3]))
def test_order_place_unit_and_copies_of_points_do_not_matter(problem, seed, offset, unit):
    x, y, a, b, epsilon = problem
    p = torch.randperm(2 * len(a), generator=torch.Generator().manual_seed(seed))
    one = converged(x, y, a, b, epsilon)
    moved = unit**0.5 * (x.repeat(2, 1)[p] + offset), unit**0.5 * (y + offset)
    other = converged(*moved, (a.repeat(2) / 2)[p], b, unit * epsilon)
    close(other.plan(), one.plan().repeat(2, 1)[p] / 2, rtol=0, atol=1e-9)
    close(other.value() / unit, one.value(), rtol=1e-8, atol=1e-8)
    turned = converged(y, x, b, a, epsilon)
    close(turned.plan().T, one.plan(), rtol=0, atol=1e-9)
    assert (one.plan()[a == 0] == 0).all() and (one.plan()[:, b == 0] == 0).all()


@few
@given(problems(), st.floats(1, 2), st.integers(0, 2**31))
def test_no_relaxed_half_step_lowers_the_dual(problem, factor, seed):
    """From anywhere, whatever the factor; without the bound some do."""
    x, y, a, b, epsilon = problem
    M, rows = distances(x, y), a > 0
    old, g = 20 * epsilon * normal(len(a), seed=seed), normal(len(b), seed=seed + 1)
    target = -epsilon * torch.logsumexp((b.log() + g / epsilon) - M / epsilon, 1)
    new = relaxed(old[None], target[None], torch.tensor([[factor]], dtype=torch.float64), torch.tensor([[epsilon]]))[0]

    def dual(f):
        """Relative to the largest, by the rows' potentials alone."""
        t = ((f - target) / epsilon)[rows]
        return (a[rows] * (t - torch.special.expm1(t))).sum()

    assert dual(new) >= dual(old) * (1 + 1e-12) - 1e-12


def test_without_the_bound_the_dual_may_fall():
    old, target = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 3.0, dtype=torch.float64)
    free = old + 1.9 * (target - old)
    t = free - target
    assert t - torch.expm1(t) < -3 - torch.expm1(-target)
    bounded = relaxed(old, target, torch.tensor([[1.9]]), torch.ones(1, 1)) - target
    assert bounded - torch.expm1(bounded) >= -3 - torch.expm1(-target)


# ----------------------------------------------------------------------------------------------------- derivatives


def test_finite_differences_of_a_relaxed_update():
    old, target = normal(1, 9).requires_grad_(), normal(1, 9, seed=1).requires_grad_()
    epsilon = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)
    omega, grad = torch.tensor([[1.8]], dtype=torch.float64), normal(1, 9, seed=2)
    wanted = torch.autograd.grad(relaxed(old, target, omega, epsilon), (old, target, epsilon), grad)
    assert torch.autograd.gradcheck(lambda *parts: relaxed(parts[0], parts[1], omega, parts[2]), (old, target, epsilon))
    found = relaxed_gradient(old.detach(), target.detach(), omega, epsilon.detach(), grad)
    close(found[0], wanted[0])
    close(found[1], wanted[1])
    close(found[2].sum(-1, keepdim=True), wanted[2])


@both
@kinds
@pytest.mark.parametrize(("acceleration", "zeros"), [("overrelaxation", 0), ("overrelaxation", 2), ("annealing", 0)])
def test_gradients_are_those_of_the_iterations_run(backend, kind, acceleration, zeros):
    """Against autograd through the same iterations, dense, the factors held."""
    _, tensors, _ = make(kind)
    a, b = weights(7, zeros=zeros), weights(9, seed=1, zeros=zeros)
    epsilon = torch.tensor(0.05, dtype=torch.float64)
    parts = [part.clone().requires_grad_() for part in (*tensors, a, b, epsilon, 0.1 * normal(7, seed=2))]
    *tensors, a, b, epsilon, start = parts
    cost = DenseCost(*tensors) if kind == "matrix" else PointCloud(*tensors)
    options = {"tolerance": 0, "max_iterations": 57, "check_every": 10, "acceleration": acceleration}
    solution = solve(cost, a, b, epsilon=epsilon, init=(start, None), backend=backend, **options)
    U, V = normal(7, seed=8), normal(9, seed=7)
    found = torch.autograd.grad((solution.f * U).sum() + (solution.g * V).sum(), parts)
    M = tensors[0] if kind == "matrix" else distances(*tensors)
    stages = int(solution._state.stages)
    assert (stages > 0) == (acceleration == "annealing")
    rows, columns = slice(zeros, None), slice(zeros, None)
    f, g = replay(M[rows, columns], a[rows], b[columns], epsilon, solution, start[rows], stages=stages)
    close(solution.f[rows], f, rtol=1e-8)
    wanted = torch.autograd.grad((f * U[rows]).sum() + (g * V[columns]).sum(), parts)
    if zeros:
        found_rows = torch.autograd.grad
        solution = solve(cost, a, b, epsilon=epsilon, init=(start, None), backend=backend, **options)
        found = found_rows((solution.f * U)[rows].sum() + (solution.g * V)[columns].sum(), parts)
    for ours, right in zip(found, wanted, strict=True):
        close(ours, right, rtol=1e-7, atol=1e-8)


def test_gradients_of_a_batch_whose_elements_stop_at_different_looks():
    M = torch.stack([normal(8, 9, seed=k).abs() * scale for k, scale in enumerate((0.05, 1, 6))])
    together = M.clone().requires_grad_()
    solution = solve(DenseCost(together), epsilon=0.1, check_every=2, tolerance=1e-4)
    assert len(set(solution.iterations.tolist())) == 3
    (found,) = torch.autograd.grad(solution.value().sum() + solution.linear_cost().sum(), together)
    for k in range(3):
        alone = M[k].clone().requires_grad_()
        single = solve(DenseCost(alone), epsilon=0.1, check_every=2, tolerance=1e-4)
        close(found[k], torch.autograd.grad(single.value() + single.linear_cost(), alone)[0], rtol=1e-9)


# ---------------------------------------------------------------------------------------------------- the problem set


@pytest.mark.parametrize("name", [name for name, case in shapes.PROBLEMS.items() if case.hard])
def test_three_times_fewer_on_the_hard_half(name):
    problem = shapes.make_problem(name, 80)
    cost, options = PointCloud(problem.x, problem.y), {"epsilon": problem.epsilon, "tolerance": 1e-3}
    fast = solve(cost, problem.a, problem.b, **options)
    assert fast.converged
    most = 3 * int(fast.iterations) - 1
    assert not solve(cost, problem.a, problem.b, acceleration=None, max_iterations=most, **options).converged


@both
@pytest.mark.parametrize(("name", "tolerance"), [("small epsilon", 1e-5), ("clusters", 3e-6)])
def test_rounding_does_not_keep_float32_from_a_tolerance_that_plain_iterations_reach(backend, name, tolerance):
    problem = shapes.make_problem(name, 150, torch.float32)
    solution = solve(
        PointCloud(problem.x, problem.y), problem.a, problem.b, epsilon=problem.epsilon, tolerance=tolerance,
        max_iterations=600, backend=backend,
    )  # fmt: skip
    assert solution.converged and solution.error < tolerance
