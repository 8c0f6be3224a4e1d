"""Triton on CUDA: steps of the symmetric loop at small temperatures, over the tiles of columns that count.

Points are laid out so that those of a tile are close together, once for all steps. Before a step every tile of rows
gets the list of tiles of columns that may count for it, by the bounds of ``near.py``; the others add to its rows' sums
no more than ``near.TOLERANCE`` of what these are expected to be. When the sums are there this is held against them, and
tiles of rows whose sums are smaller than that get longer lists. A step that would take longer than one over all pairs,
or whose sums leave the range of numbers, is left to ``triton_symmetric.py``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import near
from .launch import INTERPRETED, Launch, Shape, limit, named_shape
from .triton import PAD

if TYPE_CHECKING:
    from .triton_symmetric import Clouds, Descent, Outputs

CLEARLY = 1.3  # times fewer pairs than all of them
TOGETHER = 1 << 26  # tiles in the lists that are held at once
COLUMNS = 256  # tiles of columns whose bounds a program looks at together
GUESSED = 0.99  # part of a sum that is known
TINY, HUGE = 2.0**-90, 2.0**90  # as in ``triton_kernels``: sums beyond these are taken another way
PARTS = ((0, 1), (1, 0), (2, 2), (3, 3))  # sides of rows and of columns, of each softmin; the clouds are the parities


def shape_for(d: int, device: torch.device) -> Shape:
    """Rows that a program has, and columns of a tile."""
    return named_shape("listed-3" if d <= 3 else "listed-8", device)


def of(clouds: Clouds, epsilon: float) -> Nearby | None:
    """For problems with squared distances whose smallest temperature is this, None where it can never pay.

    Waits for the device.
    """
    x, _, y, _ = clouds
    n, m, d = x.shape[1], y.shape[1], x.shape[2]
    if not 0 < d <= near.MOST_DIMENSIONS or n * m < limit("near-pairs", x.device):
        return None
    if not all(bool(part.isfinite().all()) for part in clouds):
        return None
    if not all(near.Field(*pair).may_pay(epsilon) for pair in zip(x.float(), y.float(), strict=True)):
        return None
    return Nearby(clouds)


def in_tiles(points: Tensor, size: int) -> Tensor:
    """An order of (n, d) in which every ``size`` points are close together: cut at medians along the longest side.

    Cuts are at multiples of the size, so that only the last tile has fewer points.
    """
    n, device = len(points), points.device
    order, low, high = torch.arange(n, device=device), points.amin(0, True).double(), points.amax(0, True).double()
    levels = (torch.tensor(each).to(device).split(sizes) for each, sizes in _levels(n, size))
    for lengths, cuts, stay in zip(*levels, strict=True):
        which = torch.repeat_interleave(torch.arange(len(cuts), device=device), lengths, output_size=n)
        side, axis = (high - low).max(1)
        along = points[order].gather(1, axis[which][:, None])[:, 0].double()
        part = (along - low.gather(1, axis[:, None])[which, 0]) / side.clamp(min=1e-300)[which]
        turn = (which + part.clamp_(0, 1) * (1 - 1e-9)).argsort()
        order, along = order[turn], along[turn]
        # Of the boxes only the sides that are cut shrink: they tell where to cut next, and need not be tight.
        chosen = torch.nn.functional.one_hot(axis, points.shape[1]).bool()
        highs = torch.stack([torch.where(chosen, along[(cuts - 1).clamp(min=0)][:, None], high), high], 1).flatten(0, 1)
        lows = torch.stack([low, torch.where(chosen, along[cuts][:, None], low)], 1).flatten(0, 1)
        low, high = lows[stay], highs[stay]
    return order


@functools.lru_cache(maxsize=16)
def _levels(n: int, size: int) -> list[tuple[list[int], list[int]]]:
    """How ``in_tiles`` cuts: lengths of the pieces, where each is cut, and which halves there are then, of all levels.

    Each in one list, with the levels' parts of it. A piece of one tile keeps its lower end as its upper half.
    """
    starts, tiles = [0], [-(-n // size)]
    lengths, cuts, halves = [], [], []
    while max(tiles) > 1:
        lengths.append([end - start for start, end in zip(starts, [*starts[1:], n], strict=True)])
        cuts.append([start + count // 2 * size for start, count in zip(starts, tiles, strict=True)])
        halves.append([2 * k + half for k, count in enumerate(tiles) for half in (0, 1) if half or count > 1])
        starts = sorted({*starts, *cuts[-1]})
        tiles = [part for count in tiles for part in (count // 2, count - count // 2) if part]
    return [(list(itertools.chain(*each)), list(map(len, each))) for each in (lengths, cuts, halves)]


class Lists(NamedTuple):
    """Of the tiles of rows of one softmin: sizes from which on tiles count, how many do, and what others add."""

    thresholds: Tensor
    counts: Tensor
    lefts: Tensor


class Sides(NamedTuple):
    """What is known of the tiles of rows and of columns of one softmin (``triton_near_kernels.tell``)."""

    rows: Tensor
    columns: Tensor


class Nearby:
    """Clouds in tiles, and the steps over those that count."""

    def __init__(self, clouds: Clouds):
        x, a, y, b = clouds
        self.shape = shape_for(x.shape[2], x.device)
        size = self.shape.columns
        self.orders = tuple(torch.stack([in_tiles(each, size) for each in points]) for points in (x, y))
        by_x, by_y = self.orders
        self.clouds = type(clouds)(_along(x, by_x), a.gather(1, by_x), _along(y, by_y), b.gather(1, by_y))
        self.fields = [near.Field(*pair) for pair in zip(self.clouds.x, self.clouds.y, strict=True)]
        self.taken = 0  # steps

    def in_order(self, start: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...] | None:
        """Potentials to start from, as the points are laid out."""
        if start is None:
            return None
        return tuple(None if part is None else part.gather(1, self.orders[k % 2]) for k, part in enumerate(start))

    def put_back(self, found: Outputs, outputs: Outputs) -> None:
        """Gradients, as the points came."""
        for k, (part, out) in enumerate(zip(found[1:], outputs[1:], strict=True)):
            if part is not None and out is not None:
                order = self.orders[k // 2]
                out.scatter_(1, order if part.dim() == 2 else order[:, :, None].expand_as(part), part)

    def turned_back(self, values: Tensor, first: Sequence[int]) -> Tensor:
        """(B, 2, N) or (B, 2, N, d), of x and y from these places on, as the points came."""
        out = values.clone()
        for order, start in zip(self.orders, first, strict=True):
            place = (order + start)[:, None].expand(-1, 2, -1)
            part = values[:, :, start : start + order.shape[1]]
            out.scatter_(2, place if values.dim() == 3 else place[..., None].expand_as(part), part)
        return out

    def step(self, descent: Descent, k: int, sloped: bool, for_x: int = 1, for_y: int = 1) -> bool:
        """The softmins of a step, False where they are better summed over all pairs."""
        settings, listed = descent.task.steps[k], descent.listed
        epsilons = [settings[b * listed][0] for b in range(len(self.fields))]
        if not all(field.may_pay(epsilon) for field, epsilon in zip(self.fields, epsilons, strict=True)):
            return False
        parts = PARTS[: 4 if descent.layout.debias else 2]
        wanted = [part for part, (rows, _) in enumerate(parts) if (for_x, for_y)[rows % 2]]
        works = [
            (b, part, sides)
            for b, epsilon in enumerate(epsilons)
            for part, sides in self._sides(descent, b, epsilon, wanted)
        ]
        tolerance = near.TOLERANCE[torch.float32]
        lists = [self.count(sides, torch.full_like(sides.rows[0], tolerance)) for *_, sides in works]
        size = self.shape.columns**2
        all_pairs = sum(sides.rows.shape[1] * sides.columns.shape[1] for *_, sides in works) * size
        count = int(torch.stack([each.counts.sum() for each in lists]).sum())
        if CLEARLY * count * size > all_pairs:
            return False
        sums = [self._run(descent, k, sloped, work, each) for work, each in zip(works, lists, strict=True)]
        least = [self._least(part) for part in sums]
        failed = [~(each.lefts <= tolerance * low) for each, low in zip(lists, least, strict=True)]
        some = torch.stack([part.any() for part in failed]).tolist()
        for (_, _, sides), again, work, bad, low, part in zip(works, some, works, failed, least, sums, strict=True):
            if again:
                allowed = torch.where(bad, GUESSED * tolerance * low, 0.0)
                self._run(descent, k, sloped, work, self.count(sides, allowed), part)
        sound = torch.stack([((part > TINY) & (part < HUGE)).all() for part in sums]).all()
        self.taken += bool(sound)
        return bool(sound)

    def rehearse(self, descent: Descent) -> None:
        """Launch every kernel of a step once, on nothing that is there: to be compiled."""
        for part, sides in self._sides(descent, 0, 1.0, [0]):
            lists = self.count(sides, torch.zeros_like(sides.rows[0]))
            offsets, tiles = lists.counts.cumsum(0), lists.counts
            self.fill(sides, lists, offsets, tiles, 0, 1, 0)
            for sloped in {False, any(descent.layout.need)}:
                self.sums(descent, 0, sloped, (0, part), (lists.lefts.float(), tiles, offsets, tiles), 0, 1, 0)

    def _sides(self, descent: Descent, b: int, epsilon: float, wanted: list[int]) -> Iterator[tuple[int, Sides]]:
        """Of one problem's softmins."""
        layout, told = descent.layout, {}
        for side in sorted({side for part in wanted for side in PARTS[part]}):
            which, own = side % 2, side // 2
            pad = (layout.blocks_x, layout.blocks_y)[which] * PAD
            points, weights = (descent.points_x, descent.points_y)[which], self.clouds[1 + 2 * which]
            at = (b * 2 + own) * layout.rows + which * layout.blocks_x * PAD
            places = b * pad * layout.d, descent.turn * descent.state + at, b * weights.stride(0)
            told[side] = self.tell((points, descent.potentials, weights), places, weights.shape[1], pad, epsilon)
        for part in wanted:
            yield part, Sides(*(told[side] for side in PARTS[part]))

    def tell(
        self, given: tuple[Tensor, ...], places: tuple[int, ...], length: int, pad: int, epsilon: float
    ) -> Tensor:
        """What bounds need of the tiles of so many points (d, pad), their potentials and weights, from these places
        on."""
        from .triton_near_kernels import tell

        size, d = self.shape.columns, self.d
        blocks = -(-length // size)
        told = torch.empty(3 * d + 3, blocks, dtype=torch.float64, device=given[0].device)
        args = (*given, told, *places, length, pad, blocks, math.sqrt(epsilon), epsilon)
        Launch(tell, blocks, args, (d, size), (("num_warps", 4),))()
        return told

    def count(self, sides: Sides, allowed: Tensor) -> Lists:
        """Which tiles count where so much may be left out of the sums of each tile of rows."""
        from .triton_near_kernels import count

        blocks, others = sides.rows.shape[1], sides.columns.shape[1]
        found = Lists(allowed.clone(), allowed.new_empty(blocks, dtype=torch.int32), allowed.clone())
        args = (*sides, allowed, *found, blocks, others)
        Launch(count, blocks, args, (self.d, COLUMNS), (("num_warps", 4),))()
        return found

    @property
    def d(self) -> int:
        """Coordinates."""
        return self.clouds.x.shape[2]

    def _run(
        self, descent: Descent, k: int, sloped: bool, work: tuple[int, int, Sides], lists: Lists,
        sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The sums over the lists, some tiles of rows after others; what follows from them goes to its place."""
        b, part, sides = work
        n = self.clouds[2 * (PARTS[part][0] % 2)].shape[1]
        sums = lists.lefts.new_zeros(n, dtype=torch.float32) if sums is None else sums
        ends = lists.counts.cumsum(0)
        offsets = ends - lists.counts
        first, bounds = 0, ends.tolist()
        while first < len(bounds):
            base = bounds[first - 1] if first else 0
            last = first + 1
            while last < len(bounds) and bounds[last] - base <= TOGETHER:
                last += 1
            if bounds[last - 1] > base:
                tiles = torch.empty(bounds[last - 1] - base, dtype=torch.int32, device=sums.device)
                self.fill(sides, lists, offsets, tiles, first, last, base)
                self.sums(descent, k, sloped, (b, part), (sums, tiles, offsets, lists.counts), first, last, base)
            first = last
        return sums

    def fill(
        self, sides: Sides, lists: Lists, offsets: Tensor, tiles: Tensor, first: int, last: int, base: int
    ) -> None:
        """Write the lists of some tiles of rows."""
        from .triton_near_kernels import fill

        given = *sides, lists.thresholds, lists.counts, offsets, tiles
        numbers = first, sides.rows.shape[1], sides.columns.shape[1], base
        Launch(fill, last - first, (*given, *numbers), (self.d, COLUMNS), (("num_warps", 4),))()

    def sums(
        self, descent: Descent, k: int, sloped: bool, which: tuple[int, int], lists: tuple[Tensor, ...], first: int,
        last: int, base: int,
    ) -> None:  # fmt: skip
        """The step of some tiles of rows."""
        from .triton_near_kernels import listed

        (b, part), layout, shape = which, descent.layout, self.shape
        rows, columns = (side % 2 for side in PARTS[part])
        own, d, all_rows = part // 2, layout.d, layout.rows
        pads, points = (layout.blocks_x * PAD, layout.blocks_y * PAD), (descent.points_x, descent.points_y)
        state = (b * 2 + own) * all_rows
        states = [state + side * pads[0] for side in (rows, columns)]
        slopes = ((b * 2 + own) * (layout.n + layout.m) + rows * layout.n) * d
        before, after = descent.turn * descent.state, (1 - descent.turn) * descent.state
        scale, to_bits, share, keep, next_bits, _, damping = descent.numbers[k][b * descent.listed]
        length, each = (layout.n, layout.m)[rows], shape.columns // shape.rows
        args = (
            points[rows], points[columns], descent.logs, descent.potentials[before:], descent.potentials[after:],
            descent.biases[before:], descent.biases[after:], descent.slopes, *lists, first * each, length, pads[rows],
            pads[columns], b * pads[rows] * d, b * pads[columns] * d, *states, b * all_rows + rows * pads[0], slopes,
            base, scale, to_bits, share, keep, next_bits, damping,
        )  # fmt: skip
        constants = d, shape.rows, shape.columns, sloped
        options = [("num_warps", shape.warps), ("num_stages", shape.stages)]
        options += [("maxnreg", shape.registers)] if shape.registers and not INTERPRETED else []
        Launch(listed, (last - first) * each, args, constants, tuple(options))()

    def _least(self, sums: Tensor) -> Tensor:
        """In each tile of rows."""
        size = self.shape.columns
        padded = torch.nn.functional.pad(sums, (0, -len(sums) % size), value=math.inf)
        return padded.view(-1, size).amin(1).double()


def _along(points: Tensor, order: Tensor) -> Tensor:
    return points.gather(1, order[:, :, None].expand_as(points))
