"""The Triton kernels, interpreted on the CPU or compiled where there is a card, against a plain solver in float64."""

import gc
import math
import os
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)

from flashot_backends import dispatch  # noqa: E402
from flashot_backends.kernels.sinkhorn import reference, shapes, triton  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402
from flashot_backends.ops.sinkhorn import softmin, solve  # noqa: E402
from tests.ops.sinkhorn_cases import INF, normal, sinkhorn  # noqa: E402

from .sinkhorn_triton_cases import (  # noqa: E402
    DEVICE,
    LAYOUTS,
    NAME,
    check,
    check_gradients,
    check_products,
    dense,
    in_strips,
    largest_exponent,
    make_cost,
    matrix,
    points,
    serving,
    streamed,
    uneven,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = shapes.TEST_ONE_TILE + shapes.TEST_TILES
ONE, SEVERAL = (5, 7), (70, 150)
both = pytest.mark.parametrize("size", [ONE, SEVERAL], ids=["resident", "streamed"])
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytestmark = quiet  # the interpreter computes with numpy, which speaks of every infinity


@pytest.fixture(autouse=True, scope="module")
def _kernel():
    with serving("sinkhorn", triton):
        yield


def resident(monkeypatch):
    """One launch, where everything fits in registers."""


PATHS = {"resident": resident, "streamed": streamed, "strips": in_strips}
paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@pytest.mark.parametrize("d", shapes.TEST_DIMENSIONS)
def test_dimensions(d):
    check(NAME, *points(*ONE, d, device=DEVICE), *uneven(*ONE, device=DEVICE))


@pytest.mark.parametrize("d", [1, 8, 16, 150])
def test_dimensions_streamed(d, monkeypatch):
    streamed(monkeypatch)
    check(NAME, *points(*ONE, d, device=DEVICE), *uneven(*ONE, device=DEVICE), iterations=2)


@pytest.mark.parametrize("kind", ["points", "matrix"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, kind):
    problem = points(*size, 2, device=DEVICE) if kind == "points" else matrix(*size, device=DEVICE)
    check(NAME, *problem, *uneven(*size, device=DEVICE), iterations=2)


def test_matrix_units_over_several_tiles():
    check(NAME, *points(*SEVERAL, 16, device=DEVICE), iterations=2)


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_matrix(layout, size):
    (M,), epsilon = matrix(*size, device=DEVICE)
    check(NAME, (LAYOUTS[layout](M),), epsilon, *uneven(*size, device=DEVICE), iterations=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [3, 20])
def test_layouts_of_points(layout, d):
    (x, y), epsilon = points(*ONE, d, device=DEVICE)
    check(NAME, (LAYOUTS[layout](x), LAYOUTS[layout](y)), epsilon, iterations=2)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", ["matrix", 3, 20])
def test_narrow_inputs(kind, dtype):
    """Computed from as they are: nothing is lost beyond their own rounding."""
    if kind == "matrix":
        problem = matrix(*ONE, dtype=dtype, device=DEVICE)
    else:
        problem = points(*ONE, kind, dtype=dtype, device=DEVICE)
    check(NAME, *problem)


def test_expanded_over_a_batch():
    """Costs and weights that lie in memory once."""
    (M,), epsilon = matrix(*ONE, device=DEVICE)
    a, b = uneven(*ONE, device=DEVICE)
    check(NAME, (M.expand(3, *ONE),), epsilon, a.expand(3, -1), b, iterations=2)
    (x, y), epsilon = points(*ONE, 3, batch=(3,), device=DEVICE)
    check(NAME, (x[:1].expand_as(x), y), epsilon, iterations=2)


@both
@pytest.mark.parametrize("kind", ["matrix", 3, 16])
@pytest.mark.parametrize("uniform", [True, False])
def test_batches_with_their_own_regularisation(kind, size, uniform, monkeypatch):
    if size != ONE:
        streamed(monkeypatch)
        size = (9, 6)
    batch = (2, 2)
    problem = matrix(*size, batch, device=DEVICE) if kind == "matrix" else points(*size, kind, batch, device=DEVICE)
    epsilon = problem[1] * torch.tensor([[0.5, 1.0], [2.0, 5.0]], dtype=torch.float64, device=DEVICE)
    weights = (None, None) if uniform else uneven(*size, batch, device=DEVICE)
    check(NAME, problem[0], epsilon, *weights, iterations=3)


@paths
def test_elements_stop_on_their_own(path, monkeypatch):
    path(monkeypatch)
    scale = torch.tensor([0.02, 1.0, 6.0], device=DEVICE)[:, None, None]
    cost = make_cost((normal(8, 9).abs().to(DEVICE, torch.float32) * scale,))
    options = {"epsilon": 0.5, "tolerance": 1e-3, "check_every": 2, "max_iterations": 30}
    found, wanted = (solve(cost, backend=name, **options) for name in (NAME, "reference"))
    assert torch.equal(found.iterations, wanted.iterations)
    assert len(set(found.iterations.tolist())) > 1
    assert torch.equal(found.converged, wanted.converged)
    torch.testing.assert_close(found.f, wanted.f, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.g, wanted.g, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.error, wanted.error, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(17, 30), (7, 520)], ids=str)
@pytest.mark.parametrize("kind", ["matrix", 1, 8])
def test_strips(kind, size, dtype, monkeypatch):
    in_strips(monkeypatch)
    problem = matrix(*size, device=DEVICE) if kind == "matrix" else points(*size, kind, device=DEVICE)
    problem = tuple(part.to(dtype) for part in problem[0]), problem[1]
    a, b = uneven(*size, device=DEVICE, zeros=2)
    check(NAME, *problem, a, b, iterations=3)


@pytest.mark.parametrize("kind", ["matrix", 2])
@pytest.mark.parametrize("columns", [2100, pytest.param(3500, marks=pytest.mark.slow if INTERPRETED else ())])
def test_columns_in_parts(kind, columns, monkeypatch):
    """So many that the padding of prepared columns ends in the middle of what warps load at once."""
    in_strips(monkeypatch)
    problem = matrix(9, columns, device=DEVICE) if kind == "matrix" else points(9, columns, kind, device=DEVICE)
    check(NAME, *problem, *uneven(9, columns, device=DEVICE, zeros=2), iterations=3)


@pytest.mark.parametrize("kind", ["matrix", 3])
def test_strips_of_a_batch(kind, monkeypatch):
    in_strips(monkeypatch)
    batch, size = (2,), (12, 9)
    problem = matrix(*size, batch, device=DEVICE) if kind == "matrix" else points(*size, kind, batch, device=DEVICE)
    epsilon = problem[1] * torch.tensor([0.5, 2.0], dtype=torch.float64, device=DEVICE)
    check(NAME, problem[0], epsilon, *uneven(*size, batch, device=DEVICE), iterations=4)


@pytest.mark.parametrize("kind", ["matrix", 3])
def test_strips_around_a_bad_stabiliser(kind, monkeypatch):
    """ε so small that potentials jump by more than floating point numbers can bridge."""
    in_strips(monkeypatch)
    (*tensors,), _ = matrix(20, 15, device=DEVICE) if kind == "matrix" else points(20, 15, kind, device=DEVICE)
    check(NAME, tuple(tensors), torch.tensor(2e-3, dtype=torch.float64), None, None, iterations=6)


@both
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_forbidden_pairs(size, norm):
    (M,), epsilon = matrix(*size, device=DEVICE)
    M[0, 0] = M[2, 3] = M[1, 1:4] = INF
    solution = check(NAME, (M,), epsilon, *uneven(*size, device=DEVICE), iterations=2, norm=norm)
    assert solution.plan()[2, 3] == 0


@both
@pytest.mark.parametrize("kind", ["matrix", 3, 16])
def test_rows_and_columns_without_mass(kind, size):
    if size == SEVERAL and kind == 16:
        size = (70, 40)
    problem = matrix(*size, device=DEVICE) if kind == "matrix" else points(*size, kind, device=DEVICE)
    a, b = uneven(*size, device=DEVICE, zeros=2)
    solution = check(NAME, *problem, a, b, iterations=2)
    f, g = sinkhorn(dense(problem[0])[2:, 2:], a[2:].double(), b[2:].double(), problem[1], 2)
    rows = -problem[1] * torch.logsumexp(b[2:].double().log() + (g - dense(problem[0])[:2, 2:]) / problem[1], -1)
    torch.testing.assert_close(solution.f[:2].double(), rows, rtol=1e-4, atol=1e-4 * problem[1])
    assert solution.f.isfinite().all() and solution.g.isfinite().all() and f.isfinite().all()


@paths
def test_padding_that_may_go_nowhere(path, monkeypatch):
    """No mass and only forbidden pairs: everybody else is as without."""
    path(monkeypatch)
    (M,), epsilon = matrix(7, 9, device=DEVICE)
    a, b = uneven(7, 9, device=DEVICE)
    pad = torch.nn.functional.pad
    options = {"epsilon": epsilon, "tolerance": 1e-5, "max_iterations": 40}
    padded = make_cost((pad(M, (0, 2, 0, 1), value=INF),))
    found = solve(padded, pad(a, (0, 1)), pad(b, (0, 2)), backend=NAME, **options)
    wanted = solve(make_cost((M,)), a, b, backend="reference", **options)
    assert found.converged and found.iterations == wanted.iterations
    assert not found.f.isnan().any() and not found.g.isnan().any()
    torch.testing.assert_close(found.f[:7], wanted.f, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.g[:9], wanted.g, rtol=0, atol=1e-5)


@paths
@pytest.mark.parametrize("kind", ["matrix", 3, 16])
def test_a_stabiliser_that_is_far_off(kind, path, monkeypatch):
    """The column sums after a wild start leave every safe range: they are taken again around their own maximum."""
    path(monkeypatch)
    (tensors, epsilon) = matrix(*ONE, device=DEVICE) if kind == "matrix" else points(*ONE, kind, device=DEVICE)
    start = (300 * epsilon * normal(5, seed=9)).to(DEVICE, torch.float32)
    check(NAME, tensors, epsilon, *uneven(*ONE, device=DEVICE), start=start, iterations=2, grade=6e-5)


@pytest.mark.parametrize("d", [16, 150])
@paths
def test_coordinates_too_large_for_float16(d, path, monkeypatch):
    """Scaled by √(2 log₂e/ε) they would overflow: they are made smaller, and the slope makes good for it."""
    path(monkeypatch)
    (x, y), _ = points(*ONE, d, device=DEVICE)
    x[0, 0] = 3e5
    check(NAME, (x, y), 2.0, iterations=2)
    (x, y), _ = points(*ONE, d, batch=(2,), device=DEVICE)
    x[1] *= 1e5
    check(NAME, (x, y), torch.tensor([0.3 * d, 3e9 * d], dtype=torch.float64, device=DEVICE), iterations=2)


@pytest.mark.parametrize("d", [3, 16])
@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_offsets(d, offset):
    (x, y), epsilon = points(*ONE, d, device=DEVICE)
    x, y = x + offset, y + offset
    check(NAME, (x, y), epsilon)


@pytest.mark.parametrize("kind", ["matrix", 3, 16])
def test_softmin(kind):
    problem = matrix(*ONE, (2,), device=DEVICE) if kind == "matrix" else points(*ONE, kind, (2,), device=DEVICE)
    h = normal(2, 7, seed=3).to(DEVICE, torch.float32)
    h[1, 2] = -INF
    M, epsilon = dense(problem[0]), problem[1]
    wanted = -epsilon * torch.logsumexp(h.double()[:, None] - M / epsilon, -1)
    found = softmin(make_cost(problem[0]), h, epsilon, backend=NAME)
    allowed = 3e-6 * largest_exponent(M, epsilon) * epsilon
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("kind", ["matrix", 3, 16])
@pytest.mark.parametrize("size", [ONE, (70, 40)], ids=str)
def test_products_with_the_plan(kind, size):
    tensors, epsilon = matrix(*size, device=DEVICE) if kind == "matrix" else points(*size, kind, device=DEVICE)
    if kind == "matrix":
        tensors[0][1, 2:5] = INF
    check_products(NAME, tensors, epsilon)


@pytest.mark.parametrize("kind", ["matrix", 3, 16])
def test_gradients(kind):
    problem = matrix(*ONE, device=DEVICE) if kind == "matrix" else points(*ONE, kind, device=DEVICE)
    check_gradients(NAME, *problem, *uneven(*ONE, device=DEVICE))


@pytest.mark.parametrize("kind", ["matrix", 3])
def test_far_pairs_count_nothing(kind):
    """Whose squared cost no float32 holds, whatever their place in a tile."""
    n, m = 40, 70
    epsilon = torch.full((1,), 0.5, dtype=torch.float64, device=DEVICE)
    if kind == "matrix":
        costs = normal(1, n, m).abs().to(DEVICE, torch.float32)
        costs[0, 3, 5], costs[0, 30, 69], costs[0, 3, 64] = 1e20, 1e25, 1e30
        cost = Cost(None, None, costs)
    else:
        x, y = (normal(1, count, 3, seed=count).to(DEVICE, torch.float32) for count in (n, m))
        y[0, 5] = 1e9
        cost = Cost(x, y, None)
    wide = Cost(*(None if part is None else part.double() for part in cost[:3]))
    operator, exact = triton.Fused(cost, epsilon), reference.operator(wide, epsilon)
    h = torch.zeros(1, m, device=DEVICE)
    s = exact.softmin(h.double()) / 0.5
    for power in (1, 2):
        found, wanted = operator.cost_apply(s.float(), h, power), exact.cost_apply(s, h.double(), power)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=1e-5)
    values = torch.ones(1, m, 1, device=DEVICE)
    torch.testing.assert_close(operator.moment(s.float(), h, values, 2)[..., 0].double(), wanted, rtol=2e-4, atol=1e-5)


def spoiled(tensor, value):
    """The tensor with another last number."""
    out = tensor.clone()
    out.view(-1)[-1] = value
    return out


@pytest.mark.parametrize(("kind", "path"), [("matrix", resident), (3, resident), (16, resident), (1, streamed)])
def test_bad_values_are_reported(kind, path, monkeypatch):
    """The kernels look at the values themselves."""
    path(monkeypatch)
    tensors, epsilon = matrix(*ONE, device=DEVICE) if kind == "matrix" else points(*ONE, kind, device=DEVICE)
    a, b = uneven(*ONE, device=DEVICE)

    def refused(message, tensors=tensors, a=a, b=b):
        with pytest.raises(ValueError, match=message):
            solve(make_cost(tensors), a, b, epsilon=epsilon, max_iterations=1, backend=NAME)

    first = "M" if kind == "matrix" else "x"
    for value in (math.nan, -INF):
        refused(f"{first} holds", tensors=(spoiled(tensors[0], value), *tensors[1:]))
    if kind != "matrix":
        refused("y holds", tensors=(tensors[0], spoiled(tensors[1], INF)))
    refused("a holds", a=spoiled(a, -0.1))
    refused("b holds", b=spoiled(b, math.nan))
    refused("masses of a and b differ", b=1.1 * b)
    refused("mass of a is 0", a=0 * a)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, INF])
def test_bad_regularisation_is_reported(value):
    """Whatever its place in the batch."""
    cost, good = make_cost(matrix(*ONE, device=DEVICE)[0]), torch.ones(2, dtype=torch.float64, device=DEVICE)
    for epsilon in (spoiled(good, value), spoiled(good, value).flip(0)):
        with pytest.raises(ValueError, match="epsilon holds"):
            solve(cost, epsilon=epsilon, max_iterations=1, backend=NAME)


def test_an_empty_batch():
    solution = solve(make_cost((torch.zeros(0, *ONE, device=DEVICE),)), epsilon=1.0, backend=NAME)
    assert solution.f.shape == (0, 5) and solution.converged.shape == (0,)


@pytest.mark.parametrize("d", [16, 150])
def test_fast_products_are_close(d):
    check(NAME, *points(*ONE, d, device=DEVICE), iterations=2, grade=3e-3, precision="fast")


def test_what_it_leaves_to_others():
    with pytest.raises(dispatch.BackendError, match="float64"):
        solve(make_cost((torch.ones(ONE, dtype=torch.float64, device=DEVICE),)), epsilon=1.0, backend=NAME)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e20])
def test_products_with_values_of_any_size(scale):
    """Values are scaled by their largest, which may be nothing at all."""
    (x, y), epsilon = points(20, 30, 16, device=DEVICE)
    solution = solve(make_cost((x, y)), epsilon=epsilon, max_iterations=3, tolerance=0, backend=NAME)
    values = normal(30, 40).to(DEVICE, torch.float32)
    wanted = solution.plan().double() @ (scale * values.double())
    found = solution.apply(scale * values).double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()) + 1e-44)


@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_gradients_of_the_value(gradient):
    """By points of many coordinates: with the envelope nothing flows back through the potentials."""
    (x, y), epsilon = points(20, 30, 16, device=DEVICE)
    found = []
    for cast, backend in ((torch.float32, NAME), (torch.float64, "reference")):
        leaf = x.to(cast).requires_grad_()
        options = {"epsilon": epsilon, "tolerance": 1e-6, "gradient": gradient, "backend": backend}
        value = solve(make_cost((leaf, y.to(cast))), **options).value()
        found.append(torch.autograd.grad(value, leaf)[0].double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-4


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize("kind", ["matrix", 16])
def test_nothing_waits_for_the_collector(gradient, kind, monkeypatch):
    """What was prepared goes when it was used: the collector of cyclic garbage does not know how much a card has."""
    made, init = [], triton.Fused.__init__

    def noted(self, *given, **options):
        init(self, *given, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(triton.Fused, "__init__", noted)
    parts, epsilon = matrix(12, 15, device=DEVICE) if kind == "matrix" else points(12, 15, kind, device=DEVICE)
    gc.disable()
    try:
        for _ in range(3):
            leaf = parts[0].clone().requires_grad_()
            options = {"epsilon": epsilon, "max_iterations": 3, "tolerance": 0, "gradient": gradient}
            solution = solve(make_cost((leaf, *parts[1:])), backend=NAME, **options)
            solution.apply(torch.ones(15, 2, device=DEVICE))
            torch.autograd.grad(solution.value(), leaf)
            del solution, leaf
        assert len(made) > 3
        assert not any(one() for one in made)
    finally:
        gc.enable()


REACHES = {"both": (0.7, 0.3), "rows": (0.5, math.inf), "columns": (math.inf, 0.4), "far": (300.0, 200.0)}
SLOW = {name: pytest.mark.slow if INTERPRETED and name in ("rows", "columns") else () for name in REACHES}


@pytest.mark.parametrize("path", [streamed, in_strips], ids=["streamed", "strips"])
@pytest.mark.parametrize("kind", ["matrix", 2, 16])
@pytest.mark.parametrize("reach", [pytest.param(reach, id=name, marks=SLOW[name]) for name, reach in REACHES.items()])
def test_marginals_that_may_be_missed(reach, kind, path, monkeypatch):
    """The loop on the card against the one that the host steers, in float64: no worse than that one in float32."""
    path(monkeypatch)
    size, batch = (20, 30), (2,)
    drawn = matrix(*size, batch, device=DEVICE) if kind == "matrix" else points(*size, kind, batch, device=DEVICE)
    (tensors, epsilon), (a, b) = drawn, uneven(*size, batch, DEVICE)
    a, b = a * torch.tensor([[1.0], [2.0]], device=DEVICE), 1.7 * b
    if math.inf in reach:
        b = b * (a.sum(-1) / b.sum(-1))[:, None]
    b[0, 3] = a[1, 5] = 0
    unit = 1.0 if kind == "matrix" else float(kind)
    own = epsilon * torch.tensor([1.0, 0.4], device=DEVICE, dtype=torch.float64)
    rho = tuple(torch.tensor([part * unit, 2 * part * unit], device=DEVICE, dtype=torch.float64) for part in reach)
    options = {"epsilon": own, "reach": rho, "max_iterations": 13, "check_every": 4, "tolerance": 1e-3}
    options["acceleration"] = "auto" if path is streamed else None
    found = solve(make_cost(tensors), a, b, backend=NAME, **options)
    plain = solve(make_cost(tensors), a, b, backend="reference", **options)
    wide = make_cost([part.double() for part in tensors])
    wanted = solve(wide, a.double(), b.double(), backend="reference", **options)
    assert torch.equal(found.iterations, wanted.iterations)
    units = {"f": own[:, None], "g": own[:, None], "errors": 1.0}
    away = {}
    for name, exact in (("f", wanted.f), ("g", wanted.g), ("errors", wanted.errors)):
        away[name], usual = (
            ((getattr(one, name) - exact) / units[name]).abs().nan_to_num().max() for one in (found, plain)
        )
        assert away[name] < 3 * usual + 5e-6, name
    off, usual = ((one.value() / wanted.value() - 1).abs().max() for one in (found, plain))
    assert off < 3 * usual + 1e-5 + away["f"] + away["g"], "a plan is as wrong as the exponents of its entries"


def test_a_reach_is_iterated_on_the_card(monkeypatch):
    """Not steered by the host, also where every iteration is looked at."""
    from flashot_backends.ops.sinkhorn import solver

    def refuse(*args):
        raise AssertionError("steered by the host")

    monkeypatch.setattr(solver, "iterate", refuse)
    tensors, epsilon = points(9, 8, 2, device=DEVICE)
    for often in (3, 1):
        options = {"max_iterations": 4, "check_every": often, "acceleration": "overrelaxation", "tolerance": 0}
        solve(make_cost(tensors), epsilon=epsilon, reach=1.0, backend=NAME, **options)
