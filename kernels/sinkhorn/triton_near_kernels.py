"""Device code of steps over the tiles of columns that count: which they are, their list, and the sums over it.

In float64 and units of the blur ``tell`` tells of every tile of points the centre and half of the box around it, an
affine bound of its potentials (tilt, top), its mass, and how large such numbers are: 3 D + 3 numbers, laid out one
after the other, tile by tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import near
from .triton_kernels import coordinate, kernel
from .triton_symmetric_kernels import conclude, near_sums

CLOSE = tl.constexpr(float(near.CLOSE))
LARGEST = tl.constexpr(700.0)  # exponent of float64
ROUNDED = tl.constexpr(1e-14)  # of the numbers that a bound is made of: more than rounding may have taken off it


@kernel
def tell(
    points, potentials, weights, told, at_points: tl.int64, at_potentials: tl.int64, at_weights: tl.int64,
    length: tl.int32, pad: tl.int32, blocks: tl.int32, blur: tl.float64, epsilon: tl.float64,
    D: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """φ = potential/ε of a tile's points is top + tilt·u + rest with u from the centre and no rest above zero.

    Any tilt gives a bound. This one is fitted coordinate by coordinate to what those before have left, twice.
    """
    tile = tl.program_id(0)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < length
    count = tl.sum(inside.to(tl.float64), 0)
    rest = tl.load(potentials + at_potentials + at, mask=inside, other=0.0).to(tl.float64) / epsilon
    rough = 0.0 * epsilon
    for sweep in tl.static_range(2):
        for k in tl.static_range(D):
            x = tl.load(points + at_points + k * pad + at, mask=inside, other=0.0).to(tl.float64) / blur
            low, high = tl.min(tl.where(inside, x, float("inf")), 0), tl.max(tl.where(inside, x, float("-inf")), 0)
            centre, half = 0.5 * (low + high), 0.5 * (high - low)
            u = tl.where(inside, x - centre, 0.0)
            apart = tl.where(inside, u - tl.sum(u, 0) / count, 0.0)
            squares = tl.sum(apart * apart, 0)
            slope = tl.where(squares > 0.0, tl.sum(apart * rest, 0) / tl.where(squares > 0.0, squares, 1.0), 0.0)
            rest -= slope * u
            to = told + (2 * D + k) * blocks + tile
            if sweep == 0:
                tl.store(told + k * blocks + tile, centre)
                tl.store(told + (D + k) * blocks + tile, half)
                tl.store(to, slope)
            else:
                slope += tl.load(to)
                tl.store(to, slope)
                size = tl.abs(centre) + half + tl.abs(slope)
                rough += size * size
        tl.debug_barrier()
    top = tl.max(tl.where(inside, rest, float("-inf")), 0)
    tl.store(told + 3 * D * blocks + tile, top)
    mass = tl.load(weights + at_weights + at, mask=inside, other=0.0).to(tl.float64)
    tl.store(told + (3 * D + 1) * blocks + tile, tl.sum(mass, 0))
    tl.store(told + (3 * D + 2) * blocks + tile, rough + tl.abs(top))


@triton.jit
def sizes(rows, columns, row, at, blocks, others, D: tl.constexpr):
    """What some tiles of columns may add to a row's sum in this tile of rows, at most: ``near.Pair.bounds``."""
    inside = at < others
    bound = tl.load(rows + 3 * D * blocks + row) + tl.load(columns + 3 * D * others + at, mask=inside, other=0.0)
    rough = tl.load(rows + (3 * D + 2) * blocks + row)
    bound += ROUNDED * (rough + tl.load(columns + (3 * D + 2) * others + at, mask=inside, other=0.0))
    for k in tl.static_range(D):
        apart = tl.load(rows + k * blocks + row) - tl.load(columns + k * others + at, mask=inside, other=0.0)
        room = tl.load(rows + (D + k) * blocks + row)
        room += tl.load(columns + (D + k) * others + at, mask=inside, other=0.0)
        tilt = tl.load(rows + (2 * D + k) * blocks + row)
        other = tl.load(columns + (2 * D + k) * others + at, mask=inside, other=0.0)
        middle = 0.5 * (tilt - other) - apart
        beyond = tl.maximum(tl.abs(middle) - room, 0.0)
        bound += 0.5 * (middle * middle - apart * apart - beyond * beyond + tl.abs(tilt + other) * room)
    mass = tl.load(columns + (3 * D + 1) * others + at, mask=inside, other=0.0)
    return tl.where(inside, tl.exp(tl.minimum(bound, LARGEST)) * mass, 0.0)


@triton.jit
def survey(rows, columns, row, blocks, others, threshold, D: tl.constexpr, BLOCK: tl.constexpr):
    """How many tiles reach the threshold, and what the others add up to at most."""
    number, left = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float64)
    for start in range(0, others, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = sizes(rows, columns, row, at, blocks, others, D)
        keep = (found >= threshold) & (at < others)
        number += keep.to(tl.int32)
        left += tl.where(keep, 0.0, found)
    return tl.sum(number, 0), tl.sum(left, 0)


@kernel
def count(
    rows, columns, allowed, thresholds, counts, lefts, blocks: tl.int32, others: tl.int32, D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For every tile of rows: how many tiles of columns count, from which size on they do, and what the others add.

    The others add up to no more than is allowed. Where nothing is allowed nothing is looked at.
    """
    row = tl.program_id(0)
    room = tl.load(allowed + row)
    threshold = room / CLOSE
    number, left = 0, room * 0.0
    if room > 0.0:
        number, left = survey(rows, columns, row, blocks, others, threshold, D, BLOCK)
        if left > room:
            threshold = room / others
            number, left = survey(rows, columns, row, blocks, others, threshold, D, BLOCK)
    tl.store(thresholds + row, threshold)
    tl.store(counts + row, number)
    tl.store(lefts + row, left)


@kernel
def fill(
    rows, columns, thresholds, counts, offsets, tiles, first: tl.int32, blocks: tl.int32, others: tl.int32,
    base: tl.int64, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """The list of those tiles, for some tiles of rows; each list begins at its offset, less ``base``."""
    row = first + tl.program_id(0)
    if tl.load(counts + row) > 0:
        threshold, to = tl.load(thresholds + row), tl.load(offsets + row) - base
        for start in range(0, others, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keep = (sizes(rows, columns, row, at, blocks, others, D) >= threshold) & (at < others)
            kept = keep.to(tl.int32)
            tl.store(tiles + to + tl.cumsum(kept, 0) - 1, at, mask=keep)
            to += tl.sum(kept, 0)


@kernel
def listed(
    q1, k1, logs, before, after, bias, next_bias, slope_out, totals, tiles, offsets, counts,
    first: tl.int32, length: tl.int32, pad_q: tl.int32, pad_k: tl.int32, points_q: tl.int64, points_k: tl.int64,
    state_q: tl.int64, state_k: tl.int64, at_logs: tl.int64, at_slopes: tl.int64, base: tl.int64, scale: tl.float32,
    to_bits: tl.float32, share: tl.float32, keep: tl.float32, next_bits: tl.float32, damping: tl.float32,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOPE: tl.constexpr,
):
    """``job`` of the symmetric loop for some rows of one softmin, over their lists of tiles; and the sums themselves.

    Numbers in 64 bits say where the problem's rows and columns begin in what is given. Rows without a list are left
    alone.
    """
    tile = first + tl.program_id(0)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tile // (BLOCK_N // BLOCK_M)
    number = tl.load(counts + block)
    if number > 0:
        inside = rows < length
        q1 += points_q
        k1 += points_k
        tiles += tl.load(offsets + block) - base
        x0, x1 = coordinate(q1, rows, pad_q, 0, D) * scale, coordinate(q1, rows, pad_q, 1, D) * scale
        x2, x3 = coordinate(q1, rows, pad_q, 2, D) * scale, coordinate(q1, rows, pad_q, 3, D) * scale
        x4, x5 = coordinate(q1, rows, pad_q, 4, D) * scale, coordinate(q1, rows, pad_q, 5, D) * scale
        x6, x7 = coordinate(q1, rows, pad_q, 6, D) * scale, coordinate(q1, rows, pad_q, 7, D) * scale
        old = tl.load(before + state_q + rows, mask=inside, other=0.0)
        u = tl.where(inside, old * to_bits, float("-inf"))
        total, s0, s1, s2, s3, s4, s5, s6, s7 = near_sums(
            x0, x1, x2, x3, x4, x5, x6, x7, k1, bias + state_k, u, 0, number, scale, pad_k, tiles, D, 2, BLOCK_N, SLOPE,
            True,
        )  # fmt: skip
        tl.store(totals + rows, total, mask=inside)
        weight = tl.load(logs + at_logs + rows)
        conclude(
            u - tl.log2(total), total, s0, s1, s2, s3, s4, s5, s6, s7, old, weight, inside, after + state_q + rows,
            next_bias + state_q + rows, slope_out + at_slopes + rows.to(tl.int64) * D, 0.0, scale, share, keep,
            next_bits, damping, D, 2, SLOPE,
        )  # fmt: skip
