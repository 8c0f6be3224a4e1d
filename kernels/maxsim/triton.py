"""MaxSim on CUDA: what runs where; the device code is in ``device`` and the launch shapes in ``tuning``.

Forward: several short queries share one tile, which stays on chip while the tokens of a document stream past it; a
program keeps an elementwise running maximum and reduces it once, at the end. Backward: one launch in which every
program owns a tile of a document's gradient or of a query's, so there are no atomics and sums have one order.
"""

from functools import lru_cache

import torch

from . import tuning
from .device import gradients_kernel, scores_kernel
from .launch import Plan, start
from .layout import document_count, index_dtype, none_of, query_count, winners_shape

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 4096
TOGETHER = 1 << 22  # winners up to which both gradients are one launch; with more each has its own registers
_plans: dict[tuple, Plan] = {}
_ALONE = (None,) * 6
_NO_EXTRAS = (None,) * 3


def applies(request) -> str | None:
    """16- and 32-bit floats on a GPU with matrix units for them."""
    tokens = request.queries
    if not isinstance(request.documents, torch.Tensor) and tokens.shape[-1] > 128:
        return f"it takes documents in few bits up to 128 dimensions, not {tokens.shape[-1]}"
    if tokens.dtype not in FLOATS:
        return f"it takes float32, float16 and bfloat16, not {tokens.dtype}"
    if tokens.shape[-1] > LARGEST or tokens.shape[-1] == 0:
        return f"it takes embeddings of 1 to {LARGEST} numbers, not {tokens.shape[-1]}"
    if tokens.is_cuda and tuning.capability(tokens.device.index or 0) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None


def forward(problem, record):
    """Scores, and the winning positions if asked for; see ``layout``."""
    coded, extras = None, _NO_EXTRAS
    if type(problem.documents) is not torch.Tensor:
        problem, coded, extras = _opened(problem)
    key = ("scores", record, coded, *_kind(problem))
    plan = _plans.get(key) or _remember(key, _forward_plan(problem, record, coded))
    if plan.copies:
        problem = _contiguous_rows(problem)
    tokens = problem.queries
    winners = tokens.new_empty(plan.winners, dtype=plan.index) if record else None
    if not plan.programs:
        return tokens.new_zeros(plan.shape, dtype=torch.float32), winners
    scores = tokens.new_empty(plan.shape, dtype=torch.float32)
    start(scores_kernel, plan, (*problem[:8], *extras, scores, winners))
    return scores.sum(0) if plan.parts else scores, winners


def _forward_plan(problem, record, coded):
    """Grid, numbers and constants of the forward kernel. Queries longer than a tile are summed part by part."""
    copied = _contiguous_rows(problem)
    queries, documents = query_count(problem), document_count(problem)
    constants, columns, slot = _forward_constants(problem, queries, record, coded)
    parts = max(-(-problem.longest_query // columns), 1)
    tiles = parts if problem.set_size else parts * -(-queries // (columns // slot))
    groups = _groups(problem, tiles, documents, constants.pop("PROGRAMS"))
    constants["GROUPED"] = groups < documents
    shape = (documents,) if problem.set_size else (queries, documents)
    strides = (1, documents) if problem.set_size else (documents, queries * documents)
    index = index_dtype(problem.longest_document)
    return Plan(
        programs=tiles * groups if queries and problem.longest_query else 0,
        numbers=(tiles, parts, queries, documents, groups, *strides, *_sizes(copied)),
        constants=constants,
        copies=copied is not problem,
        shape=(parts, *shape) if parts > 1 else shape,
        parts=parts > 1,
        winners=winners_shape(problem),
        index=index,
    )


def _forward_constants(problem, queries, record, coded):
    width = _power(problem.longest_query)
    rows = width if problem.set_size else min(width * _power(queries), 1 << 20)
    exact = problem.queries.dtype == torch.float32
    found = _common(problem)
    found.update(tuning.forward(problem.queries.device, rows, problem.longest_document, exact, record))
    columns = min(max(rows, 16), found["BQ"])
    slot = columns if problem.set_size else min(width, columns)
    found.update(BQ=columns, SLOT=slot, EXACT=exact, RECORD=record, NONE=none_of(index_dtype(problem.longest_document)))
    found["BD"] = _block(found["SIZE"], 128 if exact or found["SIZE"] > 256 else 256)
    if found["SIZE"] > found["BD"]:  # the query tile is read again with each part of the embeddings
        found.update(STAGES=2, num_warps=8)
    found["num_stages"] = found["STAGES"]  # for the loops that do not say it themselves
    found["FOLD"] = 0 if record or found["DOCUMENT_ROWS"] else found.get("FOLD", 0)
    found.setdefault("PROGRAMS", 0)
    found.setdefault("FLAT", False)
    plain = coded is None and not exact and found["SIZE"] <= found["BD"] and not found["DOCUMENT_ROWS"]
    found["REGISTERS"] = plain and found.get("REGISTERS", False)
    int8, bits, unit = coded or (False, 0, False)
    found["CLOSE"] = problem.documents.stride(-2) == found["SIZE"] == found["BD"]
    found.update(INT8=int8, BITS=bits, UNIT=unit)
    found.update(ZERO=problem.masked == "zero", HAS_FLOORS=problem.floors is not None)
    return found, columns, slot


def _groups(problem, tiles, documents, resident):
    """How many programs share the documents of a query tile: enough to fill the card's last wave as well.

    ``resident``: how many run on a multiprocessor at a time; 0 for one program for each document.
    """
    slots = resident * tuning.processors(problem.queries.device)
    if problem.set_size or not slots or tiles * documents <= slots:
        return documents
    waves = range(1, 9)
    choices = [min(max(slots * wave // tiles, 1), documents) for wave in waves]
    return min(choices, key=lambda groups: -(-tiles * groups // slots) * (-(-documents // groups) + 1))


def _common(problem):
    """Constants that both directions share."""
    size = problem.queries.shape[-1]
    return {
        "SIZE": size,
        "BD": _block(size, 128),
        "OWNED": problem.set_size != 0,
        "HAS_OWNERS": problem.owners is not None,
        "HAS_Q_MASK": problem.queries_mask is not None,
        "HAS_D_MASK": problem.documents_mask is not None,
        "Q_PACKED": problem.queries_offsets is not None,
        "D_PACKED": problem.documents_offsets is not None,
    }


def _block(size, largest):
    return min(max(_power(size), 16), largest)


def _opened(problem):
    """Documents in few bits: their tensor, what they are as constants, and the tensors that decode it."""
    coded = problem.documents
    if coded.residuals is None:
        return problem._replace(documents=coded.values), (True, 0, False), (coded.scales, None, None)
    weights = coded.weights[_reversed(coded.bits).to(coded.weights.device)]
    opened = problem._replace(documents=coded.codes[:, None])
    return opened, (False, coded.bits, coded.unit), (coded.residuals, coded.centroids, weights)


@lru_cache
def _reversed(bits):
    """All numbers of so many bits with their bits in the other order."""
    numbers = torch.arange(1 << bits)
    return sum(((numbers >> i) & 1) << (bits - 1 - i) for i in range(bits))


def backward(problem, winners, gradient, for_queries, for_documents):
    """Gradients of the weighted scores at the recorded winners: for queries and for documents (None: not wanted)."""
    if for_queries and for_documents and winners.numel() > TOGETHER:
        to_queries, _ = _backward(problem, winners, gradient, True, False)
        return to_queries, _backward(problem, winners, gradient, False, True)[1]
    return _backward(problem, winners, gradient, for_queries, for_documents)


def add_queries(problem, winners, gradient, total):
    """Add the queries' gradient to ``total``, contiguous float32 in the shape of the queries."""
    _backward(problem, winners, gradient, True, False, total)


def _backward(problem, winners, gradient, for_queries, for_documents, total=None):
    wanted = for_queries, for_documents, total is not None
    key = ("gradients", *wanted, gradient.stride(), gradient.dtype, *_kind(problem))
    plan = _plans.get(key) or _remember(key, _backward_plan(problem, winners, gradient, *wanted))
    if plan.copies:
        problem = _contiguous_rows(problem)
    q, d = problem.queries, problem.documents
    to_queries = (q.new_empty(q.shape) if total is None else total) if for_queries else None
    to_documents = d.new_empty(d.shape) if for_documents else None
    if plan.programs:
        ring = winners.new_empty(plan.ring, dtype=plan.index)
        rest = _sets(problem), gradient, winners, ring, to_queries, to_documents
        start(gradients_kernel, plan, (*problem[:8], *rest))
    return to_queries, to_documents


def _backward_plan(problem, winners, gradient, for_queries, for_documents, added):
    """Grid, numbers and constants of the backward kernel."""
    copied = _contiguous_rows(problem)
    constants = _backward_constants(problem, winners)
    constants.update(FOR_QUERIES=for_queries, FOR_DOCUMENTS=for_documents, ADDED=added)
    chunks = -(-constants["SIZE"] // constants["BD"])
    tiles_d = -(-problem.longest_document // constants["BT"])
    tiles_q = -(-problem.longest_query // constants["BS"])
    queries, documents = query_count(problem), document_count(problem)
    items = documents * tiles_d * chunks * for_documents
    programs_d = _owners_of_tiles(items, constants.pop("PROGRAMS") * tuning.processors(problem.queries.device))
    strides = (0, gradient.stride(0)) if problem.set_size else gradient.stride()
    tiles = max(tiles_d, 1), max(tiles_q, 1)
    return Plan(
        programs=programs_d + queries * tiles_q * chunks * for_queries,
        numbers=(programs_d, items, *tiles, queries, documents, *strides, *_sizes(copied)),
        constants=constants,
        copies=copied is not problem,
        ring=(programs_d, 4 * constants["SCAN"]),
        index=torch.int32 if queries * problem.longest_query * constants["BT"] < 2**31 else torch.int64,
    )


def _owners_of_tiles(items, most):
    """Programs that own document tiles: one for each, or half as many as may be, which keeps the rings small."""
    return items if items <= most else -(-items // -(-2 * items // most))


def _backward_constants(problem, winners):
    exact, scaled = (problem.queries.dtype == kind for kind in (torch.float32, torch.float16))
    found = _common(problem)
    found.update(tuning.backward(problem.queries.device, problem.longest_document, exact, scaled))
    found["BS"], found["BJ"] = _slots(problem, found.pop("ROWS"))
    found.update(num_stages=found["STAGES"], NONE=none_of(winners.dtype), EXACT=exact, SCALED=scaled)
    q = problem.queries
    found["LINEAR"] = not problem.set_size and q.dim() == 3 and q.stride(0) == q.shape[1] * q.stride(1)
    return found


def _slots(problem, rows):
    """Query tokens and documents that a program sums at a time: as few tokens as it takes to occupy the card."""
    queries, documents = query_count(problem), document_count(problem)
    met = max(documents // max(queries, 1), 1) if problem.set_size else documents
    enough = 4 * tuning.processors(problem.queries.device)
    tokens = min(rows, _power(problem.longest_query))
    while tokens > 1 and tokens * _power(met) > rows and queries * -(-problem.longest_query // tokens) < enough:
        tokens //= 2
    return tokens, min(rows // tokens, _power(met))


def _remember(key, plan):
    if len(_plans) > 4096:
        _plans.clear()
    _plans[key] = plan
    return plan


def _sets(problem):
    """Where each query's documents start, when documents name their query."""
    if problem.owners is None:
        return None
    queries = torch.arange(query_count(problem) + 1, device=problem.owners.device)
    return torch.searchsorted(problem.owners, queries)


def _sizes(problem):
    """Numbers that both kernels read, in their order: lengths, set size, strides of an item and of a token."""
    q, d = problem.queries, problem.documents
    q_strides = q.stride() if q.dim() == 3 else (0, *q.stride())
    d_strides = d.stride() if d.dim() == 3 else (0, *d.stride())
    return problem.longest_query, problem.longest_document, problem.set_size, *q_strides[:2], *d_strides[:2]


def _kind(problem):
    """What decides a plan: everything but the addresses."""
    q, d = problem[:2]
    kind = (q.shape, q.stride(), d.shape, d.stride(), q.dtype, q.device.index, problem[8:])
    if problem[2:8] == _ALONE:
        return kind
    return *kind, *[None if x is None else (x.shape, x.stride()) for x in problem[2:8]]


def _contiguous_rows(problem):
    """Kernels take any stride but along the embedding, and none between masks."""
    changes = {}
    for name in ("queries", "documents"):
        tokens = getattr(problem, name)
        if tokens.stride(-1) != 1:
            changes[name] = tokens.contiguous()
    for name in ("queries_mask", "documents_mask", "floors"):
        mask = getattr(problem, name)
        if mask is not None and not mask.is_contiguous():
            changes[name] = mask.contiguous()
    return problem._replace(**changes) if changes else problem


def _power(n):
    return 1 << (n - 1).bit_length() if n > 1 else 1
