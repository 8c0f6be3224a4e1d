"""What the tests of the Triton kernels share, interpreted and on a card: problems, layouts, and how close is right."""

import contextlib
import os

import torch

from flashot_backends import dispatch
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve
from flashot_backends.plugins import KernelSpec
from tests.ops.sinkhorn_cases import normal, plan, sinkhorn, weights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAME = "interpreted" if INTERPRETED else "triton"
GRADE = 3e-6  # of float32: an error of so much in an exponent, relative to the largest


@contextlib.contextmanager
def serving(operation, kernel):
    """In the interpreter the kernel serves the CPU, under a name of its own."""
    if not INTERPRETED:
        yield
        return
    spec = KernelSpec(operation, NAME, kernel.__name__, frozenset({"torch"}))
    dispatch.register(spec)
    yield
    dispatch.unregister(spec)


def streamed(monkeypatch):
    """Two launches an iteration, also where everything would fit in registers."""
    from flashot_backends.kernels.sinkhorn import triton

    monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)


def in_strips(monkeypatch):
    """Whole rows in a program's registers, several strips a program, also where there are few rows."""
    from flashot_backends.kernels.sinkhorn import triton

    streamed(monkeypatch)
    monkeypatch.setattr(triton.Strips, "FEWEST", 0)
    monkeypatch.setattr(triton, "processors", lambda _: 3)


def points(n, m, d, batch=(), dtype=torch.float32, device="cpu", scale=1.0):
    """Two clouds and a regularisation that keeps the largest exponents around a hundred."""
    x = (scale * normal(*batch, n, d)).to(device, dtype)
    y = (scale * normal(*batch, m, d, seed=1)).to(device, dtype)
    return (x, y), 0.3 * d * scale**2


def matrix(n, m, batch=(), dtype=torch.float32, device="cpu"):
    """Costs of a few units."""
    return (normal(*batch, n, m).abs().to(device, dtype),), 0.3


def _strided(tensor):
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 1 : 1 + 2 * tensor.shape[-1] : 2]
    return view.copy_(tensor)


def _sliced(tensor):
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype, device=tensor.device)
    return wide[..., 3 : 3 + tensor.shape[-1]].copy_(tensor)


def _odd_offset(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


LAYOUTS = {
    "row-major": lambda t: t.contiguous(),
    "column-major": lambda t: t.mT.contiguous().mT,
    "sliced": _sliced,
    "strided": _strided,
    "odd offset": _odd_offset,
    "odd offset, column-major": lambda t: _odd_offset(t.mT.contiguous()).mT,
}


def make_cost(tensors):
    return DenseCost(*tensors) if len(tensors) == 1 else PointCloud(*tensors)


def dense(tensors):
    """The matrix in float64; coordinate by coordinate, since a card takes sizes whose differences no memory holds."""
    if len(tensors) == 1:
        return tensors[0].double()
    x, y = (part.double() for part in tensors)
    total = x.new_zeros(*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2])
    for k in range(x.shape[-1]):
        total += (x[..., :, None, k] - y[..., None, :, k]).square()
    return total


def largest_exponent(M, epsilon):
    finite = M.masked_fill(M.isinf(), 0) / torch.as_tensor(epsilon, dtype=M.dtype, device=M.device)[..., None, None]
    return 1 + float(finite.abs().max())


def check(backend, tensors, epsilon, a=None, b=None, iterations=4, start=None, norm="l1", grade=GRADE, **options):
    """A few iterations against the plain solver in float64, on the rows and columns that have mass."""
    M = dense(tensors)
    device, (*_, n, m) = M.device, M.shape
    options |= {"init": None if start is None else (start, None), "max_iterations": iterations, "tolerance": 0}
    solution = solve(make_cost(tensors), a, b, epsilon=epsilon, norm=norm, backend=backend, **options)
    a = torch.full((n,), 1 / n, device=device) if a is None else a
    b = torch.full((m,), 1 / m, device=device) if b is None else b
    f, g = sinkhorn(M, a.double(), b.double(), epsilon, iterations, None if start is None else start.double())
    exact = plan(M, a.double(), b.double(), f, g, epsilon).nan_to_num()
    unit = torch.as_tensor(epsilon, dtype=torch.float64, device=device)[..., None]
    allowed = grade * largest_exponent(M, epsilon)
    for found, wanted, mass in ((solution.f, f, a), (solution.g, g, b)):
        assert found.dtype == torch.float32 and found.shape == wanted.shape
        wrong = ((found.double() - wanted) / unit).abs()[(mass > 0).expand_as(wanted)]
        assert wrong.isfinite().all() and float(wrong.max()) <= allowed, f"{float(wrong.max()):.3g} > {allowed:.3g}"
    error = (exact.sum(-2) - b.double()).norm(p=1 if norm == "l1" else 2, dim=-1)
    slack = 5 * allowed * float(b.double().sum(-1).max())
    torch.testing.assert_close(solution.error.double(), error, rtol=1e-3, atol=slack)
    assert (solution.iterations == iterations).all()
    return solution


def uneven(n, m, batch=(), device="cpu", zeros=0):
    """Uneven weights in float32 of one mass."""
    options = {"dtype": torch.float32, "device": device, "zeros": zeros}
    return weights(*batch, n, **options), weights(*batch, m, seed=1, **options)


def check_products(backend, tensors, epsilon):
    """What a solution answers, against its own potentials in dense float64."""
    M = dense(tensors)
    device, (*batch, n, m) = M.device, M.shape
    a, b = uneven(n, m, batch, device, zeros=1 if min(n, m) > 1 else 0)
    options = {"epsilon": epsilon, "tolerance": 0, "max_iterations": 3, "backend": backend}
    solution = solve(make_cost(tensors), a, b, **options)
    f, g = solution.f.double(), solution.g.double()
    P = plan(M, a.double(), b.double(), f, g, epsilon).nan_to_num()
    V = normal(*batch, m, 3, seed=5).to(device, torch.float32)
    U = normal(*batch, n, seed=6).to(device, torch.float32)
    rows, columns = solution.marginals()
    answers = {
        "apply": (solution.apply(V), P @ V.double(), P @ V.double().abs()),
        "apply_transpose": (
            solution.apply_transpose(U),
            *((P.mT @ u.double()[..., None])[..., 0] for u in (U, U.abs())),
        ),
        "rows": (rows, P.sum(-1), P.sum(-1)),
        "columns": (columns, P.sum(-2), P.sum(-2)),
        "linear cost": (solution.linear_cost(), *2 * ((P * M.nan_to_num(posinf=0)).sum((-1, -2)),)),
    }
    allowed = 2 * GRADE * largest_exponent(M, epsilon)
    for name, (found, wanted, size) in answers.items():
        wrong = (found.double() - wanted).abs() / size.clamp(min=1e-12)
        assert found.shape == wanted.shape and float(wrong.max()) <= allowed, f"{name}: {float(wrong.max()):.3g}"


def check_gradients(backend, tensors, epsilon, a=None, b=None, grade=1e-4):
    """Of a few outputs together, against the reference in float64."""
    given = [part for part in (*tensors, a, b) if part is not None]
    mine = [part.clone().requires_grad_() for part in given]
    theirs = [part.double().requires_grad_() for part in given]

    def output(parts, name):
        cost, masses = parts[: len(tensors)], parts[len(tensors) :]
        solution = solve(make_cost(cost), *masses, epsilon=epsilon, tolerance=0, max_iterations=3, backend=name)
        values = torch.linspace(-1, 1, solution.g.shape[-1], device=solution.g.device, dtype=solution.g.dtype)
        product = solution.apply(values).square().sum()
        return solution.value().sum() + solution.linear_cost().sum() + product + (solution.g * values).mean()

    found = torch.autograd.grad(output(mine, backend), mine)
    wanted = torch.autograd.grad(output(theirs, "reference"), theirs)
    for part, ours, right in zip(given, found, wanted, strict=True):
        assert ours.dtype == part.dtype and ours.shape == part.shape
        assert (ours.double() - right).norm() <= grade * right.norm()
