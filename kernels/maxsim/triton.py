"""MaxSim on CUDA: what runs where; the device code is in ``device`` and the launch shapes in ``tuning``.

Forward: several short queries share one tile, which stays on chip while the tokens of a document stream past it; a
program keeps running maxima and reduces them once, at the end. Backward: every program owns a tile of a document's
gradient or some rows of the queries', so there are no atomics and sums have one order.

What follows from a layout (shapes, strides, dtypes, options) is worked out once and kept in a ``Prepared``.
"""

import math
from functools import lru_cache
from typing import Any

import torch

from . import tuning
from .device import gradients_kernel, scores_kernel
from .launch import NOTHING, Plan, start
from .layout import document_count, index_dtype, none_of, query_count, winners_shape

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 4096
TOGETHER = 1 << 22  # winners up to which both gradients are one launch; with more each has its own registers
AT_HOME = 1 << 23  # bytes of winners from which on they may be kept where the documents' gradient will be,
HEAVY = 8  # if they are no lighter than the tokens over this
EXACT_NUMBERS = 1 << 23  # positions that float32 holds
_layouts: dict[tuple, "Prepared"] = {}
_ALONE = (None,) * 6


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
    if type(problem.documents) is not torch.Tensor:
        problem, coded, extras = _opened(problem)
        return prepared(problem).forward(problem[0], problem[1], problem[2:], record, coded, extras)
    return prepared(problem).forward(problem[0], problem[1], problem[2:], record)


def backward(problem, winners, gradient, for_queries, for_documents):
    """Gradients of the weighted scores at the recorded winners: for queries and for documents (None: not wanted)."""
    wanted = for_queries, for_documents
    return prepared(problem).backward(problem[0], problem[1], problem[2:], winners, gradient, *wanted)


def add_queries(problem, winners, gradient, total):
    """Add the queries' gradient to ``total``, contiguous float32 in the shape of the queries."""
    prepared(problem).write_gradients(problem[0], problem[1], problem[2:], winners, gradient, total, None, True)


def prepared(problem, shape=None) -> "Prepared":
    """What serves problems of this layout, with scores in this shape; see ``layout``."""
    key = _kind(problem) if shape is None else (shape, *_kind(problem))
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) > 4096:
            _layouts.clear()
        found = _layouts[key] = Prepared(problem, shape)
    return found


class Prepared:
    """The launches of one layout, each planned when it is first needed.

    Tokens come apart from the ``others``, the fields of a problem behind them; documents in sets may keep both axes.
    """

    def __init__(self, problem, shape=None):
        self.shape = shape
        self.bare = problem._replace(**dict.fromkeys(problem._fields[:8]))
        self.device = problem.queries.device
        self.plans: dict[Any, Plan] = {}

    def forward(self, queries, documents, others, record, coded=None, extras=None):
        """Scores, and the winning positions if asked for."""
        key = record, coded
        plan = self.plans.get(key) or self._remember(key, _forward_plan, queries, documents, others, record, coded)
        winners = torch.empty_strided(*plan.winners, dtype=plan.index, device=self.device) if record else None
        return self._scores(plan, queries, documents, others, winners, extras), winners

    def recorded(self, queries, documents, others, for_documents):
        """Scores, winners, and the tensor that holds these, if it may become the documents' gradient (else None)."""
        key = True, None
        plan = self.plans.get(key) or self._remember(key, _forward_plan, queries, documents, others, True, None)
        if not (plan.apart and for_documents):
            winners = torch.empty_strided(*plan.winners, dtype=plan.index, device=self.device)
            return self._scores(plan, queries, documents, others, winners), winners, None
        shape, strides = plan.winners
        home = torch.empty_like(documents)
        winners = home.data.view(plan.index).as_strided(shape, (plan.apart, *strides[1:]))
        key = True, plan.apart
        plan = self.plans.get(key) or self._remember(
            key, _forward_plan, queries, documents, others, True, None, plan.apart
        )
        return self._scores(plan, queries, documents, others, winners), winners, home

    def _scores(self, plan, queries, documents, others, winners, extras=None):
        scores = torch.empty_strided(*plan.scores, dtype=torch.float32, device=self.device)
        if not plan.programs:
            return scores.zero_()
        queries_mask, documents_mask = others[:2]
        more = NOTHING if plan.simple else (*others[2:6], *(extras or _ALONE[:3]))
        if plan.copies:
            queries, documents = _rows_together(queries), _rows_together(documents)
            queries_mask, documents_mask = _together(queries_mask), _together(documents_mask)
            more = tuple(map(_together, more))
        start(scores_kernel, plan, (queries, documents, scores, winners, queries_mask, documents_mask), more)
        if plan.parts:
            scores = scores.sum(0)
            return scores if self.shape is None else scores.view(self.shape)
        return scores

    def backward(self, queries, documents, others, winners, gradient, for_queries, for_documents):
        """Gradients for queries and for documents (None: not wanted)."""
        to_queries = torch.empty_like(queries, memory_format=torch.contiguous_format) if for_queries else None
        to_documents = torch.empty_like(documents, memory_format=torch.contiguous_format) if for_documents else None
        self.write_gradients(queries, documents, others, winners, gradient, to_queries, to_documents)
        return to_queries, to_documents

    def backward_at_home(self, queries, documents, others, winners, gradient, for_queries, home):
        """The same for winners from ``recorded`` that lie in ``home``, which becomes the documents' gradient.

        Some documents at a time: their winners are copied out of the way of their gradient.
        """
        to_queries, _ = self.backward(queries, documents, others, winners, gradient, for_queries, False)
        flat, step = home.flatten(0, -3), _documents_at_a_time(self.bare, documents, winners)
        for first in range(0, len(flat), step):
            part = slice(first, first + step)
            found, own = winners[part].clone(memory_format=torch.contiguous_format), flat[part]
            some = self.bare._replace(queries=queries, documents=own)
            prepared(some).write_gradients(queries, own, some[2:], found, gradient[:, part], None, own)
            del found
        return to_queries, home

    def write_gradients(self, queries, documents, others, winners, gradient, to_queries, to_documents, added=False):
        """Write those gradients that have a place; ``added``: add to that of the queries."""
        wanted = to_queries is not None, to_documents is not None
        if self.shape is not None:
            gradient = gradient.reshape(-1)
        if wanted == (True, True) and winners.numel() > TOGETHER:
            self.write_gradients(queries, documents, others, winners, gradient, to_queries, None, added)
            self.write_gradients(queries, documents, others, winners, gradient, None, to_documents)
            return
        key = wanted, added, gradient.stride(), gradient.dtype, winners.stride()
        plan = self.plans.get(key) or self._remember(
            key, _backward_plan, queries, documents, others, winners, gradient, *wanted, added
        )
        if not plan.programs:
            return
        if plan.scattered:
            winners = winners.contiguous()
        ring = torch.empty_strided(*plan.ring, dtype=plan.index, device=self.device) if plan.ring else None
        more = NOTHING
        if not plan.simple:
            more = (*others[2:5], _sets(self._problem(queries, documents, others)))
        if plan.copies:
            queries, documents = _rows_together(queries), _rows_together(documents)
            more = tuple(map(_together, more))
        start(gradients_kernel, plan, (queries, documents, gradient, winners, ring, to_queries, to_documents), more)

    def _remember(self, key, planned, queries, documents, others, *rest):
        plan = planned(self._problem(queries, documents, others), *rest)
        if self.shape is not None and not plan.parts:
            plan.scores = self.shape, _strides(self.shape)
        self.plans[key] = plan
        return plan

    def _problem(self, queries, documents, others):
        """The problem again, for what is not done at every call."""
        documents = documents.flatten(0, 1) if documents.dim() == 4 else documents
        return type(self.bare)(queries, documents, *others)


def _forward_plan(problem, record, coded, apart=None):
    """Grid, numbers and constants of the forward kernel. ``apart``: from one document's winners to the next."""
    copied = _contiguous_rows(problem)
    queries, documents = query_count(problem), document_count(problem)
    index, shape = index_dtype(problem.longest_document), winners_shape(problem)
    constants, columns, slot = _forward_constants(problem, queries, record, coded, index)
    parts = max(-(-problem.longest_query // columns), 1)
    tiles = 1 if problem.set_size else -(-queries // (columns // slot))
    resident = constants.pop("PROGRAMS")
    whole = constants["WHOLE"] = parts > 1 and _are_enough(tiles * documents, resident, problem.queries.device)
    tiles *= 1 if whole else parts
    groups = documents if whole else _groups(problem, tiles, documents, resident)
    constants["GROUPED"] = groups < documents
    summed = parts > 1 and queries > 0 and not whole
    size = (documents,) if problem.set_size else (queries, documents)
    size = (parts, *size) if summed else size
    strides = (1, documents) if problem.set_size else (documents, queries * documents)
    found = _strides(shape)
    numbers = tiles, parts, queries, documents, groups, *strides, *_lengths(problem), apart or found[0]
    return Plan(
        programs=tiles * groups if queries and problem.longest_query else 0,
        numbers=(*numbers, *_token_strides(copied)),
        constants=constants,
        copies=copied is not problem,
        simple=problem[4:8] == _ALONE[:4] and coded is None,
        scores=(size, _strides(size)),
        parts=summed,
        winners=(shape, found),
        index=index,
        apart=_apart(problem, shape, index) if record else None,
    )


def _apart(problem, shape, index):
    """From one document's winners to the next inside of a tensor like the documents, if they should lie there.

    They should if they weigh much: it costs a few launches more.
    """
    q, d, size = problem.queries, problem.documents, math.prod(shape) * index.itemsize
    if problem.set_size or d.dim() != 3 or not d.is_contiguous() or size < AT_HOME:
        return None
    room, row = d.stride(0) * d.element_size(), d.shape[2] * d.element_size()
    fits = shape[1] * shape[2] * index.itemsize <= room and row % index.itemsize == 0
    heavy = HEAVY * size >= (q.numel() + d.numel()) * d.element_size()
    return room // index.itemsize if fits and heavy else None


def _forward_constants(problem, queries, record, coded, index):
    width = _power(problem.longest_query)
    rows = width if problem.set_size else min(width * _power(queries), 1 << 20)
    maxima = problem.longest_query * document_count(problem) * (1 if problem.set_size else queries)
    exact = problem.queries.dtype == torch.float32
    found = _common(problem)
    found.update(HAS_Q_MASK=problem.queries_mask is not None, HAS_D_MASK=problem.documents_mask is not None)
    found.update(tuning.forward(problem.queries.device, rows, problem.longest_document, exact, record, maxima))
    columns = min(max(rows, 16), found["BQ"])
    slot = columns if problem.set_size else min(width, columns)
    found.update(BQ=columns, SLOT=slot, EXACT=exact, RECORD=record, NONE=none_of(index))
    found["BD"] = _block(found["SIZE"], 128 if exact or found["SIZE"] > 256 else 256)
    if found["SIZE"] > found["BD"]:  # the query tile is read again with each part of the embeddings
        found.update(STAGES=2, num_warps=8)
    int8, bits, unit = coded or (False, 0, False)
    if bits:  # what is gathered is better not on its way for several tiles at once: there is room for more programs
        found.update(STAGES=1)
    found["num_stages"] = found["STAGES"]  # for the loops that do not say it themselves
    far = record and problem.longest_document > EXACT_NUMBERS
    found["FOLD"] = 0 if far or found["DOCUMENT_ROWS"] else found.get("FOLD", 0)
    found.setdefault("PROGRAMS", 0)
    found.setdefault("FLAT", False)
    plain = coded is None and not exact and found["SIZE"] <= found["BD"] and not found["DOCUMENT_ROWS"]
    found["REGISTERS"] = plain and found.get("REGISTERS", False)
    found["CLOSE"] = problem.documents.stride(-2) == found["SIZE"] == found["BD"]
    found.update(INT8=int8, BITS=bits, UNIT=unit)
    found.update(ZERO=problem.masked == "zero", HAS_FLOORS=problem.floors is not None)
    return found, columns, slot


def _are_enough(programs, resident, device):
    """Whether so many fill the card, without being so many that they had better share what they load."""
    processors = tuning.processors(device)
    return processors <= programs <= (8 * resident * processors or programs)


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
    weights = coded.weights[_reversed(coded.bits, coded.weights.device)]
    planes = _by_planes(coded.shape[1], coded.bits, coded.device)
    queries, centroids = (part.index_select(-1, planes) for part in (problem.queries, coded.centroids))
    opened = problem._replace(queries=queries, documents=coded.codes[:, None])
    return opened, (False, coded.bits, coded.unit), (coded.residuals, centroids, weights)


@lru_cache
def _by_planes(size, bits, device):
    """Dimensions in an order in which those that lie in the same bits of their bytes are side by side."""
    return torch.arange(size, device=device).view(-1, 8 // bits).T.flatten()


@lru_cache
def _reversed(bits, device):
    """All numbers of so many bits with their bits in the other order."""
    numbers = torch.arange(1 << bits, device=device)
    return sum(((numbers >> i) & 1) << (bits - 1 - i) for i in range(bits))


def _backward_plan(problem, winners, gradient, for_queries, for_documents, added):
    """Grid, numbers and constants of the backward kernel."""
    copied = _contiguous_rows(problem)
    simple = problem[4:7] == _ALONE[:3]
    half = "both" if for_queries and for_documents else "queries" if for_queries else "documents"
    together = _strides(winners.shape)
    scattered = winners.stride()[1:] != together[1:]  # the kernel steps from document to document, and by one inside
    apart = together[0] if scattered else winners.stride(0)
    constants = _backward_constants(problem, winners, half)
    constants.update(FOR_QUERIES=for_queries, FOR_DOCUMENTS=for_documents, ADDED=added)
    chunks = -(-constants["SIZE"] // constants["BD"])
    tiles_d = -(-problem.longest_document // constants["BT"])
    tiles_q = -(-problem.longest_query // constants["BS"])
    queries, documents = query_count(problem), document_count(problem)
    items = documents * tiles_d * chunks * for_documents
    programs_d = _in_full_rounds(items, constants.pop("PROGRAMS") * tuning.processors(problem.queries.device))
    programs_q = queries * tiles_q if problem.set_size else -(-queries * problem.longest_query // constants["BS"])
    strides = (0, gradient.stride(0)) if problem.set_size else gradient.stride()
    sizes = max(tiles_d, 1), max(tiles_q, 1), queries, documents
    divisor = _divisor(problem.longest_query)
    numbers = (programs_d, items, *sizes, *strides, *_lengths(problem), apart, *divisor)
    far = constants["BJ"] * apart + queries * problem.longest_query
    constants["NEAR"] = simple and max(far, *map(_reach, (*copied[:2], gradient))) < 2**31
    ring = programs_d, 2 * constants["SCAN"]
    return Plan(
        programs=programs_d + programs_q * chunks * for_queries,
        numbers=(*numbers, *_token_strides(copied)),
        constants=constants,
        copies=copied is not problem,
        simple=simple,
        parts=False,
        scattered=scattered,
        ring=(ring, _strides(ring)) if programs_d else None,
        index=torch.int32 if queries * problem.longest_query * constants["BT"] < 2**31 else torch.int64,
    )


def _divisor(number):
    """Factor and shift that divide by it; see ``device``."""
    places = 31 + (max(number, 1) - 1).bit_length()
    return -(-(1 << places) // max(number, 1)), places


def _reach(tokens):
    """How far from its first number a tensor's last one lies."""
    return sum((size - 1) * step for size, step in zip(tokens.shape, tokens.stride(), strict=True))


def _in_full_rounds(items, slots):
    """Programs for so many items of one size, ``slots`` at a time: as few as take no more rounds."""
    return -(-items // -(-items // slots)) if items else 0


def _documents_at_a_time(bare, documents, winners):
    """So many that full rounds of programs own their tiles; their winners weigh a quarter of all documents at most."""
    exact, scaled = _precision(documents)
    found = tuning.backward(documents.device, bare.longest_document, exact, scaled, "documents")
    tiles = -(-bare.longest_document // found["BT"]) * -(-documents.shape[-1] // _block(documents.shape[-1], 128))
    once = max(found["PROGRAMS"] * tuning.processors(documents.device) // tiles, 1)
    each = winners[0].numel() * winners.element_size()
    return once * max(documents.numel() * documents.element_size() // (4 * once * each), 1)


def _precision(tokens):
    return tokens.dtype == torch.float32, tokens.dtype == torch.float16


def _backward_constants(problem, winners, half):
    exact, scaled = _precision(problem.queries)
    found = _common(problem)
    found.update(tuning.backward(problem.queries.device, problem.longest_document, exact, scaled, half))
    found["BS"], found["BJ"] = _slots(problem, found.pop("ROWS"))
    found.update(num_stages=found["STAGES"], NONE=none_of(winners.dtype), EXACT=exact, SCALED=scaled)
    q = problem.queries
    found["LINEAR"] = not problem.set_size and q.dim() == 3 and q.stride(0) == q.shape[1] * q.stride(1)
    return found


def _slots(problem, rows):
    """Query tokens and documents that a program sums at a time: as few tokens as it takes to occupy the card."""
    queries, documents = query_count(problem), document_count(problem)
    met = max(documents // max(queries, 1), 1) if problem.set_size else documents
    enough = 3 * tuning.processors(problem.queries.device)
    length = problem.longest_query if problem.set_size else queries * problem.longest_query
    times = queries if problem.set_size else 1
    tokens = min(rows, _power(length))
    while tokens > 1 and tokens * _power(met) > rows and times * -(-length // tokens) < enough:
        tokens = max(tokens // 4, 1)  # few shapes, which all have to be compiled
    return tokens, min(rows // tokens, _power(met))


def _sets(problem):
    """Where each query's documents start, when documents name their query."""
    if problem.owners is None:
        return None
    queries = torch.arange(query_count(problem) + 1, device=problem.owners.device)
    return torch.searchsorted(problem.owners, queries)


def _lengths(problem):
    return problem.longest_query, problem.longest_document, problem.set_size


def _token_strides(problem):
    """From an item to the next, and from a token to the next, of queries and of documents."""
    q, d = problem.queries, problem.documents
    q_strides = q.stride() if q.dim() == 3 else (0, *q.stride())
    d_strides = d.stride() if d.dim() == 3 else (0, *d.stride())
    return *q_strides[:2], *d_strides[:2]


def _strides(shape):
    """Those of a contiguous tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def _kind(problem):
    """What decides a plan: everything but the addresses."""
    q, d = problem[:2]
    kind = (q.shape, q.stride(), d.shape, d.stride(), q.dtype, q.device, problem[8:])
    if problem[2:8] == _ALONE:
        return kind
    return *kind, *[None if x is None else (x.shape, x.stride()) for x in problem[2:8]]


def _contiguous_rows(problem):
    """Kernels take any stride but along the embedding, and none between masks; the same problem if it is like that."""
    tokens = map(_rows_together, problem[:2])
    masks = map(_together, problem[2:8])
    found = problem._replace(**dict(zip(problem._fields, (*tokens, *masks))))  # noqa: B905
    return problem if all(a is b for a, b in zip(found, problem, strict=True)) else found


def _rows_together(tokens):
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def _together(tensor):
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _power(n):
    return 1 << (n - 1).bit_length() if n > 1 else 1
