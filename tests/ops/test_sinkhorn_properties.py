"""What must hold of every problem."""

import itertools

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve  # noqa: E402

from .sinkhorn_cases import close, distances, normal, sinkhorn, weights  # noqa: E402

few = hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 12)
dimensions = st.sampled_from([1, 2, 5, 20])
epsilons = st.floats(0.1, 5.0)
backends = st.sampled_from(["torch", "torch", "reference"])
dtypes = st.sampled_from([torch.float32, torch.float64])
EXACTLY = {"tolerance": 0, "max_iterations": 6}


@st.composite
def problems(draw):
    """Points, weights (some of them perhaps zero), ε and a kernel."""
    n, m, d, seed = draw(sizes), draw(sizes), draw(dimensions), draw(seeds)
    x, y = normal(n, d, seed=seed), normal(m, d, seed=seed + 1)
    a = weights(n, seed=seed, zeros=draw(st.integers(0, n - 1)))
    b = weights(m, seed=seed + 1, zeros=draw(st.integers(0, m - 1)))
    return x, y, a, b, draw(epsilons), draw(backends)


def as_cost(x, y, dense):
    return DenseCost(distances(x, y)) if dense else PointCloud(x, y)


@few
@given(problems(), st.booleans())
def test_rows_are_exact_and_the_error_is_that_of_the_columns(problem, dense):
    x, y, a, b, epsilon, backend = problem
    solution = solve(as_cost(x, y, dense), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    rows, columns = solution.marginals()
    close(rows, a)
    close(solution.error, (columns - b).abs().sum(), atol=1e-12)
    assert (solution.plan() >= 0).all()


@few
@given(problems())
def test_points_and_their_matrix_are_one_problem(problem):
    x, y, a, b, epsilon, backend = problem
    one = solve(PointCloud(x, y), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    other = solve(DenseCost(distances(x, y)), a, b, epsilon=epsilon, backend="reference", **EXACTLY)
    close(one.f, other.f, rtol=1e-9)
    close(one.g, other.g, rtol=1e-9)


@few
@given(problems(), seeds, st.booleans())
def test_permutations_permute(problem, seed, dense):
    x, y, a, b, epsilon, backend = problem
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randperm(len(a), generator=generator), torch.randperm(len(b), generator=generator)
    one = solve(as_cost(x, y, dense), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    other = solve(as_cost(x[p], y[q], dense), a[p], b[q], epsilon=epsilon, backend=backend, **EXACTLY)
    close(one.f[p], other.f, rtol=1e-9)
    close(one.g[q], other.g, rtol=1e-9)


@few
@given(problems(), st.sampled_from([1e3, 1e4, -1e4]), dtypes)
def test_a_common_offset_changes_nothing(problem, offset, dtype):
    """The offset's digits are lost when it is added to the input, so the moved points say what is right."""
    x, y, a, b, epsilon, _ = problem
    x, y = ((part + offset).to(dtype) for part in (x, y))
    here = x.double() - offset, y.double() - offset
    moved = solve(PointCloud(x, y), a.to(dtype), b.to(dtype), epsilon=epsilon, backend="torch", **EXACTLY)
    f, g = solve_plainly(*here, a.to(dtype).double(), b.to(dtype).double(), epsilon)
    scale = 1 + float(distances(*here).max()) / epsilon
    tolerance = (2e-6 if dtype == torch.float32 else 1e-9) * scale
    rows, columns = a > 0, b > 0
    close(moved.f[rows] / epsilon, f / epsilon, rtol=0, atol=tolerance)
    close(moved.g[columns] / epsilon, g / epsilon, rtol=0, atol=tolerance)


def solve_plainly(x, y, a, b, epsilon):
    """The potentials of rows and columns with mass."""
    rows, columns = a > 0, b > 0
    return sinkhorn(distances(x[rows], y[columns]), a[rows], b[columns], epsilon, EXACTLY["max_iterations"])


@few
@given(problems(), st.booleans())
def test_no_mass_is_absence(problem, dense):
    x, y, a, b, epsilon, backend = problem
    solution = solve(as_cost(x, y, dense), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    f, g = solve_plainly(x, y, a, b, epsilon)
    close(solution.f[a > 0], f, rtol=1e-9)
    close(solution.g[b > 0], g, rtol=1e-9)
    assert solution.f.isfinite().all() and solution.g.isfinite().all()
    assert (solution.plan()[a == 0] == 0).all() and (solution.plan()[:, b == 0] == 0).all()


@few
@given(problems())
def test_exchanging_the_sides_transposes_the_optimum(problem):
    x, y, a, b, epsilon, backend = problem
    options = {"epsilon": epsilon, "tolerance": 1e-11, "max_iterations": 20000, "backend": backend}
    one, other = solve(PointCloud(x, y), a, b, **options), solve(PointCloud(y, x), b, a, **options)
    hypothesis.assume(one.converged and other.converged)
    close(one.plan(), other.plan().T, rtol=1e-8)
    close(one.value(), other.value(), rtol=1e-8)


@few
@given(problems(), st.sampled_from([1e-3, 1e-1, 7.0, 1e4]), st.booleans())
def test_the_unit_of_cost_does_not_matter(problem, unit, dense):
    x, y, a, b, epsilon, backend = problem
    scale = unit if dense else unit**0.5
    other = DenseCost(distances(x, y) * unit) if dense else PointCloud(x * scale, y * scale)
    one = solve(as_cost(x, y, dense), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    two = solve(other, a, b, epsilon=epsilon * unit, backend=backend, **EXACTLY)
    close(one.f, two.f / unit, rtol=1e-9)
    close(one.plan(), two.plan(), rtol=1e-8)


@few
@given(problems(), st.integers(2, 4))
def test_points_may_be_there_more_than_once(problem, copies):
    """Splitting a point's weight over copies changes nothing."""
    x, y, a, b, epsilon, backend = problem
    one = solve(PointCloud(x, y), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    a_split = a.repeat(copies) / copies
    other = solve(PointCloud(x.repeat(copies, 1), y), a_split, b, epsilon=epsilon, backend=backend, **EXACTLY)
    close(other.f, one.f.repeat(copies), rtol=1e-9)
    close(other.g, one.g, rtol=1e-9)
    same = solve(PointCloud(x[:1].expand_as(x), y), a, b, epsilon=epsilon, backend=backend, **EXACTLY)
    close(same.f, same.f[:1].expand_as(a), rtol=1e-9)


@few
@given(seeds, sizes, sizes, st.integers(1, 5), st.booleans(), st.booleans(), dtypes, backends)
def test_an_element_equals_its_solo_run(seed, n, m, batch, uniform, dense, dtype, backend):
    x, y = normal(batch, n, 3, seed=seed, dtype=dtype), normal(batch, m, 3, seed=seed + 1, dtype=dtype)
    x = x * torch.linspace(0.1, 3, batch, dtype=dtype)[:, None, None]
    epsilon = torch.linspace(0.3, 3, batch, dtype=torch.float64)
    a = None if uniform else weights(batch, n, seed=seed, dtype=dtype)
    b = None if uniform else weights(batch, m, seed=seed + 1, dtype=dtype)
    options = {"tolerance": 1e-4, "check_every": 2, "max_iterations": 40, "backend": backend}
    together = solve(as_cost(x, y, dense), a, b, epsilon=epsilon, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    for k in range(batch):
        parts = (None, None) if uniform else (a[k], b[k])
        alone = solve(as_cost(x[k], y[k], dense), *parts, epsilon=float(epsilon[k]), **options)
        assert alone.iterations == together.iterations[k]
        close(together.f[k], alone.f, rtol=tolerance)
        close(together.g[k], alone.g, rtol=tolerance)
        close(together.error[k], alone.error, rtol=1e-3, atol=tolerance)


@few
@given(problems())
def test_the_value_never_grows_worse(problem):
    """Alternating updates climb the dual."""
    x, y, a, b, epsilon, backend = problem
    duals = []
    for count in (1, 2, 5, 15):
        s = solve(PointCloud(x, y), a, b, epsilon=epsilon, tolerance=0, max_iterations=count, backend=backend)
        rows, columns = a > 0, b > 0
        duals.append(float((a * s.f)[rows].sum() + (b * s.g)[columns].sum()))
    assert all(later >= earlier - 1e-9 * (1 + abs(earlier)) for earlier, later in itertools.pairwise(duals))
