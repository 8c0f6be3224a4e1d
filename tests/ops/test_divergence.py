"""Sinkhorn divergences and kernel norms against formulas written out on matrices, and against themselves."""

import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn import whole  # noqa: E402
from flashot_backends.ops.divergence import (  # noqa: E402
    KERNELS,
    kernel_norm,
    kernel_potentials,
    sinkhorn_divergence,
    sinkhorn_potentials,
)
from tests.memory import PEAK, linux  # noqa: E402

BACKENDS = ("torch", "reference")


@pytest.fixture
def streamed(monkeypatch):
    """No cloud is small."""
    monkeypatch.setattr(whole, "MOST", 0)


@pytest.fixture(params=["at once", "streamed"])
def way(request, monkeypatch):
    """Both ways of torch: all pairs at once, for small clouds, and streamed."""
    if request.param == "streamed":
        monkeypatch.setattr(whole, "MOST", 0)
    return request.param


def cloud(n, d=3, batch=(), seed=0, dtype=torch.float64):
    """Points in the unit cube and weights of mass 1."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(*batch, n, d, generator=generator, dtype=torch.float64)
    weights = torch.rand(*batch, n, generator=generator, dtype=torch.float64) + 0.1
    return points.to(dtype), (weights / weights.sum(-1, keepdim=True)).to(dtype)


def problem(n=12, m=17, d=3, batch=(), dtype=torch.float64):
    """x, y, a, b."""
    (x, a), (y, b) = cloud(n, d, batch, 1, dtype), cloud(m, d, batch, 2, dtype)
    return x, 0.8 * y + 0.1, a, b


def cost(x, y, p):
    squares = ((x[:, None] - y) ** 2).sum(-1)
    return squares / 2 if p == 2 else squares.clamp(min=1e-8).sqrt()


def converged(x, y, a, b, p=2, blur=0.1, reach=None, debias=True, iterations=4000):
    """The value at the fixed point, from alternating updates."""
    epsilon = blur**p
    damping = 1 if reach is None else 1 / (1 + epsilon / reach**p)

    def value(x, y, a, b):
        C, f = cost(x, y, p), torch.zeros_like(a)
        for _ in range(iterations):
            g = -damping * epsilon * torch.logsumexp((a.log() + f / epsilon)[:, None] - C / epsilon, 0)
            f = -damping * epsilon * torch.logsumexp((b.log() + g / epsilon)[None] - C / epsilon, 1)
        if reach is None:
            return a @ f + b @ g
        rho = reach**p
        plan = a[:, None] * b * torch.exp((f[:, None] + g - C) / epsilon)

        def kl(p, q):
            return (p * (p / q).log() - p + q).sum()

        marginals = kl(plan.sum(1), a) + kl(plan.sum(0), b)
        return (plan * C).sum() + epsilon * kl(plan, a[:, None] * b) + rho * marginals

    mass = 0 if reach is None else epsilon / 2 * (a.sum() - b.sum()) ** 2
    own = 0.5 * (value(x, x, a, a) + value(y, y, b, b)) - mass if debias else 0
    return value(x, y, a, b) - own


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reach", [None, 0.5])
@pytest.mark.parametrize("p", [1, 2])
def test_the_value_is_that_of_the_transport_problem(p, reach, backend):
    x, y, a, b = problem()
    found = sinkhorn_divergence(x, y, a, b, p=p, blur=0.3, reach=reach, scaling=0.998, backend=backend)
    torch.testing.assert_close(found, converged(x, y, a, b, p, 0.3, reach), rtol=5e-4, atol=0)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("p", [1, 2])
def test_balanced_gradients_are_those_of_the_value(p, debias):
    inputs = [part.requires_grad_() for part in problem(7, 9)]
    value = sinkhorn_divergence(*inputs, p=p, blur=0.4, scaling=0.999, debias=debias)
    found = torch.autograd.grad(value, inputs)
    expected = torch.autograd.grad(converged(*inputs, p, 0.4, debias=debias, iterations=300), inputs)
    for name, ours, exact in zip("xyab", found, expected, strict=True):
        if name in "ab":  # potentials are known up to a constant
            ours, exact = ours - ours.mean(), exact - exact.mean()
        torch.testing.assert_close(ours, exact, rtol=0, atol=5e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("reach", [None, 0.3])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("d", [1, 3, 8, 9, 40])
def test_torch_agrees_with_the_plain_kernel(way, d, p, reach):
    inputs = [part.requires_grad_() for part in problem(33, 50, d, (2,))]
    results = []
    for backend in BACKENDS:
        value = sinkhorn_divergence(*inputs, p=p, reach=reach, blur=0.1, backend=backend)
        results.append((value, *torch.autograd.grad(value.sum(), inputs)))
    for streamed, plain in zip(*results, strict=True):
        torch.testing.assert_close(streamed, plain, rtol=1e-9, atol=1e-12)


def test_strips_smaller_than_the_problem(streamed, monkeypatch):
    from flashot_backends.kernels.sinkhorn import blocks

    inputs = [part.requires_grad_() for part in problem(65, 50)]

    def run(p):
        value = sinkhorn_divergence(*inputs, p=p)
        return (value, *torch.autograd.grad(value, inputs))

    for p in (1, 2):
        whole = run(p)
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "STRIP_CPU", 400)
            for ours, expected in zip(run(p), whole, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("p", [1, 2])
def test_steep_descents_and_small_blurs_stay_right(way, p):
    """A factor of a hundred between temperatures leaves the range in which one exponential serves both updates."""
    x, y, a, b = problem(40, 30)
    options = {"p": p, "blur": 1e-3, "scaling": 0.05}
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        found = sinkhorn_divergence(*(part.to(dtype) for part in (x, y, a, b)), **options, backend="torch")
        exact = sinkhorn_divergence(x, y, a, b, **options, backend="reference")
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("p", [1, 2])
def test_a_cloud_is_no_distance_from_itself(way, p):
    x, _, a, _ = problem(dtype=torch.float32)
    assert abs(float(sinkhorn_divergence(x, x, a, a, p=p))) < 1e-6


@pytest.mark.parametrize("p", [1, 2])
def test_points_without_weight_count_nothing(way, p):
    x, y, a, b = problem()
    wider = torch.cat([x, torch.full((3, 3), 0.5, dtype=x.dtype)]), torch.cat([a, torch.zeros(3, dtype=a.dtype)])
    wider = [part.requires_grad_() for part in wider]
    value = sinkhorn_divergence(wider[0], y, wider[1], b, p=p, diameter=2.0)
    torch.testing.assert_close(value, sinkhorn_divergence(x, y, a, b, p=p, diameter=2.0), rtol=1e-10, atol=1e-14)
    by_points, by_weights = torch.autograd.grad(value, wider)
    assert (by_points[-3:] == 0).all()
    assert by_weights.isfinite().all()


def test_a_common_offset_changes_nothing(way):
    x, y, a, b = problem(200, 150, dtype=torch.float32)
    near = sinkhorn_divergence(x, y, a, b, diameter=2.0)
    far = sinkhorn_divergence(x + 64, y + 64, a, b, diameter=2.0)
    torch.testing.assert_close(far, near, rtol=2e-4, atol=0)  # the points themselves have lost some bits


def test_elements_of_a_batch_share_a_diameter_unless_told_otherwise(way):
    x, y, a, b = problem(20, 30, batch=(3,))
    x, y = (part * torch.tensor([1.0, 4.0, 0.02], dtype=part.dtype)[:, None, None] for part in (x, y))
    for p in (1, 2):
        each = sinkhorn_divergence(x, y, a, b, p=p, diameter="each")
        alone = torch.stack([sinkhorn_divergence(*parts, p=p) for parts in zip(x, y, a, b, strict=True)])
        torch.testing.assert_close(each, alone, rtol=1e-11, atol=1e-14)
        listed = sinkhorn_divergence(x, y, a, b, p=p, diameter=[1.0, 5.0, 2.0])
        alone = [
            sinkhorn_divergence(*parts, p=p, diameter=diameter)
            for *parts, diameter in zip(x, y, a, b, (1.0, 5.0, 2.0), strict=True)
        ]
        torch.testing.assert_close(listed, torch.stack(alone), rtol=1e-11, atol=1e-14)


def test_more_batch_axes_and_broadcasting():
    x, y, a, b = problem(6, 5, batch=(2, 3))
    found = sinkhorn_divergence(x, y[0, 0], a, b[0, 0], diameter=1.7)
    assert found.shape == (2, 3)
    alone = sinkhorn_divergence(x[1, 2], y[0, 0], a[1, 2], b[0, 0], diameter=1.7)
    torch.testing.assert_close(found[1, 2], alone, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_points_give_float32_results(way, dtype):
    x, y, a, b = problem(dtype=torch.float32)
    x, y = x.to(dtype).requires_grad_(), y.to(dtype)
    value = sinkhorn_divergence(x, y, a, b)
    assert value.dtype == torch.float32
    wide = sinkhorn_divergence(x.detach().double(), y.double(), a.double(), b.double(), diameter=1.5)
    narrow = sinkhorn_divergence(x, y, a, b, diameter=1.5)
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=0)
    assert torch.autograd.grad(value, x)[0].dtype == dtype


def test_autocast_narrows_nothing():
    x, y, a, b = problem(60, 50, dtype=torch.float32)
    plain = sinkhorn_divergence(x, y, a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sinkhorn_divergence(x, y, a, b), plain)


def test_numpy_comes_back_as_numpy():
    np = pytest.importorskip("numpy")
    x, y, a, b = (part.numpy() for part in problem())
    value = sinkhorn_divergence(x, y, a, b)
    assert isinstance(value, np.ndarray | np.floating)
    np.testing.assert_allclose(value, sinkhorn_divergence(*problem()).numpy(), rtol=1e-12)


@pytest.mark.parametrize("p", [1, 2])
def test_coinciding_points_give_finite_results(way, p):
    x = torch.zeros(5, 2, requires_grad=True)
    value = sinkhorn_divergence(x, torch.zeros(4, 2), p=p)
    assert abs(float(value.detach())) < 1e-6
    assert torch.autograd.grad(value, x)[0].isfinite().all()


def test_potentials_are_the_gradients_by_the_weights(way):
    x, y, a, b = (part.requires_grad_() for part in problem())
    value = sinkhorn_divergence(x, y, a, b)
    by_a, by_b = torch.autograd.grad(value, [a, b])
    f, g = sinkhorn_potentials(x, y, a, b)
    torch.testing.assert_close((f, g), (by_a, by_b), rtol=1e-12, atol=1e-15)
    (by_x,) = torch.autograd.grad((a * f).sum(), x)
    (expected,) = torch.autograd.grad(sinkhorn_divergence(x, y, a, b), x)
    torch.testing.assert_close(by_x, expected, rtol=1e-12, atol=1e-15)


def kernel_matrix(kernel, x, y, blur):
    squares = ((x[:, None] - y) ** 2).sum(-1)
    if kernel == "gaussian":
        return torch.exp(-squares / (2 * blur**2))
    if kernel == "laplacian":
        return torch.exp(-(squares / blur**2).clamp(min=1e-8).sqrt())
    return -squares.clamp(min=1e-8).sqrt()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_norms_and_their_gradients(kernel, backend, signed):
    x, y, a, b = problem(d=4)
    inputs = [part.requires_grad_() for part in (x, y, a - 0.05 if signed else a, b)]
    points, signs = torch.cat(inputs[:2]), torch.cat([inputs[2], -inputs[3]])
    expected = 0.5 * signs @ kernel_matrix(kernel, points, points, 0.4) @ signs
    found = kernel_norm(kernel, *inputs, blur=0.4, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    for ours, exact in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_potentials_and_their_derivatives(kernel):
    inputs = [part.requires_grad_() for part in problem(5, 4)]
    x, y, a, b = inputs
    f, g = kernel_potentials(kernel, *inputs, blur=0.4)
    K = {name: kernel_matrix(kernel, u, v, 0.4) for name, (u, v) in {"xx": (x, x), "xy": (x, y), "yy": (y, y)}.items()}
    expected = K["xx"] @ a - K["xy"] @ b, K["yy"] @ b - K["xy"].T @ a
    torch.testing.assert_close((f, g), expected, rtol=1e-10, atol=1e-13)
    weight = torch.arange(5.0, dtype=f.dtype)
    for ours, exact in zip(
        torch.autograd.grad((weight * f).sum(), inputs), torch.autograd.grad((weight * expected[0]).sum(), inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [1, 2])
def test_compiled_it_is_one_graph(p):
    x, y, a, b = problem(dtype=torch.float32)

    def loss(x, y, a, b):
        return sinkhorn_divergence(x, y, a, b, p=p) * 2 + kernel_norm("energy", x, y, a, b)

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        inputs = [part.clone().requires_grad_() for part in (x, y, a, b)]
        value = function(*inputs)
        results.append((value, *torch.autograd.grad(value, inputs)))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_the_custom_ops_keep_their_contract():
    from flashot_backends.ops.divergence import torch_ops, transport

    x, y, a, b = (part[None].requires_grad_() for part in problem(4, 5))
    for debias in (True, False):
        settings = (2, 0.2, math.inf, 0.5, [1.5], False, debias, False, True, True, "", "")
        for op in (torch_ops.divergence, torch_ops.divergence_potentials):
            torch.library.opcheck(op.custom, (x, a, y, b, *settings))
        steps = ([1.0, 0.3], 1, math.inf, debias, True, True, "", "")
        torch.library.opcheck(transport.transport_op.custom, (x, y, a, b, *steps))
    matrix = torch.rand(1, 4, 5, dtype=x.dtype, requires_grad=True)
    steps = ([1.0, 0.3], 1, 0.7, False, True, False, "", "")
    torch.library.opcheck(transport.transport_op.custom, (matrix, None, a, b, *steps))
    torch.library.opcheck(torch_ops.distance_product.custom, (x, y, b[:, :, None], "", ""))


def test_functional_gradients():
    x, y, a, b = problem()
    inputs = [part.clone().requires_grad_() for part in (x, y, a, b)]
    expected = torch.autograd.grad(sinkhorn_divergence(*inputs), inputs)
    found = torch.func.grad(lambda *parts: sinkhorn_divergence(*parts), argnums=(0, 1, 2, 3))(x, y, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_nothing_is_kept_for_a_gradient_that_nobody_wants(way, monkeypatch):
    from flashot_backends.kernels.sinkhorn import blocks

    def refuse(*arguments):
        raise AssertionError("a slope was computed")

    monkeypatch.setattr(blocks.Points, "softmin_slope", refuse)
    monkeypatch.setattr(whole.Points, "slopes", refuse)
    x, y, a, b = problem()
    with torch.no_grad():
        sinkhorn_divergence(x.requires_grad_(), y, a, b)
    with pytest.raises(AssertionError, match="a slope"):
        sinkhorn_divergence(x, y, a, b)


def test_which_clouds_are_small():
    assert whole.fits(1, 128, 128, True, 3)
    assert not whole.fits(1, 128, 129, True, 3)
    assert whole.fits(1, 128, 129, False, 3)
    assert not whole.fits(2, 128, 128, True, 3)
    assert not whole.fits(1, 128, 128, True, 200)


@pytest.mark.parametrize("rho", [None, 0.7])
@pytest.mark.parametrize("kind", ["points", "debiased", "matrix"])
def test_transport_of_small_problems_is_streamed_transport(monkeypatch, kind, rho):
    from flashot_backends.ops.divergence.transport import transport

    x, y, a, b = problem(6, 9, batch=(2,))
    steps = [[3.0, 1.0], [0.5, 0.4], [0.2, 0.2]]

    def run(*points):
        inputs = [part.clone().requires_grad_() for part in (*points, a, b)]
        costs = (inputs[0], None) if len(points) == 1 else inputs[:2]
        value, *potentials = transport(*costs, *inputs[-2:], steps, rho, kind == "debiased")
        return value.detach(), *potentials, *torch.autograd.grad(value.sum(), inputs)

    given = (torch.cdist(x, y),) if kind == "matrix" else (x, y)
    found = run(*given)
    monkeypatch.setattr(whole, "MOST", 0)
    for ours, streamed in zip(found, run(*given), strict=True):
        torch.testing.assert_close(ours, streamed, rtol=1e-10, atol=1e-13)


def test_second_derivatives_are_refused():
    x, y, a, b = problem()
    x.requires_grad_()
    (by_x,) = torch.autograd.grad(sinkhorn_divergence(x, y, a, b), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        by_x.sum().backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p": 3}, "p is 3; accepted are 1 and 2"),
        ({"blur": 0.0}, "blur is 0.0; accepted is a positive"),
        ({"reach": -1.0}, "reach is -1.0; accepted is a positive"),
        ({"scaling": 1.0}, "scaling is 1.0; accepted is a number between 0 and 1"),
        ({"diameter": [1.0, 2.0]}, "diameter holds 2 numbers"),
        ({"diameter": "all"}, "diameter is 'all'"),
        ({"precision": "low"}, "precision is 'low'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        sinkhorn_divergence(*problem(), **options)


def test_bad_arrays_are_named():
    x, y, a, b = problem()
    with pytest.raises(ValueError, match="x has shape"):
        sinkhorn_divergence(x[:, :2], y, a, b)
    with pytest.raises(ValueError, match="a has shape"):
        sinkhorn_divergence(x, y, b, b)
    with pytest.raises(TypeError, match="dtype"):
        sinkhorn_divergence(x.float(), y, a, b)
    with pytest.raises(ValueError, match="at least one each"):
        sinkhorn_divergence(x[:0], y, a[:0], b)
    with pytest.raises(ValueError, match="kernel is 'cosine'"):
        kernel_norm("cosine", x, y, a, b)


def test_progress_is_shown_when_asked_for(capsys):
    sinkhorn_divergence(*problem(), verbose=True)
    assert "annealing" in capsys.readouterr().err
    sinkhorn_divergence(*problem())
    assert capsys.readouterr().err == ""


MEMORY = PEAK + """
import torch
from flashot_backends.ops.divergence import sinkhorn_divergence
generator = torch.Generator().manual_seed(0)
x, y = (torch.rand(20_000, 3, generator=generator).requires_grad_() for _ in range(2))
a, b = (torch.full((20_000,), 1 / 20_000).requires_grad_() for _ in range(2))
before = peak()
sinkhorn_divergence(x, y, a, b, scaling=0.1).backward()
print(peak() - before)
"""


@linux
@pytest.mark.slow
def test_memory_is_linear_in_the_points():
    """20 000 points a side: one float32 matrix of costs would take 1.6 GB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200, f"{done.stdout} MB"
