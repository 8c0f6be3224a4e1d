"""Large temperatures in time linear in the points: sums over cells against sums over all pairs, in float64."""

import math

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn import far, whole  # noqa: E402
from flashot_backends.ops.divergence import sinkhorn_divergence, sinkhorn_potentials  # noqa: E402

from .test_divergence import problem  # noqa: E402


def field(n=300, m=250, d=3, seed=0, spread=1.0):
    """Two clouds of which one has two far clusters, and biases that differ by a lot."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64) * spread
    y = 0.05 * torch.randn(m, d, generator=generator, dtype=torch.float64) + (torch.arange(m) % 2)[:, None] * spread
    low, high = torch.minimum(x.amin(0), y.amin(0)), torch.maximum(x.amax(0), y.amax(0))
    biases = [20 * torch.randn(size, generator=generator, dtype=torch.float64) for size in (m, n, n, m)]
    return far.Field(x, y, low.tolist(), high.tolist()), biases


def every_pair(x, y, h, epsilon):
    return -epsilon * torch.logsumexp(h - (x[:, None] - y).square().sum(-1) / (2 * epsilon), 1)


@pytest.mark.parametrize("room", [1 << 24, 3000])
@pytest.mark.parametrize("epsilon", [30.0, 1.0, 0.1, 0.02])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_softmin_is_within_the_bound(monkeypatch, d, epsilon, room):
    monkeypatch.setattr(far, "_room", lambda points: room)
    monkeypatch.setattr(far, "ROWS", 1 << 13 if room > 3000 else 20)
    clouds, biases = field(d=d)
    x, y = clouds.x, clouds.y
    for found, (rows, columns), h in zip(
        clouds.softmins(epsilon, biases), ((x, y), (y, x), (x, x), (y, y)), biases, strict=True
    ):
        worst = (found - every_pair(rows, columns, h, epsilon)).abs().max()
        assert worst <= far.TOLERANCE * epsilon


@pytest.mark.parametrize("most", [512, 200, 130, 100])
def test_cells_are_wider_only_where_they_would_be_too_many(monkeypatch, most):
    monkeypatch.setattr(far, "MOST_CELLS", most)
    clouds, biases = field()
    across = far.cells_across(clouds.low, clouds.high, 0.05)
    sides = [top - low for low, top in zip(clouds.low, clouds.high, strict=True)]
    narrow = [math.ceil(side / (2 * math.sqrt(0.05 / 3))) for side in sides]
    assert (across == narrow) == (math.prod(narrow) <= most)
    assert math.isinf(clouds.seconds(0.05, True)) == (math.prod(across) > most)
    for found, (rows, columns), h in zip(
        clouds.softmins(0.05, biases), ((clouds.x, clouds.y), (clouds.y, clouds.x)), biases, strict=False
    ):
        assert (found - every_pair(rows, columns, h, 0.05)).abs().max() <= far.TOLERANCE * 0.05


@pytest.mark.parametrize("product", [0.0, 0.1, 0.5, 1.0, 3.0])
def test_the_degree_keeps_its_promise(product):
    t = torch.linspace(-product, product, 101, dtype=torch.float64)
    series = sum(t**k / math.factorial(k) for k in range(far._degree(product) + 1))
    assert ((series - t.exp()).abs() / t.exp()).max() <= far.TOLERANCE


def test_columns_without_weight_and_rows_beyond_reach():
    clouds, biases = field()
    h = torch.where(torch.arange(len(clouds.y)) % 2 == 0, biases[0], -torch.inf)  # a whole cluster weighs nothing
    (found,) = clouds.softmins(0.05, [h])
    torch.testing.assert_close(found, every_pair(clouds.x, clouds.y, h, 0.05), rtol=0, atol=1e-8)
    (nothing,) = clouds.softmins(0.05, [torch.full_like(h, -torch.inf)])
    assert (nothing == torch.inf).all()


@pytest.mark.parametrize("flat", [1, 3])
def test_clouds_without_extent(flat):
    x = torch.rand(40, 3, dtype=torch.float64)
    x[:, :flat] = 0.25
    low, high = x.amin(0).tolist(), x.amax(0).tolist()
    h = torch.zeros(40, dtype=torch.float64)
    (found,) = far.Field(x, x, low, high).softmins(0.05, [h])
    torch.testing.assert_close(found, every_pair(x, x, h, 0.05), rtol=0, atol=1e-8)


@pytest.fixture
def eager(monkeypatch):
    """As if pairs cost much, so that small clouds take this way too; counts how often."""
    taken, softmins = [], far.softmins
    monkeypatch.setattr(whole, "MOST", 0)
    monkeypatch.setitem(far.COSTS, "cpu", far.Costs(1.0, 1e-9, 1e-9, 1e-9))
    monkeypatch.setattr(far, "softmins", lambda *given: (taken.append(given), softmins(*given))[1])
    return taken


@pytest.mark.parametrize("reach", [None, 0.4])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_divergence_stays_the_same(eager, d, debias, reach):
    parts = problem(60, 50, d, (2,))
    options = {"blur": 0.1, "reach": reach, "debias": debias, "diameter": "each"}

    def run(dtype):
        inputs = [part.to(dtype).requires_grad_() for part in parts]
        value = sinkhorn_divergence(*inputs, **options)
        found = value, *torch.autograd.grad(value.sum(), inputs), *sinkhorn_potentials(*inputs, **options)
        return [part.detach() for part in found]

    found = run(torch.float32)
    assert eager
    eager.clear()
    exact = run(torch.float64)
    assert not eager  # not right enough for float64
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def test_small_clouds_and_small_temperatures_are_summed_over_all_pairs(monkeypatch):
    monkeypatch.setattr(far, "softmins", None)
    x, y, a, b = (part.float() for part in problem(200, 150))
    assert sinkhorn_divergence(x, y, a, b).isfinite()
    assert not far.fields(x[None], y[None])
    large = torch.rand(1, 30_000, 3)
    (one,) = far.fields(large, large)
    assert one.pays(1.0)
    assert not one.pays(1e-4)
    assert not far.fields(large.double(), large.double())
    assert not far.fields(torch.rand(1, 30_000, 4), torch.rand(1, 30_000, 4))


def test_a_kernel_asked_for_by_name_serves_alone(eager):
    x, y, a, b = (part.float() for part in problem(40, 30))
    sinkhorn_divergence(x, y, a, b, backend="reference")
    assert not eager
