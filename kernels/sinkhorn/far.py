"""Softmins of squared distances at large temperatures, in time linear in the points: a fast Gauss transform.

Points are sorted into the cells of a grid. For x = c + σu and y = c' + σv with σ² = ε and D = (c − c')/σ,

    exp(−|x − y|²/2ε) = exp(−|D|²/2 − D·u − |u|²/2) exp(D·v − |v|²/2) exp(u·v),

and exp(u·v) is a short sum Σ_α u^α v^α/α! where cells are about as wide as the blur, so that |u|, |v| are about 1. What
a sum up to degree p leaves out of a pair's term is at most e^(2r) r^(p+1)/(p+1)! of the term itself, r = max |u||v|: as
all terms are positive, the same bound holds for their sum, and ε times it for the softmin. Where cells would be too
many they are wider, and sums longer. (Greengard and Strain, "The fast
Gauss transform", 1991, bound errors absolutely; around cells of both clouds it can be done relatively.) In float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import limit

TOLERANCE = 2e-7  # relative to a sum: no more than float32 rounds
MOST_DIMENSIONS = 3
MOST_CELLS = 512  # of one cloud
WIDTHS = (1.0, 1.2, 1.4)  # the largest |u| of a cell may be; a wider one only where there would be too many
MONOMIALS = 286  # up to degree 10 in three coordinates, as where the costs below were measured
ROWS = 1 << 13  # points whose monomials are held at once on a CPU, in its caches
ROWS_DEVICE = 1 << 16


class Costs(NamedTuple):
    """Seconds, roughly, for choosing: a pair in a pass over all; a cell; a point, and its share in a cell of others."""

    pair: float
    cell: float
    point: float
    share: float


# Blocks as measured on two cores; of cards, ``tuning.json`` has what counts.
COSTS = {"cpu": Costs(5e-10, 4e-4, 1e-6, 1.2e-8)}


def costs_on(device: torch.device) -> Costs:
    """What the choice is made by."""
    return COSTS.get(device.type) or Costs(*(limit(f"far-{name}", device) for name in Costs._fields))


class Field(NamedTuple):
    """Two clouds (n, d) and (m, d), and the box around both."""

    x: Tensor
    y: Tensor
    low: list[float]
    high: list[float]

    def pays(self, epsilon: float) -> bool:
        """Whether this way is clearly quicker than a pass over all pairs."""
        return 1.5 * self._seconds(epsilon) < _dense(len(self.x), len(self.y), self.x.device)

    def seconds(self, epsilon: float, debias: bool) -> float:
        """What the softmins of a step take, two or four of them."""
        return (1 + debias) * self._seconds(epsilon)

    def _seconds(self, epsilon: float) -> float:
        across = cells_across(self.low, self.high, epsilon)
        count, n, m = math.prod(across), len(self.x), len(self.y)
        if count > MOST_CELLS:
            return math.inf
        furthest = 0.5 * math.hypot(*_sides(self.low, self.high, across))
        monomials = math.comb(_degree(furthest**2 / epsilon) + len(across), len(across))
        return _seconds(n, m, count, self.x.device, monomials)

    def dense(self, debias: bool) -> float:
        """What they take over all pairs."""
        n, m = len(self.x), len(self.y)
        return 2 * _dense(n, m, self.x.device) + debias * (_dense(n, n, self.x.device) + _dense(m, m, self.x.device))

    def softmins(self, epsilon: float, biases: Sequence[Tensor]) -> list[Tensor]:
        """Softmins of x by y, of y by x, and where asked for of x by x and of y by y, from the columns' biases h."""
        return softmins(
            [into_cells(points, self.low, self.high, epsilon) for points in (self.x, self.y)], biases, epsilon
        )


def _seconds(n: int, m: int, cells: int, device: torch.device, monomials: int = MONOMIALS) -> float:
    costs, rounds = costs_on(device), -(-4 * monomials * cells**2 // _room(n + m))
    points, longer = (n + m) / 2, monomials / MONOMIALS
    return (1 + rounds) * (cells * costs.cell + points * longer * costs.point) + 2 * points * cells * costs.share


def _room(points: int) -> int:
    """How many moments (float64) may be held at once: 128 MB of them, or half a kilobyte for each point."""
    return max(1 << 24, 64 * points)


def _dense(n: int, m: int, device: torch.device) -> float:
    return n * m * costs_on(device).pair


def fields(x: Tensor, y: Tensor) -> list[Field]:
    """One for each problem of a batch (B, n, d) and (B, m, d), or none where this way can never pay.

    It is as right as float32 is, so points in float64 are left to others. Waits for the device.
    """
    size = x.shape[1], y.shape[1], x.device
    if (
        x.dtype == torch.float64
        or not 0 < x.shape[-1] <= MOST_DIMENSIONS
        or _dense(*size) < _seconds(*size[:2], 1, size[2])
    ):
        return []
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return []
    (low_x, high_x), (low_y, high_y) = torch.aminmax(x, dim=1), torch.aminmax(y, dim=1)
    low, high = torch.minimum(low_x, low_y).tolist(), torch.maximum(high_x, high_y).tolist()
    if not all(math.isfinite(number) for corner in (*low, *high) for number in corner):
        return []
    return [Field(*each) for each in zip(x, y, low, high, strict=True)]


class Cells(NamedTuple):
    """One cloud in the cells of a grid, in units of the blur: points u (d, n) sorted by cell, and their order (n,)."""

    order: Tensor
    u: Tensor
    centres: Tensor  # (C, d), of the cells that hold points
    counts: list[int]
    half_diagonal: float  # no |u| is larger

    @property
    def slices(self) -> list[slice]:
        """The points of each cell."""
        ends = list(itertools.accumulate(self.counts))
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def cells_across(low: list[float], high: list[float], epsilon: float) -> list[int]:
    """Into how many cells a grid cuts each side of a box: no point is much further than the blur from its centre."""
    found: list[int] = []
    for width in WIDTHS:
        side = 2 * width * math.sqrt(epsilon / len(low))
        found = [max(1, math.ceil((top - bottom) / side)) for bottom, top in zip(low, high, strict=True)]
        if math.prod(found) <= MOST_CELLS:
            break
    return found


def _sides(low: list[float], high: list[float], across: list[int]) -> list[float]:
    """Of a cell; none is zero."""
    return [max(top - base, 1e-300) / count for base, top, count in zip(low, high, across, strict=True)]


def into_cells(points: Tensor, low: list[float], high: list[float], epsilon: float) -> Cells:
    """Sort a cloud (n, d) that lies in a box."""
    sigma, across = math.sqrt(epsilon), cells_across(low, high, epsilon)
    bottom = torch.tensor(low, dtype=torch.float64, device=points.device)
    sides = _sides(low, high, across)
    side = torch.tensor(sides, dtype=torch.float64, device=points.device)
    place = ((points.double() - bottom) / side).floor_()
    place = torch.minimum(place.clamp_(min=0), torch.tensor(across, device=points.device) - 1)
    strides = [math.prod(across[k + 1 :]) for k in range(len(across))]
    number = (place * torch.tensor(strides, dtype=torch.float64, device=points.device)).sum(1).long()
    order = torch.argsort(number, stable=True)
    found, counts = torch.unique_consecutive(number[order], return_counts=True)
    which = torch.stack([found // stride % count for stride, count in zip(strides, across, strict=True)], 1)
    centres = bottom + (which + 0.5) * side
    inside = torch.repeat_interleave(centres, counts, 0)
    u = ((points.double()[order] - inside) / sigma).T.contiguous()
    return Cells(order, u, centres / sigma, counts.tolist(), 0.5 * math.hypot(*sides) / sigma)


PAIRS = ((0, 1), (1, 0), (0, 0), (1, 1))  # rows and columns of each softmin


def softmins(clouds: list[Cells], biases: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """−ε log Σ_j exp(h_j − |x_i − y_j|²/2ε) for the first of ``PAIRS``, both clouds in the cells that belong to ε."""
    tasks = list(zip(PAIRS, biases, strict=False))
    basis = Basis.up_to(_degree(max(cells.half_diagonal for cells in clouds) ** 2), clouds[0].u)
    outs = [clouds[rows].u.new_empty(len(clouds[rows].order)) for (rows, _), _ in tasks]
    most = max(len(cells.counts) for cells in clouds)
    each = len(tasks) * most * basis.exponents.shape[1]
    together = max(1, _room(sum(len(cells.order) for cells in clouds)) // each)
    for first in range(0, most, together):
        _some(clouds, tasks, basis, slice(first, first + together), outs)
    return [out.mul_(-epsilon) for out in outs]


def _some(clouds: list[Cells], tasks: list[Any], basis: Basis, part: slice, outs: list[Tensor]) -> None:
    """The softmins of the points in some cells of rows."""
    moments = [_Moments(clouds[rows], clouds[columns], h, part, basis) for (rows, columns), h in tasks]
    for which, cells in enumerate(clouds):
        given = [each for (pair, _), each in zip(tasks, moments, strict=True) if pair[1] == which]
        for number, piece, monomials in _walk(cells, basis, slice(None)):
            for each in given:
                each.add(number, piece, monomials)
    for which, cells in enumerate(clouds):
        wanted = [(each, out) for (pair, _), each, out in zip(tasks, moments, outs, strict=True) if pair[0] == which]
        for number, piece, monomials in _walk(cells, basis, part):
            for each, out in wanted:
                out[cells.order[piece]] = each.log_sums(number, piece, monomials)


class _Moments:
    """Of each cell of columns as seen from some cells of rows, around the largest bias in the cell."""

    def __init__(self, rows: Cells, columns: Cells, h: Tensor, part: slice, basis: Basis):
        self.rows, self.columns, self.first = rows, columns, part.start
        self.seen_from = rows.centres[part]
        self.biases = h.double()[columns.order] - 0.5 * columns.u.square().sum(0)
        tops = torch.stack([self.biases[part].amax() for part in columns.slices])
        self.tops = torch.where(tops.isinf(), 0.0, tops)
        shape = len(self.seen_from), len(columns.counts), basis.exponents.shape[1]
        self.values = h.new_zeros(shape, dtype=torch.float64)

    def add(self, number: int, piece: slice, monomials: Tensor) -> None:
        """Take some points of a cell of columns in."""
        apart = self.seen_from - self.columns.centres[number]
        weights = torch.addmm(self.biases[piece] - self.tops[number], apart, self.columns.u[:, piece]).exp_()
        self.values[:, number] += weights @ monomials.T

    def log_sums(self, number: int, piece: slice, monomials: Tensor) -> Tensor:
        """log Σ_j exp(h_j − |x_i − y_j|²/2ε) for some points of a cell of rows."""
        u, apart = self.rows.u[:, piece], self.rows.centres[number] - self.columns.centres
        exponents = torch.addmm((self.tops - 0.5 * apart.square().sum(1))[:, None], apart, u, alpha=-1)
        top = exponents.amax(0)
        sums = exponents.sub_(top).exp_().mul_(self.values[number - self.first] @ monomials).sum(0)
        return sums.log_().add_(top).sub_(0.5 * u.square().sum(0))


def _walk(cells: Cells, basis: Basis, wanted: slice) -> Iterator[tuple[int, slice, Tensor]]:
    """Cell by cell, some points at a time, with their monomials (K, n)."""
    rows = ROWS if cells.u.device.type == "cpu" else ROWS_DEVICE
    for number, part in list(enumerate(cells.slices))[wanted]:
        for start in range(part.start, part.stop, rows):
            piece = slice(start, min(start + rows, part.stop))
            yield number, piece, basis(cells.u[:, piece])


def _degree(product: float) -> int:
    """Up to which degree exp(u·v) is summed for |u·v| up to ``product``: little is left out, even of exp(−product)."""
    term, degree = math.exp(2 * product), 0
    while term * product / (degree + 1) > TOLERANCE:
        degree += 1
        term *= product / degree
    return degree


class Basis(NamedTuple):
    """Monomials u^α/√α! in d coordinates: their exponents (d, K), and 1/√k for k = 1 … the degree, (degree, 1, 1)."""

    exponents: Tensor
    roots: Tensor

    @classmethod
    def up_to(cls, degree: int, like: Tensor) -> Basis:
        """All of them, for points like (d, n)."""
        every = itertools.product(range(degree + 1), repeat=len(like))
        exponents = torch.tensor([each for each in every if sum(each) <= degree], device=like.device).T
        roots = torch.arange(1, degree + 1, dtype=like.dtype, device=like.device).rsqrt()
        return cls(exponents.contiguous(), roots[:, None, None])

    def __call__(self, u: Tensor) -> Tensor:
        """(d, n) to (K, n)."""
        powers = torch.cat([torch.ones_like(u)[None], (self.roots * u).cumprod(0)])
        out = powers[:, 0].index_select(0, self.exponents[0])
        for axis in range(1, len(u)):
            out.mul_(powers[:, axis].index_select(0, self.exponents[axis]))
        return out
