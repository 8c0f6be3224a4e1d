"""``ot.solve``, ``ot.solve_sample`` and batches with ``method="flash"``: the host's values, plans and derivatives."""

import contextlib
import inspect

import numpy as np
import pytest

import flashot_backends

pytestmark = pytest.mark.usefixtures("complete")
REG_TYPES = ["KL", "entropy"]
reg_types = pytest.mark.parametrize("reg_type", REG_TYPES)
TIGHT = {"tol": 1e-13, "max_iter": 5000}
INF = float("inf")
METRICS = ["sqeuclidean", "euclidean", "cityblock", "cosine"]


def same(ours, hosts, rtol=1e-9, plan=True):
    """Values, plan, and potentials up to their constant."""
    np.testing.assert_allclose(ours.value, hosts.value, rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(ours.value_linear, hosts.value_linear, rtol=rtol)
    if plan:
        np.testing.assert_allclose(ours.plan, hosts.plan, rtol=1e-7, atol=1e-12)
    for mine, theirs in zip(ours.potentials, hosts.potentials, strict=True):
        np.testing.assert_allclose(mine - mine.mean(), theirs - theirs.mean(), rtol=1e-7, atol=1e-8)


# ------------------------------------------------------------------------------------------------------------- solve


@reg_types
@pytest.mark.parametrize("weighted", [True, False])
def test_solve(pot, problem, reg_type, weighted):
    weights = (problem.a, problem.b) if weighted else (None, None)
    options = TIGHT | {"reg": problem.reg, "reg_type": reg_type}
    hosts, ours = (pot.solve(problem.M, *weights, method=method, **options) for method in (None, "flash"))
    same(ours, hosts)
    assert isinstance(ours, pot.utils.OTResult) and type(ours.value) is type(hosts.value)
    assert ours.status == hosts.status
    np.testing.assert_allclose(ours.marginals[0], hosts.marginals[0])


@pytest.mark.parametrize("iterations", [1, 7, 25])
def test_iterates_are_those_of_the_host(pot, problem, iterations):
    options = {"reg": problem.reg, "tol": 0, "max_iter": iterations}
    with pytest.warns(UserWarning, match="did not converge") as said:
        hosts, ours = (
            pot.solve(problem.M, problem.a, problem.b, method=method, **options) for method in (None, "flash")
        )
    same(ours, hosts)
    assert len({str(one.message) for one in said}) == 1
    assert __file__ in {one.filename for one in said}


def test_zero_weights_have_a_value(pot, problem):
    a = problem.a.copy()
    a[3] = 0
    ours = pot.solve(problem.M, a / a.sum(), problem.b, reg=problem.reg, method="flash", **TIGHT)
    rest = a > 0
    small = pot.solve(problem.M[rest], a[rest] / a.sum(), problem.b, reg=problem.reg, **TIGHT)
    np.testing.assert_allclose(ours.value, small.value, rtol=1e-9)
    assert (ours.plan[3] == 0).all()


def test_gradients_pass_weights_of_zero(pot, problem):
    torch = pytest.importorskip("torch")
    a = problem.a.copy()
    a[3] = 0
    M, a, b = (torch.tensor(part, requires_grad=True) for part in (problem.M, a / a.sum(), problem.b))
    for grad in ("autodiff", "envelope", "last_step"):
        result = pot.solve(M, a, b, reg=0.1, method="flash", grad=grad)
        asked = [result.value]
        asked += [] if grad == "envelope" else [result.plan.square().sum(), result.potentials[1].sum()]
        for answer in asked:
            by_M, by_a, by_b = torch.autograd.grad(answer, (M, a, b), retain_graph=True)
            assert by_M.isfinite().all() and by_a.isfinite().all() and by_b.isfinite().all()
            assert (by_M[3] == 0).all()


def test_potentials_to_start_from(pot, problem):
    """The host's loop takes none; ours ends at once where they fit."""
    arguments, options = (problem.M, problem.a, problem.b), {"reg": problem.reg, "method": "flash"}
    first = pot.solve(*arguments, **options, **TIGHT)
    again = pot.solve(*arguments, **options, potentials_init=first.potentials, max_iter=1, tol=1e-12)
    same(again, first)


def test_verbose_prints_the_hosts_table(pot, problem, capsys):
    printed = []
    for method in (None, "flash"):
        pot.solve(problem.M, problem.a, problem.b, reg=0.02, method=method, verbose=True)
        printed.append([line.split("|")[0] for line in capsys.readouterr().out.splitlines()])
    assert printed[0] == printed[1] and len(printed[0]) > 3


@pytest.mark.usefixtures("lazy_tensors")
def test_solve_of_a_lazy_cost(pot, problem):
    from flashot_backends.adapters.pot import lazy_cost

    options = TIGHT | {"reg": problem.reg}
    hosts = pot.solve(problem.M, problem.a, problem.b, **options)
    ours = pot.solve(lazy_cost(problem.X, problem.Y), problem.a, problem.b, method="flash", **options)
    same(ours, hosts, plan=False)
    assert ours.plan is None
    np.testing.assert_allclose(ours.lazy_plan[:], hosts.plan, rtol=1e-7, atol=1e-12)
    with pytest.raises(ValueError, match="M is a lazy cost and method is None"):
        pot.solve(lazy_cost(problem.X, problem.Y), problem.a, problem.b, reg=1.0)


# -------------------------------------------------------------------------------------------------------- unbalanced


@pytest.mark.parametrize("unbalanced", [1.0, (0.3, 2.0), [0.7], (INF, 0.5), (0.5, INF)], ids=str)
def test_solve_unbalanced(pot, problem, unbalanced):
    """By the host's Sinkhorn: its value leaves the masses out, so that two finite penalties make it nothing."""
    options = {"reg": problem.reg, "unbalanced": unbalanced, "max_iter": 20000}
    hosts = pot.solve(problem.M, problem.a, 1.5 * problem.b, tol=1e-15, **options)
    ours = pot.solve(problem.M, problem.a, 1.5 * problem.b, method="flash", tol=1e-13, **options)
    same(ours, hosts)
    if INF not in np.atleast_1d(unbalanced):
        assert abs(ours.value) < 1e-10


def test_infinite_penalties_are_balanced(pot, problem):
    options = TIGHT | {"reg": problem.reg, "method": "flash"}
    ours = pot.solve(problem.M, problem.a, problem.b, unbalanced=INF, **options)
    np.testing.assert_allclose(ours.plan, pot.solve(problem.M, problem.a, problem.b, **options).plan, rtol=1e-7)


@pytest.mark.parametrize("unbalanced", [1.0, (0.3, 2.0)], ids=str)
def test_solve_unbalanced_with_entropy(pot, problem, unbalanced):
    """By the host's L-BFGS: its value has the masses, and ours is no larger."""
    a, b, M = problem.a, 1.5 * problem.b, problem.M
    options = {"reg": 0.5, "reg_type": "entropy", "unbalanced": unbalanced, "max_iter": 20000}
    hosts, ours = (pot.solve(M, a, b, method=method, tol=1e-12, **options) for method in (None, "flash"))

    def kl(p, q):
        return (p * np.log(p / q) - p + q).sum()

    P, strengths = ours.plan, pot.utils.get_parameter_pair(unbalanced)
    total = (P * M).sum() + 0.5 * (P * np.log(P) - P).sum()
    total += strengths[0] * kl(P.sum(1), a) + strengths[1] * kl(P.sum(0), b)
    np.testing.assert_allclose(ours.value, total, rtol=1e-10)
    assert ours.value <= hosts.value + 1e-12
    np.testing.assert_allclose(ours.value, hosts.value, rtol=1e-4)
    np.testing.assert_allclose(ours.plan, hosts.plan, rtol=0.1, atol=1e-4)


def test_solve_with_a_reference(pot, problem):
    """A plan compared with any c, zeros in it included."""
    c = np.random.default_rng(5).random(problem.M.shape) + 0.1
    options = {"reg": problem.reg, "unbalanced": 0.7, "max_iter": 20000}
    hosts = pot.solve(problem.M, problem.a, problem.b, c=c, tol=1e-15, **options)
    ours = pot.solve(problem.M, problem.a, problem.b, c=c, tol=1e-13, method="flash", **options)
    same(ours, hosts)
    c[3, 4] = 0
    ours = pot.solve(problem.M, problem.a, problem.b, c=c, tol=1e-13, method="flash", **options)
    far = np.where(c > 0, problem.M, 1e3)
    hosts = pot.solve(far, problem.a, problem.b, c=c + (c == 0), tol=1e-15, **options)
    np.testing.assert_allclose(ours.plan, hosts.plan, rtol=1e-7, atol=1e-12)
    assert ours.plan[3, 4] == 0 and np.isfinite(ours.value)


# ----------------------------------------------------------------------------------------------------------- samples


@reg_types
@pytest.mark.parametrize("metric", [*METRICS, "chebyshev"])
def test_solve_sample(pot, problem, metric, reg_type):
    options = TIGHT | {"reg": 0.1, "metric": metric, "reg_type": reg_type}
    hosts, ours = (
        pot.solve_sample(problem.X, problem.Y, problem.a, problem.b, method=method, **options)
        for method in (None, "flash")
    )
    same(ours, hosts)


@pytest.mark.parametrize("metric", METRICS)
def test_solve_sample_lazily(pot, problem, metric):
    """The host gives no value; ours is that of the whole problem."""
    options = {"reg": 0.1, "metric": metric, "tol": 1e-12, "max_iter": 5000}
    hosts, ours = (
        pot.solve_sample(problem.X, problem.Y, problem.a, problem.b, lazy=True, method=method, **options)
        for method in (None, "flash")
    )
    np.testing.assert_allclose(ours.value_linear, hosts.value_linear, rtol=1e-9)
    np.testing.assert_allclose(ours.lazy_plan[:], hosts.lazy_plan[:], rtol=1e-7, atol=1e-12)
    assert ours.plan is None and hosts.value is None
    whole = pot.solve_sample(problem.X, problem.Y, problem.a, problem.b, **options)
    np.testing.assert_allclose(ours.value, whole.value, rtol=1e-9)
    np.testing.assert_allclose(ours.marginal_a, problem.a, rtol=1e-9)


@pytest.mark.parametrize("reg_type", REG_TYPES)
def test_unbalanced_samples_lazily(pot, problem, reg_type):
    """What the host does not have."""
    options = {"reg": 0.1, "unbalanced": 0.8, "reg_type": reg_type, "method": "flash", "tol": 1e-13}
    arguments = (problem.X, problem.Y, problem.a, 1.3 * problem.b)
    whole, lazy = pot.solve_sample(*arguments, **options), pot.solve_sample(*arguments, lazy=True, **options)
    np.testing.assert_allclose(lazy.lazy_plan[:], whole.plan, rtol=1e-8, atol=1e-13)
    np.testing.assert_allclose(lazy.value_linear, whole.value_linear, rtol=1e-10)


def test_a_lazy_solution_never_is_a_matrix(pot, problem, monkeypatch):
    """Neither the cost nor the plan, balanced or not, forward or backward."""
    torch = pytest.importorskip("torch")
    from flashot_backends.ops.sinkhorn import solution

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(pot.utils, "dist", refuse)
    monkeypatch.setattr(solution.Solution, "plan", refuse)
    X, Y = (torch.tensor(part, requires_grad=True) for part in (problem.X, problem.Y))
    for unbalanced in (None, 1.0):
        for grad in ("autodiff", "envelope", "last_step"):
            result = pot.solve_sample(X, Y, reg=0.5, unbalanced=unbalanced, lazy=True, method="flash", grad=grad)
            (by_x,) = torch.autograd.grad(result.value, X)
            assert by_x.isfinite().all()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("debias", [True, "split"])
def test_debiased(pot, problem, debias, lazy):
    if "debias" not in inspect.signature(pot.solve_sample).parameters:
        pytest.skip("this POT has no debias")
    options = TIGHT | {"reg": 0.1, "debias": debias}
    arguments, found = (problem.X, problem.Y, problem.a, problem.b), []
    for method in (None, "flash"):
        np.random.seed(0)
        found.append(pot.solve_sample(*arguments, method=method, lazy=lazy and method is not None, **options))
    hosts, ours = found
    np.testing.assert_allclose(ours.value, hosts.value, rtol=1e-8)
    np.testing.assert_allclose(ours.value_linear, hosts.value_linear, rtol=1e-8)
    assert set(ours.log) == set(hosts.log)
    if debias is True:
        assert (ours.lazy_plan if lazy else ours.plan).shape == problem.M.shape


def test_a_scaler_scales_both_clouds(pot, problem):
    if "scaler" not in inspect.signature(pot.solve_sample).parameters:
        pytest.skip("this POT has no scaler")
    ours = pot.solve_sample(problem.X, problem.Y, reg=0.1, method="flash", scaler=lambda points: 0.5 * points)
    np.testing.assert_allclose(ours.value, pot.solve_sample(problem.X / 2, problem.Y / 2, reg=0.1).value, rtol=1e-8)


def test_barycenters_of_samples_go_through(pot, problem):
    solvers = pytest.importorskip("ot.solvers")
    if not hasattr(solvers, "solve_bary_sample"):
        pytest.skip("this POT has no solve_bary_sample")
    options = {"n": 5, "reg": 0.1, "max_iter_bary": 4, "X_b_init": problem.X[:5].copy()}
    with np.errstate(invalid="ignore"):  # the host divides infinity by itself
        hosts, ours = (
            solvers.solve_bary_sample([problem.X, problem.Y], method=method, tol=1e-12, max_iter=3000, **options)
            for method in (None, "flash")
        )
    np.testing.assert_allclose(ours.X, hosts.X, rtol=1e-7)
    np.testing.assert_allclose(ours.value, hosts.value, rtol=1e-8)


# ----------------------------------------------------------------------------------------------------------- batches


@pytest.fixture
def batches(pot):
    """Points and weights of three problems."""
    if "method" not in inspect.signature(pytest.importorskip("ot.batch").solve_batch).parameters:
        pytest.skip("this POT calls it solver")
    rng = np.random.default_rng(0)
    a, b = rng.random((3, 6)) + 0.1, rng.random((3, 8)) + 0.1
    points = rng.random((3, 6, 2)), rng.random((3, 8, 2))
    return *points, a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)


@pytest.mark.parametrize("reg_type", ["kl", "entropy"])
@pytest.mark.parametrize("weighted", [True, False])
def test_solve_batch(pot, batches, reg_type, weighted):
    X, Y, a, b = batches
    weights = {"a": a, "b": b} if weighted else {}
    options = {"reg": 0.1, "reg_type": reg_type, "tol": 1e-12, "max_iter": 5000, **weights}
    M = pot.batch.dist_batch(X, Y)
    hosts, ours = (pot.batch.solve_batch(M, method=method, **options) for method in ("log_sinkhorn", "flash"))
    same(ours, hosts)
    same(pot.batch.solve_sample_batch(X, Y, method="flash", **options), hosts)
    assert type(ours.log["n_iter"]) is int


def test_the_batch_of_an_older_host(pot, problem):
    """POT 0.9.6 calls the method a solver."""
    batch = pytest.importorskip("ot.batch")
    if "solver" not in inspect.signature(batch.solve_batch).parameters:
        pytest.skip("this POT calls it method")
    M, options = np.stack([problem.M, 2 * problem.M]), {"tol": 1e-12, "max_iter": 5000}
    hosts, ours = (batch.solve_batch(M, 0.1, solver=name, **options) for name in ("log_sinkhorn", "flash"))
    same(ours, hosts)


def test_every_problem_of_a_batch_stops_by_itself(pot, batches):
    X, Y, a, b = batches
    M = pot.batch.dist_batch(X, Y)
    together = pot.batch.solve_batch(M, 0.05, a, b, method="flash", tol=1e-6)
    for k in range(3):
        alone = pot.batch.solve_batch(M[k : k + 1], 0.05, a[k : k + 1], b[k : k + 1], method="flash", tol=1e-6)
        np.testing.assert_allclose(together.plan[k], alone.plan[0], rtol=1e-10)
        assert alone.log["n_iter"] <= together.log["n_iter"]


@pytest.mark.parametrize(("metric", "p"), [("euclidean", 2), ("minkowski", 1), ("minkowski", 2), ("minkowski", 3),
                                           ("kl", 2)])  # fmt: skip
def test_metrics_of_a_batch(pot, batches, metric, p):
    X, Y, a, b = batches
    options = {"metric": metric, "p": p, "tol": 1e-12, "max_iter": 5000}
    hosts, ours = (
        pot.batch.solve_sample_batch(X + 0.1, Y + 0.1, 0.1, a, b, method=method, **options)
        for method in ("log_sinkhorn", "flash")
    )
    same(ours, hosts)


@pytest.mark.parametrize("iterations", [1, 11, 13])
def test_iterates_of_a_batch_are_those_of_the_host(pot, batches, iterations):
    X, Y, a, b = batches
    M = pot.batch.dist_batch(X, Y)
    options = {"tol": 0, "max_iter": iterations, "a": a, "b": b}
    with pytest.warns(UserWarning, match="did not converge"):
        ours = pot.batch.solve_batch(M, 0.1, method="flash", **options)
    hosts = pot.batch.solve_batch(M, 0.1, **options)
    same(ours, hosts)
    assert ours.log == hosts.log


@pytest.mark.parametrize("grad", ["detach", "autodiff", "envelope", "last_step"])
def test_a_batch_substituted(pot, batches, calls, grad):
    torch = pytest.importorskip("torch")
    X, Y, a, b = batches
    M, found = pot.batch.dist_batch(X, Y), []
    for substitute in ((), ("pot",)):
        leaves = [torch.tensor(part, requires_grad=True) for part in (M, a, b)]
        del calls[:]
        with flashot_backends.use(substitute=substitute):
            result = pot.batch.solve_batch(leaves[0], 0.1, *leaves[1:], grad=grad, tol=1e-9)
        assert bool(calls) == (bool(substitute) and grad != "last_step")
        by = None
        if result.value.requires_grad:
            by = torch.autograd.grad(result.value.sum(), leaves, allow_unused=True)
        found.append((result, by))
    (hosts, by), (ours, our_by) = found
    assert ours.log == hosts.log
    torch.testing.assert_close(ours.plan, hosts.plan, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(ours.potentials, hosts.potentials, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(our_by, by, rtol=1e-7, atol=1e-10)


# --------------------------------------------------------------------------------------------------------- gradients


def close(found, wanted, rtol=1e-8, weights=True):
    """Gradients by M, a and b; those by weights are determined along what keeps their mass."""
    for k, (ours, right) in enumerate(zip(found, wanted, strict=True)):
        if weights and k % 3:
            ours, right = (part - part.mean(-1, keepdim=True) for part in (ours, right))
        np.testing.assert_allclose(ours, right, rtol=rtol, atol=rtol)


def leaves_of(problem):
    torch = pytest.importorskip("torch")
    return [torch.tensor(part, requires_grad=True) for part in (problem.M, problem.a, problem.b)]


QUESTIONS = {"value": lambda r: r.value, "value_linear": lambda r: r.value_linear,
             "plan": lambda r: (r.plan * r.plan.detach().flip(0)).sum()}  # fmt: skip


@reg_types
def test_autodiff_is_the_hosts(pot, problem, reg_type):
    torch = pytest.importorskip("torch")
    found = []
    for method in (None, "flash"):
        leaves = leaves_of(problem)
        result = pot.solve(*leaves, reg=problem.reg, reg_type=reg_type, method=method, **TIGHT)
        found.append([torch.autograd.grad(ask(result), leaves, retain_graph=True) for ask in QUESTIONS.values()])
        assert all(part.requires_grad for part in result.potentials)
    for hosts, ours in zip(*found, strict=True):
        close(ours, hosts)


@reg_types
@pytest.mark.parametrize("grad", ["autodiff", "envelope"])
def test_the_values_derivative_by_finite_differences(pot, problem, reg_type, grad):
    """By weights, costs and reg. The host's "envelope" of "KL" has those of the entropy's value."""
    torch = pytest.importorskip("torch")
    leaves, reg = leaves_of(problem), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    options = TIGHT | {"reg_type": reg_type, "method": "flash"}
    result = pot.solve(*leaves, reg=reg, grad=grad, **options)
    found = torch.autograd.grad(result.value, [*leaves, reg])
    rng, step = np.random.default_rng(3), 1e-5
    along = [rng.standard_normal(leaf.shape) for leaf in leaves]
    along = [part - part.mean() if part.ndim == 1 else part for part in along]
    for k in range(4):
        sides = []
        for sign in (1, -1):
            parts, now = [problem.M, problem.a, problem.b], 0.1
            if k < 3:
                parts[k] = parts[k] + sign * step * along[k]
            else:
                now += sign * step
            sides.append(pot.solve(*parts, reg=now, **options).value)
        wanted = (found[k].numpy() * along[k]).sum() if k < 3 else float(found[3])
        np.testing.assert_allclose(wanted, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-7)


@reg_types
def test_envelope_and_detach_hold_everything_else(pot, problem, reg_type):
    for grad in ("envelope", "detach"):
        result = pot.solve(*leaves_of(problem), reg=0.1, reg_type=reg_type, method="flash", grad=grad)
        others = (result.plan, result.value_linear, *result.potentials)
        assert not any(part.requires_grad for part in others)
        assert result.value.requires_grad == (grad == "envelope")


@pytest.mark.parametrize("unbalanced", [None, 1.0])
def test_lazy_plans_are_held_too(pot, problem, unbalanced):
    torch = pytest.importorskip("torch")
    X, Y = (torch.tensor(part, requires_grad=True) for part in (problem.X, problem.Y))
    for grad in ("autodiff", "envelope", "detach"):
        result = pot.solve_sample(X, Y, reg=0.1, unbalanced=unbalanced, lazy=True, method="flash", grad=grad)
        assert result.lazy_plan[:2].requires_grad == (grad == "autodiff")


@reg_types
def test_the_last_step_is_one_more_iteration(pot, problem, reg_type):
    """Columns, then rows, from potentials that are held: everything that is returned is differentiated through it."""
    torch = pytest.importorskip("torch")
    leaves, reg = leaves_of(problem), 0.1
    result = pot.solve(*leaves, reg=reg, reg_type=reg_type, method="flash", grad="last_step", **TIGHT)
    found = [torch.autograd.grad(ask(result), leaves, retain_graph=True) for ask in QUESTIONS.values()]
    M, a, b = leaves = leaves_of(problem)
    u = result.potentials[0].detach()
    v = b.log() - torch.logsumexp(u[:, None] - M / reg, 0)
    u = a.log() - torch.logsumexp(v - M / reg, 1)
    P = torch.exp(u[:, None] + v - M / reg)
    reference = torch.ones_like(P) if reg_type == "entropy" else a[:, None] * b
    plain = pot.utils.OTResult(
        plan=P, value=(P * M).sum() + reg * (P * (P / reference).log()).sum(), value_linear=(P * M).sum()
    )
    for ask, ours in zip(QUESTIONS.values(), found, strict=True):
        close(ours, torch.autograd.grad(ask(plain), leaves, retain_graph=True), rtol=1e-7)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("lazy", [False, True])
def test_gradients_by_points(pot, problem, metric, lazy):
    torch = pytest.importorskip("torch")
    found = []
    if metric in ("cityblock", "cosine") and pot.__version__ < "0.9.6":
        pytest.skip("this POT takes that metric from scipy")
    for method in (None, "flash"):
        leaves = [torch.tensor(part, requires_grad=True) for part in (problem.X, problem.Y)]
        ours = {"method": method, "lazy": lazy} if method else {}
        result = pot.solve_sample(*leaves, metric=metric, reg=0.1, **ours, **TIGHT)
        plan = result.lazy_plan[:] if method and lazy else result.plan
        found.append(torch.autograd.grad(result.value + (plan * plan.detach().flip(0)).sum(), leaves))
    close(found[1], found[0], rtol=1e-7, weights=False)


@pytest.mark.parametrize("reg_type", REG_TYPES)
@pytest.mark.parametrize("unbalanced", [0.7, (INF, 0.5)], ids=str)
def test_gradients_of_unbalanced_values(pot, problem, reg_type, unbalanced):
    """By autodiff and, through the fixed point, by "envelope": those of what is returned."""
    torch = pytest.importorskip("torch")
    found = []
    options = {"reg": 0.1, "unbalanced": unbalanced, "reg_type": reg_type, "tol": 1e-14, "max_iter": 5000}
    for grad in ("autodiff", "envelope"):
        leaves = leaves_of(problem)
        result = pot.solve(*leaves, method="flash", grad=grad, **options)
        found.append(torch.autograd.grad(result.value, leaves))
        assert result.plan.requires_grad == (grad == "autodiff")
    for autodiff, envelope in zip(*found, strict=True):
        np.testing.assert_allclose(envelope, autodiff, rtol=1e-6, atol=1e-8)
    step, along = 1e-5, np.random.default_rng(0).standard_normal(problem.M.shape)
    up, down = (
        pot.solve(problem.M + sign * step * along, problem.a, problem.b, method="flash", **options).value
        for sign in (1, -1)
    )
    np.testing.assert_allclose((found[0][0].numpy() * along).sum(), (up - down) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("reg_type", ["kl", "entropy"])
@pytest.mark.parametrize("grad", ["autodiff", "envelope", "last_step", "detach"])
def test_gradients_of_a_batch(pot, batches, grad, reg_type):
    """The host's "autodiff" says what is right of values; its "envelope" leaves out a and b, its "last_step" M."""
    torch = pytest.importorskip("torch")
    X, Y, a, b = batches
    found = []
    for method, mode in (("log_sinkhorn", "autodiff"), ("flash", grad)):
        leaves = [torch.tensor(part, requires_grad=True) for part in (pot.batch.dist_batch(X, Y), a, b)]
        options = {"reg_type": reg_type, "tol": 1e-13, "max_iter": 5000}
        result = pot.batch.solve_batch(leaves[0], 0.1, *leaves[1:], method=method, grad=mode, **options)
        if mode == "detach":
            assert not (result.value.requires_grad or result.plan.requires_grad)
            return
        found.append(torch.autograd.grad(result.value.sum(), leaves, retain_graph=True))
        if mode == "autodiff":
            found[-1] += torch.autograd.grad(result.plan.square().sum(), leaves)
        else:
            assert result.plan.requires_grad == (mode == "last_step")
    if grad != "last_step":  # which is no derivative of the value
        close(found[1], found[0][: len(found[1])], rtol=1e-7)


# --------------------------------------------------------------------------------------------------- arrays and jax


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(pot, problem, dtype):
    a, b, M = (part.astype(dtype) for part in (problem.a, problem.b, problem.M))
    a, b = (part if dtype == "float64" else (part.astype("float32") / part.astype("float32").sum()) for part in (a, b))
    ours = pot.solve(M, a, b, reg=0.1, method="flash", tol=1e-6)
    exact = pot.solve(problem.M, problem.a, problem.b, reg=0.1, **TIGHT)
    digits = {"float16": 5e-3, "float32": 1e-4, "float64": 1e-4}[dtype]
    assert ours.plan.dtype == M.dtype and ours.value.dtype == M.dtype
    np.testing.assert_allclose(ours.value, exact.value, rtol=digits)


@reg_types
@pytest.mark.parametrize("grad", ["autodiff", "envelope", "last_step", "detach"])
def test_jax(pot, problem, reg_type, grad):
    """As torch has it, values and gradients, and inside of jit."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    options = {"reg": 0.1, "reg_type": reg_type, "method": "flash", "grad": grad, "tol": 1e-6}
    parts = [jax.numpy.asarray(part, jax.numpy.float32) for part in (problem.M, problem.a, problem.b)]

    def value(M, a, b):
        return pot.solve(M, a, b, **options).value

    found = jax.grad(value, argnums=(0, 1, 2))(*parts)
    leaves = [torch.tensor(np.asarray(part), requires_grad=True) for part in parts]
    result = pot.solve(*leaves, **options)
    np.testing.assert_allclose(value(*parts), result.value.detach(), rtol=1e-4)
    np.testing.assert_allclose(jax.jit(value)(*parts), value(*parts), rtol=1e-4)
    if grad == "detach":
        assert not any(np.any(np.asarray(part)) for part in found)
        return
    for ours, right in zip(found, torch.autograd.grad(result.value, leaves), strict=True):
        ours, right = (np.asarray(part) - (np.asarray(part).mean() if part.ndim == 1 else 0) for part in (ours, right))
        np.testing.assert_allclose(ours, right, rtol=2e-3, atol=2e-4)


def test_jax_samples_and_batches(pot, problem):
    jax = pytest.importorskip("jax")
    X, Y = (jax.numpy.asarray(part) for part in (problem.X, problem.Y))
    for metric in METRICS:
        ours = pot.solve_sample(X, Y, metric=metric, reg=0.3, method="flash", tol=1e-6)
        hosts = pot.solve_sample(problem.X, problem.Y, metric=metric, reg=0.3)
        assert isinstance(ours.plan, jax.Array)
        np.testing.assert_allclose(ours.value, hosts.value, rtol=1e-3)
    if hasattr(pot, "batch"):
        ours = pot.batch.solve_sample_batch(X[None], Y[None], 0.3, method="flash")
        hosts = pot.batch.solve_sample_batch(problem.X[None], problem.Y[None], 0.3)
        np.testing.assert_allclose(ours.value, hosts.value, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------- what is refused

BAD = [
    ({"reg": None}, ValueError, "reg is None; accepted with method='flash' is a positive number"),
    ({"reg": 0}, ValueError, "reg is 0"),
    ({"reg": -1.0}, ValueError, "reg is -1.0; accepted is a positive"),
    ({"reg_type": "L2"}, ValueError, "reg_type is 'L2'; accepted with method='flash' is one of"),
    ({"reg_type": (abs, abs)}, ValueError, "reg_type is"),
    ({"unbalanced": 1.0, "unbalanced_type": "TV"}, ValueError, "unbalanced_type is 'TV'"),
    ({"unbalanced": -1.0}, ValueError, "reg_m is -1.0|unbalanced is -1.0"),
    ({"unbalanced": (1.0, 2.0, 3.0)}, ValueError, "accepted are positive numbers, one or a pair"),
    ({"plan_init": np.ones((17, 23))}, ValueError, "plan_init is given"),
    ({"c": np.ones((17, 23))}, ValueError, "c is given"),
    ({"c": np.ones((3, 4)), "unbalanced": 1.0}, ValueError, r"c has shape \(3, 4\); accepted is \(17, 23\)"),
    ({"grad": "some"}, ValueError, "grad is 'some'"),
    ({"max_iter": 0}, ValueError, "max_iter is 0; accepted is a whole number from 1"),
    ({"tol": float("nan")}, ValueError, "tol is nan"),
    ({"potentials_init": 3}, TypeError, "potentials_init is a int; accepted is a pair"),
    ({"potentials_init": (np.ones(3), np.ones(3))}, ValueError, "potentials_init has shapes"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_arguments(pot, problem, arguments, kind, message):
    if "grad" in arguments and "grad" not in inspect.signature(pot.solve).parameters:
        pytest.skip("this POT has no grad")
    with pytest.raises(kind, match=message):
        pot.solve(problem.M, problem.a, problem.b, **{"reg": 0.1, "method": "flash"} | arguments)


def test_bad_samples(pot, problem):
    with pytest.raises(ValueError, match="metric is 'chebyshev'; accepted with lazy=True"):
        pot.solve_sample(problem.X, problem.Y, reg=0.1, metric="chebyshev", lazy=True, method="flash")
    with pytest.raises(ValueError, match="masses of a and b differ"):
        pot.solve_sample(problem.X, problem.Y, problem.a, 2 * problem.b, reg=0.1, method="flash")


def test_bad_batches(pot, batches):
    X, Y, a, _ = batches
    for arguments, message in (
        (({"M": np.ones((3, 4))}), "M has shape"),
        (({"a": a[:, :3]}), r"a has shape \(3, 3\); accepted is \(3, 6\)"),
        (({"reg": None}), "reg is None"),
        (({"grad": "some"}), "grad is 'some'"),
        (({"reg_type": "l2"}), "reg_type is 'l2'"),
    ):
        given = {"M": pot.batch.dist_batch(X, Y), "reg": 0.1, "method": "flash"} | arguments
        with pytest.raises(ValueError, match=message):
            pot.batch.solve_batch(**given)


def test_switched_off_it_is_the_hosts(pot, problem, calls):
    """Which does not know the method; older ones do not look at it."""
    flashot_backends.disable()
    for function, arguments in ((pot.solve, (problem.M,)), (pot.solve_sample, (problem.X, problem.Y))):
        with contextlib.suppress(ValueError):
            function(*arguments, reg=0.1, method="flash")
    assert not calls
    flashot_backends.enable()


def test_solve_substituted(pot, problem, calls):
    """It calls a method that is substituted; without a balance, its own."""
    options = {"reg": problem.reg, "tol": 1e-9}
    for more, ours in (({}, True), ({"unbalanced": 1.0}, False)):
        hosts = pot.solve(problem.M, problem.a, problem.b, **options, **more)
        del calls[:]
        with flashot_backends.use(substitute=["pot"]):
            found = pot.solve(problem.M, problem.a, problem.b, **options, **more)
        assert bool(calls) == ours
        same(found, hosts)
