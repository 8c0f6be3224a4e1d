"""Annealed symmetric updates of small problems with torch: all pairs at once, where a call costs more than the pairs.

All softmins of a step are one, over a stack of matrices padded to one size: rows by columns, columns by rows, and with
debiasing each cloud by itself. Costs of points are |x − y|²/2 for p = 2, max(|x − y|, 1e-4) for p = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .operator import FLOORS

MOST = 1 << 16  # pairs of all matrices together
MOST_NUMBERS = 1 << 22  # and their coordinates
PARTNERS = (1, 0, 2, 3)  # whose potentials a softmin is taken of


def fits(batch: int, n: int, m: int, debias: bool, d: int = 1) -> bool:
    """Whether problems of n and m points with d coordinates are small enough."""
    pairs = batch * (2 + 2 * debias) * max(n, m) ** 2
    return pairs <= MOST and pairs * d <= MOST_NUMBERS


class Whole:
    """Costs (B, rows, columns) of each softmin with the logarithms of the columns' weights (B, columns).

    Potentials are (B, softmins, longest); what is beyond a side's own length holds anything that is finite.
    """

    def __init__(self, costs: Sequence[Tensor], logs: Sequence[Tensor]):
        self.partners = list(PARTNERS[: len(costs)])
        longest = max(costs[0].shape[1:])
        self.costs = logs[0].new_zeros(len(costs[0]), len(costs), longest, longest)
        for k, cost in enumerate(costs):
            self.costs[:, k, : cost.shape[1], : cost.shape[2]] = cost
        self.logs = self.stack(logs, -torch.inf)
        self.massless = self.logs == -torch.inf

    def stack(self, parts: Sequence[Tensor], beyond: float = 0.0) -> Tensor:
        """Vectors of each softmin, of one length."""
        out = parts[0].new_full(self.costs.shape[:3], beyond)
        for k, part in enumerate(parts):
            out[:, k, : part.shape[1]] = part
        return out

    def softmins(self, potentials: Tensor | None, epsilon: Tensor) -> Tensor:
        """−ε log Σ_j w_j exp((g_j − C_ij)/ε) for all rows, from potentials or none, with ε (B,)."""
        return -epsilon[:, None, None] * torch.logsumexp(self.exponents(potentials, epsilon), -1)

    def exponents(self, potentials: Tensor | None, epsilon: Tensor) -> Tensor:
        """log w_j + (g_j − C_ij)/ε."""
        bias, scale = self.logs, epsilon.reciprocal()[:, None, None]
        if potentials is not None:
            bias = torch.where(self.massless, bias, torch.addcmul(bias, potentials[:, self.partners], scale))
        return torch.addcmul(bias[:, :, None], self.costs, scale[:, :, None], value=-1)

    def slopes(self, potentials: Tensor, epsilon: Tensor, k: int) -> Tensor:
        """The derivatives of the k-th softmins by the points of the rows (B, rows, d), the columns held."""
        raise NotImplementedError


class Points(Whole):
    """Both clouds (B, n, d) and (B, m, d) with the logarithms of their weights."""

    def __init__(self, x: Tensor, y: Tensor, log_a: Tensor, log_b: Tensor, p: int, debias: bool):
        self.p, centre, count = p, x[:, :1], 2 + 2 * debias
        x, y = (points.to(log_a.dtype) - centre for points in (x, y))
        self.pairs = ((x, y), (y, x), (x, x), (y, y))[:count]
        super().__init__([self._costs(*pair) for pair in self.pairs], (log_b, log_a, log_a, log_b)[:count])

    def _costs(self, rows: Tensor, columns: Tensor) -> Tensor:
        squares = (rows[:, :, None] - columns[:, None]).square().sum(-1)
        return 0.5 * squares if self.p == 2 else squares.sqrt().clamp_(min=FLOORS["clamped"])

    def slopes(self, potentials: Tensor, epsilon: Tensor, k: int) -> Tensor:
        """The derivatives of the k-th softmins by the points of the rows (B, rows, d), the columns held."""
        rows, columns = self.pairs[k]
        part = slice(None), k, slice(rows.shape[1]), slice(columns.shape[1])
        shares = torch.softmax(self.exponents(potentials, epsilon)[part], -1)
        if self.p == 2:
            return rows - shares @ columns
        distances = self.costs[part]
        weights = torch.where(distances > FLOORS["clamped"], shares / distances, 0.0)[:, :, :, None]
        return (weights * (rows[:, :, None] - columns[:, None])).sum(2)
