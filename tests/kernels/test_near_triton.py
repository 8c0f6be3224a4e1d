"""Steps over the tiles of columns that count, in Triton: what is left out, and whole descents, against float64."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)

from flashot_backends.kernels.sinkhorn import near, triton_near, triton_symmetric  # noqa: E402
from flashot_backends.kernels.sinkhorn.launch import Shape  # noqa: E402
from flashot_backends.ops.divergence import sinkhorn_divergence, sinkhorn_potentials, transport  # noqa: E402

from .sinkhorn_triton_cases import DEVICE, NAME  # noqa: E402
from .test_symmetric_triton import _kernel, distance, run  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy speaks of every infinity
TOLERANCE = near.TOLERANCE[torch.float32]


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """Small tiles for small clouds, taken wherever they may pay: which steps were, and how often lists were made."""
    found = {"steps": [], "lists": 0, "again": 0}
    step, run = triton_near.Nearby.step, triton_near.Nearby._run

    def noted(self, descent, k, *rest):
        found["steps"].append(step(self, descent, k, *rest))
        return found["steps"][-1]

    def counted(self, descent, k, sloped, work, lists, sums=None):
        found["lists"] += 1
        found["again"] += sums is not None
        return run(self, descent, k, sloped, work, lists, sums)

    monkeypatch.setattr(triton_symmetric, "_small", lambda device: 0)
    monkeypatch.setattr(triton_near, "limit", lambda name, device: 1)
    monkeypatch.setattr(triton_near, "shape_for", lambda d, device: Shape(8, 16, 4, 1, 4))
    monkeypatch.setattr(triton_near, "COLUMNS", 16)
    monkeypatch.setattr(triton_near, "CLEARLY", 0.0)
    monkeypatch.setattr(triton_near.Nearby, "step", noted)
    monkeypatch.setattr(triton_near.Nearby, "_run", counted)
    return found


def cloud(n, d, seed, batch=()):
    return torch.rand(*batch, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def problem(n=60, m=90, d=3, batch=()):
    """x, y, a, b in float64."""
    a, b = cloud(n, 1, 3, batch)[..., 0] + 0.1, cloud(m, 1, 4, batch)[..., 0] + 0.1
    x, y = cloud(n, d, 1, batch), 0.8 * cloud(m, d, 2, batch) + 0.1
    return x, y, a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)


def check(parts, wanted="xyab", tolerance=5e-6, **options):
    """No further from float64 than the tolerance, or than twice the same kernels over all pairs, or torch.

    At a blur of 0.04 gradients in float32 were 1.4e-6 to 3.6e-6 off in ten problems of 40 and 50 points over all
    pairs, and 1.3e-6 to 2.6e-6 over lists.
    """
    ours = run(NAME, torch.float32, parts, wanted, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_near, "of", lambda *_: None)
        all_pairs = run(NAME, torch.float32, parts, wanted, **options)
    exact, streamed = (run("torch", dtype, parts, wanted, **options) for dtype in (torch.float64, torch.float32))
    for name, found, expected, *others in zip("v" + wanted, ours, exact, all_pairs, streamed, strict=True):
        free = name in "ab" and options.get("reach") is None  # potentials are known up to a constant
        limit = max(*(2 * distance(other, expected, free) for other in others), tolerance)
        assert distance(found, expected, free) <= limit, (name, distance(found, expected, free), limit)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("reach", "debias"),
    [(0.3, True), pytest.param(None, True, marks=SLOW), pytest.param(None, False, marks=SLOW)],
)
def test_descents(steps, reach, debias):
    check(problem(40, 60), blur=0.04, scaling=0.3, reach=reach, debias=debias)
    assert sum(steps["steps"]) >= 2
    assert not steps["steps"][0]  # under its temperature everything counts


@pytest.mark.parametrize("wanted", ["x", pytest.param("y", marks=SLOW), pytest.param("", marks=SLOW)])
def test_only_what_is_wanted(steps, wanted):
    check(problem(40, 50, 2), wanted, blur=0.04, scaling=0.3)
    assert any(steps["steps"])


def test_batches_with_temperatures_of_their_own(steps):
    check(problem(30, 40, 2, (2,)), "xb", blur=0.04, scaling=0.2, diameter=[1.5, 3.0])
    assert any(steps["steps"])


def test_potentials_come_back_in_their_places(steps):
    parts = problem(40, 50, 1)
    found = sinkhorn_potentials(*(part.float() for part in parts), blur=0.02, backend=NAME)
    exact = sinkhorn_potentials(*parts, blur=0.02, backend="torch")
    assert any(steps["steps"])
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def test_transport_from_potentials_that_are_given(steps):
    parts, temperatures = problem(40, 50, 2, (2,)), [[0.02, 0.01], [0.01, 0.005], [0.005, 0.002], [0.005, 0.002]]

    def found(backend, dtype):
        x, y, a, b = inputs = [part.to(dtype).requires_grad_() for part in parts]
        value, *potentials = transport.transport(x, y, a, b, temperatures, None, True, backend=backend)
        return [value, *potentials, *torch.autograd.grad(value.sum(), inputs)]

    for ours, exact in zip(found(NAME, torch.float32), found("torch", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=5e-6 * float(exact.abs().max()))
    assert any(steps["steps"])


def test_sums_that_were_expected_larger_get_longer_lists(steps):
    """Potentials fall by much from a temperature to one a tenth of it: first lists are too short for some."""
    check(problem(60, 80, 1), "x", blur=0.02, scaling=0.15)
    assert 0 < steps["again"] < steps["lists"]


def test_steep_descents_leave_the_range_of_numbers(steps):
    check(problem(30, 40, 3), "xa", blur=2e-3, scaling=0.05, tolerance=2e-4)
    assert False in steps["steps"]


def test_lists_in_parts(steps, monkeypatch):
    parts, options = problem(40, 60, 1), {"blur": 0.02, "scaling": 0.1}
    whole = run(NAME, torch.float32, parts, "x", **options)
    monkeypatch.setattr(triton_near, "TOGETHER", 3)
    for one, other in zip(whole, run(NAME, torch.float32, parts, "x", **options), strict=True):
        assert torch.equal(one, other)
    assert any(steps["steps"])


def test_what_is_no_number_is_left_to_all_pairs(steps):
    x, y, a, b = problem(20, 20, 2)
    x[3, 1] = float("nan")
    x, y, a, b = (part.float() for part in (x, y, a, b))
    assert not sinkhorn_divergence(x, y, a, b, blur=0.05, diameter=2.0, backend=NAME).isfinite()
    assert not steps["steps"]


@pytest.mark.parametrize("d", [1, 2, 8])
def test_tiles_are_told_as_they_are(d):
    """Boxes, masses, and affine bounds of the potentials that some point reaches."""
    n, epsilon = 83, 0.01
    x, _, a, _ = (part.float() for part in problem(n, 5, d))
    nearby = triton_near.Nearby(triton_symmetric.Clouds(x[None], a[None], x[None], a[None]))
    blur = epsilon**0.5
    points, weights = nearby.clouds.x[0], nearby.clouds.a[0]
    lines = points @ torch.linspace(1, 2, d, device=DEVICE), torch.sin(9 * points).sum(1)
    for potential in lines:
        told = nearby.tell((points.T.contiguous(), potential, weights), (0, 0, 0), n, n, epsilon)
        for tile, part in enumerate(torch.arange(n, device=DEVICE).split(16)):
            inside, phi = points[part].double() / blur, potential[part].double() / epsilon
            centre, half, tilt = told[: 3 * d, tile].view(3, d)
            torch.testing.assert_close(centre - half, inside.amin(0), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(centre + half, inside.amax(0), rtol=1e-12, atol=1e-12)
            room = told[3 * d, tile] + (inside - centre) @ tilt - phi
            assert abs(float(room.min())) < 1e-10
            torch.testing.assert_close(told[3 * d + 1, tile], weights[part].double().sum())
            if potential is lines[0]:  # an affine one is found, nearly
                assert float(room.max()) < (1e-3 if d == 1 else 0.5 * float(phi.max() - phi.min()))


@pytest.mark.parametrize("kind", ["uniform", "clusters", "outliers", "duplicates", "no weight"])
@pytest.mark.parametrize("d", [1, 3, pytest.param(5, marks=SLOW)])
def test_the_bounds_hold(d, kind):
    """Of every sum, in float64: what the tiles that are not in a row's list add is no more than is said and allowed."""
    n, m = 200, 300
    x, y, a, b = problem(n, m, d)
    if kind == "clusters":
        x = 0.02 * x + torch.arange(n, device=DEVICE)[:, None] % 3
        y = 0.05 * y + torch.arange(m, device=DEVICE)[:, None] % 2
    elif kind == "outliers":
        x[::20], y[7] = 20 * x[::20], y[7] - 10
    elif kind == "duplicates":
        x = x[torch.arange(n, device=DEVICE) % 5]
    elif kind == "no weight":
        a[::7], b[:40] = 0, 0
    x, y, a, b = (part.float().double() for part in (x, y, a, b))
    epsilon, costs = 1e-3, 0.5 * (x[:, None] - y).square().sum(-1)
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(10):
        g = -epsilon * torch.logsumexp(a.log()[:, None] + (f[:, None] - costs) / epsilon, 0)
        f = -epsilon * torch.logsumexp(b.log() + (g - costs) / epsilon, 1)
    f, g = f.float(), g.float()
    nearby = triton_near.Nearby(triton_symmetric.Clouds(*(part.float()[None] for part in (x, a, y, b))))
    (by_x,), (by_y,) = nearby.orders
    told = triton_near.Sides(
        *(
            nearby.tell((points.T.contiguous(), potential[order], weight), (0, 0, 0), len(points), len(points), epsilon)
            for points, potential, order, weight in (
                (nearby.clouds.x[0], f, by_x, nearby.clouds.a[0]),
                (nearby.clouds.y[0], g, by_y, nearby.clouds.b[0]),
            )
        )
    )
    lists = nearby.count(told, torch.full_like(told.rows[0], TOLERANCE))
    ends = lists.counts.cumsum(0)
    tiles = torch.empty(int(ends[-1]), dtype=torch.int32, device=DEVICE)
    nearby.fill(told, lists, ends - lists.counts, tiles, 0, len(ends), 0)
    terms = (b * ((f.double()[:, None] + g.double() - costs) / epsilon).exp())[by_x][:, by_y]
    left = 0
    for row, some in enumerate(tiles.tensor_split(ends[:-1].cpu())):
        assert len(some.unique()) == len(some) == lists.counts[row]
        others = torch.ones(-(-m // 16), dtype=torch.bool, device=DEVICE)
        others[some.long()] = False
        left += int(others.sum())
        dropped = terms[16 * row : 16 * row + 16][:, others.repeat_interleave(16)[:m]].sum(1)
        assert (dropped <= lists.lefts[row]).all()
        assert lists.lefts[row] <= TOLERANCE
    assert left > 0 or d == 5  # there, tiles of 16 points are half as wide as the cube


@pytest.mark.parametrize(("n", "d", "size"), [(1, 2, 16), (16, 1, 16), (17, 3, 16), (1000, 3, 16), (777, 2, 64)])
def test_tiles_are_close_together(n, d, size):
    points = cloud(n, d, 0)
    order = triton_near.in_tiles(points, size)
    assert torch.equal(order.sort().values, torch.arange(n, device=DEVICE))
    volumes = [float((tile.amax(0) - tile.amin(0)).prod()) for tile in points[order].split(size)]
    assert sum(volumes) / len(volumes) <= 1.1 * min(1.0, size / n)


def test_tiles_of_one_point():
    order = triton_near.in_tiles(torch.zeros(50, 3, device=DEVICE), 16)
    assert torch.equal(order.sort().values, torch.arange(50, device=DEVICE))
