"""Marginals that may be missed: penalties ρ KL(P1 | a), by side, and the translation that makes them converge.

Chizat et al., "Scaling algorithms for unbalanced optimal transport problems", 2018, for the damped updates; Séjourné,
Vialard and Peyré, "Faster unbalanced optimal transport: translation invariant Sinkhorn and 1-D Frank-Wolfe", 2022, for
the translation. With penalties ρ₁ and ρ₂ the dual is, up to a constant,
−ρ₁ ⟨a, e^(−f/ρ₁)⟩ − ρ₂ ⟨b, e^(−g/ρ₂)⟩ − ε Σ a_i b_j e^((f_i + g_j − C_ij)/ε); an infinite ρ₁ makes the first term
⟨a, f⟩.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import Rule


class Side(NamedTuple):
    """One side's penalty: 1/ρ (B, 1), zero where binding, and the terms of the cost that kernels do not see, (B, n)."""

    tightness: Tensor
    offset: Tensor | None

    def select(self, index: Tensor) -> Side:
        """Of some problems."""
        return Side(self.tightness[index], self.offset if self.offset is None else self.offset[index])

    def damping(self, epsilon: Tensor) -> Tensor:
        """ρ/(ρ + ε), (B, 1)."""
        return 1 / (1 + epsilon[:, None] * self.tightness)

    def rule(self, epsilon: Tensor, omega: Tensor | None = None) -> Rule:
        """How this side's potentials follow from their softmin."""
        damping = self.damping(epsilon)
        return Rule(omega, damping, None if self.offset is None else (damping - 1) * self.offset)

    def lost(self, potential: Tensor) -> Tensor:
        """−(f + offset)/ρ, (B, n): the logarithm of the marginal that f asks for, over the given weights."""
        whole = potential if self.offset is None else potential + self.offset
        return torch.where(self.tightness == 0, 0.0, -whole * self.tightness)

    def log_mass(self, log_weight: Tensor, potential: Tensor) -> Tensor:
        """log ⟨a, e^(−f/ρ)⟩, (B, 1) float64: ρ times a small difference of two of them is a potential."""
        return torch.logsumexp(self._exponent(log_weight, potential).double(), -1, keepdim=True)

    def shares(self, log_weight: Tensor, potential: Tensor) -> Tensor:
        """Each point's share of that mass, (B, n)."""
        return torch.softmax(self._exponent(log_weight, potential), -1)

    def _exponent(self, log_weight: Tensor, potential: Tensor) -> Tensor:
        massless = log_weight == -torch.inf
        return torch.where(massless, log_weight, log_weight + torch.where(massless, 0.0, self.lost(potential)))


class Penalty(NamedTuple):
    """The penalties of rows and columns."""

    rows: Side
    columns: Side

    def select(self, index: Tensor) -> Penalty:
        """Of some problems."""
        return Penalty(self.rows.select(index), self.columns.select(index))

    @property
    def both(self) -> Tensor:
        """ρ₁ρ₂/(ρ₁ + ρ₂), (B, 1); zero where both sides are balanced: translating changes nothing there."""
        total = self.rows.tightness + self.columns.tightness
        return torch.where(total > 0, 1 / torch.where(total > 0, total, 1), 0.0)

    def translation(self, log_a: Tensor, log_b: Tensor, f: Tensor, g: Tensor) -> Tensor:
        """The κ (B, 1) for which (f + κ, g − κ) has the largest dual."""
        return (self.both * (self.rows.log_mass(log_a, f) - self.columns.log_mass(log_b, g))).to(f.dtype)

    def contraction(self, epsilon: Tensor) -> Tensor:
        """No eigenvalue of an iteration is larger than this product of both dampings, (B,)."""
        return (self.rows.damping(epsilon) * self.columns.damping(epsilon))[:, 0]


def make_penalty(reach: Tensor | None, alpha: Tensor | None, beta: Tensor | None, dtype: torch.dtype) -> Penalty | None:
    """From the reaches (B, 2) of rows and columns, infinite where balanced."""
    if reach is None:
        return None
    rows, columns = (1 / reach).to(dtype).split(1, -1)
    return Penalty(Side(rows, alpha), Side(columns, beta))


def without_the_unreachable(operator: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, zero where every pair is forbidden: such mass is given up, and no potential says how much."""
    if operator.cost.matrix is None:
        return a, b
    everything = [torch.where(weight > 0, 0.0, -torch.inf) for weight in (a, b)]
    nowhere = operator.softmin(everything[1]) == torch.inf, operator.T.softmin(everything[0]) == torch.inf
    return torch.where(nowhere[0], 0.0, a), torch.where(nowhere[1], 0.0, b)
