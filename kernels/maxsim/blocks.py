"""MaxSim in streamed blocks of torch: any device, no compiler, memory flat in the number of documents.

A block of documents meets all query rows in one batched product whose result stays in cache, is reduced to its largest
entries and dropped. The backward pass reads the recorded winners only: gradients are sums of rows, gathered by their
destination in a fixed order, so it costs far less than the forward pass and is deterministic.
"""

from typing import Any

import torch

from .layout import (
    document_count,
    index_dtype,
    none_of,
    owners_of,
    query_count,
    score_dtype,
    winners_shape,
)

BLOCK = {"cpu": 1 << 20, "other": 1 << 26}  # similarities alive at a time
SMALL = 1 << 17  # similarities of a problem whose time goes into the number of calls


def applies(request) -> str | None:
    """Everything in torch."""
    return None


def _budget(problem):
    return BLOCK.get(problem.queries.device.type, BLOCK["other"])


def _wide(problem):
    """The caller chose the dtype (autocast was followed before); our own float32 products are not to be narrowed."""
    return torch.autocast(problem.queries.device.type, enabled=False)


def _lengths(problem, side):
    """Tokens that each item holds up to its last kept one, as a list."""
    tokens, mask = getattr(problem, side), getattr(problem, side + "_mask")
    offsets = getattr(problem, side + "_offsets")
    if offsets is not None:
        return offsets.diff().tolist()
    if mask is None or not mask.shape[1]:
        return [tokens.shape[1]] * tokens.shape[0]
    ends = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
    return ends.amax(1).tolist()


def _padded(problem, side, items, length):
    """Items as one ``(len(items), length, d)`` tensor in the score's dtype, and which tokens count (None: all)."""
    tokens, mask = getattr(problem, side), getattr(problem, side + "_mask")
    offsets = getattr(problem, side + "_offsets")
    kind = score_dtype(problem)
    if offsets is None:
        keep = None if mask is None else mask[items, :length]
        return tokens[items, :length].to(kind), keep
    starts, ends = offsets[:-1][items, None], offsets[1:][items, None]
    places = starts + torch.arange(length, device=tokens.device)
    keep = places < ends
    places = places.clamp(max=max(tokens.shape[0] - 1, 0))
    block = tokens[places].to(kind) if tokens.shape[0] else tokens.new_zeros(*places.shape, tokens.shape[1], dtype=kind)
    return block, keep if mask is None else keep & mask[places] if tokens.shape[0] else keep


def _document_blocks(problem, rows):
    """Runs of documents, ``(items, longest)``, whose similarities fit the budget; packed ones ordered by length."""
    lengths = _lengths(problem, "documents")
    packed = problem.documents_offsets is not None
    order = sorted(range(len(lengths)), key=lengths.__getitem__) if packed else range(len(lengths))
    # Packed documents are copied into a padded block, which is to fit as well.
    start, budget = 0, max(_budget(problem) // max(rows, problem.documents.shape[-1] if packed else 1, 1), 1)
    while start < len(order):
        stop, longest = start, 0
        while stop < len(order):
            wider = max(longest, lengths[order[stop]])
            if stop > start and wider * (stop + 1 - start) > budget:
                break
            longest, stop = wider, stop + 1
        yield (torch.tensor(order[start:stop]) if packed else slice(start, stop)), longest
        start = stop


def forward(problem, record):
    """Scores, and the winning positions if asked for; see ``layout``."""
    with _wide(problem), torch.no_grad():
        packed = problem.documents_offsets is not None and problem.documents_mask is None
        if packed and not record and problem.queries.device.type == "cpu":
            return _run_by_run(problem), None
        return _owned(problem, record) if problem.set_size else _crossed(problem, record)


def _empty(problem, record):
    tokens, kind = problem.queries, index_dtype(problem.longest_document)
    size = (document_count(problem),) if problem.set_size else (query_count(problem), document_count(problem))
    winners = torch.empty(winners_shape(problem), dtype=kind, device=tokens.device) if record else None
    return torch.empty(size, dtype=score_dtype(problem), device=tokens.device), winners


def _crossed(problem, record):
    scores, winners = _empty(problem, record)
    for first, (q, q_keep) in _query_blocks(problem):
        rows = q.flatten(0, 1)
        for items, longest in _document_blocks(problem, len(rows)):
            d, d_keep = _padded(problem, "documents", items, longest)
            best, places = _best(problem, items, rows, d, d_keep, record)
            best = best.view(len(d), *q.shape[:2])
            scores[first : first + len(q), items] = _total(best, q_keep).T
            if record:
                places = places.view(best.shape)
                winners[items, first : first + len(q)] = _unless(places, q_keep, winners.dtype)
    return scores, winners


def _query_blocks(problem):
    """Runs of queries with so many rows that one long document still fits the budget, and a block fills a product."""
    count, length = query_count(problem), problem.longest_query
    room = max(_budget(problem) // max(problem.longest_document, 1), 512)
    step = max(room // max(length, 1), 1)
    for first in range(0, count, step):
        items = slice(first, min(first + step, count))
        yield first, _padded(problem, "queries", items, length)


def _owned(problem, record):
    scores, winners = _empty(problem, record)
    owners = owners_of(problem)
    for items, longest in _document_blocks(problem, problem.longest_query):
        d, d_keep = _padded(problem, "documents", items, longest)
        q, q_keep = _padded(problem, "queries", owners[items], problem.longest_query)
        best, places = _best(problem, items, q, d, d_keep, record)
        scores[items] = _total(best, q_keep)
        if record:
            winners[items] = _unless(places, q_keep, winners.dtype)
    return scores, winners


def _run_by_run(problem):
    """Scores of packed documents without a copy: one product for a run of them, then each one's part of it."""
    scores, _ = _empty(problem, False)
    kind, lengths = score_dtype(problem), _lengths(problem, "documents")
    for (q, keep), at, low, high in _meetings(problem):
        rows = q.flatten(0, 1)
        for first, last in _runs(lengths[low:high], max(_budget(problem) // max(len(rows), q.shape[-1]), 1)):
            run = slice(low + first, low + last)
            ends = problem.documents_offsets[[run.start, run.stop]].tolist()
            parts = (problem.documents[slice(*ends)].to(kind) @ rows.T).split(lengths[run])
            best = torch.stack([x.amax(0) if len(x) else x.new_full(x.shape[1:], -torch.inf) for x in parts])
            if problem.floors is not None:
                best = torch.where(problem.floors[run, None], best.clamp(min=0), best)
            total = _total(best.view(-1, *q.shape[:2]), keep).T
            scores[(run,) if problem.set_size else (at, run)] = total[0] if problem.set_size else total
    return scores


def _meetings(problem):
    """Blocks of queries, ``(tokens, which count)`` and their place, with the range of documents that they meet."""
    if not problem.set_size:
        for first, block in _query_blocks(problem):
            yield block, slice(first, first + len(block[0])), 0, document_count(problem)
        return
    owners, counts = owners_of(problem).unique_consecutive(return_counts=True)
    low = 0
    for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
        yield _padded(problem, "queries", slice(owner, owner + 1), problem.longest_query), None, low, low + count
        low += count


def _runs(lengths, room):
    """Ranges of items with about ``room`` tokens together."""
    first, held = 0, 0
    for i, length in enumerate(lengths):
        if i > first and held + length > room:
            yield first, i
            first, held = i, 0
        held += length
    if lengths:
        yield first, len(lengths)


def _total(best, keep):
    return best.sum(-1) if keep is None else best.masked_fill(~keep, 0.0).sum(-1)


def _unless(places, keep, kind):
    nothing = none_of(kind)
    places = places.masked_fill(places < 0, nothing)
    return (places if keep is None else places.masked_fill(~keep, nothing)).to(kind)


def _best(problem, items, q, d, keep, record):
    """Largest similarity of every query row in each document, ``(documents, rows)``, and where (-1: nowhere)."""
    length = d.shape[1]
    if length == 0:
        best = d.new_full((len(d), q.shape[-2]), -torch.inf)
        places = torch.full(best.shape, -1, device=d.device) if record else None
    else:
        similar = torch.matmul(q, d.transpose(1, 2))
        if keep is not None:
            fill = 0.0 if problem.masked == "zero" and problem.documents_mask is not None else -torch.inf
            _exclude(problem, items, similar, keep, fill)
        best, places = similar.max(-1) if record else (similar.amax(-1), None)
        places = _chosen(places, best, keep)
    floor = _floor(problem, items, length)
    if floor is not None:
        places = None if places is None else places.masked_fill(floor[:, None] & (best < 0), -1)
        best = torch.where(floor[:, None], best.clamp(min=0), best)
    return best, places


def _exclude(problem, items, similar, keep, fill):
    similar.masked_fill_(~keep[:, None], fill)
    if problem.documents_offsets is not None and fill == 0.0:  # beyond its end a packed document has no tokens at all
        real = torch.arange(similar.shape[-1], device=similar.device) < problem.documents_offsets.diff()[items, None]
        similar.masked_fill_(~real[:, None], -torch.inf)


def _chosen(places, best, keep):
    if places is None or keep is None:
        return places
    return places.masked_fill(~keep.gather(1, places), -1)


def _floor(problem, items, length):
    """Documents in which zero wins over anything negative: told so, or with masked tokens behind the block's end."""
    floor = None if problem.floors is None else problem.floors[items]
    mask = problem.documents_mask
    if problem.masked == "exclude" or mask is None or mask.dim() == 1 or length == mask.shape[1]:
        return floor
    behind = (~mask[items, length:]).any(1)
    return behind if floor is None else floor | behind


def backward(problem, winners, gradient, for_queries, for_documents):
    """Gradients of the weighted scores at the recorded winners: for queries and for documents (None: not wanted)."""
    with _wide(problem), torch.no_grad():
        if _is_small(problem):
            return _dense_backward(problem, winners, gradient, for_queries, for_documents)
        return _Backward(problem, winners, gradient).run(for_queries, for_documents)


def _is_small(problem):
    q, d = problem.queries, problem.documents
    padded = q.dim() == d.dim() == 3 and not problem.set_size
    return padded and q.shape[0] * q.shape[1] * d.shape[0] * d.shape[1] <= SMALL


def _dense_backward(problem, winners, gradient, for_queries, for_documents):
    """Small problems: the weight of every pair of tokens, nearly all of them zero, in two products."""
    q, d = (_counting_rows(problem, side) for side in ("queries", "documents"))
    documents, length = problem.documents.shape[:2]
    weights = q.new_zeros(documents, len(q), length + 1)  # the last place takes what chose nothing
    places = winners.flatten(1).long().clamp(max=length)
    each = gradient.T.to(q.dtype).repeat_interleave(problem.longest_query, 1)
    weights = weights.scatter_(2, places[..., None], each[..., None])[..., :length]
    weights = weights.transpose(0, 1).reshape(len(q), documents * length)
    return (
        (weights @ d).to(problem.queries.dtype).view(problem.queries.shape) if for_queries else None,
        (weights.T @ q).to(problem.documents.dtype).view(problem.documents.shape) if for_documents else None,
    )


def _counting_rows(problem, side):
    """All tokens, zeros where masked: what hides there, infinities included, must not meet a weight of zero."""
    rows, mask = _rows(getattr(problem, side)).to(score_dtype(problem)), getattr(problem, side + "_mask")
    return rows if mask is None else rows.masked_fill(~mask.reshape(-1, 1), 0.0)


class _Backward:
    """Walks the documents in blocks; each entry says: this query row chose this document row, with this weight."""

    def __init__(self, problem, winners, gradient):
        self.problem, self.gradient = problem, gradient
        self.kind = score_dtype(problem)
        self.winners = winners.flatten(1)
        self.length = problem.longest_query
        self.query_starts = _starts(problem, "queries")
        self.document_starts = _starts(problem, "documents")
        self.owners = owners_of(problem) if problem.set_size else None

    def run(self, for_queries, for_documents):
        q, d = (_rows(x) for x in (self.problem.queries, self.problem.documents))
        to_q: Any = torch.zeros(q.shape, dtype=self.kind, device=q.device) if for_queries else None
        to_d: Any = torch.zeros_like(d) if for_documents else None
        step = max(_budget(self.problem) // max(self.winners.shape[1], 1), 1)
        wide_q = q.to(self.kind) if for_documents else None
        for first in range(0, len(self.winners), step):
            block = slice(first, first + step)
            if for_queries:
                self.queries_from(block, d, to_q)
            if for_documents:
                self.documents_from(block, wide_q, to_d)
        return (
            to_q.to(q.dtype).view(self.problem.queries.shape) if for_queries else None,
            to_d.view(self.problem.documents.shape) if for_documents else None,
        )

    def entries(self, block, by_document):
        """(query rows, document rows, weights) of the block, without the entries that chose nothing."""
        found = self.winners[block].long()
        columns = torch.arange(found.shape[1], device=found.device).expand_as(found)
        if by_document:
            narrow, order = self.winners[block].sort(dim=1, stable=True)
            found, columns = narrow.long(), order
        rows_d = self.document_starts[block, None] + found
        item = columns // max(self.length, 1) if self.owners is None else self.owners[block, None].expand_as(found)
        rows_q = self.query_starts[item] + (columns % max(self.length, 1))
        if self.owners is None:
            weights = self.gradient.T[block].gather(1, item)
        else:
            weights = self.gradient[block, None].expand_as(found)
        chosen = found != none_of(self.winners.dtype)
        if not by_document and self.owners is None:  # rows of queries in order: documents run fastest
            rows_q, rows_d, weights, chosen = rows_q.T, rows_d.T, weights.T, chosen.T
        if bool(chosen.all()):
            return rows_q.reshape(-1), rows_d.reshape(-1), weights.reshape(-1).to(self.kind)
        return rows_q[chosen], rows_d[chosen], weights[chosen].to(self.kind)

    def queries_from(self, block, d, to_q):
        rows_q, rows_d, weights = self.entries(block, False)
        low = int(self.document_starts[block][0])
        high = int(rows_d.max()) + 1 if len(rows_d) else low
        if self.owners is not None:
            rows_q, order = rows_q.sort(stable=True)
            rows_d, weights = rows_d[order], weights[order]
        first, last = (int(rows_q[0]), int(rows_q[-1]) + 1) if len(rows_q) else (0, 0)
        to_q[first:last] += _sums(rows_q - first, last - first, rows_d - low, d[low:high].to(self.kind), weights)

    def documents_from(self, block, q, to_d):
        rows_q, rows_d, weights = self.entries(block, True)
        if len(rows_d):
            first, last = int(rows_d[0]), int(rows_d[-1]) + 1
            to_d[first:last] = _sums(rows_d - first, last - first, rows_q, q, weights).to(to_d.dtype)


def _rows(tokens):
    return tokens.reshape(-1, tokens.shape[-1])


def _starts(problem, side):
    offsets, tokens = getattr(problem, side + "_offsets"), getattr(problem, side)
    if offsets is not None:
        return offsets[:-1]
    return torch.arange(tokens.shape[0], device=tokens.device) * tokens.shape[1]


def _sums(targets, count, sources, rows, weights):
    """Weighted sums of ``rows[sources]`` for each of ``count`` targets; ``targets`` ascending."""
    if not len(targets):
        return rows.new_zeros(count, rows.shape[1])
    bags = torch.searchsorted(targets, torch.arange(count, device=targets.device))
    return torch.nn.functional.embedding_bag(sources, rows, bags, per_sample_weights=weights, mode="sum")
