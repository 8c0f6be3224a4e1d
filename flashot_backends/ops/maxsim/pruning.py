"""Which documents are worth scoring: their tokens stand at their centroids, whose similarities are looked up.

Santhanam et al., "PLAID", 2022, sections 4.2 and 4.3: centroid interaction and centroid pruning.
"""

import torch

UNSEEN = -9999.0  # what a query token gets from a document of which nothing is left, as in ColBERT's own code


def gathered(offsets, items):
    """Positions of all tokens of some items, one item after the other, and their lengths; ``offsets`` (count + 1,)."""
    lengths = offsets.diff()[items]
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(offsets[:-1][items] - ends + lengths, lengths, output_size=total)
    return torch.arange(total, device=offsets.device) + shift, lengths


def at_centroids(table, codes, lengths, kept=None):
    """Scores of documents whose tokens are replaced by their centroids.

    Parameters
    ----------
    table
        Floats ``(centroids, tokens)``: similarity of each centroid with each query token.
    codes, lengths
        Integers: the centroid of each document token, and how many tokens each document has.
    kept
        Boolean ``(centroids,)``: the others are left out (None: all count).

    Returns
    -------
    Floats ``(documents,)``; a query token that finds nothing in a document counts -9999.
    """
    codes = codes.long()
    if kept is not None:
        live = kept[codes]
        ends = torch.nn.functional.pad(live.cumsum(0), (1, 0))
        edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        lengths, codes = ends[edges].diff(), codes[live]
    if not len(codes):
        return table.new_full((len(lengths),), UNSEEN * table.shape[1])
    starts = lengths.cumsum(0) - lengths
    best = torch.nn.functional.embedding_bag(codes, table, starts, mode="max")
    return torch.where(lengths > 0, best.sum(1), UNSEEN * table.shape[1])


def pruned(table, documents, codes, offsets, threshold, count):
    """The documents that may be best: ``count`` by their near centroids, a quarter of these by all their centroids.

    ``documents`` are positions in ``offsets``; a centroid is near when a query token's similarity reaches ``threshold``
    (None: the first cut is left out).
    """
    if threshold is not None and count < len(documents):
        near = table.amax(1) >= threshold
        documents = _best(table, documents, codes, offsets, near, count)
    return _best(table, documents, codes, offsets, None, max(count // 4, 1))


def _best(table, documents, codes, offsets, kept, count):
    if count >= len(documents):
        return documents
    places, lengths = gathered(offsets, documents.to(offsets.device, torch.int64))
    scores = at_centroids(table, codes[places].to(table.device), lengths.to(table.device), kept)
    return documents[scores.topk(count).indices.to(documents.device)]
