"""The plain kernel: whole matrices, direct differences, one line a formula. The oracle of the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .blocks import exact_products
from .operator import FLOORS, Cost, Operator, Weighted


def applies(request: Any) -> str | None:
    """Any torch problem, as long as its matrix fits into memory."""
    return None


def operator(cost: Cost, epsilon: Tensor, precision: str = "high") -> Reference:
    """Prepare a batch of costs."""
    return Reference(cost, epsilon)


class Reference(Operator):
    """Costs as a matrix."""

    @property
    def T(self) -> Reference:  # noqa: N802
        """The operator that works along columns."""
        return Reference(self.cost.T, self.exact_epsilon)

    def matrix(self) -> Tensor:
        """C, (B, n, m), in the potentials' dtype."""
        if self.cost.matrix is not None:
            return self.cost.matrix.to(self.dtype)
        x, y = self.cost.x.to(self.dtype), self.cost.y.to(self.dtype)  # type: ignore[union-attr]
        if self.cost.metric == "l1":
            return (x[:, :, None] - y[:, None]).abs().sum(-1)
        squares = ((x[:, :, None] - y[:, None]) ** 2).sum(-1)
        return squares if self.cost.metric == "sqeuclidean" else squares.sqrt().clamp(min=FLOORS[self.cost.metric])

    def scaled(self) -> Tensor:
        """C/ε."""
        return self.matrix() / self.epsilon[:, None, None]

    def plan(self, s: Tensor, t: Tensor) -> Tensor:
        """P, (B, n, m)."""
        return torch.exp(s[:, :, None] + t[:, None, :] - self.scaled())

    def softmin(self, h: Tensor) -> Tensor:
        """−ε log Σ_j exp(h_j − C_ij/ε)."""
        return -self.epsilon[:, None] * torch.logsumexp(h[:, None, :] - self.scaled(), -1)

    def apply(self, s: Tensor, t: Tensor, values: Tensor) -> Tensor:
        """P V."""
        return self._product(self.plan(s, t), values)

    def cost_product(self, values: Tensor) -> Tensor:
        """C V."""
        return self._product(self.matrix(), values)

    def moment(self, s: Tensor, t: Tensor, values: Tensor, power: int) -> Tensor:
        """(P∘C^power) V."""
        moment = self.plan(s, t)
        for _ in range(power):
            moment = self._times_cost(moment)
        return self._product(moment, values)

    def largest(self, t: Tensor, count: int) -> Tensor:
        """The columns with the largest t_j − C_ij/ε in each row."""
        return (t[:, None, :] - self.scaled()).topk(count, -1).indices

    def cost_apply(self, s: Tensor, t: Tensor, power: int = 1) -> Tensor:
        """Row sums of P∘C or P∘C²."""
        moment = self.plan(s, t)
        for _ in range(power):
            moment = self._times_cost(moment)
        return moment.sum(-1)

    def weighted(self, s, t, alpha=None, gamma=0.0, u=None, v=None) -> Weighted:  # type: ignore[no-untyped-def]
        """Reductions of W_ij = P_ij (α_i + γ C_ij + u_i·v_j)."""
        plan = self.plan(s, t)
        weights = torch.zeros_like(plan)
        if alpha is not None:
            weights = weights + alpha[:, :, None] * plan
        if gamma:
            weights = weights + gamma * self._times_cost(plan)
        if u is not None:
            weights = weights + self._product(u.to(self.dtype), v.transpose(-1, -2)) * plan
        return Weighted(self._pull_back(weights), weights.sum(-1), weights.sum(-2))

    def _product(self, matrix: Tensor, values: Tensor) -> Tensor:
        with exact_products(self.device):
            return matrix @ values.to(self.dtype)

    def _times_cost(self, plan: Tensor) -> Tensor:
        return torch.where(plan == 0, plan, plan * self.matrix())

    def _pull_back(self, weights: Tensor) -> tuple[Tensor, ...]:
        if self.cost.matrix is not None:
            return (weights,)
        x, y = self.cost.x.to(self.dtype), self.cost.y.to(self.dtype)  # type: ignore[union-attr]
        difference = x[:, :, None] - y[:, None]
        if self.cost.metric == "sqeuclidean":
            pulled = 2 * weights[..., None] * difference
        elif self.cost.metric == "l1":
            pulled = weights[..., None] * difference.sign()
        else:
            length = (difference**2).sum(-1).sqrt()
            apart = length > FLOORS[self.cost.metric]
            pulled = torch.where(apart, weights / torch.where(apart, length, 1), 0.0)[..., None] * difference
        return pulled.sum(2), -pulled.sum(1)
