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

from .launch import INTERPRETED


def kernel(function: Any) -> Any:
    """Compile for any value of the declared numbers: nothing is assumed of what divides them, nothing is compiled
    again."""
    numbers = [name for name, kind in function.__annotations__.items() if "constexpr" not in kind]
    return triton.jit(function, do_not_specialize=numbers)


INTERPRETED_HERE = tl.constexpr(INTERPRETED)
# Eight numbers of a problem whose marginals may be missed, zero where they are binding: ε/(ρ + ε) and ε/ρ of rows and
# columns, the least gap, and whether any of this is so.
SLACK, RATE, FLOOR, MISSED = tl.constexpr(0), tl.constexpr(2), tl.constexpr(4), tl.constexpr(5)
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
def log_2(x):
    """log₂ as the hardware has it, wrong by less than 2^-22 of the result or, near 1, by as much; no denormals."""
    if INTERPRETED_HERE:
        out = tl.log2(x)
    else:
        out = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return out


@triton.jit
def is_look(iteration, cycle, last, most):
    """Whether the error is looked at after this iteration."""
    return (iteration == 1) | (iteration == last + cycle) | (iteration == most)


@triton.jit
def relaxation(gap, cycle, last, iteration, most, column, translated):
    """The factor of one half step, of rows (``column`` 0) or of the columns after them (1): ω of ``acceleration.py``.

    A gap of 1 makes every factor 1. The row update that is looked at is plain, and so are the columns before it where
    potentials are ``translated`` then; the column update after it goes by the gap from before the look.
    """
    look = is_look(iteration, cycle, last, most)
    next_one = is_look(iteration + 1, cycle, tl.where(look, iteration, last), most)
    gap = tl.where((column == 1) & (translated > 0) & next_one, 1.0, gap)
    steps = 2 * (iteration - tl.where(look, iteration, last)) + column
    return chebyshev(gap, steps)


@triton.jit
def chebyshev(gap, steps):
    """ω of the half step that comes so many after a plain one: ``omega`` of ``acceleration.py``."""
    q = (1.0 - gap) / (1.0 + gap)
    power = tl.exp2(steps * tl.log2(tl.maximum(q, 1e-30)))
    factor = (1.0 + q) * (1.0 + power) / (1.0 + power * q)
    return tl.where((steps == 0) | (gap >= 1.0), 1.0, factor)


@triton.jit
def factor_of(gaps, cycles, penalty, b, iteration, most, column, STEADY: tl.constexpr):
    """The factor of one half step of a problem, as its looks ask for, or STEADY as in a stage of annealing; and MISSED.

    A stage begins with a plain column update and ends with a plain row update; nothing is looked at.
    """
    if STEADY:
        steps = 2 * iteration - 1 + column
        missed = tl.load(penalty + 8 * b + MISSED)
        factor = chebyshev(tl.load(gaps + 2 * b), tl.where(steps >= 2 * most - 1, 0, steps))
    else:
        cycle, looked = tl.load(cycles + 2 * b), tl.load(cycles + 2 * b + 1)
        missed = tl.load(penalty + 8 * b + MISSED)
        factor = relaxation(tl.load(gaps + 2 * b), cycle, looked, iteration, most, column, missed)
    return factor, missed


@triton.jit
def relaxed(before, target, factor, log_weight):
    """Beyond the target, as far as the factor says and as no half step loses what it gains; in base 2.

    Where there is no mass, or nothing finite to start from, the target itself.
    """
    change = target - before
    more = (factor - 1.0) * change
    more = tl.where(change > 0, tl.minimum(more, log_2(1.0 + change * 0.6931471805599453)), more)
    free = (log_weight > float("-inf")) & (tl.abs(change) < float("inf"))
    return tl.where(free, target + more, target)


@triton.jit
def damped(softmin, norm, slack):
    """Where a potential goes whose marginal may be missed: the softmin less ``slack`` = ε/(ρ + ε) of all of it.

    ``norm`` is what the potential in base 2 lacks; it counts here.
    """
    return tl.where(tl.abs(softmin) < float("inf"), softmin - slack * (softmin + norm), softmin)


@triton.jit
def next_gap(gap, cycle, before, error, iteration, check_every, floor):
    """The gap and the cycle that follow from the error at a look and the one before: ``acceleration.py`` says how.

    In logarithms, since Chebyshev polynomials outgrow float32.
    """
    twice = 2.0 * cycle.to(tl.float32)
    bound = log_cosh(twice * inverse_tangent(gap)) + tl.minimum(tl.log(error / before), 0.0)
    slower = (bound + tl.log(1.0 + tl.sqrt(tl.maximum(1.0 - tl.exp(-2.0 * bound), 0.0)))) / twice
    slower = 0.5 * (tl.exp(slower) - tl.exp(-slower))
    slower = tl.sqrt(tl.maximum(gap * gap - (1.0 - gap * gap) * slower * slower, 0.0))
    following = tl.where(bound > 0.0, slower, tl.minimum(1.0 - 1e-6, 1.4 * gap))
    slow: tl.constexpr = 1.3169578969248166  # acosh 2
    longest = tl.minimum(tl.maximum(check_every, 32), iteration // 2)
    longer = (following < cycle_gap(slow, cycle)) & (2 * cycle <= longest)
    enough = log_cosh(0.5 * twice * inverse_tangent(tl.minimum(following, 1.0 - 1e-6))) > 2.302585092994046  # log 10
    shorter = (cycle > check_every) & enough
    other = tl.where(longer, 2 * cycle, tl.where(shorter, cycle // 2, cycle))
    known = before > 0.0
    anew = cycle_gap(14.508657738523969, other)  # acosh 1e6
    following = tl.where((error >= before) & (gap < anew), anew, following)
    following = tl.maximum(tl.maximum(following, cycle_gap(slow, other)), floor)
    return tl.where(known, following, gap), tl.where(known, other, cycle)


@triton.jit
def log_cosh(x):
    """log cosh x for x ≥ 0."""
    return x + tl.log(0.5 + 0.5 * tl.exp(-2.0 * x))


@triton.jit
def inverse_tangent(x):
    """atanh x."""
    return 0.5 * tl.log((1.0 + x) / (1.0 - x))


@triton.jit
def cycle_gap(exponent, cycle):
    """tanh(acosh(factor)/(2N)), the gap at which a cycle divides errors by a factor, given its acosh."""
    e = tl.exp(-exponent / cycle.to(tl.float32))
    return (1.0 - e) / (1.0 + e)


@triton.jit
def bits_per_unit(epsilon, KIND: tl.constexpr):
    """log₂e/ε, float64, as the scores have it: matrices are multiplied by a float32.

    Were it another number, however close, plans would be off by one factor for all pairs, and their products by its
    power.
    """
    bits = 1.4426950408889634 / epsilon
    if KIND == MATRIX:
        bits = bits.to(tl.float32).to(tl.float64)
    return bits


@triton.jit
def in_bits(scaled, epsilon, KIND: tl.constexpr):
    """Numbers in units of ε, as the host has it in float32, in those of the scores."""
    bits = bits_per_unit(epsilon, KIND) * epsilon.to(tl.float32).to(tl.float64)
    return (scaled.to(tl.float64) * bits).to(tl.float32)


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
        scale = tl.sqrt(2.0 * 1.4426950408889634 / unit)
        if again == 1:
            extent = tl.load(extents + b)
            if extent <= 16384.0:
                return
            shrink = tl.exp2(tl.ceil(tl.log2(extent / 16384.0)))
    else:
        scale = tl.sqrt(1.4426950408889634 / unit)
    scale = scale / shrink  # float64: a rounded scale would move all costs one way, and potentials know ε alone
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
        value = tl.where(inside, ((value - centre[None, :]).to(tl.float64) * scale).to(tl.float32), 0.0)
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


@triton.jit
def look_through(
    matrix, seen, first, programs, n, m, stride_q, stride_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Note whether some of a matrix' tiles hold NaN or −inf."""
    across = tl.cdiv(m, COLUMNS)
    for tile in range(first, tl.cdiv(n, ROWS) * across, programs):
        rows = (tile // across) * ROWS + tl.arange(0, ROWS)
        columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows < n)[:, None] & (columns < m)[None, :]
        places = rows.to(tl.int64)[:, None] * stride_q + columns.to(tl.int64)[None, :] * stride_k
        sound = tl.load(matrix + places, mask=inside, other=0.0).to(tl.float32) > float("-inf")
        if tl.min(tl.min(sound.to(tl.int32), 1), 0) == 0:
            tl.store(seen, 1.0)


@kernel
def start(
    a, b_weight, f, epsilon, matrix, norm_q, slopes, log_a, log_b, row_bias, column_bias, seen, flags, gaps, cycles,
    errors, penalty, gap: tl.float32, check_every: tl.int32, looks: tl.int32, programs: tl.int32, batch: tl.int32,
    n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, batch_a: tl.int64, batch_b: tl.int64,
    batch_f: tl.int64, stride_f: tl.int64, stride_epsilon: tl.int64, batch_m: tl.int64, stride_q: tl.int64,
    stride_k: tl.int64, KIND: tl.constexpr, LOOK: tl.constexpr, BLOCK: tl.constexpr,
):
    """The loop's starting state: log₂ of the weights, row biases from f, empty column biases; a matrix' slope.

    Notes what was seen of the values: bad coordinates of x and of y, bad weights of either side, masses and ε. With
    ``LOOK`` the programs beyond the blocks look through the matrix, and note NaN and −inf where bad coordinates are.
    """
    b, block = place(programs)
    if LOOK:
        if block >= blocks_q + blocks_k:
            look_through(matrix + b * batch_m, seen, block - blocks_q - blocks_k, programs - blocks_q - blocks_k,
                         n, m, stride_q, stride_k, 8192 // BLOCK, BLOCK)  # fmt: skip
            return
    if block == 0:
        if KIND == MATRIX:
            tl.store(slopes + b, -bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND).to(tl.float32))
        tl.store(seen + 4 + 2 * batch + b, tl.load(epsilon + b * stride_epsilon).to(tl.float64))
        tl.store(gaps + 2 * b, tl.maximum(gap, tl.load(penalty + 8 * b + FLOOR)))
        tl.store(cycles + 2 * b, check_every)
        blank = tl.full([BLOCK], 1.0, tl.float32)
        for first in range(0, looks, BLOCK):
            which = first + tl.arange(0, BLOCK)
            tl.store(errors + b * looks + which, blank * float("nan"), mask=which < looks)
            tl.store(errors + (batch + b) * looks + which, blank, mask=which < looks)
        if (b == 0) & (KIND != MATRIX):
            tl.store(seen, tl.load(flags).to(tl.float64))
            tl.store(seen + 1, tl.load(flags + 1).to(tl.float64))
    if block < blocks_q:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(a + b * batch_a + rows, mask=rows < n, other=0.0)
        bits = bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
        u = tl.load(f + b * batch_f + rows.to(tl.int64) * stride_f, mask=rows < n, other=0.0)
        u = (u.to(tl.float64) * bits).to(tl.float32)
        at = b * blocks_q * PAD + rows
        if KIND == DOT:
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


@triton.jit
def log_mass(log_weight, bias, norm, rate, count, NORMS: tl.constexpr, BLOCK: tl.constexpr):
    """log₂ Σ a_i 2^(−rate f_i) of one problem's side, given log₂ a and log₂ a + f."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        at = start + lanes
        weight = tl.load(log_weight + at, mask=at < count, other=float("-inf"))
        lost = tl.load(bias + at, mask=at < count, other=0.0) - weight
        if NORMS:
            lost += tl.load(norm + at)
        massive = weight > float("-inf")
        t = tl.where(massive, weight.to(tl.float64) - rate * lost.to(tl.float64), float("-inf"))
        higher = tl.maximum(top, t)
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - pivot) + tl.exp2(t - pivot)
        top = higher
    highest = tl.max(top, 0)
    return highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))


@kernel
def translate(
    u, v, log_a, log_b, row_bias, column_bias, norm_q, norm_k, penalty, done, cycles, iteration: tl.int32,
    most: tl.int32, n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, other: tl.int64,
    NORMS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Before an iteration that is looked at: move f up and g down by the same, as far as is best for the dual.

    That is κ = (log ⟨a, e^(−f/ρ₁)⟩ − log ⟨b, e^(−g/ρ₂)⟩) ρ₁ρ₂/(ρ₁ + ρ₂), summed in float64: it is a small difference.
    """
    b = tl.program_id(0).to(tl.int64)
    if tl.load(done + b) != 0:
        return
    if is_look(iteration, tl.load(cycles + 2 * b), tl.load(cycles + 2 * b + 1), most) == 0:
        return
    rate_q, rate_k = tl.load(penalty + 8 * b + RATE), tl.load(penalty + 8 * b + RATE + 1)
    if rate_q + rate_k == 0.0:
        return
    q, k = b * blocks_q * PAD, b * blocks_k * PAD
    rows = log_mass(log_a + q, row_bias + q, norm_q + q, rate_q, n, NORMS, BLOCK)
    columns = log_mass(log_b + k, column_bias + k, norm_k + k, rate_k, m, NORMS, BLOCK)
    shift = ((rows - columns) / (rate_q.to(tl.float64) + rate_k.to(tl.float64))).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        at = start + lanes
        tl.store(u + q + at, tl.load(u + q + at, mask=at < n) + shift, mask=at < n)
    v += (iteration % 2) * other + k
    slack = tl.load(penalty + 8 * b + SLACK + 1)
    tl.debug_barrier()
    for start in range(0, m, BLOCK):
        at = start + lanes
        massive = tl.load(log_b + k + at, mask=at < m, other=0.0) > float("-inf")
        own = tl.where(massive, shift, shift * (1.0 - slack))  # without mass nothing is moved: it follows from f alone
        tl.store(v + at, tl.load(v + at, mask=at < m) - own, mask=at < m)
        tl.store(column_bias + k + at, tl.load(column_bias + k + at, mask=at < m) - shift, mask=at < m)


@kernel
def settle(
    v, log_b, column_bias, gaps, cycles, previous, done, iteration: tl.int32, most: tl.int32, programs: tl.int32,
    batch: tl.int32, m: tl.int32, other: tl.int64, BLOCK: tl.constexpr,
):
    """Relax a plain column update, after the look that says how: where the next iteration may be looked at again.

    Right after a look the factor goes by the gap from before it, which ``previous`` (2, B) remembers, the places of odd
    and even iterations in turn.
    """
    b, block = place(programs)
    if tl.load(done + b) != 0:
        return
    gap, cycle, looked = tl.load(gaps + 2 * b), tl.load(cycles + 2 * b), tl.load(cycles + 2 * b + 1)
    earlier = tl.load(previous + (iteration % 2) * batch + b)
    if block == 0:
        tl.store(previous + ((iteration + 1) % 2) * batch + b, gap)
    gap = tl.where((looked == iteration) & (iteration > 1), earlier, gap)
    factor = chebyshev(gap, 2 * (iteration - looked) + 1)
    factor = tl.where(is_look(iteration + 1, cycle, looked, most), 1.0, factor)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    at = b * programs * BLOCK + cols
    before = tl.load(v + (iteration % 2) * other + at, mask=cols < m, other=0.0)
    target = tl.load(v + ((iteration + 1) % 2) * other + at, mask=cols < m, other=0.0)
    weight = tl.load(log_b + at)
    after = relaxed(before, target, factor, weight)
    tl.store(v + ((iteration + 1) % 2) * other + at, after, mask=cols < m)
    tl.store(column_bias + at, tl.where(weight == float("-inf"), weight, after + weight), mask=cols < m)


@kernel
def finish(
    u, v, norm_q, norm_k, epsilon, iterations, error, f_out, g_out, iterations_out, converged, seen, scratch, done,
    turns, gaps, cycles, programs: tl.int32, n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32,
    other: tl.int64, stride_epsilon: tl.int64, tolerance: tl.float32, batch: tl.int32, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Potentials in the unit of the cost. v lies ``other`` numbers further on after an odd number of iterations.

    What the loop noted is zero again afterwards, for the next one.
    """
    b, block = place(programs)
    unit = 1.0 / bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
    ran = tl.load(iterations + b)
    if block < blocks_q:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        at = b * blocks_q * PAD + rows
        value = tl.load(u + at, mask=rows < n)
        if KIND == DOT:
            value += tl.load(norm_q + at)
        tl.store(f_out + b * n + rows, (value.to(tl.float64) * unit).to(tl.float32), mask=rows < n)
    else:
        rows = (block - blocks_q) * BLOCK + tl.arange(0, BLOCK)
        at = b * blocks_k * PAD + rows
        value = tl.load(v + (ran % 2) * other + at, mask=rows < m)
        if KIND == DOT:
            value += tl.load(norm_k + at)
        tl.store(g_out + b * m + rows, (value.to(tl.float64) * unit).to(tl.float32), mask=rows < m)
    if block == 0:
        tl.store(iterations_out + b, ran.to(tl.int64))
        tl.store(converged + b, tl.load(error + b) < tolerance)
        tl.store(done + b, 0)
        tl.store(turns + b, tl.load(turns + b) + 2 * ran + 2)
        pair = tl.arange(0, 2)
        tl.store(seen + 4 + 2 * b + pair, tl.zeros([2], tl.float64))
        tl.store(gaps + 2 * b + pair, tl.zeros([2], tl.float32))
        tl.store(cycles + 2 * b + pair, tl.zeros([2], tl.int32))
        if KIND != MATRIX:
            tl.store(scratch + 4 + b, 0)
        if b == 0:
            four = tl.arange(0, 4)
            tl.store(seen + four, tl.zeros([4], tl.float64))
            if KIND != MATRIX:
                tl.store(scratch + four, tl.zeros([4], tl.int32))


@kernel
def lack(
    offset, epsilon, norm, out, programs: tl.int32, count: tl.int32, batch_offset: tl.int64, stride_offset: tl.int64,
    stride_epsilon: tl.int64, KIND: tl.constexpr, BLOCK: tl.constexpr,
):
    """What potentials in base 2 lack of those that count where a marginal may be missed: the norm, and the offset."""
    b, block = place(programs)
    which = block * BLOCK + tl.arange(0, BLOCK)
    at = b * programs * BLOCK + which
    bits = bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
    value = tl.load(offset + b * batch_offset + which.to(tl.int64) * stride_offset, mask=which < count, other=0.0)
    value = (value.to(tl.float64) * bits).to(tl.float32)
    if KIND == DOT:
        value += tl.load(norm + at)
    tl.store(out + at, value)


@kernel
def enter(
    a, b_weight, f, epsilon, norm_q, u, log_a, log_b, row_bias, column_bias, gaps, penalty, gap: tl.float32,
    programs: tl.int32, n: tl.int32, m: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, batch_a: tl.int64,
    batch_b: tl.int64, stride_epsilon: tl.int64, KIND: tl.constexpr, BLOCK: tl.constexpr,
):
    """A stage of annealing begins: potentials f (B, n) in base 2 under its ε, their biases, and the gap it relaxes by;
    log₂ of the weights, and empty column biases."""
    b, block = place(programs)
    if block == 0:
        tl.store(gaps + 2 * b, tl.maximum(gap, tl.load(penalty + 8 * b + FLOOR)))
    if block < blocks_q:
        rows = block * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(a + b * batch_a + rows, mask=rows < n, other=0.0)
        bits = bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
        value = (tl.load(f + b * n + rows, mask=rows < n, other=0.0).to(tl.float64) * bits).to(tl.float32)
        at = b * blocks_q * PAD + rows
        if KIND == DOT:
            value -= tl.load(norm_q + at)
        log_weight = tl.log2(weight)
        tl.store(u + at, value)
        tl.store(log_a + at, log_weight)
        tl.store(row_bias + at, tl.where((weight > 0) & (value < float("inf")), value + log_weight, float("-inf")))
    else:
        cols = (block - blocks_q) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(b_weight + b * batch_b + cols, mask=cols < m, other=0.0)
        at = b * blocks_k * PAD + cols
        tl.store(log_b + at, tl.log2(weight))
        tl.store(column_bias + at, tl.full([BLOCK], float("-inf"), tl.float32))


@kernel
def leave(
    u, norm_q, epsilon, f, programs: tl.int32, n: tl.int32, stride_epsilon: tl.int64, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A stage of annealing ends: its row potentials in the unit of the cost, f (B, n)."""
    b, block = place(programs)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    unit = 1.0 / bits_per_unit(tl.load(epsilon + b * stride_epsilon), KIND)
    at = b * programs * BLOCK + rows
    value = tl.load(u + at, mask=rows < n)
    if KIND == DOT:
        value += tl.load(norm_q + at)
    tl.store(f + b * n + rows, (value.to(tl.float64) * unit).to(tl.float32), mask=rows < n)


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

    Around t = −u, the previous potential, or around the maximum (TRACK). A row sum of a bad stabiliser shows: it leaves
    (TINY, HUGE).
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
    if TRACK:
        if KIND != DOT:  # the maximum first, by column too: to meet once is cheaper than to meet in every tile
            highest = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
            for start in tl.range(first, last, BLOCK_N, num_stages=DEPTH):
                cols = start + tl.arange(0, BLOCK_N)
                base = tl.load(bias + cols)[None, :]
                if KIND == FMA:
                    t = fma_tile(base, x0, x1, x2, x3, x4, x5, x6, x7, k1, cols, pad_k, D)
                else:
                    t = matrix_tile(q1, rows, cols, n, m, stride_q, stride_k, slope, base)
                highest = tl.maximum(highest, t)
            top = tl.max(highest, 1)
            u = tl.where(top == float("-inf"), 0.0, -top)
    for start in tl.range(first, last, BLOCK_N, num_stages=DEPTH):
        cols = start + tl.arange(0, BLOCK_N)
        base = tl.load(bias + cols)[None, :]
        if KIND != DOT or not TRACK:
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
            t = matrix_tile(q1, rows, cols, n, m, stride_q, stride_k, slope, base)
        if KIND != DOT:
            spread += tl.exp2(t)
        elif TRACK:
            higher = tl.maximum(top, tl.max(t, 1))
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - pivot) + tl.sum(tl.exp2(t - pivot[:, None]), 1)
            top = higher
        else:
            total += tl.sum(tl.exp2(t), 1)
    if KIND != DOT:
        total = tl.sum(spread, 1)
    return top, total


@triton.jit
def matrix_tile(q1, rows, cols, n, m, stride_q, stride_k, slope, base):
    """S of a matrix' tile, added to ``base``."""
    where = rows[:, None].to(tl.int64) * stride_q + cols[None, :].to(tl.int64) * stride_k
    cost = tl.load(q1 + where, mask=(rows[:, None] < n) & (cols[None, :] < m), other=0.0)
    return cost.to(tl.float32) * slope + base


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
def held_rows(q1, q2, rows, KIND: tl.constexpr, D: tl.constexpr, PRODUCTS: tl.constexpr):
    """Both parts of the rows' points where a program keeps them (known width, matrix units); elsewhere, anything."""
    if KIND == DOT and D > 0:
        at = rows[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
        high = tl.load(q1 + at)
        held = (high, tl.load(q2 + at) if PRODUCTS == 3 else high)
    else:
        held = (rows, rows)
    return held


@triton.jit
def scores_beside(
    high, low, q1, q2, k1, k2, rows, cols, n, m, slope, stride_q, stride_k, pad_q, pad_k, width, KIND: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, PRODUCTS: tl.constexpr,
):
    """S of a tile of columns, beside rows that are held."""
    if KIND == DOT and D > 0:
        at = cols[None, :].to(tl.int64) * D + tl.arange(0, D)[:, None]
        first = tl.load(k1 + at)
        if PRODUCTS == 3:
            scores = tl.dot(low, first)
            scores = tl.dot(high, tl.load(k2 + at), scores)
            scores = tl.dot(high, first, scores) * slope
        else:
            scores = tl.dot(high, first) * slope
    else:
        scores = score_tile(
            q1, q2, k1, k2, rows, cols, n, m, slope, stride_q, stride_k, pad_q, pad_k, width, KIND, D, CHUNK, PRODUCTS
        )
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
    """Add two sums that are taken around different tops; a NaN stays one."""
    higher = tl.maximum(tl.where(total == 0, float("-inf"), top), tl.where(other_total == 0, float("-inf"), other_top))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)
    first = tl.where(total == 0, 0.0, total * tl.exp2(top - pivot))
    second = tl.where(other_total == 0, 0.0, other_total * tl.exp2(other_top - pivot))
    return pivot, first + second


@kernel
def update(
    q1, q2, k1, k2, bias, u_in, log_weight, u_out, bias_out, ratio_out, parts, counters, done, slopes, gaps, cycles,
    penalty, norm_q, iteration: tl.int32, most: tl.int32, column: tl.int32, programs: tl.int32, n: tl.int32,
    m: tl.int32, splits: tl.int32, tiles_each: tl.int32, blocks_q: tl.int32, blocks_k: tl.int32, chunks: tl.int32,
    batch: tl.int64, stride_q: tl.int64, stride_k: tl.int64, KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr, STEADY: tl.constexpr, LACKING: tl.constexpr,
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
    norm = tl.load(norm_q + at) if LACKING else 0.0
    after = damped(after, norm, tl.load(penalty + 8 * b + SLACK + column))
    if not FIRST:
        factor, _ = factor_of(gaps, cycles, penalty, b, iteration, most, column, STEADY)
        after = relaxed(u, after, factor, weight)
    tl.store(u_out + at, after, mask=rows < n)
    tl.store(bias_out + at, tl.where(weight == float("-inf"), weight, after + weight), mask=rows < n)


@triton.jit
def strip_axis(acc, x, y, cols, padded, MASKED: tl.constexpr):
    """acc − (x_k − y_k)² along one axis."""
    if MASKED:
        apart = x[:, None, None] - tl.load(y + cols, mask=cols < padded, other=0.0)
    else:
        apart = x[:, None, None] - tl.load(y + cols)
    return acc - apart * apart


@triton.jit
def strip_scores(
    q1, rows, step, n, m, x0, x1, x2, x3, x4, x5, x6, x7, bias, u, k1, cols, padded, slope, KIND: tl.constexpr,
    D: tl.constexpr, MASKED: tl.constexpr,
):
    """S + bias + u of some rows: of costs (MATRIX), or from coordinates (FMA). MASKED: some columns are not padded."""
    if MASKED:
        base = tl.load(bias + cols, mask=cols < padded, other=float("-inf"))
    else:
        base = tl.load(bias + cols)
    t = base + u[:, None, None]
    if KIND == MATRIX:
        where = tl.minimum(rows, n - 1)[:, None, None].to(tl.int64) * step + cols
        cost = tl.load(q1 + where, mask=cols < m, other=0.0, eviction_policy="evict_first")
        t = cost.to(tl.float32) * slope + t
    else:
        t = strip_axis(t, x0, k1, cols, padded, MASKED)
        if D > 1:
            t = strip_axis(t, x1, k1 + padded, cols, padded, MASKED)
        if D > 2:
            t = strip_axis(t, x2, k1 + 2 * padded, cols, padded, MASKED)
        if D > 3:
            t = strip_axis(t, x3, k1 + 3 * padded, cols, padded, MASKED)
        if D > 4:
            t = strip_axis(t, x4, k1 + 4 * padded, cols, padded, MASKED)
        if D > 5:
            t = strip_axis(t, x5, k1 + 5 * padded, cols, padded, MASKED)
        if D > 6:
            t = strip_axis(t, x6, k1 + 6 * padded, cols, padded, MASKED)
        if D > 7:
            t = strip_axis(t, x7, k1 + 7 * padded, cols, padded, MASKED)
    return t


@kernel
def strip(
    q1, k1, bias, u, log_weight, u_out, bias_out, parts, done, slopes, gaps, cycles, penalty, lack_q,
    iteration: tl.int32, most: tl.int32, programs: tl.int32, each: tl.int32, n: tl.int32, m: tl.int32,
    blocks_q: tl.int32, blocks_k: tl.int32, batch: tl.int64, stride: tl.int64, KIND: tl.constexpr, D: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, WIDE: tl.constexpr,
    STEADY: tl.constexpr, LACKING: tl.constexpr,
):  # of a matrix, batch, stride and m are counted in ALIGN
    """Row updates, and of the column updates that follow from them each program's share: one exponential for both.

    A program takes ``each`` strips of rows, one after the other, and keeps a row's exponentials e_j until their sum is
    known; a row of weight a and potential u adds a e_j 2^u to the columns. What is read of the columns serves all rows
    of a strip. Columns come in two parts, so that few lanes idle whatever their number, and only the second has a mask.
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
    factor, missed = factor_of(gaps, cycles, penalty, b, iteration, most, 0, STEADY)
    adjusted = (factor != 1.0) | (missed > 0)
    step = stride * ALIGN
    across = tl.arange(0, WIDE)[None, None, :]
    cols = tl.arange(0, FIRST)[None, :, None] * WIDE + across
    more = (FIRST + tl.arange(0, SECOND)[None, :, None]) * WIDE + across
    AXES: tl.constexpr = D if KIND == FMA else 0
    zero = tl.zeros([BLOCK_M], tl.float32)
    share, rest = tl.zeros([1, FIRST, WIDE], tl.float32), tl.zeros([1, SECOND, WIDE], tl.float32)
    lanes = tl.arange(0, BLOCK_M)
    begin, end = program * each, tl.minimum((program + 1) * each, tl.cdiv(n, BLOCK_M))
    for k in tl.range(begin, end, num_stages=1):
        rows = k * BLOCK_M + lanes
        inside = rows < n
        x0, x1 = coordinate(q1, rows, pad_q, 0, AXES), coordinate(q1, rows, pad_q, 1, AXES)
        x2, x3 = coordinate(q1, rows, pad_q, 2, AXES), coordinate(q1, rows, pad_q, 3, AXES)
        x4, x5 = coordinate(q1, rows, pad_q, 4, AXES), coordinate(q1, rows, pad_q, 5, AXES)
        x6, x7 = coordinate(q1, rows, pad_q, 6, AXES), coordinate(q1, rows, pad_q, 7, AXES)
        before = tl.where(inside, tl.load(u + rows), float("-inf"))  # padding gives nothing, and stores nothing
        weight = tl.load(log_weight + rows)
        # Around the previous potential; where a sum leaves the range of numbers, again around the rows' own maxima.
        stabiliser, total, attempt = before, zero, 0
        e, e2 = tl.zeros([BLOCK_M, FIRST, WIDE], tl.float32), tl.zeros([BLOCK_M, SECOND, WIDE], tl.float32)
        while attempt < 2:
            if attempt == 1:
                top = zero + float("-inf")
                for first in range(0, pad_k, SECOND * WIDE):
                    some = first + (tl.arange(0, SECOND)[None, :, None] * WIDE + across)
                    t = strip_scores(
                        q1, rows, step, n, m, x0, x1, x2, x3, x4, x5, x6, x7, bias, zero, k1, some, pad_k, slope, KIND,
                        D, True,
                    )
                    top = tl.maximum(top, tl.max(tl.max(t, 1), 1))
                stabiliser = tl.where(top == float("-inf"), 0.0, -top)
            e = tl.exp2(
                strip_scores(
                    q1, rows, step, n, m, x0, x1, x2, x3, x4, x5, x6, x7, bias, stabiliser, k1, cols, pad_k, slope,
                    KIND, D, False,
                )
            )
            e2 = tl.exp2(
                strip_scores(
                    q1, rows, step, n, m, x0, x1, x2, x3, x4, x5, x6, x7, bias, stabiliser, k1, more, pad_k, slope,
                    KIND, D, True,
                )
            )
            total = tl.sum(tl.sum(e, 1) + tl.sum(e2, 1), 1)
            sound = (total > TINY) & (total < HUGE) | (inside == 0)
            attempt += 1 + tl.min(sound.to(tl.int32), 0)
        after = stabiliser - log_2(total)
        if adjusted:
            lack = tl.load(lack_q + b * pad_q + rows) if LACKING else 0.0
            after = damped(after, lack, tl.load(penalty + 8 * b + SLACK))
            after = relaxed(before, after, factor, weight)
        giving = (total > 0) & (weight > float("-inf"))
        mass = tl.where(giving, tl.exp2(weight + after - stabiliser), 0.0)
        share += tl.sum(e * mass[:, None, None], 0)[None, :, :]
        rest += tl.sum(e2 * mass[:, None, None], 0)[None, :, :]
        for r in tl.static_range(BLOCK_M):  # one by one: every thread has them all, and none has to wait
            own = tl.sum(tl.where(lanes == r, after, 0.0), 0)
            tl.store(u_out + k * BLOCK_M + r, own, mask=k * BLOCK_M + r < n)
    tl.debug_barrier()
    for first in range(begin * BLOCK_M, end * BLOCK_M, WIDE):
        rows = first + tl.arange(0, WIDE)
        inside = rows < tl.minimum(n, end * BLOCK_M)
        weight = tl.load(log_weight + rows, mask=inside)
        after = tl.load(u_out + rows, mask=inside)
        tl.store(bias_out + rows, tl.where(weight == float("-inf"), weight, after + weight), mask=inside)
    parts += (b * programs + program) * pad_k
    tl.store(parts + cols, share)
    tl.store(parts + more, rest, mask=more < pad_k)


@kernel
def gather(
    q1, k1, parts, bias, v_in, log_weight, v_out, bias_out, ratio_out, done, slopes, gaps, cycles, penalty, lack_k,
    iteration: tl.int32, most: tl.int32, programs: tl.int32, m: tl.int32, n: tl.int32, shares: tl.int32,
    blocks_k: tl.int32, blocks_q: tl.int32, check_every: tl.int32, batch: tl.int64, stride: tl.int64,
    KIND: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEADY: tl.constexpr, LACKING: tl.constexpr,
):
    """The column updates, from what ``strip`` left: v'_j = v_j + log₂ b_j − log₂ Σ shares.

    Shares say nothing of a column without mass; where its potential is wanted, since the next iteration may be the
    last, and where shares have left the range of numbers, the column is read again.
    """
    b, block = place(programs)
    if tl.load(done + b) != 0:
        return
    AGAIN: tl.constexpr = 32  # rows at once where columns are read again: few, for the sake of registers
    cols = block * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_N)
    at = b * blocks_k * PAD + cols
    weight = tl.load(log_weight + at)
    before = tl.load(v_in + at, mask=cols < m, other=0.0)
    factor, _ = factor_of(gaps, cycles, penalty, b, iteration, most, 1, STEADY)
    total = tl.zeros([BLOCK_M], tl.float32)
    parts += b * shares * blocks_k * PAD
    for first in range(0, shares, BLOCK_N):
        which = first + lanes
        where = which[None, :].to(tl.int64) * blocks_k * PAD + cols[:, None]
        total += tl.sum(tl.load(parts + where, mask=(which[None, :] < shares) & (cols[:, None] < m), other=0.0), 1)
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
            k1, k2, q1, q2, bias + b * pad_q, before, cols, m, n, 0, tl.cdiv(n, AGAIN) * AGAIN, slope, 1,
            stride * ALIGN, pad_k, pad_q, 1, KIND, D, 1, 1, AGAIN, True, 1,
        )
        after = -(top + tl.log2(again))
    tl.store(ratio_out + at, tl.exp2(before - after), mask=cols < m)
    lack = tl.load(lack_k + at) if LACKING else 0.0
    after = damped(after, lack, tl.load(penalty + 8 * b + SLACK + 1))
    after = relaxed(before, after, factor, weight)
    tl.store(v_out + at, after, mask=cols < m)
    tl.store(bias_out + at, tl.where(massive, after + weight, weight), mask=cols < m)


@kernel
def lay(
    t, weights, norm_k, epsilon, bias, padded, programs: tl.int32, m: tl.int32, blocks_k: tl.int32, batch_t: tl.int64,
    stride_t: tl.int64, batch_weights: tl.int64, stride_weights: tl.int64, stride_epsilon: tl.int64,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a product takes of its columns, padded: t log₂e − |y'|²/2, and weights, 1 where there are none."""
    b, block = place(programs)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = b * blocks_k * PAD + cols, cols < m
    value = tl.load(t + b * batch_t + cols.to(tl.int64) * stride_t, mask=inside, other=float("-inf"))
    value = in_bits(value, tl.load(epsilon + b * stride_epsilon), KIND)
    if KIND == DOT:
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
    stride_epsilon: tl.int64, KIND: tl.constexpr, POWER: tl.constexpr, RANGE: tl.constexpr, BLOCK_M: tl.constexpr,
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
    unit = tl.load(epsilon + b * stride_epsilon)
    shift = in_bits(tl.load(s + b * batch_s + rows.to(tl.int64) * stride_s, mask=inside, other=0.0), unit, KIND)
    if KIND == DOT:
        shift -= tl.load(norm_q + b * blocks_q * PAD + rows, mask=inside, other=0.0)
    scale = tl.exp2(shift + highest)
    if POWER > 0:
        scale *= unit.to(tl.float32)
        if POWER > 1:
            scale *= unit.to(tl.float32)
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
def add_column(acc, e, values, cols, m, fade, K: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr):
    """acc · fade + Σ_j e_j V_jk, nothing beyond the last column of the values; EACH: not yet added up."""
    if K < WIDTH:
        v = tl.load(values + cols.to(tl.int64) * WIDTH + K, mask=cols < m, other=0.0)
        if EACH:
            acc = acc * fade + e * v[None, :]
        else:
            acc = acc * fade + tl.sum(e * v[None, :], 1)
    return acc


@triton.jit
def store_column(out, acc, scale, rows, n, K: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr):
    """Store one column of a narrow product."""
    if K < WIDTH:
        if EACH:
            acc = tl.sum(acc * scale, 1)
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
    or −S. Up to four columns of values are added up one by one, and where S costs little every place of the tile has a
    maximum and sums of its own, so that nothing crosses threads before the end; more columns go through the matrix
    units, exponentials and values as two float16 parts each. With a POWER the summands have no bound: three products of
    rounded parts of float32 take the place of these, and maxima are of whole rows, beside which far pairs are nothing.
    """
    b, program = place(programs)
    HELD: tl.constexpr = BLOCK_V if BLOCK_V > 4 else 1
    EACH: tl.constexpr = BLOCK_V <= 4 and KIND != DOT and POWER == 0
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
    if EACH:
        top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, HELD], tl.float32)
    a0, a1, a2, a3 = tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top)
    total = tl.zeros_like(top)
    weights += b * pad_k
    norms = tl.zeros([BLOCK_M], tl.float32)
    if KIND == DOT and POWER > 0:
        norms = tl.load(norm_q + b * pad_q + rows)
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
        t = scores + tl.load(bias + cols)[None, :]
        if EACH:
            higher = tl.maximum(top, t)
        else:
            higher = tl.maximum(top, tl.max(t, 1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        e = tl.exp2(t - (pivot if EACH else pivot[:, None]))
        if POWER > 0:
            cost = -scores
            if KIND == DOT:
                cost = norms[:, None] + tl.load(norm_k + b * pad_k + cols)[None, :] - scores
            cost = tl.where(e > 0, cost * 0.6931471805599453, 0.0)
            e = e * cost
            if POWER > 1:
                e = e * cost
        fade = tl.exp2(top - pivot)
        weighted = e * tl.load(weights + cols)[None, :]
        if EACH:
            total = total * fade + weighted
        else:
            total = total * fade + tl.sum(weighted, 1)
        if BLOCK_V > 4:
            there = (cols[:, None] < m) & (which[None, :] < width_out)
            at_v = cols[:, None].to(tl.int64) * width_out + which[None, :]
            v = tl.load(values + at_v, mask=there, other=0.0)
            acc = acc * fade[:, None]
            if POWER > 0:
                acc = tl.dot(e, v, acc, input_precision="tf32x3")
            else:
                e = e * 16384.0
                first_part = e.to(tl.float16)
                if PRODUCTS == 3:
                    acc = tl.dot((e - first_part.to(tl.float32)).to(tl.float16), v, acc)
                    acc = tl.dot(first_part, tl.load(values_lo + at_v, mask=there, other=0.0), acc)
                acc = tl.dot(first_part, v, acc)
        else:
            a0 = add_column(a0, e, values, cols, m, fade, 0, BLOCK_V, EACH)
            a1 = add_column(a1, e, values, cols, m, fade, 1, BLOCK_V, EACH)
            a2 = add_column(a2, e, values, cols, m, fade, 2, BLOCK_V, EACH)
            a3 = add_column(a3, e, values, cols, m, fade, 3, BLOCK_V, EACH)
        top = higher
    scale = top
    if EACH:
        highest = tl.max(top, 1)
        scale = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
        total = tl.sum(total * scale, 1)
        top = highest
    at = (split * problems + b) * n
    if BLOCK_V > 4:
        there = (rows[:, None] < n) & (which[None, :] < width_out)
        tl.store(out + (at + rows[:, None]) * width_out + which[None, :], acc, mask=there)
    else:
        out += at * width_out
        store_column(out, a0, scale, rows, n, 0, BLOCK_V, EACH)
        store_column(out, a1, scale, rows, n, 1, BLOCK_V, EACH)
        store_column(out, a2, scale, rows, n, 2, BLOCK_V, EACH)
        store_column(out, a3, scale, rows, n, 3, BLOCK_V, EACH)
    if part == 0:
        tl.store(total_out + at + rows, total, mask=rows < n)
        tl.store(top_out + at + rows, tl.where(top == float("-inf"), 0.0, top), mask=rows < n)


@kernel
def check(
    ratio, weight, done, iterations, error, gaps, cycles, errors, penalty, v, norm_k, iteration: tl.int32,
    most: tl.int32, check_every: tl.int32, looks: tl.int32, batch: tl.int32, tolerance: tl.float32, m: tl.int32,
    blocks_k: tl.int32, batch_weight: tl.int64, squared: tl.int32, other: tl.int64, NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The marginal error of one problem; a problem whose error is below the tolerance leaves the loop.

    The others learn from it how far to relax. ``errors`` keeps both: (2, B, looks). Where the columns may miss b, they
    are to be b 2^(−rate g), with the g that the rows followed from: it lies in ``v``, ``other`` numbers further on
    after an odd iteration.
    """
    b = tl.program_id(0).to(tl.int64)
    if tl.load(done + b) != 0:
        return
    cycle = tl.load(cycles + 2 * b)
    if is_look(iteration, cycle, tl.load(cycles + 2 * b + 1), most) == 0:
        return
    total = tl.zeros([BLOCK], tl.float64)
    rate = tl.load(penalty + 8 * b + RATE + 1)
    for start in range(0, m, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mass = tl.load(weight + b * batch_weight + cols, mask=cols < m, other=0.0)
        at = b * blocks_k * PAD + cols
        wanted = tl.full([BLOCK], 1.0, tl.float32)
        if rate > 0.0:
            g = tl.load(v + (iteration % 2) * other + at, mask=cols < m, other=0.0)
            if NORMS:
                g += tl.load(norm_k + at)
            wanted = tl.exp2(-rate * g)
        violation = mass * (tl.load(ratio + at, mask=cols < m, other=1.0) - wanted)
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
        floor = tl.load(penalty + 8 * b + FLOOR)
        gap, cycle = next_gap(gap, cycle, tl.load(gaps + 2 * b + 1), found, iteration, check_every, floor)
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


def _wait(words: int) -> tl.constexpr:
    """Assembler that reads so many words of 64 bits until the upper half of each is the round that is waited for."""
    first, last = 2 * words, 3 * words - 1
    registers = "".join(f".reg .b32 e{k}; .reg .b64 w{k}; " for k in range(words))
    loads = "".join(f"ld.relaxed.gpu.global.b64 w{k}, [${words + k}]; " for k in range(words))
    halves = "".join(f"mov.b64 {{${k}, e{k}}}, w{k}; " for k in range(words))
    tests = f"setp.ne.b32 p, e0, ${first}; "
    tests += "".join(f"setp.ne.or.b32 p, e{k}, ${first + k}, p; " for k in range(1, words))
    assert last < 100
    return tl.constexpr(f"{{ .reg .pred p; {registers} AGAIN: {loads}{halves}{tests}@p bra AGAIN; }}")


def _operands(words: int) -> tl.constexpr:
    """Outputs that overlap with no input, addresses, and rounds."""
    return tl.constexpr(",".join(["=&r"] * words + ["l"] * words + ["r"] * words))


WAIT_1, WAIT_2, WAIT_4, WAIT_8, WAIT_16 = (_wait(words) for words in (1, 2, 4, 8, 16))
OPERANDS_1, OPERANDS_2, OPERANDS_4, OPERANDS_8, OPERANDS_16 = (_operands(words) for words in (1, 2, 4, 8, 16))


@triton.jit
def awaited(where, turn, WORDS: tl.constexpr):
    """The numbers that others write to these places in this round. Every thread waits for its own, some at once."""
    turn = turn + tl.zeros(where.shape, tl.int32)
    if INTERPRETED_HERE:
        found = (tl.load(where) & 0xFFFFFFFF).to(tl.int32)
    elif WORDS >= 16:
        found = tl.inline_asm_elementwise(WAIT_16, OPERANDS_16, [where.to(tl.int64), turn], tl.int32, False, 16)
    elif WORDS == 8:
        found = tl.inline_asm_elementwise(WAIT_8, OPERANDS_8, [where.to(tl.int64), turn], tl.int32, False, 8)
    elif WORDS == 4:
        found = tl.inline_asm_elementwise(WAIT_4, OPERANDS_4, [where.to(tl.int64), turn], tl.int32, False, 4)
    elif WORDS == 2:
        found = tl.inline_asm_elementwise(WAIT_2, OPERANDS_2, [where.to(tl.int64), turn], tl.int32, False, 2)
    else:
        found = tl.inline_asm_elementwise(WAIT_1, OPERANDS_1, [where.to(tl.int64), turn], tl.int32, False, 1)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def tell(parts, number, turn):
    """Write numbers with the round they belong to: a word of 64 bits arrives as one."""
    bits = number.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(parts, bits | (turn.to(tl.int64) << 32), cache_modifier=".cg")


@triton.jit
def exchange(own, parts, part, count, lanes, pad, turn, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Add up, in base-2 logarithms, what ``count`` programs with the same rows (or columns) have found for them.

    Two places take turns for every number: who writes the next but one has had the next one of everybody, who by then
    had read this one.
    """
    parts += ((turn >> 1) & 1).to(tl.int64) * count * pad
    tell(parts + part * pad + lanes, own, turn)
    which = tl.arange(0, COUNT)
    where = parts + tl.minimum(which, count - 1)[:, None] * pad + lanes[None, :]
    found = awaited(where, turn, COUNT * lanes.shape[0] // THREADS)
    return log_sum(tl.where(which[:, None] < count, found, float("-inf")), 0)


@kernel
def resident(
    q1, q2, k1, k2, row_bias, log_a, log_b, weight, u_out, v_out, iterations, error, row_parts, column_parts,
    error_parts, turns, slopes, gaps, errors, looks: tl.int32, problems: tl.int32, n: tl.int32, m: tl.int32,
    tiles_q: tl.int32, tiles_k: tl.int32, max_iterations: tl.int32, check_every: tl.int32, tolerance: tl.float32,
    blocks_q: tl.int32, blocks_k: tl.int32, batch_weight: tl.int64, chunks: tl.int32, batch: tl.int64,
    stride_q: tl.int64, stride_k: tl.int64, squared: tl.int32, KIND: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COUNT_Q: tl.constexpr, COUNT_K: tl.constexpr, THREADS: tl.constexpr,
):
    """The whole loop in one launch: each program keeps one tile of scores in registers from the first iteration to
    the last.

    The programs of a problem exchange partial row sums and partial column sums once an iteration each. All programs
    must run at the same time. Sums are exchanged relative to the previous potentials, so that no digits go. Rounds are
    counted on from loop to loop in ``turns``, so that nothing of an earlier loop is taken for new.
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
    row_parts += 2 * b * tiles_k * pad_q
    column_parts += 2 * b * tiles_q * pad_k
    error_parts += b * tiles_k
    turn = tl.load(turns + b) + 1
    own = log_sum(scores + tl.load(row_bias + b * pad_q + rows)[:, None], 0)
    v = -exchange(own, column_parts, tile_q, tiles_q, cols, pad_k, turn, COUNT_Q, THREADS)
    u = tl.zeros([BLOCK_M], tl.float32)
    found = 0.0
    gap = tl.load(gaps + 2 * b)
    cycle, looked, iteration, going = check_every, 0, 0, 1
    while going == 1:
        iteration += 1
        bias = tl.where(c == float("-inf"), c, c + v)
        change = own_sum(scores, bias, u, rows < n, 1)
        turn += 1
        change = exchange(change, row_parts, tile_k, tiles_k, rows, pad_q, turn, COUNT_K, THREADS)
        u = relaxed(u, moved(u, change), relaxation(gap, cycle, looked, iteration, max_iterations, 0, 0.0), a)
        bias_q = tl.where(a == float("-inf"), a, a + u)
        turn += 1
        own = own_sum(scores, bias_q, v, cols < m, 0)
        change = exchange(own, column_parts, tile_q, tiles_q, cols, pad_k, turn, COUNT_Q, THREADS)
        factor = relaxation(gap, cycle, looked, iteration, max_iterations, 1, 0.0)
        if is_look(iteration, cycle, looked, max_iterations):
            before = found
            mass = tl.load(weight + b * batch_weight + cols, mask=cols < m, other=0.0)
            violation = tl.where(mass > 0, mass * (tl.exp2(change) - 1.0), 0.0)
            part = tl.sum(tl.where(squared == 1, violation * violation, tl.abs(violation)), 0)
            if tile_q == 0:
                tell(error_parts + tile_k, part, turn)
            each = tl.arange(0, COUNT_K)
            shares = awaited(error_parts + tl.minimum(each, tiles_k - 1), turn, COUNT_K // THREADS)
            found = tl.sum(tl.where(each < tiles_k, shares, 0.0), 0)
            found = tl.where(squared == 1, tl.sqrt(found), found)
            if (found < tolerance) | (iteration == max_iterations):
                going = 0
            if gap < 1.0:
                gap, cycle = next_gap(gap, cycle, before, found, iteration, check_every, 0.0)
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
