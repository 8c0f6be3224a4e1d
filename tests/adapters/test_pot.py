"""The method "flash" of ``ot.sinkhorn`` and ``ot.sinkhorn2`` against the host's own ``sinkhorn_log``, in float64."""

import contextlib
import io
import warnings

import numpy as np
import pytest

CLOSE = {"rtol": 1e-9, "atol": 1e-14}


def both(pot, problem, **options):
    """The host's plan and log, and ours."""
    host = pot.bregman.sinkhorn_log(problem.a, problem.b, problem.M, problem.reg, log=True, **options)
    ours = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash", log=True, **options)
    return host, ours


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (63, 1), (17, 23), (100, 130)])
def test_plan_and_log_are_the_hosts(pot, make_problem, n, m):
    (plan, log), (ours, our_log) = both(pot, make_problem(n, m))
    np.testing.assert_allclose(ours, plan, **CLOSE)
    assert set(our_log) == set(log)
    assert our_log["niter"] == log["niter"]
    assert len(our_log["err"]) == len(log["err"])
    np.testing.assert_allclose(our_log["err"], log["err"], rtol=1e-6, atol=1e-13)
    for key in ("log_u", "log_v", "u", "v"):
        np.testing.assert_allclose(our_log[key], log[key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("iterations", [1, 2, 10, 11, 12, 25])
def test_iterates_are_the_hosts(pot, problem, iterations):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (plan, log), (ours, our_log) = both(pot, problem, numItermax=iterations, stopThr=0)
    np.testing.assert_allclose(ours, plan, **CLOSE)
    assert our_log["niter"] == log["niter"] == iterations - 1
    np.testing.assert_allclose(our_log["err"], log["err"], rtol=1e-9)


def test_warm_start_continues_the_hosts_iterates(pot, problem):
    start = (np.linspace(-1, 1, 17), np.zeros(23))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (plan, log), (ours, our_log) = both(pot, problem, numItermax=7, stopThr=0, warmstart=start)
    np.testing.assert_allclose(ours, plan, **CLOSE)
    np.testing.assert_allclose(our_log["log_u"], log["log_u"], rtol=1e-10)


def test_warm_start_from_our_own_log_stops_at_once(pot, problem):
    _, log = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash", log=True)
    again = (log["log_u"], log["log_v"])
    _, second = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg, method="flash", log=True, warmstart=again)
    assert second["niter"] == 0


@pytest.mark.parametrize("empty", [[], None, np.zeros(0)])
def test_empty_weights_are_uniform(pot, problem, empty):
    plan = pot.sinkhorn(empty, empty, problem.M, problem.reg, method="flash")
    np.testing.assert_allclose(plan, pot.bregman.sinkhorn_log([], [], problem.M, problem.reg), **CLOSE)


def test_lists_are_arrays(pot):
    plan = pot.sinkhorn([0.5, 0.5], [0.5, 0.5], [[0, 1], [1, 0]], 1, method="FLASH")
    np.testing.assert_allclose(plan, [[0.36552929, 0.13447071], [0.13447071, 0.36552929]], rtol=1e-7)


def test_zero_weights_leave_their_rows_and_columns_empty(pot, problem):
    a, b = problem.a.copy(), problem.b.copy()
    a[3] = b[[0, 5]] = 0  # the host counts the empty row in its first update only, so the ways differ and the ends meet
    zeros = problem._replace(a=a / a.sum(), b=b / b.sum())
    with np.errstate(divide="ignore"):
        (plan, log), (ours, our_log) = both(pot, zeros)
    np.testing.assert_allclose(ours, plan, rtol=1e-7, atol=1e-14)
    assert (ours[3] == 0).all()
    assert (ours[:, [0, 5]] == 0).all()
    assert abs(our_log["niter"] - log["niter"]) <= 10
    assert our_log["log_u"][3] == -np.inf


def test_forbidden_pairs_carry_nothing(pot, problem):
    M = problem.M.copy()
    M[2, 3:9] = np.inf
    plan, log = pot.sinkhorn(problem.a, problem.b, M, problem.reg, method="flash", log=True)
    assert (plan[2, 3:9] == 0).all()
    np.testing.assert_allclose(plan.sum(1), problem.a, rtol=1e-9)
    assert np.isfinite(pot.sinkhorn2(problem.a, problem.b, M, problem.reg, method="flash"))
    assert log["err"][-1] < 1e-9


def test_small_regularisation_stays_finite(pot, problem):
    with pytest.warns(UserWarning, match="did not converge"), np.errstate(over="ignore"):
        (plan, _), (ours, _) = both(pot, problem._replace(reg=1e-4))
    np.testing.assert_allclose(ours, plan, rtol=1e-7, atol=1e-14)


def test_loss_is_the_hosts(pot, problem):
    arguments = (problem.a, problem.b, problem.M, problem.reg)
    loss, log = pot.sinkhorn2(*arguments, method="flash", log=True)
    expected, host_log = pot.sinkhorn2(*arguments, method="sinkhorn_log", log=True)
    assert isinstance(loss, type(expected))
    np.testing.assert_allclose(loss, expected, rtol=1e-10)
    assert set(log) == set(host_log)
    np.testing.assert_allclose(pot.sinkhorn2(*arguments, method="flash"), loss, rtol=1e-12)


@pytest.mark.parametrize("entry", ["sinkhorn", "sinkhorn2"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_several_histograms_give_several_losses(pot, problem, entry, k):
    B = np.random.default_rng(1).random((23, k)) + 0.01
    B /= B.sum(0)
    losses, log = getattr(pot, entry)(problem.a, B, problem.M, problem.reg, method="flash", log=True)
    solo = [pot.bregman.sinkhorn_log(problem.a, B[:, i], problem.M, problem.reg, log=True) for i in range(k)]
    np.testing.assert_allclose(losses, [(plan * problem.M).sum() for plan, _ in solo], rtol=1e-10)
    np.testing.assert_allclose(log["log_u"], np.stack([one["log_u"] for _, one in solo], 1), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(log["v"], np.stack([one["v"] for _, one in solo], 1), rtol=1e-7)
    assert set(log) == {"log_u", "log_v", "u", "v"}


@pytest.mark.parametrize("form", ["pairs", "matrices"])
def test_several_histograms_warm_start(pot, problem, form):
    B = np.random.default_rng(1).random((23, 2)) + 0.01
    B /= B.sum(0)
    arguments = (problem.a, B, problem.M, problem.reg)
    losses, log = pot.sinkhorn(*arguments, method="flash", log=True)
    pairs = [(log["log_u"][:, i], log["log_v"][:, i]) for i in range(2)]
    start = pairs if form == "pairs" else (log["log_u"], log["log_v"])
    again = pot.sinkhorn(*arguments, method="flash", warmstart=start, numItermax=1)
    np.testing.assert_allclose(again, losses, rtol=1e-8)
    np.testing.assert_allclose(pot.sinkhorn(*arguments, method="sinkhorn_log", warmstart=pairs), again, rtol=1e-8)


def test_the_hosts_warning(pot, problem):
    arguments = (problem.a, problem.b, problem.M, problem.reg)
    with pytest.warns(UserWarning, match="did not") as ours:
        pot.sinkhorn(*arguments, method="flash", numItermax=3)
    with pytest.warns(UserWarning, match="did not") as hosts:
        pot.sinkhorn(*arguments, method="sinkhorn_log", numItermax=3)
    assert [str(w.message) for w in ours] == [str(w.message) for w in hosts]
    assert [w.category for w in ours] == [w.category for w in hosts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pot.sinkhorn(*arguments, method="flash", numItermax=3, warn=False)
        pot.sinkhorn2(*arguments, method="flash", numItermax=3)  # its default is not to warn


def test_verbose_prints_the_hosts_table(pot, problem):
    printed = {}
    for method in ("flash", "sinkhorn_log"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            pot.sinkhorn(problem.a, problem.b, problem.M, 0.01, method=method, verbose=True, numItermax=450, warn=False)
        printed[method] = out.getvalue().splitlines()
    assert len(printed["flash"]) == len(printed["sinkhorn_log"]) > 45
    for ours, hosts in zip(printed["flash"], printed["sinkhorn_log"], strict=True):
        assert ours.split("|")[0] == hosts.split("|")[0]


def test_verbose_tells_where_every_histogram_stopped(pot, problem, capsys):
    B = np.stack([problem.b, problem.b[::-1]], 1)
    pot.sinkhorn(problem.a, B, problem.M, problem.reg, method="flash", verbose=True)
    counts = [int(line.split("|")[0]) for line in capsys.readouterr().out.splitlines() if line[:5].strip().isdigit()]
    solo = [pot.bregman.sinkhorn_log(problem.a, b, problem.M, problem.reg, log=True)[1]["niter"] for b in B.T]
    assert counts == solo


def test_every_argument_by_position(pot, problem):
    arguments = (problem.a, problem.b, problem.M, problem.reg, "flash", np.int64(50), 1e-3, False, True, False, None)
    plan, log = pot.sinkhorn(*arguments)
    assert log["err"][-1] < 1e-3 <= log["err"][-2]
    np.testing.assert_allclose(plan.sum(1), problem.a, rtol=1e-9)


def test_regularisation_may_be_any_number(pot, problem):
    expected = pot.sinkhorn(problem.a, problem.b, problem.M, 0.05, method="flash")
    for reg in (np.float64(0.05), np.array(0.05), np.array([0.05])):
        np.testing.assert_array_equal(pot.sinkhorn(problem.a, problem.b, problem.M, reg, method="flash"), expected)


def test_a_kernel_by_name(pot, problem):
    arguments = (problem.a, problem.b, problem.M, problem.reg)
    by_name = pot.sinkhorn(*arguments, method="flash", backend="reference", precision="high")
    np.testing.assert_allclose(by_name, pot.sinkhorn(*arguments, method="flash"), rtol=1e-9)


def test_switched_off_it_is_unknown(pot, problem):
    import flashot_backends

    captured = pot.sinkhorn
    flashot_backends.disable()
    with pytest.raises(ValueError, match="Unknown method 'flash'"):
        captured(problem.a, problem.b, problem.M, problem.reg, method="flash")
    flashot_backends.enable()
    captured(problem.a, problem.b, problem.M, problem.reg, method="flash")
