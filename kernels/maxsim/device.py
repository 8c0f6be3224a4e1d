"""Device code of MaxSim in Triton.

Rows of a query tile are slots: ``SLOT`` rows (a power of two) for each query, so several short queries share a tile.
Tiles of documents are never masked: the last one starts early and reads tokens for a second time, and positions beyond
the end of a document that is shorter than a tile read its last token again. The copies can neither win nor displace a
winner (equal values keep the first position).

float32 goes through the float16 matrix units in three products: every row is scaled by a power of two to a largest
magnitude in [2^13, 2^14), x = high + low in float16, and x.y = high.high + high.low + low.high in one float32 sum; what
is left out is 2^-22 of |x||y|.
"""

# ruff: noqa: RET505  (the compiler needs the else after a return)
import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    """The larger number, or what is none."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exponent(largest):
    """Powers of two that bring ``largest`` to [2^13, 2^14), and back."""
    bits = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 14)
    return ((267 - bits) << 23).to(tl.float32, bitcast=True), ((bits - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x):
    """High and low part in float16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _split(x):
    """High part, low part, and what the rows are to be multiplied with afterwards."""
    scale, back = _exponent(tl.max(tl.abs(x), axis=1))
    high, low = _halves(x * scale[:, None])
    return high, low, back


@triton.jit
def _similar(d, q_high, q_low, q_back, EXACT: tl.constexpr, DOCUMENT_ROWS: tl.constexpr):
    """Inner products of a document tile and a query tile, document tokens along the rows or along the columns."""
    if EXACT and d.dtype == tl.float16:  # 8-bit integers, which float16 holds
        if DOCUMENT_ROWS:
            s = tl.dot(d, tl.trans(q_low))
            return tl.dot(d, tl.trans(q_high), s) * q_back[None, :]
        else:
            s = tl.dot(q_low, tl.trans(d))
            return tl.dot(q_high, tl.trans(d), s) * q_back[:, None]
    elif EXACT:
        high, low, back = _split(d)
        if DOCUMENT_ROWS:
            s = tl.dot(low, tl.trans(q_high))
            s = tl.dot(high, tl.trans(q_low), s)
            s = tl.dot(high, tl.trans(q_high), s)
            return s * back[:, None] * q_back[None, :]
        else:
            s = tl.dot(q_high, tl.trans(low))
            s = tl.dot(q_low, tl.trans(high), s)
            s = tl.dot(q_high, tl.trans(high), s)
            return s * q_back[:, None] * back[None, :]
    elif DOCUMENT_ROWS:
        return tl.dot(d, tl.trans(q_high))
    else:
        return tl.dot(q_high, tl.trans(d))


@triton.jit
def _masked(similar, mask, there, ZERO: tl.constexpr, DOCUMENT_ROWS: tl.constexpr):
    """Similarities without those of masked document tokens."""
    BT: tl.constexpr = mask.shape[0]
    keep = tl.load(mask, mask=there, other=0) != 0
    fill = 0.0 if ZERO else float("-inf")
    if DOCUMENT_ROWS:
        return tl.where(keep[:, None], similar, fill)
    elif BT == 32 or BT == 64:  # as bits of a word, which every thread can hold; else each would load what it needs
        column = tl.arange(0, BT)
        bits = keep.to(tl.int32) << (column & 31)
        if BT == 32:
            word = tl.sum(bits, axis=0)
        else:
            low, high = tl.split(tl.reshape(tl.sum(tl.reshape(bits, (2, 32)), axis=1), (1, 2)))
            word = tl.where(column < 32, low, high)
        return tl.where(((word >> (column & 31)) & 1)[None, :] != 0, similar, fill)
    else:
        return tl.where(keep[None, :], similar, fill)


@triton.jit
def _load(base, rows, columns, SIZE: tl.constexpr, BD: tl.constexpr):
    """Rows of embeddings; ``rows`` are offsets of their first numbers."""
    if SIZE % BD == 0:
        return tl.load(base + rows[:, None] + columns[None, :])
    else:
        return tl.load(base + rows[:, None] + columns[None, :], mask=columns[None, :] < SIZE, other=0.0)


@triton.jit
def _similar_to_codes(
    q_ptr, q_rows, codes, spot, packed, at, centroids, weights, SIZE: tl.constexpr, BD: tl.constexpr,
    BQ: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr, DOCUMENT_ROWS: tl.constexpr,
):  # fmt: skip
    """Inner products with tokens that are a centroid + one weight in each dimension, scaled to length 1.

    A byte holds the buckets of several dimensions, the first one in its highest bits. Each place in a byte is a plane
    of every so many dimensions, and queries and centroids come with the dimensions of a plane side by side, so that
    bytes are read once and shifted as a whole. Weights are ordered by the bits as they lie in the byte.
    """
    BYTES: tl.constexpr = SIZE * BITS // 8
    PLANE: tl.constexpr = BD * BITS // 8 if BD * BITS // 8 > 16 else 16
    BT: tl.constexpr = spot.shape[0]
    columns = tl.arange(0, PLANE)
    inside = columns[None, :] < BYTES
    code = tl.load(codes + spot).to(tl.int64) * SIZE
    row = (at + spot) * BYTES
    byte = tl.load(packed + row[:, None] + columns[None, :], mask=inside, other=0).to(tl.int32)
    squares = tl.zeros([BT], tl.float32)
    if DOCUMENT_ROWS:
        similar = tl.zeros([BT, BQ], tl.float32)
    else:
        similar = tl.zeros([BQ, BT], tl.float32)
    for plane in tl.static_range(8 // BITS):
        place = plane * BYTES + columns
        bucket = (byte >> (8 - BITS - plane * BITS)) & ((1 << BITS) - 1)
        d = tl.load(centroids + code[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, d + tl.load(weights + bucket), 0.0)
        squares += tl.sum(d * d, axis=1)
        some = tl.load(q_ptr + q_rows[:, None] + place[None, :], mask=inside, other=0.0)
        if EXACT:
            high, low, back = _split(some)
            similar += _similar(d, high, low, back, EXACT, DOCUMENT_ROWS)
        else:
            similar += _similar(d.to(some.dtype), some, some, some, EXACT, DOCUMENT_ROWS)
    if UNIT:
        scale = 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)
        if DOCUMENT_ROWS:
            similar = similar * scale[:, None]
        else:
            similar = similar * scale[None, :]
    return similar


@triton.jit
def _first_of(values, places, ROWS: tl.constexpr, COUNT: tl.constexpr, FOLD: tl.constexpr, STEP: tl.constexpr):
    """The largest of ``COUNT`` columns that are ``FOLD`` apart, and its number, as a float; of equal ones the first.

    Numbers are made where numbers are multiplied: what compares and selects has enough to do with the values.
    """
    if COUNT == 1:
        return tl.reshape(values, (ROWS, FOLD)), tl.reshape(places, (ROWS, FOLD))
    else:
        HALF: tl.constexpr = COUNT // 2
        a, b = tl.split(tl.permute(tl.reshape(values, (ROWS, HALF, 2, FOLD)), (0, 1, 3, 2)))
        later = (b > a).to(tl.float32)
        if STEP == 1:
            found = later
        else:
            at_a, at_b = tl.split(tl.permute(tl.reshape(places, (ROWS, HALF, 2, FOLD)), (0, 1, 3, 2)))
            found = tl.fma(later, at_b - at_a + STEP, at_a)
        return _first_of(_larger(a, b), found, ROWS, HALF, FOLD, 2 * STEP)


@triton.jit
def _folded(similar, ROWS: tl.constexpr, BT: tl.constexpr, FOLD: tl.constexpr, RECORD: tl.constexpr):
    """Of each ``FOLD`` columns' multiples the largest, and, to be recorded, which one it is."""
    if RECORD:
        return _first_of(similar, similar, ROWS, BT // FOLD, FOLD, 1)
    else:
        found = tl.reduce(tl.reshape(similar, (ROWS, BT // FOLD, FOLD)), 1, _larger)
        return found, found


@triton.jit
def _first_and_length(offsets, item, longest, PACKED: tl.constexpr):
    """Where an item starts in packed tokens (0 otherwise), and how many tokens it holds."""
    if PACKED:
        first = tl.load(offsets + item)
        return first, (tl.load(offsets + item + 1) - first).to(tl.int32)
    else:
        return item.to(tl.int64) * 0, item * 0 + longest


@triton.jit
def _trimmed(mask, length):
    """Length up to the last kept token."""
    found = 0
    for at in range(0, length, 512):
        place = at + tl.arange(0, 512)
        keep = tl.load(mask + place, mask=place < length, other=0)
        found = tl.maximum(found, tl.max(tl.where(keep != 0, place + 1, 0), axis=0))
    return found


@triton.jit
def _score_document(
    document, columns, query, token, exists, counts, q_rows, q, q_high, q_low, q_back,
    q_ptr, d_ptr, winners, d_mask_ptr, d_offsets, floors, extra, centroids, weights,
    longest_query, longest_document, w_document, d_item, d_token,
    SIZE: tl.constexpr, BD: tl.constexpr, OWNED: tl.constexpr, HAS_D_MASK: tl.constexpr, D_PACKED: tl.constexpr,
    BQ: tl.constexpr, BT: tl.constexpr, DOCUMENT_ROWS: tl.constexpr, STAGES: tl.constexpr, SLOT: tl.constexpr,
    EXACT: tl.constexpr, RECORD: tl.constexpr, NONE: tl.constexpr, ZERO: tl.constexpr, HAS_FLOORS: tl.constexpr,
    INT8: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, REGISTERS: tl.constexpr, FOLD: tl.constexpr,
    CLOSE: tl.constexpr,
):  # fmt: skip
    """One document and one tile of queries: sums over the slots of each query, after its winners are stored."""
    row = tl.arange(0, BQ)
    ONE: tl.constexpr = SIZE <= BD
    AXIS: tl.constexpr = 0 if DOCUMENT_ROWS else 1
    PER: tl.constexpr = BQ // SLOT
    KEPT: tl.constexpr = FOLD if FOLD else BT
    d_first, d_length = _first_and_length(d_offsets, document, longest_document, D_PACKED)
    if D_PACKED:
        d_at = d_first
        d_base = d_ptr + d_first * d_token
    else:
        d_at = document.to(tl.int64) * longest_document
        d_base = d_ptr + document.to(tl.int64) * d_item
    length = d_length
    if HAS_D_MASK:
        d_mask = d_mask_ptr + d_at
        length = _trimmed(d_mask, d_length)

    if DOCUMENT_ROWS:
        best = tl.full((BT, BQ), float("-inf"), tl.float32)
        step = tl.zeros((BT, BQ), tl.int32)
    else:
        best = tl.full((BQ, KEPT), float("-inf"), tl.float32)
        step = tl.zeros((BQ, KEPT), tl.float32 if FOLD else tl.int32)

    within = tl.minimum(tl.arange(0, BT), length - 1)
    last = tl.maximum(length - BT, 0)
    begin = 0
    if REGISTERS:
        # Queries stay in registers for the loop only if something outside it needs them there too: the first tile.
        begin = BT
        there = within >= 0
        d = tl.load(
            d_base + within.to(tl.int64)[:, None] * d_token + columns[None, :],
            mask=there[:, None] & (columns[None, :] < SIZE),
            other=0.0,
        )
        best = _similar(d, q_high, q_low, q_back, EXACT, False)
        if HAS_D_MASK:
            best = _masked(best, d_mask + within, there, ZERO, False)
        if FOLD:
            best, number = _folded(best, BQ, BT, FOLD, RECORD)
            if RECORD:
                step = number * FOLD
        best = tl.where(length > 0, best, float("-inf"))
    for at in tl.range(begin, length, BT, num_stages=STAGES):
        start = tl.minimum(at, last)
        spot = start + within
        if CLOSE:
            d_tile = d_base + start.to(tl.int64) * SIZE
            d_rows = within * SIZE
        else:
            d_tile = d_base + start.to(tl.int64) * d_token
            d_rows = within.to(tl.int64) * d_token
        if INT8:
            d = _load(d_tile, d_rows, columns, SIZE, BD)
            similar = _similar(d.to(tl.float16 if EXACT else q.dtype), q_high, q_low, q_back, EXACT, DOCUMENT_ROWS)
            scale = tl.load(extra + d_at + spot)
            if DOCUMENT_ROWS:
                similar = similar * scale[:, None]
            else:
                similar = similar * scale[None, :]
        elif BITS > 0:
            similar = _similar_to_codes(
                q_ptr, q_rows, d_base, spot, extra, d_at, centroids, weights, SIZE, BD, BQ, BITS, UNIT, EXACT,
                DOCUMENT_ROWS,
            )  # fmt: skip
        elif ONE:
            d = _load(d_tile, d_rows, columns, SIZE, BD)
            similar = _similar(d, q_high, q_low, q_back, EXACT, DOCUMENT_ROWS)
        else:
            if DOCUMENT_ROWS:
                similar = tl.zeros((BT, BQ), tl.float32)
            else:
                similar = tl.zeros((BQ, BT), tl.float32)
            for chunk in range(0, SIZE, BD):
                d = _load(d_tile, d_rows, chunk + columns, SIZE, BD)
                some = _load(q_ptr, q_rows, chunk + columns, SIZE, BD)
                if EXACT:
                    high, low, back = _split(some)
                    similar += _similar(d, high, low, back, EXACT, DOCUMENT_ROWS)
                else:
                    similar += _similar(d, some, some, row, EXACT, DOCUMENT_ROWS)
        if HAS_D_MASK:
            similar = _masked(similar, d_mask + spot, spot >= 0, ZERO, DOCUMENT_ROWS)
        if FOLD:
            similar, number = _folded(similar, BQ, BT, FOLD, RECORD)
            if RECORD:
                step = tl.where(similar > best, start.to(tl.float32) + number * FOLD, step)
        elif RECORD:
            step = tl.where(similar > best, start, step)
        best = _larger(best, similar)

    top = tl.reduce(best, AXIS, _larger)
    wrong = top != top
    if RECORD:
        spot = tl.arange(0, KEPT)
        step = step.to(tl.int32)
        if DOCUMENT_ROWS:
            found = tl.where(best == top[None, :], step + spot[:, None], 2147483647)
        else:
            found = tl.where(best == top[:, None], step + spot[None, :], 2147483647)
        winner = tl.maximum(tl.minimum(tl.min(found, axis=AXIS), length - 1), 0)  # beyond the end: the last token
        chosen = counts & (top > float("-inf"))
        if HAS_D_MASK and ZERO:
            chosen = chosen & (tl.load(d_mask + winner, mask=chosen, other=0) != 0)
    floor = False
    if HAS_FLOORS:
        floor = tl.load(floors + document) != 0
    if HAS_D_MASK and ZERO:
        floor = floor | (length < d_length)
    if HAS_FLOORS or (HAS_D_MASK and ZERO):
        if RECORD:
            chosen = chosen & ((top >= 0) | (floor == 0))
        top = tl.where(floor & (wrong == 0), tl.maximum(top, 0.0), top)
    top = tl.where(counts, top, 0.0)
    if RECORD:
        to = document.to(tl.int64) * w_document + token
        if not OWNED:
            to += query.to(tl.int64) * longest_query
        tl.store(winners + to, tl.where(chosen, winner, NONE), mask=exists & (token < longest_query))
    return tl.sum(tl.reshape(top, (PER, SLOT)), axis=1)


@triton.jit
def _query_tile(
    query, token, exists, q_ptr, q_mask_ptr, q_offsets, columns, longest_query, q_item, q_token,
    SIZE: tl.constexpr, BD: tl.constexpr, HAS_Q_MASK: tl.constexpr, Q_PACKED: tl.constexpr, EXACT: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Tokens of queries: which of them count, where they lie, and, where they fit on the chip, the tokens."""
    q_first, q_length = _first_and_length(q_offsets, query, longest_query, Q_PACKED)
    inside = exists & (token < q_length)
    place = tl.maximum(tl.minimum(token, q_length - 1), 0)
    if Q_PACKED:
        q_at = q_first + place
        # an empty query at the very end has no token to read
        q_at = tl.where(inside, q_at, 0)
        q_rows = q_at * q_token
    else:
        q_rows = query.to(tl.int64) * q_item + place.to(tl.int64) * q_token
        q_at = query.to(tl.int64) * longest_query + place
    counts = inside
    if HAS_Q_MASK:
        counts = inside & (tl.load(q_mask_ptr + q_at, mask=inside, other=0) != 0)
    if SIZE <= BD:
        q = _load(q_ptr, q_rows, columns, SIZE, BD)
        if EXACT:
            high, low, back = _split(q)
            return counts, q_rows, q, high, low, back
        else:
            if REGISTERS:  # what was loaded would go to shared memory; what was computed need not
                q = tl.where(exists[:, None], q, 0.0)
            return counts, q_rows, q, q, q, token
    else:
        return counts, q_rows, token, token, token, token


@triton.jit(do_not_specialize=[
    "tiles", "parts", "queries", "documents", "groups", "per_query", "per_part",
    "longest_query", "longest_document", "set_size", "w_document",
])  # fmt: skip
def scores_kernel(
    q_ptr, d_ptr, scores, winners, q_mask_ptr, d_mask_ptr,
    q_offsets, d_offsets, owners, floors, extra, centroids, weights,
    tiles, parts, queries, documents, groups, per_query, per_part, longest_query, longest_document, set_size,
    w_document, q_item, q_token, d_item, d_token,
    SIZE: tl.constexpr, BD: tl.constexpr, OWNED: tl.constexpr, HAS_OWNERS: tl.constexpr,
    HAS_Q_MASK: tl.constexpr, HAS_D_MASK: tl.constexpr, Q_PACKED: tl.constexpr, D_PACKED: tl.constexpr,
    BQ: tl.constexpr, BT: tl.constexpr, DOCUMENT_ROWS: tl.constexpr, STAGES: tl.constexpr,
    SLOT: tl.constexpr, EXACT: tl.constexpr, RECORD: tl.constexpr, NONE: tl.constexpr,
    ZERO: tl.constexpr, HAS_FLOORS: tl.constexpr, INT8: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    REGISTERS: tl.constexpr, FOLD: tl.constexpr, CLOSE: tl.constexpr,
    GROUPED: tl.constexpr, FLAT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scores of one tile of queries and one document, or each ``groups``-th one from it.

    Tiles run fastest, so neighbours share a document in cache. ``FLAT``: the next document is loaded before the scores
    of this one are done. ``WHOLE``: all parts of a long query, one after the other.
    """
    PER: tl.constexpr = BQ // SLOT
    program = tl.program_id(0)
    first = program // tiles
    tile = program % tiles
    row = tl.arange(0, BQ)
    columns = tl.arange(0, BD)
    group = tile if WHOLE else tile // parts

    if OWNED:
        if HAS_OWNERS:
            owner = tl.load(owners + first).to(tl.int32)
        else:
            owner = first // set_size
        query = owner + row * 0
        out = scores + tl.arange(0, PER)
        stored = tl.arange(0, PER) >= 0
    else:
        query = group * PER + row // SLOT
        which = group * PER + tl.arange(0, PER)
        out = scores + which.to(tl.int64) * per_query
        stored = which < queries
    exists = query < queries
    query = tl.minimum(query, queries - 1)
    token = row % SLOT

    if WHOLE:
        total = tl.zeros((PER,), tl.float32)
        for each in range(parts):
            now = each * BQ + token
            counts, q_rows, q, q_high, q_low, q_back = _query_tile(
                query, now, exists, q_ptr, q_mask_ptr, q_offsets, columns, longest_query, q_item, q_token,
                SIZE, BD, HAS_Q_MASK, Q_PACKED, EXACT, REGISTERS,
            )  # fmt: skip
            total += _score_document(
                first, columns, query, now, exists, counts, q_rows, q, q_high, q_low, q_back,
                q_ptr, d_ptr, winners, d_mask_ptr, d_offsets, floors, extra, centroids, weights,
                longest_query, longest_document, w_document, d_item, d_token,
                SIZE, BD, OWNED, HAS_D_MASK, D_PACKED, BQ, BT, DOCUMENT_ROWS, STAGES, SLOT, EXACT, RECORD, NONE, ZERO,
                HAS_FLOORS, INT8, BITS, UNIT, REGISTERS, FOLD, CLOSE,
            )  # fmt: skip
        tl.store(out + first, total, mask=stored)
    else:
        part = tile % parts
        token += part * BQ
        out += part.to(tl.int64) * per_part
        counts, q_rows, q, q_high, q_low, q_back = _query_tile(
            query, token, exists, q_ptr, q_mask_ptr, q_offsets, columns, longest_query, q_item, q_token,
            SIZE, BD, HAS_Q_MASK, Q_PACKED, EXACT, REGISTERS,
        )  # fmt: skip
        if GROUPED:
            for each in tl.range(first, documents, groups, flatten=FLAT):
                document = program * 0 + each
                total = _score_document(
                    document, columns, query, token, exists, counts, q_rows, q, q_high, q_low, q_back,
                    q_ptr, d_ptr, winners, d_mask_ptr, d_offsets, floors, extra, centroids, weights,
                    longest_query, longest_document, w_document, d_item, d_token,
                    SIZE, BD, OWNED, HAS_D_MASK, D_PACKED, BQ, BT, DOCUMENT_ROWS, STAGES, SLOT, EXACT, RECORD, NONE,
                    ZERO, HAS_FLOORS, INT8, BITS, UNIT, REGISTERS, FOLD, CLOSE,
                )  # fmt: skip
                tl.store(out + document, total, mask=stored)
        else:  # no loop of one turn, in which the compiler would not see what can stay in registers
            total = _score_document(
                first, columns, query, token, exists, counts, q_rows, q, q_high, q_low, q_back,
                q_ptr, d_ptr, winners, d_mask_ptr, d_offsets, floors, extra, centroids, weights,
                longest_query, longest_document, w_document, d_item, d_token,
                SIZE, BD, OWNED, HAS_D_MASK, D_PACKED, BQ, BT, DOCUMENT_ROWS, STAGES, SLOT, EXACT, RECORD, NONE, ZERO,
                HAS_FLOORS, INT8, BITS, UNIT, REGISTERS, FOLD, CLOSE,
            )  # fmt: skip
            tl.store(out + first, total, mask=stored)


@triton.jit
def _quotient(number, magic, places):
    """``number // divisor`` for numbers below 2^31; ``magic`` is 2^places / divisor, rounded up."""
    return ((number.to(tl.int64) * magic) >> places).to(tl.int32)


@triton.jit
def _one_each(token, weight, BT: tl.constexpr):
    """(entries, BT): in each row its weight at its token, else zeros."""
    return tl.trans(tl.where(token[None, :] == tl.arange(0, BT)[:, None], weight[None, :], 0.0))


@triton.jit
def _document_gradient(
    item, mine, q_ptr, gradient, winners, to_d, q_offsets, d_offsets, owners,
    tiles, queries, g_query, g_document, longest_query, longest_document, set_size, w_document, magic, places,
    q_item, q_token, SIZE: tl.constexpr, BD: tl.constexpr, OWNED: tl.constexpr, HAS_OWNERS: tl.constexpr,
    Q_PACKED: tl.constexpr, D_PACKED: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCAN: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, NONE: tl.constexpr, LINEAR: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """One tile of one document's gradient: (who chose this token) x (query tokens), a product on the matrix units.

    Winners are scanned ``SCAN`` at a time; the rows that chose a token of this tile are written one after the other to
    a ring of the program's own, and only they are multiplied: in the order of the rows, so sums have one order.
    """
    CHUNKS: tl.constexpr = (SIZE + BD - 1) // BD
    SHIFT: tl.constexpr = BT.bit_length() - 1
    RING: tl.constexpr = 2 * SCAN  # fewer than BK are left when the next SCAN arrive
    columns = (item % CHUNKS) * BD + tl.arange(0, BD)
    item = item // CHUNKS
    document = item // tiles
    low = (item % tiles) * BT
    d_first, length = _first_and_length(d_offsets, document, longest_document, D_PACKED)
    if low < length:
        if OWNED:
            if HAS_OWNERS:
                only = tl.load(owners + document).to(tl.int32)
            else:
                only = document // set_size
            rows = longest_query
        else:
            only = 0
            rows = queries * longest_query
        chosen = winners + document.to(tl.int64) * w_document
        slopes = gradient + document.to(tl.int64) * g_document
        total = tl.zeros((BD, BT), tl.float32)
        row = tl.arange(0, SCAN)
        choice = tl.load(chosen + row, mask=row < rows, other=NONE).to(tl.int32)
        found = 0
        done = 0
        for start in range(0, rows, SCAN):
            hit = (choice >= low) & (choice < low + BT) & (choice != NONE)
            place = (found + tl.cumsum(hit.to(tl.int32), 0) - 1) & (RING - 1)
            tl.debug_barrier()  # what is overwritten has been read by all
            tl.store(mine + place, (start + row).to(mine.dtype.element_ty) * BT + (choice - low), mask=hit)
            tl.debug_barrier()  # what is read has been written by all
            found += tl.sum(hit.to(tl.int32), 0)
            ahead = start + SCAN + row
            choice = tl.load(chosen + ahead, mask=ahead < rows, other=NONE).to(tl.int32)
            stop = tl.where(start + SCAN >= rows, found, found // BK * BK)
            for at in tl.range(done, stop, BK, num_stages=STAGES):
                entry = at + tl.arange(0, BK)
                packed = tl.load(mine + (tl.minimum(entry, stop - 1) & (RING - 1)))
                source = packed >> SHIFT
                query = _quotient(source, magic, places)
                g = tl.load(slopes + (only + query).to(tl.int64) * g_query).to(tl.float32)
                g = tl.where(entry < stop, g, 0.0)
                if LINEAR:
                    q_rows = source * q_token if NEAR else source.to(tl.int64) * q_token
                elif Q_PACKED:
                    q_rows = (tl.load(q_offsets + only + query) + source - query * longest_query) * q_token
                else:
                    q_rows = (only + query).to(tl.int64) * q_item + (source - query * longest_query) * q_token
                q = _load(q_ptr, q_rows, columns, SIZE, BD)
                token = (packed & (BT - 1)).to(tl.int32)
                if EXACT:
                    g_scale, g_back = _exponent(tl.max(tl.abs(g), axis=0))
                    q_scale, q_back = _exponent(tl.max(tl.max(tl.abs(q), axis=1), axis=0))
                    g_high, g_low = _halves(g * g_scale)
                    q_high, q_low = _halves(q * q_scale)
                    high = _one_each(token, g_high, BT)
                    sums = tl.dot(tl.trans(q_high), _one_each(token, g_low, BT))
                    sums = tl.dot(tl.trans(q_low), high, sums)
                    sums = tl.dot(tl.trans(q_high), high, sums)
                    total += sums * g_back * q_back
                elif SCALED:
                    g_scale, g_back = _exponent(tl.max(tl.abs(g), axis=0))
                    total += tl.dot(tl.trans(q), _one_each(token, (g * g_scale).to(tl.float16), BT)) * g_back
                else:
                    total = tl.dot(tl.trans(q), _one_each(token, g.to(q.dtype), BT), total)
            done = stop
        spot = tl.arange(0, BT)
        if D_PACKED:
            to = (d_first + low + spot) * SIZE
        else:
            to = (document.to(tl.int64) * longest_document + low + spot) * SIZE
        tl.store(
            to_d + to[:, None] + columns[None, :],
            tl.trans(total).to(to_d.dtype.element_ty),
            mask=(low + spot < length)[:, None] & (columns[None, :] < SIZE),
        )


@triton.jit
def _chosen_of(
    document, j, high, there, w_at, g_at, d_at, gradient, winners, d_offsets, g_document, w_document, d_token,
    D_PACKED: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """What rows of queries chose in documents from ``document`` on: where it starts, whether it is anything, its slope.

    Padded documents: the start is counted from that of ``document``.
    """
    inside = there & (document + j < high)
    at = document.to(tl.int64)
    winner = tl.load(winners + at * w_document + w_at, mask=inside, other=NONE).to(tl.int32)
    g = tl.load(gradient + at * g_document + g_at, mask=inside, other=0.0).to(tl.float32)
    if D_PACKED:
        rows = (tl.load(d_offsets + document + j, mask=inside, other=0) + winner) * d_token
    else:
        rows = d_at + winner.to(d_at.dtype) * d_token
    return rows, winner != NONE, g


@triton.jit
def _query_gradient(
    program, d_ptr, gradient, winners, to_q, q_offsets, d_offsets, sets,
    tiles, queries, documents, g_query, g_document, longest_query, set_size, w_document, magic, places,
    d_item, d_token, SIZE: tl.constexpr, BD: tl.constexpr, OWNED: tl.constexpr, HAS_OWNERS: tl.constexpr,
    Q_PACKED: tl.constexpr, D_PACKED: tl.constexpr, BS: tl.constexpr, BJ: tl.constexpr, GATHERS: tl.constexpr,
    NONE: tl.constexpr, NEAR: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of a few query tokens: the document tokens they chose, weighted and summed.

    The tokens are those of one query if each has documents of its own, else any that follow one another. ``BJ``
    documents at a time have sums of their own, which meet at the end. What was chosen in the next documents is read
    while the tokens chosen in these are on their way.
    """
    CHUNKS: tl.constexpr = (SIZE + BD - 1) // BD
    FAR: tl.constexpr = tl.int32 if NEAR else tl.int64
    columns = (program % CHUNKS) * BD + tl.arange(0, BD)
    program = program // CHUNKS
    slot = tl.arange(0, BS * BJ)
    if OWNED:
        first = program // tiles
        token = (program % tiles) * BS + slot % BS
        query = first + token * 0
        place = token
        there = token < longest_query
        if HAS_OWNERS:
            low = tl.load(sets + first).to(tl.int32)
            high = tl.load(sets + first + 1).to(tl.int32)
        else:
            low = first * set_size
            high = low + set_size
    else:
        place = program * BS + slot % BS
        query = _quotient(place, magic, places)
        token = place - query * longest_query
        there = query < queries
        low = 0
        high = documents
    if Q_PACKED:
        q_first = tl.load(q_offsets + query, mask=there, other=0)
        there = there & (q_first + token < tl.load(q_offsets + query + 1, mask=there, other=0))
        to = (q_first + token) * SIZE
    else:
        to = (query.to(tl.int64) * longest_query + token) * SIZE
    j = slot // BS
    w_at = j.to(FAR) * w_document + place
    g_at = j.to(FAR) * g_document + query.to(FAR) * g_query
    d_at = j.to(FAR) * d_item
    total = tl.zeros((BS * BJ, BD), tl.float32)
    rows, live, g = _chosen_of(
        program * 0 + low, j, high, there, w_at, g_at, d_at, gradient, winners, d_offsets, g_document, w_document,
        d_token, D_PACKED, NONE,
    )  # fmt: skip
    for start in tl.range(low, high, BJ, num_stages=GATHERS):
        document = program * 0 + start
        if D_PACKED:
            base = d_ptr
        else:
            base = d_ptr + document.to(tl.int64) * d_item
        found = tl.load(
            base + rows[:, None] + columns[None, :], mask=live[:, None] & (columns[None, :] < SIZE), other=0.0
        )
        slope = g
        rows, live, g = _chosen_of(
            document + BJ, j, high, there, w_at, g_at, d_at, gradient, winners, d_offsets, g_document, w_document,
            d_token, D_PACKED, NONE,
        )  # fmt: skip
        total += found.to(tl.float32) * slope[:, None]
    if BJ > 1:
        total = tl.sum(tl.reshape(total, (BJ, BS, BD)), axis=0)
        to = tl.max(tl.reshape(to, (BJ, BS)), axis=0)  # they are all the same
        there = tl.max(tl.reshape(there.to(tl.int32), (BJ, BS)), axis=0) != 0
    inside = there[:, None] & (columns[None, :] < SIZE)
    if ADDED:
        total += tl.load(to_q + to[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(to_q + to[:, None] + columns[None, :], total.to(to_q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[
    "programs_d", "items", "tiles_d", "tiles_q", "queries", "documents", "g_query", "g_document", "longest_query",
    "longest_document", "set_size", "w_document", "magic", "places",
])  # fmt: skip
def gradients_kernel(
    q_ptr, d_ptr, gradient, winners, ring, to_q, to_d, q_offsets, d_offsets, owners, sets,
    programs_d, items, tiles_d, tiles_q, queries, documents, g_query, g_document,
    longest_query, longest_document, set_size, w_document, magic, places, q_item, q_token, d_item, d_token,
    SIZE: tl.constexpr, BD: tl.constexpr, OWNED: tl.constexpr, HAS_OWNERS: tl.constexpr, Q_PACKED: tl.constexpr,
    D_PACKED: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SCAN: tl.constexpr, BS: tl.constexpr, BJ: tl.constexpr,
    STAGES: tl.constexpr, GATHERS: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, NONE: tl.constexpr,
    LINEAR: tl.constexpr, NEAR: tl.constexpr, FOR_QUERIES: tl.constexpr, FOR_DOCUMENTS: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Both gradients in one launch: the first ``programs_d`` programs own document tiles, the others query tokens.

    A gradient that is not wanted has no pointer, so its half must not be compiled.
    """
    program = tl.program_id(0)
    if FOR_DOCUMENTS:
        if program < programs_d:
            mine = ring + program.to(tl.int64) * 2 * SCAN
            for item in range(program, items, programs_d):
                _document_gradient(
                    item, mine, q_ptr, gradient, winners, to_d, q_offsets, d_offsets, owners,
                    tiles_d, queries, g_query, g_document, longest_query, longest_document, set_size, w_document,
                    magic, places, q_item, q_token, SIZE, BD, OWNED, HAS_OWNERS, Q_PACKED, D_PACKED, BT, BK, SCAN,
                    STAGES, EXACT, SCALED, NONE, LINEAR, NEAR,
                )  # fmt: skip
    if FOR_QUERIES:
        if program >= programs_d:
            _query_gradient(
                program - programs_d, d_ptr, gradient, winners, to_q, q_offsets, d_offsets, sets,
                tiles_q, queries, documents, g_query, g_document, longest_query, set_size, w_document, magic, places,
                d_item, d_token, SIZE, BD, OWNED, HAS_OWNERS, Q_PACKED, D_PACKED, BS, BJ, GATHERS, NONE, NEAR, ADDED,
            )  # fmt: skip
