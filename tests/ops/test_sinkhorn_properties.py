"""What must hold of every problem."""

import itertools
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve  # noqa: E402
from flashot_backends.ops.sinkhorn.costs import LABELLED, METRICS  # noqa: E402

from .sinkhorn_cases import INF, close, distances, normal, sinkhorn, weights  # noqa: E402

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
    # Relaxation grows or not as an error falls by a bit more or less than foreseen: in float32, rounding may decide.
    acceleration = None if dtype == torch.float32 else "auto"
    options = {"tolerance": 1e-4, "check_every": 2, "max_iterations": 40, "backend": backend}
    options |= {"acceleration": acceleration}
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


# ------------------------------------------------------------------------- every metric, balanced or with penalties


class Case(NamedTuple):
    """A problem of points: everything that makes it."""

    x: torch.Tensor
    y: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    metric: str
    epsilon: float
    reach: tuple[float, float]
    features: torch.Tensor | None
    labels: tuple[torch.Tensor, torch.Tensor] | None
    table: torch.Tensor | None
    backend: str

    def cost(self):
        return PointCloud(self.x, self.y, self.metric, self.features, self.labels, self.table)

    def solve(self, dense=False, **options):
        cost = DenseCost(self.cost().dense()) if dense else self.cost()
        options = EXACTLY | {"acceleration": "overrelaxation"} | options
        return solve(cost, self.a, self.b, epsilon=self.epsilon, reach=self.reach, backend=self.backend, **options)

    def rows(self, index, share=1):
        """With other rows: those of an index."""
        labels = self.labels and (self.labels[0][index], self.labels[1])
        return self._replace(x=self.x[index], a=self.a[index] / share, labels=labels)

    def columns(self, index):
        labels = self.labels and (self.labels[0], self.labels[1][index])
        return self._replace(y=self.y[index], b=self.b[index], labels=labels)

    def exchanged(self):
        table = None if self.table is None else self.table.T
        return self._replace(x=self.y, y=self.x, a=self.b, b=self.a, reach=self.reach[::-1],
                             labels=self.labels and self.labels[::-1], table=table)  # fmt: skip

    def moved(self, move, features=False):
        """With other points; features are not weighed then, unless a motion knows no direction."""
        return self._replace(x=move(self.x), y=move(self.y), features=self.features if features else None)


@st.composite
def cases(draw, metrics=tuple(METRICS), extras=True):
    n, m, d, seed = draw(sizes), draw(sizes), draw(dimensions), draw(seeds)
    metric, scale = draw(st.sampled_from(metrics)), d**-0.5
    reach = draw(st.sampled_from([(INF, INF), (0.7, 0.7), (3.0, 0.5), (INF, 1.0), (2.0, INF)]))
    a = weights(n, seed=seed, zeros=draw(st.integers(0, n - 1)))
    b = weights(m, seed=seed + 1, zeros=draw(st.integers(0, m - 1)))
    labels = table = None
    if extras and metric in LABELLED and draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        labels = tuple(torch.randint(0, 3, (count,), generator=generator) for count in (n, m))
        table = normal(3, 3, seed=seed + 2)
    features = normal(d, seed=seed + 3).abs() if extras and draw(st.booleans()) else None
    a, b = (a, b) if INF == reach[0] == reach[1] else (0.7 * a, 1.6 * b)
    return Case(normal(n, d, seed=seed) * scale, normal(m, d, seed=seed + 1) * scale, a, b, metric,
                draw(st.floats(0.2, 3.0)), reach, features, labels, table, draw(backends))  # fmt: skip


def alike(one, other, rtol=1e-8):
    close(one.f, other.f, rtol=rtol)
    close(one.g, other.g, rtol=rtol)
    close(one.plan(), other.plan(), rtol=rtol)
    close(one.value(), other.value(), rtol=rtol)


@few
@given(cases(), st.booleans())
def test_marginals_are_what_the_potentials_ask_for(case, dense):
    solution = case.solve(dense)
    rows, columns = solution.marginals()
    present = case.a * torch.exp(-solution.f / case.reach[0]), case.b * torch.exp(-solution.g / case.reach[1])
    close(rows, present[0])
    close(solution.error, (columns - present[1])[case.b > 0].abs().sum(), atol=1e-10)
    close(solution.plan().sum(0), columns)


@few
@given(cases())
def test_any_metric_is_the_problem_of_its_matrix(case):
    alike(case.solve(), case.solve(dense=True))


@few
@given(cases(), seeds)
def test_permutations_permute_any_problem(case, seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randperm(len(w), generator=generator) for w in (case.a, case.b))
    one, other = case.solve(), case.rows(p).columns(q).solve()
    close(one.f[p], other.f, rtol=1e-8)
    close(one.g[q], other.g, rtol=1e-8)
    close(one.value(), other.value(), rtol=1e-8)


@few
@given(cases(["sqeuclidean", "euclidean", "l1"]), st.sampled_from([-30.0, 1e3]))
def test_distances_do_not_depend_on_the_place(case, offset):
    alike(case.solve(), case.moved(lambda points: points + offset, features=True).solve(), rtol=1e-7)


@few
@given(cases(["sqeuclidean", "euclidean", "cosine", "inner"]), seeds)
def test_nor_on_directions(case, seed):
    d = case.x.shape[-1]
    turn = torch.linalg.qr(normal(d, d, seed=seed))[0]
    alike(case._replace(features=None).solve(), case.moved(lambda points: points @ turn).solve())


@few
@given(cases(["cosine"]), seeds)
def test_cosines_do_not_depend_on_lengths(case, seed):
    lengths = 10 ** normal(len(case.x), 1, seed=seed)
    alike(case.solve(), case._replace(x=case.x * lengths, y=case.y * 1e-3).solve())


@few
@given(cases(), st.sampled_from([1e-3, 7.0, 1e4]))
def test_the_unit_of_any_cost_does_not_matter(case, unit):
    if case.metric == "cosine":
        one, matrix = case.solve(), case.cost().dense() * unit
        options = EXACTLY | {"acceleration": "overrelaxation", "epsilon": case.epsilon * unit, "backend": case.backend}
        other = solve(DenseCost(matrix), case.a, case.b, reach=tuple(r * unit for r in case.reach), **options)
    else:
        scale = unit if case.metric in ("euclidean", "l1") else unit**0.5
        table, reach = case.table if case.table is None else case.table * unit, tuple(r * unit for r in case.reach)
        there = case.moved(lambda points: points * scale, features=True)
        one, other = case.solve(), there._replace(table=table, reach=reach, epsilon=case.epsilon * unit).solve()
    close(one.f, other.f / unit, rtol=1e-8)
    close(one.plan(), other.plan(), rtol=1e-7)
    close(one.value(), other.value() / unit, rtol=1e-8)


@few
@given(cases(), st.floats(-3, 3))
def test_a_constant_of_the_cost_is_one_of_the_value(case, constant):
    """Where all mass is moved; elsewhere it is another problem."""
    hypothesis.assume(INF in case.reach)
    mass, matrix = (case.a if case.reach[0] == INF else case.b).sum(), case.cost().dense()
    options = {"epsilon": case.epsilon, "reach": case.reach, "tolerance": 1e-12, "max_iterations": 5000}
    one, other = (solve(DenseCost(M), case.a, case.b, **options) for M in (matrix, matrix + constant))
    hypothesis.assume(one.converged and other.converged)
    close(one.plan(), other.plan(), rtol=1e-7, atol=1e-9)
    close(one.value() + constant * mass, other.value(), rtol=1e-8)


@few
@given(cases())
def test_exchanging_the_sides_transposes_any_optimum(case):
    options = {"tolerance": 1e-12, "max_iterations": 5000}
    one, other = case.solve(**options), case.exchanged().solve(**options)
    hypothesis.assume(one.converged and other.converged)
    close(one.plan(), other.plan().T, rtol=1e-7, atol=1e-9)
    close(one.value(), other.value(), rtol=1e-8)
    turned = solve(case.cost().T, case.b, case.a, epsilon=case.epsilon, reach=case.reach[::-1], **options)
    close(turned.plan(), other.plan(), rtol=1e-7, atol=1e-9)


@few
@given(cases())
def test_a_cloud_and_itself_make_a_symmetric_plan(case):
    labels = case.labels and (case.labels[0],) * 2
    table = None if case.table is None else case.table + case.table.T
    itself = case._replace(y=case.x, b=case.a, labels=labels, table=table, reach=(case.reach[0],) * 2)
    solution = itself.solve(tolerance=1e-12, max_iterations=5000)
    hypothesis.assume(solution.converged)
    close(solution.plan(), solution.plan().T, rtol=1e-7, atol=1e-9)


@few
@given(cases(), st.booleans())
def test_no_mass_is_absence_in_any_problem(case, dense):
    rows, columns = case.a > 0, case.b > 0
    one, other = case.solve(dense), case.rows(rows).columns(columns).solve(dense)
    close(one.f[rows], other.f, rtol=1e-8)
    close(one.g[columns], other.g, rtol=1e-8)
    close(one.value(), other.value(), rtol=1e-8)
    assert one.f.isfinite().all() and one.g.isfinite().all()
    assert (one.plan()[~rows] == 0).all() and (one.plan()[:, ~columns] == 0).all()


@few
@given(cases(), st.integers(2, 4))
def test_points_of_any_problem_may_be_there_more_than_once(case, copies):
    one, other = case.solve(), case.rows(torch.arange(len(case.a)).repeat(copies), copies).solve()
    close(other.f, one.f.repeat(copies), rtol=1e-8)
    close(other.g, one.g, rtol=1e-8)
    close(other.value(), one.value(), rtol=1e-8)
