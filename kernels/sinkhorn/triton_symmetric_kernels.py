"""Device code of the annealed symmetric loop: every softmin of one step, of a whole batch, in one launch.

Potentials are kept in the unit of the cost, |x − y|²/2 (P = 2) or max(|x − y|, 1e-4) (P = 1), so that a temperature is
only a number given to a launch. Exponents are in base 2. What of the columns enters a softmin comes ready as its bias,
log₂ b_j + g_j log₂e/ε, written by the step before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import DOT, FMA, HUGE, PAD, TINY, coordinate, coordinates, kernel, middle, place, row_sums

FLOOR = tl.constexpr(1e-4)  # the least distance
SETTING = tl.constexpr(7)  # numbers that tell a step what to do
LOG2E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
ARRIVALS = tl.constexpr(4)  # after the arrivals of ``begin`` and the steps that it has counted: those of ``integrate``
MOST_SPREAD = tl.constexpr(1e40)  # no box around numbers in float32 is wider


@kernel
def begin(
    x, y, a, b_weight, points_x, points_y, norm_x, norm_y, logs, bias, potential, counters, arrivals, boxes, table,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, d: tl.int32,
    batch: tl.int32, batch_x: tl.int64, stride_x: tl.int64, stride_dx: tl.int64, batch_y: tl.int64, stride_y: tl.int64,
    stride_dy: tl.int64, batch_a: tl.int64, batch_b: tl.int64, listed: tl.int32, counts: tl.int32, most: tl.int32,
    p: tl.int32, scale: tl.float32, last: tl.float64, lowest: tl.float64, fall: tl.float64, rho: tl.float64,
    KIND: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    """log₂ of the weights, biases without any potential, zero potentials (both states); the padding gets no weight.

    Few coordinates (FMA) are centred and laid out one after the other too: (B, d, padded). Where ``most`` steps are
    room for, the box around all points is measured too, and the last program to come writes the table of the descent.
    Counters are set to zero.
    """
    b, block = place(programs)
    all_rows = (blocks_x + blocks_y) * PAD
    lanes = tl.arange(0, BLOCK)
    for at in range(tl.program_id(0) * BLOCK, counts, tl.num_programs(0) * BLOCK):
        tl.store(counters + at + lanes, tl.zeros([BLOCK], tl.int32), mask=at + lanes < counts)
    if listed != 0:
        scale = tl.load(table + b * SETTING)
    x += b * batch_x
    y += b * batch_y
    is_x = block < blocks_x * (PAD // BLOCK)
    weights, count, norm, padded = a + b * batch_a, n, norm_x, blocks_x * PAD
    cloud, points, stride, stride_d = x, points_x, stride_x, stride_dx
    local = block
    if not is_x:
        weights, count, norm, padded = b_weight + b * batch_b, m, norm_y, blocks_y * PAD
        cloud, points, stride, stride_d = y, points_y, stride_y, stride_dy
        local = block - blocks_x * (PAD // BLOCK)
    rows = local * BLOCK + lanes
    log_weight = tl.log2(tl.maximum(tl.load(weights + rows, mask=rows < count, other=0.0), 0.0))
    value = log_weight
    if KIND == DOT:
        value -= tl.load(norm + b * padded + rows) * scale
    else:
        dims = tl.arange(0, CHUNK)
        centre = middle(x, y, n, m, dims, dims < d, stride_x, stride_y, stride_dx, stride_dy)
        inside = (rows[:, None] < count) & (dims[None, :] < d)
        where = rows[:, None].to(tl.int64) * stride + dims[None, :].to(tl.int64) * stride_d
        found = tl.load(cloud + where, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, found - centre[None, :], 0.0)
        tl.store(points + (b * d + dims[None, :]) * padded + rows[:, None], centred, mask=dims[None, :] < d)
        if most > 0:
            box = boxes + tl.program_id(0) * (2 * CHUNK) + dims
            tl.store(box, tl.min(tl.where(inside, found, float("inf")), 0))
            tl.store(box + CHUNK, tl.max(tl.where(inside, found, float("-inf")), 0))
    all_states = batch.to(tl.int64) * 2 * all_rows
    at = block * BLOCK + lanes
    tl.store(logs + b * all_rows + at, log_weight)
    for which in tl.static_range(4):
        where_state = (which // 2) * all_states + (b * 2 + which % 2) * all_rows + at
        tl.store(bias + where_state, value)
        tl.store(potential + where_state, tl.zeros([BLOCK], tl.float32))
    if KIND == FMA:
        if most > 0:
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
            tl.debug_barrier()
            if arrived == tl.num_programs(0) - 1:
                diameter = diagonal(boxes, d, CHUNK)
                steps = schedule(table, most, p.to(tl.float64), diameter, last, lowest, fall, rho)
                tl.store(arrivals, 0)
                tl.store(arrivals + 1, steps)


@triton.jit
def diagonal(boxes, d, CHUNK: tl.constexpr):
    """Of the box around the boxes that every program has found, in float64."""
    dims, some = tl.arange(0, CHUNK), tl.arange(0, 64)
    low, high = tl.full([CHUNK], float("inf"), tl.float32), tl.full([CHUNK], float("-inf"), tl.float32)
    count = tl.num_programs(0)
    for start in range(0, count, 64):
        inside = (start + some < count)[:, None]
        box = boxes + (start + some)[:, None] * (2 * CHUNK) + dims[None, :]
        low = tl.minimum(low, tl.min(tl.load(box, mask=inside, other=float("inf"), cache_modifier=".cg"), 0))
        box += CHUNK
        high = tl.maximum(high, tl.max(tl.load(box, mask=inside, other=float("-inf"), cache_modifier=".cg"), 0))
    side = tl.where(dims < d, high.to(tl.float64) - low.to(tl.float64), 0.0)
    return tl.sqrt(tl.sum(side * side, 0))


@triton.jit
def temperature(k, between, begun, fall, last):
    """The k-th of the descent: diameter^p, from there ``between`` geometric steps down, then blur^p."""
    higher = tl.exp(begun + fall * tl.maximum(k - 1, 0).to(tl.float64))
    return tl.where(k <= between, higher, last)


@triton.jit
def schedule(table, most, p, diameter, last, lowest, fall, rho):
    """Write what each step but the last is told, as ``numbers_for`` does, and return how many there are.

    ``lowest`` is p log blur and ``fall`` p log scaling. Without a spread of the points there is no descent.
    """
    begun = p * tl.log(diameter)
    between = tl.minimum(tl.maximum(tl.ceil((lowest - begun) / fall), 0.0), most - 3.0)
    between = tl.where((diameter > 0.0) & (diameter < MOST_SPREAD), between, -1.0).to(tl.int32)
    steps = 3 + between
    for start in range(0, steps, 64):
        k = start + tl.arange(0, 64)
        epsilon = temperature(tl.maximum(k - 1, 0), between, begun, fall, last)
        following = temperature(k, between, begun, fall, last)
        damping = 1.0 / (1.0 + epsilon / rho)
        keep = 0.5 * tl.minimum(k, 1).to(tl.float64)
        to_bits, next_bits = (1.0 / epsilon) * LOG2E, (1.0 / following) * LOG2E
        told = table + k * SETTING
        inside = k < steps
        tl.store(told, tl.where(p == 1.0, to_bits, tl.sqrt(0.5 * to_bits)).to(tl.float32), mask=inside)
        tl.store(told + 1, to_bits.to(tl.float32), mask=inside)
        tl.store(told + 2, (epsilon * LN_2 * damping * (1.0 - keep)).to(tl.float32), mask=inside)
        tl.store(told + 3, keep.to(tl.float32), mask=inside)
        tl.store(told + 4, next_bits.to(tl.float32), mask=inside)
        tl.store(told + 5, tl.where(p == 1.0, next_bits, tl.sqrt(0.5 * next_bits)).to(tl.float32), mask=inside)
        tl.store(told + 6, damping.to(tl.float32), mask=inside)
    return steps


@triton.jit
def near_top(
    x0, x1, x2, x3, x4, x5, x6, x7, k1, bias, first, last, scale, pad_k, D: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The largest exponent of each row, zero where none is finite."""
    BLOCK_M: tl.constexpr = x0.shape[0]
    top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        base = tl.load(bias + cols)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        d0 = x0[:, None] - (tl.load(k1 + cols) * scale)[None, :]
        acc = acc - d0 * d0
        if D > 1:
            d1 = x1[:, None] - (tl.load(k1 + pad_k + cols) * scale)[None, :]
            acc = acc - d1 * d1
        if D > 2:
            d2 = x2[:, None] - (tl.load(k1 + 2 * pad_k + cols) * scale)[None, :]
            acc = acc - d2 * d2
        if D > 3:
            d3 = x3[:, None] - (tl.load(k1 + 3 * pad_k + cols) * scale)[None, :]
            acc = acc - d3 * d3
        if D > 4:
            d4 = x4[:, None] - (tl.load(k1 + 4 * pad_k + cols) * scale)[None, :]
            acc = acc - d4 * d4
        if D > 5:
            d5 = x5[:, None] - (tl.load(k1 + 5 * pad_k + cols) * scale)[None, :]
            acc = acc - d5 * d5
        if D > 6:
            d6 = x6[:, None] - (tl.load(k1 + 6 * pad_k + cols) * scale)[None, :]
            acc = acc - d6 * d6
        if D > 7:
            d7 = x7[:, None] - (tl.load(k1 + 7 * pad_k + cols) * scale)[None, :]
            acc = acc - d7 * d7
        if P == 1:
            squares = tl.maximum(-acc, FLOOR * scale * FLOOR * scale)
            acc = -squares * tl.rsqrt(squares)
        top = tl.maximum(top, base + acc)
    found = tl.max(top, 1)
    return tl.where(found == float("-inf"), 0.0, found)


@triton.jit
def near_sums(
    x0, x1, x2, x3, x4, x5, x6, x7, k1, bias, u, first, last, scale, pad_k, tiles, D: tl.constexpr, P: tl.constexpr,
    BLOCK_N: tl.constexpr, SLOPE: tl.constexpr, LISTED: tl.constexpr,
):
    """(s_i, Σ_j w_ij (x_i − y_j)) with Σ_j 2^(S_ij + bias_j) = s_i 2^(−u_i), from direct differences.

    Over the columns from ``first`` to ``last``, or over those of so many tiles of BLOCK_N in a list. Slopes have w = e
    (P = 2), or e over the distance (P = 1), in scaled units. Written out by coordinate: calls of functions take most of
    the time of compiling.
    """
    EACH: tl.constexpr = 1 if LISTED else BLOCK_N
    BLOCK_M: tl.constexpr = x0.shape[0]
    WIDTH: tl.constexpr = BLOCK_N if SLOPE else 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # sums kept apart by column, to meet once at the end
    none = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    s0, s1, s2, s3, s4, s5, s6, s7 = none, none, none, none, none, none, none, none
    for at in range(first, last, EACH):
        start = at
        if LISTED:
            start = tl.load(tiles + at) * BLOCK_N
        cols = start + tl.arange(0, BLOCK_N)
        acc = tl.load(bias + cols)[None, :] + u[:, None]
        base = acc
        if P == 1:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        d0 = x0[:, None] - (tl.load(k1 + cols) * scale)[None, :]
        acc = acc - d0 * d0
        if D > 1:
            d1 = x1[:, None] - (tl.load(k1 + pad_k + cols) * scale)[None, :]
            acc = acc - d1 * d1
        if D > 2:
            d2 = x2[:, None] - (tl.load(k1 + 2 * pad_k + cols) * scale)[None, :]
            acc = acc - d2 * d2
        if D > 3:
            d3 = x3[:, None] - (tl.load(k1 + 3 * pad_k + cols) * scale)[None, :]
            acc = acc - d3 * d3
        if D > 4:
            d4 = x4[:, None] - (tl.load(k1 + 4 * pad_k + cols) * scale)[None, :]
            acc = acc - d4 * d4
        if D > 5:
            d5 = x5[:, None] - (tl.load(k1 + 5 * pad_k + cols) * scale)[None, :]
            acc = acc - d5 * d5
        if D > 6:
            d6 = x6[:, None] - (tl.load(k1 + 6 * pad_k + cols) * scale)[None, :]
            acc = acc - d6 * d6
        if D > 7:
            d7 = x7[:, None] - (tl.load(k1 + 7 * pad_k + cols) * scale)[None, :]
            acc = acc - d7 * d7
        if P == 1:
            squares = tl.maximum(-acc, FLOOR * scale * FLOOR * scale)
            inverse = tl.rsqrt(squares)
            acc = base - squares * inverse
        e = tl.exp2(acc)
        total += e
        if SLOPE:
            weight = e
            if P == 1:
                weight = tl.where(squares > FLOOR * scale * FLOOR * scale, e * inverse, 0.0)
            s0 += weight * d0
            if D > 1:
                s1 += weight * d1
            if D > 2:
                s2 += weight * d2
            if D > 3:
                s3 += weight * d3
            if D > 4:
                s4 += weight * d4
            if D > 5:
                s5 += weight * d5
            if D > 6:
                s6 += weight * d6
            if D > 7:
                s7 += weight * d7
    total = tl.sum(total, 1)
    if SLOPE:
        s0, s1, s2, s3 = tl.sum(s0, 1), tl.sum(s1, 1), tl.sum(s2, 1), tl.sum(s3, 1)
        s4, s5, s6, s7 = tl.sum(s4, 1), tl.sum(s5, 1), tl.sum(s6, 1), tl.sum(s7, 1)
    else:
        zero = tl.zeros([BLOCK_M], tl.float32)
        s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    return total, s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def bad(total, inside):
    """Whether some row's sum has left the range of numbers."""
    sound = (total > TINY) & (total < HUGE)
    return tl.min(tl.where(inside, sound.to(tl.int32), 1), 0) == 0


@triton.jit
def put(parts, slot, value, lanes, k: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Leave partial sum k of a program where the last one will find it."""
    if k < D:
        tl.store(parts + (slot * WIDTH + k) * BLOCK_M + lanes, value)


@triton.jit
def add_up(
    parts, slot, splits, value, lanes, k: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """Partial sum k of all programs of these rows, always in the same order."""
    out = value
    if k < D:
        out = tl.load(parts + (slot * WIDTH + k) * BLOCK_M + lanes, cache_modifier=".cg")
        for other in range(1, splits):
            out += tl.load(parts + ((slot + other) * WIDTH + k) * BLOCK_M + lanes, cache_modifier=".cg")
    return out


@triton.jit
def put_all(
    parts, slot, total, s0, s1, s2, s3, s4, s5, s6, s7, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, counter
):
    """Leave partial sums, and say so; the result tells how many came before."""
    WIDTH: tl.constexpr = COUNT + 1
    lanes = tl.arange(0, BLOCK_M)
    put(parts, slot, total, lanes, COUNT, WIDTH, BLOCK_M, WIDTH)
    if COUNT > 0:
        put(parts, slot, s0, lanes, 0, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s1, lanes, 1, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s2, lanes, 2, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s3, lanes, 3, COUNT, BLOCK_M, WIDTH)
    if COUNT > 4:
        put(parts, slot, s4, lanes, 4, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s5, lanes, 5, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s6, lanes, 6, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s7, lanes, 7, COUNT, BLOCK_M, WIDTH)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    return arrived


@triton.jit
def add_all(parts, slot, splits, total, s0, s1, s2, s3, s4, s5, s6, s7, COUNT: tl.constexpr, BLOCK_M: tl.constexpr):
    """What all programs of these rows have left."""
    WIDTH: tl.constexpr = COUNT + 1
    lanes = tl.arange(0, BLOCK_M)
    total = add_up(parts, slot, splits, total, lanes, COUNT, WIDTH, BLOCK_M, WIDTH)
    if COUNT > 0:
        s0 = add_up(parts, slot, splits, s0, lanes, 0, COUNT, BLOCK_M, WIDTH)
        s1 = add_up(parts, slot, splits, s1, lanes, 1, COUNT, BLOCK_M, WIDTH)
        s2 = add_up(parts, slot, splits, s2, lanes, 2, COUNT, BLOCK_M, WIDTH)
        s3 = add_up(parts, slot, splits, s3, lanes, 3, COUNT, BLOCK_M, WIDTH)
    if COUNT > 4:
        s4 = add_up(parts, slot, splits, s4, lanes, 4, COUNT, BLOCK_M, WIDTH)
        s5 = add_up(parts, slot, splits, s5, lanes, 5, COUNT, BLOCK_M, WIDTH)
        s6 = add_up(parts, slot, splits, s6, lanes, 6, COUNT, BLOCK_M, WIDTH)
        s7 = add_up(parts, slot, splits, s7, lanes, 7, COUNT, BLOCK_M, WIDTH)
    return total, s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def put_slope(out, value, factor, inside, k: tl.constexpr, D: tl.constexpr):
    """Coordinate k of the slopes."""
    if k < D:
        tl.store(out + k, value * factor, mask=inside)


@triton.jit
def conclude(
    softmin, total, s0, s1, s2, s3, s4, s5, s6, s7, old, weight, inside, after, next_bias, slope_out, next_norms, scale,
    share, keep, next_bits, damping, D: tl.constexpr, P: tl.constexpr, SLOPE: tl.constexpr,
):
    """Write what follows from the sums of some rows: potentials, the biases of the next step, slopes."""
    new = tl.where(share == 0.0, old, keep * old + share * softmin)
    tl.store(after, new, mask=inside)
    onward = tl.where(weight == float("-inf"), weight, weight + new * next_bits - next_norms)
    tl.store(next_bias, onward, mask=inside)
    if SLOPE:
        factor = damping / total
        if P == 2:
            factor = factor / scale
        put_slope(slope_out, s0, factor, inside, 0, D)
        put_slope(slope_out, s1, factor, inside, 1, D)
        put_slope(slope_out, s2, factor, inside, 2, D)
        put_slope(slope_out, s3, factor, inside, 3, D)
        if D > 4:
            put_slope(slope_out, s4, factor, inside, 4, D)
            put_slope(slope_out, s5, factor, inside, 5, D)
            put_slope(slope_out, s6, factor, inside, 6, D)
            put_slope(slope_out, s7, factor, inside, 7, D)


@triton.jit
def job(
    b, program, x1, x2, y1, y2, norm_x, norm_y, logs, before, after, bias, next_bias, slope_out, parts, counters,
    slopes, programs, n, m, blocks_x, blocks_y, tiles_x, tiles_y, splits_x, splits_y, tiles_each, most_tiles, chunks,
    scale, to_bits, share, keep, next_bits, next_scale, damping,
    KIND: tl.constexpr, D: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
):
    """One program's share of a step; the last program of a block of rows merges."""
    pad_x, pad_y = blocks_x * PAD, blocks_y * PAD
    part = 0
    local = program
    if local >= tiles_x * splits_y:
        local -= tiles_x * splits_y
        part = 1
        if local >= tiles_y * splits_x:
            local -= tiles_y * splits_x
            part = 2
            if local >= tiles_x * splits_x:
                local -= tiles_x * splits_x
                part = 3
    own = part // 2
    width = coordinates(chunks, D)
    x1 += b * pad_x * width
    x2 += b * pad_x * width
    y1 += b * pad_y * width
    y2 += b * pad_y * width
    q1, q2, norm, count, pad_q, offset, first_out = x1, x2, norm_x + b * pad_x, n, pad_x, 0, 0
    if part % 2 == 1:
        q1, q2, norm, count, pad_q, offset, first_out = y1, y2, norm_y + b * pad_y, m, pad_y, pad_x, n
    k1, k2, length, splits, pad_k, offset_k = y1, y2, m, splits_y, pad_y, pad_x
    if (part == 1) | (part == 2):
        k1, k2, length, splits, pad_k, offset_k = x1, x2, n, splits_x, pad_x, 0
    block, split = local // splits, local % splits
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < count
    state = (b * 2 + own) * (pad_x + pad_y)
    at = state + offset + rows
    old = tl.load(before + at, mask=inside, other=0.0)
    norms = tl.zeros([BLOCK_M], tl.float32)
    if KIND == DOT:
        norms = tl.load(norm + rows)
    u = tl.where(inside, old * to_bits - norms * scale, float("-inf"))
    bias += state + offset_k
    first = split * tiles_each * BLOCK_N
    every = tl.cdiv(length, BLOCK_N) * BLOCK_N
    last = tl.minimum(first + tiles_each * BLOCK_N, every)
    zero = tl.zeros([BLOCK_M], tl.float32)
    total, s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    COUNT: tl.constexpr = D if SLOPE else 0
    counter = counters + (b * 4 + part) * most_tiles + block
    slot = b * programs + program
    finishes = splits == 1
    if KIND == FMA:
        x0, x1 = coordinate(q1, rows, pad_q, 0, D) * scale, coordinate(q1, rows, pad_q, 1, D) * scale
        x2, x3 = coordinate(q1, rows, pad_q, 2, D) * scale, coordinate(q1, rows, pad_q, 3, D) * scale
        x4, x5 = coordinate(q1, rows, pad_q, 4, D) * scale, coordinate(q1, rows, pad_q, 5, D) * scale
        x6, x7 = coordinate(q1, rows, pad_q, 6, D) * scale, coordinate(q1, rows, pad_q, 7, D) * scale
        attempt, going = 0, 1
        while going == 1:
            total, s0, s1, s2, s3, s4, s5, s6, s7 = near_sums(
                x0, x1, x2, x3, x4, x5, x6, x7, k1, bias, u, first, last, scale, pad_k, bias, D, P, BLOCK_N, SLOPE,
                False,
            )  # fmt: skip
            going = 0
            if attempt == 0:
                if splits > 1:
                    arrived = put_all(parts, slot, total, s0, s1, s2, s3, s4, s5, s6, s7, COUNT, BLOCK_M, counter)
                    finishes = arrived % splits == splits - 1
                    if finishes:
                        total, s0, s1, s2, s3, s4, s5, s6, s7 = add_all(
                            parts, slot - split, splits, total, s0, s1, s2, s3, s4, s5, s6, s7, COUNT, BLOCK_M
                        )
                if finishes:
                    if bad(total, inside):
                        u = -near_top(
                            x0, x1, x2, x3, x4, x5, x6, x7, k1, bias, 0, every, scale, pad_k, D, P, BLOCK_N
                        )
                        first, last, attempt, going = every * 0, every, 1, 1
        top = -u
    else:
        slope = tl.load(slopes + b) * scale
        top, total = row_sums(
            q1, q2, k1, k2, bias, u, rows, count, length, first, last, slope, 0, 0, pad_q, pad_k, width,
            KIND, D, CHUNK, PRODUCTS, BLOCK_N, False, STAGES,
        )  # fmt: skip
        if splits > 1:
            arrived = put_all(parts, slot, total, s0, s1, s2, s3, s4, s5, s6, s7, COUNT, BLOCK_M, counter)
            finishes = arrived % splits == splits - 1
            if finishes:
                total, s0, s1, s2, s3, s4, s5, s6, s7 = add_all(
                    parts, slot - split, splits, total, s0, s1, s2, s3, s4, s5, s6, s7, COUNT, BLOCK_M
                )
        if finishes:
            if bad(total, inside):
                top, total = row_sums(
                    q1, q2, k1, k2, bias, u, rows, count, length, 0, every, slope, 0, 0, pad_q, pad_k, width,
                    KIND, D, CHUNK, PRODUCTS, BLOCK_N, True, 1,
                )  # fmt: skip
    if finishes:
        weight = tl.load(logs + b * (pad_x + pad_y) + offset + rows)
        conclude(
            norms * scale - top - tl.log2(total), total, s0, s1, s2, s3, s4, s5, s6, s7, old, weight, inside,
            after + at, next_bias + at, slope_out + ((b * 2 + own) * (n + m) + first_out + rows) * D,
            norms * next_scale, scale, share, keep, next_bits, damping, D, P, SLOPE,
        )  # fmt: skip


@triton.jit
def told_by(table, k, b, batch, listed):
    """What step k is told for the b-th problem, from a table for all problems or one for each (``listed``)."""
    table += (k * (1 + listed * (batch - 1)) + listed * b) * SETTING
    return (
        tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3), tl.load(table + 4),
        tl.load(table + 5), tl.load(table + 6),
    )  # fmt: skip


@kernel
def step(
    x1, x2, y1, y2, norm_x, norm_y, logs, before, after, bias, next_bias, slope_out, parts, counters, slopes, table,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, tiles_x: tl.int32,
    tiles_y: tl.int32, splits_x: tl.int32, splits_y: tl.int32, tiles_each: tl.int32, most_tiles: tl.int32,
    chunks: tl.int32, k: tl.int32, batch: tl.int32, listed: tl.int32, scale: tl.float32, to_bits: tl.float32,
    share: tl.float32, keep: tl.float32, next_bits: tl.float32, next_scale: tl.float32, damping: tl.float32,
    KIND: tl.constexpr, D: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
):
    """One step: f ← keep f + share · softmin for f of x against y, y against x, x against x, y against y.

    Columns are split over programs. ``tiles_x`` blocks of rows of x (0: leave them out) meet ``splits_y`` parts of the
    columns y, and so on.
    """
    b, program = place(programs)
    if listed != 0:
        scale, to_bits, share, keep, next_bits, next_scale, damping = told_by(table, k, b, batch, 1)
    job(
        b, program, x1, x2, y1, y2, norm_x, norm_y, logs, before, after, bias, next_bias, slope_out, parts, counters,
        slopes, programs, n, m, blocks_x, blocks_y, tiles_x, tiles_y, splits_x, splits_y, tiles_each, most_tiles,
        chunks, scale, to_bits, share, keep, next_bits, next_scale, damping,
        KIND, D, P, CHUNK, PRODUCTS, BLOCK_M, BLOCK_N, STAGES, SLOPE,
    )  # fmt: skip


@triton.jit
def meet(counter, target):
    """Wait until every program has come here; what they wrote before is visible after."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < target:
        arrived = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@kernel
def descend(
    points_x, points_y, logs, potentials, biases, parts, counters, meeting, arrivals, table,
    batch: tl.int32, steps: tl.int32, programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32,
    blocks_y: tl.int32, tiles_x: tl.int32, tiles_y: tl.int32, splits_x: tl.int32, splits_y: tl.int32,
    tiles_each: tl.int32, most_tiles: tl.int32, listed: tl.int32,
    D: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Some steps in one launch, for few coordinates. All programs must run at the same time: they meet after each step.

    ``potentials`` and ``biases`` hold two states each, which take turns so that the first one is the last to be
    written. Where ``steps`` is 0 it was counted on the card (``begin``).
    """
    first, count = tl.program_id(0), tl.num_programs(0)
    size = batch.to(tl.int64) * 2 * (blocks_x + blocks_y) * PAD
    if steps == 0:
        steps = tl.load(arrivals + 1)
    for k in range(steps):
        now, other = ((steps - k) % 2) * size, (1 - (steps - k) % 2) * size
        for number in range(first, programs * batch, count):
            b = (number // programs).to(tl.int64)
            scale, to_bits, share, keep, next_bits, next_scale, damping = told_by(table, k, b, batch, listed)
            job(
                b, number % programs, points_x, points_x, points_y, points_y, points_x, points_y, logs,
                potentials + now, potentials + other, biases + now, biases + other, parts, parts, counters, parts,
                programs, n, m, blocks_x, blocks_y, tiles_x, tiles_y, splits_x, splits_y, tiles_each, most_tiles, 0,
                scale, to_bits, share, keep, next_bits, next_scale, damping,
                FMA, D, P, D, 1, BLOCK_M, BLOCK_N, 1, False,
            )  # fmt: skip
        meet(meeting, (k + 1) * count)


@kernel
def integrate(
    values, slopes, a, b_weight, phi_x, phi_y, by_x, by_y, partial, arrivals, sum_out,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, d: tl.int32,
    batch_a: tl.int64, batch_b: tl.int64, balanced: tl.int32, debias: tl.int32, for_x: tl.int32, for_y: tl.int32,
    for_a: tl.int32, for_b: tl.int32, rho: tl.float32, strength: tl.float32, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    """φ of every point, its weighted sum over all points, and the gradients by the points; what is wanted of them.

    Balanced: φ = f − own. Under a reach: strength (e^(−own/ρ) − e^(−f/ρ)), with own = 0 where nothing is debiased. Sums
    are taken in float64, over blocks of points first; the last program of a problem adds those up.
    """
    b, block = place(programs)
    all_rows = (blocks_x + blocks_y) * PAD
    weights, count, phi_out, by, wanted, offset, first = a + b * batch_a, n, phi_x + b * n, by_x, for_x, 0, 0
    by_place, keeps = b * n, for_a
    local = block
    x_programs = blocks_x * (PAD // BLOCK)
    if block >= x_programs:
        local = block - x_programs
        weights, count, phi_out, by, wanted = b_weight + b * batch_b, m, phi_y + b * m, by_y, for_y
        offset, first, by_place, keeps = blocks_x * PAD, n, b * m, for_b
    rows = local * BLOCK + tl.arange(0, BLOCK)
    inside = rows < count
    state = values + b * 2 * all_rows + offset + rows
    across = tl.load(state, mask=inside, other=0.0)
    own = tl.zeros([BLOCK], tl.float32)
    if debias != 0:
        own = tl.load(state + all_rows, mask=inside, other=0.0)
    weight = tl.load(weights + rows, mask=inside, other=0.0)
    phi = across - own
    across_rate = weight
    own_rate = weight
    if balanced == 0:
        left = tl.exp(-across.to(tl.float64) / rho)
        own_left = tl.exp(-own.to(tl.float64) / rho)
        phi = (strength * (own_left - left)).to(tl.float32)
        across_rate = (weight * (strength / rho * left)).to(tl.float32)
        own_rate = (weight * (strength / rho * own_left)).to(tl.float32)
    tl.store(phi_out + rows, phi, mask=inside & (keeps != 0))
    tl.store(partial + b * programs + block, tl.sum(tl.where(inside, weight * phi, 0.0).to(tl.float64), 0))
    if wanted != 0:
        for start in range(0, d, CHUNK):
            dims = start + tl.arange(0, CHUNK)
            there = inside[:, None] & (dims[None, :] < d)
            where = (first + rows[:, None]).to(tl.int64) * d + dims[None, :]
            own_slopes = slopes + (2 * b + 1) * (n + m) * d
            total = tl.load(slopes + 2 * b * (n + m) * d + where, mask=there, other=0.0) * across_rate[:, None]
            if debias != 0:
                total -= tl.load(own_slopes + where, mask=there, other=0.0) * own_rate[:, None]
            out = (by_place + rows[:, None].to(tl.int64)) * d + dims[None, :]
            tl.store(by + out, total, mask=there)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + ARRIVALS + b, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == programs - 1:
        tl.store(arrivals + ARRIVALS + b, 0)
        lanes = tl.arange(0, BLOCK)
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(0, programs, BLOCK):
            some = partial + b * programs + start + lanes
            sums += tl.load(some, mask=start + lanes < programs, other=0.0, cache_modifier=".cg")
        tl.store(sum_out + b, tl.sum(sums, 0).to(tl.float32))
