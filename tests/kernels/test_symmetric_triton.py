"""The annealed loop in Triton, interpreted on the CPU or compiled where there is a card, against blocks in float64."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)

from flashot_backends import dispatch  # noqa: E402
from flashot_backends.kernels.sinkhorn import far, triton_symmetric  # noqa: E402
from flashot_backends.ops.divergence import KERNELS, kernel_norm, sinkhorn_divergence, sinkhorn_potentials  # noqa: E402
from flashot_backends.plugins import KernelSpec  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
NAME = "interpreted" if INTERPRETED else "triton"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy speaks of every infinity


@pytest.fixture(autouse=True, scope="module")
def _kernel():
    """In the interpreter the kernel serves the CPU, under a name of its own."""
    if not INTERPRETED:
        yield
        return
    spec = KernelSpec("divergence", NAME, triton_symmetric.__name__, frozenset({"torch"}))
    dispatch.register(spec)
    yield
    dispatch.unregister(spec)


def problem(n=14, m=23, d=3, batch=(), seed=0):
    """x, y, a, b in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*batch, *shape, generator=generator, dtype=torch.float64).to(DEVICE)

    a, b = draw(n) + 0.1, draw(m) + 0.1
    return draw(n, d), 0.8 * draw(m, d) + 0.1, a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)


def run(backend, dtype, parts, wanted="xyab", **options):
    """The value and its gradients."""
    inputs = dict(zip("xyab", (part.to(dtype) for part in parts), strict=True))
    needed = [inputs[name].requires_grad_() for name in wanted]
    value = sinkhorn_divergence(**inputs, backend=backend, **options)
    return [value.detach(), *(torch.autograd.grad(value.sum(), needed) if needed else ())]


def check(parts, tolerance=3e-6, wanted="xyab", **options):
    """No further from float64 than the tolerance, or than blocks in float32."""
    options = {"blur": 0.1, "scaling": 0.2, **options}
    ours = run(NAME, torch.float32, parts, wanted, **options)
    exact = run("torch", torch.float64, parts, wanted, **options)
    streamed = run("torch", torch.float32, parts, wanted, **options)
    for name, found, expected, other in zip("v" + wanted, ours, exact, streamed, strict=True):
        assert found.dtype == torch.float32
        free = name in "ab" and options.get("reach") is None  # potentials are known up to a constant
        limit = max(2 * distance(other, expected, free), tolerance)
        assert distance(found, expected, free) <= limit, (name, distance(found, expected, free), limit)


def distance(found, expected, free):
    if free:
        found, expected = found - found.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("reach", "debias"), [(None, False), (0.3, True)])
@pytest.mark.parametrize(("d", "p"), [(3, 1), (3, 2), (20, 2)])
def test_options(d, p, reach, debias):
    check(problem(d=d), p=p, reach=reach, debias=debias, blur=0.1 if d < 9 else 0.3)


@pytest.mark.parametrize(("d", "p"), [(1, 2), (8, 1), (8, 2), (9, 2)])
def test_dimensions(d, p):
    check(problem(15, 23, d), p=p, reach=0.5, blur=0.3)


@pytest.mark.parametrize(("p", "reach", "debias", "wanted"), [(1, None, True, "y"), (2, 0.3, False, "xyab")])
def test_a_launch_for_each_step(monkeypatch, p, reach, debias, wanted):
    monkeypatch.setattr(triton_symmetric, "SMALL", 0)
    check(problem(9, 12, batch=(2,)), p=p, reach=reach, debias=debias, wanted=wanted, diameter=[1.0, 4.0])


def test_large_temperatures_from_sums_over_cells(monkeypatch):
    taken, softmins = [], far.softmins
    monkeypatch.setattr(triton_symmetric, "SMALL", 0)
    monkeypatch.setitem(far.COSTS, DEVICE, far.Costs(1.0, 1e-9, 1e-9, 1e-9))
    monkeypatch.setattr(far, "softmins", lambda *given: (taken.append(given), softmins(*given))[1])
    x, y, a, b = problem(40, 30, batch=(2,))
    options = {"reach": 0.4, "diameter": [1.5, 4.0], "scaling": 0.3}
    ours = run(NAME, torch.float32, (x, y, a, b), **options)
    assert len(taken) > 4
    for found, exact in zip(ours, run("torch", torch.float64, (x, y, a, b), **options), strict=True):
        assert distance(found, exact, False) < 3e-6


@pytest.mark.parametrize("wanted", ["x", "y", ""])
@pytest.mark.parametrize("d", [2, 20])
def test_only_what_is_wanted(d, wanted):
    check(problem(9, 12, d), wanted=wanted, blur=0.3)


@pytest.mark.parametrize("d", [2, 20])
def test_columns_over_several_programs(d):
    check(problem(9, 270, d), blur=0.5, scaling=0.01, wanted="xy", debias=False)


@pytest.mark.parametrize(("d", "tolerance"), [(3, 3e-6), (150, 1e-5)])  # the matrix units see 22 bits of a number
def test_batches_with_temperatures_of_their_own(d, tolerance):
    x, y, a, b = problem(12, 9, d, batch=(3,))
    sizes = torch.tensor([1.0, 4.0, 0.02], dtype=x.dtype, device=DEVICE)[:, None, None]
    diameter, reach = ("each", None) if d == 3 else ([1.0, 50.0, 2.0], 30.0)
    check((x * sizes, y * sizes, a, b), tolerance, blur=0.3, diameter=diameter, reach=reach)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("d", [3, 20])
def test_steep_descents_leave_the_range_of_numbers(p, d):
    """A hundred between temperatures: sums around the previous potentials overflow and are taken again."""
    if p == 1 and d == 20:
        pytest.skip("there is no kernel for it")
    check(problem(d=d), p=p, blur=2e-3 if d == 3 else 5e-3, scaling=0.05, tolerance=2e-4)


def test_points_without_weight_count_nothing():
    x, y, a, b = problem()
    wider = torch.cat([x, torch.full_like(x[:3], 0.5)]), torch.cat([a, torch.zeros_like(a[:3])])
    found = run(NAME, torch.float32, (wider[0], y, wider[1], b), diameter=2.0)
    assert (found[1][-3:] == 0).all()
    assert all(part.isfinite().all() for part in found)
    torch.testing.assert_close(found[0], run(NAME, torch.float32, (x, y, a, b), diameter=2.0)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_points(dtype):
    x, y, a, b = problem()
    x, y = x.to(dtype), y.to(dtype)
    found = sinkhorn_divergence(x, y, a.float(), b.float(), backend=NAME, diameter=1.5)
    wide = sinkhorn_divergence(x.double(), y.double(), a, b, backend="torch", diameter=1.5)
    torch.testing.assert_close(found.double(), wide, rtol=1e-5, atol=0)


def test_any_strides():
    x, y, a, b = (part.float() for part in problem())
    plain = sinkhorn_divergence(x, y, a, b, backend=NAME)
    turned = [x.t().contiguous().t(), y.flip(0).flip(0)[:, :3], torch.stack([a, a], -1)[:, 0], b.expand(1, -1)[0]]
    assert torch.equal(sinkhorn_divergence(*turned, backend=NAME), plain)


@pytest.mark.parametrize("p", [1, 2])
def test_a_cloud_is_no_distance_from_itself(p):
    x, _, a, _ = (part.float() for part in problem())
    assert abs(float(sinkhorn_divergence(x, x, a, a, p=p, backend=NAME))) < 1e-6


@pytest.mark.parametrize("p", [1, 2])
def test_coinciding_points(p):
    x = torch.zeros(5, 2, device=DEVICE, requires_grad=True)
    value = sinkhorn_divergence(x, torch.zeros(4, 2, device=DEVICE), p=p, backend=NAME)
    assert abs(float(value.detach())) < 1e-6
    assert torch.autograd.grad(value, x)[0].isfinite().all()


def test_potentials():
    parts = problem(batch=(2,))
    found = sinkhorn_potentials(*(part.float() for part in parts), reach=0.4, backend=NAME)
    expected = sinkhorn_potentials(*parts, reach=0.4, backend="torch")
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=3e-6 * float(exact.abs().max()))


def test_what_is_left_to_others():
    from flashot_backends.ops.sinkhorn.solver import Request

    good = Request("torch", "cuda", "points", torch.float32, "clamped", (1, 5, 6), 3)
    assert triton_symmetric.applies(good) is None
    for change, words in (({"dtype": torch.float64}, "float64"), ({"width": 9}, "clamped"), ({"width": 0}, "no coord")):
        assert words in triton_symmetric.applies(good._replace(**change))


@pytest.mark.parametrize(("d", "wanted"), [(1, "xyab"), (3, "y"), (3, ""), (8, "xyab")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_norms(kernel, d, wanted):
    parts = problem(30, 41, d, (2,))

    def found(backend, dtype):
        inputs = dict(zip("xyab", (part.to(dtype) for part in parts), strict=True))
        needed = [inputs[name].requires_grad_() for name in wanted]
        value = kernel_norm(kernel, **inputs, blur=0.4, backend=backend)
        return [value.detach(), *(torch.autograd.grad(value.sum(), needed) if needed else ())]

    for ours, exact in zip(found(NAME, torch.float32), found("torch", torch.float64), strict=True):
        assert ours.dtype == torch.float32
        assert distance(ours, exact, False) < 2e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_norms_where_points_meet(kernel):
    x = problem()[0].float()
    x = torch.cat([x, x[:3]]).requires_grad_()
    value = kernel_norm(kernel, x, x.detach()[:5], blur=0.4, backend=NAME)
    exact = kernel_norm(kernel, x.double(), x.detach()[:5].double(), blur=0.4, backend="torch")
    torch.testing.assert_close(value.double(), exact, rtol=3e-6, atol=0)
    ours, theirs = torch.autograd.grad(value, x)[0], torch.autograd.grad(exact, x)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
