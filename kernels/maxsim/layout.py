"""What every MaxSim kernel receives, and the few facts that are read off it.

A problem is a named tuple made by ``flashot_backends.ops.maxsim`` with these fields:

``queries``, ``documents``
    Padded ``(count, length, d)``, or packed ``(tokens, d)`` together with offsets.
    Documents may also be an object that decodes what it is indexed with: 8-bit integers with ``values`` and ``scales``,
    or ``codes``, ``residuals``, ``centroids``, ``weights``, ``bits`` and ``unit``. These are scored without ``record``.
``queries_mask``, ``documents_mask``
    Boolean, shaped as the tokens are, or None. True keeps a token.
``queries_offsets``, ``documents_offsets``
    int64 ``(count + 1,)`` for packed tokens, else None.
``owners``
    int64 ``(documents,)``, ascending: the one query that each document meets. Only with ``set_size == -1``.
``floors``
    Boolean ``(documents,)`` or None. True: the document also holds a token whose similarity is zero (host padding).
``longest_query``, ``longest_document``
    Upper bounds of the lengths.
``set_size``
    0: every query meets every document. C > 0: document j meets query j // C only. -1: see ``owners``.
``masked``
    "exclude": a masked document token cannot win. "zero": its similarity is zero.

``forward(problem, record)`` returns ``(scores, winners)``: scores ``(queries, documents)``, or ``(documents,)`` when
each document has one query; winners ``(documents, queries, longest_query)`` or ``(documents, longest_query)``, the
position of the document token that each query token chose, or ``none_of(dtype)`` where it chose nothing (None unless
``record``).
``backward(problem, winners, gradient, for_queries, for_documents)`` returns the two gradients (None where not wanted).

A kernel for which nothing but a problem's layout (shapes, strides, dtypes, numbers) decides what runs may have
``prepared(problem, shape=None)``. What it returns is kept and called again for other problems of that layout, with
``others``, a problem's fields behind its tokens: ``forward(queries, documents, others, record)``,
``backward(queries, documents, others, winners, gradient, for_queries, for_documents)`` and
``recorded(queries, documents, others, for_documents)``, which returns scores, winners and ``home``: None, or a tensor
like the documents, inside of which the winners lie. ``backward_at_home(queries, documents, others, winners, gradient,
for_queries, home)`` makes that tensor their gradient, after which the winners are gone. Documents in sets may keep both
axes there, and scores and their gradient have the given shape.
"""

import torch


def index_dtype(longest_document: int) -> torch.dtype:
    """The narrowest integer that holds any position and the mark for "nothing"."""
    if longest_document < 255:
        return torch.uint8
    return torch.int16 if longest_document < 32767 else torch.int32


def none_of(dtype: torch.dtype) -> int:
    """The mark for "no document token won"."""
    return torch.iinfo(dtype).max


def score_dtype(problem) -> torch.dtype:
    """float64 stays float64; everything else is summed and returned in float32."""
    return torch.float64 if problem.queries.dtype == torch.float64 else torch.float32


def query_count(problem) -> int:
    """Number of queries."""
    offsets = problem.queries_offsets
    return problem.queries.shape[0] if offsets is None else offsets.shape[0] - 1


def document_count(problem) -> int:
    """Number of documents."""
    offsets = problem.documents_offsets
    return problem.documents.shape[0] if offsets is None else offsets.shape[0] - 1


def winners_shape(problem) -> tuple[int, ...]:
    """Shape of the recorded positions."""
    if problem.set_size:
        return document_count(problem), problem.longest_query
    return document_count(problem), query_count(problem), problem.longest_query


def owners_of(problem) -> torch.Tensor:
    """The query of each document, int64, when each document has one."""
    if problem.owners is not None:
        return problem.owners
    count = document_count(problem)
    return torch.arange(count, device=problem.documents.device) // problem.set_size
