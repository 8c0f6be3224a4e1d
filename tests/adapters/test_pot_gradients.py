"""Gradients of plan, loss and scalings by M, a, b and reg: the host's autodiff in torch, and finite differences."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def leaves(problem):
    """The problem as torch leaves."""
    return [torch.tensor(array, requires_grad=True) for array in (problem.a, problem.b, problem.M)]


def gradients(pot, problem, method, scalar, **options):
    """Gradients of ``scalar(result, log)`` by a, b and M."""
    tensors = leaves(problem)
    entry = options.pop("entry", "sinkhorn")
    result, log = getattr(pot, entry)(*tensors, problem.reg, method=method, log=True, **options)
    return torch.autograd.grad(scalar(result, log), tensors)


SCALARS = {
    "plan": lambda plan, log: (plan * torch.arange(plan.numel(), dtype=plan.dtype).sin().reshape(plan.shape)).sum(),
    "scalings": lambda plan, log: (log["log_u"] ** 2).sum() + (log["log_v"] * 0.3).sum(),
    "plan and scalings": lambda plan, log: (plan**2).sum() + (log["u"] * log["log_u"]).sum(),
}


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize(
    "options", [{"stopThr": 1e-11}, {"numItermax": 1, "warn": False}, {"numItermax": 14, "warn": False}]
)
def test_gradients_are_the_hosts(pot, problem, scalar, options):
    ours = gradients(pot, problem, "flash", SCALARS[scalar], **options)
    if "numItermax" in options:
        options = {**options, "stopThr": 0}
        ours = gradients(pot, problem, "flash", SCALARS[scalar], **options)
    hosts = gradients(pot, problem, "sinkhorn_log", SCALARS[scalar], **options)
    for mine, host in zip(ours, hosts, strict=True):
        torch.testing.assert_close(mine, host, rtol=1e-7, atol=1e-9 * float(host.abs().max()))


@pytest.mark.parametrize("log", [False, True])
def test_the_losss_gradient_goes_through_the_plan(pot, problem, log):
    a, b, M = leaves(problem)
    loss = pot.sinkhorn2(a, b, M, problem.reg, method="flash", log=log)
    ours = torch.autograd.grad(loss[0] if log else loss, (a, b, M))
    hosts = torch.autograd.grad(pot.sinkhorn2(a, b, M, problem.reg, method="sinkhorn_log"), (a, b, M))
    for mine, host in zip(ours, hosts, strict=True):
        torch.testing.assert_close(mine, host, rtol=1e-7, atol=1e-9)
    plan = pot.sinkhorn(a, b, M, problem.reg, method="flash")
    assert (ours[2] - plan).abs().max() > 1e-3  # the envelope theorem is for another value


def test_the_losss_gradient_by_finite_differences(pot, problem):
    a, b, M = leaves(problem)
    options = {"method": "flash", "stopThr": 1e-13, "numItermax": 5000}
    (gradient,) = torch.autograd.grad(pot.sinkhorn2(a, b, M, problem.reg, **options), M)
    step = np.zeros_like(problem.M)
    step[3, 4] = 1e-5
    up, down = (pot.sinkhorn2(problem.a, problem.b, problem.M + s * step, problem.reg, **options) for s in (1, -1))
    assert float(gradient[3, 4]) == pytest.approx((up - down) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("entry", ["sinkhorn", "sinkhorn2"])
def test_several_histograms(pot, problem, entry):
    a, _, M = leaves(problem)
    B = torch.rand(23, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.05
    B = (B / B.sum(0)).requires_grad_()
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    both = []
    for method in ("flash", "sinkhorn_log"):
        losses = getattr(pot, entry)(a, B, M, problem.reg, method=method)
        both.append(torch.autograd.grad((losses * weight).sum(), (a, B, M)))
    for mine, host in zip(*both, strict=True):
        torch.testing.assert_close(mine, host, rtol=1e-7, atol=1e-9)


def test_by_the_regularisation(pot, problem):
    a, b, M = leaves(problem)
    both = []
    for method in ("flash", "sinkhorn_log"):
        reg = torch.tensor(problem.reg, dtype=torch.float64, requires_grad=True)
        plan, log = pot.sinkhorn(a, b, M, reg, method=method, log=True)
        both.append(torch.autograd.grad((plan * M).sum() + log["log_u"].sum(), reg)[0])
    torch.testing.assert_close(*both, rtol=1e-7, atol=0)


def test_by_the_warm_start(pot, problem):
    a, b, M = leaves(problem)
    both = []
    for method in ("flash", "sinkhorn_log"):
        start = torch.linspace(-1, 1, 17, dtype=torch.float64).requires_grad_()
        warm = (start, torch.zeros(23, dtype=torch.float64))
        plan = pot.sinkhorn(a, b, M, problem.reg, method=method, numItermax=2, stopThr=0, warn=False, warmstart=warm)
        both.append(torch.autograd.grad((plan**2).sum(), start)[0])
    torch.testing.assert_close(*both, rtol=1e-7, atol=1e-12)


def test_uniform_weights(pot, problem):
    empty = torch.zeros(0, dtype=torch.float64)
    both = []
    for method in ("flash", "sinkhorn_log"):
        M = torch.tensor(problem.M, requires_grad=True)
        both.append(torch.autograd.grad(pot.sinkhorn2(empty, empty, M, problem.reg, method=method), M)[0])
    torch.testing.assert_close(*both, rtol=1e-7, atol=1e-10)


def test_zero_weights_have_finite_gradients(pot, problem):
    a, b, M = leaves(problem._replace(a=np.r_[0.0, problem.a[1:] / problem.a[1:].sum()]))
    loss = pot.sinkhorn2(a, b, M, problem.reg, method="flash")
    for gradient in torch.autograd.grad(loss, (a, b, M)):
        assert torch.isfinite(gradient).all()


def test_no_gradient_is_asked_for(pot, problem):
    with torch.no_grad():
        plan = pot.sinkhorn(*leaves(problem), problem.reg, method="flash")
    assert not plan.requires_grad
