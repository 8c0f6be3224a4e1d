"""Derivatives: against autograd through dense matrices, and against finite differences."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve, unrolled  # noqa: E402
from tests.memory import PEAK, linux  # noqa: E402

from .sinkhorn_cases import INF, close, make, matrix_of, normal, plan, sinkhorn, weights  # noqa: E402

both = pytest.mark.parametrize("backend", ["torch", "reference"])
KINDS = ["matrix", "points3", "points20"]
V, U = normal(9, 2, seed=7), normal(7, 2, seed=8)

OUTPUTS = {
    "f": (lambda s: s.f * U[:, 0], lambda p: p.f * U[:, 0]),
    "g": (lambda s: s.g * V[:, 0], lambda p: p.g * V[:, 0]),
    "plan": (lambda s: s.plan().square(), lambda p: p.P.square()),
    "apply": (lambda s: s.apply(V).square(), lambda p: (p.P @ V).square()),
    "apply_transpose": (lambda s: s.apply_transpose(U[:, 0]).square(), lambda p: (p.P.T @ U[:, 0]).square()),
    "marginals": (lambda s: s.marginals()[1].square(), lambda p: p.P.sum(0).square()),
    "linear_cost": (lambda s: s.linear_cost(), lambda p: (p.P * p.M).sum()),
    "kl": (lambda s: s.value(), lambda p: p.value()),
    "entropy": (
        lambda s: s.value("entropy"),
        lambda p: (p.P * p.M).sum() + p.epsilon * (p.P * (p.P.log() - 1)).sum(),
    ),
}


class Plain:
    """A few iterations in dense torch."""

    def __init__(self, tensors, a, b, epsilon, start, iterations):
        self.M, self.epsilon = matrix_of(tensors), epsilon
        self.f, self.g = sinkhorn(self.M, a, b, epsilon, iterations, start)
        self.P = plan(self.M, a, b, self.f, self.g, epsilon)
        self.product = a[:, None] * b

    def value(self):
        relative = (self.P / self.product).log()
        return (self.P * self.M).sum() + self.epsilon * (self.P * relative - self.P + self.product).sum()


def arguments(kind, dtype=torch.float64):
    """Everything that ``solve`` is differentiable by."""
    _, tensors, _ = make(kind, dtype=dtype)
    epsilon = torch.tensor(2.0, dtype=torch.float64)
    rest = (weights(7, dtype=dtype), weights(9, seed=1, dtype=dtype), epsilon, normal(7, seed=2, dtype=dtype))
    return [part.clone().requires_grad_() for part in (*tensors, *rest)]


def solved(parts, iterations, backend, **options):
    *tensors, a, b, epsilon, start = parts
    cost = DenseCost(*tensors) if len(tensors) == 1 else PointCloud(*tensors)
    options = {"tolerance": 0, "max_iterations": iterations} | options
    return solve(cost, a, b, epsilon=epsilon, init=(start, None), backend=backend, **options)


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OUTPUTS)
def test_against_dense_autograd(kind, name, backend):
    mine, theirs = OUTPUTS[name]
    parts = arguments(kind)
    found = torch.autograd.grad(mine(solved(parts, 3, backend)).sum(), parts, allow_unused=True)
    *tensors, a, b, epsilon, start = parts
    wanted = torch.autograd.grad(theirs(Plain(tensors, a, b, epsilon, start, 3)).sum(), parts)
    for ours, right in zip(found, wanted, strict=True):
        close(ours, right, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_inputs(kind, dtype):
    """Gradients have the dtype of the input, and its accuracy: their parts, which cancel, are added in float32."""
    *_, epsilon, _ = arguments(kind)
    tensors = [part.requires_grad_() for part in make(kind, dtype=dtype)[1]]
    given = [weights(7, dtype=torch.float32).requires_grad_(), weights(9, seed=1, dtype=torch.float32).requires_grad_()]
    parts = [*tensors, *given, epsilon]
    solution = solved([*parts, torch.zeros(7)], 4, "torch")
    found = torch.autograd.grad(1000 * solution.plan().square().sum(), parts)
    *tensors, a, b, epsilon = real = [part.detach().double().requires_grad_() for part in parts]
    right = Plain(tensors, a, b, epsilon, None, 4)
    wanted = torch.autograd.grad(1000 * right.P.square().sum(), real)
    # Eight roundings of the largest exponent C/ε: P² takes it twice, and twenty coordinates add up to a large one.
    largest = float((Plain(tensors, a, b, epsilon, None, 1).M / epsilon).detach().max())
    single = max(2e-5, 8 * torch.finfo(torch.float32).eps * largest)
    digits = {torch.float32: single, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for part, ours, exact in zip(parts, found, wanted, strict=True):
        assert ours.dtype == part.dtype
        assert (ours.double() - exact).norm() <= digits * exact.norm()


@both
@pytest.mark.parametrize("kind", ["matrix", "points3"])
def test_finite_differences_of_solve(kind, backend):
    parts = arguments(kind)

    def outcome(*parts):
        solution = solved(parts, 2, backend)
        return solution.f, solution.g

    assert torch.autograd.gradcheck(outcome, parts, fast_mode=True)


@both
@pytest.mark.parametrize("kind", ["matrix", "points3"])
def test_finite_differences_of_softmin(kind, backend):
    _, tensors, _ = make(kind, n=4, m=5, batch=(2,))
    h, epsilon = normal(2, 5, seed=3), torch.tensor([0.8, 2.0], dtype=torch.float64)

    def outcome(h, epsilon, *tensors):
        return softmin(DenseCost(*tensors) if kind == "matrix" else PointCloud(*tensors), h, epsilon, backend=backend)

    assert torch.autograd.gradcheck(outcome, [p.requires_grad_() for p in (h, epsilon, *tensors)], fast_mode=True)


@both
def test_softmin_leaves_columns_out(backend):
    M = normal(4, 5).abs().requires_grad_()
    h = normal(5, seed=3)
    h[1] = -INF
    h.requires_grad_()
    by_M, by_h = torch.autograd.grad(softmin(DenseCost(M), h, 1.0, backend=backend).square().sum(), (M, h))
    right = -torch.logsumexp(h[[0, 2, 3, 4]] - M[:, [0, 2, 3, 4]], -1)
    wanted = torch.autograd.grad(right.square().sum(), (M, h))
    close(by_M, wanted[0])
    close(by_h, wanted[1])


@both
def test_the_value_at_the_optimum_has_the_plan_as_gradient(backend):
    M = normal(7, 9).abs().requires_grad_()
    solution = solve(DenseCost(M), weights(7), weights(9), epsilon=0.5, tolerance=1e-13, backend=backend)
    (by_M,) = torch.autograd.grad(solution.value(), M)
    close(by_M, solution.plan(), atol=1e-9)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_no_mass_no_gradient(kind, backend):
    """Rows and columns without mass take no part: the others' gradients are those of the smaller problem."""
    parts = arguments(kind)
    *tensors, _, _, epsilon, start = parts
    a, b = weights(7, zeros=2).requires_grad_(), weights(9, seed=1, zeros=3).requires_grad_()
    parts = [*tensors, a, b, epsilon, start]
    found = torch.autograd.grad(solved(parts, 3, backend).plan().square().sum(), parts)
    small = [tensors[0][2:, 3:]] if kind == "matrix" else [tensors[0][2:], tensors[1][3:]]
    right = Plain(small, a[2:], b[3:], epsilon, start[2:], 3)
    wanted = torch.autograd.grad(right.P.square().sum(), parts)
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact, rtol=1e-9)


@both
@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
@pytest.mark.parametrize("convention", ["kl", "entropy"])
@pytest.mark.parametrize("reach", [None, 0.7])
def test_a_value_has_no_derivative_by_a_weight_of_zero(reach, convention, gradient, backend):
    a, b = weights(7, zeros=2).requires_grad_(), weights(9, seed=1, zeros=3).requires_grad_()
    if (reach, convention, gradient) == (0.7, "entropy", "envelope"):
        pytest.skip("refused")
    options = {"epsilon": 0.5, "reach": reach, "gradient": gradient, "backend": backend}
    value = solve(DenseCost(normal(7, 9).abs()), a, b, **options).value(convention)
    by_a, by_b = torch.autograd.grad(value, (a, b))
    assert (by_a[:2] == 0).all() and (by_b[:3] == 0).all()
    assert (by_a[2:] != 0).all() and (by_b[3:] != 0).all()


@both
@pytest.mark.parametrize("kind", ["forbidden", "padded"])
def test_gradients_pass_forbidden_pairs(kind, backend):
    M, a, b = normal(6, 5).abs(), weights(6), weights(5, seed=1)
    M[0, 1] = M[3, 4] = INF
    if kind == "padded":
        M = torch.nn.functional.pad(M, (0, 1, 0, 2), value=INF)
        a, b = torch.nn.functional.pad(a, (0, 2)), torch.nn.functional.pad(b, (0, 1))
    epsilon = torch.tensor(0.8, dtype=torch.float64)
    parts = [part.requires_grad_() for part in (M, a, b, epsilon)]
    solution = solve(DenseCost(M), a, b, epsilon=epsilon, tolerance=0, max_iterations=3, backend=backend)
    total = solution.plan().square().sum() + solution.linear_cost() + solution.value() + solution.value("entropy")
    found = torch.autograd.grad(total, parts)
    far = torch.where(M[:6, :5] == INF, torch.tensor(1e4, dtype=torch.float64), M[:6, :5])
    right, some = Plain([far], a[:6], b[:5], epsilon, None, 3), far < 1e4
    P, products = right.P[some], right.product[some]
    product = (P * far[some]).sum()
    kl = product + epsilon * ((P * (P / products).log() - P).sum() + a[:6].sum() * b[:5].sum())
    entropy = product + epsilon * (P * (P.log() - 1)).sum()
    wanted = torch.autograd.grad(P.square().sum() + product + kl + entropy, parts)
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact, rtol=1e-9)


@both
def test_elements_that_stop_on_their_own(backend):
    """The derivative is that of the iterations that each element ran."""
    M = torch.stack([normal(6, 7).abs() * scale for scale in (0.01, 1, 6)])
    together = M.clone().requires_grad_()
    options = {"check_every": 1, "tolerance": 1e-4, "acceleration": None, "backend": backend}
    solution = solve(DenseCost(together), epsilon=0.5, **options)
    assert len(set(solution.iterations.tolist())) == 3
    (found,) = torch.autograd.grad(solution.plan().square().sum(), together)
    for k in range(3):
        right = Plain([alone := M[k].clone().requires_grad_()], torch.full((6,), 1 / 6, dtype=torch.float64),
                      torch.full((7,), 1 / 7, dtype=torch.float64), 0.5, None, int(solution.iterations[k]))  # fmt: skip
        close(found[k], torch.autograd.grad(right.P.square().sum(), alone)[0], rtol=1e-9)


@both
def test_what_was_broadcast_gathers_its_gradients(backend):
    x, y = normal(5, 3).requires_grad_(), normal(4, 6, 3, seed=1)
    epsilon = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    a = weights(5).requires_grad_()

    def total(y, epsilon):
        return solve(PointCloud(x, y), a, epsilon=epsilon, tolerance=0, max_iterations=3, backend=backend).value().sum()

    found = torch.autograd.grad(total(y, epsilon), (x, a, epsilon))
    alone = [torch.autograd.grad(total(y[k], epsilon[k]), (x, a, epsilon)) for k in range(4)]
    for ours, parts in zip(found, zip(*alone, strict=True), strict=True):
        close(ours, sum(parts))


def test_iterations_and_error_have_no_gradient():
    solution = solved(arguments("matrix"), 2, "torch")
    assert solution.f.requires_grad
    assert not (solution.error.requires_grad or solution.converged.requires_grad or solution.iterations.requires_grad)


def test_nothing_is_recorded_without_need():
    with torch.no_grad():
        assert not solved(arguments("matrix"), 2, "torch").f.requires_grad
    assert not solve(make("points3")[0], epsilon=1.0).value().requires_grad
    assert not solved(arguments("matrix"), 2, "torch").f.detach().requires_grad


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("output", [lambda s: s.value(), lambda s: s.f.sum(), lambda s: s.apply(V).sum()])
def test_second_derivatives_are_refused(backend, output):
    parts = arguments("points3")
    (by_x,) = torch.autograd.grad(output(solved(parts, 2, backend)), parts[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(by_x.sum(), parts[:1])


# ------------------------------------------------------------------------------------------------------------- memory


def held(parts):
    """Bytes of the different tensors in nested tuples; what a whole problem has in common does not count."""
    storages = {}

    def look(part):
        if isinstance(part, torch.Tensor):
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, tuple) and not isinstance(part, unrolled.Duals):
            for one in part:
                look(one)

    look(tuple(parts))
    return sum(storages.values())


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"acceleration": None}, 1),  # potentials
        ({"acceleration": "overrelaxation"}, 2),  # and softmins, which the relaxed potentials are not
        ({"acceleration": "overrelaxation", "reach": (1.0, 3.0)}, 2),
        ({"acceleration": None, "reach": 1.0}, 2),
        ({"acceleration": "annealing"}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "m"), [(60, 500), (500, 60)])
def test_what_is_kept_of_an_iteration(options, numbers, n, m, monkeypatch):
    """One or two numbers for every point: never over pairs."""
    loop, kept = unrolled._main_loop, []

    def watched(*arguments):
        steps = list(loop(*arguments))
        kept.append(held(steps))
        return iter(steps)

    monkeypatch.setattr(unrolled, "_main_loop", watched)
    for iterations in (60, 160):
        x = normal(n, 2).requires_grad_()
        cost, exactly = PointCloud(x, normal(m, 2, seed=1)), {"tolerance": 0, "max_iterations": iterations}
        solve(cost, epsilon=0.05, **exactly, **options).value().backward()
    an_iteration = (kept[1] - kept[0]) / 100
    assert an_iteration <= 1.11 * numbers * 8 * (n + m)  # a look may hold a translated pair once more


MEMORY = PEAK + """
import sys, torch
from flashot_backends.ops.sinkhorn import PointCloud, solve
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
x, y = (torch.randn(n, 2, generator=generator).requires_grad_() for n in (20000, 2))
reach = float(sys.argv[1])
def run(iterations):
    options = {"tolerance": 0, "max_iterations": iterations, "acceleration": "overrelaxation", "reach": reach}
    solution = solve(PointCloud(x, y), epsilon=1.0, **options)
    (solution.value() + solution.linear_cost()).backward()
    return peak() * 2**20
run(20)
print(-run(100) + run(600))
"""


@linux
@pytest.mark.parametrize("reach", [pytest.param("inf", marks=pytest.mark.slow), "2.0"])
def test_memory_of_relaxed_iterations(reach):
    """500 iterations more hold their potentials and softmins, 80 MB, and nothing else, forward and backward."""
    exactly = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # pages of its own for every vector, given back at once
    call = [sys.executable, "-c", MEMORY, reach]
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=exactly)
    assert done.returncode == 0, done.stderr
    kept = 500 * 2 * 20002 * 4
    assert 0.5 * kept < float(done.stdout) < 1.25 * kept, f"{float(done.stdout) / kept:.2f}"
