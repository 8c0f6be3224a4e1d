"""Sums of a kernel over all pairs of one signed cloud, with their derivatives, in one pass. Few coordinates only."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Shape, launch, processors
from .operator import FLOORS
from .triton import LOG2E, PAD, on
from .triton_kernels import coordinate, kernel, place

GAUSSIAN, LAPLACIAN, ENERGY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"gaussian": 0, "laplacian": 1, "energy": 2}
WAVES = 4  # how often the programs of one launch fill the card


@triton.jit
def gap(x, k1, cols, padded, scale, k: tl.constexpr, D: tl.constexpr):
    """Differences of coordinate k, zero beyond the last."""
    if k < D:
        out = x[:, None] - (tl.load(k1 + k * padded + cols) * scale)[None, :]
    else:
        out = x[:, None]
    return out


@triton.jit
def less_square(acc, diff, k: tl.constexpr, D: tl.constexpr):
    """acc − diff², where there is such a coordinate."""
    if k < D:
        out = acc - diff * diff
    else:
        out = acc
    return out


@triton.jit
def gathered(total, weight, diff, k: tl.constexpr, D: tl.constexpr, SLOPE: tl.constexpr):
    """total + weight · diff, where it is wanted."""
    if SLOPE and k < D:
        out = total + weight * diff
    else:
        out = total
    return out


@triton.jit
def room(rows, k: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, SLOPE: tl.constexpr):
    """Zeros for the sums of coordinate k of some rows, next to none where it is not wanted."""
    if SLOPE and k < D:
        out = tl.zeros([rows.shape[0], BLOCK_N], tl.float32)
    else:
        out = tl.zeros([rows.shape[0], 1], tl.float32)
    return out


@kernel
def pair_sums(
    points, weights, out,
    programs: tl.int32, padded: tl.int32, splits: tl.int32, each: tl.int32, floor: tl.float32,
    KIND: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOPE: tl.constexpr,
):
    """(B, splits, 1 + D, padded): Σ_j k_ij w_j over a part of the columns, and Σ_j ρ_ij w_j (x_i − x_j).

    Points come in the kernel's own unit: k = 2^(−r²), 2^(−r) or −r, and ρ is k, k/r or 1/r. Distances are at least the
    floor, and have no derivative below.
    """
    b, program = place(programs)
    points += b * D * padded
    weights += b * padded
    block, split = program // splits, program % splits
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    x0, x1 = coordinate(points, rows, padded, 0, D), coordinate(points, rows, padded, 1, D)
    x2, x3 = coordinate(points, rows, padded, 2, D), coordinate(points, rows, padded, 3, D)
    x4, x5 = coordinate(points, rows, padded, 4, D), coordinate(points, rows, padded, 5, D)
    x6, x7 = coordinate(points, rows, padded, 6, D), coordinate(points, rows, padded, 7, D)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    s0, s1 = room(rows, 0, D, BLOCK_N, SLOPE), room(rows, 1, D, BLOCK_N, SLOPE)
    s2, s3 = room(rows, 2, D, BLOCK_N, SLOPE), room(rows, 3, D, BLOCK_N, SLOPE)
    s4, s5 = room(rows, 4, D, BLOCK_N, SLOPE), room(rows, 5, D, BLOCK_N, SLOPE)
    s6, s7 = room(rows, 6, D, BLOCK_N, SLOPE), room(rows, 7, D, BLOCK_N, SLOPE)
    for start in range(split * each, tl.minimum(padded, (split + 1) * each), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        d0, d1 = gap(x0, points, cols, padded, 1.0, 0, D), gap(x1, points, cols, padded, 1.0, 1, D)
        d2, d3 = gap(x2, points, cols, padded, 1.0, 2, D), gap(x3, points, cols, padded, 1.0, 3, D)
        d4, d5 = gap(x4, points, cols, padded, 1.0, 4, D), gap(x5, points, cols, padded, 1.0, 5, D)
        d6, d7 = gap(x6, points, cols, padded, 1.0, 6, D), gap(x7, points, cols, padded, 1.0, 7, D)
        acc = less_square(less_square(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), d0, 0, D), d1, 1, D)
        acc = less_square(less_square(acc, d2, 2, D), d3, 3, D)
        acc = less_square(less_square(acc, d4, 4, D), d5, 5, D)
        acc = less_square(less_square(acc, d6, 6, D), d7, 7, D)
        weight = tl.load(weights + cols)[None, :]
        if KIND == GAUSSIAN:
            value = tl.exp2(acc) * weight
            rate = value
        else:
            squares = tl.maximum(-acc, floor * floor)
            inverse = tl.rsqrt(squares)
            if KIND == LAPLACIAN:
                value = tl.exp2(-squares * inverse) * weight
                rate = tl.where(squares > floor * floor, value * inverse, 0.0)
            else:
                value = -squares * inverse * weight
                rate = tl.where(squares > floor * floor, weight * inverse, 0.0)
        total += value
        s0, s1 = gathered(s0, rate, d0, 0, D, SLOPE), gathered(s1, rate, d1, 1, D, SLOPE)
        s2, s3 = gathered(s2, rate, d2, 2, D, SLOPE), gathered(s3, rate, d3, 3, D, SLOPE)
        s4, s5 = gathered(s4, rate, d4, 4, D, SLOPE), gathered(s5, rate, d5, 5, D, SLOPE)
        s6, s7 = gathered(s6, rate, d6, 6, D, SLOPE), gathered(s7, rate, d7, 7, D, SLOPE)
    COUNT: tl.constexpr = D if SLOPE else 0
    out += (b * splits + split) * (1 + COUNT) * padded + rows
    tl.store(out, tl.sum(total, 1))
    left(out, s0, padded, 0, COUNT)
    left(out, s1, padded, 1, COUNT)
    left(out, s2, padded, 2, COUNT)
    left(out, s3, padded, 3, COUNT)
    left(out, s4, padded, 4, COUNT)
    left(out, s5, padded, 5, COUNT)
    left(out, s6, padded, 6, COUNT)
    left(out, s7, padded, 7, COUNT)


@triton.jit
def left(out, total, padded, k: tl.constexpr, D: tl.constexpr):
    """Store the sums of coordinate k."""
    if k < D:
        tl.store(out + (1 + k) * padded, tl.sum(total, 1))


def sums(points: Tensor, weights: Tensor, kind: str, blur: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    """Σ_j k(x_i, x_j) w_j, (B, N), and its derivative by x_i, (B, N, d), the x_j held; all in float32.

    ``kind`` is "gaussian", "laplacian" or "energy": exp(−r²/2σ²), exp(−r/σ) or −r, with σ = ``blur``.
    """
    with on(points.device):
        return _sums(points, weights, kind, blur, slope)


def _sums(points: Tensor, weights: Tensor, kind: str, blur: float, slope: bool) -> tuple[Tensor, Tensor | None]:
    scale = {"gaussian": math.sqrt(LOG2E / 2) / blur, "laplacian": LOG2E / blur, "energy": 1.0}[kind]
    floor = FLOORS["clamped"] * (LOG2E if kind == "laplacian" else 1.0)
    # ∂ of 2^(−r²), 2^(−r) and −r by the points, over what the kernel leaves
    rate = {"gaussian": -2 * scale / LOG2E, "laplacian": -scale / LOG2E, "energy": -1.0}[kind]
    batch, count, d = points.shape
    padded = -(-count // PAD) * PAD
    prepared = points.new_zeros(batch, d, padded, dtype=torch.float32)
    middle = points.mean(1, keepdim=True, dtype=torch.float32)
    torch.mul((points - middle).transpose(1, 2), scale, out=prepared[:, :, :count])
    weights = torch.nn.functional.pad(weights, (0, padded - count))
    found = _partial(prepared, weights, count, KINDS[kind], floor, slope).sum(1)[:, :, :count]
    return found[:, 0], found[:, 1:].transpose(1, 2) * rate if slope else None


def _partial(points: Tensor, weights: Tensor, count: int, kind: int, floor: float, slope: bool) -> Tensor:
    batch, d, padded = points.shape
    shape = Shape(16, 64, 2, 1, 4) if d <= 3 else Shape(8, 64, 2, 1, 4)
    blocks = -(-count // shape.rows)
    splits = max(1, min(padded // PAD, WAVES * shape.resident * processors(points.device) // (blocks * batch)))
    each = -(-padded // (splits * shape.columns)) * shape.columns
    splits = -(-padded // each)
    out = torch.empty(batch, splits, 1 + d * slope, padded, device=points.device)
    args: tuple[Any, ...] = (points, weights, out, blocks * splits, padded, splits, each, floor)
    options = (("num_warps", shape.warps), ("num_stages", shape.stages))
    launch(pair_sums, blocks * splits * batch, args, (kind, d, shape.rows, shape.columns, slope), options)
    return out
