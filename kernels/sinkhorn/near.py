"""Softmins of squared distances at small temperatures: over the blocks of points that count, with a proof for the rest.

Points are cut along a tree of medians into blocks of some dozens. With x = c + σu and y = c' + σv in blocks A and B,
σ² = ε, D = (c − c')/σ, and affine bounds f/ε ≤ F + P·u and g/ε ≤ G + Q·v on the blocks' potentials,

    (f + g − |x − y|²/2)/ε ≤ F + G + Σ_k max_{|u| ≤ p, |v| ≤ q} (P − D)_k u_k + (Q + D)_k v_k − D_k²/2 − (u_k − v_k)²/2,

which ``Pair.bounds`` bounds axis by axis. Times a block's mass this bounds what the block adds to a row's sum
Σ_j b_j e_ij of terms e_ij = exp((f_i + g_j − |x_i − y_j|²/2)/ε), before any term is computed. Blocks are left out while
the bounds of what is left out of a row stay below ``TOLERANCE`` times a guess of the row's sum; then the sums are
computed, and where one came out smaller than guessed, blocks are added until the bound holds of it too. What is
computed of a sum is never more than the sum, so the bound holds of the sum itself: of a potential it is ``TOLERANCE``
ε, and of its derivative by a point x, x less a mean of the y, ``TOLERANCE`` times the largest distance between two y.

One exponential serves a row and a column. Exponents are taken around the blocks' centres, less the affine parts of
the potentials, so they are small numbers where they count and keep their digits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import exact_products

TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-15}  # relative to a sum: no more than it is rounded by
MOST_DIMENSIONS = 8  # in more, blocks are too wide to be apart
BLOCK = 64  # points at most
LEAST_PAIRS = 1 << 21  # of both clouds, below which nothing is gained
LEAST_POINTS = 256  # of either
CLOSE = 32  # blocks whose bounds are larger than this part of what may be left out are never left out
STRIP = 1 << 15  # bounds that are held at once
HELD = 1 << 22  # pairs of blocks: where there are more, they are found twice
TILES = 1 << 10  # pairs of blocks that are prepared at once
TOGETHER = 1 << 17  # pairs of points whose exponentials are held at once: they fit in a CPU's caches
# Where exponents are cut off. Denormal numbers take long, also as products with weights; and what has no weight must
# stay finite to count nothing.
ENDS = {torch.float32: (-64.0, 88.0), torch.float64: (-640.0, 700.0)}
UNNOTICED = 0.01  # of the tolerance, what lower ends may add to a safe sum
LARGEST = {torch.float32: 1e20, torch.float64: 1e200}  # safe sum


class Costs(NamedTuple):
    """Seconds, roughly, for choosing: a pair in a pass over all; a pair in a tile; an axis of a bound; a softmin."""

    pair: float
    tile: float
    axis: float
    call: float


# As measured on one core; with derivatives a pair in a tile takes twice as long.
COSTS = {torch.float32: Costs(1e-9, 1.4e-9, 1.3e-8, 2e-3), torch.float64: Costs(1.8e-9, 2.5e-9, 1.3e-8, 2e-3)}


class Cloud(NamedTuple):
    """Points in C blocks of S each. Blocks are filled up with the first point again, without weight."""

    index: Tensor  # (C, S), into the points
    real: Tensor  # (C, S), whether this is the point's own place
    offsets: Tensor  # (C, S, d) from the centres
    centre: Tensor  # (C, d), of the boxes around the blocks
    half: Tensor  # (C, d), half of the boxes' sides

    @classmethod
    def of(cls, points: Tensor) -> Cloud:
        """Cut (n, d) in float64 at medians along the longest side, again and again."""
        n, depth = len(points), max(0, math.ceil(math.log2(len(points) / BLOCK)))
        count, size = 1 << depth, -(-n >> depth)
        places = torch.arange(count * size, device=points.device)
        for level in range(depth):
            places = places.view(1 << level, -1)
            inside = points[torch.where(places < n, places, 0)]
            axis = (inside.amax(1) - inside.amin(1)).argmax(1)
            along = inside.gather(2, axis[:, None, None].expand(-1, inside.shape[1], 1))[:, :, 0]
            places = places.gather(1, along.argsort(1))
        places = places.view(count, size)
        real = places < n
        index = torch.where(real, places, 0)
        inside = points[index]
        low, high = inside.amin(1), inside.amax(1)
        centre = 0.5 * (low + high)
        return cls(index, real, inside - centre[:, None], centre, 0.5 * (high - low))

    def spread(self, values: Tensor) -> Tensor:
        """From blocks (C, S, ...) to points (n, ...)."""
        out = values.new_empty(int(self.real.sum()), *values.shape[2:])
        out[self.index[self.real]] = values[self.real]
        return out


class Side(NamedTuple):
    """A cloud with potentials, in units of the temperature and its blur: φ = top + tilt·u + rest, with rest ≤ 0."""

    cloud: Cloud
    potential: Tensor  # (C, S), φ
    weight: Tensor  # (C, S)
    centre: Tensor  # (C, d)
    half: Tensor  # (C, d)
    u: Tensor  # (C, S, d)
    tilt: Tensor  # (C, d)
    top: Tensor  # (C,)
    rest: Tensor  # (C, S), less |u|²/2

    @classmethod
    def of(cls, cloud: Cloud, potential: Tensor, weight: Tensor, blur: float) -> Side:
        """From φ (n,) and weights (n,)."""
        phi, w = potential.double()[cloud.index], torch.where(cloud.real, weight.double()[cloud.index], 0.0)
        u, half = cloud.offsets / blur, cloud.half / blur
        tilt = _slope(u, half, phi)
        rest = phi - (u @ tilt[:, :, None])[:, :, 0]
        top = rest.amax(1)
        rest = rest - top[:, None] - 0.5 * u.square().sum(2)
        return cls(cloud, phi, w, cloud.centre / blur, half, u, tilt, top, rest)

    @property
    def mass(self) -> Tensor:
        """Of each block, (C,)."""
        return self.weight.sum(1)


def _slope(u: Tensor, half: Tensor, values: Tensor) -> Tensor:
    """Of affine functions close to the values (C, S): least squares, flat where points do not tell."""
    unit = torch.where(half > 0, half, 1.0)
    inside = u / unit[:, None]
    inside = inside - inside.mean(1, keepdim=True)
    normal = inside.mT @ inside / inside.shape[1]
    normal.diagonal(dim1=1, dim2=2).add_(1e-6)
    product = inside.mT @ (values - values.mean(1, keepdim=True))[:, :, None] / inside.shape[1]
    return torch.linalg.solve(normal, product)[:, :, 0] / unit


class Found(NamedTuple):
    """How many pairs of blocks count, the pairs (2, T) unless there are too many to hold, and what the others add.

    That is a bound for the sums of each block of rows, and of columns.
    """

    number: int
    pairs: Tensor | None
    left: list[Tensor]


Guess = tuple[Tensor, Tensor]  # of the least sums in each block of rows, and of columns


class Pair:
    """Two sides, or one with itself: the sums of rows and columns over the pairs of blocks that count."""

    def __init__(self, rows: Side, columns: Side, tolerance: float):
        self.rows, self.columns, self.itself = rows, columns, rows is columns
        self.share = (0.5 if self.itself else 1.0) * tolerance  # of one side of a triangle
        self.guess: Guess = torch.ones_like(rows.top), torch.ones_like(columns.top)
        self.masses = rows.mass, columns.mass

    @property
    def blocks(self) -> int:
        """Pairs of blocks."""
        return len(self.rows.top) * len(self.columns.top)

    @property
    def size(self) -> int:
        """Pairs of points in a pair of blocks."""
        return self.rows.u.shape[1] * self.columns.u.shape[1]

    def bounds(self, part: slice, others: slice) -> Tensor:
        """Of the exponents of some blocks of rows and of columns, (R, C).

        With m = (P − Q)/2 − D and ρ = p + q, an axis adds at most (m² − D² − max(|m| − ρ, 0)² + |P + Q| ρ)/2.
        """
        one, other = self.factors
        out = torch.addmm(self.slack + one[0][part, None] + other[0][others], one[1][part], other[1][others].mT)
        for k in range(self.rows.u.shape[2]):
            rows, columns = (each[:, k] for each in one[2:]), (each[:, k] for each in other[2:])
            pairs = [(first[part, None], second[others]) for first, second in zip(rows, columns, strict=True)]
            middle, tilt, half = pairs
            room = half[0] + half[1]
            beyond = (middle[0] - middle[1]).abs_().sub_(room).clamp_(min=0)
            out.addcmul_(beyond, beyond, value=-0.5)
            out.addcmul_((tilt[0] + tilt[1]).abs_(), room, value=0.5)
        return out

    @functools.cached_property
    def factors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of the bounds, by rows and by columns: what is added, what is multiplied, (P/2 − c), P and half the sides."""

        def of(side: Side, sign: int) -> tuple[Tensor, ...]:
            middle = 0.5 * side.tilt - side.centre
            squares = 0.5 * (middle.square() - side.centre.square()).sum(1)
            return side.top + squares, torch.cat([sign * middle, side.centre], 1), middle, side.tilt, side.half

        return of(self.rows, -1), of(self.columns, 1)

    @functools.cached_property
    def slack(self) -> float:
        """More than rounding may have taken off a bound."""
        sizes = (
            side.top.abs().amax() + (side.centre.abs() + side.tilt.abs() + side.half).square().sum(1).amax()
            for side in (self.rows, self.columns)
        )
        return 1e-14 * float(sum(sizes))

    def choose(self, most: float = math.inf) -> Found | None:
        """The pairs that count where sums are as guessed, None for more than ``most``."""
        held: list[Tensor] = []
        count, left = 0, self.nothing()
        for some in self.strips(left):
            count += some.shape[1]
            if count > most:
                return None
            if count <= HELD:
                held.append(some)
        return Found(count, torch.cat(held, 1) if count <= HELD else None, left)

    def nothing(self) -> list[Tensor]:
        """Zeros for the blocks of rows and of columns."""
        return [torch.zeros_like(mass) for mass in self.masses]

    def strips(self, left: list[Tensor], better: Guess | None = None) -> Iterator[Tensor]:
        """The pairs (2, T) that count in some rows after others, adding up in ``left`` what the others are.

        With a better guess, those that count as well.
        """
        height = max(1, STRIP // len(self.columns.top))
        for start in range(0, len(self.rows.top), height):
            part, others = slice(start, start + height), slice(start if self.itself else 0, None)
            sizes = self.bounds(part, others).clamp_(max=700.0).exp_()
            if self.itself:
                sizes.triu_()  # the others are these again
            keep = self._keep(sizes, part, others, better or self.guess, left)
            if better is not None:
                keep &= ~self._keep(sizes, part, others, self.guess, self.nothing())
            found = keep.nonzero()
            yield found.T + found.new_tensor([[start], [others.start]])

    def _keep(self, sizes: Tensor, part: slice, others: slice, guess: Guess, left: list[Tensor]) -> Tensor:
        """Which pairs of a strip count for their rows or their columns. A side with itself has those on one side."""
        strip = self.share * len(sizes) / len(self.rows.top)
        keep, rest = _largest(sizes * self.masses[1][others], self.share * guess[0][part])
        keep_columns, rest_columns = _largest(sizes.mT * self.masses[0][part], strip * guess[1][others])
        left[0][part] += rest
        left[1][others] += rest_columns
        keep |= keep_columns.mT
        return keep.triu_() if self.itself else keep

    def sums(self, found: Found, widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Σ_j b_j e_ij by rows and by columns, (C, S, 1) each, or (C, S, 1 + d) with Σ_j b_j e_ij (y_j − c) besides.

        In units of the blur, c the centre of the row's block.
        """
        sides = self.rows, self.columns
        outs = [side.u.new_zeros(*side.u.shape[:2], width) for side, width in zip(sides, widths, strict=True)]
        if self.itself:
            outs[1] = outs[0]
        tiles = Tiles(self.rows, self.columns, widths, dtype)
        for some in self.strips(self.nothing()) if found.pairs is None else (found.pairs,):
            self._add(tiles, some, outs)
        better = self._better(found.left, outs)
        if better is not None:
            for some in self.strips(self.nothing(), better):
                self._add(tiles, some, outs)
        return outs

    def _better(self, left: list[Tensor], outs: list[Tensor]) -> Guess | None:
        """Guesses that hold, where too much was left out of sums; None where it was nowhere."""
        least = [out[:, :, 0].amin(1) for out in outs]
        if self.itself:
            left = [left[0] + left[1]] * 2
        allowed = self.share * (2 if self.itself else 1)
        failed = [rest > allowed * low for rest, low in zip(left, least, strict=True)]
        if not any(bool(each.any()) for each in failed):
            return None
        guesses = zip(failed, least, self.guess, strict=True)
        return tuple(torch.where(bad, 0.99 * low, given) for bad, low, given in guesses)  # type: ignore[return-value]

    def _add(self, tiles: Tiles, pairs: Tensor, outs: list[Tensor]) -> None:
        """Add what pairs of blocks (2, T) contribute to the sums."""
        for some in pairs.split(TILES, 1):
            by_rows, by_columns = tiles(some)
            outs[0].index_add_(0, some[0], by_rows.double())
            if self.itself:
                by_columns[some[0] == some[1]] = 0  # the rows have them
            outs[1].index_add_(0, some[1], by_columns.double())


def _largest(sizes: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Which of each row's sizes to keep, so that the others sum to no more than allowed, and what they sum to."""
    keep = sizes >= (allowed / CLOSE)[:, None]
    left = torch.where(keep, 0.0, sizes).sum(1)
    over = left > allowed
    if bool(over.any()):
        some = sizes[over]
        keep[over] = kept = some >= (allowed[over] / some.shape[1])[:, None]
        left[over] = torch.where(kept, 0.0, some).sum(1)
    return keep, left


class Tiles:
    """The sums of pairs of blocks, in the points' precision, relative to the blocks' centres.

    In units of the blur z_ij = u_i·(v_j + P − D) + (r'_j + (Q + D)·v_j + F + G − |D|²/2) + r_i, where r is the rest.
    """

    def __init__(self, rows: Side, columns: Side, widths: Sequence[int], dtype: torch.dtype):
        self.rows, self.columns, self.widths, self.dtype = rows, columns, widths, dtype
        one = torch.ones_like(rows.rest)
        self.left = torch.cat([rows.u, one[:, :, None], rows.rest[:, :, None]], 2).to(dtype)
        self.v, one = columns.u.to(dtype), torch.ones_like(columns.rest)
        self.right = torch.cat([columns.u.mT, columns.rest[:, None], one[:, None]], 1).to(dtype)
        self.weight_rows, self.weight_columns = rows.weight.to(dtype), columns.weight.to(dtype)
        self.memory = torch.empty(max(1, TOGETHER // self.size) * self.size, dtype=dtype, device=rows.u.device)

    @property
    def size(self) -> int:
        """Pairs of points in a pair of blocks."""
        return self.left.shape[1] * self.v.shape[1]

    def __call__(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over columns (T, S, 1 or 1 + d) and over rows (T, S', 1 or 1 + d)."""
        one, other = pairs
        apart = self.rows.centre[one] - self.columns.centre[other]
        level = self.rows.top[one] + self.columns.top[other] - 0.5 * apart.square().sum(1)
        left, right = self.left[one], self._right(one, other, apart, level)
        weight_rows, weight_columns = self._weights(one, other, apart)
        by_rows = left.new_empty(len(one), left.shape[1], self.widths[0])
        by_columns = left.new_empty(len(one), self.widths[1], right.shape[2])
        for start in range(0, len(one), max(1, TOGETHER // self.size)):
            part = slice(start, start + max(1, TOGETHER // self.size))
            self._some(*(given[part] for given in (left, right, weight_rows, weight_columns, by_rows, by_columns)))
        return by_rows, by_columns.mT

    def _right(self, one: Tensor, other: Tensor, apart: Tensor, level: Tensor) -> Tensor:
        """The factors of the columns, (T, d + 2, S')."""
        right = self.right[other]
        lean = (self.columns.tilt[other] + apart).to(self.dtype)[:, None]
        right[:, -2:-1] += torch.bmm(lean, right[:, :-2]) + level.to(self.dtype)[:, None, None]
        right[:, :-2] += (self.rows.tilt[one] - apart).to(self.dtype)[:, :, None]
        return right

    def _weights(self, one: Tensor, other: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
        """What terms are multiplied by: (T, 1 or 1 + d, S) along rows and (T, S', 1 or 1 + d) along columns."""
        rows, columns, apart = self.weight_rows[one][:, None], self.weight_columns[other][:, :, None], apart[:, None]
        if self.widths[1] > 1:
            rows = torch.cat([rows, rows * (self.left[one][:, :, :-2] + apart).to(self.dtype).mT], 1)
        if self.widths[0] > 1:
            columns = torch.cat([columns, columns * (self.v[other] - apart).to(self.dtype)], 2)
        return rows, columns

    def _some(
        self, left: Tensor, right: Tensor, weight_rows: Tensor, weight_columns: Tensor, by_rows: Tensor,
        by_columns: Tensor,
    ) -> None:
        """Sums of so few pairs that their terms stay in a CPU's caches."""
        memory = self.memory[: len(left) * self.size].view(len(left), left.shape[1], right.shape[2])
        terms = torch.bmm(left, right, out=memory).clamp_(*ENDS[self.dtype]).exp_()
        torch.bmm(weight_rows, terms, out=by_columns)
        if self.widths[0] > 1:
            torch.bmm(terms, weight_columns, out=by_rows)
        else:
            torch.sum(terms.mul_(weight_columns.mT), 2, keepdim=True, out=by_rows)


class Softmin(NamedTuple):
    """A softmin (n,) of a cloud's points in units of the temperature, and its derivative (n, d) where asked for."""

    value: Tensor
    slope: Tensor | None


class Field:
    """Two clouds (n, d) and (m, d), cut into blocks once."""

    def __init__(self, x: Tensor, y: Tensor):
        self.points = x, y
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

    @functools.cached_property
    def clouds(self) -> tuple[Cloud, Cloud]:
        """In blocks."""
        centre = 0.5 * (self.points[0].double().mean(0) + self.points[1].double().mean(0))
        x, y = (Cloud.of(points.double() - centre) for points in self.points)
        return x, y

    @functools.cached_property
    def extent(self) -> list[float]:
        """The sides of the box around the rows."""
        x = self.points[0].double()
        return (x.amax(0) - x.amin(0)).tolist()

    def dense(self, debias: bool) -> float:
        """Seconds for all pairs."""
        n, m = (len(points) for points in self.points)
        return (n * m + debias * 0.5 * (n * n + m * m)) * COSTS[self.dtype].pair

    def may_pay(self, epsilon: float) -> bool:
        """Whether it is worth looking, which takes a few hundredths of a pass over all pairs."""
        reach = 2 * math.sqrt(-2 * math.log(TOLERANCE[self.dtype]) * epsilon)
        return math.prod(min(1.0, reach / side) if side > 0 else 1.0 for side in self.extent) < 0.9

    def softmins(
        self, epsilon: float, weights: Sequence[Tensor], potentials: Sequence[Tensor], budget: float,
        slopes: tuple[bool, bool] = (False, False),
    ) -> list[Softmin] | None:
        """Softmins of x by y, of y by x, and where there are four weights of x by x and of y by y.

        ``weights`` are the rows' own, a, b, a, b, and ``potentials`` the rows' too, in units of ε: the columns' are
        those of the partner. None where it takes longer than ``budget`` seconds, or this way is not safe.
        """
        blur, tolerance, costs = math.sqrt(epsilon), TOLERANCE[self.dtype], COSTS[self.dtype]
        if not all(bool(part.isfinite().all()) for part in (*weights, *potentials)):
            return None
        sides = [
            Side.of(self.clouds[k % 2], potential, weight, blur)
            for k, (potential, weight) in enumerate(zip(potentials, weights, strict=True))
        ]
        pairs = [Pair(sides[0], sides[1], tolerance), *(Pair(side, side, tolerance) for side in sides[2:])]
        found = _within(pairs, budget, costs)
        if found is None:
            return None
        d = self.points[0].shape[1]
        width = [1 + slope * d for slope in slopes]
        widths = width, (width[0],) * 2, (width[1],) * 2
        works = zip(pairs, found, widths, strict=False)
        with exact_products(self.points[0].device):
            outs = [pair.sums(chosen, each, self.dtype) for pair, chosen, each in works]
        flat = outs[0] + [out[0] for out in outs[1:]]
        partners = (sides[k].weight for k in (1, 0, 2, 3))
        if not all(_safe(out[:, :, 0], weight, self.dtype) for out, weight in zip(flat, partners, strict=False)):
            return None
        return [_softmin(side, out, blur) for side, out in zip(sides, flat, strict=True)]


def _within(pairs: list[Pair], budget: float, costs: Costs) -> list[Found] | None:
    """What counts of each pair, None where it takes longer than so many seconds."""
    budget -= sum(costs.call + pair.blocks * pair.rows.u.shape[2] * costs.axis for pair in pairs)
    every: list[Found] = []
    for pair in pairs:
        each = pair.size * costs.tile
        found = pair.choose(most=budget / each)
        if found is None:
            return None
        budget -= found.number * each
        every.append(found)
    return every


def _safe(sums: Tensor, weights: Tensor, dtype: torch.dtype) -> bool:
    """Whether sums over columns with such weights would have been the same without ``ENDS``, and keep their digits."""
    low, high = (math.exp(end) for end in ENDS[dtype])
    some = weights[weights > 0]
    least = float(some.sum()) * low / (UNNOTICED * TOLERANCE[dtype])
    most = min(LARGEST[dtype], 0.1 * high * float(some.amin())) if len(some) else 0.0
    return bool(((sums > least) & (sums < most)).all())


def _softmin(side: Side, sums: Tensor, blur: float) -> Softmin:
    """What follows from the sums around the present potentials."""
    value = side.cloud.spread(side.potential - sums[:, :, 0].log())
    if sums.shape[2] == 1:
        return Softmin(value, None)
    return Softmin(value, side.cloud.spread(blur * (side.u - sums[:, :, 1:] / sums[:, :, :1])))


def fields(x: Tensor, y: Tensor) -> list[Field]:
    """One for each problem of a batch (B, n, d) and (B, m, d), or none where this way can never pay. Finite points."""
    n, m, d = x.shape[1], y.shape[1], x.shape[2]
    if x.device.type != "cpu" or not 0 < d <= MOST_DIMENSIONS or n * m < LEAST_PAIRS or min(n, m) < LEAST_POINTS:
        return []
    if not all(bool(points.isfinite().all()) for points in (x, y)):
        return []
    return [Field(*each) for each in zip(x, y, strict=True)]
