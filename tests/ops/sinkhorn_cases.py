"""What the tests of the Sinkhorn operation share: problems, and a solver of a few lines that autograd can follow."""

import math

import torch

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud

INF = math.inf


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Standard normal numbers, the same on every device and, up to rounding, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def weights(*shape, seed=0, dtype=torch.float64, device="cpu", zeros=0):
    """Uneven weights of mass 1 along the last axis, the first ``zeros`` of them zero."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1
    out[..., :zeros] = 0
    return (out / out.sum(-1, keepdim=True)).to(device, dtype)


def distances(x, y):
    """Squared distances, from direct differences."""
    return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1)


def make(kind, n=7, m=9, batch=(), dtype=torch.float64, device="cpu"):
    """A cost with its tensors and the dense matrix they stand for, in float64: (cost, tensors, matrix)."""
    if kind == "matrix":
        M = normal(*batch, n, m, dtype=dtype, device=device).abs()
        return DenseCost(M), (M,), M.double()
    d = int(kind.removeprefix("points"))
    x, y = normal(*batch, n, d, dtype=dtype, device=device), normal(*batch, m, d, seed=1, dtype=dtype, device=device)
    return PointCloud(x, y), (x, y), distances(x.double(), y.double())


def matrix_of(tensors):
    """The dense matrix of ``make``'s tensors, differentiable."""
    return tensors[0] if len(tensors) == 1 else distances(*tensors)


def sinkhorn(M, a, b, epsilon, iterations, f=None):
    """Alternating updates in the log domain, columns first: (f, g)."""
    f = torch.zeros_like(M[..., 0]) if f is None else f
    epsilon = torch.as_tensor(epsilon, dtype=M.dtype, device=M.device)[..., None]
    scaled, g = M / epsilon[..., None], None
    for _ in range(iterations):
        g = -epsilon * torch.logsumexp((a.log() + f / epsilon)[..., :, None] - scaled, -2)
        f = -epsilon * torch.logsumexp((b.log() + g / epsilon)[..., None, :] - scaled, -1)
    return f, g


def plan(M, a, b, f, g, epsilon):
    """The plan of potentials f and g."""
    epsilon = torch.as_tensor(epsilon, dtype=M.dtype, device=M.device)[..., None, None]
    return a[..., :, None] * b[..., None, :] * torch.exp((f[..., :, None] + g[..., None, :] - M) / epsilon)


def close(found, wanted, rtol=1e-10, atol=None):
    """Compare in float64, by default to the same tolerance absolute and relative."""
    atol = rtol if atol is None else atol
    torch.testing.assert_close(found.double(), wanted.double(), rtol=rtol, atol=atol)


def replay(M, a, b, epsilon, run, f=None, rho=(INF, INF), check_every=10, stages=0):
    """The iterations of one accelerated run, factors by their recursion, dense, for autograd to follow: (f, g).

    ``run`` is the solution; penalties ``rho`` of rows and columns translate at every look, first of all; the
    column update before is plain then.
    """
    errors, gaps, last = run.errors, run._state.gaps[0], int(run.iterations) - 10 * stages
    looks = {min(1 + check_every * k, last): float(gaps[k]) for k in range(len(errors)) if not errors[k].isnan()}
    f = torch.zeros_like(M[:, 0]) if f is None else f
    for stage in range(stages, 0, -1):
        scale, g = epsilon * 4.0**stage, None
        least = 1 - 1 / float((1 + scale / rho[0]) * (1 + scale / rho[1]))
        factors = factors_from(max(math.tanh(math.acosh(2) / 20), least**0.5))
        for k in range(10):
            g = relax(g, damp(columns_of(M, a, f, scale), scale, rho[1]), next(factors), scale)
            f = relax(f, damp(rows_of(M, b, g, scale), scale, rho[0]), 1.0 if k == 9 else next(factors), scale)
        f = f + translation(a, b, f, g, rho)
    gap = looks[1]  # nothing is learnt at the first look
    factors, g = factors_from(1.0), None
    for k in range(1, last + 1):
        factor = next(factors)
        factor = 1.0 if k in looks and rho != (INF, INF) else factor
        g = relax(g, damp(columns_of(M, a, f, epsilon), epsilon, rho[1]), factor, epsilon)
        factor = next(factors)
        if k in looks:
            factors, gap = factors_from(looks[k], gap), looks[k]
            factor = next(factors)
            shift = translation(a, b, f, g, rho)
            f, g = f + shift, g - shift
        f = relax(f, damp(rows_of(M, b, g, epsilon), epsilon, rho[0]), factor, epsilon)
    return f, g


def factors_from(gap, previous=None):
    """Chebyshev's factors of half steps after a look; the second still has the eigenvalue known before."""
    first, eigenvalue = 1 - (gap if previous is None else previous) ** 2, 1 - gap**2
    yield 1.0
    yield 1 / (1 - first / 2)
    factor = 1 / (1 - eigenvalue / 2)
    while True:
        factor = 1 / (1 - eigenvalue * factor / 4)
        yield factor


def relax(old, target, factor, epsilon):
    """old + factor (target − old), upwards at most target + ε log(1 + (target − old)/ε)."""
    if old is None or factor == 1:
        return target
    step = target - old
    bound = epsilon * torch.log1p(torch.relu(step) / epsilon)
    free = (factor - 1) * step
    return target + torch.where((step > 0) & (free > bound), bound, free)


def damp(softmin, epsilon, rho):
    """The update where missing the marginal costs ρ KL."""
    return softmin if rho == INF else softmin * rho / (rho + epsilon)


def rows_of(M, b, g, epsilon):
    """Softmin of the rows."""
    return -epsilon * torch.logsumexp((b.log() + g / epsilon)[None, :] - M / epsilon, 1)


def columns_of(M, a, f, epsilon):
    """Softmin of the columns."""
    return -epsilon * torch.logsumexp((a.log() + f / epsilon)[:, None] - M / epsilon, 0)


def translation(a, b, f, g, rho):
    """What to add to f and take from g."""
    inverse = [1 / part for part in rho]
    if sum(inverse) == 0:
        return 0.0
    masses = [(w * torch.exp(-p * i)).sum() for w, p, i in zip((a, b), (f, g), inverse, strict=True)]
    return (masses[0] / masses[1]).log() / sum(inverse)


def uniform(count, like):
    """The weights that are meant where none are given."""
    return torch.full((count,), 1 / count, dtype=torch.float64, device=like.device)

