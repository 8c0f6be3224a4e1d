"""Device code of the way back through many softmins of the same costs.

Half step t has a plan P_t,ij = 2^(S_ij + r_t,i + c_t,j), whose rows add up to one, and a gradient by its rows. What it
gives to the gradient by the costs is W_ij = Σ_t P_t,ij w_t, whatever comes of the costs then: so points meet all plans
at once, and a matrix' gradient is written once. Half steps of the other direction have weights by column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import (
    DOT,
    PAD,
    add_column,
    bits_per_unit,
    coordinates,
    held_rows,
    kernel,
    known_strides,
    of_problem,
    place,
    score_tile,
    scores_beside,
    store_column,
)


@triton.jit
def dual_bits(log_weight, potential, at, inside, unit):
    """(log b + g/ε) log₂e, −∞ without mass and beyond the last."""
    log_mass = tl.load(log_weight + at, mask=inside, other=float("-inf"))
    value = tl.load(potential + at, mask=inside, other=0.0)
    bits = (value.to(tl.float64) * unit + log_mass.to(tl.float64) * 1.4426950408889634).to(tl.float32)
    return tl.where(log_mass == float("-inf"), log_mass, bits)


@kernel
def lay_dual(
    log_weight, potential, epsilon, norm_k, bias, programs: tl.int32, m: tl.int32, stride_epsilon: tl.int64,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):
    """What an update takes of its columns, padded, from log b and g."""
    b, block = place(programs)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    unit = bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
    bits = dual_bits(log_weight, potential, b * m + cols, cols < m, unit)
    at = b * programs * PAD + cols
    if KIND == DOT:
        bits -= tl.load(norm_k + at)
    tl.store(bias + at, bits)


@kernel
def set_down(
    log_weight, given, softmin, gradient, epsilon, norm_q, norm_k, rows_out, columns_out, weights_out,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, stride_epsilon: tl.int64,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):
    """A half step's r, c and weights, padded: from its softmin and the gradient by it, and from log b + g/ε.

    Rows that may go nowhere (softmin +∞) and columns that are left out (log b −∞) have no part.
    """
    b, block = place(programs)
    unit = bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
    if block < blocks_q:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(softmin + b * n + rows, mask=rows < n, other=float("inf"))
        weight = tl.load(gradient + b * n + rows, mask=rows < n, other=0.0)
        at = b * blocks_q * PAD + rows
        bits = (value.to(tl.float64) * unit).to(tl.float32)
        if KIND == DOT:
            bits -= tl.load(norm_q + at)
        nowhere = value == float("inf")
        tl.store(rows_out + at, tl.where(nowhere, float("-inf"), bits))
        tl.store(weights_out + at, tl.where(nowhere, 0.0, weight))
    else:
        cols = (block - blocks_q) * BLOCK + tl.arange(0, BLOCK)
        bits = dual_bits(log_weight, given, b * m + cols, cols < m, unit)
        at = b * blocks_k * PAD + cols
        if KIND == DOT:
            bits -= tl.load(norm_k + at)
        tl.store(columns_out + at, bits)


@triton.jit
def weighted_plans(scores, r_a, c_a, w_a, count_a, r_b, c_b, w_b, count_b, rows, cols, step_q, step_k):
    """Σ_t P_t w_t of a tile: over plans with weights by row, then over those with weights by column."""
    found = tl.zeros_like(scores)
    for t in range(count_a):
        bits = scores + tl.load(r_a + t * step_q + rows)[:, None] + tl.load(c_a + t * step_k + cols)[None, :]
        found += tl.exp2(bits) * tl.load(w_a + t * step_q + rows)[:, None]
    for t in range(count_b):
        bits = scores + tl.load(r_b + t * step_q + rows)[:, None] + tl.load(c_b + t * step_k + cols)[None, :]
        found += tl.exp2(bits) * tl.load(w_b + t * step_k + cols)[None, :]
    return found


@kernel
def pull(
    q1, q2, k1, k2, r_a, c_a, w_a, r_b, c_b, w_b, values, sums, out, slopes, count_a: tl.int32, count_b: tl.int32,
    programs: tl.int32, splits: tl.int32, tiles_each: tl.int32, problems: tl.int32, n: tl.int32, m: tl.int32,
    width_out: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, chunks: tl.int32, batch_values: tl.int64,
    step_q: tl.int64, step_k: tl.int64, batch: tl.int64, stride_q: tl.int64, stride_k: tl.int64, KIND: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):
    """Σ_j W_ij (V_j, 1) by parts of the columns: sums (parts, B, n), and out (parts, B, n, k) where there are values.

    Up to four columns of values are multiplied one by one and added up along the rows at the end; more go through the
    matrix units, as three products of rounded parts of float32.
    """
    b, program = place(programs)
    HELD: tl.constexpr = BLOCK_V if BLOCK_V > 4 else 1
    slices = tl.cdiv(width_out, HELD) if BLOCK_V > 4 else 1
    split, program = program % splits, program // splits
    block, part = program // slices, program % slices
    pad_q, pad_k = blocks_q * PAD, blocks_k * PAD
    width = coordinates(chunks, D)
    q1, q2, k1, k2 = of_problem(q1, q2, k1, k2, b, batch, pad_q, pad_k, width, KIND)
    stride_q, stride_k = known_strides(stride_q, stride_k, UNIT, ALIGN)
    r_a, w_a, r_b = r_a + b * pad_q, w_a + b * pad_q, r_b + b * pad_q
    c_a, c_b, w_b = c_a + b * pad_k, c_b + b * pad_k, w_b + b * pad_k
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    which = part * HELD + tl.arange(0, HELD)
    slope = tl.load(slopes + b)
    values += b * batch_values
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    a0, a1, a2, a3 = tl.zeros_like(total), tl.zeros_like(total), tl.zeros_like(total), tl.zeros_like(total)
    acc = tl.zeros([BLOCK_M, HELD], tl.float32)
    high, low = held_rows(q1, q2, rows, KIND, D, PRODUCTS)
    first = split * tiles_each * BLOCK_N
    last = tl.minimum(first + tiles_each * BLOCK_N, m)
    DEPTH: tl.constexpr = STAGES if KIND != DOT or D > 0 else 1
    for start in tl.range(first, last, BLOCK_N, num_stages=DEPTH):
        cols = start + tl.arange(0, BLOCK_N)
        scores = scores_beside(
            high, low, q1, q2, k1, k2, rows, cols, n, m, slope, stride_q, stride_k, pad_q, pad_k, width, KIND, D, CHUNK,
            PRODUCTS,
        )
        tile = weighted_plans(scores, r_a, c_a, w_a, count_a, r_b, c_b, w_b, count_b, rows, cols, step_q, step_k)
        total += tile
        if BLOCK_V > 4:
            there = (cols[:, None] < m) & (which[None, :] < width_out)
            v = tl.load(values + cols[:, None].to(tl.int64) * width_out + which[None, :], mask=there, other=0.0)
            acc = tl.dot(tile, v, acc, input_precision="tf32x3")
        else:
            a0 = add_column(a0, tile, values, cols, m, 1.0, 0, BLOCK_V, True)
            a1 = add_column(a1, tile, values, cols, m, 1.0, 1, BLOCK_V, True)
            a2 = add_column(a2, tile, values, cols, m, 1.0, 2, BLOCK_V, True)
            a3 = add_column(a3, tile, values, cols, m, 1.0, 3, BLOCK_V, True)
    at = (split * problems + b) * n
    if BLOCK_V > 4:
        there = (rows[:, None] < n) & (which[None, :] < width_out)
        tl.store(out + (at + rows[:, None]) * width_out + which[None, :], acc, mask=there)
    else:
        out += at * width_out
        store_column(out, a0, 1.0, rows, n, 0, BLOCK_V, True)
        store_column(out, a1, 1.0, rows, n, 1, BLOCK_V, True)
        store_column(out, a2, 1.0, rows, n, 2, BLOCK_V, True)
        store_column(out, a3, 1.0, rows, n, 3, BLOCK_V, True)
    if part == 0:
        tl.store(sums + at + rows, tl.sum(total, 1), mask=rows < n)


@kernel
def pull_entries(
    matrix, r_a, c_a, w_a, r_b, c_b, w_b, out, slopes, count_a: tl.int32, count_b: tl.int32, before: tl.int32,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, step_q: tl.int64,
    step_k: tl.int64, batch: tl.int64, stride_q: tl.int64, stride_k: tl.int64, KIND: tl.constexpr, D: tl.constexpr,
    CHUNK: tl.constexpr, PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """W itself (B, n, m), added to what was there ``before``."""
    b, program = place(programs)
    across = tl.cdiv(m, BLOCK_N)
    rows = (program // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (program % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    pad_q, pad_k = blocks_q * PAD, blocks_k * PAD
    stride_q, stride_k = known_strides(stride_q, stride_k, UNIT, ALIGN)
    scores = score_tile(
        matrix + b * batch, matrix, matrix, matrix, rows, cols, n, m, tl.load(slopes + b), stride_q, stride_k, pad_q,
        pad_k, 1, KIND, D, CHUNK, PRODUCTS,
    )
    r_a, w_a, r_b = r_a + b * pad_q, w_a + b * pad_q, r_b + b * pad_q
    c_a, c_b, w_b = c_a + b * pad_k, c_b + b * pad_k, w_b + b * pad_k
    tile = weighted_plans(scores, r_a, c_a, w_a, count_a, r_b, c_b, w_b, count_b, rows, cols, step_q, step_k)
    inside = (rows[:, None] < n) & (cols[None, :] < m)
    at = out + (b * n + rows[:, None]) * m + cols[None, :]
    if before != 0:
        tile += tl.load(at, mask=inside, other=0.0)
    tl.store(at, tile, mask=inside)
