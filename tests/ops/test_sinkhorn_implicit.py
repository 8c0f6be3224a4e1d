"""Derivatives of the fixed point, implicit and by the envelope theorem: first and second, against unrolled loops."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve  # noqa: E402
from tests.memory import PEAK, linux  # noqa: E402

from .sinkhorn_cases import INF, close, make, normal, weights  # noqa: E402
from .test_sinkhorn_gradients import KINDS, OUTPUTS, Plain, arguments  # noqa: E402

both = pytest.mark.parametrize("backend", ["torch", "reference"])
# Of f and g alone only what does not depend on their constant; marginals are a and b whatever the points.
QUESTIONS = {name: pair for name, pair in OUTPUTS.items() if name not in ("f", "g", "marginals")}
QUESTIONS["f + g"] = (lambda s: (s.f[:, None] + s.g).square(), lambda p: (p.f[:, None] + p.g).square())
CONVERGED = {"tolerance": 1e-15, "max_iterations": 2000, "gradient_tolerance": 1e-13}


def cost_of(tensors):
    return DenseCost(*tensors) if len(tensors) == 1 else PointCloud(*tensors)


def solved(parts, gradient, backend="torch", **options):
    *tensors, a, b, epsilon = parts
    return solve(cost_of(tensors), a, b, epsilon=epsilon, gradient=gradient, backend=backend, **CONVERGED | options)


def tangent(gradients):
    """Gradients (…, by a, by b, by ε) along weights that keep their masses equal: constants are not determined."""
    *others, by_a, by_b, by_epsilon = gradients
    joint = by_a.mean() + by_b.mean()
    return [*others, by_a - by_a.mean(), by_b - by_b.mean(), joint, by_epsilon]


def agree(found, wanted, rtol=1e-8):
    for ours, right in zip(tangent(found), tangent(wanted), strict=True):
        close(ours, right, rtol=rtol)


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", QUESTIONS)
def test_implicit_is_unrolled_at_convergence(kind, name, backend):
    parts, question = arguments(kind)[:-1], QUESTIONS[name][0]
    found, wanted = (
        torch.autograd.grad(question(solved(parts, gradient, backend)).sum(), parts)
        for gradient in ("implicit", "unrolled")
    )
    agree(found, wanted)


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convention", ["kl", "entropy"])
def test_envelope_is_unrolled_at_convergence(kind, convention, backend):
    parts = arguments(kind)[:-1]
    found, wanted = (
        torch.autograd.grad(solved(parts, gradient, backend).value(convention), parts)
        for gradient in ("envelope", "unrolled")
    )
    agree(found, wanted)


def test_values_do_not_depend_on_the_gradient():
    parts = arguments("points3")[:-1]
    unrolled, *others = (solved(parts, gradient, max_iterations=3) for gradient in ("unrolled", "envelope", "implicit"))
    for other in others:
        assert torch.equal(other.value(), unrolled.value()) and torch.equal(other.f, unrolled.f)
        assert torch.equal(other.plan(), unrolled.plan()) and int(other.iterations) == 3


@pytest.mark.parametrize("kind", ["matrix", "points3"])
def test_finite_differences(kind):
    parts = arguments(kind)[:-1]

    def outcome(*parts):
        *tensors, a, b, epsilon = parts
        solution = solved([*tensors, a / a.sum(), b / b.sum(), epsilon], "implicit")
        return solution.plan(), solution.f[:, None] + solution.g, solution.linear_cost(), solution.value()

    assert torch.autograd.gradcheck(outcome, parts, fast_mode=True)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_without_mass(kind, backend):
    """They take no part, but their potentials, one update away, have a derivative."""
    *tensors, _, _, epsilon, _ = arguments(kind)
    a, b = weights(7, zeros=2).requires_grad_(), weights(9, seed=1, zeros=3).requires_grad_()
    parts = [*tensors, a, b, epsilon]

    def total(solution):
        potentials = solution.f[:, None] + solution.g
        return potentials.square().sum() + solution.plan().square().sum() + solution.value()

    found, wanted = (
        torch.autograd.grad(total(solved(parts, gradient, backend)), parts) for gradient in ("implicit", "unrolled")
    )
    *points, by_a, by_b, by_epsilon = (one - other for one, other in zip(found, wanted, strict=True))
    for difference in (*points, by_epsilon):
        close(difference, torch.zeros_like(difference), atol=1e-8)
    assert (found[-3][:2] == 0).all() and (found[-2][:3] == 0).all()
    close(by_a[2:], by_a[2:].mean().expand(5), atol=1e-8)
    close(by_b[3:], -by_a[2:].mean().expand(6), atol=1e-8)


REACHES = [2.0, (None, 1.0), (0.7, None), (0.5, 30.0)]


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("kind", ["matrix", "points3", "inner", "massless"])
@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_unbalanced(kind, reach, gradient):
    """Penalties of the marginals: every result, by every input (weights where there are any), constants too."""
    *tensors, a, b, epsilon = arguments("matrix" if kind == "matrix" else "points3")[:-1]
    if kind == "massless":
        a, b = weights(7, zeros=2).requires_grad_(), weights(9, seed=1, zeros=3).requires_grad_()
    b = (1.3 * b.detach()).requires_grad_()
    parts = [*tensors, a, b, epsilon]
    cost = PointCloud(*tensors, "inner") if kind == "inner" else cost_of(tensors)
    unrolled, found = (
        solve(cost, a, b, epsilon=epsilon, reach=reach, gradient=way, **CONVERGED | {"tolerance": 1e-14})
        for way in ("unrolled", gradient)
    )
    questions = {"kl": lambda s: s.value()}
    if gradient == "implicit":
        questions |= {
            "entropy": lambda s: s.value("entropy"),
            "potentials": lambda s: (s.f * normal(7, seed=4)).sum() + (s.g * normal(9, seed=6)).sum(),
            "plan": lambda s: s.plan().square().sum() + s.linear_cost() + s.marginals()[0].square().sum(),
        }
    for question in questions.values():
        close(question(found), question(unrolled), rtol=1e-9)
        bys = [torch.autograd.grad(question(s), parts, retain_graph=True) for s in (found, unrolled)]
        for part, ours, right in zip(parts, *bys, strict=True):
            massive = part > 0 if part.shape in (a.shape, b.shape) else torch.ones_like(part) > 0
            close(ours[massive], right[massive], rtol=1e-7)


def test_a_batch_of_balanced_and_unbalanced():
    """Every problem has its own penalties, and its own null vector or none."""
    x, y, epsilon = normal(3, 7, 3).requires_grad_(), normal(9, 3, seed=1), torch.tensor([0.8, 1.0, 2.0]).double()
    reach = torch.tensor([INF, 1.5, 0.5], dtype=torch.float64), torch.tensor([INF, INF, 2.0], dtype=torch.float64)
    bys = []
    for gradient in ("implicit", "unrolled"):
        solution = solve(
            PointCloud(x, y), epsilon=epsilon, reach=reach, gradient=gradient, **CONVERGED | {"tolerance": 1e-14}
        )
        total = solution.value() + solution.linear_cost() + (solution.f.sum(-1) * 9 + solution.g.sum(-1) * 7)
        bys.append(torch.autograd.grad(total.sum(), x)[0])
    close(*bys, rtol=1e-8)


def test_the_envelope_of_the_entropy_needs_binding_marginals():
    M = normal(7, 9).abs().requires_grad_()
    value = solve(DenseCost(M), epsilon=1.0, reach=1.0, gradient="envelope").value("entropy")
    with pytest.raises(NotImplementedError, match="gradient='envelope'"):
        value.backward()


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("kind", ["matrix", "points3"])
def test_hessian_unbalanced(kind, reach):
    parts = arguments(kind)[:-1]

    def total(*parts):
        *tensors, a, b, epsilon = parts
        options = CONVERGED | {"tolerance": 1e-14, "reach": reach}
        solution = solve(cost_of(tensors), a, b, epsilon=epsilon, gradient="implicit", **options)
        return solution.value() + solution.plan().square().sum()

    assert torch.autograd.gradgradcheck(total, parts, fast_mode=True)


def test_forbidden_pairs():
    M, a, b = normal(6, 5).abs(), weights(6), weights(5, seed=1)
    M[0, 1] = M[3, 4] = INF
    parts = [part.requires_grad_() for part in (M, a, b, torch.tensor(0.8, dtype=torch.float64))]
    totals = [
        s.plan().square().sum() + s.linear_cost() + s.value("entropy")
        for s in (solved(parts, gradient) for gradient in ("implicit", "unrolled"))
    ]
    agree(*(torch.autograd.grad(total, parts) for total in totals))


@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_batches_and_their_elements(gradient):
    """Own regularisation, own convergence, own linear system."""
    x, y = normal(5, 3).requires_grad_(), normal(4, 6, 3, seed=1).requires_grad_()
    epsilon = torch.tensor([0.3, 1.0, 2.0, 40.0], dtype=torch.float64, requires_grad=True)
    a = weights(5).requires_grad_()

    def total(y, epsilon):
        solution = solve(PointCloud(x, y), a, epsilon=epsilon, gradient=gradient, tolerance=1e-12, max_iterations=5000)
        return solution.value().sum() + (solution.linear_cost().sum() if gradient == "implicit" else 0.0)

    found = torch.autograd.grad(total(y, epsilon), (x, y, a, epsilon))
    alone = [torch.autograd.grad(total(y[k], epsilon[k]), (x, y, a, epsilon)) for k in range(4)]
    for ours, parts in zip(found, zip(*alone, strict=True), strict=True):
        close(ours, sum(parts), rtol=1e-7)


@pytest.mark.parametrize("metric", ["euclidean", "l1", "cosine", "inner"])
@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_other_metrics(metric, gradient):
    parts = [part.requires_grad_() for part in (normal(7, 3), normal(9, 3, seed=1), weights(7), weights(9, seed=1))]
    table = normal(3, 4, seed=3).requires_grad_()
    labelled = {"labels": (torch.arange(7) % 3, torch.arange(9) % 4), "table": table}
    x, y, a, b = parts
    epsilon = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    cost = PointCloud(x, y, metric, **labelled if metric in ("cosine", "inner") else {})
    leaves = [*([table] if cost.table is not None else []), x, y, a, b, epsilon]
    solutions = [
        solve(cost, a, b, epsilon=epsilon, gradient=way, **CONVERGED | {"max_iterations": 20000})
        for way in (gradient, "unrolled")
    ]
    questions = [lambda s: s.value(), lambda s: s.value("entropy")]
    questions += [lambda s: s.linear_cost() + s.plan().square().sum()] if gradient == "implicit" else []
    for question in questions:
        agree(*(torch.autograd.grad(question(s), leaves, retain_graph=True) for s in solutions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs(dtype):
    tensors = [part.requires_grad_() for part in make("points20", dtype=dtype)[1]]
    epsilon = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    a, b = weights(7, dtype=torch.float32).requires_grad_(), weights(9, seed=1, dtype=torch.float32)
    parts = [*tensors, a, b, epsilon]
    exact = [part.detach().double().requires_grad_(part.requires_grad) for part in parts]
    leaves = [k for k, part in enumerate(parts) if part.requires_grad]
    digits = {torch.float32: 2e-4, torch.bfloat16: 3e-2}[dtype]
    options = {"gradient_tolerance": None, "tolerance": 1e-7}
    for question in (lambda s: s.value(), lambda s: 100 * s.plan().square().sum()):
        found = torch.autograd.grad(question(solved(parts, "implicit", **options)), [parts[k] for k in leaves])
        wanted = torch.autograd.grad(question(solved(exact, "implicit")), [exact[k] for k in leaves])
        for k, ours, right in zip(leaves, found, wanted, strict=True):
            assert ours.dtype == parts[k].dtype
            if k == 2:  # the constant that may pass between the potentials
                ours, right = ours - ours.mean(), right - right.mean()
            assert (ours.double() - right).norm() <= digits * right.norm()


def test_envelope_refuses_what_it_does_not_know():
    parts = arguments("points3")[:-1]
    solution = solved(parts, "envelope")
    V = normal(9, 2).requires_grad_()
    for result in (solution.f, solution.g, solution.plan(), solution.apply(V), solution.linear_cost()):
        with pytest.raises(NotImplementedError, match="gradient='envelope' gives the derivatives of value"):
            result.sum().backward(retain_graph=True)
    close(torch.autograd.grad(solution.apply(V).sum(), V)[0], solution.plan().sum(0)[:, None].expand(9, 2))


# -------------------------------------------------------------------------------------------------- second derivatives


def products(function, leaves):
    """Hessian times a vector, that keeps masses equal, by every leaf."""
    gradients = torch.autograd.grad(function(), leaves, create_graph=True)
    vectors = [normal(leaf.numel(), seed=5 + k).reshape(leaf.shape) for k, leaf in enumerate(leaves)]
    for k in (-3, -2):
        vectors[k] = vectors[k] - vectors[k].mean()
    inner = sum((gradient * vector).sum() for gradient, vector in zip(gradients, vectors, strict=True))
    return torch.autograd.grad(inner, leaves)


SECOND = [("kl", "envelope"), ("entropy", "envelope"), ("kl", "implicit"), ("plan", "implicit"), ("apply", "implicit"),
          ("linear_cost", "implicit")]  # fmt: skip


@pytest.mark.parametrize("kind", ["matrix", "points2", "points65", "points128", "points257", "points512"])
@pytest.mark.parametrize(("name", "gradient"), SECOND)
def test_hessian_products(kind, name, gradient):
    """By points, M, weights and ε, and across them, against autograd through dense iterations, twice."""
    parts = arguments(kind)[:-1]
    if kind != "matrix":
        for part in parts[:2]:
            part.data.mul_(1.5 * part.shape[-1] ** -0.5)
    mine, theirs = OUTPUTS[name]
    *tensors, a, b, epsilon = parts
    found = products(lambda: mine(solved(parts, gradient)).sum(), parts)
    wanted = products(lambda: theirs(Plain(tensors, a, b, epsilon, None, 60)).sum(), parts)
    agree(found, wanted, rtol=1e-7)


def test_hessian_of_points_by_finite_differences():
    x, y = normal(5, 3).requires_grad_(), normal(6, 3, seed=1)

    def value(x):
        return solve(PointCloud(x, y), epsilon=0.7, gradient="envelope", **CONVERGED).value()

    assert torch.autograd.gradgradcheck(value, (x,), fast_mode=True)


@pytest.mark.parametrize("metric", ["cosine", "inner"])
def test_second_derivatives_of_metrics(metric):
    x, y = normal(6, 4).requires_grad_(), normal(5, 4, seed=1)
    table, labels = normal(3, 3, seed=2).requires_grad_(), (torch.arange(6) % 3, torch.arange(5) % 3)

    def value(x, table):
        cost = PointCloud(x, y, metric, labels=labels, table=table)
        return solve(cost, epsilon=1.0, gradient="implicit", **CONVERGED).value()

    assert torch.autograd.gradgradcheck(value, (x, table), fast_mode=True)


@pytest.mark.parametrize("metric", ["euclidean", "l1"])
def test_second_derivatives_of_distances_are_refused(metric):
    x, y = normal(6, 4).requires_grad_(), normal(5, 4, seed=1)
    value = solve(PointCloud(x, y, metric), epsilon=1.0, gradient="envelope").value()
    (by_x,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"second derivatives by points with the metric '{metric}'"):
        by_x.sum().backward()


def test_second_derivatives_pass_what_has_no_mass():
    """The Hessian is that of the smaller problem."""
    x, y, a, b = normal(7, 3).requires_grad_(), normal(9, 3, seed=1), weights(7, zeros=2), weights(9, seed=1, zeros=3)

    def value(x, y, a, b):
        return solve(PointCloud(x, y), a, b, epsilon=0.7, gradient="envelope", **CONVERGED).value()

    found = torch.autograd.functional.hessian(lambda x: value(x, y, a, b), x)
    small = torch.autograd.functional.hessian(lambda x: value(x, y[3:], a[2:], b[3:]), x.detach()[2:])
    close(found[2:, :, 2:], small, rtol=1e-8)
    assert (found[:2] == 0).all() and (found[:, :, :2] == 0).all()


# ---------------------------------------------------------------------------------------------------- torch and memory


@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_compile_and_transforms(gradient):
    x, y, a, b = normal(6, 3), normal(5, 3, seed=1), weights(6), weights(5, seed=1)

    def value(x, a):
        return solve(PointCloud(x, y), a, b, epsilon=0.8, gradient=gradient, tolerance=1e-12).value()

    leaves = [x.clone().requires_grad_(), a.clone().requires_grad_()]
    wanted = torch.autograd.grad(value(*leaves), leaves)
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")(*leaves)
    for found in (torch.autograd.grad(compiled, leaves), torch.func.grad(value, argnums=(0, 1))(x, a)):
        for ours, right in zip(found, wanted, strict=True):
            close(ours, right)


@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
def test_strides_and_empty_batches(gradient):
    """Views of any strides give what copies give; no problem at all gives nothing, forward and backward."""
    x, y, a = normal(3, 14).T[::2].requires_grad_(), normal(2, 9, 3, seed=1)[1].flip(0), weights(14).repeat(2)[::4] * 2
    a = (a / a.sum()).requires_grad_()
    values = [
        solve(PointCloud(one(x), one(y)), one(a), epsilon=0.8, gradient=gradient).value()
        for one in (lambda part: part, lambda part: part.clone(memory_format=torch.contiguous_format))
    ]
    for ours, right in zip(*(torch.autograd.grad(value, (x, a)) for value in values), strict=True):
        close(ours, right)
    none = normal(0, 7, 3).requires_grad_()
    solution = solve(PointCloud(none, y), epsilon=torch.ones(0), gradient=gradient)
    (by,) = torch.autograd.grad(solution.value().sum(), none)
    assert solution.f.shape == (0, 7) and solution.top_k(2).values.shape == (0, 7, 2) and by.shape == none.shape


def test_an_unsolved_system_is_said():
    """Two clusters that hardly exchange anything: more steps than rounding allows."""
    x = torch.cat([normal(20, 2), normal(20, 2, seed=1) + 6]).float().requires_grad_()
    y = torch.cat([normal(25, 2, seed=2), normal(15, 2, seed=3) + 6]).float()
    solution = solve(PointCloud(x, y), epsilon=0.02, gradient="implicit", max_iterations=5)
    with pytest.warns(RuntimeWarning, match="relative residual"):
        solution.plan().square().sum().backward()


@pytest.mark.parametrize(("arguments", "kind", "message"), [
    ({"gradient": "exact"}, ValueError, "gradient is 'exact'; accepted is one of"),
    ({"gradient": None}, ValueError, "gradient is None"),
    ({"gradient_tolerance": 0.0}, ValueError, "gradient_tolerance is 0.0"),
    ({"gradient_tolerance": "low"}, TypeError, "gradient_tolerance is 'low'"),
])  # fmt: skip
def test_bad_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        solve(DenseCost(normal(3, 4).abs()), epsilon=1.0, **arguments)


MEMORY = PEAK + """
import sys, torch
from flashot_backends.ops.sinkhorn import PointCloud, solve
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
x, y = (torch.randn(n, 2, generator=generator).requires_grad_() for n in (8000, 2))
def run(iterations):
    solution = solve(PointCloud(x, y), epsilon=1.0, tolerance=0, max_iterations=iterations, gradient=sys.argv[1])
    (solution.value() + (solution.linear_cost() if sys.argv[1] != "envelope" else 0)).backward()
run(10)
before = peak()
run(1000)
print(peak() - before)
"""


@linux
@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_memory_does_not_grow_with_iterations(gradient):
    """1 000 iterations take the memory of 10, forward and backward: their potentials alone take 32 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY, gradient], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4, f"{done.stdout} MB"
