"""XTR scores: MaxSim over the document tokens that a query token would retrieve from all documents together.

Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", 2023: its training objective.
Similarities are computed for a block of documents at a time; what stays is the k best of each query token.
"""

import torch

from .derivatives import fixed, transformed
from .inputs import build

BLOCK = {"cpu": 1 << 20, "other": 1 << 27}  # similarities alive at a time


def xtr(queries, documents, k, queries_mask=None, documents_mask=None, *, backend=None):
    """Mean over query tokens that retrieved something of a document of their best retrieved similarity with it.

    Parameters
    ----------
    queries, documents
        ``(Q, tokens, d)`` and ``(D, tokens, d)`` tensors.
    k
        How many document tokens, of all documents, each query token retrieves; at most as many as there are.
    queries_mask, documents_mask
        As in ``maxsim``. Masked document tokens are retrieved last.
    backend
        Kernel of the backward pass.

    Returns
    -------
    ``(Q, D)`` scores, float32 (float64 for float64 input), differentiable with the retrieved tokens held fixed. A token
    that was not retrieved has similarity 0, as has a query token that is masked; the mean is over the positive ones.
    """
    if transformed():
        raise NotImplementedError("xtr takes neither torch.compile nor torch.func transforms")
    problem = build(queries, documents, queries_mask, documents_mask, "exclude", False, None)
    count, length = problem.documents.shape[:2]
    if not 1 <= k <= count * length:
        raise ValueError(f"k is {k}; it may be 1 to the number of document tokens, {count * length}")
    with torch.no_grad(), torch.autocast(problem.device, enabled=False):
        best, winners = _best(problem, *_retrieved(problem, k))
        if problem.queries_mask is not None:
            gone = ~problem.queries_mask
            best = best.masked_fill(gone[..., None], 0.0)
            winners = winners.masked_fill(gone, torch.iinfo(winners.dtype).max)
        positive = (best > 0).sum(1).clamp(min=1e-3)
    return fixed(best.sum(1), problem, winners, backend) / positive


def _retrieved(problem, k):
    """The k best (values, positions in all documents' tokens) of every query token, ``(Q * tokens, k)``."""
    documents, mask = problem.documents, problem.documents_mask
    kind = torch.float64 if documents.dtype == torch.float64 else torch.float32
    rows = problem.queries.flatten(0, 1).to(kind)
    length = documents.shape[1]
    step = max(BLOCK.get(problem.device, BLOCK["other"]) // max(len(rows) * length, 1), 1)
    values = rows.new_empty(len(rows), 0)
    places = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    for first in range(0, len(documents), step):
        block = documents[first : first + step].flatten(0, 1).to(kind)
        similar = rows @ block.T
        if mask is not None:
            similar = similar.masked_fill(~mask[first : first + step].flatten(), torch.finfo(kind).min)
        found, where = similar.topk(min(k, similar.shape[1]), dim=1)
        values, order = torch.cat([values, found], 1).topk(min(k, values.shape[1] + found.shape[1]), dim=1)
        places = torch.cat([places, where + first * length], 1).gather(1, order)
    return values, places


def _best(problem, values, places):
    """Best retrieved similarity of each query token with each document, ``(Q, tokens, D)``, and its token."""
    from flashot_backends.kernels.maxsim.layout import index_dtype, none_of

    (count, tokens), (documents, length) = problem.queries.shape[:2], problem.documents.shape[:2]
    owner, token = places // length, places % length
    shape = (len(values), documents)
    top = values.new_full(shape, -torch.inf).scatter_reduce(1, owner, values, "amax")
    retrieved = torch.zeros(shape, dtype=torch.int64, device=values.device).scatter_add(
        1, owner, torch.ones_like(owner)
    )
    tied = values == top.gather(1, owner)
    where = torch.full(shape, length, device=values.device)
    where = where.scatter_reduce(1, owner, token.masked_fill(~tied, length), "amin")
    kept = (retrieved > 0) & ((top > 0) | (retrieved == length)) & (top > torch.finfo(values.dtype).min)
    best = torch.where(retrieved == length, top, top.clamp(min=0))
    kind = index_dtype(problem.longest_document)
    winners = torch.where(kept, where, none_of(kind)).to(kind)
    return best.view(count, tokens, documents), winners.T.contiguous().view(documents, count, tokens)
