"""Other functions of the host that call ``sinkhorn``: through ``method="flash"``, or with POT in ``substitute``."""

import warnings

import numpy as np
import pytest

import flashot_backends

METHODS = ("sinkhorn_log", "flash")


@pytest.fixture
def clouds():
    """Two labelled clouds of points."""
    rng = np.random.default_rng(0)
    return rng.random((19, 2)), rng.random((24, 2)) + 0.3, rng.integers(0, 2, 19), rng.integers(0, 2, 24)


def by_method(call, close=1e-7):
    """The host's answer and ours, close to one another."""
    hosts, ours = (call(method) for method in METHODS)
    np.testing.assert_allclose(ours, hosts, rtol=close, atol=1e-12)


# Callers that hand a method through


def test_empirical_sinkhorn(pot, clouds):
    X, Y, *_ = clouds
    by_method(lambda method: pot.bregman.empirical_sinkhorn(X, Y, 0.1, method=method))
    by_method(lambda method: pot.bregman.empirical_sinkhorn(X, Y, 0.1, method=method, log=True)[1]["log_u"])


def test_empirical_sinkhorn2(pot, clouds):
    X, Y, *_ = clouds
    by_method(lambda method: pot.bregman.empirical_sinkhorn2(X, Y, 0.1, method=method))


@pytest.mark.parametrize("log", [False, True])
def test_empirical_sinkhorn_divergence(pot, clouds, log):
    X, Y, *_ = clouds

    def divergence(method):
        value = pot.bregman.empirical_sinkhorn_divergence(X, Y, 0.1, method=method, log=log)
        return value[0] if log else value

    by_method(divergence)


def test_empirical_divergence_has_gradients(pot, clouds):
    torch = pytest.importorskip("torch")
    Y = torch.tensor(clouds[1])

    def gradient(method):
        X = torch.tensor(clouds[0], requires_grad=True)
        value = pot.bregman.empirical_sinkhorn_divergence(X, Y, 0.1, method=method)
        return torch.autograd.grad(value, X)[0].numpy()

    by_method(gradient, 1e-6)


def test_sinkhorn_transport(pot, clouds):
    X, Y, *_ = clouds

    def moved(method):
        transport = pot.da.SinkhornTransport(reg_e=0.1, method=method, max_iter=2000).fit(Xs=X, Xt=Y)
        return np.concatenate([transport.coupling_.ravel(), transport.transform(Xs=X).ravel()])

    by_method(moved)


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("way", ["continuous", "ferradans"])
def test_sinkhorn_transport_keeps_its_method(pot, clouds, calls, way):
    """Where it maps new points the host knows one name only, and warns of others."""
    import inspect

    X, Y, *_ = clouds
    known = "continuous" in str(inspect.signature(pot.da.SinkhornTransport.__init__))
    if not known and way == "continuous":
        pytest.skip("this POT has no such map")
    options = {"reg_e": 0.1, "max_iter": 2000, "out_of_sample_map": way}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = pot.da.SinkhornTransport(method="flash", **options).fit(Xs=X, Xt=Y)
    assert calls and ours.method == "flash"
    del calls[:]
    hosts = pot.da.SinkhornTransport(method="sinkhorn_log", **options).fit(Xs=X, Xt=Y)
    assert not calls
    np.testing.assert_allclose(ours.coupling_, hosts.coupling_, rtol=1e-7)
    np.testing.assert_allclose(ours.transform(Xs=X + 0.1), hosts.transform(Xs=X + 0.1), rtol=1e-7)
    np.testing.assert_allclose(ours.inverse_transform(Xt=Y), hosts.inverse_transform(Xt=Y), rtol=1e-7)


def test_free_support_barycenter(pot, clouds):
    X, Y, *_ = clouds
    weights = [np.full(19, 1 / 19), np.full(24, 1 / 24)]

    def barycenter(method):
        return pot.bregman.free_support_sinkhorn_barycenter(
            [X, Y], weights, X[:5].copy(), 0.1, numItermax=5, method=method
        )

    by_method(barycenter, 1e-6)


def test_factored(pot, clouds):
    X, Y, *_ = clouds

    def loss(method):
        G, *_ = pot.factored.factored_optimal_transport(X, Y, reg=0.5, r=4, X0=X[:4].copy(), method=method)
        return G

    by_method(loss, 1e-6)


def test_gcg(pot, clouds):
    X, Y, *_ = clouds
    M = pot.dist(X, Y)
    a, b = pot.unif(19), pot.unif(24)

    def plan(method):
        return pot.optim.gcg(a, b, M, 0.1, 0.1, lambda G: 0.5 * (G**2).sum(), lambda G: G, numItermax=5, method=method)

    by_method(plan, 1e-6)


# Callers that name a method of the host themselves: substituted


def substituted(call, close=1e-6):
    """The host's answer, and the answer with POT substituted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = call()
        with flashot_backends.use(substitute=["pot"]):
            ours = call()
    np.testing.assert_allclose(ours, expected, rtol=close, atol=1e-10)


def test_gromov_substituted(pot, clouds):
    C1, C2 = (pot.dist(points) for points in clouds[:2])
    a, b = pot.unif(19), pot.unif(24)
    substituted(lambda: pot.gromov.entropic_gromov_wasserstein(C1, C2, a, b, epsilon=0.1, max_iter=20))
    substituted(lambda: pot.gromov.entropic_gromov_wasserstein(C1, C2, a, b, epsilon=0.1, max_iter=20, solver="PPA"))


@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_log"])
def test_coot_substituted(pot, clouds, method):
    """It accepts no method but these two."""
    from ot import coot

    substituted(lambda: coot.co_optimal_transport(*clouds[:2], epsilon=0.1, nits_bcd=3, method_sinkhorn=method)[0])


def test_lowrank_start_substituted(pot, clouds):
    """The start only: what follows in the host amplifies the last digit of its start to a different plan."""
    pytest.importorskip("sklearn")
    lowrank = pytest.importorskip("ot.lowrank")

    a, b = pot.unif(19), pot.unif(24)
    substituted(lambda: lowrank._init_lr_sinkhorn(*clouds[:2], a, b, 3, "kmeans", 0.1, 0)[0])


def test_domain_adaptation_with_labels_substituted(pot, clouds):
    X, Y, labels, _ = clouds
    for name in ("SinkhornLpl1Transport", "SinkhornL1l2Transport"):
        kind = getattr(pot.da, name)
        substituted(lambda: kind(reg_e=0.5, max_iter=5).fit(Xs=X, ys=labels, Xt=Y).coupling_)  # noqa: B023


def test_empirical_sinkhorn_substituted(pot, clouds):
    X, Y, *_ = clouds
    substituted(lambda: pot.bregman.empirical_sinkhorn(X, Y, 0.1))
    substituted(lambda: pot.bregman.empirical_sinkhorn_divergence(X, Y, 0.1))
