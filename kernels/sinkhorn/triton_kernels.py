"""Device code of the Triton kernels. Everything is in base 2, float32.

A score S_ij is −C_ij log₂e/ε up to terms of i alone and of j alone, which the potentials absorb:
``DOT``     S = x'·y' with x' = (x − centre) √(2 log₂e/ε): squared distances through the matrix units, each operand split into
            two float16 parts, x' = hi + lo, and three products accumulated in float32 (22 bits of every operand);
``FMA``     S = −Σ_k (x'_k − y'_k)² with x' = (x − centre) √(log₂e/ε): few coordinates, direct differences;
``MATRIX``  S = −M log₂e/ε.
An update is u_i = −log₂ Σ_j 2^(S_ij + bias_j) with bias_j = v_j + log₂ b_j.
"""

from __future__ import annotations

import triton
import triton.language as tl

DOT = tl.constexpr(0)
FMA = tl.constexpr(1)
MATRIX = tl.constexpr(2)
# A row sum outside of [TINY, HUGE] was taken around a bad stabiliser and is taken again around its own maximum.
HUGE = tl.constexpr(2.0**90)
TINY = tl.constexpr(2.0**-90)


@triton.jit(do_not_specialize=["n", "d", "stride_b", "stride_n"])
def prepare_dot(
    x, centre, scale, high, low, half_norm, n, padded, d, stride_b, stride_n, stride_d,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Centre, scale and split points: (B, n, d) to two float16 arrays (B, padded, D), and |x'|²/2 of their sum."""
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + 2 * b)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, CHUNK):
        dims = start + tl.arange(0, CHUNK)
        inside = (rows[:, None] < n) & (dims[None, :] < d)
        middle = tl.load(centre + b * d + dims, mask=dims < d, other=0.0)
        where = b * stride_b + rows[:, None].to(tl.int64) * stride_n + dims[None, :].to(tl.int64) * stride_d
        value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
        value = tl.where(inside, value * factor, 0.0)
        hi = value.to(tl.float16)
        lo = (value - hi.to(tl.float32)).to(tl.float16)
        out = (b * padded + rows[:, None]) * D + dims[None, :]
        tl.store(high + out, hi)
        tl.store(low + out, lo)
        both = hi.to(tl.float32) + lo.to(tl.float32)
        total += tl.sum(both * both, 1)
    tl.store(half_norm + b * padded + rows, 0.5 * total * tl.load(scale + 2 * b + 1))


@triton.jit(do_not_specialize=["n", "d", "stride_b", "stride_n"])
def prepare_fma(
    x, centre, scale, out, n, padded, d, stride_b, stride_n, stride_d, BLOCK: tl.constexpr,
):
    """Centre and scale points: (B, n, d) to float32 coordinates (B, d, padded)."""
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + 2 * b)
    for k in range(d):
        middle = tl.load(centre + b * d + k)
        value = tl.load(x + b * stride_b + rows.to(tl.int64) * stride_n + k * stride_d, mask=rows < n, other=0.0)
        value = tl.where(rows < n, (value.to(tl.float32) - middle) * factor, 0.0)
        tl.store(out + (b * d + k) * padded + rows, value)


@triton.jit
def dot_tile(q1, q2, k1, k2, rows, cols, D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr):
    """x'·y' of a tile whose coordinates do not fit at once: chunk by chunk."""
    acc = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for start in range(0, D, CHUNK):
        dims = start + tl.arange(0, CHUNK)
        at_q = rows[:, None].to(tl.int64) * D + dims[None, :]
        at_k = cols[None, :].to(tl.int64) * D + dims[:, None]
        qh, kh = tl.load(q1 + at_q), tl.load(k1 + at_k)
        if PRODUCTS == 3:
            acc = tl.dot(tl.load(q2 + at_q), kh, acc)
            acc = tl.dot(qh, tl.load(k2 + at_k), acc)
        acc = tl.dot(qh, kh, acc)
    return acc


@triton.jit
def fma_tile(
    acc, x0, x1, x2, x3, x4, x5, x6, x7, k1, cols, padded, D: tl.constexpr
):
    """acc − Σ_k (x'_k − y'_k)²."""
    diff = x0[:, None] - tl.load(k1 + cols)[None, :]
    acc = acc - diff * diff
    if D > 1:
        diff = x1[:, None] - tl.load(k1 + padded + cols)[None, :]
        acc = acc - diff * diff
    if D > 2:
        diff = x2[:, None] - tl.load(k1 + 2 * padded + cols)[None, :]
        acc = acc - diff * diff
    if D > 3:
        diff = x3[:, None] - tl.load(k1 + 3 * padded + cols)[None, :]
        acc = acc - diff * diff
    if D > 4:
        diff = x4[:, None] - tl.load(k1 + 4 * padded + cols)[None, :]
        acc = acc - diff * diff
    if D > 5:
        diff = x5[:, None] - tl.load(k1 + 5 * padded + cols)[None, :]
        acc = acc - diff * diff
    if D > 6:
        diff = x6[:, None] - tl.load(k1 + 6 * padded + cols)[None, :]
        acc = acc - diff * diff
    if D > 7:
        diff = x7[:, None] - tl.load(k1 + 7 * padded + cols)[None, :]
        acc = acc - diff * diff
    return acc


@triton.jit
def coordinate(q1, rows, padded, k: tl.constexpr, D: tl.constexpr):
    """Coordinate k of some rows, zero beyond the last."""
    if k < D:
        out = tl.load(q1 + k * padded + rows)
    else:
        out = tl.zeros([rows.shape[0]], tl.float32)
    return out


@triton.jit
def row_sums(
    q1, q2, k1, k2, bias, u, rows, n, m, first, last, slope, stride_q, stride_k, pad_q, pad_k,
    KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr, BLOCK_N: tl.constexpr,
    TRACK: tl.constexpr,
):
    """(t_i, s_i) with Σ_j 2^(S_ij + bias_j) = s_i 2^t_i over the columns first … last.

    Around t = −u, the previous potential, or around the running maximum (TRACK). A row sum of a bad stabiliser shows: it
    leaves (TINY, HUGE).
    """
    BLOCK_M: tl.constexpr = rows.shape[0]
    total = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # sums kept apart by column, to meet once at the end
    top = -u
    if TRACK:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if KIND == DOT:
        if D <= CHUNK:
            dims = tl.arange(0, D)
            at_q = rows[:, None].to(tl.int64) * D + dims[None, :]
            qh = tl.load(q1 + at_q)
            if PRODUCTS == 3:
                ql = tl.load(q2 + at_q)
    if KIND == FMA:
        x0 = coordinate(q1, rows, pad_q, 0, D)
        x1 = coordinate(q1, rows, pad_q, 1, D)
        x2 = coordinate(q1, rows, pad_q, 2, D)
        x3 = coordinate(q1, rows, pad_q, 3, D)
        x4 = coordinate(q1, rows, pad_q, 4, D)
        x5 = coordinate(q1, rows, pad_q, 5, D)
        x6 = coordinate(q1, rows, pad_q, 6, D)
        x7 = coordinate(q1, rows, pad_q, 7, D)
    for start in range(first, last, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        base = tl.load(bias + cols)[None, :]
        if not TRACK:
            base = base + u[:, None]
        if KIND == DOT:
            if D <= CHUNK:
                at_k = cols[None, :].to(tl.int64) * D + dims[:, None]
                kh = tl.load(k1 + at_k)
                if PRODUCTS == 3:
                    acc = tl.dot(ql, kh)
                    acc = tl.dot(qh, tl.load(k2 + at_k), acc)
                    acc = tl.dot(qh, kh, acc)
                else:
                    acc = tl.dot(qh, kh)
            else:
                acc = dot_tile(q1, q2, k1, k2, rows, cols, D, CHUNK, PRODUCTS)
            t = acc * slope + base
        elif KIND == FMA:
            t = fma_tile(base + tl.zeros([BLOCK_M, BLOCK_N], tl.float32), x0, x1, x2, x3, x4, x5, x6, x7, k1, cols, pad_k, D)
        else:
            where = rows[:, None].to(tl.int64) * stride_q + cols[None, :].to(tl.int64) * stride_k
            cost = tl.load(q1 + where, mask=(rows[:, None] < n) & (cols[None, :] < m), other=0.0)
            t = cost.to(tl.float32) * slope + base
        if TRACK:
            higher = tl.maximum(top, tl.max(t, 1))
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - pivot) + tl.sum(tl.exp2(t - pivot[:, None]), 1)
            top = higher
        elif KIND == DOT:
            total += tl.sum(tl.exp2(t), 1)
        else:
            spread += tl.exp2(t)
    if KIND != DOT:
        if not TRACK:
            total = tl.sum(spread, 1)
    return top, total


@triton.jit
def merge(top, total, other_top, other_total):
    """Add two sums that are taken around different tops."""
    higher = tl.maximum(tl.where(total > 0, top, float("-inf")), tl.where(other_total > 0, other_top, float("-inf")))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    first = tl.where(total > 0, total * tl.exp2(top - pivot), 0.0)
    second = tl.where(other_total > 0, other_total * tl.exp2(other_top - pivot), 0.0)
    return pivot, first + second


@triton.jit(do_not_specialize=["n", "m", "splits", "tiles_each"])
def update(
    q1, q2, k1, k2, bias, u_in, log_weight, u_out, bias_out, ratio_out, parts, counters, active, slopes,
    n, m, splits, tiles_each, pad_q, pad_k, batch_q, batch_k, stride_q, stride_k,
    KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr,
):
    """One update of every row potential, the columns split over programs; the last program of a block of rows merges."""
    b = tl.program_id(1).to(tl.int64)
    if tl.load(active + b) == 0:
        return
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    blocks = tl.num_programs(0) // splits
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q1 += b * batch_q
    q2 += b * batch_q
    k1 += b * batch_k
    k2 += b * batch_k
    bias += b * pad_k
    at = b * pad_q + rows
    slope = tl.load(slopes + b)
    u = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if not FIRST:
        u = tl.where(rows < n, tl.load(u_in + at), float("-inf"))
    first = split * tiles_each * BLOCK_N
    last = tl.minimum(first + tiles_each * BLOCK_N, pad_k)
    top, total = row_sums(
        q1, q2, k1, k2, bias, u, rows, n, m, first, last, slope, stride_q, stride_k, pad_q, pad_k,
        KIND, D, CHUNK, PRODUCTS, BLOCK_N, FIRST,
    )
    if splits > 1:
        lanes = tl.arange(0, BLOCK_M)
        own = parts + ((b * blocks + block) * splits + split) * 2 * BLOCK_M
        tl.store(own + lanes, top)
        tl.store(own + BLOCK_M + lanes, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + b * blocks + block, 1, sem="acq_rel")
        if arrived % splits != splits - 1:
            return
        tl.debug_barrier()
        every = parts + (b * blocks + block) * splits * 2 * BLOCK_M
        top = tl.load(every + lanes, cache_modifier=".cg")
        total = tl.load(every + BLOCK_M + lanes, cache_modifier=".cg")
        for k in range(1, splits):
            other_top = tl.load(every + 2 * k * BLOCK_M + lanes, cache_modifier=".cg")
            other_total = tl.load(every + (2 * k + 1) * BLOCK_M + lanes, cache_modifier=".cg")
            top, total = merge(top, total, other_top, other_total)
    if not FIRST:
        sound = (total > TINY) & (total < HUGE)
        if tl.min(tl.where(rows < n, sound.to(tl.int32), 1), 0) == 0:
            top, total = row_sums(
                q1, q2, k1, k2, bias, u, rows, n, m, 0, pad_k, slope, stride_q, stride_k, pad_q, pad_k,
                KIND, D, CHUNK, PRODUCTS, BLOCK_N, True,
            )
    after = -(top + tl.log2(total))
    weight = tl.load(log_weight + at)
    tl.store(u_out + at, after, mask=rows < n)
    tl.store(bias_out + at, tl.where(weight == float("-inf"), weight, after + weight), mask=rows < n)
    if not FIRST:
        tl.store(ratio_out + at, tl.exp2(u - after), mask=rows < n)


@triton.jit(do_not_specialize=["iteration", "tolerance", "m"])
def check(
    ratio, weight, active, iterations, error, iteration, tolerance, m, pad, SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):
    """The marginal error of one problem; a problem whose error is below the tolerance leaves the loop."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(active + b) == 0:
        return
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, m, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mass = tl.load(weight + b * m + cols, mask=cols < m, other=0.0)
        violation = mass * (tl.load(ratio + b * pad + cols, mask=cols < m, other=1.0) - 1.0)
        violation = tl.where(mass > 0, violation, 0.0).to(tl.float64)
        total += violation * violation if SQUARED else tl.abs(violation)
    found = tl.sum(total, 0)
    if SQUARED:
        found = tl.sqrt(found)
    tl.store(error + b, found.to(tl.float32))
    tl.store(iterations + b, iteration)
    if found < tolerance:
        tl.store(active + b, 0)


@triton.jit
def meet(counter, target):
    """Wait until every program of a problem has come here; what they wrote before is visible after."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < target:
        arrived = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def around_maximum(t, AXIS: tl.constexpr):
    """(top, total) with Σ 2^t = total 2^top along an axis."""
    top = tl.max(t, AXIS)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    if AXIS == 1:
        return pivot, tl.sum(tl.exp2(t - pivot[:, None]), 1)
    return pivot, tl.sum(tl.exp2(t - pivot[None, :]), 0)


@triton.jit
def gather(parts, count, lanes, pad):
    """Merge the partial sums that ``count`` programs left for the same rows."""
    top = tl.load(parts + lanes, cache_modifier=".cg")
    total = tl.load(parts + pad + lanes, cache_modifier=".cg")
    for k in range(1, count):
        other_top = tl.load(parts + 2 * k * pad + lanes, cache_modifier=".cg")
        other_total = tl.load(parts + (2 * k + 1) * pad + lanes, cache_modifier=".cg")
        top, total = merge(top, total, other_top, other_total)
    return top, total


@triton.jit(do_not_specialize=["n", "m", "tiles_q", "tiles_k", "max_iterations", "check_every", "tolerance"])
def resident(
    q1, q2, k1, k2, row_bias, log_a, log_b, weight, u_out, v_out, iterations, error, row_parts, column_parts, error_parts,
    counters, slopes, n, m, tiles_q, tiles_k, max_iterations, check_every, tolerance, pad_q, pad_k, batch_q, batch_k,
    stride_q, stride_k,
    KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SQUARED: tl.constexpr,
):
    """The whole loop in one launch: each program keeps one tile of scores in registers from the first iteration to the last.

    The programs of a problem meet twice an iteration, to add up partial row sums and partial column sums. All programs
    must run at the same time.
    """
    group = tiles_q * tiles_k
    b = (tl.program_id(0) // group).to(tl.int64)
    tile = tl.program_id(0) % group
    tile_q, tile_k = tile // tiles_k, tile % tiles_k
    rows = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    q1 += b * batch_q
    q2 += b * batch_q
    k1 += b * batch_k
    k2 += b * batch_k
    slope = tl.load(slopes + b)
    if KIND == DOT:
        scores = dot_tile(q1, q2, k1, k2, rows, cols, D, CHUNK, PRODUCTS) * slope
    elif KIND == FMA:
        scores = fma_tile(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32), coordinate(q1, rows, pad_q, 0, D), coordinate(q1, rows, pad_q, 1, D),
            coordinate(q1, rows, pad_q, 2, D), coordinate(q1, rows, pad_q, 3, D), coordinate(q1, rows, pad_q, 4, D),
            coordinate(q1, rows, pad_q, 5, D), coordinate(q1, rows, pad_q, 6, D), coordinate(q1, rows, pad_q, 7, D),
            k1, cols, pad_k, D,
        )
    else:
        where = rows[:, None].to(tl.int64) * stride_q + cols[None, :].to(tl.int64) * stride_k
        cost = tl.load(q1 + where, mask=(rows[:, None] < n) & (cols[None, :] < m), other=0.0)
        scores = cost.to(tl.float32) * slope
    a = tl.load(log_a + b * pad_q + rows)
    c = tl.load(log_b + b * pad_k + cols)
    mass = tl.load(weight + b * m + cols, mask=cols < m, other=0.0)
    own_rows = row_parts + (b * tiles_k + tile_k) * 2 * pad_q + rows
    all_rows = row_parts + b * tiles_k * 2 * pad_q
    own_columns = column_parts + (b * tiles_q + tile_q) * 2 * pad_k + cols
    all_columns = column_parts + b * tiles_q * 2 * pad_k
    counter = counters + b
    met = group
    top, total = around_maximum(scores + tl.load(row_bias + b * pad_q + rows)[:, None], 0)
    tl.store(own_columns, top)
    tl.store(own_columns + pad_k, total)
    meet(counter, met)
    top, total = gather(all_columns, tiles_q, cols, pad_k)
    v = -(top + tl.log2(total))
    u = tl.zeros([BLOCK_M], tl.float32)
    found = 0.0
    iteration = 0
    going = 1
    while going == 1:
        iteration += 1
        bias = tl.where(c == float("-inf"), c, c + v)
        top, total = around_maximum(scores + bias[None, :], 1)
        tl.store(own_rows, top)
        tl.store(own_rows + pad_q, total)
        met += group
        meet(counter, met)
        top, total = gather(all_rows, tiles_k, rows, pad_q)
        u = -(top + tl.log2(total))
        bias_q = tl.where(a == float("-inf"), a, a + u)
        top, total = around_maximum(scores + bias_q[:, None], 0)
        tl.store(own_columns, top)
        tl.store(own_columns + pad_k, total)
        met += group
        meet(counter, met)
        top, total = gather(all_columns, tiles_q, cols, pad_k)
        if ((iteration - 1) % check_every == 0) | (iteration == max_iterations):
            violation = tl.where(mass > 0, mass * (total * tl.exp2(top + v) - 1.0), 0.0)
            part = tl.sum(violation * violation if SQUARED else tl.abs(violation), 0)
            if tile_q == 0:
                tl.store(error_parts + b * tiles_k + tile_k, part)
            met += group
            meet(counter, met)
            found = 0.0
            for k in range(tiles_k):
                found += tl.load(error_parts + b * tiles_k + k, cache_modifier=".cg")
            if SQUARED:
                found = tl.sqrt(found)
            if (found < tolerance) | (iteration == max_iterations):
                going = 0
        if going == 1:
            v = -(top + tl.log2(total))
    if tile_k == 0:
        tl.store(u_out + b * pad_q + rows, u, mask=rows < n)
    if tile_q == 0:
        tl.store(v_out + b * pad_k + cols, v, mask=cols < m)
    if tile == 0:
        tl.store(iterations + b, iteration)
        tl.store(error + b, found)
