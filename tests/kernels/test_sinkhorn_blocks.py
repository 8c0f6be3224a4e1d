"""The streamed torch kernel: strips, safe sums, and memory that stays linear."""

import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn import blocks, reference  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402
from flashot_backends.ops.sinkhorn import PointCloud, softmin, solve  # noqa: E402
from tests.kernels import far_costs  # noqa: E402
from tests.memory import PEAK, linux  # noqa: E402
from tests.ops.sinkhorn_cases import INF, close, make, normal, sinkhorn, weights  # noqa: E402

KINDS = ["matrix", "points1", "points20"]
STRIPS = [1, 40, 100, 1 << 18]
kinds = pytest.mark.parametrize("kind", KINDS)
strips = pytest.mark.parametrize("budget", STRIPS)
N, M = 21, 13


def operators(kind, batch=3, dtype=torch.float64):
    """Blocks and reference on the same costs."""
    _, tensors, _ = make(kind, N, M, (batch,), dtype)
    cost = Cost(None, None, *tensors) if kind == "matrix" else Cost(*tensors, None)
    epsilon = torch.linspace(0.5, 3, batch, dtype=torch.float64)
    return blocks.operator(cost, epsilon), reference.operator(cost, epsilon)


def scalings(batch=3):
    s, t = normal(batch, N, seed=3), normal(batch, M, seed=4)
    s[:, 2] = t[:, 1] = t[0, 5] = -INF
    return s, t


@strips
@pytest.mark.parametrize("batch", [1, 3])
def test_strips_cover_everything_once(monkeypatch, budget, batch):
    monkeypatch.setattr(blocks, "STRIP_CPU", budget)
    seen = torch.zeros(batch, N)
    for strip in operators("matrix", batch)[0].strips():
        seen[strip] += 1
        assert seen[strip].numel() * M <= max(budget, 8 * M)
    assert (seen == 1).all()


@strips
@kinds
def test_reductions(monkeypatch, kind, budget):
    """Every reduction over pairs, whatever the strips."""
    monkeypatch.setattr(blocks, "STRIP_CPU", budget)
    mine, right = operators(kind)
    s, t = scalings()
    u, v = normal(3, N, 2, seed=5), normal(3, M, 2, seed=6)
    for ours, theirs in ((mine, right), (mine.T.T, right)):
        close(ours.softmin(t), theirs.softmin(t))
        close(ours.T.softmin(s), theirs.T.softmin(s))
        close(ours.apply(s, t, v), theirs.apply(s, t, v))
        for power in (1, 2):
            close(ours.cost_apply(s, t, power), theirs.cost_apply(s, t, power))
    alone = {"alpha": u[..., 0]}, {"gamma": 1.5}, {"u": u, "v": v}
    for options in (*alone, {"alpha": u[..., 1], "gamma": 0.5, "u": u, "v": v}):
        found, wanted = mine.weighted(s, t, **options), right.weighted(s, t, **options)
        for one, other in zip((*found.cost, *found[1:]), (*wanted.cost, *wanted[1:]), strict=True):
            close(one, other)


@strips
@kinds
def test_gradient_of_softmin(monkeypatch, kind, budget):
    monkeypatch.setattr(blocks, "STRIP_CPU", budget)
    mine, right = operators(kind)
    h, grad = scalings()[1], normal(3, N, seed=7)
    found, wanted = (op.softmin_gradient(h, right.softmin(h), grad, True, True) for op in (mine, right))
    for one, other in zip((*found.cost, *found[1:]), (*wanted.cost, *wanted[1:]), strict=True):
        close(one, other)


@strips
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sweep(monkeypatch, kind, budget, dtype):
    """One exponential per pair serves the row update and the column update after it."""
    monkeypatch.setattr(blocks, "STRIP_CPU", budget)
    mine, right = operators(kind, dtype=dtype)
    a, b = weights(3, N, zeros=2, dtype=dtype), weights(3, M, seed=1, zeros=1, dtype=dtype)
    g, hint = normal(3, M, seed=2, dtype=dtype), normal(3, N, seed=3, dtype=dtype)
    found, wanted = (op.sweep(a.log(), b.log(), g, hint) for op in (mine, right))
    for one, other in zip(found, wanted, strict=True):
        close(one, other, rtol=1e-10 if dtype == torch.float64 else 3e-5)
    assert (found.g[:, 0] == g[:, 0]).all() and (found.ratio[:, 0] == 1).all()


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("hint", [-1e4, -60.0, 60.0, 1e4, "mixed"])
def test_unsafe_sums_are_taken_again(kind, dtype, hint):
    """A previous potential that is no stabiliser must not show in the result."""
    mine, right = operators(kind, dtype=dtype)
    a, b = weights(3, N, dtype=dtype), weights(3, M, seed=1, dtype=dtype)
    g = normal(3, M, seed=2, dtype=dtype)
    f = 1e4 * normal(3, N, seed=3, dtype=dtype) if hint == "mixed" else torch.full((3, N), hint, dtype=dtype)
    found, wanted = mine.sweep(a.log(), b.log(), g, f), right.sweep(a.log(), b.log(), g, f)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, rtol=1e-9 if dtype == torch.float64 else 5e-5)


def test_the_fallback_is_taken(monkeypatch):
    """The test above means something: with a bad hint sums are taken again, with a good one they are not."""
    taken = []
    original = blocks.Blocks._around_maximum
    monkeypatch.setattr(blocks.Blocks, "_around_maximum", lambda self, *args: taken.append(1) or original(self, *args))
    mine, right = operators("matrix", dtype=torch.float32)
    log_a, log_b = weights(3, N, dtype=torch.float32).log(), weights(3, M, seed=1, dtype=torch.float32).log()
    g = normal(3, M, seed=2, dtype=torch.float32)
    mine.sweep(log_a, log_b, g, right.softmin(log_b + g / right.epsilon[:, None]))
    assert not taken
    mine.sweep(log_a, log_b, g, torch.full((3, N), 1e4))
    assert taken


@pytest.mark.parametrize("exponent", [-1e4, -140.0, -126.5, 0.0, 100.0])
def test_sums_of_any_size(exponent):
    """Rows whose every term would under- or overflow; below 2^−126 float32 has fewer digits."""
    terms = torch.tensor([[0.0, -1.0, -130.0, -INF], [-2.0, -2.0, -2.0, -2.0], [-INF] * 4]) + exponent
    wanted = torch.logsumexp(terms.double() * math.log(2), -1) / math.log(2)
    close(blocks.log2_sum_exp2(terms.clone()), wanted, rtol=1e-6)
    assert blocks.log2_sum_exp2(terms[:, :0]).tolist() == [-INF] * 3


def test_no_denormal_numbers():
    exponents = torch.tensor([-149.0, -126.5, -126.0, 0.0, -INF, float("nan")])
    found = blocks.exp2(exponents.clone())
    assert (found[:2] == 0).all() and found[3] == 1 and found[4] == 0 and found[5].isnan()
    assert blocks.exp2(torch.tensor([-1000.0], dtype=torch.float64)) > 0


@pytest.mark.parametrize("n", [50, 700])
def test_many_iterations_lose_nothing(n):
    """Each sweep stands on the one before: errors must not pile up."""
    x, y = normal(n, 3, dtype=torch.float32), normal(n, 3, seed=1, dtype=torch.float32)
    solution = solve(PointCloud(x, y), epsilon=0.5, tolerance=0, max_iterations=300, backend="torch")
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    f, g = sinkhorn((x.double()[:, None] - y.double()).square().sum(-1), uniform, uniform, 0.5, 300)
    moved = f - solution.f.double()
    assert float((moved - moved.mean()).abs().max()) < 2e-5
    close(solution.f[:, None] + solution.g, f[:, None] + g, rtol=0, atol=4e-5)


def test_points_far_from_the_origin_and_from_each_other():
    """The distances of near points survive far ones."""
    x = torch.cat([normal(20, 3), normal(20, 3, seed=1) + 300]).float()
    y = torch.cat([normal(20, 3, seed=2), normal(20, 3, seed=3) + 300]).float()
    M = (x.double()[:, None] - y.double()).square().sum(-1)
    h = torch.zeros(40)
    wanted = -torch.logsumexp(-M, -1)
    close(softmin(PointCloud(x, y), h, 1.0, backend="torch"), wanted, rtol=0, atol=0.03)
    close(softmin(PointCloud(x.double(), y.double()), h.double(), 1.0, backend="torch"), wanted, rtol=0, atol=1e-8)


MEMORY = PEAK + """
import sys, torch
from flashot_backends.ops.sinkhorn import PointCloud, DenseCost, solve
torch.set_num_threads(1)
n = int(sys.argv[1])
generator = torch.Generator().manual_seed(0)
x, y = (torch.randn(n, 3, generator=generator).requires_grad_() for _ in range(2))
def run(x, y):
    solution = solve(PointCloud(x, y), epsilon=1.0, tolerance=0, max_iterations=2, backend="torch")
    (solution.value() + solution.linear_cost() + solution.apply(y).sum()).backward()
run(x[:50], y[:50])
before = peak()
run(x, y)
print(peak() - before)
"""


@linux
def test_memory_is_linear():
    """6 000 points a side, values and gradients: their matrix alone takes 137 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY, "6000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40, f"{done.stdout} MB"


def test_serves_everything():
    class Request:
        dtype, device, kind = torch.float64, "cpu", "matrix"

    assert blocks.applies(Request()) is None
    assert reference.applies(Request()) is None


@pytest.mark.parametrize("epsilon", far_costs.REGULARISATIONS)
@pytest.mark.parametrize("kind", [*far_costs.KINDS, "l1"])
def test_costs_far_above_epsilon(kind, epsilon):
    cost, *columns = far_costs.costs(kind)
    found = far_costs.leanings(blocks.operator(cost, torch.tensor([epsilon], dtype=torch.float64)), *columns)
    assert all(abs(leaning) < far_costs.MOST for leaning in found.values()), found
