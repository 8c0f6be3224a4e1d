"""``ot.unbalanced.sinkhorn_unbalanced`` and its loss with ``method="flash"``, against the host's loop at its end."""

import numpy as np
import pytest

import flashot_backends

pytestmark = pytest.mark.usefixtures("complete")
INF = float("inf")
STRENGTHS = [1.0, 40.0, (0.3, 2.0), [0.7], (INF, 0.5), (0.5, INF), np.array([0.4, 0.9])]
strengths = pytest.mark.parametrize("reg_m", STRENGTHS, ids=str)
kinds = pytest.mark.parametrize("reg_type", ["kl", "entropy"])


def both(pot, entry, a, b, M, reg, reg_m, **options):
    """The host's answer and ours, both converged."""
    function = getattr(pot.unbalanced, entry)
    hosts = function(a, b, M, reg, reg_m, log=True, stopThr=1e-16, numItermax=50000, **options)
    ours = function(a, b, M, reg, reg_m, log=True, stopThr=1e-13, numItermax=5000, method="flash", **options)
    return hosts, ours


def same_logs(ours, hosts):
    assert set(ours) == set(hosts)
    for key in set(hosts) - {"err"}:
        np.testing.assert_allclose(ours[key], hosts[key], rtol=1e-7, atol=1e-8)


@kinds
@strengths
@pytest.mark.parametrize("entry", ["sinkhorn_unbalanced", "sinkhorn_unbalanced2"])
def test_plan_loss_and_log(pot, problem, entry, reg_m, reg_type):
    (expected, host_log), (found, log) = both(
        pot, entry, problem.a, 1.4 * problem.b, problem.M, problem.reg, reg_m, reg_type=reg_type
    )
    assert type(found) is type(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)
    same_logs(log, host_log)


@pytest.mark.parametrize("returnCost", ["linear", "total"])
def test_costs(pot, problem, returnCost):
    arguments = (problem.a, 1.4 * problem.b, problem.M, problem.reg, (INF, 0.5))
    options = {"returnCost": returnCost}
    hosts = pot.unbalanced.sinkhorn_unbalanced2(*arguments, stopThr=1e-16, numItermax=20000, **options)
    ours = pot.unbalanced.sinkhorn_unbalanced2(*arguments, stopThr=1e-13, method="flash", **options)
    np.testing.assert_allclose(ours, hosts, rtol=1e-9)


@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_stabilized", "sinkhorn_translation_invariant"])
def test_every_method_of_the_host_ends_where_ours_does(pot, problem, method):
    arguments = (problem.a, problem.b, problem.M, problem.reg, 1.0)
    hosts = pot.unbalanced.sinkhorn_unbalanced(*arguments, method=method, stopThr=1e-14, numItermax=20000)
    ours = pot.unbalanced.sinkhorn_unbalanced(*arguments, method="flash", stopThr=1e-13)
    np.testing.assert_allclose(ours, hosts, rtol=1e-7, atol=1e-12)


@strengths
@pytest.mark.parametrize("k", [1, 3])
def test_several_histograms(pot, problem, reg_m, k):
    """The host compares with 1 then, whatever reg_type says."""
    B = np.stack([problem.b * scale for scale in (1.0, 1.3, 0.6)[:k]], 1)
    (expected, host_log), (found, log) = both(
        pot, "sinkhorn_unbalanced2", problem.a, B, problem.M, problem.reg, reg_m, reg_type="entropy"
    )
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    same_logs(log, host_log)
    for j in range(k):
        alone = pot.unbalanced.sinkhorn_unbalanced2(
            problem.a, B[:, j], problem.M, problem.reg, reg_m, reg_type="entropy", method="flash", stopThr=1e-13
        )
        np.testing.assert_allclose(found[j], alone, rtol=1e-9)


def test_a_reference(pot, problem):
    c = np.random.default_rng(5).random(problem.M.shape) + 0.1
    (expected, host_log), (found, log) = both(
        pot, "sinkhorn_unbalanced", problem.a, problem.b, problem.M, problem.reg, 0.7, c=c
    )
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)
    same_logs(log, host_log)


@kinds
def test_weights_of_zero(pot, problem, reg_type):
    """They are absent; the host's loop has no number for them."""
    a, b = problem.a.copy(), problem.b.copy()
    a[2] = b[5] = 0
    options = {"reg_type": reg_type, "log": True, "stopThr": 1e-13, "method": "flash"}
    found, log = pot.unbalanced.sinkhorn_unbalanced(a, b, problem.M, problem.reg, (0.8, 1.2), **options)
    rows, columns = a > 0, b > 0
    small, rest = pot.unbalanced.sinkhorn_unbalanced(
        a[rows], b[columns], problem.M[np.ix_(rows, columns)], problem.reg, (0.8, 1.2), **options
    )
    np.testing.assert_allclose(found[np.ix_(rows, columns)], small, rtol=1e-9)
    assert found.sum() == pytest.approx(small.sum())
    for key in ("cost", "total_cost"):
        np.testing.assert_allclose(log[key], rest[key], rtol=1e-8, atol=1e-12)


@kinds
def test_small_regularisation(pot, problem, reg_type):
    """Where the host's exp(−M/reg) is nothing: the conditions of the optimum hold."""
    reg, reg_m = 1e-3, 0.5
    P = pot.unbalanced.sinkhorn_unbalanced(
        problem.a, problem.b, problem.M, reg, reg_m, reg_type=reg_type, method="flash", numItermax=20000, stopThr=1e-13
    )
    reference = problem.a[:, None] * problem.b if reg_type == "kl" else 1.0
    slope = problem.M + reg * np.log(np.maximum(P, 1e-300) / reference)
    slope += reg_m * (np.log(P.sum(1) / problem.a)[:, None] + np.log(P.sum(0) / problem.b))
    assert np.abs(slope[P > 1e-12]).max() < 1e-8


@kinds
@pytest.mark.usefixtures("lazy_tensors")
def test_a_lazy_cost(pot, problem, reg_type):
    from flashot_backends.adapters.pot import lazy_cost

    lazy, options = lazy_cost(problem.X, problem.Y), {"reg_type": reg_type, "log": True, "method": "flash"}
    arguments = (problem.a, 1.4 * problem.b)
    plan, log = pot.unbalanced.sinkhorn_unbalanced(*arguments, lazy, problem.reg, 0.7, stopThr=1e-13, **options)
    whole, its = pot.unbalanced.sinkhorn_unbalanced(*arguments, problem.M, problem.reg, 0.7, stopThr=1e-13, **options)
    np.testing.assert_allclose(plan[:], whole, rtol=1e-9)
    same_logs(log, its)
    with pytest.raises(ValueError, match="M is a lazy cost and method is 'sinkhorn'"):
        pot.unbalanced.sinkhorn_unbalanced(*arguments, lazy, problem.reg, 0.7)
    with pytest.raises(ValueError, match="c is given and M is a lazy cost"):
        pot.unbalanced.sinkhorn_unbalanced(*arguments, lazy, 1.0, 1.0, c=problem.M, method="flash")


@kinds
@pytest.mark.parametrize("histograms", [0, 2])
def test_warm_start(pot, problem, reg_type, histograms):
    b = problem.b if not histograms else np.stack([problem.b, 1.2 * problem.b], 1)
    arguments = (problem.a, b, problem.M, problem.reg, 0.7)
    options = {"reg_type": reg_type, "log": True, "method": "flash"}
    first, log = pot.unbalanced.sinkhorn_unbalanced2(*arguments, stopThr=1e-13, **options)
    start = (log["logu"], log["logv"])
    options |= {"numItermax": 1, "warmstart": start}
    again, log = pot.unbalanced.sinkhorn_unbalanced2(*arguments, stopThr=1e-11, **options)
    np.testing.assert_allclose(again, first, rtol=1e-9)
    assert np.max(log["err"]) < 1e-11
    if not histograms:  # with which the host's loop takes no start
        host = pot.unbalanced.sinkhorn_unbalanced2(*arguments, reg_type=reg_type, numItermax=2, warmstart=start)
        np.testing.assert_allclose(host, first, rtol=1e-7)


def test_warning_table_and_uniform_weights(pot, problem, capsys):
    with pytest.warns(UserWarning, match="did not converge") as said:
        pot.unbalanced.sinkhorn_unbalanced([], [], problem.M, 0.01, 50.0, method="flash", numItermax=2)
    assert said[0].filename == __file__
    ours = pot.unbalanced.sinkhorn_unbalanced([], [], problem.M, 0.1, 1.0, method="flash", stopThr=1e-13, verbose=True)
    assert capsys.readouterr().out.startswith("It.  |Err")
    hosts = pot.unbalanced.sinkhorn_unbalanced([], [], problem.M, 0.1, 1.0, stopThr=1e-16, numItermax=20000)
    np.testing.assert_allclose(ours, hosts, rtol=1e-8)


@kinds
@pytest.mark.parametrize("reg_m", [0.7, (0.3, 2.0), (INF, 0.5)], ids=str)
def test_gradients(pot, problem, reg_type, reg_m):
    """By M, a, b and reg, of everything that the host's own loop differentiates."""
    torch = pytest.importorskip("torch")
    found = []
    for method, threshold in (("sinkhorn", 1e-16), ("flash", 1e-14)):
        M, a, b = (torch.tensor(part, requires_grad=True) for part in (problem.M, problem.a, 1.4 * problem.b))
        reg = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        options = {"method": method, "reg_type": reg_type, "log": True, "stopThr": threshold, "numItermax": 3000}
        plan, log = pot.unbalanced.sinkhorn_unbalanced(a, b, M, reg, reg_m, **options)
        results = [(plan * plan.detach().flip(0)).sum(), log["cost"], log["total_cost"], log["logu"].sum()]
        found.append([torch.autograd.grad(result, (M, a, b, reg), retain_graph=True) for result in results])
    for hosts, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, hosts, rtol=1e-6, atol=1e-8)


def test_gradients_pass_weights_of_zero(pot, problem):
    torch = pytest.importorskip("torch")
    a = torch.tensor(problem.a)
    a[2] = 0
    a.requires_grad_()
    b, M = torch.tensor(problem.b), torch.tensor(problem.M, requires_grad=True)
    for reg_type in ("kl", "entropy"):
        options = {"method": "flash", "reg_type": reg_type, "log": True}
        plan, log = pot.unbalanced.sinkhorn_unbalanced(a, b, M, 0.1, (INF, 0.7), **options)
        potential = log["logu"][torch.arange(17) != 2].sum()
        for result in (plan.square().sum(), log["cost"], log["total_cost"], potential):
            by_a, by_M = torch.autograd.grad(result, (a, M), retain_graph=True)
            assert by_a.isfinite().all() and by_M.isfinite().all() and by_a[2] == 0 and (by_M[2] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtypes(pot, problem, dtype):
    M = problem.M.astype(dtype)
    a, b = (part.astype("float32") for part in (problem.a, problem.b))
    found, log = pot.unbalanced.sinkhorn_unbalanced(a, b, M, 0.1, 0.7, method="flash", log=True)
    exact = pot.unbalanced.sinkhorn_unbalanced(problem.a, problem.b, problem.M, 0.1, 0.7, stopThr=1e-14)
    assert found.dtype == M.dtype and log["logu"].dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=2e-2 if dtype == "float16" else 1e-4, atol=1e-5)


def test_jax(pot, problem):
    jax = pytest.importorskip("jax")
    parts = [jax.numpy.asarray(part, jax.numpy.float32) for part in (problem.a, problem.b, problem.M)]
    found = pot.unbalanced.sinkhorn_unbalanced(*parts, 0.1, 0.7, method="flash")
    exact = pot.unbalanced.sinkhorn_unbalanced(problem.a, problem.b, problem.M, 0.1, 0.7, stopThr=1e-14)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-5)
    by = jax.grad(lambda M: pot.unbalanced.sinkhorn_unbalanced2(*parts[:2], M, 0.1, 0.7, method="flash"))(parts[2])
    assert np.isfinite(by).all() and np.abs(by).max() > 0


@pytest.mark.parametrize("method", ["flash", "sinkhorn"])
def test_domain_adaptation(pot, problem, method, calls):
    """The class hands its method through."""
    transport = pot.da.UnbalancedSinkhornTransport(reg_e=0.1, reg_m=0.7, method=method, max_iter=5000, tol=1e-13)
    transport.fit(Xs=problem.X, Xt=problem.Y)
    assert bool(calls) == (method == "flash")
    expected = pot.unbalanced.sinkhorn_unbalanced([], [], problem.M, 0.1, 0.7, stopThr=1e-16, numItermax=20000)
    np.testing.assert_allclose(transport.coupling_, expected, rtol=1e-7)
    assert transport.transform(Xs=problem.X).shape == problem.X.shape


def test_substituted_it_stays_with_the_host(pot, problem, calls):
    """Its plain loop ends elsewhere where it is cut off, and so would ours."""
    arguments = (problem.a, problem.b, problem.M, problem.reg, 1.0)
    hosts = pot.unbalanced.sinkhorn_unbalanced(*arguments)
    with flashot_backends.use(substitute=["pot"]):
        np.testing.assert_array_equal(pot.unbalanced.sinkhorn_unbalanced(*arguments), hosts)
    assert not calls


BAD = [
    ({"reg_type": "l2"}, ValueError, "reg_type is 'l2'; accepted with method='flash' is one of"),
    ({"reg_m": 0}, ValueError, "reg_m is 0; accepted are positive numbers"),
    ({"reg_m": (1.0, -1.0)}, ValueError, "reg_m is"),
    ({"reg_m": (1.0, 2.0, 3.0)}, ValueError, "accepted are positive numbers, one or a pair"),
    ({"reg_m": "much"}, TypeError, "reg_m is 'much'"),
    ({"c": np.ones((17, 23)), "reg_type": "entropy"}, ValueError, "c is given and reg_type is 'entropy'"),
    ({"c": np.ones((2, 2))}, ValueError, r"c has shape \(2, 2\); accepted is \(17, 23\)"),
    ({"tau": 3}, TypeError, "unknown argument 'tau'"),
    ({"numItermax": 0}, ValueError, "numItermax is 0"),
    ({"warmstart": (np.ones(3), np.ones(4))}, ValueError, "warmstart has shapes"),
    ({"warmstart": 7}, TypeError, "warmstart is a int"),
    ({"reg": -1.0}, ValueError, "reg is -1.0"),
    ({"a": np.ones(3)}, ValueError, r"a has shape \(3,\)"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_arguments(pot, problem, arguments, kind, message):
    given = {"a": problem.a, "b": problem.b, "M": problem.M, "reg": 0.1, "reg_m": 1.0, "method": "flash"} | arguments
    with pytest.raises(kind, match=message):
        pot.unbalanced.sinkhorn_unbalanced(**given)


def test_bad_costs_and_derivatives(pot, problem):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="returnCost is 'all'; accepted is one of"):
        pot.unbalanced.sinkhorn_unbalanced2(problem.a, problem.b, problem.M, 1.0, 1.0, method="flash", returnCost="all")
    parts, reg_m = [torch.tensor(part) for part in (problem.a, problem.b, problem.M)], torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="reg_m requires a gradient"):
        pot.unbalanced.sinkhorn_unbalanced(*parts, 1.0, reg_m, method="flash")
