"""Gradient flows: a cloud of points walks down three losses towards another cloud.

Run it as it is with ``python -m flashot_backends gradient_flow.py``; it writes gradient_flow.png.
"""

import sys
import time

import matplotlib
import torch
from geomloss import SamplesLoss

matplotlib.use("Agg")
from matplotlib import pyplot

POINTS, STEPS, SHOWN = 1500, 60, (0, 4, 15, 60)
LOSSES = {  # with the length of a step
    "Sinkhorn divergence, blur 0.01": (SamplesLoss("sinkhorn", p=2, blur=0.01, backend="flash"), 0.35),
    "energy distance": (SamplesLoss("energy", backend="flash"), 0.1),
    "Gaussian kernel, blur 0.2": (SamplesLoss("gaussian", blur=0.2, backend="flash"), 0.03),
}


def crescent(generator):
    angle = 3.6 * torch.rand(POINTS, generator=generator) + 1.2
    radius = 0.16 + 0.05 * torch.rand(POINTS, generator=generator)
    return torch.stack([0.27 + radius * angle.cos(), 0.7 + radius * angle.sin()], 1)


def two_discs(generator):
    angle, radius = 6.2832 * torch.rand(POINTS, generator=generator), torch.rand(POINTS, generator=generator).sqrt()
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    large = torch.arange(POINTS)[:, None] < 0.65 * POINTS
    right, below = torch.tensor([0.72, 0.6]), torch.tensor([0.5, 0.22])
    return torch.where(large, right + 0.14 * points, below + 0.09 * points)


def flow(loss, length, x, y):
    """The cloud at every step. A point of weight 1/N moves N times its gradient."""
    clouds = [x]
    for _ in range(STEPS):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x, y), x)
        x = x - length * POINTS * gradient
        clouds.append(x.detach())
    return clouds


generator = torch.Generator().manual_seed(0)
x, y = crescent(generator), two_discs(generator)
figure, axes = pyplot.subplots(len(LOSSES), len(SHOWN), figsize=(11, 8.4), sharex=True, sharey=True)
for row, (name, (loss, length)) in zip(axes, LOSSES.items(), strict=True):
    began = time.perf_counter()
    clouds = flow(loss, length, x, y)
    print(f"{name}: {STEPS} steps of {POINTS} points in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    for axis, step in zip(row, SHOWN, strict=True):
        axis.scatter(*y.T, s=2, c="#c9c9c9", linewidths=0)
        axis.scatter(*clouds[step].T, s=2, c=x[:, 1], cmap="viridis", linewidths=0)
        axis.set(xlim=(0, 1), ylim=(0.05, 0.95), xticks=[], yticks=[], aspect="equal")
    row[0].set_ylabel(name, fontsize=10)
for axis, step in zip(axes[0], SHOWN, strict=True):
    axis.set_title(f"step {step}", fontsize=11)
figure.tight_layout()
figure.savefig("gradient_flow.png", dpi=90)
