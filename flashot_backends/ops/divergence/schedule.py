"""From blur, diameter and scaling to the temperatures of the descent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Settings(NamedTuple):
    """What the loop is asked for, in the unit of the cost |x − y|^p / p.

    ``reach`` is infinite for balanced transport. ``diameters`` holds nothing (measure the whole batch), one number for
    all, or one for each element; ``each`` measures every element by itself.
    """

    p: int
    blur: float
    reach: float
    scaling: float
    diameters: Sequence[float]
    each: bool
    debias: bool
    verbose: bool

    @property
    def unit(self) -> int:
        """The kernels' cost in units of ours: |x − y|² is twice |x − y|²/2."""
        return self.p

    @property
    def metric(self) -> str:
        """The kernels' name of the cost. Distances are clamped at 1e-4, as GeomLoss's are."""
        return "sqeuclidean" if self.p == 2 else "clamped"

    @property
    def epsilon(self) -> float:
        """The last temperature."""
        return float(self.blur**self.p)

    @property
    def rho(self) -> float:
        """Strength of the marginal constraints."""
        return float(self.reach**self.p)


def temperatures(p: int, diameter: float, blur: float, scaling: float) -> list[float]:
    """The descending temperatures: diameter^p, a geometric sequence from there down to above blur^p, then blur^p.

    The first one is visited twice, as in GeomLoss. Points that all coincide have diameter zero and need no descent.
    """
    if diameter <= 0:
        return [blur**p]
    logarithms = np.arange(p * np.log(diameter), p * np.log(blur), p * np.log(scaling))
    return [float(diameter) ** p, *np.exp(logarithms).tolist(), blur**p]


Corner = list[float]


def extents(x: Tensor, y: Tensor, each: bool) -> list[float]:
    """Diagonals of the boxes around both clouds: one for the batch, or one for each element. Waits for the device."""
    x, y = (x, y) if each else (x.flatten(0, 1)[None], y.flatten(0, 1)[None])
    (low_x, high_x), (low_y, high_y) = torch.aminmax(x, dim=1), torch.aminmax(y, dim=1)
    return [_diagonal(*corners) for corners in zip(*torch.stack([low_x, high_x, low_y, high_y]).tolist(), strict=True)]


def _diagonal(low_x: Corner, high_x: Corner, low_y: Corner, high_y: Corner) -> float:
    """On the host, where a few numbers are quicker than on a card."""
    sides = zip(map(max, high_x, high_y), map(min, low_x, low_y), strict=True)
    return math.sqrt(sum((high - low) ** 2 for high, low in sides))


class Step(NamedTuple):
    """One step of the descent: ε of every element (B,), its damping (B, 1), and who has begun (B, 1), None for all."""

    epsilon: Tensor
    damping: Tensor | float
    begun: Tensor | None


def together(found: list[list[float]]) -> tuple[list[list[float]], list[int]]:
    """All elements arrive together: shorter lists wait at their first temperature, so many steps."""
    longest = max(map(len, found))
    return [[each[0]] * (longest - len(each)) + each for each in found], [longest - len(each) for each in found]


def descent(settings: Settings, x: Tensor, y: Tensor) -> list[Step]:
    """The steps for a batch. The first one also gives the starting potentials."""
    diameters, batch, device = settings.diameters or extents(x, y, settings.each), x.shape[0], x.device
    found = [temperatures(settings.p, diameter, settings.blur, settings.scaling) for diameter in diameters]
    if len(found) == 1:
        return [_step(settings, torch.full((batch,), e, dtype=torch.float64, device=device), None) for e in found[0]]
    tables, waiting = together(found)
    padded, waits = torch.tensor(tables, dtype=torch.float64).to(device), torch.tensor(waiting)[:, None].to(device)
    return [_step(settings, padded[:, k], waits <= k) for k in range(padded.shape[1])]


def _step(settings: Settings, epsilon: Tensor, begun: Tensor | None) -> Step:
    if math.isinf(settings.reach):
        return Step(epsilon, 1.0, begun)
    return Step(epsilon, damping(settings.rho, epsilon)[:, None], begun)


def damping(rho: float, epsilon: Any) -> Any:
    """How much a softmin counts under a strength ρ of the constraints."""
    return 1 / (1 + epsilon / rho)
