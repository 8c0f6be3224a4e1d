"""MaxSim pair by pair in float64: slow, plain, the oracle of every test.

score(q, D) = sum over query tokens of the largest inner product with a document token
(Khattab and Zaharia, "ColBERT", 2020, equation 3).
"""

import torch

from .layout import document_count, index_dtype, none_of, owners_of, query_count, score_dtype, winners_shape


def applies(request) -> str | None:
    """Everything in torch."""
    return None


def _item(tokens, mask, offsets, i):
    where = i if offsets is None else slice(int(offsets[i]), int(offsets[i + 1]))
    found = tokens[where].double()
    keep = mask[where] if mask is not None else torch.ones(len(found), dtype=torch.bool, device=found.device)
    return found, keep


def query(problem, i):
    """Tokens of query i in float64, and which of them count."""
    return _item(problem.queries, problem.queries_mask, problem.queries_offsets, i)


def document(problem, j):
    """Tokens of document j in float64, and which of them count."""
    return _item(problem.documents, problem.documents_mask, problem.documents_offsets, j)


def best_tokens(problem, i, j):
    """Largest similarity of each token of query i in document j, and where it is (-1: nowhere)."""
    (q, q_keep), (d, d_keep) = query(problem, i), document(problem, j)
    similar = q @ d.T
    similar = similar.masked_fill(~d_keep, 0.0 if problem.masked == "zero" else -torch.inf)
    nothing = similar.new_full((len(q), 1), 0.0 if problem.floors is not None and problem.floors[j] else -torch.inf)
    values, places = torch.cat([similar, nothing], 1).max(1)
    chosen = torch.cat([d_keep, d_keep.new_zeros(1)])[places] & q_keep
    return torch.where(q_keep, values, 0.0), torch.where(chosen, places, -1)


def pairs(problem):
    """Every (query, document) that is scored, with its place in the result."""
    if problem.set_size:
        return [((j,), int(i), j) for j, i in enumerate(owners_of(problem))]
    return [((i, j), i, j) for i in range(query_count(problem)) for j in range(document_count(problem))]


def forward(problem, record):
    """Scores, and the winning positions if asked for; see ``layout``."""
    device, kind = problem.queries.device, index_dtype(problem.longest_document)
    size = (document_count(problem),) if problem.set_size else (query_count(problem), document_count(problem))
    scores = torch.zeros(size, dtype=torch.float64, device=device)
    winners = torch.full(winners_shape(problem), none_of(kind), dtype=kind, device=device)
    for place, i, j in pairs(problem):
        values, places = best_tokens(problem, i, j)
        scores[place] = values.sum()
        row = winners[j] if problem.set_size else winners[j, i]
        row[: len(places)] = torch.where(places < 0, none_of(kind), places).to(kind)
    return scores.to(score_dtype(problem)), winners if record else None


def backward(problem, winners, gradient, for_queries, for_documents):
    """Gradients of the scores' weighted sum with the recorded positions held fixed."""
    to_queries = torch.zeros_like(problem.queries, dtype=torch.float64)
    to_documents = torch.zeros_like(problem.documents, dtype=torch.float64)
    for place, i, j in pairs(problem):
        (q, _), (d, _) = query(problem, i), document(problem, j)
        found = (winners[j] if problem.set_size else winners[j, i])[: len(q)].long()
        rows = (found != none_of(winners.dtype)).nonzero().squeeze(1)
        g = gradient[place].double()
        _add(to_queries, problem.queries_offsets, i, rows, g * d[found[rows]])
        _add(to_documents, problem.documents_offsets, j, found[rows], g * q[rows])
    return (
        to_queries.to(problem.queries.dtype) if for_queries else None,
        to_documents.to(problem.documents.dtype) if for_documents else None,
    )


def _add(total, offsets, i, rows, values):
    part = total[i] if offsets is None else total[int(offsets[i]) : int(offsets[i + 1])]
    part.index_add_(0, rows, values)
