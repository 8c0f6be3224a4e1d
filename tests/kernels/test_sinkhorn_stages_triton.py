"""Annealing, offsets and looks at every iteration on the card's own loop, against the loop that the host steers."""

import math
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)

from flashot_backends.kernels.sinkhorn import reference, triton  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402
from flashot_backends.ops.sinkhorn import PointCloud, acceleration, solve, solver, unrolled  # noqa: E402
from flashot_backends.ops.sinkhorn.duals import Duals, stage_of_annealing  # noqa: E402
from flashot_backends.ops.sinkhorn.problem import log_weights  # noqa: E402
from flashot_backends.ops.sinkhorn.unbalanced import make_penalty  # noqa: E402
from tests.ops.sinkhorn_cases import normal  # noqa: E402

from . import sinkhorn_triton_cases as cases  # noqa: E402
from .sinkhorn_loop_cases import as_the_host, no_host  # noqa: E402
from .sinkhorn_triton_cases import DEVICE, NAME  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy speaks of every infinity


@pytest.fixture(autouse=True, scope="module")
def _kernel():
    with cases.serving("sinkhorn", triton):
        yield


def short_stages(monkeypatch, iterations):
    for module in (acceleration, solver, unrolled):
        monkeypatch.setattr(module, "STAGE_ITERATIONS", iterations)


WAYS = [
    ("matrix", "reach", cases.in_strips),
    (2, "binding", cases.streamed),
    (2, "offsets", cases.in_strips),
    (16, "offsets", cases.streamed),
]


@pytest.mark.parametrize(("kind", "missed", "path"), WAYS, ids=lambda part: getattr(part, "__name__", str(part)))
def test_stages(kind, missed, path, monkeypatch):
    """Four iterations under 16 ε and four under 4 ε: as the host's in float64, up to float32."""
    path(monkeypatch)
    short_stages(monkeypatch, 4)
    size, batch = (6, 9), (1,)
    drawn = (
        cases.matrix(*size, batch, device=DEVICE)
        if kind == "matrix"
        else cases.points(*size, kind, batch, device=DEVICE)
    )
    (tensors, unit), (a, b) = drawn, cases.uneven(*size, batch, DEVICE)
    a[0, 4] = b[0, 2] = 0
    epsilon = torch.tensor([0.07 * unit], dtype=torch.float64, device=DEVICE)
    reach = offsets = None
    if missed != "binding":
        reach = unit * torch.tensor([[2.0, 5.0]], dtype=torch.float64, device=DEVICE)
    if missed == "offsets":
        offsets = tuple(unit * normal(1, count, seed=7 + count).to(DEVICE, torch.float32) for count in size)
    start = unit * normal(1, size[0], seed=3).to(DEVICE, torch.float32)
    start[0, 4] = 0
    more = () if reach is None else (reach,) if offsets is None else (reach, offsets)
    gap = float(acceleration.stage_gap())
    op = triton.Fused(Cost(*tensors, None) if kind != "matrix" else Cost(None, None, *tensors), epsilon)
    found = op.anneal(a, b, start, 2, 4.0, 4, gap, *more)
    usual, wanted = (host_stages(tensors, epsilon, a, b, start, reach, offsets, real) for real in (torch.float32, None))
    away, allowed = (((one.double() - wanted) / epsilon[:, None]).abs()[a > 0].max() for one in (found, usual))
    assert float((wanted - start.double()).abs().max()) > unit, "something happens in a stage"
    assert away < 3 * allowed + 5e-6


def host_stages(tensors, epsilon, a, b, start, reach, offsets, real):
    """Two stages, steered by the host."""
    real = real or torch.float64
    cast = [part.to(real) for part in tensors]
    cost = Cost(None, None, *cast) if len(cast) == 1 else Cost(*cast, None)
    alpha, beta = (None, None) if offsets is None else (part.to(real) for part in offsets)
    penalty = make_penalty(reach, alpha, beta, real)
    duals = Duals(reference.operator(cost, epsilon), log_weights(a.to(real)), log_weights(b.to(real)), penalty)
    f = start.to(real)
    for stage in (2, 1):
        f = list(stage_of_annealing(duals, f, stage, torch.ones(1, dtype=torch.bool, device=DEVICE)))[-1][1]
    return f


def problem():
    """A batch that asks for 0, 1, 2 and 1 stages."""
    size, batch = (5, 7), (4,)
    (tensors, _), (a, b) = cases.points(*size, 2, batch, device=DEVICE), cases.uneven(*size, batch, DEVICE)
    a[3, 1] = b[2, 5] = 0
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    epsilon = torch.tensor([5.0, 0.5, 0.1, 0.6], dtype=torch.float64, device=DEVICE)
    return tensors, a, b, {"epsilon": epsilon, "max_iterations": 10, "tolerance": 3e-2, "check_every": 2}


def test_a_batch_with_different_numbers_of_stages(monkeypatch):
    """Counts, history and results are those of the host's loop, and nothing is steered by the host."""
    short_stages(monkeypatch, 2)
    tensors, a, b, options = problem()
    rho = torch.tensor([math.inf, 2.0, 4.0, math.inf], dtype=torch.float64, device=DEVICE)
    options["reach"] = rho, 3 * rho
    costs = cases.make_cost(tensors), cases.make_cost([part.double() for part in tensors])
    found = as_the_host(monkeypatch, NAME, costs, a, b, acceleration="annealing", **options)
    assert found._state.stages.tolist() == [0, 1, 2, 1]
    assert len(set(found.iterations.tolist())) > 2 and found.iterations.max() <= 10


def test_alone_as_in_a_batch(monkeypatch):
    short_stages(monkeypatch, 2)
    tensors, a, b, options = problem()
    options |= {"acceleration": "annealing", "backend": NAME}
    epsilon = options.pop("epsilon")
    pair, last = cases.make_cost([part[1:3] for part in tensors]), cases.make_cost([part[2] for part in tensors])
    together = solve(pair, a[1:3], b[1:3], epsilon=epsilon[1:3], **options)
    alone = solve(last, a[2], b[2], epsilon=float(epsilon[2]), **options)
    assert alone.iterations == together.iterations[1]
    assert torch.equal(alone.f, together.f[1]) and torch.equal(alone.g, together.g[1])
    assert torch.equal(alone.errors.isnan(), together.errors[1].isnan())


def test_no_stage_and_no_problem(monkeypatch):
    """Where ε is large, annealing is over-relaxation; of no problem nothing comes."""
    no_host(monkeypatch)
    (x, y), unit = cases.points(5, 7, 2, device=DEVICE)
    options = {"epsilon": 10 * unit, "max_iterations": 5, "check_every": 2, "tolerance": 0, "backend": NAME}
    found, wanted = (solve(PointCloud(x, y), acceleration=how, **options) for how in ("annealing", "overrelaxation"))
    assert torch.equal(found.f, wanted.f) and torch.equal(found.errors, wanted.errors)
    empty = solve(PointCloud(x.expand(0, 5, 2), y), acceleration="annealing", **options)
    assert empty.f.shape == (0, 5) and empty.errors.shape == (0, 3)


def test_gradients_replay_the_same_iterations(monkeypatch):
    short_stages(monkeypatch, 2)
    (x, y), unit = cases.points(6, 7, 2, device=DEVICE)
    grads = []
    for cast, backend in ((torch.float32, NAME), (torch.float64, "reference")):
        leaf = x.to(cast).requires_grad_()
        solution = solve(
            PointCloud(leaf, y.to(cast)), epsilon=0.1 * unit, acceleration="annealing", max_iterations=8, tolerance=0,
            check_every=2, backend=backend,
        )  # fmt: skip
        assert solution._state.stages.tolist() == [2]
        (grad,) = torch.autograd.grad((solution.f * torch.linspace(-1, 1, 6, device=DEVICE)).sum(), leaf)
        grads.append(grad.double())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-4


def test_bad_values_are_reported():
    (x, y), unit = cases.points(5, 7, 2, device=DEVICE)
    options = {"epsilon": 0.1 * unit, "acceleration": "annealing", "backend": NAME}
    with pytest.raises(ValueError, match="x holds"):
        solve(PointCloud(x * math.nan, y), **options)
    with pytest.raises(ValueError, match="a holds"):
        solve(PointCloud(x, y), -torch.ones(5, device=DEVICE), **options)


def cloud(kind, cast, size):
    """A cost with terms of its row or its column alone."""
    if kind == "labels":
        (x, y), _ = cases.points(*size, 2, (1,), device=DEVICE)
        labels = (torch.arange(size[0], device=DEVICE) % 3, torch.arange(size[1], device=DEVICE) % 2)
        table = normal(3, 2, seed=8).abs().to(DEVICE, cast)
        return PointCloud(x.to(cast), y.to(cast), labels=labels, table=table)
    (x, y), _ = cases.points(*size, kind, (1,), device=DEVICE)
    return PointCloud(x.to(cast), y.to(cast), metric="inner")


@pytest.mark.parametrize(
    ("kind", "path", "how"),
    [
        ("labels", cases.in_strips, "auto"),
        (3, cases.streamed, None),
        (16, cases.streamed, "auto"),
        (2, cases.in_strips, "annealing"),
    ],
)
def test_terms_of_one_side_beside_a_reach(kind, path, how, monkeypatch):
    """Inner products and labels: what kernels do not see of the cost counts where a marginal may be missed."""
    path(monkeypatch)
    short_stages(monkeypatch, 3)
    size = (7, 10)
    costs = (cloud(kind, cast, size) for cast in (torch.float32, torch.float64))
    a, b = cases.uneven(*size, (1,), DEVICE)
    b[0, 2] = a[0, 3] = 0
    options = {"epsilon": 0.2, "reach": (0.8, 3.0), "max_iterations": 7, "check_every": 3, "tolerance": 1e-4}
    found = as_the_host(monkeypatch, NAME, costs, 1.5 * a, b, acceleration=how, **options)
    assert found.f.isfinite().all() and found.g.isfinite().all()


@pytest.mark.parametrize(("kind", "path"), [(16, cases.streamed), (2, cases.in_strips)])
def test_a_look_at_every_iteration(kind, path, monkeypatch):
    """Cycles begin with one iteration and grow: whether the columns after a look are relaxed hangs on what it found."""
    path(monkeypatch)
    size, batch = (6, 8), (1 if kind == 16 else 2,)
    (tensors, unit), (a, b) = cases.points(*size, kind, batch, device=DEVICE), cases.uneven(*size, batch, DEVICE)
    epsilon = unit * torch.tensor([0.03, 0.1], dtype=torch.float64, device=DEVICE)[: len(a)]
    options = {"epsilon": epsilon, "reach": (30.0 * unit, 50.0 * unit), "max_iterations": 12, "check_every": 1}
    options["tolerance"] = 1e-3
    costs = cases.make_cost(tensors), cases.make_cost([part.double() for part in tensors])
    found = as_the_host(monkeypatch, NAME, costs, a, 1.2 * b, **options)
    assert found.errors.isnan()[0, :10].any(), "cycles have grown"


def test_steered_by_the_host(monkeypatch):
    """As where a kernel has no loop of its own: sweeps tell of errors then."""
    cost = PointCloud(*(points.to(DEVICE, torch.float32) for points in (normal(30, 3), normal(40, 3, seed=1))))
    options = {"epsilon": 0.3, "acceleration": "annealing", "tolerance": 1e-3, "max_iterations": 40, "backend": NAME}
    wanted = solve(cost, **options)
    monkeypatch.setattr(triton.Fused, "whole_loop", False)
    monkeypatch.setattr(triton.Fused, "iterate", lambda *_, **__: None)
    found = solve(cost, **options)
    assert found.iterations == wanted.iterations
    torch.testing.assert_close(found.errors, wanted.errors, rtol=1e-3, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(found.f - found.f.mean(), wanted.f - wanted.f.mean(), rtol=1e-5, atol=1e-5)
