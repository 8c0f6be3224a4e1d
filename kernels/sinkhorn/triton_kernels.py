"""Device code of the Triton kernels. Everything is in base 2, float32.

A score S_ij is −C_ij log₂e/ε up to terms of i alone and of j alone, which the potentials absorb:
``DOT``     S = x'·y' with x' = (x − centre) √(2 log₂e/ε): squared distances through the matrix units, each operand
split into
            two float16 parts, x' = hi + lo, and three products accumulated in float32 (22 bits of every operand);
``FMA``     S = −Σ_k (x'_k − y'_k)² with x' = (x − centre) √(log₂e/ε): few coordinates, direct differences;
``MATRIX``  S = −M log₂e/ε.
An update is u_i = −log₂ Σ_j 2^(S_ij + bias_j) with bias_j = v_j + log₂ b_j.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def kernel(function: Any) -> Any:
    """Compile for any value of the declared numbers: nothing is assumed of what divides them, nothing is compiled
    again."""
    numbers = [name for name, kind in function.__annotations__.items() if "constexpr" not in kind]
    return triton.jit(function, do_not_specialize=numbers)


DOT = tl.constexpr(0)
FMA = tl.constexpr(1)
MATRIX = tl.constexpr(2)
# A row sum outside of [TINY, HUGE] was taken around a bad stabiliser and is taken again around its own maximum.
HUGE = tl.constexpr(2.0**90)
TINY = tl.constexpr(2.0**-90)


# Values that are all smaller than this are scaled as if one were not: RANGE over it is still a number.
LEAST = tl.constexpr(1e-30)


# Prepared arrays are padded to this many rows, so that no load inside a loop needs a mask.
PAD = tl.constexpr(512)


@triton.jit
def place(programs):
    """Which problem a program works for, and its number there. One axis of the grid has room for every batch."""
    return (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs


@triton.jit
def middle(x, y, n, m, dims, inside, stride_x, stride_y, stride_dx, stride_dy):
    """The midpoint of the means of up to 32 points a side, spread over the clouds: near the data, the same for
    everybody.

    Any common shift leaves the costs alone; one near the points keeps the digits.
    """
    some = tl.arange(0, 32)
    at_x = (some.to(tl.int64) * n) // 32
    at_y = (some.to(tl.int64) * m) // 32
    from_x = tl.load(x + at_x[:, None] * stride_x + dims[None, :] * stride_dx, mask=inside[None, :], other=0.0)
    from_y = tl.load(y + at_y[:, None] * stride_y + dims[None, :] * stride_dy, mask=inside[None, :], other=0.0)
    return (tl.sum(from_x.to(tl.float32), 0) + tl.sum(from_y.to(tl.float32), 0)) / 64


@triton.jit
def is_look(iteration, cycle, last, most):
    """Whether the error is looked at after this iteration."""
    return (iteration == 1) | (iteration == last + cycle) | (iteration == most)


@triton.jit
def relaxation(gap, cycle, last, iteration, most, column):
    """The factor of one half step, of rows (``column`` 0) or of the columns after them (1): ω of ``acceleration.py``.

    A gap of 1 makes every factor 1. The row update that is looked at is plain; the column update after it goes by the
    gap from before the look.
    """
    look = is_look(iteration, cycle, last, most)
    steps = 2 * (iteration - tl.where(look, iteration, last)) + column
    q = (1.0 - gap) / (1.0 + gap)
    power = tl.exp2(steps * tl.log2(tl.maximum(q, 1e-30)))
    factor = (1.0 + q) * (1.0 + power) / (1.0 + power * q)
    return tl.where((steps == 0) | (gap >= 1.0), 1.0, factor)


@triton.jit
def relaxed(before, target, factor, log_weight):
    """Beyond the target, as far as the factor says and as no half step loses what it gains; in base 2.

    Where there is no mass, or nothing finite to start from, the target itself.
    """
    change = target - before
    more = (factor - 1.0) * change
    more = tl.where(change > 0, tl.minimum(more, tl.log2(1.0 + change * 0.6931471805599453)), more)
    free = (log_weight > float("-inf")) & (tl.abs(change) < float("inf"))
    return tl.where(free, target + more, target)


@triton.jit
def next_gap(gap, cycle, before, error, iteration, check_every):
    """The gap and the cycle that follow from the error at a look and the one before: ``acceleration.py`` says how.

    In logarithms, since Chebyshev polynomials outgrow float32.
    """
    twice = 2.0 * cycle.to(tl.float32)
    bound = log_cosh(twice * inverse_tangent(gap)) + tl.minimum(tl.log(error / before), 0.0)
    slower = (bound + tl.log(1.0 + tl.sqrt(tl.maximum(1.0 - tl.exp(-2.0 * bound), 0.0)))) / twice
    slower = 0.5 * (tl.exp(slower) - tl.exp(-slower))
    slower = tl.sqrt(tl.maximum(gap * gap - (1.0 - gap * gap) * slower * slower, 0.0))
    following = tl.where(bound > 0.0, slower, tl.minimum(1.0 - 1e-6, 1.4 * gap))
    longer = (following < least_gap(cycle)) & (2 * cycle <= tl.minimum(tl.maximum(check_every, 32), iteration // 2))
    enough = log_cosh(0.5 * twice * inverse_tangent(tl.minimum(following, 1.0 - 1e-6))) > 2.302585092994046  # log 10
    shorter = (cycle > check_every) & enough
    other = tl.where(longer, 2 * cycle, tl.where(shorter, cycle // 2, cycle))
    known = before > 0.0
    return tl.where(known, tl.maximum(following, least_gap(other)), gap), tl.where(known, other, cycle)


@triton.jit
def log_cosh(x):
    """log cosh x for x ≥ 0."""
    return x + tl.log(0.5 + 0.5 * tl.exp(-2.0 * x))


@triton.jit
def inverse_tangent(x):
    """atanh x."""
    return 0.5 * tl.log((1.0 + x) / (1.0 - x))


@triton.jit
def least_gap(cycle):
    """tanh(acosh(2)/(2N))."""
    e = tl.exp(-1.3169578969248166 / cycle.to(tl.float32))
    return (1.0 - e) / (1.0 + e)


@kernel
def prepare(
    x, y, epsilon, q1, q2, k1, k2, norm_q, norm_k, slopes, extents, flags, programs: tl.int32, n: tl.int32, m: tl.int32,
    blocks_q: tl.int32, blocks_k: tl.int32, d: tl.int32, width: tl.int32, again: tl.int32, batch_x: tl.int64,
    stride_x: tl.int64, stride_dx: tl.int64, batch_y: tl.int64, stride_y: tl.int64, stride_dy: tl.int64,
    stride_epsilon: tl.int64, KIND: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Centre and scale the points of both sides: to two float16 arrays (B, padded, width) and |x'|²/2 (DOT), or to
    float32
    coordinates (B, d, padded) (FMA).

    A second launch (``again``) repeats the work with smaller numbers where one would not have fitted into float16; the
    slope makes good for it.
    """
    b, block = place(programs)
    per: tl.constexpr = PAD // BLOCK
    x += b * batch_x
    y += b * batch_y
    unit = tl.load(epsilon + b * stride_epsilon)
    shrink = 1.0
    if KIND == DOT:
        scale = tl.sqrt(2.0 * 1.4426950408889634 / unit).to(tl.float32)
        if again == 1:
            extent = tl.load(extents + b)
            if extent <= 16384.0:
                return
            shrink = tl.exp2(tl.ceil(tl.log2(extent / 16384.0)))
    else:
        scale = tl.sqrt(1.4426950408889634 / unit).to(tl.float32)
    scale = scale / shrink
    if block == 0:
        tl.store(slopes + b, shrink * shrink)
    is_q = block < blocks_q * per
    own, count, padded, stride, stride_d = x, n, blocks_q * PAD, stride_x, stride_dx
    out1, out2, norm = q1, q2, norm_q
    if not is_q:
        block -= blocks_q * per
        own, count, padded, stride, stride_d = y, m, blocks_k * PAD, stride_y, stride_dy
        out1, out2, norm = k1, k2, norm_k
    rows = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    furthest = 0.0
    bad = 0
    for start in range(0, width, CHUNK):
        dims = start + tl.arange(0, CHUNK)
        centre = middle(x, y, n, m, dims, dims < d, stride_x, stride_y, stride_dx, stride_dy)
        inside = (rows[:, None] < count) & (dims[None, :] < d)
        where = rows[:, None].to(tl.int64) * stride + dims[None, :].to(tl.int64) * stride_d
        value = tl.load(own + where, mask=inside, other=0.0).to(tl.float32)
        finite = (value == value) & (tl.abs(value) < float("inf"))
        bad += tl.sum(tl.sum((inside & (finite == 0)).to(tl.int32), 1), 0)
        value = tl.where(inside, (value - centre[None, :]) * scale, 0.0)
        if KIND == DOT:
            furthest = tl.maximum(furthest, tl.max(tl.max(tl.where(finite, tl.abs(value), 0.0), 1), 0))
            hi = value.to(tl.float16)
            lo = (value - hi.to(tl.float32)).to(tl.float16)
            out = (b * padded + rows[:, None]) * width + dims[None, :]
            tl.store(out1 + out, hi)
            tl.store(out2 + out, lo)
            both = hi.to(tl.float32) + lo.to(tl.float32)
            total += tl.sum(both * both, 1)
        else:
            out = (b * width + dims[None, :]) * padded + rows[:, None]
            tl.store(out1 + out, value, mask=dims[None, :] < width)
    if KIND == DOT:
        tl.store(norm + b * padded + rows, 0.5 * total * shrink * shrink)
        if again == 0:
            if furthest > 16384.0:
                tl.atomic_max(extents + b, furthest)
    if bad > 0:
        tl.atomic_max(flags + tl.where(is_q, 0, 1), 1)


@kernel
def start(
    a, b_weight, f, epsilon, norm_q, log_a, log_b, row_bias, column_bias, seen, flags, gaps, cycles, errors,
    gap: tl.float32, check_every: tl.int32, looks: tl.int32, programs: tl.int32, batch: tl.int32, n: tl.int32,
    m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, batch_a: tl.int64, batch_b: tl.int64, batch_f: tl.int64,
    stride_f: tl.int64, stride_epsilon: tl.int64, NORMS: tl.constexpr, BLOCK: tl.constexpr,
):
    """The loop's starting state: log₂ of the weights, row biases from f, empty column biases.

    Notes what was seen of the values: bad coordinates of x and of y, bad weights of either side, masses and ε.
    """
    b, block = place(programs)
    if block == 0:
        tl.store(seen + 4 + 2 * batch + b, tl.load(epsilon + b * stride_epsilon).to(tl.float64))
        tl.store(gaps + 2 * b, gap)
        tl.store(cycles + 2 * b, check_every)
        blank = tl.full([BLOCK], 1.0, tl.float32)
        for first in range(0, looks, BLOCK):
            which = first + tl.arange(0, BLOCK)
            tl.store(errors + b * looks + which, blank * float("nan"), mask=which < looks)
            tl.store(errors + (batch + b) * looks + which, blank, mask=which < looks)
        if b == 0:
            tl.store(seen, tl.load(flags).to(tl.float64))
            tl.store(seen + 1, tl.load(flags + 1).to(tl.float64))
    if block < blocks_q:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(a + b * batch_a + rows, mask=rows < n, other=0.0)
        unit = (tl.load(epsilon + b * stride_epsilon) * 0.6931471805599453).to(tl.float32)
        u = tl.load(f + b * batch_f + rows.to(tl.int64) * stride_f, mask=rows < n, other=0.0) / unit
        at = b * blocks_q * PAD + rows
        if NORMS:
            u -= tl.load(norm_q + at)
        log_weight = tl.log2(weight)
        tl.store(log_a + at, log_weight)
        tl.store(row_bias + at, tl.where((weight > 0) & (u < float("inf")), u + log_weight, float("-inf")))
    else:
        rows = (block - blocks_q) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(b_weight + b * batch_b + rows, mask=rows < m, other=0.0)
        at = b * blocks_k * PAD + rows
        tl.store(log_b + at, tl.log2(weight))
        tl.store(column_bias + at, tl.full([BLOCK], float("-inf"), tl.float32))
    side = tl.where(block < blocks_q, 0, 1)
    tl.atomic_add(seen + 4 + 2 * b + side, tl.sum(weight.to(tl.float64), 0))
    sound = (weight >= 0) & (weight < float("inf"))
    if tl.min(sound.to(tl.int32), 0) == 0:
        tl.store(seen + 2 + side, 1.0)


@kernel
def finish(
    u, v, norm_q, norm_k, epsilon, iterations, error, f_out, g_out, iterations_out, converged, programs: tl.int32,
    n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, other: tl.int64, stride_epsilon: tl.int64,
    tolerance: tl.float32, NORMS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Potentials in the unit of the cost. v lies ``other`` numbers further on after an odd number of iterations."""
    b, block = place(programs)
    unit = (tl.load(epsilon + b * stride_epsilon) * 0.6931471805599453).to(tl.float32)
    ran = tl.load(iterations + b)
    if block < blocks_q:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        at = b * blocks_q * PAD + rows
        value = tl.load(u + at, mask=rows < n)
        if NORMS:
            value += tl.load(norm_q + at)
        tl.store(f_out + b * n + rows, value * unit, mask=rows < n)
    else:
        rows = (block - blocks_q) * BLOCK + tl.arange(0, BLOCK)
        at = b * blocks_k * PAD + rows
        value = tl.load(v + (ran % 2) * other + at, mask=rows < m)
        if NORMS:
            value += tl.load(norm_k + at)
        tl.store(g_out + b * m + rows, value * unit, mask=rows < m)
    if block == 0:
        tl.store(iterations_out + b, ran.to(tl.int64))
        tl.store(converged + b, tl.load(error + b) < tolerance)


@triton.jit
def dot_tile(q1, q2, k1, k2, rows, cols, width, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr, STAGES: tl.constexpr):
    """x'·y' of a tile, some coordinates at a time."""
    acc = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for start in tl.range(0, width, CHUNK, num_stages=STAGES):
        dims = start + tl.arange(0, CHUNK)
        at_q = rows[:, None].to(tl.int64) * width + dims[None, :]
        at_k = cols[None, :].to(tl.int64) * width + dims[:, None]
        qh, kh = tl.load(q1 + at_q), tl.load(k1 + at_k)
        if PRODUCTS == 3:
            acc = tl.dot(tl.load(q2 + at_q), kh, acc)
            acc = tl.dot(qh, tl.load(k2 + at_k), acc)
        acc = tl.dot(qh, kh, acc)
    return acc


@triton.jit
def fma_tile(acc, x0, x1, x2, x3, x4, x5, x6, x7, k1, cols, padded, D: tl.constexpr):
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
    q1, q2, k1, k2, bias, u, rows, n, m, first, last, slope, stride_q, stride_k, pad_q, pad_k, width,
    KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr, BLOCK_N: tl.constexpr,
    TRACK: tl.constexpr, STAGES: tl.constexpr,
):
    """(t_i, s_i) with Σ_j 2^(S_ij + bias_j) = s_i 2^t_i over the columns first … last.

    Around t = −u, the previous potential, or around the running maximum (TRACK). A row sum of a bad stabiliser shows:
    it leaves (TINY, HUGE).
    """
    BLOCK_M: tl.constexpr = rows.shape[0]
    total = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # sums kept apart by column, to meet once at the end
    top = -u
    if TRACK:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if KIND == DOT:
        if D > 0:
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
    # Only the innermost loop is worth a pipeline: over columns, or over coordinates where they do not fit at once.
    DEPTH: tl.constexpr = STAGES if KIND != DOT or D > 0 else 1
    for start in tl.range(first, last, BLOCK_N, num_stages=DEPTH):
        cols = start + tl.arange(0, BLOCK_N)
        base = tl.load(bias + cols)[None, :]
        if not TRACK:
            base = base + u[:, None]
        if KIND == DOT:
            if D > 0:
                at_k = cols[None, :].to(tl.int64) * D + dims[:, None]
                kh = tl.load(k1 + at_k)
                if PRODUCTS == 3:
                    acc = tl.dot(ql, kh)
                    acc = tl.dot(qh, tl.load(k2 + at_k), acc)
                    acc = tl.dot(qh, kh, acc)
                else:
                    acc = tl.dot(qh, kh)
            else:
                acc = dot_tile(q1, q2, k1, k2, rows, cols, width, CHUNK, PRODUCTS, STAGES)
            t = acc * slope + base
        elif KIND == FMA:
            t = fma_tile(base, x0, x1, x2, x3, x4, x5, x6, x7, k1, cols, pad_k, D)
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
def score_tile(
    q1, q2, k1, k2, rows, cols, n, m, slope, stride_q, stride_k, pad_q, pad_k, width, KIND: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr,
):
    """S of a tile."""
    # Little shared memory rather than speed: several such programs must fit on a multiprocessor.
    LITTLE: tl.constexpr = 64 if CHUNK > 64 else CHUNK
    if KIND == DOT:
        scores = dot_tile(q1, q2, k1, k2, rows, cols, width, LITTLE, PRODUCTS, 1) * slope
    elif KIND == FMA:
        scores = fma_tile(
            tl.zeros([rows.shape[0], cols.shape[0]], tl.float32), coordinate(q1, rows, pad_q, 0, D),
            coordinate(q1, rows, pad_q, 1, D), coordinate(q1, rows, pad_q, 2, D), coordinate(q1, rows, pad_q, 3, D),
            coordinate(q1, rows, pad_q, 4, D), coordinate(q1, rows, pad_q, 5, D), coordinate(q1, rows, pad_q, 6, D),
            coordinate(q1, rows, pad_q, 7, D), k1, cols, pad_k, D,
        )
    else:
        where = rows[:, None].to(tl.int64) * stride_q + cols[None, :].to(tl.int64) * stride_k
        cost = tl.load(q1 + where, mask=(rows[:, None] < n) & (cols[None, :] < m), other=0.0)
        scores = cost.to(tl.float32) * slope
    return scores


@triton.jit
def coordinates(chunks, D: tl.constexpr):
    """How many coordinates the prepared points have: known when compiled (D), or whole chunks of 64."""
    if D > 0:
        width = D
    else:
        width = chunks * 64
    return width


@triton.jit
def of_problem(q1, q2, k1, k2, b, batch, pad_q, pad_k, width, KIND: tl.constexpr):
    """Where the b-th problem's rows and columns begin."""
    if KIND == MATRIX:
        places = (q1 + b * batch, q2, k1, k2)
    else:
        places = (q1 + b * pad_q * width, q2 + b * pad_q * width, k1 + b * pad_k * width, k2 + b * pad_k * width)
    return places


@triton.jit
def known_strides(stride_q, stride_k, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """A matrix' strides: which one is 1 is known when compiled, and the other comes divided by ALIGN."""
    if UNIT == 1:
        strides = (1, stride_k * ALIGN)
    elif UNIT == 2:
        strides = (stride_q * ALIGN, 1)
    else:
        strides = (stride_q, stride_k)
    return strides


@triton.jit
def merge(top, total, other_top, other_total):
    """Add two sums that are taken around different tops."""
    higher = tl.maximum(tl.where(total > 0, top, float("-inf")), tl.where(other_total > 0, other_top, float("-inf")))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    first = tl.where(total > 0, total * tl.exp2(top - pivot), 0.0)
    second = tl.where(other_total > 0, other_total * tl.exp2(other_top - pivot), 0.0)
    return pivot, first + second


@kernel
def update(
    q1, q2, k1, k2, bias, u_in, log_weight, u_out, bias_out, ratio_out, parts, counters, done, slopes, gaps, cycles,
    iteration: tl.int32, most: tl.int32, column: tl.int32, programs: tl.int32, n: tl.int32, m: tl.int32,
    splits: tl.int32, tiles_each: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, chunks: tl.int32, batch: tl.int64,
    stride_q: tl.int64, stride_k: tl.int64, KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr,
):
    """One update of every row potential, the columns split over programs; the last program of a block of rows
    merges."""
    b, program = place(programs)
    if tl.load(done + b) != 0:
        return
    pad_q, pad_k = blocks_q * PAD, blocks_k * PAD
    width = coordinates(chunks, D)
    block, split = program // splits, program % splits
    blocks = programs // splits
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q1, q2, k1, k2 = of_problem(q1, q2, k1, k2, b, batch, pad_q, pad_k, width, KIND)
    stride_q, stride_k = known_strides(stride_q, stride_k, UNIT, ALIGN)
    bias += b * pad_k
    at = b * pad_q + rows
    slope = tl.load(slopes + b)
    u = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if not FIRST:
        u = tl.where(rows < n, tl.load(u_in + at), float("-inf"))
    first = split * tiles_each * BLOCK_N
    every_column = tl.cdiv(m, BLOCK_N) * BLOCK_N
    last = tl.minimum(first + tiles_each * BLOCK_N, every_column)
    top, total = row_sums(
        q1, q2, k1, k2, bias, u, rows, n, m, first, last, slope, stride_q, stride_k, pad_q, pad_k, width, KIND, D,
        CHUNK, PRODUCTS, BLOCK_N, FIRST, STAGES,
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
                q1, q2, k1, k2, bias, u, rows, n, m, 0, every_column, slope, stride_q, stride_k, pad_q, pad_k, width,
                KIND, D, CHUNK, PRODUCTS, BLOCK_N, True, 1,
            )
    after = -(top + tl.log2(total))
    weight = tl.load(log_weight + at)
    if not FIRST:
        tl.store(ratio_out + at, tl.exp2(u - after), mask=rows < n)
        cycle, looked = tl.load(cycles + 2 * b), tl.load(cycles + 2 * b + 1)
        factor = relaxation(tl.load(gaps + 2 * b), cycle, looked, iteration, most, column)
        after = relaxed(u, after, factor, weight)
    tl.store(u_out + at, after, mask=rows < n)
    tl.store(bias_out + at, tl.where(weight == float("-inf"), weight, after + weight), mask=rows < n)


@triton.jit
def strip_axis(acc, x, k1, cols, padded, K: tl.constexpr, D: tl.constexpr):
    """acc − (x_k − y_k)², nothing beyond the last coordinate."""
    if K < D:
        apart = x[:, None, None] - tl.load(k1 + K * padded + cols, mask=cols < padded, other=0.0)
        acc = acc - apart * apart
    return acc


@triton.jit
def strip_scores(
    held, x0, x1, x2, x3, x4, x5, x6, x7, bias, u, k1, cols, padded, slope, KIND: tl.constexpr, D: tl.constexpr
):
    """S + bias + u of some whole rows: of costs that were fetched before (MATRIX), or from coordinates (FMA)."""
    t = tl.load(bias + cols, mask=cols < padded, other=float("-inf")) + u[:, None, None]
    if KIND == MATRIX:
        t = held.to(tl.float32) * slope + t
    else:
        t = strip_axis(t, x0, k1, cols, padded, 0, D)
        t = strip_axis(t, x1, k1, cols, padded, 1, D)
        t = strip_axis(t, x2, k1, cols, padded, 2, D)
        t = strip_axis(t, x3, k1, cols, padded, 3, D)
        t = strip_axis(t, x4, k1, cols, padded, 4, D)
        t = strip_axis(t, x5, k1, cols, padded, 5, D)
        t = strip_axis(t, x6, k1, cols, padded, 6, D)
        t = strip_axis(t, x7, k1, cols, padded, 7, D)
    return t


@triton.jit
def strip_costs(q1, rows, cols, step, m, KIND: tl.constexpr):
    """Costs of some whole rows, where there are any."""
    if KIND == MATRIX:
        where = rows[:, None, None].to(tl.int64) * step + cols
        held = tl.load(q1 + where, mask=cols < m, other=0.0, eviction_policy="evict_first")
    else:
        held = 0.0
    return held


@kernel
def strip(
    q1, k1, bias, u, log_weight, u_out, bias_out, parts, done, slopes, gaps, cycles, iteration: tl.int32,
    most: tl.int32, programs: tl.int32, n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32,
    batch: tl.int64, stride: tl.int64, KIND: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # of a matrix, batch, stride and m are counted in ALIGN
    """Row updates, and of the column updates that follow from them each program's share: one exponential for both.

    A program takes some whole rows, one strip after the other, and keeps a row's exponentials e_j until their sum is
    known; a row of weight a and potential u adds a e_j 2^u to the columns. A matrix is read once; while a strip is
    worked on, the next one is on its way. Columns come in two parts, so that few lanes idle whatever their number.
    """
    b, program = place(programs)
    if tl.load(done + b) != 0:
        return
    pad_q, pad_k = blocks_q * PAD, blocks_k * PAD
    m = m * ALIGN
    if KIND == MATRIX:
        q1 += b * batch * ALIGN
    else:
        q1 += b * pad_q * D
        k1 += b * pad_k * D
    u += b * pad_q
    u_out += b * pad_q
    bias_out += b * pad_q
    log_weight += b * pad_q
    bias += b * pad_k
    slope = tl.load(slopes + b)
    cycle, looked = tl.load(cycles + 2 * b), tl.load(cycles + 2 * b + 1)
    factor = relaxation(tl.load(gaps + 2 * b), cycle, looked, iteration, most, 0)
    step = stride * ALIGN
    across = tl.arange(0, WIDE)[None, None, :]
    cols = tl.arange(0, FIRST)[None, :, None] * WIDE + across
    more = (FIRST + tl.arange(0, SECOND)[None, :, None]) * WIDE + across
    share, rest = tl.zeros([1, FIRST, WIDE], tl.float32), tl.zeros([1, SECOND, WIDE], tl.float32)
    lanes = tl.arange(0, BLOCK_M)
    rows = tl.minimum(program * BLOCK_M + lanes, n - 1)
    if AHEAD:
        held = strip_costs(q1, rows, cols, step, m, KIND)
        held2 = strip_costs(q1, rows, more, step, m, KIND)
    for start in tl.range(program * BLOCK_M, n, programs * BLOCK_M, num_stages=1):
        rows = start + lanes
        inside = rows < n
        rows = tl.minimum(rows, n - 1)
        if AHEAD:
            following = tl.minimum(start + programs * BLOCK_M + lanes, n - 1)
            coming = strip_costs(q1, following, cols, step, m, KIND)
            coming2 = strip_costs(q1, following, more, step, m, KIND)
        else:
            held = strip_costs(q1, rows, cols, step, m, KIND)
            held2 = strip_costs(q1, rows, more, step, m, KIND)
        x0 = coordinate(q1, rows, pad_q, 0, D if KIND == FMA else 0)
        x1 = coordinate(q1, rows, pad_q, 1, D if KIND == FMA else 0)
        x2 = coordinate(q1, rows, pad_q, 2, D if KIND == FMA else 0)
        x3 = coordinate(q1, rows, pad_q, 3, D if KIND == FMA else 0)
        x4 = coordinate(q1, rows, pad_q, 4, D if KIND == FMA else 0)
        x5 = coordinate(q1, rows, pad_q, 5, D if KIND == FMA else 0)
        x6 = coordinate(q1, rows, pad_q, 6, D if KIND == FMA else 0)
        x7 = coordinate(q1, rows, pad_q, 7, D if KIND == FMA else 0)
        before = tl.load(u + rows)
        e = tl.exp2(strip_scores(held, x0, x1, x2, x3, x4, x5, x6, x7, bias, before, k1, cols, pad_k, slope, KIND, D))
        e2 = tl.exp2(strip_scores(held2, x0, x1, x2, x3, x4, x5, x6, x7, bias, before, k1, more, pad_k, slope, KIND, D))
        total = tl.sum(tl.sum(e, 1) + tl.sum(e2, 1), 1)
        pivot = -before
        sound = (total > TINY) & (total < HUGE)
        if tl.min(sound.to(tl.int32), 0) == 0:
            zero = tl.zeros([BLOCK_M], tl.float32)
            held = strip_costs(q1, rows, cols, step, m, KIND)
            held2 = strip_costs(q1, rows, more, step, m, KIND)
            t = strip_scores(held, x0, x1, x2, x3, x4, x5, x6, x7, bias, zero, k1, cols, pad_k, slope, KIND, D)
            t2 = strip_scores(held2, x0, x1, x2, x3, x4, x5, x6, x7, bias, zero, k1, more, pad_k, slope, KIND, D)
            top = tl.max(tl.maximum(tl.max(t, 1), tl.max(t2, 1)), 1)
            pivot = tl.where(top == float("-inf"), 0.0, top)
            e, e2 = tl.exp2(t - pivot[:, None, None]), tl.exp2(t2 - pivot[:, None, None])
            total = tl.sum(tl.sum(e, 1) + tl.sum(e2, 1), 1)
        weight = tl.load(log_weight + rows)
        after = relaxed(before, -(pivot + tl.log2(total)), factor, weight)
        mass = tl.where(inside & (total > 0) & (weight > float("-inf")), tl.exp2(weight + after + pivot), 0.0)
        share += tl.sum(e * mass[:, None, None], 0)[None, :, :]
        rest += tl.sum(e2 * mass[:, None, None], 0)[None, :, :]
        tl.store(u_out + rows, after, mask=inside)
        tl.store(bias_out + rows, tl.where(weight == float("-inf"), weight, after + weight), mask=inside)
        if AHEAD:
            held, held2 = coming, coming2
    parts += (b * programs + program) * pad_k
    tl.store(parts + cols, share, mask=cols < pad_k)
    tl.store(parts + more, rest, mask=more < pad_k)


@kernel
def gather(
    q1, k1, parts, bias, v_in, log_weight, v_out, bias_out, ratio_out, done, slopes, gaps, cycles, iteration: tl.int32,
    most: tl.int32, programs: tl.int32, m: tl.int32, n: tl.int32, shares: tl.int32, blocks_k: tl.int32,
    blocks_q: tl.int32, check_every: tl.int32, batch: tl.int64, stride: tl.int64, KIND: tl.constexpr, D: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """The column updates, from what ``strip`` left: v'_j = v_j + log₂ b_j − log₂ Σ shares.

    Shares say nothing of a column without mass; where its potential is wanted, since the next iteration may be the
    last, and where shares have left the range of numbers, the column is read again.
    """
    b, block = place(programs)
    if tl.load(done + b) != 0:
        return
    cols = block * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M], tl.float32)
    parts += b * shares * blocks_k * PAD
    for first in range(0, shares, BLOCK_N):
        which = first + lanes
        where = which[None, :].to(tl.int64) * blocks_k * PAD + cols[:, None]
        total += tl.sum(tl.load(parts + where, mask=(which[None, :] < shares) & (cols[:, None] < m), other=0.0), 1)
    at = b * blocks_k * PAD + cols
    weight = tl.load(log_weight + at)
    before = tl.load(v_in + at, mask=cols < m, other=0.0)
    massive = weight > float("-inf")
    relative_total = tl.where(massive, total / tl.exp2(weight), 1.0)
    sound = (relative_total > TINY) & (relative_total < HUGE)
    if (iteration % check_every == 0) | (iteration + 1 == most):
        sound = sound & massive
    after = tl.where(massive, before - tl.log2(relative_total), before)
    if tl.min(tl.where(cols < m, sound.to(tl.int32), 1), 0) == 0:
        slope = tl.load(slopes + b)
        pad_q, pad_k = blocks_q * PAD, blocks_k * PAD
        k1, k2, q1, q2 = of_problem(k1, k1, q1, q1, b, batch * ALIGN, pad_k, pad_q, D, KIND)
        top, again = row_sums(
            k1, k2, q1, q2, bias + b * pad_q, before, cols, m, n, 0, tl.cdiv(n, BLOCK_N) * BLOCK_N, slope, 1,
            stride * ALIGN, pad_k, pad_q, 1, KIND, D, 1, 1, BLOCK_N, True, 1,
        )
        after = -(top + tl.log2(again))
    tl.store(ratio_out + at, tl.exp2(before - after), mask=cols < m)
    cycle, looked = tl.load(cycles + 2 * b), tl.load(cycles + 2 * b + 1)
    factor = relaxation(tl.load(gaps + 2 * b), cycle, looked, iteration, most, 1)
    after = relaxed(before, after, factor, weight)
    tl.store(v_out + at, after, mask=cols < m)
    tl.store(bias_out + at, tl.where(massive, after + weight, weight), mask=cols < m)


@kernel
def lay(
    t, weights, norm_k, bias, padded, programs: tl.int32, m: tl.int32, blocks_k: tl.int32, batch_t: tl.int64,
    stride_t: tl.int64, batch_weights: tl.int64, stride_weights: tl.int64, NORMS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a product takes of its columns, padded: t log₂e − |y'|²/2, and weights, 1 where there are none."""
    b, block = place(programs)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = b * blocks_k * PAD + cols, cols < m
    value = tl.load(t + b * batch_t + cols.to(tl.int64) * stride_t, mask=inside, other=float("-inf"))
    value = value * 1.4426950408889634
    if NORMS:
        value -= tl.load(norm_k + at)
    tl.store(bias + at, value)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + b * batch_weights + cols.to(tl.int64) * stride_weights, mask=inside, other=0.0)
    tl.store(padded + at, weight)


@kernel
def halve(values, largest, high, low, programs: tl.int32, count: tl.int64, RANGE: tl.constexpr, BLOCK: tl.constexpr):
    """Values (B, count) as two float16 parts each, high + low = value · RANGE / largest of the problem."""
    b, block = place(programs)
    here = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at, inside = b * count + here, here < count
    scale = RANGE / tl.maximum(tl.load(largest + b), LEAST)
    value = tl.load(values + at, mask=inside, other=0.0) * scale
    first = value.to(tl.float16)
    tl.store(high + at, first, mask=inside)
    tl.store(low + at, (value - first.to(tl.float32)).to(tl.float16), mask=inside)


@kernel
def join(
    top, total, out, s, norm_q, epsilon, largest, total_out, result, programs: tl.int32, parts: tl.int32,
    problems: tl.int32, n: tl.int32, width: tl.int32, blocks_q: tl.int32, batch_s: tl.int64, stride_s: tl.int64,
    stride_epsilon: tl.int64, NORMS: tl.constexpr, POWER: tl.constexpr, RANGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The parts of a product in one, times 2^(s_i log₂e − |x'_i|²/2 + top_i) ε^POWER. RANGE > 1: values were halved."""
    b, program = place(programs)
    slices = tl.maximum(tl.cdiv(width, BLOCK_V), 1)
    block, part = program // slices, program % slices
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    which = part * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = rows < n
    there = inside[:, None] & (which[None, :] < width)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for k in range(parts):
        found = tl.load(top + (k * problems + b) * n + rows, mask=inside, other=0.0)
        highest = tl.maximum(highest, found)
    shift = tl.load(s + b * batch_s + rows.to(tl.int64) * stride_s, mask=inside, other=0.0) * 1.4426950408889634
    if NORMS:
        shift -= tl.load(norm_q + b * blocks_q * PAD + rows, mask=inside, other=0.0)
    scale = tl.exp2(shift + highest)
    if POWER > 0:
        unit = tl.load(epsilon + b * stride_epsilon).to(tl.float32)
        scale *= unit
        if POWER > 1:
            scale *= unit
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for k in range(parts):
        at = (k * problems + b) * n + rows
        fade = tl.exp2(tl.load(top + at, mask=inside, other=0.0) - highest)
        sums += fade * tl.load(total + at, mask=inside, other=0.0)
        if width > 0:
            where = at[:, None] * width + which[None, :]
            acc += fade[:, None] * tl.load(out + where, mask=there, other=0.0)
    if part == 0:
        tl.store(total_out + b * n + rows, sums * scale, mask=inside)
    if width > 0:
        if RANGE > 1:
            acc = acc * (tl.maximum(tl.load(largest + b), LEAST) / RANGE / RANGE)
        tl.store(result + (b * n + rows[:, None]) * width + which[None, :], acc * scale[:, None], mask=there)


@triton.jit
def add_column(acc, e, values, cols, m, fade, K: tl.constexpr, WIDTH: tl.constexpr):
    """acc · fade + Σ_j e_j V_jk, nothing beyond the last column of the values."""
    if K < WIDTH:
        v = tl.load(values + cols.to(tl.int64) * WIDTH + K, mask=cols < m, other=0.0)
        acc = acc * fade + tl.sum(e * v[None, :], 1)
    return acc


@triton.jit
def store_column(out, acc, rows, n, K: tl.constexpr, WIDTH: tl.constexpr):
    """Store one column of a narrow product."""
    if K < WIDTH:
        tl.store(out + rows.to(tl.int64) * WIDTH + K, acc, mask=rows < n)


@kernel
def product(
    q1, q2, k1, k2, bias, norm_q, norm_k, values, values_lo, weights, top_out, total_out, out, slopes,
    programs: tl.int32, splits: tl.int32, tiles_each: tl.int32, problems: tl.int32, n: tl.int32, m: tl.int32,
    width_out: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, batch_values: tl.int64, chunks: tl.int32,
    batch: tl.int64, stride_q: tl.int64, stride_k: tl.int64, KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, POWER: tl.constexpr,
):
    """Σ_j 2^(S_ij + bias_j − top_i) (C_ij/ε)^POWER (V_j, w_j) around each row's own maximum, by parts of the columns.

    Results (parts, B, n, k) and (parts, B, n), and top (parts, B, n). As attention does it: one pass, the running sums
    rescaled whenever the maximum rises. C/ε comes in natural units, from the scores: |x'|²/2 + |y'|²/2 − x'·y' (DOT),
    or −S. Up to four columns of values are added up one by one; more go through the matrix units, exponentials and
    values as two float16 parts each. With a POWER the summands have no bound, and three products of rounded parts of
    float32 take their place.
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
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    which = part * HELD + tl.arange(0, HELD)
    slope = tl.load(slopes + b)
    bias += b * pad_k
    values += b * batch_values
    values_lo += b * batch_values
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, HELD], tl.float32)
    a0, a1, a2, a3 = tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top)
    total = tl.zeros([BLOCK_M], tl.float32)
    weights += b * pad_k
    norms = tl.zeros([BLOCK_M], tl.float32)
    if KIND == DOT:
        if POWER > 0:
            norms = tl.load(norm_q + b * pad_q + rows)
        if D > 0:
            dims = tl.arange(0, D)
            at_q = rows[:, None].to(tl.int64) * D + dims[None, :]
            qh = tl.load(q1 + at_q)
            if PRODUCTS == 3:
                ql = tl.load(q2 + at_q)
    first = split * tiles_each * BLOCK_N
    last = tl.minimum(first + tiles_each * BLOCK_N, m)
    DEPTH: tl.constexpr = STAGES if KIND != DOT or D > 0 else 1
    for start in tl.range(first, last, BLOCK_N, num_stages=DEPTH):
        cols = start + tl.arange(0, BLOCK_N)
        if KIND == DOT and D > 0:
            at_k = cols[None, :].to(tl.int64) * D + dims[:, None]
            kh = tl.load(k1 + at_k)
            if PRODUCTS == 3:
                scores = tl.dot(ql, kh)
                scores = tl.dot(qh, tl.load(k2 + at_k), scores)
                scores = tl.dot(qh, kh, scores) * slope
            else:
                scores = tl.dot(qh, kh) * slope
        else:
            scores = score_tile(
                q1, q2, k1, k2, rows, cols, n, m, slope, stride_q, stride_k, pad_q, pad_k, width,
                KIND, D, CHUNK, PRODUCTS,
            )
        t = scores + tl.load(bias + cols)[None, :]
        higher = tl.maximum(top, tl.max(t, 1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        e = tl.exp2(t - pivot[:, None])
        if POWER > 0:
            cost = -scores
            if KIND == DOT:
                cost = norms[:, None] + tl.load(norm_k + b * pad_k + cols)[None, :] - scores
            cost = tl.where(e > 0, cost * 0.6931471805599453, 0.0)
            e = e * cost
            if POWER > 1:
                e = e * cost
        fade = tl.exp2(top - pivot)
        total = total * fade + tl.sum(e * tl.load(weights + cols)[None, :], 1)
        if BLOCK_V > 4:
            there = (cols[:, None] < m) & (which[None, :] < width_out)
            at_v = cols[:, None].to(tl.int64) * width_out + which[None, :]
            v = tl.load(values + at_v, mask=there, other=0.0)
            acc = acc * fade[:, None]
            if POWER > 0:
                acc = tl.dot(e, v, acc, input_precision="tf32x3")
            else:
                e = e * 16384.0
                high = e.to(tl.float16)
                if PRODUCTS == 3:
                    acc = tl.dot((e - high.to(tl.float32)).to(tl.float16), v, acc)
                    acc = tl.dot(high, tl.load(values_lo + at_v, mask=there, other=0.0), acc)
                acc = tl.dot(high, v, acc)
        else:
            a0 = add_column(a0, e, values, cols, m, fade, 0, BLOCK_V)
            a1 = add_column(a1, e, values, cols, m, fade, 1, BLOCK_V)
            a2 = add_column(a2, e, values, cols, m, fade, 2, BLOCK_V)
            a3 = add_column(a3, e, values, cols, m, fade, 3, BLOCK_V)
        top = higher
    at = (split * problems + b) * n
    if BLOCK_V > 4:
        there = (rows[:, None] < n) & (which[None, :] < width_out)
        tl.store(out + (at + rows[:, None]) * width_out + which[None, :], acc, mask=there)
    else:
        out += at * width_out
        store_column(out, a0, rows, n, 0, BLOCK_V)
        store_column(out, a1, rows, n, 1, BLOCK_V)
        store_column(out, a2, rows, n, 2, BLOCK_V)
        store_column(out, a3, rows, n, 3, BLOCK_V)
    if part == 0:
        tl.store(total_out + at + rows, total, mask=rows < n)
        tl.store(top_out + at + rows, tl.where(top == float("-inf"), 0.0, top), mask=rows < n)


@kernel
def check(
    ratio, weight, done, iterations, error, gaps, cycles, errors, iteration: tl.int32, most: tl.int32,
    check_every: tl.int32, looks: tl.int32, batch: tl.int32, tolerance: tl.float32, m: tl.int32, blocks_k: tl.int32,
    batch_weight: tl.int64, squared: tl.int32, BLOCK: tl.constexpr,
):
    """The marginal error of one problem; a problem whose error is below the tolerance leaves the loop.

    The others learn from it how far to relax. ``errors`` keeps both: (2, B, looks).
    """
    b = tl.program_id(0).to(tl.int64)
    if tl.load(done + b) != 0:
        return
    cycle = tl.load(cycles + 2 * b)
    if is_look(iteration, cycle, tl.load(cycles + 2 * b + 1), most) == 0:
        return
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, m, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mass = tl.load(weight + b * batch_weight + cols, mask=cols < m, other=0.0)
        violation = mass * (tl.load(ratio + b * blocks_k * PAD + cols, mask=cols < m, other=1.0) - 1.0)
        violation = tl.where(mass > 0, violation, 0.0).to(tl.float64)
        total += tl.where(squared == 1, violation * violation, tl.abs(violation))
    found = tl.sum(total, 0)
    found = tl.where(squared == 1, tl.sqrt(found), found)
    found = found.to(tl.float32)
    tl.store(error + b, found)
    tl.store(iterations + b, iteration)
    if found < tolerance:
        tl.store(done + b, 1)
    gap = tl.load(gaps + 2 * b)
    if gap < 1.0:
        gap, cycle = next_gap(gap, cycle, tl.load(gaps + 2 * b + 1), found, iteration, check_every)
        tl.store(gaps + 2 * b, gap)
        tl.store(cycles + 2 * b, cycle)
    tl.store(gaps + 2 * b + 1, found)
    tl.store(cycles + 2 * b + 1, iteration)
    slot = (iteration + check_every - 2) // check_every
    tl.store(errors + b * looks + slot, found)
    tl.store(errors + (batch + b) * looks + slot, gap)


@triton.jit
def log_sum(t, AXIS: tl.constexpr):
    """log₂ Σ 2^t along an axis, around the maximum."""
    top = tl.max(t, AXIS)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    if AXIS == 1:
        total = tl.sum(tl.exp2(t - pivot[:, None]), 1)
    else:
        total = tl.sum(tl.exp2(t - pivot[None, :]), 0)
    return pivot + tl.log2(total)


@triton.jit
def relative(found, potential):
    """A sum relative to the previous potential; nothing stays nothing, where a potential is infinite."""
    return tl.where(found == float("-inf"), found, found + potential)


@triton.jit
def own_sum(scores, bias, potential, inside, AXIS: tl.constexpr):
    """log₂ Σ 2^(scores + bias) along an axis of one tile, relative to the previous potential.

    Around that potential; where a sum leaves the range of numbers, all around their own maxima.
    """
    if AXIS == 1:
        total = tl.sum(tl.exp2(scores + (bias[None, :] + potential[:, None])), 1)
    else:
        total = tl.sum(tl.exp2(scores + (bias[:, None] + potential[None, :])), 0)
    found = tl.log2(total)
    sound = (total > TINY) & (total < HUGE)
    if tl.min(tl.where(inside, sound.to(tl.int32), 1), 0) == 0:
        if AXIS == 1:
            found = relative(log_sum(scores + bias[None, :], 1), potential)
        else:
            found = relative(log_sum(scores + bias[:, None], 0), potential)
    return found


@triton.jit
def moved(potential, change):
    """The potential after an update: infinite where no pair is allowed."""
    return tl.where(change == float("-inf"), float("inf"), potential - change)


@triton.jit
def meet(counter, target):
    """Wait until every program of a problem has come here; what they wrote before is visible after."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < target:
        arrived = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def exchange(own, parts, part, count, lanes, pad, counter, target, COUNT: tl.constexpr):
    """Add up, in base-2 logarithms, what ``count`` programs with the same rows (or columns) have found for them.

    Rows and columns take turns,
    so that nobody overwrites what a slower program still reads: that one has yet to come to
    the meeting in between.
    """
    tl.store(parts + part * pad + lanes, own)
    meet(counter, target)
    which = tl.arange(0, COUNT)
    where = parts + which[:, None] * pad + lanes[None, :]
    found = tl.load(where, mask=which[:, None] < count, other=float("-inf"), cache_modifier=".cg")
    return log_sum(found, 0)


@kernel
def resident(
    q1, q2, k1, k2, row_bias, log_a, log_b, weight, u_out, v_out, iterations, error, row_parts, column_parts,
    error_parts, counters, slopes, gaps, errors, looks: tl.int32, problems: tl.int32, n: tl.int32, m: tl.int32,
    tiles_q: tl.int32, tiles_k: tl.int32, max_iterations: tl.int32, check_every: tl.int32, tolerance: tl.float32,
    blocks_q: tl.int32, blocks_k: tl.int32, batch_weight: tl.int64, chunks: tl.int32, batch: tl.int64,
    stride_q: tl.int64, stride_k: tl.int64, squared: tl.int32, KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The whole loop in one launch: each program keeps one tile of scores in registers from the first iteration to
    the last.

    The programs of a problem exchange partial row sums and partial column sums once an iteration each. All programs
    must run at the same time. Sums are exchanged relative to the previous potentials, so that no digits go.
    """
    group = tiles_q * tiles_k
    b = (tl.program_id(0) // group).to(tl.int64)
    tile = tl.program_id(0) % group
    tile_q, tile_k = tile // tiles_k, tile % tiles_k
    rows = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    pad_q, pad_k = blocks_q * PAD, blocks_k * PAD
    width = coordinates(chunks, D)
    q1, q2, k1, k2 = of_problem(q1, q2, k1, k2, b, batch, pad_q, pad_k, width, KIND)
    slope = tl.load(slopes + b)
    stride_q, stride_k = known_strides(stride_q, stride_k, UNIT, ALIGN)
    scores = score_tile(
        q1, q2, k1, k2, rows, cols, n, m, slope, stride_q, stride_k, pad_q, pad_k, width, KIND, D, CHUNK, PRODUCTS
    )
    a = tl.load(log_a + b * pad_q + rows)
    c = tl.load(log_b + b * pad_k + cols)
    row_parts += b * tiles_k * pad_q
    column_parts += b * tiles_q * pad_k
    error_parts += b * tiles_k
    counter = counters + b
    met = group
    own = log_sum(scores + tl.load(row_bias + b * pad_q + rows)[:, None], 0)
    v = -exchange(own, column_parts, tile_q, tiles_q, cols, pad_k, counter, met, COUNT)
    u = tl.zeros([BLOCK_M], tl.float32)
    found = 0.0
    gap = tl.load(gaps + 2 * b)
    cycle, looked, iteration, going = check_every, 0, 0, 1
    while going == 1:
        iteration += 1
        bias = tl.where(c == float("-inf"), c, c + v)
        change = own_sum(scores, bias, u, rows < n, 1)
        met += group
        change = exchange(change, row_parts, tile_k, tiles_k, rows, pad_q, counter, met, COUNT)
        u = relaxed(u, moved(u, change), relaxation(gap, cycle, looked, iteration, max_iterations, 0), a)
        bias_q = tl.where(a == float("-inf"), a, a + u)
        met += group
        own = own_sum(scores, bias_q, v, cols < m, 0)
        change = exchange(own, column_parts, tile_q, tiles_q, cols, pad_k, counter, met, COUNT)
        factor = relaxation(gap, cycle, looked, iteration, max_iterations, 1)
        if is_look(iteration, cycle, looked, max_iterations):
            before = found
            mass = tl.load(weight + b * batch_weight + cols, mask=cols < m, other=0.0)
            violation = tl.where(mass > 0, mass * (tl.exp2(change) - 1.0), 0.0)
            part = tl.sum(tl.where(squared == 1, violation * violation, tl.abs(violation)), 0)
            if tile_q == 0:
                tl.store(error_parts + tile_k, part)
            met += group
            meet(counter, met)
            found = 0.0
            for k in range(tiles_k):
                found += tl.load(error_parts + k, cache_modifier=".cg")
            found = tl.where(squared == 1, tl.sqrt(found), found)
            if (found < tolerance) | (iteration == max_iterations):
                going = 0
            if gap < 1.0:
                gap, cycle = next_gap(gap, cycle, before, found, iteration, check_every)
            looked = iteration
            if tile == 0:
                slot = (iteration + check_every - 2) // check_every
                tl.store(errors + b * looks + slot, found)
                tl.store(errors + (problems + b) * looks + slot, gap)
        if going == 1:
            v = relaxed(v, moved(v, change), factor, c)
    if tile_k == 0:
        tl.store(u_out + b * pad_q + rows, u, mask=rows < n)
    if tile_q == 0:
        tl.store(v_out + b * pad_k + cols, v, mask=cols < m)
    if tile == 0:
        tl.store(iterations + b, iteration)
        tl.store(error + b, found)
