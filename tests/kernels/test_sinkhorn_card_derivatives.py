"""Derivatives of the fixed point, choices of pairs and other metrics on a real card, against float64 on it."""

import gc
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("no CUDA device", allow_module_level=True)

from flashot_backends.ops.sinkhorn import PointCloud, c_transform, solve  # noqa: E402
from tests.ops.sinkhorn_cases import normal, weights  # noqa: E402

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
dimensions = pytest.mark.parametrize("d", [2, 3, 20, 64, 65, 128, 257, 512])
SIZES = (1501, 1250)


def clouds(d, n=SIZES[0], m=SIZES[1]):
    return normal(n, d, device=CUDA), 1.1 * normal(m, d, seed=1, device=CUDA) + 0.2


def near(found, right, digits):
    assert found.isfinite().all()
    assert (found.double() - right).norm() <= digits * right.norm()


def both(function, *tensors, backends=("triton", "torch")):
    """The function of float32 tensors by Triton's kernels, and of the same in float64."""
    narrow = [part.float() for part in tensors]
    return function(*narrow, backends[0]), function(*(part.double() for part in narrow), backends[1])


@dimensions
@pytest.mark.parametrize("gradient", ["unrolled", "implicit", "envelope"])
@pytest.mark.parametrize("epsilon", [0.2, 0.02])
def test_gradients(d, gradient, epsilon):
    a = weights(SIZES[0], zeros=3, device=CUDA)

    def derivatives(x, y, backend):
        leaves = [part.clone().requires_grad_() for part in (x, y)]
        solution = solve(
            PointCloud(*leaves), a.to(x.dtype) / a.to(x.dtype).sum(), epsilon=epsilon * 2 * d, gradient=gradient,
            tolerance=1e-5, max_iterations=500, backend=backend,
        )  # fmt: skip
        total = solution.value()
        if gradient != "envelope":
            total = total + solution.linear_cost() + 1000 * solution.apply(y[:, :2]).square().sum()
        return torch.cat(torch.autograd.grad(total, leaves))

    near(*both(derivatives, *clouds(d)), 2e-3 if epsilon < 0.1 else 3e-4)


@dimensions
@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
def test_hessian_products(d, gradient):
    vector = normal(300, d, seed=5, device=CUDA)

    def product(x, y, backend):
        x = x.clone().requires_grad_()
        options = {"tolerance": 1e-6, "gradient": gradient, "backend": backend}
        value = solve(PointCloud(x, y), epsilon=0.4 * d, **options).value()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.autograd.grad((first * vector.to(x.dtype)).sum(), x)[0]

    near(*both(product, *clouds(d, 300, 250)), 1e-4)


@pytest.mark.parametrize("metric", ["euclidean", "l1", "cosine", "inner", "labels"])
def test_metrics(metric):
    labels = torch.arange(SIZES[0], device=CUDA) % 5, torch.arange(SIZES[1], device=CUDA) % 4
    table = normal(5, 4, seed=3, device=CUDA)

    def products(x, y, backend):
        more = {"labels": labels, "table": table.to(x.dtype)} if metric == "labels" else {"metric": metric}
        backend = None if backend == "triton" and metric in ("euclidean", "l1") else backend
        return solve(PointCloud(x, y, **more), epsilon=2.0, tolerance=1e-5, backend=backend).apply(y)

    near(*both(products, *clouds(16)), 1e-4)


def test_choices():
    x, y = clouds(20)
    solution = solve(PointCloud(x.float(), y.float()), epsilon=4.0, backend="triton")
    values, indices = solution.top_k(7)
    plan = solution.plan()
    torch.testing.assert_close(values, plan.topk(7).values, rtol=1e-4, atol=0)
    torch.testing.assert_close(plan.gather(1, indices), values, rtol=1e-4, atol=0)
    g = normal(SIZES[1], seed=4, device=CUDA).float()
    found = c_transform(PointCloud(x.float(), y.float()), g)
    right = ((x[:, None] - y).square().sum(-1) - g).min(-1).values
    torch.testing.assert_close(found.values.double(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gradient", ["implicit", "envelope"])
@pytest.mark.parametrize("d", [3, 64])
def test_memory_does_not_grow_with_iterations(gradient, d):
    x, y = (part.float().requires_grad_() for part in clouds(d, 20_000, 10_000))

    def peak(iterations):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        solution = solve(PointCloud(x, y), epsilon=0.1 * d, tolerance=0, max_iterations=iterations, gradient=gradient)
        torch.autograd.grad(solution.value(), (x, y))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    gc.collect()  # of other tests
    for iterations in (10, 300):  # the buffers that a repeated call finds are made by the first one
        peak(iterations)
    assert peak(300) <= peak(10) + (1 << 20)
