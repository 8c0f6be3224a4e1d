"""What the tests of the Sinkhorn operation share: problems, and a solver of a few lines that autograd can follow."""

import math

import torch

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud


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


def uniform(count, like):
    """The weights that are meant where none are given."""
    return torch.full((count,), 1 / count, dtype=torch.float64, device=like.device)


INF = math.inf
