"""Fitting a shape: a closed curve with a few parameters is fitted to a noisy scan with stray points.

Balanced transport must carry every stray point to the curve; with ``reach`` those farther away are given up.
Run it as it is with ``python -m flashot_backends fit_shape.py``; it writes fit_shape.png.
"""

import sys
import time

import matplotlib
import torch
from geomloss import SamplesLoss

matplotlib.use("Agg")
from matplotlib import pyplot

SAMPLES, FREQUENCIES, STEPS = 400, 8, 100
LOSSES = {
    "balanced": SamplesLoss("sinkhorn", blur=0.02, scaling=0.6, backend="flash"),
    "reach 0.1": SamplesLoss("sinkhorn", blur=0.02, reach=0.1, scaling=0.6, backend="flash"),
}


def scan(generator):
    """A star with five arms, measured with noise, and 15 per cent of the points anywhere."""
    angle = 6.2832 * torch.rand(1000, generator=generator)
    radius = 0.3 + 0.09 * (5 * angle).cos()
    star = torch.stack([0.5 + radius * angle.cos(), 0.5 + radius * angle.sin()], 1)
    star = star + 0.008 * torch.randn(star.shape, generator=generator)
    return torch.cat([star, torch.rand(176, 2, generator=generator)])


def curve(parameters):
    """Points around a centre, at the radius c_0 + Σ_k c_k cos kθ + s_k sin kθ for equal steps of the angle θ."""
    centre, coefficients = parameters[:2], parameters[2:]
    angle = torch.arange(SAMPLES) * (6.2832 / SAMPLES)
    waves = angle[:, None] * torch.arange(FREQUENCIES + 1)
    radius = torch.cat([waves.cos(), waves.sin()[:, 1:]], 1) @ coefficients
    return centre + radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)


def lengths(points):
    """Each point's share of the curve's length: its weight."""
    following = (points.roll(-1, 0) - points).norm(dim=1)
    length = 0.5 * (following + following.roll(1))
    return length / length.sum()


def fit(loss, y):
    parameters = torch.zeros(2 + 1 + 2 * FREQUENCIES)
    parameters[:3] = torch.tensor([0.42, 0.55, 0.15])
    parameters.requires_grad_()
    optimiser, values = torch.optim.Adam([parameters], lr=0.01), []
    weights = torch.full((len(y),), 1 / len(y))
    for _ in range(STEPS):
        optimiser.zero_grad()
        points = curve(parameters)
        value = loss(lengths(points), points, weights, y)
        value.backward()
        optimiser.step()
        values.append(value.item())
    return curve(parameters).detach(), values


y = scan(torch.Generator().manual_seed(1))
figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2))
for axis, (name, loss) in zip(axes, LOSSES.items(), strict=False):
    began = time.perf_counter()
    points, values = fit(loss, y)
    print(f"{name}: {STEPS} steps in {time.perf_counter() - began:.1f} s, loss {values[-1]:.5f}", file=sys.stderr)
    axis.scatter(*y.T, s=4, c="#9a9a9a", linewidths=0)
    axis.plot(*torch.cat([points, points[:1]]).T, c="#b3123d", lw=2)
    axis.set(title=name, xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], aspect="equal")
    axes[2].semilogy(values, label=name)
axes[2].set(title="loss", xlabel="step")
axes[2].legend()
figure.tight_layout()
figure.savefig("fit_shape.png", dpi=90)
