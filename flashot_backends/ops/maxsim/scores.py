"""The public functions: MaxSim scores, and the best documents for each query."""

import torch

from . import derivatives, repeat
from .codes import Coded
from .foreign import in_torch
from .inputs import build, is_sets


@in_torch
def maxsim(
    queries,
    documents,
    queries_mask=None,
    documents_mask=None,
    masked="exclude",
    pairs=False,
    *,
    mean=False,
    normalize=False,
    floors=None,
    backend=None,
):
    """Late-interaction scores: sum over query tokens of the largest inner product with a document token.

    Khattab and Zaharia, "ColBERT", 2020, equation 3. Differentiable in queries and documents, to any order, with the
    winning tokens held fixed; of equal similarities the first one wins, as with ``torch.max``.

    Parameters
    ----------
    queries
        ``(Q, tokens, d)`` tensor, list of Q ``(tokens, d)`` tensors, or jagged nested tensor; float64, float32, float16
        or bfloat16. Inside ``torch.autocast`` both sides are cast as matrix products are. numpy, JAX and CuPy arrays
        are taken too and answered in kind, without derivatives.
    documents
        The same with D items: every query meets every document. ``(Q, C, tokens, d)``, or a list with one list of
        tensors for each query: each query meets its own candidates only. ``Int8`` or ``Residuals`` documents are
        scored as they are kept.
    queries_mask, documents_mask
        Boolean (or numbers, where nonzero keeps a token), shaped as the tokens are; any pattern, holes included. A
        masked query token contributes nothing.
    masked
        What a masked document token does: "exclude", it cannot win; "zero", its similarity is 0, so it wins where all
        others are negative (PyLate's and ColPali's contract).
    pairs
        True: query i meets document i only.
    mean
        True: the mean over the query tokens that count instead of their sum.
    normalize
        True: scale every token to length 1 first.
    floors
        Boolean, one for each document: True adds to it one unseen token of similarity 0, as zero padding would.
    backend
        Name of a kernel, or several in order of preference; see ``flashot_backends.status``.

    Returns
    -------
    Scores, float32 (float64 for float64 input): ``(Q, D)``; ``(Q, C)`` for 4-D documents; ``(Q,)`` for pairs; a list of
    Q one-dimensional tensors for lists of lists. A query without tokens scores 0. A document without any token that
    may win scores -inf, or 0 where ``masked="zero"`` masks every token of it.

    Raises
    ------
    TypeError, ValueError
        Naming the argument. flashot_backends' BackendError if a kernel asked for by name does not apply.
    """
    key = None
    if floors is None and not (normalize or mean):
        scores, key = repeat.again(queries, documents, queries_mask, documents_mask, masked, pairs, backend)
        if scores is not None:
            return scores
    given = queries, documents, queries_mask, documents_mask
    if normalize:
        queries, documents = _unit(queries), _unit(documents)
    problem = build(queries, documents, queries_mask, documents_mask, masked, pairs, floors)
    scores = derivatives.score(problem, backend) if key is None else _first(key, problem, given, backend)
    if mean:
        scores = scores / _counts(problem, scores)
    return _shaped(scores, problem, documents)


def groups(queries, documents, queries_mask=None, documents_mask=None, masked="exclude"):
    """Scores of all queries with all documents of a ``(D, N, tokens, d)`` tensor, ``(Q, D * N)``; masks as there."""
    given = queries, documents, queries_mask, documents_mask
    scores, key = repeat.again(*given, masked, "groups")
    if scores is not None:
        return scores
    d_mask = None if documents_mask is None else documents_mask.flatten(0, 1)
    problem = build(queries, documents.flatten(0, 1), queries_mask, d_mask, masked, False, None)
    return derivatives.score(problem) if key is None else _first(key, problem, given)


def _first(key, problem, given, backend=None):
    """Scores of the first call of a layout; the next ones find what serves it."""
    shape = given[1].shape[:2] if given[1].dim() == 4 and problem.set_size else None
    call = derivatives.call_for(problem, backend, shape)
    repeat.keep(key, call, problem, *given)
    return derivatives.scored(problem.queries, problem.documents, problem[2:], call)


@in_torch
def topk(queries, documents, k, **options):
    """The k best documents of each query, best first: (scores, indices), each ``(Q, k)``, on the device of the input.

    Takes the arguments of ``maxsim`` (except ``pairs``); fewer than k documents give as many columns as there are. For
    a list of candidate lists the two results are lists. Equal scores keep the order of the documents.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}; it must be a positive integer")
    scores = maxsim(queries, documents, **options)
    if isinstance(scores, list):
        found = [_best(row, k) for row in scores]
        return [values for values, _ in found], [places for _, places in found]
    return _best(scores, k)


def _best(scores, k):
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :k], places[..., :k]


def _unit(tokens):
    if isinstance(tokens, (list, tuple)):
        return [_unit(item) for item in tokens]
    if isinstance(tokens, Coded):
        raise ValueError("normalize=True does not apply to documents in few bits; scale them when they are coded")
    if isinstance(tokens, torch.Tensor) and tokens.is_nested:
        return torch.nested.nested_tensor_from_jagged(_unit(tokens.values()), tokens.offsets())
    wide = tokens if tokens.dtype == torch.float64 else tokens.float()
    return torch.nn.functional.normalize(wide, dim=-1).to(tokens.dtype)


def _counts(problem, scores):
    """Number of query tokens behind each score, at least 1."""
    if problem.queries_offsets is None:
        shape = problem.queries.shape[:2]
        kept = problem.queries_mask
        counts = scores.new_full(shape[:1], shape[1]) if kept is None else kept.sum(1)
    else:
        kept, offsets = problem.queries_mask, problem.queries_offsets
        counts = offsets.diff() if kept is None else torch.nn.functional.pad(kept.cumsum(0), (1, 0))[offsets].diff()
    counts = counts.clamp(min=1).to(scores.dtype)
    if not problem.set_size:
        return counts[:, None]
    return counts[problem.owners] if problem.owners is not None else counts.repeat_interleave(problem.set_size)


def _shaped(scores, problem, documents):
    if is_sets(documents):
        return list(scores.split([len(group) for group in documents]))
    if isinstance(documents, torch.Tensor) and not documents.is_nested and documents.dim() == 4:
        return scores.view(documents.shape[0], documents.shape[1])
    return scores
