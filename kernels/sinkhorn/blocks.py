"""Streamed blocks of torch: a strip of rows at a time, on any device, in memory linear in the points.

The default where there is no card. A sweep takes one exponential per pair for the row update and the column update
that follows it: with e_ij = exp(t_j − C_ij/ε + r_i) and s_i = Σ_j e_ij, the columns of the updated plan sum to
Σ_i (a_i/s_i) e_ij while the strip is still in cache.

Exponents are in base 2: where terms underflow, torch's exp2 takes a sixth of the time of its exp on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operator import FLOORS, Cost, Operator, Rule, Softmin, Sweep, Weighted, scaling

# Elements of a strip: small enough for a CPU's caches and large enough to share out, or enough to fill a card.
STRIP_CPU = 1 << 19
STRIP_DEVICE = 1 << 25
# Sums outside of these ranges have lost digits, or all of them, to under- or overflow.
SAFE = {torch.float64: (1e-200, 1e200), torch.float32: (1e-20, 1e20)}
# Below this exponent of two float32 is denormal: no part of a safe sum, and many times slower in products.
DENORMAL = -126.0
# Up to this many coordinates, distances come from direct differences.
DIRECT_DIMENSIONS = 8
LOG2_E = math.log2(math.e)


def applies(request: Any) -> str | None:
    """Serve every torch problem."""
    return None


def operator(cost: Cost, epsilon: Tensor, precision: str = "high") -> Blocks:
    """Prepare a batch of costs. Nothing is narrowed, whatever the precision."""
    if cost.matrix is not None:
        return Matrix(cost, epsilon)
    kind = {"sqeuclidean": Points, "l1": Manhattan}.get(cost.metric, Distances)
    return kind(cost, epsilon)


Terms = tuple[Any, ...]


class Strip(NamedTuple):
    """Some rows of some problems."""

    batch: slice
    rows: slice


class Blocks(Operator):
    """The reductions, over strips of C/ε that a subclass computes. One thread at a time."""

    _memory: Tensor | None = None

    @functools.cached_property
    def bits(self) -> Tensor:
        """log₂e/ε as the exponents have it, (B, 1) in float64.

        Were potentials multiplied by another number, however close, plans would be off by one factor for all pairs,
        and products of many plans by its power.
        """
        return (LOG2_E / self.epsilon).double()[:, None]

    def in_bits(self, scaled: Tensor) -> Tensor:
        """Numbers in units of ε, (B, ·), in base 2."""
        return (scaled * self.log2_e).to(self.dtype)

    @functools.cached_property
    def log2_e(self) -> Tensor:
        """log₂e for numbers in units of ε, (B, 1) in float64."""
        epsilon = self.epsilon.double()[:, None]
        return torch.where(epsilon.isinf(), LOG2_E, self.bits * epsilon)

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε on a strip, (b, r, m): fresh memory."""
        raise NotImplementedError

    def costs(self, strip: Strip) -> Tensor:
        """C on a strip, (b, r, m)."""
        return self.scaled(strip).mul_(self.epsilon[strip.batch, None, None])

    def terms(self, r: Tensor | None, t: Tensor) -> Terms:
        """What ``exponents`` needs of r (B, n) and t (B, m), computed once for all strips.

        The first tells of the rows, the others of the columns, which are their last axis.
        """
        raise NotImplementedError

    def exponents(self, strip: Strip, terms: Terms) -> Tensor:
        """(r_i + t_j − C_ij/ε) log₂ e on a strip. The caller may overwrite it, and so does the next strip."""
        raise NotImplementedError

    def buffer(self, *shape: int) -> Tensor | None:
        """Memory that all strips share: on a CPU, fresh memory costs a page fault every few kilobytes."""
        if self.device.type != "cpu":
            return None
        count = math.prod(shape)
        if self._memory is None or self._memory.numel() < count:
            self._memory = torch.empty(count, dtype=self.dtype)
        return self._memory[:count].view(shape)

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
        out, terms = self.zeros(self.batch, self.rows), self.terms(None, h)
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = log2_sum_exp2(self.exponents(strip, terms))
        return (out / -self.bits).to(self.dtype)

    def both(self, log_a: Tensor, log_b: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and columns from one exponential per pair, e_ij = exp((f_i + g_j − C_ij)/ε)."""
        scaled_f, scaled_g = f / self.epsilon[:, None], g / self.epsilon[:, None]
        terms, a, b = self.terms(scaled_f, scaled_g), log_a.exp(), log_b.exp()
        rows = self.zeros(self.batch, self.rows)
        columns = torch.zeros(self.batch, self.columns, dtype=torch.float64, device=self.device)
        with exact_products(self.device):
            for strip in self.strips():
                e = exp2(self.exponents(strip, terms))
                rows[strip] = torch.matmul(e, b[strip.batch, :, None])[:, :, 0]
                columns[strip.batch] += torch.matmul(a[strip][:, None, :], e)[:, 0]
        columns = columns.to(self.dtype)
        if not (safe(rows) and safe(columns)):
            return super().both(log_a, log_b, f, g)
        return f - self.epsilon[:, None] * rows.log(), g - self.epsilon[:, None] * columns.log()

    def with_itself(self, log_a: Tensor, f: Tensor) -> Tensor:
        """One exponential for (i, j) and (j, i): the costs are symmetric."""
        scaled_f = f / self.epsilon[:, None]
        first, *others = self.terms(scaled_f, scaled_f)
        a = log_a.exp()
        total = torch.zeros(self.batch, self.rows, dtype=torch.float64, device=self.device)
        with exact_products(self.device):
            for strip in self.strips():
                start, height = strip.rows.start, strip.rows.stop - strip.rows.start
                e = exp2(self.exponents(strip, (first, *(part[..., start:] for part in others))))
                total[strip] += torch.matmul(e, a[strip.batch, start:, None])[:, :, 0]
                below = torch.matmul(a[strip][:, None, :], e[:, :, height:])[:, 0]
                total[strip.batch, start + height :] += below
        total = total.to(self.dtype)
        return f - self.epsilon[:, None] * total.log() if safe(total) else super().with_itself(log_a, f)

    def cost_product(self, values: Tensor) -> Tensor:
        """C V, strip by strip."""
        out = self.zeros(self.batch, self.rows, values.shape[-1])
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = self.costs(strip) @ values[strip.batch].to(self.dtype)
        return out

    def sweep(self, log_a: Tensor, log_b: Tensor, g: Tensor, f: Tensor, rule: Rule | None = None) -> Sweep:
        """Update rows and columns with one exponential per pair."""
        t = scaling(log_b, g, self.epsilon)
        hint = finite(f / self.epsilon[:, None])
        terms, safe_terms = self.terms(hint, t), self.terms(None, t)
        weight = log_a.exp()
        softmin = self.zeros(self.batch, self.rows)
        after = softmin if rule is None else torch.empty_like(softmin)
        marginal = torch.zeros(self.batch, self.columns, dtype=torch.float64, device=self.device)
        with exact_products(self.device):
            for strip in self.strips():
                e, epsilon = exp2(self.exponents(strip, terms)), self.epsilon[strip.batch]
                total, offset = e.sum(-1), hint[strip]
                if not safe(total):
                    e, total, offset = self._around_maximum(strip, safe_terms)
                softmin[strip] = (offset - total.log()) * epsilon[:, None]
                mass = weight[strip] / total
                if rule is not None:
                    after[strip] = rule.of(*strip).follow(f[strip], softmin[strip], epsilon)
                    mass = weight[strip] * torch.exp(after[strip] / epsilon[:, None] - offset)
                share = torch.where(weight[strip] > 0, mass, 0.0)
                marginal[strip.batch] += torch.matmul(share[:, None, :], e)[:, 0]
        massless = log_b == -torch.inf
        ratio = torch.where(massless, 1.0, marginal * torch.exp(-log_b.double())).to(self.dtype)
        return Sweep(after, self._columns(log_a, log_b, after, g, ratio), ratio, softmin)

    def _around_maximum(self, strip: Strip, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        """e_ij, its row sums and the row offset in them: minus the maximum of the row."""
        exponents = self.exponents(strip, terms)
        top = finite(exponents.amax(-1))
        e = exp2(exponents.sub_(top[:, :, None]))
        return e, e.sum(-1), (top / -self.log2_e[strip.batch]).to(self.dtype)

    def _columns(self, log_a: Tensor, log_b: Tensor, f: Tensor, g: Tensor, ratio: Tensor) -> Tensor:
        """The column potentials whose plan has the wanted column sums, given present over wanted sums."""
        if safe(ratio):
            return g - self.epsilon[:, None] * ratio.log()
        return torch.where(log_b == -torch.inf, g, self.T.softmin(scaling(log_a, f, self.epsilon)))

    def apply(self, s: Tensor, t: Tensor, values: Tensor) -> Tensor:
        """P V, strip by strip."""
        out, terms = self.zeros(self.batch, self.rows, values.shape[-1]), self.terms(s, t)
        with exact_products(self.device):
            for strip in self.strips():
                plan = exp2(self.exponents(strip, terms))
                out[strip] = plan @ values[strip.batch].to(self.dtype)
        return out

    def moment(self, s: Tensor, t: Tensor, values: Tensor, power: int) -> Tensor:
        """(P∘C^power) V, strip by strip."""
        out, terms = self.zeros(self.batch, self.rows, values.shape[-1]), self.terms(s, t)
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = self._moment(strip, terms, power) @ values[strip.batch].to(self.dtype)
        return out.mul_((self.epsilon**power)[:, None, None])

    def largest(self, t: Tensor, count: int) -> Tensor:
        """The columns with the largest t_j − C_ij/ε in each row, strip by strip."""
        out = torch.empty(self.batch, self.rows, count, dtype=torch.int64, device=self.device)
        terms = self.terms(None, t)
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = largest(self.exponents(strip, terms), count)
        return out

    def cost_apply(self, s: Tensor, t: Tensor, power: int = 1) -> Tensor:
        """Row sums of P∘C or P∘C², strip by strip."""
        out, terms = self.zeros(self.batch, self.rows), self.terms(s, t)
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = self._moment(strip, terms, power).sum(-1)
        return out.mul_(self.epsilon[:, None] ** power)

    def weighted(self, s, t, alpha=None, gamma=0.0, u=None, v=None) -> Weighted:  # type: ignore[no-untyped-def]
        """Reductions of W_ij = P_ij (α_i + γ C_ij + u_i·v_j), strip by strip."""
        totals, terms = self.gradients(), self.terms(s, t)
        rows, columns = self.zeros(self.batch, self.rows), self.zeros(self.batch, self.columns)
        with exact_products(self.device):
            for strip in self.strips():
                weights, moment = self._moment(strip, terms, 0), None
                if gamma:
                    weights = weights.clone()
                    moment = times_cost(weights, self.scaled(strip))
                factor: Any = 0.0
                if alpha is not None:
                    factor = alpha[strip][:, :, None]
                if u is not None:
                    factor = factor + u[strip].to(self.dtype) @ v[strip.batch].to(self.dtype).transpose(-1, -2)
                weights = weights * factor
                if moment is not None:
                    weights = weights + moment * (gamma * self.epsilon[strip.batch, None, None])
                self.pull_back(strip, weights, totals)
                rows[strip] = weights.sum(-1)
                columns[strip.batch] += weights.sum(-2)
        return Weighted(totals, rows, columns)

    def _moment(self, strip: Strip, terms: Terms, power: int) -> Tensor:
        """P∘(C/ε)^power on a strip; the next strip overwrites it."""
        moment = exp2(self.exponents(strip, terms))
        if power:
            moment, scaled = moment.clone(), self.scaled(strip)
        for _ in range(power):
            moment = times_cost(moment, scaled)
        return moment


class Matrix(Blocks):
    """Costs given as a matrix."""

    @property
    def T(self) -> Matrix:  # noqa: N802
        """The operator that works along columns."""
        return Matrix(self.cost.T, self.exact_epsilon)

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε, read once."""
        return self._rows(strip) / self.epsilon[strip.batch, None, None]

    def terms(self, r: Tensor | None, t: Tensor) -> Terms:
        """Both in base 2, along their axis."""
        return (None if r is None else self.in_bits(r)[:, :, None]), self.in_bits(t)[:, None, :]

    def exponents(self, strip: Strip, terms: Terms) -> Tensor:
        """(r_i + t_j − C_ij/ε) log₂ e with one read of M."""
        r, t = terms
        slope = self.bits[strip.batch, :, None].to(self.dtype)
        rows = self._rows(strip)
        out = self.buffer(*rows.shape) if rows.is_contiguous() else None
        out = torch.addcmul(t[strip.batch], rows, slope, value=-1, out=out)
        return out if r is None else out.add_(r[strip])

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
        self.centred = centred or centre(cost)
        self.x, self.y = (points.to(self.dtype) for points in self.centred)
        scale = (2 * LOG2_E / epsilon.double()).sqrt()[:, None, None]
        self.scaled_x, self.scaled_y = ((points * scale).to(self.dtype) for points in self.centred)
        self.norm_x, self.norm_y = half_square(self.scaled_x), half_square(self.scaled_y)

    def at(self, epsilon: Tensor) -> Points:
        """The same points under another ε."""
        return Points(self.cost, epsilon, self.centred)

    @property
    def T(self) -> Points:  # noqa: N802
        """The operator that works along columns."""
        return Points(self.cost.T, self.exact_epsilon, self.centred[::-1])

    def select(self, index: Tensor) -> Points:
        """The operator of some problems of the batch."""
        x, y = self.centred
        return Points(self.cost.select(index), self.exact_epsilon[index], (x[index], y[index]))

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε, never negative."""
        in_units = -1 / self.log2_e[strip.batch, :, None]
        return self.exponents(strip, self._cost_terms).clamp(max=0).mul_(in_units.to(self.dtype))

    @functools.cached_property
    def bits(self) -> Tensor:
        """Nothing but log₂e/ε: points are scaled in float64."""
        return (LOG2_E / self.exact_epsilon)[:, None]

    @functools.cached_property
    def _cost_terms(self) -> Terms:
        return self.terms(None, self.zeros(self.batch, self.columns))

    def terms(self, r: Tensor | None, t: Tensor) -> Terms:
        """Rows (x̂_i, r'_i, 1) and columns (ŷ_j, 1, t'_j) whose products are the exponents.

        With x̂ = x √(2 log₂ e / ε) and r'_i = r_i log₂ e − |x̂_i|²/2, and the same for y: −C_ij log₂ e / ε =
        x̂_i·ŷ_j − |x̂_i|²/2 − |ŷ_j|²/2.
        """
        r = -self.norm_x if r is None else self.in_bits(r) - self.norm_x
        r, t = r.to(self.dtype), (self.in_bits(t) - self.norm_y).to(self.dtype)
        left = torch.cat([self.scaled_x, r[:, :, None], torch.ones_like(r)[:, :, None]], -1)
        right = torch.cat([self.scaled_y, torch.ones_like(t)[:, :, None], t[:, :, None]], -1)
        return left, right.transpose(-1, -2).contiguous()

    def exponents(self, strip: Strip, terms: Terms) -> Tensor:
        """(r_i + t_j − C_ij/ε) log₂ e, one product of d + 2 terms."""
        left, right = terms
        rows, columns = left[strip], right[strip.batch]  # type: ignore[index]
        return torch.bmm(rows, columns, out=self.buffer(*rows.shape[:2], columns.shape[-1]))

    def softmin(self, h: Tensor) -> Tensor:
        """−ε log Σ_j exp(h_j − C_ij/ε), each strip around its own maximum."""
        out, terms = self.zeros(self.batch, self.rows), self._column_terms(h)
        with exact_products(self.device):
            for strip in self.strips():
                out[strip] = log2_sum_exp2(self.exponents(strip, terms))
        return self._with_row_terms(out)

    def softmin_slope(self, h: Tensor) -> Softmin:
        """Each row's softmin and 2 (x_i − Σ_j p_ij y_j), in one pass."""
        value, mean_y, terms = self.zeros(self.batch, self.rows), torch.empty_like(self.x), self._column_terms(h)
        with exact_products(self.device):
            for strip in self.strips():
                e, top, total = around_maximum(self.exponents(strip, terms))
                value[strip] = top + total.log2()
                mean_y[strip] = torch.bmm(e, self.y[strip.batch]) / total[:, :, None]
        return Softmin(self._with_row_terms(value), 2 * (self.x - mean_y))

    def _column_terms(self, t: Tensor) -> Terms:
        """Like ``terms``, without what depends on the row alone: that is better added to the row's result, in
        float64."""
        t = (self.in_bits(t) - self.norm_y).to(self.dtype)[:, :, None]
        left = torch.cat([self.scaled_x, self.scaled_x.new_ones(self.batch, self.rows, 1)], -1)
        return left, torch.cat([self.scaled_y, t], -1).transpose(-1, -2).contiguous()

    def _with_row_terms(self, log2_sums: Tensor) -> Tensor:
        return ((self.norm_x - log2_sums) / self.bits).to(self.dtype)

    def pull_back(self, strip: Strip, weights: Tensor, totals: tuple[Tensor, ...]) -> None:
        """∂C/∂x_i = 2 (x_i − y_j), and the opposite for y."""
        x, y = self.x[strip], self.y[strip.batch]
        totals[0][strip] = 2 * (x * weights.sum(-1)[:, :, None] - weights @ y)
        totals[1][strip.batch] += 2 * (y * weights.sum(-2)[:, :, None] - weights.transpose(-1, -2) @ x)


class Apart(Blocks):
    """Costs of points that are no product: ``between`` computes them, and the rest follows."""

    def __init__(self, cost: Cost, epsilon: Tensor, centred: tuple[Tensor, Tensor] | None = None):
        super().__init__(cost, epsilon)
        self.x, self.y = centred or centre(cost)
        self.direct = self.is_direct(cost.first.shape[-1])
        if self.direct:
            self.x, self.y = self.x.to(self.dtype), self.y.to(self.dtype)
        self.coordinates = self.y.transpose(-1, -2).contiguous()

    @staticmethod
    def is_direct(dimension: int) -> bool:
        """Whether costs come from differences of coordinates, which need no float64."""
        raise NotImplementedError

    def between(self, strip: Strip, coordinates: Tensor) -> Tensor:
        """C on a strip for columns with these coordinates (B, d, m): fresh memory, in the potentials' dtype."""
        raise NotImplementedError

    def at(self, epsilon: Tensor) -> Apart:
        """The same points under another ε."""
        return type(self)(self.cost, epsilon, (self.x, self.y))

    @property
    def T(self) -> Apart:  # noqa: N802
        """The operator that works along columns."""
        return type(self)(self.cost.T, self.exact_epsilon, (self.y, self.x))

    def select(self, index: Tensor) -> Apart:
        """The operator of some problems of the batch."""
        return type(self)(self.cost.select(index), self.exact_epsilon[index], (self.x[index], self.y[index]))

    def costs(self, strip: Strip) -> Tensor:
        """C."""
        return self.between(strip, self.coordinates)

    def scaled(self, strip: Strip) -> Tensor:
        """C/ε."""
        return self.costs(strip).div_(self.epsilon[strip.batch, None, None])

    def terms(self, r: Tensor | None, t: Tensor) -> Terms:
        """r and t in base 2, and the columns' coordinates (B, d, m)."""
        return (None if r is None else self.in_bits(r)[:, :, None]), self.in_bits(t)[:, None, :], self.coordinates

    def exponents(self, strip: Strip, terms: Terms) -> Tensor:
        """(r_i + t_j − C_ij/ε) log₂ e."""
        r, t, coordinates = terms
        slope = -self.bits[strip.batch, :, None].to(self.dtype)
        out = self.between(strip, coordinates).mul_(slope).add_(t[strip.batch])
        return out if r is None else out.add_(r[strip])


class Manhattan(Apart):
    """Sums of absolute differences of coordinates."""

    @staticmethod
    def is_direct(dimension: int) -> bool:
        """Always."""
        return True

    def between(self, strip: Strip, coordinates: Tensor) -> Tensor:
        """Σ_k |x_ik − y_jk|."""
        return torch.cdist(self.x[strip], coordinates[strip.batch].transpose(-1, -2), p=1.0)

    def pull_back(self, strip: Strip, weights: Tensor, totals: tuple[Tensor, ...]) -> None:
        """∂C/∂x_ik = sign(x_ik − y_jk), and the opposite for y."""
        x, columns = self.x[strip], self.coordinates[strip.batch]
        for k in range(x.shape[-1]):
            signed = torch.sub(x[:, :, k, None], columns[:, None, k]).sign_().mul_(weights)
            totals[0][strip][..., k] = signed.sum(-1)
            totals[1][strip.batch][..., k] -= signed.sum(-2)


class Distances(Apart):
    """Distances of points: direct differences of few coordinates, else products in float64, which cancel harmlessly."""

    def __init__(self, cost: Cost, epsilon: Tensor, centred: tuple[Tensor, Tensor] | None = None):
        super().__init__(cost, epsilon, centred)
        self.floor = FLOORS[cost.metric]

    @staticmethod
    def is_direct(dimension: int) -> bool:
        """For few coordinates."""
        return dimension <= DIRECT_DIMENSIONS

    def between(self, strip: Strip, coordinates: Tensor) -> Tensor:
        """|x_i − y_j|, at least the floor."""
        x, columns = self.x[strip], coordinates[strip.batch]
        if self.direct:
            squares = torch.zeros(*x.shape[:2], columns.shape[-1], dtype=self.dtype, device=self.device)
            for k in range(x.shape[-1]):
                difference = x[:, :, k, None] - columns[:, None, k]
                squares.addcmul_(difference, difference)
        else:
            squares = torch.baddbmm(columns.square().sum(1)[:, None, :], x, columns, alpha=-2)
            squares.add_(x.square().sum(-1)[:, :, None]).clamp_(min=0)
        return squares.sqrt_().clamp_(min=self.floor).to(self.dtype)

    def softmin_slope(self, h: Tensor) -> Softmin:
        """Each row's softmin and Σ_j p_ij (x_i − y_j)/C_ij, in one pass."""
        value, slope, terms = self.zeros(self.batch, self.rows), torch.empty_like(self.x), self.terms(None, h)
        for strip in self.strips():
            e, top, total = around_maximum(self.exponents(strip, terms))
            value[strip] = top + total.log2()
            slope[strip] = self._towards(strip, self._per_length(strip, e)) / total[:, :, None]
        return Softmin((value / -self.bits).to(self.dtype), slope.to(self.dtype))

    def _per_length(self, strip: Strip, weights: Tensor) -> Tensor:
        """W/C, zero where the floor holds."""
        lengths = self.costs(strip)
        return torch.where(lengths > self.floor, weights / lengths, 0.0)

    def _towards(self, strip: Strip, weights: Tensor) -> Tensor:
        """Σ_j W_ij (x_i − y_j)."""
        x, columns = self.x[strip], self.coordinates[strip.batch]
        if self.direct:
            differences = ((x[:, :, k, None] - columns[:, None, k]).mul_(weights).sum(-1) for k in range(x.shape[-1]))
            return torch.stack(list(differences), -1) if x.shape[-1] else torch.zeros_like(x)
        weights = weights.to(x.dtype)
        return x * weights.sum(-1)[:, :, None] - weights @ self.y[strip.batch]

    def _away(self, strip: Strip, weights: Tensor) -> Tensor:
        """Σ_i W_ij (y_j − x_i)."""
        x, columns = self.x[strip], self.coordinates[strip.batch]
        if self.direct:
            differences = ((columns[:, None, k] - x[:, :, k, None]).mul_(weights).sum(-2) for k in range(x.shape[-1]))
            return torch.stack(list(differences), -1) if x.shape[-1] else torch.zeros_like(self.y[strip.batch])
        weights = weights.to(x.dtype)
        return self.y[strip.batch] * weights.sum(-2)[:, :, None] - weights.transpose(-1, -2) @ x

    def pull_back(self, strip: Strip, weights: Tensor, totals: tuple[Tensor, ...]) -> None:
        """∂C/∂x_i = (x_i − y_j)/C, and the opposite for y; nothing where the floor holds."""
        weights = self._per_length(strip, weights)
        totals[0][strip] = self._towards(strip, weights).to(self.dtype)
        totals[1][strip.batch] += self._away(strip, weights).to(self.dtype)


def centre(cost: Cost) -> tuple[Tensor, Tensor]:
    """Both clouds relative to the midpoint of their means, in float64."""
    assert cost.x is not None and cost.y is not None
    x, y = cost.x.double(), cost.y.double()
    middle = 0.5 * (mean(x) + mean(y))
    return x - middle, y - middle


def mean(points: Tensor) -> Tensor:
    """The mean over the points, zero for none."""
    return points.sum(1, keepdim=True) / max(1, points.shape[1])


def half_square(points: Tensor) -> Tensor:
    """|x|²/2, in float64."""
    return 0.5 * points.double().square().sum(-1)


def exp2(exponents: Tensor) -> Tensor:
    """2 to the exponents, overwriting them; no denormal numbers on a CPU."""
    if exponents.dtype == torch.float32 and exponents.device.type == "cpu":
        torch.nn.functional.threshold_(exponents, DENORMAL, -torch.inf)
    return exponents.exp2_()


def log2_sum_exp2(exponents: Tensor) -> Tensor:
    """log₂ Σ_j 2^exponents, overwriting them; −inf for a row of −inf."""
    if exponents.shape[-1] == 0:
        return exponents.new_full(exponents.shape[:-1], -torch.inf)
    _, top, total = around_maximum(exponents)
    return total.log2_().add_(top)


def around_maximum(exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """2^(exponents − top), overwriting them, with each row's top and the row sums."""
    top = finite(exponents.amax(-1, keepdim=True))
    e = exp2(exponents.sub_(top))
    return e, top[..., 0], e.sum(-1)


def largest(exponents: Tensor, count: int) -> Tensor:
    """Indices of each row's largest exponents, largest first."""
    if count == 1:
        return exponents.argmax(-1, keepdim=True)
    return exponents.topk(count, -1).indices


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
    """Keep products as wide as their operands, also where the user allowed autocast or TF32 for their own."""
    matmul = torch.backends.cuda.matmul
    narrows = device.type == "cuda" and matmul.allow_tf32
    if not narrows and not torch.is_autocast_enabled(device.type):
        yield
        return
    matmul.allow_tf32 = matmul.allow_tf32 and not narrows
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        matmul.allow_tf32 = matmul.allow_tf32 or narrows
