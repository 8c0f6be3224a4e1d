"""``ot.bregman.empirical_sinkhorn`` and ``empirical_sinkhorn2`` with isLazy=True, method="flash"."""

import warnings

import numpy as np
import pytest

REG = 0.05
pytestmark = pytest.mark.usefixtures("lazy_tensors")


@pytest.fixture
def clouds(problem):
    return {"X_s": problem.X, "X_t": problem.Y, "reg": REG, "a": problem.a, "b": problem.b, "isLazy": True}


def test_potentials_log_and_plan_are_the_hosts(pot, clouds):
    f, g, log = pot.bregman.empirical_sinkhorn(**clouds, method="flash", log=True)
    host_f, host_g, host_log = pot.bregman.empirical_sinkhorn(**clouds, log=True)
    np.testing.assert_allclose(f, host_f, atol=1e-9)
    np.testing.assert_allclose(g, host_g, atol=1e-9)
    assert log["niter"] == host_log["niter"]
    np.testing.assert_allclose(log["err"], host_log["err"], rtol=1e-3, atol=1e-13)
    np.testing.assert_allclose(log["lazy_plan"][:], host_log["lazy_plan"][:], rtol=1e-8)
    np.testing.assert_allclose(log["lazy_plan"][2:5], log["lazy_plan"][:][2:5])


@pytest.mark.parametrize("count", [3, 10, 27])
def test_it_stops_after_the_same_iterations(pot, clouds, count):
    options = {**clouds, "numIterMax": count, "stopThr": 0, "warn": False}
    f, g = pot.bregman.empirical_sinkhorn(**options, method="flash")
    host_f, host_g = pot.bregman.empirical_sinkhorn(**options)
    np.testing.assert_allclose(f, host_f, atol=1e-10)
    np.testing.assert_allclose(g, host_g, atol=1e-10)


def test_a_warm_start_goes_on_from_there(pot, clouds):
    start = pot.bregman.empirical_sinkhorn(**clouds, numIterMax=20, stopThr=0, warn=False)
    options = {**clouds, "numIterMax": 20, "stopThr": 0, "warn": False, "warmstart": start}
    found = pot.bregman.empirical_sinkhorn(**options, method="flash")
    for ours, theirs in zip(found, pot.bregman.empirical_sinkhorn(**options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)


def test_the_loss(pot, clouds):
    loss, log = pot.bregman.empirical_sinkhorn2(**clouds, method="flash", log=True)
    assert loss == pytest.approx(pot.bregman.empirical_sinkhorn2(**clouds), rel=1e-9)
    assert loss == pot.bregman.empirical_sinkhorn2(**clouds, method="flash")
    assert set(log) == {"err", "u", "v", "niter", "lazy_plan"}


def test_uniform_weights_and_torch(pot, clouds):
    torch = pytest.importorskip("torch")
    X, Y = (torch.as_tensor(clouds[name], dtype=torch.float32) for name in ("X_s", "X_t"))
    f, g, log = pot.bregman.empirical_sinkhorn(X, Y, REG, isLazy=True, stopThr=1e-5, method="flash", log=True)
    assert f.dtype == g.dtype == log["lazy_plan"][:2].dtype == torch.float32
    assert log["lazy_plan"][:].sum().item() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(log["lazy_plan"][:].sum(0), np.full(len(Y), 1 / len(Y)), rtol=1e-4)


def test_verbose_prints_and_the_end_warns_as_the_host_does(pot, clouds, capsys):
    options = {**clouds, "numIterMax": 200, "stopThr": 0, "verbose": True}
    with pytest.warns(UserWarning, match="did not converge"):
        pot.bregman.empirical_sinkhorn(**options, method="flash")
    assert capsys.readouterr().out.count("Error in marginal at iteration") == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pot.bregman.empirical_sinkhorn(**{**options, "verbose": False, "warn": False}, method="flash")


def test_refusals(pot, clouds):
    with pytest.raises(ValueError, match="metric"):
        pot.bregman.empirical_sinkhorn(**clouds, metric="chebyshev", method="flash")
    with pytest.raises(TypeError, match="unknown argument 'anchors'"):
        pot.bregman.empirical_sinkhorn(**clouds, method="flash", anchors=3)
    with pytest.raises(ValueError, match="numIterMax"):
        pot.bregman.empirical_sinkhorn(**clouds, numIterMax=0, method="flash")
    with pytest.raises(ValueError, match="a has shape"):
        pot.bregman.empirical_sinkhorn(**{**clouds, "a": clouds["a"][:-1]}, method="flash")


def test_other_calls_stay_the_hosts(pot, clouds):
    f, g = pot.bregman.empirical_sinkhorn(**clouds)
    plan = pot.bregman.empirical_sinkhorn(**{**clouds, "isLazy": False}, method="flash")
    M = pot.dist(clouds["X_s"], clouds["X_t"])
    np.testing.assert_allclose(np.exp(f[:, None] + g[None, :] - M / REG), plan, rtol=1e-6)
