"""Small temperatures over the blocks of points that count: what is left out, against all pairs in float64."""

import math

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn import far, near, whole  # noqa: E402
from flashot_backends.ops.divergence import fields, sinkhorn_divergence, sinkhorn_potentials, transport  # noqa: E402
from flashot_backends.ops.sinkhorn.solver import make_operator  # noqa: E402

from .test_divergence import problem  # noqa: E402

PAIRS = ((0, 1), (1, 0), (0, 0), (1, 1))


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform(n, m, d):
    return torch.rand(n, d, generator=random(1)), torch.rand(m, d, generator=random(2))


def clusters(n, m, d):
    x = torch.arange(n)[:, None] % 5 + 0.02 * torch.randn(n, d, generator=random(1))
    return x, torch.arange(m)[:, None] % 3 + 0.05 * torch.randn(m, d, generator=random(2))


def distant(n, m, d):
    x, y = uniform(n, m, d)
    return 1000 + x, 1003 - y


def outliers(n, m, d):
    x, y = uniform(n, m, d)
    x[::50] *= 20
    y[7] -= 10
    return x, y


def duplicates(n, m, d):
    x, _ = uniform(n, m, d)
    return x[torch.arange(n) % 9], x[torch.arange(m) % 3]


def collinear(n, m, d):
    x, y = uniform(n, m, d)
    x[:, 1:] = 0.5
    return x, y[:, :1] * torch.ones(d)


CLOUDS = (uniform, clusters, distant, outliers, duplicates, collinear)


def even(count, _):
    return torch.full((count,), 1 / count)


def wild(count, seed):
    """Weights over thirty orders of magnitude, and none at all for every seventh point."""
    weights = torch.exp(-70 * torch.rand(count, generator=random(seed)))
    weights[::7] = 0
    return weights / weights.sum()


def costs(x, y):
    return 0.5 * (x[:, None] - y).square().sum(-1)


def solved(x, y, a, b, epsilon, iterations=12):
    """Potentials of x and y, in units of ε."""
    C, f = costs(x, y) / epsilon, torch.zeros(len(x))
    for _ in range(iterations):
        g = -torch.logsumexp((a.log() + f)[:, None] - C, 0)
        f = -torch.logsumexp((b.log() + g) - C, 1)
    return f, g


def potentials(x, y, a, b, epsilon, kind):
    """Of this temperature, or of one four times as large, as when it falls; or anything."""
    if kind == "wrong":
        return [0.1 * torch.randn(len(points), generator=random(k)) / epsilon for k, points in enumerate((x, y, x, y))]
    before = epsilon if kind == "solved" else 4 * epsilon
    own = solved(x, x, a, a, before)[0], solved(y, y, b, b, before)[0]
    return [each * before / epsilon for each in (*solved(x, y, a, b, before), *own)]


def every_pair(x, y, h, epsilon):
    """A softmin in units of ε, and its derivative by x."""
    exponents = h - costs(x, y) / epsilon
    return -torch.logsumexp(exponents, 1), x - torch.softmax(exponents, 1) @ y


@pytest.fixture
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def small(monkeypatch, doubles):
    """Blocks for small clouds, and float64 held to float32's tolerance, so that what is left out shows."""
    monkeypatch.setattr(near, "BLOCK", 16)
    monkeypatch.setitem(near.TOLERANCE, torch.float64, near.TOLERANCE[torch.float32])


def error(found, exact):
    """Of a sum, from its logarithm: what is left out, relative to all."""
    return float((-torch.expm1(exact - found)).abs().max())


def both(x, y, a, b, epsilon, given, slopes=(True, True)):
    """What is found and what is exact."""
    found = near.Field(x, y).softmins(epsilon, (a, b, a, b), given, math.inf, slopes)
    sides, weights, of = (x, y), (a, b, a, b), (1, 0, 2, 3)
    exact = [
        every_pair(sides[rows], sides[columns], weights[columns].log() + given[of[k]], epsilon)
        for k, (rows, columns) in enumerate(PAIRS)
    ]
    return found, exact


@pytest.mark.parametrize("kind", ["solved", "falling", "wrong"])
@pytest.mark.parametrize("weight", [even, wild])
@pytest.mark.parametrize("clouds", CLOUDS)
def test_what_is_left_out_is_bounded(small, clouds, weight, kind):
    d = (1, 2, 3, 6, 2, 3)[CLOUDS.index(clouds)]
    x, y = clouds(300, 220, d)
    a, b, epsilon = weight(300, 3), weight(220, 4), 0.05**2
    found, exact = both(x, y, a, b, epsilon, potentials(x, y, a, b, epsilon, kind))
    if found is None:  # sums beyond what even float64 holds are left to others
        assert kind == "wrong" or weight is wild
        return
    widest = float((torch.cat([x, y]).amax(0) - torch.cat([x, y]).amin(0)).norm())
    for softmin, (value, slope) in zip(found, exact, strict=True):
        assert error(softmin.value, value) <= near.TOLERANCE[torch.float32] + 1e-9
        assert (softmin.slope - slope).abs().max() <= near.TOLERANCE[torch.float32] * widest + 1e-9 * widest


def cold(kind="falling", shift=0.0):
    """Two clouds at a temperature where most pairs of blocks count nothing."""
    (x, y), epsilon = uniform(300, 220, 2), 0.02**2
    a, b = even(300, 3), even(220, 4)
    return x, y, a, b, epsilon, [each - shift for each in potentials(x, y, a, b, epsilon, kind)]


def test_most_pairs_are_left_out(small, monkeypatch):
    visited = []
    add = near.Pair._add
    monkeypatch.setattr(near.Pair, "_add", lambda *given: (visited.append(given[2]), add(*given))[1])
    found, exact = both(*cold("solved"))
    every = 32 * 16 + 32 * 33 / 2 + 16 * 17 / 2
    assert sum(pairs.shape[1] for pairs in visited) < 0.4 * every
    assert any(error(softmin.value, value) > 1e-12 for softmin, (value, _) in zip(found, exact, strict=True))


def test_sums_smaller_than_guessed_are_found_out(small, monkeypatch):
    """Potentials that are 4 ε too small: the sums are e^−8 of what is guessed, and so is what may be left out."""
    given = cold("solved", shift=4.0)
    found, exact = both(*given)
    assert all(error(softmin.value, value) <= 2e-7 for softmin, (value, _) in zip(found, exact, strict=True))
    monkeypatch.setattr(near.Pair, "_better", lambda *given: None)
    unverified, _ = both(*given)
    assert max(error(softmin.value, value) for softmin, (value, _) in zip(unverified, exact, strict=True)) > 4e-7


def pair_of(x, y, a, b, given, blur, itself=False, tolerance=2e-7):
    """Two sides of a cloud each, or one with itself."""
    clouds = near.Field(x, y).clouds
    sides = [near.Side.of(*each, blur) for each in zip(clouds, given, (a, b), strict=False)]
    return near.Pair(sides[0], sides[0 if itself else 1], tolerance)


def test_a_common_offset_changes_nothing(small):
    x, y, a, b, _, given = cold()
    counts = [pair_of(x + offset, y + offset, a, b, given, 0.02).choose().number for offset in (0.0, 1e7)]
    assert abs(counts[0] - counts[1]) <= 1


@pytest.mark.parametrize("kind", ["solved", "wrong"])
@pytest.mark.parametrize("clouds", CLOUDS)
def test_no_exponent_is_above_its_bound(small, clouds, kind):
    x, y = clouds(150, 130, 3)
    a, b, epsilon = even(150, 3), even(130, 4), 0.05**2
    given = potentials(x, y, a, b, epsilon, kind)
    pair = pair_of(x, y, a, b, given, 0.05)
    one, other = pair.rows, pair.columns
    exponents = given[0][:, None] + given[1] - costs(x, y) / epsilon
    blocks = exponents[one.cloud.index][:, :, other.cloud.index].amax((1, 3))
    bounds = pair.bounds(slice(None), slice(None))
    assert (bounds >= blocks - 1e-9 * blocks.abs()).all()


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize(("strip", "close"), [(1 << 15, 32), (70, 32), (1 << 15, 0.01), (70, 0.01)])
@pytest.mark.parametrize("clouds", [uniform, outliers])
def test_what_is_said_to_be_left_out_is(small, monkeypatch, clouds, strip, close, itself):
    monkeypatch.setattr(near, "STRIP", strip)
    monkeypatch.setattr(near, "CLOSE", close)
    x, y = clouds(300, 220, 2)
    a, b, epsilon = wild(300, 3), wild(220, 4), 0.05**2
    given = potentials(x, y, a, b, epsilon, "falling")
    pair = pair_of(x, y, a, b, given[2:] if itself else given, 0.05, itself)
    found = pair.choose()
    one, other = pair.rows, pair.columns
    f, g = one.potential, other.potential
    points = [side.cloud.offsets + side.cloud.centre[:, None] for side in (one, other)]
    squares = (points[0][:, :, None, None] - points[1]).square().sum(-1)
    terms = torch.exp((f[:, :, None, None] + g - squares / (2 * epsilon)).clamp(max=700))  # times 0, it is 0
    dropped = torch.ones(len(f), len(g), dtype=torch.bool)
    dropped[found.pairs[0], found.pairs[1]] = False
    if itself:
        dropped = dropped & dropped.T
    terms = torch.where(dropped[:, None, :, None], terms, 0.0)
    rest = (terms * other.weight).sum((2, 3)).amax(1), (terms * one.weight[:, :, None, None]).sum((0, 1)).amax(1)
    left = [found.left[0] + found.left[1]] * 2 if itself else found.left
    for truth, said in zip(rest, left, strict=True):
        assert (truth <= said * (1 + 1e-9)).all()
        assert (said <= near.TOLERANCE[torch.float64]).all()
        assert truth.max() > 0


@pytest.mark.parametrize("itself", [False, True])
def test_many_small_parts_are_not_left_out_together(small, monkeypatch, itself):
    """Each pair of blocks may add a thirtieth of what may be left out, all together 1.6 times as much."""
    x, y, a, b, _, given = cold()
    pair = pair_of(x, y, a, b, given, 0.02, itself)

    def equal(self, part, others):
        return torch.full((len(self.rows.top[part]), len(self.columns.top[others])), math.log(1.6 * 2e-7))

    monkeypatch.setattr(near.Pair, "bounds", equal)
    for close in (32, 1):
        monkeypatch.setattr(near, "CLOSE", close)
        rows, columns = pair.choose().left
        assert ((rows + columns if itself else torch.maximum(rows.amax(), columns.amax())) <= 2e-7).all()


def test_how_the_work_is_cut_changes_nothing(small, monkeypatch):
    given = cold(shift=2.0)
    whole_, _ = both(*given)
    for name, value in (("STRIP", 100), ("TILES", 7), ("TOGETHER", 600), ("HELD", 50)):
        monkeypatch.setattr(near, name, value)
    cut, exact = both(*given)
    for one, other, (value, _) in zip(whole_, cut, exact, strict=True):
        assert (one.value - other.value).abs().max() < 2e-7
        assert error(other.value, value) <= 2e-7


def test_blocks_hold_every_point_once():
    for n in (1, 63, 64, 65, 1000, 1025):
        points = torch.rand(n, 3, dtype=torch.float64, generator=random())
        cloud = near.Cloud.of(points)
        assert cloud.index.shape[1] <= near.BLOCK
        assert sorted(cloud.index[cloud.real].tolist()) == list(range(n))
        torch.testing.assert_close(cloud.spread(cloud.offsets + cloud.centre[:, None]), points)
        assert (cloud.offsets.abs() <= cloud.half[:, None] * (1 + 1e-12)).all()


def test_float64_is_held_to_float64(doubles, monkeypatch):
    monkeypatch.setattr(near, "BLOCK", 16)
    found, exact = both(*cold("solved"))
    for softmin, (value, slope) in zip(found, exact, strict=True):
        assert error(softmin.value, value) < 1e-12
        assert (softmin.slope - slope).abs().max() < 1e-13


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_float32_keeps_its_digits(doubles, monkeypatch, offset):
    """Exponents are numbers of size 60; of whole squares they would be of size 1e4, or 1e10."""
    monkeypatch.setattr(near, "BLOCK", 16)
    x, y, a, b, epsilon, _ = cold()
    x, y = (x + offset).float().double(), (y + offset).float().double()
    given = potentials(x, y, a, b, epsilon, "solved")
    found = near.Field(x.float(), y.float()).softmins(epsilon, (a, b, a, b), given, math.inf, (True, True))
    _, exact = both(x, y, a, b, epsilon, given)
    for softmin, (value, slope) in zip(found, exact, strict=True):
        assert error(softmin.value, value) < 2e-5
        assert (softmin.slope - slope).abs().max() < 2e-5 * 0.02


def test_what_is_not_finite_or_not_safe_is_left_to_others(small):
    x, y, a, b, epsilon, given = cold()
    for value in (math.nan, math.inf, 300.0):  # e^600 is too large for a sum
        wrong = [given[0] + value, *given[1:]]
        wrong[1] = wrong[1] + value
        assert near.Field(x, y).softmins(epsilon, (a, b, a, b), wrong, math.inf) is None
    assert near.Field(x, y).softmins(epsilon, (a, b, a, b * math.nan), given, math.inf) is None
    assert near.Field(x, y).softmins(epsilon, (a, b, a, b), given, 0.0) is None  # takes too long


def test_who_is_served():
    x = torch.rand(1, 3000, 3)
    (one,) = near.fields(x, x)
    assert one.may_pay(0.01**2)
    assert not one.may_pay(1.0)
    assert not near.fields(x, x[:, :100])
    assert not near.fields(x[:, :500], x[:, :500])
    assert not near.fields(torch.rand(1, 3000, 9), torch.rand(1, 3000, 9))
    hole = x.clone()
    hole[0, 7, 1] = torch.nan
    assert not near.fields(hole, x)
    assert not near.fields(x, -torch.inf * x)
    assert not near.Field(torch.ones(5, 3), torch.ones(5, 3)).may_pay(1e-9)


# ---------------------------------------------------------------------------------------------------------- the descent


@pytest.fixture
def eager(monkeypatch):
    """As if blocks cost nothing, so that small clouds take this way; tells how many softmins did."""
    taken, softmins = [], near.Field.softmins

    def counted(*given):
        found = softmins(*given)
        taken.append(found)
        return found

    monkeypatch.setattr(whole, "MOST", 0)
    monkeypatch.setattr(far, "fields", lambda x, y: [])
    monkeypatch.setattr(near, "LEAST_PAIRS", 0)
    monkeypatch.setattr(near, "LEAST_POINTS", 0)
    monkeypatch.setattr(near, "BLOCK", 8)
    for dtype in near.COSTS:
        monkeypatch.setitem(near.COSTS, dtype, near.Costs(1.0, 1e-9, 1e-9, 1e-9))
    monkeypatch.setattr(near.Field, "softmins", counted)
    return taken


def results(parts, options):
    """Value, gradients and potentials."""
    inputs = [part.clone().requires_grad_() for part in parts]
    value = sinkhorn_divergence(*inputs, **options)
    found = value, *torch.autograd.grad(value.sum(), inputs), *sinkhorn_potentials(*inputs, **options)
    return [part.detach() for part in found]


@pytest.mark.parametrize("reach", [None, 0.4])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("d", [1, 3])
def test_the_divergence_stays_the_same(eager, monkeypatch, d, debias, reach):
    parts = [part.float().double() for part in problem(90, 70, d, (2,))]
    parts[2][0, ::5] = 0
    options = {"blur": 0.02, "reach": reach, "debias": debias, "diameter": "each"}
    singles = [part.float() for part in parts]
    ours, single = results(parts, options), results(singles, options)
    assert len(eager) > 20
    assert sum(found is not None for found in eager) >= 0.9 * len(eager)  # of few, sums are too large for float32
    monkeypatch.setattr(near, "fields", lambda x, y: [])
    exact, all_pairs = results(parts, options), results(singles, options)
    for found, narrow, expected, before in zip(ours, single, exact, all_pairs, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * size)
        worst = float((before - expected).abs().max())
        assert (narrow - expected).abs().max() <= 2 * worst + 1e-6 * size  # what float32 leaves of all pairs


def test_an_element_of_a_batch_is_what_it_is_alone(eager):
    parts = problem(60, 50, 3, (3,))
    options = {"blur": 0.03, "diameter": "each"}
    together = results(parts, options)
    for k in range(3):
        alone = results([part[k] for part in parts], options)
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[k], other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("need", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_asked_for(eager, need):
    parts = [part.float() for part in problem(60, 50)]
    x, y = (part.requires_grad_(wanted) for part, wanted in zip(parts[:2], need, strict=True))
    value = sinkhorn_divergence(x, y, *parts[2:], blur=0.03)
    torch.testing.assert_close(value.detach(), results(parts, {"blur": 0.03})[0], rtol=2e-5, atol=0)
    for point, wanted, expected in zip((x, y), need, results(parts, {"blur": 0.03})[1:3], strict=True):
        if wanted:
            (found,) = torch.autograd.grad(value, point, retain_graph=True)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("debias", [True, False])
def test_transport_too(eager, monkeypatch, debias):
    x, y, a, b = problem(60, 50)
    given = [part[None] for part in (x, y, a, b)]
    steps = [[epsilon] for epsilon in transport.temperatures(3.0, 0.001, 12)]

    def run():
        inputs = [part.clone().requires_grad_() for part in given]
        found = transport.transport(*inputs, steps, debias=debias)
        return [*(part.detach() for part in found), *torch.autograd.grad(found.value.sum(), inputs)]

    ours = run()
    assert len(eager) > 3
    monkeypatch.setattr(near, "fields", lambda x, y: [])
    for found, expected in zip(ours, run(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_autocast_narrows_nothing(eager):
    parts = [part.float() for part in problem(60, 50)]
    expected = results(parts, {"blur": 0.03})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(parts, {"blur": 0.03})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_all_pairs_where_that_is_quicker_or_others_were_asked_for(eager, monkeypatch):
    parts = [part.float() for part in problem(60, 50)]
    results(parts, {"blur": 0.03, "backend": "reference"})
    results(parts, {"blur": 0.03, "p": 1})
    assert not eager
    monkeypatch.setitem(near.COSTS, torch.float32, near.Costs(1e-9, 1.0, 1e-9, 1e-9))
    results(parts, {"blur": 0.03})
    assert eager
    assert all(found is None for found in eager)


@pytest.mark.parametrize(("cells", "quicker"), [(0.0, "far"), (math.inf, "near"), (1e-6, "near")])
def test_the_quicker_way_is_taken(monkeypatch, eager, cells, quicker):
    """Blocks are said to take some 1e-7 seconds, all pairs thousands."""
    x, y, a, b = (part.float()[None] for part in problem(60, 50))
    epsilon = torch.tensor([2 * 0.06**2], dtype=torch.float64)
    monkeypatch.setattr(far.Field, "seconds", lambda *given: cells)
    monkeypatch.setattr(near, "COSTS", {torch.float32: near.Costs(1.0, 1e-12, 1e-12, 1e-9)})
    corners = [0.0] * 3, [1.0] * 3
    both_ways = fields.Fields([far.Field(x[0], y[0], *corners)], near.fields(x, y))
    operator = make_operator(x, y, epsilon, "sqeuclidean", "", "")
    logs, duals = (a.log(), b.log()), (0.01 * x[..., 0], 0.01 * y[..., 0], None, None)
    expected, seen = operator.both(*logs, *duals[:2]), []
    halves = [0.5 * part[0] for part in expected]
    monkeypatch.setattr(far.Field, "softmins", lambda *given: (seen.append("far"), halves)[1])
    found = fields.updates(both_ways, operator.exact_epsilon, logs, duals, False)
    assert (seen or ["near"]) == [quicker]
    for one, other in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-6)
    assert found[2:] == [None, None]
