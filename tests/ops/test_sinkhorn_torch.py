"""Living together with torch: compilers, transforms, autocast, devices, memory."""

import contextlib
import gc
import warnings

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import (  # noqa: E402
    DenseCost,
    PointCloud,
    envelope,
    formulas,
    implicit,
    softmin,
    solve,
    torch_ops,
)

from .sinkhorn_cases import close, normal, weights  # noqa: E402

X, Y = normal(6, 3), normal(5, 3, seed=1)
A, B = weights(6), weights(5, seed=1)
M = normal(6, 5).abs()
OPTIONS = {"epsilon": 0.8, "tolerance": 0, "max_iterations": 3}


def total(cost, a=A, b=B, **options):
    """A number that most operations take part in."""
    solution = solve(cost, a, b, **OPTIONS | options)
    return solution.value() + solution.linear_cost() + solution.apply(b).square().sum() + solution.g.sum()


def of_points(x, y, a, b):
    return total(PointCloud(x, y), a, b)


def of_matrix(m, a, b):
    return total(DenseCost(m), a, b)


FUNCTIONS = [(of_points, (X, Y, A, B)), (of_matrix, (M, A, B))]
functions = pytest.mark.parametrize(("function", "tensors"), FUNCTIONS, ids=["points", "matrix"])


@functions
def test_compile(function, tensors):
    """One graph, forward and backward."""
    mine, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*mine)
    wanted = function(*theirs)
    close(found, wanted)
    for ours, right in zip(torch.autograd.grad(found, mine), torch.autograd.grad(wanted, theirs), strict=True):
        close(ours, right)


def test_compile_other_sizes():
    """Sizes may change from call to call."""
    compiled = torch.compile(of_matrix, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, m in ((6, 5), (4, 7), (9, 3)):
        parts = normal(n, m).abs(), weights(n), weights(m)
        close(compiled(*parts), of_matrix(*parts))


def test_compile_many_regularisations():
    """A number that changes from call to call, as in annealing."""
    compiled = torch.compile(lambda m, e: solve(DenseCost(m), epsilon=e, max_iterations=3).f, fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    for epsilon in (2.0, 1.0, 0.5):
        close(compiled(M, epsilon), solve(DenseCost(M), epsilon=epsilon, max_iterations=3).f)


def test_compile_softmin():
    h = normal(5, seed=4).requires_grad_()
    found = torch.compile(lambda h: softmin(DenseCost(M), h, 0.5), fullgraph=True, backend="aot_eager")(h)
    wanted = softmin(DenseCost(M), h, 0.5)
    close(found, wanted)
    close(*(torch.autograd.grad(out.sum(), h)[0] for out in (found, wanted)))


def operator_calls():
    """Arguments for every custom op: points and a matrix, with and without gradients."""
    epsilon = torch.tensor([0.8, 0.5], dtype=torch.float64)
    how = ("", "torch")
    s, t, f = normal(2, 6, seed=2), normal(2, 5, seed=3), normal(2, 6, seed=4)
    values, grad = normal(2, 5, 2, seed=5), normal(2, 6, 2, seed=6)
    a, b = A.expand(2, 6).clone(), B.expand(2, 5).clone()
    for metric, x, y in (("sqeuclidean", X.expand(2, 6, 3).clone(), Y.expand(2, 5, 3).clone()),
                         ("matrix", M.expand(2, 6, 5).clone(), None)):  # fmt: skip
        end = (metric, *how)
        yield "softmin", (x, y, t, epsilon, *end)
        yield "softmin_backward", (x, y, t, epsilon, f, s, True, *end)
        yield "softmin_backward", (x, y, t, epsilon, f, s, False, *end)
        reach, terms = torch.tensor([[1.0, 2.0], [float("inf"), 0.5]], dtype=torch.float64), (s, t)
        for acceleration, *penalty in (("", None, None, None), ("overrelaxation", reach, *terms)):
            control = (13, 0.0, 2, "l1", acceleration)
            arguments = (x, y, a, b, epsilon, f, *penalty)
            yield "solve", (*arguments, *control, *end)
            run = torch_ops.solve(*arguments, *control, *end)
            run = (run[2], *run[5:])
            yield "solve_backward", (*arguments, *run, s, t, True, True, *control, *end)
            yield "solve_backward", (*arguments, *run, s, t, False, False, *control, *end)
        kappa, kappas = torch.ones(2, dtype=torch.float64), (1 + epsilon, 1 + 2 * epsilon)
        yield "adjoint", (x, y, s, t, epsilon, *kappas, s, t, 1e-9, *end)
        yield "fixed_point", (x, y, a, b, epsilon, s, t, kappa, kappa, None, None, 0.0, *end)
        yield "fixed_point", (x, y, a, b, epsilon, s, t, *kappas, *terms, 0.0, *end)
        for flag in (True, False):
            yield "fixed_point_backward", (x, y, a, b, epsilon, s, t, s, t, *kappas, flag, flag, flag, 0.0, *end)
            yield "optimum_backward", (x, y, a, b, epsilon, s, t, *terms, reach, epsilon, flag, flag, flag, *end)
        yield "extension", (x, y, a, b, epsilon, s, t, kappa, s, *end)
        yield "optimum", (x, y, a, b, epsilon, s, t, None, None, None, epsilon.clone(), True, *end)
        yield "optimum", (x, y, a, b, epsilon, s, t, *terms, reach, epsilon.clone(), False, *end)
        yield "moment", (x, y, s, t, epsilon, values, 2, *end)
        yield "largest", (x, y, t, epsilon, 3, *end)
        yield "apply", (x, y, s, t, epsilon, values, *end)
        yield "apply_backward", (x, y, s, t, epsilon, values, grad, grad, True, True, *end)
        yield "linear_cost", (x, y, s, t, epsilon, *end)
        yield "linear_cost_backward", (x, y, s, t, epsilon, epsilon, True, True, *end)


CALLS = list(operator_calls())
IDS = [f"{name}-{arguments[-3]}-{k}" for k, (name, arguments) in enumerate(CALLS)]


def operation_of(name):
    return next(getattr(module, name) for module in (torch_ops, implicit, envelope) if hasattr(module, name))


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=IDS)
def test_opcheck(name, arguments):
    if not name.endswith("backward") and name != "largest":
        arguments = [
            part.clone().requires_grad_() if isinstance(part, torch.Tensor) and part.is_floating_point() else part
            for part in arguments
        ]
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    if name in ("solve", "softmin"):
        utils += ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(operation_of(name).custom, tuple(arguments), test_utils=utils)


def test_products_are_an_operation():
    one, other = normal(2, 6, 3).requires_grad_(), normal(2, 5, 3, seed=1).requires_grad_()
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(formulas.product.custom, (one, other), test_utils=utils)
    assert torch.autograd.gradcheck(formulas.product, (one, other))
    assert torch.autograd.gradgradcheck(formulas.product, (one, other))
    close(torch.func.vmap(formulas.product)(normal(3, 2, 6, 4), normal(3, 2, 5, 4)),
          normal(3, 2, 6, 4) @ normal(3, 2, 5, 4).transpose(-1, -2))  # fmt: skip


@pytest.mark.parametrize("name", ["softmin", "solve", "apply", "linear_cost", "moment", "adjoint", "optimum_backward"])
def test_both_dresses_are_one_operation(name):
    """What tracers see computes what plain calls do."""
    operation = operation_of(name)
    arguments = next(arguments for other, arguments in CALLS if other == name)
    plain, traced = operation(*arguments), operation.custom(*arguments)
    for one, other in zip(*((p if isinstance(p, tuple) else (p,)) for p in (plain, traced)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_vmap(gradient):
    """One batch of problems, from any axis, and each as it is alone."""
    x, a, epsilon = normal(6, 2, 3), weights(3, 6), torch.tensor([0.8, 0.5, 2.0], dtype=torch.float64)
    y = normal(5, 2, seed=1)
    sizes = []

    def value(x, a, epsilon):
        return solve(PointCloud(x, y), a, **OPTIONS | {"epsilon": epsilon, "gradient": gradient}).value()

    original = torch_ops.solver.make_operator
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # vmap would say that it goes one by one
        patch.setattr(torch_ops.solver, "make_operator", lambda x, *rest: sizes.append(len(x)) or original(x, *rest))
        found = torch.func.vmap(value, in_dims=(2, 0, 0))(x, a, epsilon)
        by = torch.func.vmap(torch.func.grad(value, argnums=(0, 1, 2)), in_dims=(2, 0, 0))(x, a, epsilon)
    assert set(sizes) == {3}
    for k in range(3):
        alone = x[:, :, k], a[k], epsilon[k]
        close(found[k], value(*alone))
        for ours, right in zip(by, torch.func.grad(value, argnums=(0, 1, 2))(*alone), strict=True):
            close(ours[k], right)


def test_vmap_of_softmin():
    h = normal(3, 4, 5, seed=4)
    found = torch.func.vmap(torch.func.vmap(lambda h: softmin(DenseCost(M), h, 0.5)))(h)
    close(found, softmin(DenseCost(M), h, 0.5))


def test_func_second_derivatives():
    def value(x):
        return solve(PointCloud(x, Y), **OPTIONS | {"tolerance": 1e-12, "gradient": "envelope"}).value()

    close(torch.func.jacrev(torch.func.grad(value))(X), torch.autograd.functional.hessian(value, X))


@functions
def test_func_grad(function, tensors):
    found = torch.func.grad(function, argnums=(0, 1))(*tensors)
    leaves = [t.clone().requires_grad_() for t in tensors]
    for ours, right in zip(found, torch.autograd.grad(function(*leaves), leaves[:2]), strict=True):
        close(ours, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_autocast_narrows_nothing(dtype, backend):
    cost = PointCloud(normal(40, 20, dtype=dtype), normal(30, 20, seed=1, dtype=dtype))
    values, options = normal(30, 3, dtype=dtype), OPTIONS | {"epsilon": 10.0, "backend": backend}
    wanted = solve(cost, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = solve(cost, **options)
        answers = found.f, found.apply(values), found.plan(), found.value(), found.linear_cost()
    exact = wanted.f, wanted.apply(values), wanted.plan(), wanted.value(), wanted.linear_cost()
    for ours, right in zip(answers, exact, strict=True):
        assert ours.dtype == dtype
        close(ours, right, rtol=1e-6)


@contextlib.contextmanager
def unguarded(*_):
    """In place of what keeps products wide."""
    yield


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["points", "matrix", "cosine"])
def test_autocast_narrows_no_derivative(kind, backend, monkeypatch):
    """First, second and third ones of the fixed point; they are narrowed where a guard is missing."""
    leaf = (normal(30, 25).abs() if kind == "matrix" else normal(30, 20)).float().requires_grad_()
    other, vectors = normal(25, 20, seed=1).float(), [normal(*leaf.shape, seed=k).float() for k in (2, 3)]
    weights = normal(30, 25, seed=4).float()
    costs = {"points": lambda: PointCloud(leaf, other), "matrix": lambda: DenseCost(leaf),
             "cosine": lambda: DenseCost(PointCloud(leaf, other, "cosine").dense())}  # fmt: skip

    def derivatives():
        options = {"epsilon": 0.3 if kind == "cosine" else 3.0, "tolerance": 1e-6, "backend": backend}
        plan = solve(costs[kind](), gradient="implicit", **options).plan()
        found = [torch.autograd.grad((plan * weights).sum(), leaf, create_graph=True)[0]]
        for vector in vectors:
            found.append(torch.autograd.grad((found[-1] * vector).sum(), leaf, create_graph=True)[0])
        return [one.detach() for one in found]

    wanted = derivatives()

    def errors():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = derivatives()
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]

    assert max(errors()) < 1e-5
    guarded = [("flashot_backends.kernels.sinkhorn." + ("blocks" if backend == "torch" else backend), 3)]
    guarded += [] if kind == "points" else [("flashot_backends.ops.sinkhorn.formulas", 2)]
    for module, count in guarded:  # the last ``count`` of these derivatives contain a product of that module
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.exact_products", unguarded)
            assert min(errors()[-count:]) > 3e-4


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_recording(mode):
    with mode():
        close(of_points(X, Y, A, B), of_points(X.clone(), Y, A, B))
    leaf = X.clone().requires_grad_()
    with mode():
        assert not of_points(leaf, Y, A, B).requires_grad


def test_threads():
    from concurrent.futures import ThreadPoolExecutor

    wanted = of_points(X, Y, A, B)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: of_points(X, Y, A, B), range(12)):
            close(found, wanted)


def test_inputs_are_left_alone():
    parts = [part.clone() for part in (X, Y, A, B, M)]
    start = normal(6, seed=9)
    kept = start.clone()
    solve(PointCloud(parts[0], parts[1]), parts[2], parts[3], init=(start, None), **OPTIONS)
    of_matrix(parts[4].requires_grad_(), parts[2], parts[3]).backward()
    for now, before in zip((*parts, start), (X, Y, A, B, M, kept), strict=True):
        assert torch.equal(now, before)


def tensors_alive():
    gc.collect()
    return sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects())


def test_nothing_is_kept():
    """Calls with and without gradients leave no tensor behind."""

    def call(n):
        x = normal(n, 3).requires_grad_()
        way = ("unrolled", "implicit", "envelope")[n % 3]
        solution = solve(PointCloud(x, Y), **OPTIONS | {"gradient": way})
        (solution.value() + (0.0 if way == "envelope" else solution.apply(B).sum())).backward()
        if n % 4 == 0:
            solve(DenseCost(normal(n, 5).abs()), epsilon=1.0)

    for n in range(4, 7):
        call(n)
    before = tensors_alive()
    for k in range(1000):
        call(4 + k % 31)
    assert tensors_alive() <= before


def test_the_device_of_the_problem_is_made_current(monkeypatch):
    """Kernels start on the current device: the problem's must be it, whatever was before, and is not after."""
    triton = pytest.importorskip("flashot_backends.kernels.sinkhorn.triton", exc_type=ImportError)
    seen = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            seen.append(("enter", self.device))

        def __exit__(self, *_):
            seen.append(("exit", self.device))

    monkeypatch.setattr(torch.cuda, "device", Device)
    with triton.on(torch.device("cuda", 1)):
        seen.append("inside")
    assert seen == [("enter", torch.device("cuda", 1)), "inside", ("exit", torch.device("cuda", 1))]
    with triton.on(torch.device("cpu")):
        pass
    assert len(seen) == 3


@pytest.mark.parametrize("entry", ["softmin", "iterate"])
def test_every_way_in_guards_the_device(monkeypatch, entry):
    triton = pytest.importorskip("flashot_backends.kernels.sinkhorn.triton", exc_type=ImportError)
    seen = []

    @contextlib.contextmanager
    def on(device):
        seen.append(device)
        raise InterruptedError
        yield

    operator = object.__new__(triton.Fused)
    operator.device, operator.batch = torch.device("cuda", 3), 1
    monkeypatch.setattr(triton, "on", on)
    arguments = {"softmin": (B,), "iterate": (A, B, A, 1, 0.0, 1, "l1", 1, lambda seen: None)}[entry]
    with pytest.raises(InterruptedError):
        getattr(operator, entry)(*arguments)
    cost = triton.Cost(torch.empty(1, 6, 3, device="meta"), torch.empty(1, 5, 3, device="meta"), None)
    with pytest.raises(InterruptedError):
        triton.operator(cost, torch.ones(1))
    assert seen == [torch.device("cuda", 3), torch.device("meta")]
