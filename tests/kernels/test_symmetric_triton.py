"""The annealed loop in Triton, interpreted on the CPU or compiled where there is a card, against blocks in float64."""

import ctypes
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)

from flashot_backends.kernels.sinkhorn import far, triton_symmetric  # noqa: E402
from flashot_backends.ops.divergence import (  # noqa: E402
    KERNELS,
    again,
    kernel_norm,
    loop,
    sinkhorn_divergence,
    sinkhorn_potentials,
    transport,
)
from flashot_backends.ops.divergence.schedule import Settings  # noqa: E402

from .sinkhorn_triton_cases import DEVICE, NAME, serving  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy speaks of every infinity


@pytest.fixture(autouse=True, scope="module")
def _kernel():
    with serving("divergence", triton_symmetric):
        yield


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
    monkeypatch.setattr(triton_symmetric, "_small", lambda device: 0)
    check(problem(9, 12, batch=(2,)), p=p, reach=reach, debias=debias, wanted=wanted, diameter=[1.0, 4.0])


def test_large_temperatures_from_sums_over_cells(monkeypatch):
    taken, softmins = [], far.softmins
    monkeypatch.setattr(triton_symmetric, "_small", lambda device: 0)
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


@pytest.mark.parametrize(("d", "rho", "debias"), [(3, None, True), (3, 0.5, False), (12, 0.5, True)])
def test_transport_from_potentials_that_are_given(d, rho, debias):
    parts = problem(12, 17, d, (2,))
    steps = [[4.0, 2.0], [1.0, 0.8], [0.3, 0.3]]

    def found(backend, dtype):
        x, y, a, b = inputs = [part.to(dtype).requires_grad_() for part in parts]
        value, *potentials = transport.transport(x, y, a, b, steps, rho, debias, backend=backend)
        gradients = torch.autograd.grad(value.sum(), inputs)
        return [value, *(part for part in potentials if part.numel()), *gradients]

    for ours, exact in zip(found(NAME, torch.float32), found("torch", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=5e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("turned", "rho", "dtype"), [(False, None, torch.float32), (True, 0.5, torch.float16)])
def test_transport_with_matrices(turned, rho, dtype):
    x, y, a, b = problem(12, 600, batch=(2,))
    matrix = torch.cdist(x, y).to(dtype)
    matrix = matrix.mT.contiguous().mT if turned else matrix
    a = torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:] / a[:, 1:].sum(-1, keepdim=True)], -1)
    steps = [[2.0, 1.0], [0.5, 0.3], [0.1, 0.1]]

    def run(backend, weights, costs):
        given = costs, None, a.to(weights), b.to(weights), steps, rho
        return transport.transport(*given, backend=backend)[:3]

    ours, exact = run(NAME, torch.float32, matrix), run("torch", torch.float64, matrix.double())
    for part, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


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


# Calls that are repeated in the buffers of an earlier one


class Started:
    """A launcher that knows addresses only, over the interpreter; counts its calls."""

    head = ()

    def __init__(self, kernel, args):
        self.kernel, self.sizes, self.count = kernel, [self.size(arg) for arg in args], 0

    @staticmethod
    def size(arg):
        if not isinstance(arg, torch.Tensor):
            return None
        return arg.dtype, arg.untyped_storage().nbytes() - arg.storage_offset() * arg.element_size()

    def start(self, programs, _y, _z, _stream, *ready):
        self.count += 1
        args = list(ready)
        for k, size in enumerate(self.sizes):
            if size is not None:
                dtype, room = size
                memory = (ctypes.c_char * max(room, 8)).from_address(args[k] or ctypes.addressof(SPARE))
                args[k] = torch.frombuffer(memory, dtype=dtype)
        self.kernel[(programs,)](*args)


SPARE = ctypes.create_string_buffer(64)


@pytest.fixture
def repeated(monkeypatch):
    """Repeat calls on whatever device there is; the launchers that were used, by kernel and constants."""
    from flashot_backends.kernels.sinkhorn import launch

    monkeypatch.setattr(again, "_kept", {})
    monkeypatch.setattr(again, "ELSEWHERE", ())
    if not INTERPRETED:
        return None
    started, first = {}, launch.Launch._start_first

    def start_first(one, number):
        first(one, number)
        started.setdefault(one.key, Started(one.kernel, one.args))

    monkeypatch.setattr(launch, "_started", started)
    monkeypatch.setattr(launch.Launch, "_start_first", start_first)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return started


def value_and_gradients(parts, wanted="xyab", **options):
    inputs = dict(zip("xyab", (part.float() for part in parts), strict=True))
    needed = [inputs[name].requires_grad_() for name in wanted]
    value = sinkhorn_divergence(**inputs, backend=NAME, **options)
    gradients = torch.autograd.grad((value * torch.arange(1.0, 1 + value.numel(), device=DEVICE)).sum(), needed)
    return [value.detach(), *gradients]


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ((), {}),
        ((), {"p": 1, "reach": 0.4, "debias": False, "wanted": "yb"}),
        ((2,), {"reach": 0.4, "diameter": 1.7, "wanted": "x"}),
        pytest.param((2,), {"diameter": [1.5, 3.0], "wanted": "a"}, marks=pytest.mark.slow if INTERPRETED else ()),
        ((2,), {"diameter": "each", "wanted": "x"}),
    ],
)
def test_what_is_repeated_is_the_same(repeated, monkeypatch, batch, options):
    options = {"blur": 0.4, "scaling": 0.25, **options}
    problems = [problem(11, 14, batch=batch, seed=seed) for seed in range(3)]
    problems[1] = [part * 3 if part.shape[-1] == 3 else part for part in problems[1]]  # longer descents
    found = [value_and_gradients(parts, **options) for parts in problems]
    assert len(again._kept) == isinstance(options.get("diameter", 1.0), float), "others follow from values"
    if again._kept and repeated is not None:
        assert [one.count for one in repeated.values()] == [2] * 4
    monkeypatch.setattr(again, "ELSEWHERE", (DEVICE,))
    for ours, parts in zip(found, problems, strict=True):
        for repeated_part, part in zip(ours, value_and_gradients(parts, **options), strict=True):
            assert torch.equal(repeated_part, part)


def test_uniform_weights_are_made_once(repeated):
    problems = [[part.float() for part in problem(9, 12, seed=seed)[:2]] for seed in range(2)]
    found = [sinkhorn_divergence(*parts, blur=0.3, backend=NAME) for parts in problems]
    for value, (x, y) in zip(found, problems, strict=True):
        a, b = torch.full((9,), 1 / 9, device=DEVICE), torch.full((12,), 1 / 12, device=DEVICE)
        assert torch.equal(value, sinkhorn_divergence(x, y, a, b, blur=0.3, backend=NAME))
    assert len(again._kept) == 2


def test_what_came_out_earlier_stays(repeated):
    (x, y, a, b), other = [[part.float() for part in problem(9, 12, seed=seed)] for seed in range(2)]
    x.requires_grad_(), other[0].requires_grad_()
    alone = torch.autograd.grad(sinkhorn_divergence(x, y, a, b, blur=0.3, backend=NAME), x)[0]
    values = [sinkhorn_divergence(*parts, blur=0.3, backend=NAME) for parts in ((x, y, a, b), other)]
    assert values[0].shape == ()
    assert values[0] != values[1]
    gradients = [torch.autograd.grad(value, parts[0])[0] for value, parts in zip(values, ((x,), other), strict=True)]
    assert torch.equal(gradients[0], alone)
    assert not torch.equal(gradients[1], alone)


def test_one_cloud_in_both_places(repeated):
    (x, y, _, _), (z, w, _, _) = ([part.float() for part in problem(10, 10, seed=seed)] for seed in range(2))
    for first, second in ((x, x), (z, z), (x, y), (z, w), (x, x)):
        value = sinkhorn_divergence(first, second, blur=0.3, backend=NAME)
        assert (abs(float(value)) < 1e-6) == (first is second)


def test_repeated_second_derivatives_are_refused(repeated):
    x, y, a, b = (part.float() for part in problem(9, 12))
    x.requires_grad_()
    for _ in range(2):
        (by_x,) = torch.autograd.grad(sinkhorn_divergence(x, y, a, b, blur=0.3, backend=NAME), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            by_x.sum().backward()


def test_bad_arguments_are_named_however_often(repeated):
    x, y, a, b = (part.float() for part in problem(9, 12))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"scaling is 1\.5"):
            sinkhorn_divergence(x, y, a, b, scaling=1.5, backend=NAME)
        with pytest.raises(ValueError, match="a has shape"):
            sinkhorn_divergence(x, y, b, b, backend=NAME)
    assert not again._kept


@pytest.mark.parametrize(
    ("p", "spread", "blur", "scaling"), [(1, 1, 0.05, 0.5), (2, 7, 0.5, 0.9), (2, 0, 0.1, 0.5), (1, 1, 9.0, 0.5)]
)
def test_the_card_measures_as_the_host_does(p, spread, blur, scaling):
    """The box around all points, and the steps that follow from it."""
    x, y, a, b = problem(700, 20)
    x, y = (x * spread).float()[None], (y * spread).float()[None]
    weights = a.float()[None], b.float()[None]
    settings = Settings(p, blur, 0.7, scaling, [], False, True, False)
    clouds, measured = loop.task(triton_symmetric, (x, weights[0], y, weights[1]), settings, False, False, "")
    listed = measured._replace(steps=loop.task(Waits, clouds, settings, False, False, "")[1].steps, measured=None)
    with triton_symmetric.on(x.device):
        ours = triton_symmetric.Descent(clouds, measured)
        steps = int(ours.arrivals[1])
        assert steps == len(listed.steps) - 1
        expected = torch.tensor(triton_symmetric.numbers_for(listed.steps, p, 0.0))[:-1, 0]
    found = ours.table[: steps * triton_symmetric.SETTING].view(steps, -1).cpu()
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
    assert not ours.counters[: ours.counts].any()
    assert int(ours.arrivals[0]) == 0


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_points_that_are_no_numbers_end_in_nan(what):
    x, y, a, b = (part.float() for part in problem())
    x[3, 1] = what
    assert sinkhorn_divergence(x, y, a, b, backend=NAME).isnan()


def test_few_layouts_are_kept(monkeypatch):
    monkeypatch.setattr(again, "_kept", {})
    for key in range(3 * again.MOST):
        again._keep(key, key)
    assert list(again._kept) == list(range(2 * again.MOST, 3 * again.MOST))


class Waits:
    """A kernel that leaves measuring to the host."""

    Clouds, Task = triton_symmetric.Clouds, triton_symmetric.Task

    @staticmethod
    def measures(*given):
        return False
