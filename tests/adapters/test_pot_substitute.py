"""POT in ``substitute``: its own methods give the host's answers on our kernels, or stay with the host and say why."""

import logging

import numpy as np
import pytest

import flashot_backends


def both(pot, entry, problem, b=None, **options):
    """The host's answer, then the substituted one."""
    arguments = (problem.a, problem.b if b is None else b, problem.M, problem.reg)
    expected = getattr(pot, entry)(*arguments, log=True, **options)
    with flashot_backends.use(substitute=["pot"]):
        return expected, getattr(pot, entry)(*arguments, log=True, **options)


def assert_same_logs(ours, hosts):
    assert set(ours) == set(hosts)
    for key, expected in hosts.items():
        if key in ("niter", "n_iter"):
            assert ours[key] == expected
        elif key == "err":
            np.testing.assert_allclose(ours[key], expected, rtol=1e-5, atol=1e-12)
        elif key == "warmstart":
            assert all(mine is ours[name] for mine, name in zip(ours[key], ("alpha", "beta"), strict=True))
        else:
            np.testing.assert_allclose(ours[key], expected, rtol=1e-7)


@pytest.mark.parametrize("entry", ["sinkhorn", "sinkhorn2"])
@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_log", "sinkhorn_stabilized"])
def test_same_answer_and_log(pot, problem, calls, entry, method):
    (expected, host_log), (ours, log) = both(pot, entry, problem, method=method)
    assert calls
    np.testing.assert_allclose(ours, expected, rtol=1e-7)
    assert_same_logs(log, host_log)


@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_log", "sinkhorn_stabilized"])
def test_same_iterates_from_a_warm_start(pot, problem, method):
    start = (np.linspace(-0.1, 0.1, 17), np.linspace(0, 0.1, 23))
    with pytest.warns(UserWarning, match="did not converge"):
        (expected, host_log), (ours, log) = both(pot, "sinkhorn", problem, method=method, warmstart=start, numItermax=6)
    np.testing.assert_allclose(ours, expected, rtol=1e-9)
    assert_same_logs(log, host_log)


def test_the_default_call(pot, problem, calls):
    expected = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg)
    with flashot_backends.use(substitute=["pot"]):
        ours = pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg)
    assert calls
    np.testing.assert_allclose(ours, expected, rtol=1e-7)


@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_log"])
@pytest.mark.parametrize("k", [2, 5])
def test_several_histograms(pot, problem, calls, method, k):
    B = np.random.default_rng(0).random((23, k)) + 0.01
    (expected, host_log), (ours, log) = both(pot, "sinkhorn", problem, B / B.sum(0), method=method)
    assert calls
    np.testing.assert_allclose(ours, expected, rtol=1e-7)
    assert_same_logs(log, host_log)


def test_print_period(pot, problem):
    (_, host_log), (_, log) = both(pot, "sinkhorn", problem, method="sinkhorn_stabilized", print_period=7)
    assert log["n_iter"] == host_log["n_iter"]
    assert len(log["err"]) == len(host_log["err"])


def test_another_method_stays(pot, problem, calls, caplog):
    from flashot_backends.adapters import pot_arrays as adapter

    adapter.say_once.cache_clear()
    with caplog.at_level(logging.INFO, "flashot_backends"), flashot_backends.use(substitute=["pot"]):
        for _ in range(2):
            pot.sinkhorn(problem.a, problem.b, problem.M, 0.5, method="greenkhorn")
    assert not calls
    said = [record.message for record in caplog.records if "greenkhorn" in record.message]
    assert len(said) == 1
    assert "stopping rule" in said[0]


def test_a_method_made_of_others_calls_ours(pot, problem, calls):
    (expected, _), (ours, _) = both(pot, "sinkhorn", problem, method="sinkhorn_epsilon_scaling")
    assert calls
    np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", ["sinkhorn_log", "sinkhorn_knopp", "sinkhorn_stabilized"])
def test_methods_by_themselves(pot, problem, calls, name):
    """As ``ot.solve`` and others call them."""
    method, arguments = getattr(pot.bregman, name), (problem.a, problem.b, problem.M, problem.reg)
    expected, host_log = method(*arguments, log=True)
    assert not calls
    with flashot_backends.use(substitute=["pot"]):
        ours, log = method(*arguments, log=True)
    assert calls
    np.testing.assert_allclose(ours, expected, rtol=1e-7)
    assert_same_logs(log, host_log)


def test_what_we_refuse_stays(pot, problem, calls):
    lighter = problem._replace(b=problem.b * 0.9)
    with pytest.warns(UserWarning, match="did not converge"):
        (expected, _), (ours, _) = both(pot, "sinkhorn", lighter, numItermax=20)
    assert not calls
    np.testing.assert_array_equal(ours, expected)


def test_mixed_dtypes_stay(pot, problem):
    (expected, _), (ours, _) = both(pot, "sinkhorn", problem._replace(M=problem.M.astype(np.float32)))
    np.testing.assert_array_equal(ours, expected)


def test_a_kernel_named_in_the_settings_must_exist(pot, problem):
    with flashot_backends.use(substitute=["pot"], backend=["triton"]), pytest.raises(ValueError, match="triton"):
        pot.sinkhorn(problem.a, problem.b, problem.M, problem.reg)


@pytest.mark.usefixtures("lazy_tensors")
def test_a_lazy_cost_needs_no_method_then(pot, problem):
    from flashot_backends.adapters.pot import lazy_cost

    with flashot_backends.use(substitute=["pot"]):
        loss = pot.sinkhorn2(problem.a, problem.b, lazy_cost(problem.X, problem.Y), problem.reg)
    assert loss == pytest.approx(pot.sinkhorn2(problem.a, problem.b, problem.M, problem.reg), rel=1e-8)


def test_gradients(pot, problem):
    torch = pytest.importorskip("torch")
    found = []
    for substitute in ((), ("pot",)):
        a, b, M = (torch.tensor(array, requires_grad=True) for array in (problem.a, problem.b, problem.M))
        with flashot_backends.use(substitute=substitute):
            found.append(torch.autograd.grad(pot.sinkhorn2(a, b, M, problem.reg), (a, b, M)))
    for host, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, host, rtol=1e-7, atol=1e-9)
