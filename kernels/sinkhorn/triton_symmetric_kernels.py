"""Device code of the annealed symmetric loop: every softmin of one step, of a whole batch, in one launch.

Potentials are kept in the unit of the cost, |x − y|²/2 (P = 2) or max(|x − y|, 1e-4) (P = 1), so that a temperature is
only a number given to a launch. Exponents are in base 2. What of the columns enters a softmin comes ready as its bias,
log₂ b_j + g_j log₂e/ε, written by the step before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import DOT, FMA, HUGE, PAD, TINY, coordinate, coordinates, kernel, place, row_sums

FLOOR = tl.constexpr(1e-4)  # the least distance


@kernel
def begin(
    a, b_weight, norm_x, norm_y, logs, bias, other_bias, potential, table,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, batch_a: tl.int64,
    batch_b: tl.int64, listed: tl.int32, scale: tl.float32, KIND: tl.constexpr, BLOCK: tl.constexpr,
):
    """log₂ of the weights, biases without any potential, zero potentials; the padding gets no weight."""
    b, block = place(programs)
    all_rows = (blocks_x + blocks_y) * PAD
    if listed != 0:
        scale = tl.load(table + b * 7)
    is_x = block < blocks_x
    weights, count, norm, padded = a + b * batch_a, n, norm_x, blocks_x * PAD
    own = block
    if not is_x:
        weights, count, norm, padded = b_weight + b * batch_b, m, norm_y, blocks_y * PAD
        own = block - blocks_x
    rows = own * BLOCK + tl.arange(0, BLOCK)
    log_weight = tl.log2(tl.maximum(tl.load(weights + rows, mask=rows < count, other=0.0), 0.0))
    value = log_weight
    if KIND == DOT:
        value -= tl.load(norm + b * padded + rows) * scale
    at = block * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logs + b * all_rows + at, log_weight)
    for which in tl.static_range(2):
        where = (b * 2 + which) * all_rows + at
        tl.store(bias + where, value)
        tl.store(other_bias + where, nothing)
        tl.store(potential + where, tl.zeros([BLOCK], tl.float32))


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
def gathered(total, fade, weight, diff, k: tl.constexpr, D: tl.constexpr, SLOPE: tl.constexpr, TRACK: tl.constexpr):
    """total · fade + weight · diff, where it is wanted."""
    if SLOPE and k < D:
        if TRACK:
            out = total * fade[:, None] + weight * diff
        else:
            out = total + weight * diff
    else:
        out = total
    return out


@triton.jit
def room(rows, k: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, SLOPE: tl.constexpr):
    """Zeros for the sums of coordinate k, next to none where it is not wanted."""
    if SLOPE and k < D:
        out = tl.zeros([rows.shape[0], BLOCK_N], tl.float32)
    else:
        out = tl.zeros([rows.shape[0], 1], tl.float32)
    return out


@triton.jit
def near_sums(
    q1, k1, bias, u, rows, first, last, scale, pad_q, pad_k, D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    TRACK: tl.constexpr, SLOPE: tl.constexpr,
):
    """(t_i, s_i, Σ_j w_ij (x_i − y_j)) with Σ_j 2^(S_ij + bias_j) = s_i 2^t_i, from direct differences.

    Around t = −u, the previous potential, or around the running maximum (TRACK). Slopes have w = e (P = 2), or e over
    the distance (P = 1), in scaled units.
    """
    BLOCK_M: tl.constexpr = rows.shape[0]
    x0 = coordinate(q1, rows, pad_q, 0, D) * scale
    x1 = coordinate(q1, rows, pad_q, 1, D) * scale
    x2 = coordinate(q1, rows, pad_q, 2, D) * scale
    x3 = coordinate(q1, rows, pad_q, 3, D) * scale
    x4 = coordinate(q1, rows, pad_q, 4, D) * scale
    x5 = coordinate(q1, rows, pad_q, 5, D) * scale
    x6 = coordinate(q1, rows, pad_q, 6, D) * scale
    x7 = coordinate(q1, rows, pad_q, 7, D) * scale
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # sums kept apart by column, to meet once at the end
    s0, s1 = room(rows, 0, D, BLOCK_N, SLOPE), room(rows, 1, D, BLOCK_N, SLOPE)
    s2, s3 = room(rows, 2, D, BLOCK_N, SLOPE), room(rows, 3, D, BLOCK_N, SLOPE)
    s4, s5 = room(rows, 4, D, BLOCK_N, SLOPE), room(rows, 5, D, BLOCK_N, SLOPE)
    s6, s7 = room(rows, 6, D, BLOCK_N, SLOPE), room(rows, 7, D, BLOCK_N, SLOPE)
    top = -u
    if TRACK:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    floor = FLOOR * scale
    for start in range(first, last, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        base = tl.load(bias + cols)[None, :]
        if not TRACK:
            base = base + u[:, None]
        d0, d1 = gap(x0, k1, cols, pad_k, scale, 0, D), gap(x1, k1, cols, pad_k, scale, 1, D)
        d2, d3 = gap(x2, k1, cols, pad_k, scale, 2, D), gap(x3, k1, cols, pad_k, scale, 3, D)
        d4, d5 = gap(x4, k1, cols, pad_k, scale, 4, D), gap(x5, k1, cols, pad_k, scale, 5, D)
        d6, d7 = gap(x6, k1, cols, pad_k, scale, 6, D), gap(x7, k1, cols, pad_k, scale, 7, D)
        acc = base
        if P == 1:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = less_square(less_square(acc, d0, 0, D), d1, 1, D)
        acc = less_square(less_square(acc, d2, 2, D), d3, 3, D)
        acc = less_square(less_square(acc, d4, 4, D), d5, 5, D)
        acc = less_square(less_square(acc, d6, 6, D), d7, 7, D)
        if P == 1:
            squares = tl.maximum(-acc, floor * floor)
            inverse = tl.rsqrt(squares)
            acc = base - squares * inverse
        fade = u
        if TRACK:
            higher = tl.maximum(top, tl.max(acc, 1))
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp2(top - pivot)
            e = tl.exp2(acc - pivot[:, None])
            total = total * fade[:, None] + e
            top = higher
        else:
            e = tl.exp2(acc)
            total += e
        weight = e
        if SLOPE:
            if P == 1:
                weight = tl.where(squares > floor * floor, e * inverse, 0.0)
        s0 = gathered(s0, fade, weight, d0, 0, D, SLOPE, TRACK)
        s1 = gathered(s1, fade, weight, d1, 1, D, SLOPE, TRACK)
        s2 = gathered(s2, fade, weight, d2, 2, D, SLOPE, TRACK)
        s3 = gathered(s3, fade, weight, d3, 3, D, SLOPE, TRACK)
        s4 = gathered(s4, fade, weight, d4, 4, D, SLOPE, TRACK)
        s5 = gathered(s5, fade, weight, d5, 5, D, SLOPE, TRACK)
        s6 = gathered(s6, fade, weight, d6, 6, D, SLOPE, TRACK)
        s7 = gathered(s7, fade, weight, d7, 7, D, SLOPE, TRACK)
    return (
        top, tl.sum(total, 1), tl.sum(s0, 1), tl.sum(s1, 1), tl.sum(s2, 1), tl.sum(s3, 1), tl.sum(s4, 1),
        tl.sum(s5, 1), tl.sum(s6, 1), tl.sum(s7, 1),
    )  # fmt: skip


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
def put_slope(out, value, factor, inside, k: tl.constexpr, D: tl.constexpr):
    """Coordinate k of the slopes."""
    if k < D:
        tl.store(out + k, value * factor, mask=inside)


@kernel
def step(
    x1, x2, y1, y2, norm_x, norm_y, logs, before, after, bias, next_bias, slope_out, parts, counters, slopes, table,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, tiles_x: tl.int32,
    tiles_y: tl.int32, splits_x: tl.int32, splits_y: tl.int32, tiles_each: tl.int32, most_tiles: tl.int32,
    chunks: tl.int32, listed: tl.int32, scale: tl.float32, to_bits: tl.float32, share: tl.float32, keep: tl.float32,
    next_bits: tl.float32, next_scale: tl.float32, damping: tl.float32,
    KIND: tl.constexpr, D: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
):
    """One step: f ← keep f + share · softmin for f of x against y, y against x, x against x, y against y.

    Columns are split over programs, and the last program of a block of rows merges. ``tiles_x`` blocks of rows of x
    (0: leave them out) meet ``splits_y`` parts of the columns y, and so on.
    """
    b, program = place(programs)
    if listed != 0:
        table += b * 7
        scale, to_bits, share = tl.load(table), tl.load(table + 1), tl.load(table + 2)
        keep, next_bits, next_scale = tl.load(table + 3), tl.load(table + 4), tl.load(table + 5)
        damping = tl.load(table + 6)
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
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    shrink = 1.0
    if KIND == FMA:
        top, total, s0, s1, s2, s3, s4, s5, s6, s7 = near_sums(
            q1, k1, bias, u, rows, first, last, scale, pad_q, pad_k, D, P, BLOCK_N, False, SLOPE
        )
    else:
        shrink = tl.load(slopes + b) * scale
        top, total = row_sums(
            q1, q2, k1, k2, bias, u, rows, count, length, first, last, shrink, 0, 0, pad_q, pad_k, width,
            KIND, D, CHUNK, PRODUCTS, BLOCK_N, False, STAGES,
        )  # fmt: skip
    COUNT: tl.constexpr = D if SLOPE else 0
    WIDTH: tl.constexpr = COUNT + 1
    if splits > 1:
        lanes = tl.arange(0, BLOCK_M)
        slot = tl.program_id(0).to(tl.int64)
        tl.store(parts + (slot * WIDTH + COUNT) * BLOCK_M + lanes, total)
        put(parts, slot, s0, lanes, 0, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s1, lanes, 1, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s2, lanes, 2, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s3, lanes, 3, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s4, lanes, 4, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s5, lanes, 5, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s6, lanes, 6, COUNT, BLOCK_M, WIDTH)
        put(parts, slot, s7, lanes, 7, COUNT, BLOCK_M, WIDTH)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + (b * 4 + part) * most_tiles + block, 1, sem="acq_rel")
        if arrived % splits != splits - 1:
            return
        tl.debug_barrier()
        slot -= split
        total = tl.load(parts + (slot * WIDTH + COUNT) * BLOCK_M + lanes, cache_modifier=".cg")
        for other in range(1, splits):
            total += tl.load(parts + ((slot + other) * WIDTH + COUNT) * BLOCK_M + lanes, cache_modifier=".cg")
        s0 = add_up(parts, slot, splits, s0, lanes, 0, COUNT, BLOCK_M, WIDTH)
        s1 = add_up(parts, slot, splits, s1, lanes, 1, COUNT, BLOCK_M, WIDTH)
        s2 = add_up(parts, slot, splits, s2, lanes, 2, COUNT, BLOCK_M, WIDTH)
        s3 = add_up(parts, slot, splits, s3, lanes, 3, COUNT, BLOCK_M, WIDTH)
        s4 = add_up(parts, slot, splits, s4, lanes, 4, COUNT, BLOCK_M, WIDTH)
        s5 = add_up(parts, slot, splits, s5, lanes, 5, COUNT, BLOCK_M, WIDTH)
        s6 = add_up(parts, slot, splits, s6, lanes, 6, COUNT, BLOCK_M, WIDTH)
        s7 = add_up(parts, slot, splits, s7, lanes, 7, COUNT, BLOCK_M, WIDTH)
    sound = (total > TINY) & (total < HUGE)
    if tl.min(tl.where(inside, sound.to(tl.int32), 1), 0) == 0:
        if KIND == FMA:
            top, total, s0, s1, s2, s3, s4, s5, s6, s7 = near_sums(
                q1, k1, bias, u, rows, 0, every, scale, pad_q, pad_k, D, P, BLOCK_N, True, SLOPE
            )
        else:
            top, total = row_sums(
                q1, q2, k1, k2, bias, u, rows, count, length, 0, every, shrink, 0, 0, pad_q, pad_k, width,
                KIND, D, CHUNK, PRODUCTS, BLOCK_N, True, 1,
            )  # fmt: skip
    softmin = norms * scale - top - tl.log2(total)
    new = tl.where(share == 0.0, old, keep * old + share * softmin)
    tl.store(after + at, new, mask=inside)
    weight = tl.load(logs + b * (pad_x + pad_y) + offset + rows)
    onward = tl.where(weight == float("-inf"), weight, weight + new * next_bits - norms * next_scale)
    tl.store(next_bias + at, onward, mask=inside)
    if SLOPE:
        factor = damping / total
        if P == 2:
            factor = factor / scale
        out = slope_out + ((b * 2 + own) * (n + m) + first_out + rows) * D
        put_slope(out, s0, factor, inside, 0, D)
        put_slope(out, s1, factor, inside, 1, D)
        put_slope(out, s2, factor, inside, 2, D)
        put_slope(out, s3, factor, inside, 3, D)
        put_slope(out, s4, factor, inside, 4, D)
        put_slope(out, s5, factor, inside, 5, D)
        put_slope(out, s6, factor, inside, 6, D)
        put_slope(out, s7, factor, inside, 7, D)


@kernel
def integrate(
    values, slopes, a, b_weight, phi_x, phi_y, by_x, by_y, partial,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_x: tl.int32, blocks_y: tl.int32, d: tl.int32,
    batch_a: tl.int64, batch_b: tl.int64, balanced: tl.int32, debias: tl.int32, for_x: tl.int32, for_y: tl.int32,
    rho: tl.float32, strength: tl.float32, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    """φ of every point, its weighted sum over a block of points in float64, and the gradients by the points.

    Balanced: φ = f − own. Under a reach: strength (e^(−own/ρ) − e^(−f/ρ)), with own = 0 where nothing is debiased.
    """
    b, block = place(programs)
    all_rows = (blocks_x + blocks_y) * PAD
    weights, count, phi_out, by, wanted, offset, first = a + b * batch_a, n, phi_x + b * n, by_x, for_x, 0, 0
    by_place = b * n
    local = block
    x_programs = blocks_x * (PAD // BLOCK)
    if block >= x_programs:
        local = block - x_programs
        weights, count, phi_out, by, wanted = b_weight + b * batch_b, m, phi_y + b * m, by_y, for_y
        offset, first, by_place = blocks_x * PAD, n, b * m
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
    tl.store(phi_out + rows, phi, mask=inside)
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
