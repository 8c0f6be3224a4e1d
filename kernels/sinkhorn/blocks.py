"""Streamed blocks of torch: a strip of rows at a time, on any device, in memory linear in the points.

The default where there is no card. A sweep takes one exponential per pair for the row update and the column update
that follows it: with e_ij = exp(t_j − C_ij/ε + r_i) and s_i = Σ_j e_ij, the columns of the updated plan sum to
Σ_i (a_i/s_i) e_ij while the strip is still in cache (``shared/design/NUMERICS.md``, "One exponential for both updates").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operator import Cost, Operator, Sweep, Weighted, scaling

# Elements of a strip: a CPU core's second-level cache, or enough to fill a card.
STRIP_CPU = 1 << 17
STRIP_DEVICE = 1 << 25
# Sums outside of these ranges have lost digits, or all of them, to under- or overflow.
SAFE = {torch.float64: (1e-200, 1e200), torch.float32: (1e-20, 1e20)}


def applies(request: Any) -> str | None:
    """Serve every torch problem."""
    return None


def operator(cost: Cost, epsilon: Tensor, precision: str = "high") -> Blocks:
    """Prepare a batch of costs. Nothing is narrowed, whatever the precision."""
    return Matrix(cost, epsilon) if cost.matrix is not None else Points(cost, epsilon)


class Strip(NamedTuple):
    """Some rows of some problems."""

    batch: slice
    rows: slice


class Blocks(Operator):
    """The reductions, over strips of C/ε that a subclass computes."""

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε on a strip, (b, r, m), in a fresh or reused buffer that the caller may overwrite."""
        raise NotImplementedError

    def scores(self, strip: Strip, row_offset: Tensor | None, t: Tensor) -> Tensor:
        """r_i + t_j − C_ij/ε on a strip."""
        scores = self.scaled(strip).neg_().add_(t[strip.batch, None, :])
        return scores if row_offset is None else scores.add_(row_offset[strip][:, :, None])

    def pull_back(self, strip: Strip, weights: Tensor, totals: tuple[Tensor, ...]) -> None:
        """Add the strip's share of Σ W ∂C to the gradients by the cost's tensors."""
        raise NotImplementedError

    def gradients(self) -> tuple[Tensor, ...]:
        """Zeros for the gradients by the cost's tensors."""
        return tuple(
            torch.zeros(self.batch, *part.shape[1:], dtype=self.dtype, device=self.device)
            for part in (self.cost.x, self.cost.y, self.cost.matrix)
            if part is not None
        )

    def strips(self) -> Iterator[Strip]:
        """Cut the batch into strips: several whole problems, or some rows of one."""
        budget = STRIP_CPU if self.device.type == "cpu" else STRIP_DEVICE
        together = max(1, budget // max(1, self.rows * self.columns))
        height = self.rows if together > 1 else max(8, budget // max(1, self.columns))
        for b in range(0, self.batch, together):
            for i in range(0, self.rows, max(1, height)):
                yield Strip(slice(b, min(b + together, self.batch)), slice(i, min(i + height, self.rows)))

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the potentials' dtype."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def softmin(self, h: Tensor) -> Tensor:
        """−ε log Σ_j exp(h_j − C_ij/ε), each strip around its own maximum."""
        out = self.zeros(self.batch, self.rows)
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = log_sum_exp(self.scores(strip, None, h))
        return out.mul_(-self.epsilon[:, None])

    def sweep(self, log_a: Tensor, log_b: Tensor, g: Tensor, f: Tensor) -> Sweep:
        """Update rows and columns with one exponential per pair."""
        t = scaling(log_b, g, self.epsilon)
        hint = f / self.epsilon[:, None]
        weight = log_a.exp()
        scaled_f = self.zeros(self.batch, self.rows)
        marginal = torch.zeros(self.batch, self.columns, dtype=torch.float64, device=self.device)
        with exact_products(self.device):
            for strip in self.strips():
                e, total, offset = self._exponentials(strip, hint, t)
                scaled_f[strip] = offset - total.log()
                share = (weight[strip] / total)[:, None, :]
                marginal[strip.batch] += torch.matmul(share, e)[:, 0]
        f = scaled_f * self.epsilon[:, None]
        massless = log_b == -torch.inf
        ratio = torch.where(massless, 1.0, marginal * torch.exp(-log_b.double())).to(self.dtype)
        return Sweep(f, self._columns(log_a, log_b, f, g, ratio), ratio)

    def _exponentials(self, strip: Strip, hint: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """e_ij, its row sums and the row offset used: the previous potential, or the maximum where that is unsafe."""
        e = self.scores(strip, hint, t).exp_()
        total = e.sum(-1)
        if safe(total):
            return e, total, hint[strip]
        scores = self.scores(strip, None, t)
        offset = finite(scores.amax(-1)).neg_()
        e = scores.add_(offset[:, :, None]).exp_()
        return e, e.sum(-1), offset

    def _columns(self, log_a: Tensor, log_b: Tensor, f: Tensor, g: Tensor, ratio: Tensor) -> Tensor:
        """The column potentials whose plan has the wanted column sums, given present over wanted sums."""
        if safe(ratio):
            return g - self.epsilon[:, None] * ratio.log()
        return torch.where(log_b == -torch.inf, g, self.T.softmin(scaling(log_a, f, self.epsilon)))

    def apply(self, s: Tensor, t: Tensor, values: Tensor) -> Tensor:
        """P V, strip by strip."""
        out = self.zeros(self.batch, self.rows, values.shape[-1])
        with exact_products(self.device):
            for strip in self.strips():
                plan = self.scores(strip, s, t).exp_()
                out[strip] = plan @ values[strip.batch].to(self.dtype)
        return out

    def cost_apply(self, s: Tensor, t: Tensor, power: int = 1) -> Tensor:
        """Row sums of P∘C or P∘C², strip by strip."""
        out = self.zeros(self.batch, self.rows)
        with exact_products(self.device):
            for strip in self.strips():
                scaled, moment = self._plan(strip, s, t)
                for _ in range(power):
                    moment = times_cost(moment, scaled)
                out[strip] = moment.sum(-1)
        return out.mul_(self.epsilon[:, None] ** power)

    def weighted(self, s, t, alpha=None, gamma=0.0, u=None, v=None) -> Weighted:  # type: ignore[no-untyped-def]
        """Reductions of W_ij = P_ij (α_i + γ C_ij + u_i·v_j), strip by strip."""
        totals, rows, columns = self.gradients(), self.zeros(self.batch, self.rows), self.zeros(self.batch, self.columns)
        with exact_products(self.device):
            for strip in self.strips():
                scaled, weights = self._plan(strip, s, t)
                factor: Any = 0.0
                if alpha is not None:
                    factor = alpha[strip][:, :, None]
                if u is not None:
                    factor = factor + u[strip].to(self.dtype) @ v[strip.batch].to(self.dtype).transpose(-1, -2)
                moment = times_cost(weights, scaled) if gamma else None
                weights = weights * factor
                if moment is not None:
                    weights = weights + moment * (gamma * self.epsilon[strip.batch, None, None])
                self.pull_back(strip, weights, totals)
                rows[strip] = weights.sum(-1)
                columns[strip.batch] += weights.sum(-2)
        return Weighted(totals, rows, columns)

    def _plan(self, strip: Strip, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        scaled = self.scaled(strip)
        return scaled, torch.exp(s[strip][:, :, None] + t[strip.batch, None, :] - scaled)


class Matrix(Blocks):
    """Costs given as a matrix."""

    @property
    def T(self) -> Matrix:  # noqa: N802
        """The operator that works along columns."""
        return Matrix(self.cost.T, self.exact_epsilon)

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε, read once."""
        return self._rows(strip) / self.epsilon[strip.batch, None, None]

    def scores(self, strip: Strip, row_offset: Tensor | None, t: Tensor) -> Tensor:
        """r_i + t_j − C_ij/ε with one read of M."""
        scores = torch.addcmul(t[strip.batch, None, :], self._rows(strip), self._slope[strip.batch], value=-1)
        return scores if row_offset is None else scores.add_(row_offset[strip][:, :, None])

    @property
    def _slope(self) -> Tensor:
        return self.epsilon.reciprocal()[:, None, None]

    def _rows(self, strip: Strip) -> Tensor:
        assert self.cost.matrix is not None
        return self.cost.matrix[strip].to(self.dtype)

    def pull_back(self, strip: Strip, weights: Tensor, totals: tuple[Tensor, ...]) -> None:
        """∂C is the identity."""
        totals[0][strip] = weights


class Points(Blocks):
    """Squared distances of points, expanded around the midpoint of the two means (float64)."""

    def __init__(self, cost: Cost, epsilon: Tensor, centred: tuple[Tensor, Tensor] | None = None):
        super().__init__(cost, epsilon)
        self.x, self.y = centred or centre(cost, self.dtype)
        scale = (2 / epsilon).sqrt().to(self.dtype)[:, None, None]
        self.scaled_x, self.scaled_y = self.x * scale, self.y * scale
        self.norm_x, self.norm_y = (half_square(self.scaled_x), half_square(self.scaled_y))

    @property
    def T(self) -> Points:  # noqa: N802
        """The operator that works along columns."""
        return Points(self.cost.T, self.exact_epsilon, (self.y, self.x))

    def select(self, index: Tensor) -> Points:
        """The operator of some problems of the batch."""
        return Points(self.cost.select(index), self.exact_epsilon[index], (self.x[index], self.y[index]))

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε = |x̂|²/2 + |ŷ|²/2 − x̂·ŷ with x̂ = x √(2/ε), never negative."""
        return self.scores(strip, -self.norm_x, -self.norm_y, own_norms=False).neg_().clamp_(min=0)

    def scores(
        self, strip: Strip, row_offset: Tensor | None, t: Tensor, own_norms: bool = True
    ) -> Tensor:
        """r_i + t_j − C_ij/ε, the row terms carried through the product as one more coordinate."""
        if own_norms:
            t = t - self.norm_y
            row_offset = -self.norm_x if row_offset is None else row_offset - self.norm_x
        left = torch.cat([self.scaled_x[strip], finite(row_offset[strip])[:, :, None]], -1)  # type: ignore[index]
        right = torch.cat([self.scaled_y[strip.batch], torch.ones_like(t[strip.batch, :, None])], -1)
        scores = torch.bmm(left, right.transpose(-1, -2)).add_(t[strip.batch, None, :])
        absent = row_offset[strip] == -torch.inf  # type: ignore[index]
        return scores.masked_fill_(absent[:, :, None], -torch.inf) if bool(absent.any()) else scores

    def pull_back(self, strip: Strip, weights: Tensor, totals: tuple[Tensor, ...]) -> None:
        """∂C/∂x_i = 2 (x_i − y_j), and the opposite for y."""
        x, y = self.x[strip], self.y[strip.batch]
        totals[0][strip] = 2 * (x * weights.sum(-1)[:, :, None] - weights @ y)
        totals[1][strip.batch] += 2 * (y * weights.sum(-2)[:, :, None] - weights.transpose(-1, -2) @ x)


def centre(cost: Cost, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both clouds relative to the midpoint of their means, computed in float64."""
    assert cost.x is not None and cost.y is not None
    x, y = cost.x.double(), cost.y.double()
    middle = 0.5 * (mean(x) + mean(y))
    return (x - middle).to(dtype), (y - middle).to(dtype)


def mean(points: Tensor) -> Tensor:
    """The mean over the points, zero for none."""
    return points.sum(1, keepdim=True) / max(1, points.shape[1])


def half_square(points: Tensor) -> Tensor:
    """|x|²/2, summed in float64."""
    return (0.5 * points.double().square().sum(-1)).to(points.dtype)


def log_sum_exp(scores: Tensor) -> Tensor:
    """log Σ_j exp(scores), overwriting them; −inf for a row of −inf."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    top = finite(scores.amax(-1, keepdim=True))
    return scores.sub_(top).exp_().sum(-1).log_().add_(top[..., 0])


def finite(values: Tensor) -> Tensor:
    """Zero in place of an infinite value."""
    return torch.where(values.isinf(), 0.0, values)


def safe(sums: Tensor) -> bool:
    """No sum is so small or large that digits were lost."""
    low, high = SAFE[sums.dtype]
    return bool(((sums > low) & (sums < high)).all())


def times_cost(plan: Tensor, scaled: Tensor) -> Tensor:
    """P∘C/ε, zero for forbidden pairs."""
    return torch.where(plan == 0, plan, plan * scaled)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Keep float32 products float32 on a card, also where the user allowed TF32 for their own."""
    matmul = torch.backends.cuda.matmul
    if device.type != "cuda" or not matmul.allow_tf32:
        yield
        return
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = True
