"""The way back through many softmins in Triton, against the softmins' own derivatives in float64."""

import math
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)

from flashot_backends.kernels.sinkhorn import reference, triton, triton_pull  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, acceleration, solve, solver, unrolled  # noqa: E402

from . import far_costs  # noqa: E402
from .sinkhorn_triton_cases import DEVICE, INTERPRETED, NAME, serving  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy speaks of every infinity
KINDS = ["rows", "columns", 1, 3, 4, 6, 16, 70, 130]
slow = pytest.mark.slow if INTERPRETED else ()
FEW = [("rows", 2), ("columns", 32), (3, 1), (3, 2), (6, 2), (16, 2)]
MORE = [pytest.param(kind, slots, marks=slow) for kind in KINDS for slots in (1, 2, 32) if (kind, slots) not in FEW]


@pytest.fixture(autouse=True)
def served():
    with serving("sinkhorn", triton):
        yield


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def cost_of(kind, batch, n, m):
    if kind == "rows":
        return Cost(None, None, draw(batch, n, m).abs())
    if kind == "columns":
        return Cost(None, None, draw(batch, m, n).abs().mT)
    return Cost(draw(batch, n, kind), draw(batch, m, kind, seed=1) + 5, None)


def exact(cost):
    return Cost(*(None if part is None else part.double() for part in cost[:3]))


def half_step(operator, transposed, seed):
    """What a softmin is given and gives, and a gradient by it; in float64 first."""
    own = operator.T if transposed else operator
    log_weight = torch.log_softmax(draw(own.batch, own.columns, seed=seed).double(), -1)
    log_weight[:, 3] = -math.inf  # a column without mass
    given = 0.3 * draw(own.batch, own.columns, seed=seed + 1).double()
    softmin = own.softmin(log_weight + given / own.epsilon[:, None])
    return log_weight, given, softmin, draw(own.batch, own.rows, seed=seed + 2).double()


def close(found, wanted, grade):
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= grade * wanted.norm()


def no_worse(found, wanted, alone, exponent):
    """About as close as half steps taken one by one, or as six roundings of the largest exponent leave a plan: of both
    potentials, scores and softmin, and of two sums."""
    close(found, wanted, max(6 * 2**-24 * exponent, 2 * float((alone.double() - wanted).norm() / wanted.norm())))


@pytest.mark.parametrize(("kind", "slots"), FEW + MORE, ids=str)
@pytest.mark.parametrize("size", [pytest.param((1, 40, 70), marks=slow), (2, 35, 66)], ids=str)
def test_pulls(monkeypatch, kind, slots, size):
    """Three half steps of one direction and two of the other."""
    monkeypatch.setattr(triton_pull, "SLOTS", slots)
    cost = cost_of(kind, *size)
    scale = 0.3 if isinstance(kind, str) else 0.3 * kind
    epsilon = scale * torch.linspace(1, 1.5, size[0], dtype=torch.float64, device=DEVICE)
    fused, right = triton.Fused(cost, epsilon), reference.operator(exact(cost), epsilon)
    pulls, totals, largest = fused.pulls(True), [0.0, 0.0], 30.0  # float32's sums are no better than 1e-5
    for seed, transposed in enumerate((False, True, True, False, False)):
        log_weight, given, softmin, gradient = half_step(right, transposed, 10 * seed)
        h = log_weight + given / epsilon[:, None]
        largest = max(largest, float((softmin / epsilon[:, None]).abs().max()))
        results = []
        for k, (operator, parts) in enumerate(
            ((right, (h, softmin, gradient)), (fused, (h.float(), softmin.float(), gradient.float())))
        ):
            own = operator.T if transposed else operator
            by_cost, by_h, _ = own.softmin_gradient(*parts, True, False)
            if transposed:
                by_cost = (by_cost[0].mT,) if len(by_cost) == 1 else by_cost[::-1]
            totals[k] = by_cost if totals[k] == 0.0 else [sum(pair) for pair in zip(totals[k], by_cost, strict=True)]
            results.append(by_h)
        found = pulls.pull(transposed, *(part.float() for part in (log_weight, given, softmin, gradient)))
        no_worse(-epsilon[:, None] * found, *results, largest)
    for one in zip(pulls.cost(), *totals, strict=True):
        no_worse(*one, largest)


@pytest.mark.parametrize("epsilon", [pytest.param(0.07, marks=slow), 0.09, pytest.param(0.11, marks=slow)])
@pytest.mark.parametrize("kind", far_costs.KINDS)
def test_costs_far_above_epsilon(kind, epsilon):
    cost, *columns = far_costs.costs(kind, DEVICE)
    epsilon = torch.tensor([epsilon], dtype=torch.float64, device=DEVICE)
    found = far_costs.leanings(triton.Fused(cost, epsilon), *columns)
    assert all(abs(leaning) < far_costs.MOST for leaning in found.values()), found


def test_forbidden_pairs():
    """Rows that may go nowhere have no part, nor have pairs that cost infinitely much."""
    cost = cost_of("rows", 1, 20, 30)
    cost.matrix[0, 4] = math.inf
    cost.matrix[0, 5, 7] = math.inf
    epsilon = torch.full((1,), 0.5, dtype=torch.float64, device=DEVICE)
    h, gradient = torch.full((1, 30), -math.log(30), device=DEVICE), draw(1, 20)
    operator = triton.Fused(cost, epsilon)
    softmin, zero = operator.softmin(h), torch.zeros(1, 30, device=DEVICE)
    assert softmin[0, 4] == math.inf
    pulls = operator.pulls(True)
    found = pulls.pull(False, h, zero, softmin, gradient)
    (by_matrix,) = pulls.cost()
    plan = (h[:, None] + (softmin[:, :, None] - cost.matrix) / 0.5).exp().nan_to_num(posinf=0)
    plan[0, 4] = 0
    torch.testing.assert_close(by_matrix, plan * gradient[:, :, None])
    torch.testing.assert_close(found, (plan * gradient[:, :, None]).sum(1))
    assert by_matrix[0, 5, 7] == 0 and not by_matrix[0, 4].any()


def test_memory_of_waiting_steps(monkeypatch):
    """Large problems have few slots, and a gradient that leaves the costs out has one."""
    cost = cost_of(3, 1, 600, 600)
    operator = triton.Fused(cost, torch.ones(1, dtype=torch.float64, device=DEVICE))
    assert operator.pulls(True).slots == triton_pull.SLOTS
    assert operator.pulls(False).slots == 1
    monkeypatch.setattr(triton_pull, "BYTES", 3 * 12 * 2048)
    assert operator.pulls(True).slots == 3
    monkeypatch.setattr(triton_pull, "BYTES", 1)
    assert operator.pulls(True).slots == 1


WAYS = [{}, {"acceleration": "overrelaxation"}, {"acceleration": "annealing"}, {"reach": 2.0}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("rows", WAYS[1]), ("rows", WAYS[2]), (3, WAYS[0]), (3, WAYS[3])]
    + [pytest.param(kind, options, marks=slow) for kind in ("rows", 3, 16) for options in WAYS],
    ids=str,
)
def test_solutions(monkeypatch, kind, options):
    """All gradients of a solve, beside the reference in float64; and by ε, which goes another way."""
    monkeypatch.setattr(triton_pull, "SLOTS", 3)
    anneals = options.get("acceleration") == "annealing"
    for module in (acceleration, solver, unrolled):  # two iterations under each ε
        monkeypatch.setattr(module, "STAGE_ITERATIONS", 2)
    parts = [part for part in cost_of(kind, 1, 40, 50)[:3] if part is not None]
    epsilon = (0.03 if anneals else 0.3) * (1 if kind == "rows" else kind)
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.rand(count, generator=generator) + 0.2 for count in (40, 50))
    parts = [*(part[0] for part in parts), (a / a.sum()).to(DEVICE), (b / b.sum()).to(DEVICE)]

    def gradients(kernel, double, by_epsilon):
        given = [part.to(torch.float64 if double else torch.float32).requires_grad_() for part in parts]
        *cost, a, b = given
        unit = torch.tensor(epsilon, dtype=torch.float64, device=DEVICE, requires_grad=by_epsilon)
        cost = DenseCost(*cost) if len(cost) == 1 else PointCloud(*cost)
        solution = solve(cost, a, b, epsilon=unit, max_iterations=9, tolerance=0.0, backend=kernel, **options)
        assert (solution._state.stages > 0) == anneals
        result = (solution.f * torch.linspace(-1, 1, 40, device=DEVICE)).sum() + solution.g.square().mean()
        return torch.autograd.grad(result, given)

    four = (gradients(*how) for how in ((NAME, False, False), (NAME, False, True), ("torch", False, False)))
    for one, another, streamed, wanted in zip(*four, gradients("reference", True, False), strict=True):
        grade = max(2e-4, 2 * float((streamed.double() - wanted).norm() / wanted.norm()))  # exponents are up to 1 000
        close(one, wanted, grade)
        close(another, wanted, grade)
