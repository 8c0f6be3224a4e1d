"""``ot.bregman.barycenter`` and ``barycenter_debiased`` with ``method="flash"``: the host's "sinkhorn_log"."""

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("complete")
entries = pytest.mark.parametrize("entry", ["barycenter", "barycenter_debiased"])
MIXTURE = np.array([0.1, 0.2, 0.3, 0.4])


@pytest.fixture
def histograms():
    """Four histograms on a line, with some empty bins, and the squared distances."""
    rng = np.random.default_rng(0)
    A = rng.random((20, 4)) ** 4
    A[3, 1] = A[7] = 0
    points = np.linspace(0, 1, 20)[:, None]
    return A / A.sum(0), (points - points.T) ** 2, points


@entries
@pytest.mark.parametrize("mixture", [None, MIXTURE])
def test_it_is_the_hosts(pot, histograms, entry, mixture):
    A, M, _ = histograms
    function, options = getattr(pot.bregman, entry), {"weights": mixture, "log": True, "stopThr": 1e-9}
    options["numItermax"] = 300
    with np.testing.suppress_warnings() as said:
        said.filter(UserWarning)
        (expected, host_log), (found, log) = (
            function(A, M, 0.02, method=method, **options) for method in ("sinkhorn_log", "flash")
        )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)
    assert set(log) == set(host_log) and log["niter"] == host_log["niter"]
    np.testing.assert_allclose(log["err"], host_log["err"], rtol=1e-6, atol=1e-12)


@entries
@pytest.mark.parametrize("iterations", [1, 2, 3, 14])
def test_iterates(pot, histograms, entry, iterations):
    A, M, _ = histograms
    found = []
    for method in ("sinkhorn_log", "flash"):
        with pytest.warns(UserWarning, match="did not converge") as said:
            options = {"numItermax": iterations, "stopThr": 0, "method": method}
            found.append(getattr(pot.bregman, entry)(A, M, 0.05, **options))
    assert said[-1].filename == __file__
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9, atol=1e-14)


def test_the_hosts_default_method_ends_there(pot, histograms):
    A, M, _ = histograms
    found = [pot.bregman.barycenter(A, M, 0.05, method=method, stopThr=1e-11) for method in ("sinkhorn", "flash")]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-9)


def test_small_regularisation(pot, histograms):
    """Where exp(−M/reg) is nothing."""
    A, M, _ = histograms
    q = pot.bregman.barycenter(A, M, 5e-4, method="flash", numItermax=3000, stopThr=1e-4)
    assert np.isfinite(q).all() and q.sum() == pytest.approx(1, abs=1e-3)


@entries
@pytest.mark.usefixtures("lazy_tensors")
def test_lazy_costs(pot, histograms, entry):
    from flashot_backends.adapters.pot import lazy_cost

    A, M, points = histograms
    function, options = getattr(pot.bregman, entry), {"numItermax": 50, "warn": False}
    lazy = function(A, lazy_cost(points, points), 0.05, method="flash", **options)
    np.testing.assert_allclose(lazy, function(A, M, 0.05, method="flash", **options), rtol=1e-9)
    with pytest.raises(ValueError, match="M is a lazy cost and method is 'sinkhorn'"):
        function(A, lazy_cost(points, points), 0.05)


@entries
def test_torch_and_gradients(pot, histograms, entry):
    """Through the iterations, by histograms, costs, the mixture and reg, as autograd has it of the host's loop."""
    torch = pytest.importorskip("torch")
    A, M, _ = histograms
    A = A + 1e-3  # the host adds 1e-16 to empty bins, and differentiates that
    found = []
    for method in ("sinkhorn_log", "flash"):
        leaves = [torch.tensor(part, requires_grad=True) for part in (A / A.sum(0), M, MIXTURE)]
        reg = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
        options = {"weights": leaves[2], "numItermax": 25, "stopThr": 0, "warn": False, "method": method}
        if method == "sinkhorn_log":  # its loop writes into what autograd needs: one more in plain torch
            q = plainly(*leaves, reg, 25, entry == "barycenter_debiased")
            hosts = getattr(pot.bregman, entry)(A / A.sum(0), M, 0.05, **options | {"weights": MIXTURE})
            np.testing.assert_allclose(q.detach(), hosts, rtol=1e-9)
        else:
            q = getattr(pot.bregman, entry)(leaves[0], leaves[1], reg, **options)
        found.append(torch.autograd.grad((q * torch.arange(20)).sum(), [*leaves, reg]))
    for ours, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-7, atol=1e-9)


def plainly(A, M, mixture, reg, iterations, debias):
    """The host's iterations for autograd to follow."""
    torch = pytest.importorskip("torch")
    K, log_a = -M / reg, A.log()
    log_v, c = torch.zeros_like(A), torch.zeros_like(A[:, 0])
    for _ in range(iterations):
        log_u = log_a - torch.logsumexp(K[:, :, None] + log_v[None], 1)
        log_ku = torch.logsumexp(K[:, :, None] + log_u[:, None], 0)
        log_q = (log_ku * mixture).sum(1) + c
        log_v = log_q[:, None] - log_ku
        for _ in range(10 if debias else 0):
            c = 0.5 * (c + log_q - torch.logsumexp(K + c[:, None], 0))
    return log_q.exp()


def test_errors_of_torch_tensors_are_the_hosts(pot, histograms):
    """Deviations of torch have one less in the denominator than those of numpy."""
    torch = pytest.importorskip("torch")
    A, M, _ = (torch.tensor(part) for part in histograms)
    logs = [pot.bregman.barycenter(A, M, 0.05, method=method, log=True)[1] for method in ("sinkhorn_log", "flash")]
    np.testing.assert_allclose(logs[1]["err"], logs[0]["err"], rtol=1e-6, atol=1e-12)
    assert logs[1]["niter"] == logs[0]["niter"]


@entries
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtypes(pot, histograms, entry, dtype):
    A, M, _ = histograms
    function, options = getattr(pot.bregman, entry), {"numItermax": 40, "warn": False, "method": "flash"}
    found = function(A.astype("float32"), M.astype(dtype), 0.05, **options)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, function(A, M, 0.05, **options), atol=2e-3 if dtype == "float16" else 1e-5)


@entries
def test_jax(pot, histograms, entry):
    """The host's log domain does not take jax arrays."""
    jax = pytest.importorskip("jax")
    A, M, _ = (jax.numpy.asarray(part, jax.numpy.float32) for part in histograms)
    function, options = getattr(pot.bregman, entry), {"numItermax": 25, "warn": False, "method": "flash"}
    found = function(A, M, 0.05, **options)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, function(*histograms[:2], 0.05, **options), atol=1e-5)
    by = jax.grad(lambda M: (function(A, M, 0.05, **options) * jax.numpy.arange(20)).sum())(M)
    assert np.isfinite(by).all() and np.abs(by).max() > 0


@entries
def test_verbose(pot, histograms, entry, capsys):
    A, M, _ = histograms
    tables = []
    for method in ("sinkhorn_log", "flash"):
        getattr(pot.bregman, entry)(A, M, 0.05, method=method, verbose=True, numItermax=45, stopThr=0, warn=False)
        printed = capsys.readouterr().out.splitlines()
        tables.append([line.split("|")[0] for line in printed if line[:5].strip().isdigit()])
    assert tables[0] == tables[1] and tables[0]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"A": np.ones((3, 4))}, ValueError, r"A has shape \(3, 4\) and M \(20, 20\)"),
        ({"A": np.ones(20)}, ValueError, r"A has shape \(20,\)"),
        ({"weights": np.ones(3)}, ValueError, r"weights has shape \(3,\); accepted is \(4,\)"),
        ({"reg": -1.0}, ValueError, "reg is -1.0"),
        ({"numItermax": 0}, ValueError, "numItermax is 0"),
        ({"tau": 1.0}, TypeError, "unknown argument 'tau'"),
        ({"A": "some"}, TypeError, "A is a builtins.str"),
    ],
    ids=str,
)
def test_bad_arguments(pot, histograms, arguments, kind, message):
    A, M, _ = histograms
    with pytest.raises(kind, match=message):
        pot.bregman.barycenter(**{"A": A, "M": M, "reg": 0.05, "method": "flash"} | arguments)
