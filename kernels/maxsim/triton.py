"""MaxSim on CUDA: what runs where; the device code is in ``device`` and the launch shapes in ``tuning``.

Forward: several short queries share one tile, which stays on chip while the tokens of a document stream past it; a
program keeps an elementwise running maximum and reduces it once, at the end. Backward: one launch in which every
program owns a tile of a document's gradient or of a query's, so there are no atomics and sums have one order.
"""

import torch

from . import tuning
from .device import gradients_kernel, scores_kernel
from .launch import Ready, can_be_ready, launch
from .layout import document_count, index_dtype, none_of, query_count, winners_shape

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 4096
_ready = {}


def applies(request) -> str | None:
    """16- and 32-bit floats on a GPU with matrix units for them."""
    tokens = request.queries
    if tokens.dtype not in FLOATS:
        return f"it takes float32, float16 and bfloat16, not {tokens.dtype}"
    if tokens.shape[-1] > LARGEST or tokens.shape[-1] == 0:
        return f"it takes embeddings of 1 to {LARGEST} numbers, not {tokens.shape[-1]}"
    if tokens.is_cuda and tuning.capability(tokens.device.index or 0) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None


def forward(problem, record):
    """Scores, and the winning positions if asked for; see ``layout``."""
    problem = _contiguous_rows(problem)
    queries, documents = query_count(problem), document_count(problem)
    tokens = problem.queries
    shape = (documents,) if problem.set_size else (queries, documents)
    winners = tokens.new_empty(winners_shape(problem), dtype=index_dtype(problem.longest_document)) if record else None
    if not queries or not documents or not problem.longest_query:
        return tokens.new_zeros(shape, dtype=torch.float32), winners
    key = ("scores", record, *_kind(problem))
    ready = _ready.get(key)
    constants, parts, tiles = (None, *ready[1]) if ready else _forward_plan(problem, queries, record)
    scores = tokens.new_empty(shape if parts == 1 else (parts, *shape), dtype=torch.float32)
    strides = (1, documents) if problem.set_size else (documents, queries * documents)
    _start(
        scores_kernel, key, (parts, tiles), tiles * documents, (*problem[:8], scores, winners),
        (tiles, parts, queries, *strides, *_sizes(problem)), constants,
    )  # fmt: skip
    return scores if parts == 1 else scores.sum(0), winners


def _forward_plan(problem, queries, record):
    """Constants of the forward kernel, tiles that a long query needs, tiles for each document."""
    width = _power(problem.longest_query)
    rows = width if problem.set_size else min(width * _power(queries), 1 << 20)
    exact = problem.queries.dtype == torch.float32
    plan = _common(problem)
    plan.update(tuning.forward(problem.queries.device, rows, problem.longest_document, exact, record))
    columns = min(max(rows, 16), plan["BQ"])
    slot = columns if problem.set_size else min(width, columns)
    plan.update(BQ=columns, SLOT=slot, EXACT=exact, RECORD=record, NONE=none_of(index_dtype(problem.longest_document)))
    plan.update(ZERO=problem.masked == "zero", HAS_FLOORS=problem.floors is not None)
    parts = -(-problem.longest_query // columns)
    return plan, parts, parts if problem.set_size else parts * -(-queries // (columns // slot))


def _common(problem):
    """Constants that both directions share."""
    size = problem.queries.shape[-1]
    block = min(max(_power(size), 16), 128 if size > 256 or size % 128 == 0 else 256)
    return {
        "SIZE": size,
        "BD": block,
        "OWNED": problem.set_size != 0,
        "HAS_OWNERS": problem.owners is not None,
        "HAS_Q_MASK": problem.queries_mask is not None,
        "HAS_D_MASK": problem.documents_mask is not None,
        "Q_PACKED": problem.queries_offsets is not None,
        "D_PACKED": problem.documents_offsets is not None,
    }


def backward(problem, winners, gradient, for_queries, for_documents):
    """Gradients of the weighted scores at the recorded winners: for queries and for documents (None: not wanted)."""
    problem = _contiguous_rows(problem)
    new = {"memory_format": torch.contiguous_format}
    to_queries = torch.empty_like(problem.queries, **new) if for_queries else None
    to_documents = torch.empty_like(problem.documents, **new) if for_documents else None
    strides = (0, gradient.stride(0)) if problem.set_size else gradient.stride()
    key = ("gradients", for_queries, for_documents, strides, *_kind(problem))
    ready = _ready.get(key)
    constants, numbers = (None, ready[1]) if ready else _backward_plan(problem, winners, for_queries, for_documents)
    programs = numbers[0] + numbers[1]
    if programs:
        tensors = (*problem[:8], _sets(problem), gradient, winners, to_queries, to_documents)
        rest = (numbers[0], *numbers[2:], query_count(problem), document_count(problem), *strides, *_sizes(problem))
        _start(gradients_kernel, key, numbers, programs, tensors, rest, constants)
    return to_queries, to_documents


def _backward_plan(problem, winners, for_queries, for_documents):
    """Constants of the backward kernel; programs for documents and queries; tiles of each."""
    plan = _common(problem)
    exact = problem.queries.dtype == torch.float32
    plan.update(tuning.backward(problem.queries.device, problem.longest_document, exact), EXACT=exact)
    plan.update(NONE=none_of(winners.dtype), SCALED=problem.queries.dtype == torch.float16)
    chunks = -(-plan["SIZE"] // plan["BD"])
    tiles_d = -(-problem.longest_document // plan["BT"])
    tiles_q = -(-problem.longest_query // plan["BS"])
    programs_d = document_count(problem) * tiles_d * chunks * for_documents
    programs_q = query_count(problem) * tiles_q * chunks * for_queries
    return plan, (programs_d, programs_q, max(tiles_d, 1), max(tiles_q, 1))


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
    """What decides the compiled kernel, its grid and its numbers; None for tensors, which only may be there or not."""
    q, d = problem.queries, problem.documents
    shapes = (q.shape, q.stride(), d.shape, d.stride(), q.dtype, q.device.index)
    there = tuple([None if x is None else x.shape for x in problem[2:8]])
    return (*shapes, *there, *problem[8:])


def _start(kernel, key, plan, programs, tensors, numbers, constants):
    """Launch the short way if this kind of call is known and its addresses are as they were; else the ordinary way."""
    ready = _ready.get(key)
    if ready is not None:
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        if not _misaligned(pointers) and ready[0].device == torch.cuda.current_device():
            ready[0](pointers)
            return
        constants = ready[2]
    compiled = launch(kernel, (programs,), (*tensors, *numbers), constants)
    if ready is None and can_be_ready(compiled) and not _misaligned([x.data_ptr() for x in tensors if x is not None]):
        if len(_ready) > 2048:
            _ready.clear()
        device = tensors[0].device.index
        _ready[key] = Ready(compiled, programs, device, numbers, constants, kernel.arg_names), plan, constants


def _misaligned(pointers):
    together = 0
    for pointer in pointers:
        together |= pointer or 0
    return together & 15


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
