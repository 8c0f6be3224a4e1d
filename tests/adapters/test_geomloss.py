"""GeomLoss's ``SamplesLoss`` with backend="flash" against its own backend="tensorized" in float64."""

import itertools
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("geomloss")

import flashot_backends  # noqa: E402
from flashot_backends.adapters import geomloss as geomloss_adapter  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "hosts"
KERNELS = ("energy", "gaussian", "laplacian")


@pytest.fixture(autouse=True)
def loss_class():
    """``SamplesLoss`` while the adapter is enabled."""
    flashot_backends.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        from geomloss import SamplesLoss

        yield SamplesLoss
    flashot_backends.configure(substitute=None)
    flashot_backends.disable()


def problem(B, dtype=torch.float64, n=60, m=75, d=3, weighted=True, seed=0):
    """α, x, β, y as ``SamplesLoss`` takes them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (B,) if B else ()

    def draw(*size):
        return torch.rand(*shape, *size, generator=generator, dtype=torch.float64)

    x, y, a, b = draw(n, d), 0.8 * draw(m, d) + 0.1, draw(n) + 0.1, draw(m) + 0.1
    if not weighted:
        a, b = torch.ones_like(a), torch.ones_like(b)
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    return [part.to(dtype) for part in (a, x, b, y)]


def value_and_gradients(loss, inputs):
    inputs = [part.detach().clone().requires_grad_() for part in inputs]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


GRID = list(itertools.product((1, 2), (None, 0.3), (True, False), (0, 3), (True, False), (0.3, 0.8)))


@pytest.mark.parametrize(("p", "reach", "debias", "B", "weighted", "scaling"), GRID)
def test_value_and_gradients(loss_class, p, reach, debias, B, weighted, scaling):
    options = {"p": p, "reach": reach, "debias": debias, "scaling": scaling}
    inputs = problem(B, weighted=weighted)
    exact = value_and_gradients(loss_class(**options, backend="tensorized"), inputs)
    found = value_and_gradients(loss_class(**options, backend="flash"), inputs)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("p", "reach", "debias", "B", "weighted", "scaling"), GRID)
def test_float32_is_no_worse_than_theirs(loss_class, p, reach, debias, B, weighted, scaling):
    """Rounding is a matter of luck at the level of a few units in the last place, so that much is granted."""
    options = {"p": p, "reach": reach, "debias": debias, "scaling": scaling}
    inputs = problem(B, torch.float32, n=200, m=230, weighted=weighted)
    exact = value_and_gradients(loss_class(**options, backend="tensorized"), [part.double() for part in inputs])
    theirs = value_and_gradients(loss_class(**options, backend="tensorized"), inputs)
    ours = value_and_gradients(loss_class(**options, backend="flash"), inputs)
    for name, found, host, truth in zip(("value", *"axby"), ours, theirs, exact, strict=True):
        found, host, truth = (_without_gauge(part, name, reach) for part in (found, host, truth))
        assert error(found, truth) <= max(error(host, truth), 4e-6 if name in "ab" else 2e-6), name


def _without_gauge(part, name, reach):
    """Balanced potentials, the gradients by the weights, are known up to a constant."""
    return part - part.mean(-1, keepdim=True) if name in "ab" and reach is None else part


SMALL_GRID = list(itertools.product((1, 2), (None, 0.3), (True, False), (0, 3)))


@pytest.mark.parametrize(("p", "reach", "debias", "B"), SMALL_GRID)
def test_potentials(loss_class, p, reach, debias, B):
    options = {"p": p, "reach": reach, "debias": debias, "potentials": True}
    inputs = problem(B)
    exact = loss_class(**options, backend="tensorized")(*inputs)
    found = loss_class(**options, backend="flash")(*inputs)
    for ours, theirs, weights in zip(found, exact, inputs[::2], strict=True):
        assert ours.shape == weights.shape
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-9, atol=1e-13)


def test_gradients_of_potentials(loss_class):
    inputs = problem(2)
    results = []
    for backend in ("flash", "tensorized"):
        loss = loss_class(potentials=True, backend=backend)
        results.append(value_and_gradients_of_potentials(loss, inputs))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-13)


def value_and_gradients_of_potentials(loss, inputs):
    a, x, b, y = (part.clone() for part in inputs)
    x.requires_grad_(), y.requires_grad_()
    F, G = loss(a, x, b, y)
    return torch.autograd.grad((F**2).sum() + (G**3).sum(), (x, y))


@pytest.mark.parametrize(("name", "B"), list(itertools.product(KERNELS, (0, 3))))
def test_kernel_norms(loss_class, name, B):
    inputs = problem(B)
    exact = value_and_gradients(loss_class(name, blur=0.3, backend="tensorized"), inputs)
    found = value_and_gradients(loss_class(name, blur=0.3, backend="flash"), inputs)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)
    exact = loss_class(name, blur=0.3, potentials=True, backend="tensorized")(*inputs)
    found = loss_class(name, blur=0.3, potentials=True, backend="flash")(*inputs)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-9, atol=1e-12)


def test_every_form_of_arguments(loss_class):
    a, x, b, y = problem(0, weighted=False)
    flash, tensorized = loss_class(backend="flash"), loss_class(backend="tensorized")
    expected = tensorized(x, y)
    assert flash(x, y).shape == expected.shape == ()
    for args in ((x, y), (a, x, b, y), (a[:, None], x, b[:, None], y)):
        torch.testing.assert_close(flash(*args), expected, rtol=1e-10, atol=0)
    batched = [part[None] for part in (a, x, b, y)]
    for args in ((batched[1], batched[3]), batched, (a[None, :, None], batched[1], b[None, :, None], batched[3])):
        torch.testing.assert_close(flash(*args), expected[None], rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("B", [0, 2])
def test_weights_left_out_are_those_that_geomloss_makes_up(loss_class, B, dtype):
    _, x, _, y = problem(B, dtype)
    loss = loss_class(backend="flash")
    a, x_, b, y_ = geomloss_adapter._weighted(x, y)
    assert x_ is x
    assert y_ is y
    for ours, points in ((a, x), (b, y)):
        theirs = loss.generate_weights(points)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_strided_points_and_mixed_dtypes(loss_class):
    a, x, b, y = problem(0)
    x = x.T.contiguous().T
    found = loss_class(backend="flash")(a.float(), x, b, y.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, loss_class(backend="tensorized")(a, x, b, y), rtol=1e-5, atol=0)


def test_diameter_and_blur_beyond_it(loss_class):
    inputs = problem(0)
    for options in ({"diameter": 3.0}, {"blur": 5.0}, {"blur": 5.0, "p": 1}, {"diameter": 0.01}):
        exact = loss_class(**options, backend="tensorized")(*inputs)
        torch.testing.assert_close(loss_class(**options, backend="flash")(*inputs), exact, rtol=1e-9, atol=1e-14)


def test_zero_weights(loss_class):
    a, x, b, y = problem(0)
    a[:7], b[3:9] = 0, 0
    exact = value_and_gradients(loss_class(backend="tensorized"), (a, x, b, y))
    found = value_and_gradients(loss_class(backend="flash"), (a, x, b, y))
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_grad_mode_stays(loss_class, enabled):
    a, x, b, y = problem(0)
    x.requires_grad_()

    def broken(x, y):
        raise ZeroDivisionError

    with torch.set_grad_enabled(enabled):
        value = loss_class(backend="flash")(a, x, b, y)
        assert torch.is_grad_enabled() == value.requires_grad == enabled
        loss_class(cost=lambda x, y: torch.cdist(x, y), backend="flash")(a, x, b, y)
        assert torch.is_grad_enabled() == enabled
        with pytest.raises(ZeroDivisionError):
            loss_class(cost=broken, backend="flash")(a, x, b, y)
        assert torch.is_grad_enabled() == enabled


def test_costs_and_kernels_of_the_users_own_go_back(loss_class, caplog):
    inputs = problem(0)

    def cost(x, y):
        return torch.cdist(x, y) ** 3

    def kernel(x, y, blur=None, **options):
        return 1 / (1 + torch.cdist(x, y) / blur)

    geomloss_adapter._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "flashot_backends"):
        own = ({"cost": cost}, {"loss": "gaussian", "kernel": kernel}, {"loss": "hausdorff", "kernel": kernel})
        for options in own:
            exact = value_and_gradients(loss_class(**options, backend="tensorized"), inputs)
            found = value_and_gradients(loss_class(**options, backend="flash"), inputs)
            for ours, theirs in zip(found, exact, strict=True):
                assert torch.equal(ours, theirs)
    assert "the cost is a function of the user's own" in caplog.text
    assert "the kernel is a function of the user's own" in caplog.text


def test_errors_say_what_is_accepted(loss_class):
    a, x, b, y = problem(0)
    with pytest.raises(ValueError, match="p is 3; accepted are 1 and 2"):
        loss_class(p=3, backend="flash")(x, y)
    with pytest.raises(ValueError, match="kernel is None"):
        loss_class("hausdorff", backend="flash")(x, y)
    with pytest.raises(ValueError, match="labels"):
        loss_class(backend="flash")(torch.zeros(60), a, x, torch.zeros(75), b, y)


def used(monkeypatch):
    """Count the calls of our divergence."""
    from flashot_backends.ops import divergence

    calls = []
    for name in ("sinkhorn_divergence", "kernel_norm"):
        original = getattr(divergence, name)
        monkeypatch.setattr(divergence, name, lambda *args, _f=original, **kw: (calls.append(_f), _f(*args, **kw))[1])
    return calls


def test_auto_is_ours_only_under_substitute(loss_class, monkeypatch):
    calls, inputs = used(monkeypatch), problem(0)
    losses = loss_class(), loss_class("energy")
    expected = [loss(*inputs) for loss in losses]
    assert calls == []
    flashot_backends.configure(substitute=["geomloss"])
    found = [loss(*inputs) for loss in losses]
    assert len(calls) == 2
    assert [loss.backend for loss in losses] == ["auto", "auto"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    flashot_backends.disable()
    losses[0](*inputs)
    assert len(calls) == 2


def test_substituted_auto_leaves_to_geomloss_what_is_not_ours(loss_class, monkeypatch, caplog):
    calls, inputs = used(monkeypatch), problem(0)
    flashot_backends.configure(substitute=["geomloss"])
    geomloss_adapter._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "flashot_backends"):
        loss_class(cost=lambda x, y: torch.cdist(x, y))(*inputs)
    assert calls == []
    assert "backend='auto' stays with GeomLoss" in caplog.text


def test_disabled_it_is_gone(loss_class):
    flashot_backends.disable()
    with pytest.raises(KeyError):
        loss_class(backend="flash")(*problem(0))


def test_older_releases_keep_their_routines_in_another_module():
    """GeomLoss 0.2.6 has ``geomloss.samples_loss``; what we use of it looks the same."""
    from flashot_backends.plugins.manager import registry

    spec = next(spec for spec in registry().adapters() if spec.name == "geomloss")
    assert "geomloss.samples_loss" in spec.modules

    class Loss:
        def forward(self, *args):
            return args

    module = ModuleType("geomloss.samples_loss")
    module.routines = {name: {} for name in ("sinkhorn", "hausdorff", *KERNELS)}
    module.SamplesLoss = Loss

    class Host:
        substituted = False

        def register(self, mapping, key, value):
            mapping[key] = value

        def wrap(self, owner, name, factory, parameters):
            assert (owner, name, parameters) == (module, "SamplesLoss.forward", ("self",))

    geomloss_adapter.adapt(module, Host())
    assert all(set(each) == {"flash"} for each in module.routines.values())


def test_compiled_it_is_one_graph(loss_class):
    _, x, _, y = problem(0, torch.float32)
    loss = loss_class(backend="flash")
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        points = x.clone().requires_grad_()
        value = function(points, y)
        results.append((value, *torch.autograd.grad(value, points)))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_training_steps_follow_theirs(loss_class):
    """A gradient flow: the same curve within the noise of float32."""
    curves = []
    for backend in ("flash", "tensorized"):
        _, x, _, y = problem(0, torch.float32, n=80, m=90, d=2)
        loss, curve = loss_class(blur=0.05, backend=backend), []
        for _ in range(60):
            x = x.detach().requires_grad_()
            value = loss(x, y)
            (by_x,) = torch.autograd.grad(value, x)
            curve.append(value.detach())
            x = x - 0.5 * len(x) * by_x
        curves.append(torch.stack(curve))
    torch.testing.assert_close(*curves, rtol=1e-3, atol=1e-6)
    assert curves[0][-1] < 0.05 * curves[0][0]


def run(*arguments, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flash_in_an_unchanged_script():
    assert run("-m", "flashot_backends", SCRIPTS / "geomloss_flash.py") == "agrees\n"


def test_a_script_that_names_no_backend():
    script = SCRIPTS / "geomloss_plain.py"
    plain = run(script)
    assert run("-m", "flashot_backends", script) == plain
    assert run("-m", "flashot_backends", script, FLASHOT_SUBSTITUTE="geomloss") == plain


def test_importing_the_adapter_loads_no_framework():
    code = "import sys; from flashot_backends.adapters import geomloss; print({'torch', 'geomloss'} & set(sys.modules))"
    assert run("-c", code) == "set()\n"


# geomloss.ot


@pytest.fixture
def ot():
    """``geomloss.ot`` while the adapter is enabled."""
    return pytest.importorskip("geomloss.ot", reason="geomloss.ot came with 0.3")


QUANTITIES = ("value", "potential_a", "potential_b", "density", "plan", "marginal_a", "marginal_b")


def same_result(found, expected, names=QUANTITIES, element=None):
    for name in names:
        ours, theirs = getattr(found, name), getattr(expected, name)
        ours = ours if element is None else ours[element]
        assert type(ours) is type(theirs)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("unbalanced", [None, 0.5])
def test_solve_sample(ot, unbalanced, debias, library):
    a, x, b, y = (part if library == "torch" else part.numpy() for part in problem(0, n=12, m=15))
    options = {"a": a, "b": b, "reg": 0.1, "unbalanced": unbalanced, "debias": debias, "max_iter": 9}
    found, expected = ot.solve_sample(x, y, method="flash", **options), ot.solve_sample(x, y, **options)
    assert isinstance(found, ot.OTResultSample)
    same_result(found, expected, (*QUANTITIES, *(("potential_aa", "potential_bb") if debias else ())))
    for products, matrix in ((found.plan_operator, expected.plan), (found.density_operator, expected.density)):
        torch.testing.assert_close(products @ y, matrix @ y, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(products.T @ x, matrix.T @ x, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(products @ b, matrix @ b, rtol=1e-9, atol=1e-12)


def test_solve_sample_with_lengths_and_defaults(ot):
    _, x, _, y = problem(0)
    for options in ({"blur": 0.2}, {"blur": 0.2, "reach": 0.6}, {"reg": 0.1, "max_iter": 1}):
        options = {"max_iter": 5, **options}
        same_result(ot.solve_sample(x, y, method="flash", **options), ot.solve_sample(x, y, **options))


def test_solve_sample_batch_solves_each_as_alone(ot):
    a, x, b, y = problem(3, n=10, m=12)
    x = x * torch.tensor([1.0, 3.0, 0.1], dtype=x.dtype)[:, None, None]
    options = {"reg": 0.1, "max_iter": 7, "debias": True}
    found = ot.solve_sample_batch(x, y, a=a, b=b, method="flash", **options)
    for k in range(3):
        same_result(found, ot.solve_sample(x[k], y[k], a=a[k], b=b[k], **options), element=k)
    torch.testing.assert_close(found.plan_operator @ y, found.plan @ y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("unbalanced", [None, 0.5])
def test_solve_with_matrices(ot, unbalanced):
    a, x, b, y = problem(3, n=10, m=12)
    C = torch.cdist(x, y)
    options = {"reg": 0.05, "unbalanced": unbalanced, "max_iter": 9}
    found = ot.solve_batch(C, a=a, b=b, method="flash", **options)
    assert isinstance(found, ot.OTResultMatrix)
    same_result(found, ot.solve_batch(C, a=a, b=b, **options))
    one = {"a": a[1], "b": b[1], **options}
    same_result(ot.solve(C[1], method="flash", **one), ot.solve(C[1], **one))
    lists = {"C": [[0.0, 1.0, 4.0], [2.0, 1.0, 0.0]], "a": [2, 2], "b": [1, 1, 2], "reg": 0.1, "max_iter": 9}
    same_result(ot.solve(**lists, method="flash"), ot.solve(**lists))


def slope(function, inputs, k, direction, h=1e-5):
    up, down = list(inputs), list(inputs)
    up[k], down[k] = inputs[k] + h * direction, inputs[k] - h * direction
    return (function(*up) - function(*down)) / (2 * h)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("unbalanced", [None, 0.5])
def test_gradients_agree_with_finite_differences(ot, unbalanced, debias):
    a, x, b, y = problem(0, n=5, m=6, d=2)

    def value(x, y, a, b):
        options = {"reg": 0.2, "unbalanced": unbalanced, "debias": debias, "max_iter": 1500}
        return ot.solve_sample(x, y, a=a, b=b, method="flash", **options).value

    inputs = [x, y, a, b]
    gradients = torch.autograd.grad(value(*(part.requires_grad_() for part in inputs)), inputs)
    inputs = [part.detach() for part in inputs]
    for k, gradient in enumerate(gradients):
        direction = torch.linspace(-1, 1, gradient.numel(), dtype=x.dtype).reshape(gradient.shape).cos()
        if k > 1:  # the masses stay equal
            direction = direction - direction.mean()
        expected = slope(value, inputs, k, direction)
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("unbalanced", [None, 0.5])
def test_the_gradient_by_a_matrix_of_costs_is_the_plan(ot, unbalanced):
    a, x, b, y = problem(0, n=5, m=6, d=2)
    C = torch.cdist(x, y).requires_grad_()

    def solution(C):
        return ot.solve(C, a=a, b=b, reg=0.2, unbalanced=unbalanced, max_iter=1000, method="flash")

    found = solution(C)
    (gradient,) = torch.autograd.grad(found.value, C)
    torch.testing.assert_close(gradient, found.plan, rtol=1e-6, atol=1e-12)
    direction = torch.linspace(-1, 1, C.numel(), dtype=C.dtype).reshape(C.shape).cos()
    expected = slope(lambda C: solution(C).value, [C.detach()], 0, direction)
    torch.testing.assert_close((gradient * direction).sum(), expected, rtol=2e-3, atol=0)


def test_solvers_are_ours_only_when_asked_for_or_substituted(ot, monkeypatch):
    from flashot_backends.ops.divergence import transport

    calls, original = [], transport.transport
    monkeypatch.setattr(transport, "transport", lambda *args: (calls.append(args), original(*args))[1])
    _, x, _, y = problem(0)
    expected = ot.solve_sample(x, y, reg=0.1, max_iter=5)
    assert calls == []
    flashot_backends.configure(substitute=["geomloss"])
    same_result(ot.solve_sample(x, y, reg=0.1, max_iter=5), expected)
    assert len(calls) == 1
    with pytest.raises(NotImplementedError):
        ot.solve_sample(x, y, cost="euclidean", reg=0.1, max_iter=5)
    assert len(calls) == 1


def test_bad_arguments_of_solvers_are_named(ot):
    _, x, _, y = problem(0)
    good = {"reg": 0.1, "max_iter": 5, "method": "flash"}
    for options, words in (
        ({"reg": None}, "reg is None"),
        ({"blur": 0.1}, "reg and blur are both given"),
        ({"max_iter": 0}, "max_iter is 0"),
        ({"a": torch.ones(60, dtype=x.dtype)}, "do not sum up"),
    ):
        with pytest.raises(ValueError, match=words):
            ot.solve_sample(x, y, **{**good, **options})
    with pytest.raises(ValueError, match=r"X_a has shape \(1, 60, 3\); accepted is \(N, D\)"):
        ot.solve_sample(x[None], y, **good)
    with pytest.raises(NotImplementedError, match="accepted with method='flash' is 'sqeuclidean'"):
        ot.solve_sample(x, y, cost="euclidean", **good)
