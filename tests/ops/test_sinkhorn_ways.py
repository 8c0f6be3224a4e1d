"""Every way that torch has to differentiate, through every result: right, or refused with a reason, never zero."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad, functional  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap  # noqa: E402

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, c_transform, softmin, solve  # noqa: E402

from .sinkhorn_cases import close, distances, normal, weights  # noqa: E402
from .test_sinkhorn_gradients import Plain  # noqa: E402

A, B, Y = weights(4), weights(5, seed=1), normal(5, 3, seed=1)
V, U, H = normal(5, 2, seed=7), normal(4, 2, seed=8), normal(5, seed=3)
EPSILON, ITERATIONS = 5.0, 14
OUTPUTS = {
    "f + g": (lambda s: s.f[:, None] + s.g, lambda p: p.f[:, None] + p.g),
    "plan": (lambda s: s.plan(), lambda p: p.P),
    "apply": (lambda s: s.apply(V), lambda p: p.P @ V),
    "apply_transpose": (lambda s: s.apply_transpose(U), lambda p: p.P.T @ U),
    "marginals": (lambda s: s.marginals()[0] * s.marginals()[1][:4], lambda p: p.P.sum(1) * p.P.sum(0)[:4]),
    "linear_cost": (lambda s: s.linear_cost(), lambda p: (p.P * p.M).sum()),
    "kl": (lambda s: s.value(), lambda p: p.value()),
    "entropy's value": (lambda s: s.value("entropy"), lambda p: (p.P * (p.M + EPSILON * (p.P.log() - 1))).sum()),
    "entropy": (lambda s: s.entropy(), lambda p: -(p.P * (p.P.log() - 1)).sum()),
    "top_k": (lambda s: s.top_k(2).values, lambda p: p.P.topk(2, 1).values),
    "top_k_transpose": (lambda s: s.top_k_transpose(2).values, lambda p: p.P.topk(2, 0).values.T),
}
VALUES = ("kl", "entropy's value")


def total(function):
    """A number that depends on every entry."""

    def number(x):
        out = function(x)
        return (out * (1 + torch.arange(out.numel(), dtype=out.dtype).sin().reshape(out.shape))).sum()

    return number


def along(x):
    """A direction."""
    return torch.arange(x.numel(), dtype=x.dtype).cos().reshape(x.shape)


def batched(function, x):
    """Many gradients in one backward pass."""
    x = x.clone().requires_grad_()
    out = function(x)
    every = torch.eye(out.numel(), dtype=out.dtype).reshape(-1, *out.shape)
    return torch.autograd.grad(out, x, every, is_grads_batched=True)[0]


def with_tangents(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, along(x)))).tangent


REVERSE = {
    "grad": lambda f, x: grad(total(f))(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "vjp": lambda f, x: (lambda out, pull: pull(torch.ones_like(out))[0])(*vjp(f, x)),
    "vmap of grad": lambda f, x: vmap(grad(total(f)))(torch.stack([x, x + 0.1])),
    "jacobian": lambda f, x: functional.jacobian(f, x),
    "jacobian, vectorized": lambda f, x: functional.jacobian(f, x, vectorize=True),
    "is_grads_batched": batched,
    "functional.vjp": lambda f, x: functional.vjp(total(f), x)[1],
}
TWICE = {
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(total(f)))(x),
    "functional.hessian": lambda f, x: functional.hessian(total(f), x),
    "functional.hessian, vectorized": lambda f, x: functional.hessian(total(f), x, vectorize=True),
    "functional.jvp": lambda f, x: functional.jvp(f, x, along(x))[1],  # by double backward
    "functional.hvp": lambda f, x: functional.hvp(total(f), x, along(x))[1],
    "functional.vhp": lambda f, x: functional.vhp(total(f), x, along(x))[1],
}
FORWARD = {
    "jvp": lambda f, x: jvp(f, (x,), (along(x),))[1],
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "linearize": lambda f, x: linearize(f, x)[1](along(x)),
    "hessian": lambda f, x: hessian(total(f))(x),
    "jvp of grad": lambda f, x: jvp(grad(total(f)), (x,), (along(x),))[1],
    "forward_ad": with_tangents,
    "forward jacobian": lambda f, x: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
}


@pytest.fixture(autouse=True)
def _slowly():
    """torch says that it has no batching rule and goes one by one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def functions(kind, name, gradient):
    """A result as a function of points or of a matrix: ours, and the dense one."""
    mine, theirs = OUTPUTS[name]
    options = {"tolerance": 0, "max_iterations": ITERATIONS, "gradient": gradient, "gradient_tolerance": 1e-13}

    def ours(x):
        cost = DenseCost(x) if kind == "matrix" else PointCloud(x, Y)
        return mine(solve(cost, A, B, epsilon=EPSILON, **options))

    def dense(x):
        return theirs(Plain([x] if kind == "matrix" else [x, Y], A, B, EPSILON, None, ITERATIONS))

    return ours, dense, normal(4, 5).abs() if kind == "matrix" else normal(4, 3)


def agree(ways, kind, name, gradient):
    ours, dense, x = functions(kind, name, gradient)
    for way, differentiate in ways.items():
        found, wanted = differentiate(ours, x), differentiate(dense, x)
        error = float((found - wanted).norm())
        assert error <= 1e-7 * float(wanted.norm()) + 1e-12, f"{way}: {error}"  # marginals are constant at convergence


def refused(ways, kind, name, gradient, reason):
    ours, _, x = functions(kind, name, gradient)
    for way, differentiate in ways.items():
        with pytest.raises(NotImplementedError, match=reason):
            differentiate(ours, x)
            pytest.fail(f"{way} answered")


kinds = pytest.mark.parametrize("kind", ["points", "matrix"])
names = pytest.mark.parametrize("name", OUTPUTS)


@kinds
@names
@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
def test_reverse_mode(kind, name, gradient):
    agree(REVERSE, kind, name, gradient)


@kinds
@names
def test_twice_through_the_fixed_point(kind, name):
    agree(TWICE, kind, name, "implicit")


@kinds
@pytest.mark.parametrize("name", VALUES)
def test_values_by_the_envelope_theorem(kind, name):
    agree(REVERSE | TWICE, kind, name, "envelope")


@kinds
@pytest.mark.parametrize("name", [name for name in OUTPUTS if name not in VALUES])
def test_other_results_by_the_envelope_theorem(kind, name):
    refused(REVERSE | TWICE, kind, name, "envelope", "gradient='envelope' gives the derivatives of value")


@kinds
@names
def test_twice_through_iterations_is_refused(kind, name):
    refused(TWICE, kind, name, "unrolled", "second derivatives of gradient='unrolled'")


@names
@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_forward_mode_is_refused(name, gradient):
    kind = "matrix" if name == "plan" else "points"
    refused(FORWARD, kind, name, gradient, "forward-mode derivatives.*are not available")


@pytest.mark.parametrize("argument", ["a", "b", "epsilon", "init", "V"])
@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_forward_mode_by_other_arguments_is_refused(argument, gradient):
    x, at = normal(4, 3), {"a": A, "b": B, "epsilon": torch.tensor(EPSILON).double(), "init": U[:, 0].clone(), "V": V}
    if argument == "init" and gradient != "unrolled":
        return  # nothing depends on it then

    def outcome(part):
        given = at | {argument: part}
        options = {"epsilon": given["epsilon"], "init": (given["init"], None), "gradient": gradient}
        return solve(PointCloud(x, Y), given["a"], given["b"], **options).apply(given["V"])

    for differentiate in (FORWARD["forward_ad"], FORWARD["linearize"], FORWARD["jvp"]):
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            differentiate(outcome, at[argument])


def test_softmin():
    x = normal(4, 3)

    def ours(x):
        return softmin(PointCloud(x, Y), H, EPSILON)

    def dense(x):
        return -EPSILON * torch.logsumexp(H - distances(x, Y) / EPSILON, 1)

    for differentiate in (REVERSE | TWICE).values():
        close(differentiate(ours, x), differentiate(dense, x), rtol=1e-9)
    for differentiate in FORWARD.values():
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            differentiate(ours, x)


def test_c_transform():
    """The columns are streamed, their costs plain torch: there, forward mode is right too."""
    x = normal(4, 3)

    def ours(x):
        return c_transform(PointCloud(x, Y), H).values

    def dense(x):
        return (distances(x, Y) - H).amin(1)

    for differentiate in (REVERSE | TWICE | FORWARD).values():
        close(differentiate(ours, x), differentiate(dense, x))


def test_a_compiler_refuses_forward_mode_too():
    def value(x):
        return solve(PointCloud(x, Y), epsilon=EPSILON, tolerance=0, max_iterations=3).value()

    compiled = torch.compile(lambda x: jvp(value, (x,), (x,))[1], backend="eager")
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        compiled(normal(4, 3))


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize("kind", ["points", "matrix"])
def test_gradcheck_of_every_result(kind, gradient):
    """Finite differences, batched gradients, and for the fixed point second derivatives."""
    x = functions(kind, "plan", gradient)[2].requires_grad_()
    for name in OUTPUTS:
        ours, *_ = functions(kind, name, gradient)
        assert torch.autograd.gradcheck(ours, x, check_batched_grad=True, fast_mode=True)
        if gradient == "implicit":
            assert torch.autograd.gradgradcheck(ours, x, fast_mode=True)
