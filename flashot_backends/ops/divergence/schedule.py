"""From blur, diameter and scaling to the temperatures of the descent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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


def extents(x: Tensor, y: Tensor, each: bool) -> list[float]:
    """Diagonals of the boxes around both clouds: one for the batch, or one for each element. Waits for the device."""
    x, y = (x, y) if each else (x.flatten(0, 1)[None], y.flatten(0, 1)[None])
    low, high = torch.minimum(x.amin(1), y.amin(1)), torch.maximum(x.amax(1), y.amax(1))
    return (high.double() - low.double()).norm(dim=-1).tolist()  # type: ignore[no-any-return]


class Step(NamedTuple):
    """One step of the descent: ε of every element (B,), its damping (B, 1), and who has begun (B, 1), None for all."""

    epsilon: Tensor
    damping: Tensor | float
    begun: Tensor | None


def descent(settings: Settings, x: Tensor, y: Tensor) -> list[Step]:
    """The steps for a batch, all elements arriving together. The first one also gives the starting potentials."""
    diameters = settings.diameters or extents(x, y, settings.each)
    lists = [temperatures(settings.p, diameter, settings.blur, settings.scaling) for diameter in diameters]
    batch, device = x.shape[0], x.device
    if len(lists) == 1:
        return [_step(settings, torch.full((batch,), e, dtype=torch.float64, device=device), None) for e in lists[0]]
    longest = max(map(len, lists))
    padded = torch.tensor([[each[0]] * (longest - len(each)) + each for each in lists], dtype=torch.float64)
    waits = torch.tensor([longest - len(each) for each in lists])[:, None]
    padded, waits = padded.to(device), waits.to(device)
    return [_step(settings, padded[:, k], waits <= k) for k in range(longest)]


def _step(settings: Settings, epsilon: Tensor, begun: Tensor | None) -> Step:
    if math.isinf(settings.reach):
        return Step(epsilon, 1.0, begun)
    return Step(epsilon, (1 / (1 + epsilon / settings.rho))[:, None], begun)
