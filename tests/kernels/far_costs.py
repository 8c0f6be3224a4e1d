"""Costs of some 800 ε. Float32 rounds such exponents by 3e-5 either way, and so it does the sums of a plan's rows; but
all together must not lean to one side: gradients through many iterations multiply that many plans."""

import math

import torch

from flashot_backends.kernels.sinkhorn import reference
from flashot_backends.kernels.sinkhorn.operator import Cost
from tests.ops.sinkhorn_cases import normal

REGULARISATIONS = (0.07, 0.09, 0.11)  # none of them is a float32
KINDS = ("matrix", 3, 20)
MOST = 1e-5  # that row sums may lean
WIDE = torch.tensor([0.1], dtype=torch.float64)


def costs(kind, device="cpu"):
    """One problem of 320 and 160 points, or their matrix, or "l1"; and log weights and potentials of the columns.

    After some iterations every column is near to some of the rows; of few columns rounding alone may lean.
    """
    d, metric = (3, "l1" if kind == "l1" else "sqeuclidean") if isinstance(kind, str) else (kind, "sqeuclidean")
    x, y = 0.3 * normal(1, 320, d), 0.3 * normal(1, 160, d, seed=1) + (23 if kind == "l1" else (70 / d) ** 0.5)
    parts = (None, None, (x[:, :, None] - y[:, None]).square().sum(-1)) if kind == "matrix" else (x, y, None)
    cost = Cost(*(None if part is None else part.to(device, torch.float32) for part in parts), metric)
    log_weight = torch.log_softmax(normal(1, 160, seed=2), -1).to(device)
    parts = (None if part is None else part.double() for part in cost[:3])
    wide = reference.operator(Cost(*parts, metric), WIDE.to(device))
    g = torch.zeros_like(log_weight)
    for _ in range(10):
        g = wide.sweep(torch.full((1, 320), -math.log(320), dtype=torch.float64, device=device), log_weight, g, g).g
    return cost, log_weight.float(), g.float()


def leanings(op, log_weight, g):
    """How far the row sums of plans are from one on average, by what gave the softmin and what took the plan."""
    each, h, found = torch.ones(1, op.rows, device=g.device), log_weight + g / op.epsilon[:, None], {}
    swept = op.sweep(-7 * each, log_weight, g, 0 * each).softmin
    for way, softmin in (("softmin", op.softmin(h)), ("sweep", swept)):
        s, ones = softmin / op.epsilon[:, None], torch.ones(1, op.columns, 3, device=g.device)
        found[f"{way}, apply"] = op.apply(s, h, ones)[..., 0]
        found[f"{way}, one column"] = op.apply(s, h, ones[..., :1])[..., 0]
        found[f"{way}, turned"] = op.T.apply(h, s, each[..., None])[..., 0].sum(-1) / op.rows
        found[f"{way}, weighted"] = op.weighted(s, h, alpha=each).rows
        if (pulls := op.pulls(True)) is not None:
            found[f"{way}, pulled"] = pulls.pull(False, log_weight, g, softmin, each).sum(-1) / op.rows
    return {name: float((sums.double() - 1).mean()) for name, sums in found.items()}
