"""PyLate: its ColBERT scores, its reranker and the scoring of its Stanford index on this package's MaxSim.

``backend="flashot"`` (or ``PYLATE_SCORES_BACKEND=flashot``) asks for it; where PyLate is listed in the setting
``substitute``, "auto" means it too. Scores are those of PyLate's torch path: a similarity is multiplied by the document
mask, so a masked token scores 0 and wins where all others are negative. ``"flashot:exclude"`` is the other reading, in
which a masked token cannot win. Scores come back in float32 (float64 for float64 embeddings), whatever the embeddings.

Where there is no argument to ask with (``rank.rerank``, the losses, the Stanford index), the environment variable or
``substitute`` decides. ``Index`` is an index of this package's own with the interface of PyLate's.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from flashot_backends.dispatch import NotApplicable

VERSIONS = ">=1.3,<1.7"
MODULES = (
    "pylate.scores.colbert",
    "pylate.scores.scores",  # where PyLate 1.4 and older define them
    "pylate.scores.xtr",
    "pylate.rank.rank",
    "pylate.losses.contrastive",
    "pylate.losses.cached_contrastive",
    "pylate.indexes.stanford_nlp.modeling.colbert",
    "pylate.indexes.stanford_nlp.search.index_storage",
    "pylate.indexes.stanford_nlp.indexing.codecs.residual",
)
VARIABLE = "PYLATE_SCORES_BACKEND"
MASKED = {"flashot": "zero", "flashot:exclude": "exclude"}
SCORED = ("queries_embeddings", "documents_embeddings", "queries_mask", "documents_mask")
GROUP_BYTES = {"cpu": 1 << 24, "other": 1 << 28}  # documents that one launch of the reranker holds

_log = logging.getLogger("flashot_backends")
_for_a_loss: contextvars.ContextVar[bool] = contextvars.ContextVar("flashot_pylate_loss", default=False)


def adapt(module: Any, host: Any) -> None:
    """Wrap what the given leaf module of PyLate defines."""
    for name in _LOSSES.get(module.__name__, ()):
        host.wrap(module, name, functools.partial(_announced, module, host), ("self",))
    wrappers = _WRAPPERS.get(module.__name__, {})
    for name, (replacement, parameters) in wrappers.items():
        if name.startswith("ColBERTScores.") and not hasattr(module, "ColBERTScores"):
            continue  # PyLate 1.4 and older
        original = getattr(module, name, None)
        host.wrap(module, name, functools.partial(_routed, replacement, host), parameters)
        _rebind_defaults(original, getattr(module, name, None))


def _rebind_defaults(original: Any, wrapper: Any) -> None:
    """Losses bind a score function as a default argument; give those that are loaded the wrapper."""
    if original is None or wrapper is original:
        return
    for name, module in sys.modules.copy().items():
        if name.startswith("pylate.losses."):
            for item in vars(module).copy().values():
                start: Any = vars(item).get("__init__") if isinstance(item, type) else None
                defaults = getattr(start, "__defaults__", None) or ()
                if any(value is original for value in defaults):
                    start.__defaults__ = tuple(wrapper if value is original else value for value in defaults)


# Which calls are ours


class _Choice(NamedTuple):
    masked: str
    named: bool  # asked for by name: what does not apply is an error, not a reason to go on


def _choice(backend: str | None, host: Any) -> _Choice | None:
    """Read the backend as PyLate does; None: not ours."""
    name = (os.environ.get(VARIABLE, "auto") if backend is None else backend).lower()
    if name in MASKED:
        return _Choice(MASKED[name], True)
    return _Choice("zero", False) if name == "auto" and host.substituted else None


def _routed(replacement: Callable[..., Any], host: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    names = tuple(signature.parameters)
    known, takes_backend = frozenset(names), "backend" in names
    needed = frozenset(name for name, way in signature.parameters.items() if way.default is way.empty)

    def routed(*args: Any, **kwargs: Any) -> Any:
        backend = None
        if not takes_backend and "backend" in kwargs:  # PyLate 1.4 and older know no backends
            backend = kwargs.pop("backend")
            _check_name(backend)
        arguments = dict(zip(names, args), **kwargs) if kwargs else dict(zip(names, args))  # noqa: B905
        if len(arguments) < len(args) + len(kwargs) or not needed <= arguments.keys() <= known:
            signature.bind(*args, **kwargs)  # says what is wrong
        backend = arguments.pop("backend", backend)
        choice = _choice(backend, host)
        if choice is None:
            return original(*args, **kwargs)
        try:
            return replacement(choice.masked, **arguments)
        except NotApplicable as reason:
            if choice.named:
                raise ValueError(f"backend='flashot' was asked for and does not apply: {reason}") from None
            _log.info("pylate: %s stays with PyLate: %s", original.__qualname__, reason)
            return original(*args, **kwargs)

    return routed


def _check_name(backend: Any) -> None:
    if backend is not None and str(backend).lower() not in (*MASKED, "auto", "torch"):
        raise ValueError(f"backend must be one of 'auto', 'torch', 'flashot', 'flashot:exclude'; got {backend!r}")


# What they compute


def _scores(masked, queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
    q, d = _sides(queries_embeddings, documents_embeddings, 3)
    return _maxsim()(q, d, _mask(queries_mask), _mask(documents_mask), masked)


def _pairwise(masked, queries_embeddings, documents_embeddings):
    count = min(len(queries_embeddings), len(documents_embeddings))
    q, d = (x if len(x) == count else x[:count] for x in (queries_embeddings, documents_embeddings))
    q, d = _tokens(q, "queries", alone=True), _tokens(d, "documents", alone=True)
    _check(q, d)
    return _maxsim()(q, d, masked=masked, pairs=True)


def _candidates(masked, queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
    q, d = _sides(queries_embeddings, documents_embeddings, 4)
    return _maxsim()(q, d, _mask(queries_mask), _mask(documents_mask), masked)


def _groups(masked, self, queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
    """All groups of ``ColBERTScores`` at once: documents (D, N, tokens, d) in the order of its columns."""
    q, d = _sides(queries_embeddings, documents_embeddings, 4)
    q_mask, mask = _mask(queries_mask), _mask(documents_mask)
    if _for_a_loss.get() and not isinstance(q, list):
        deferred = _deferred()
        if deferred.worthwhile(q, d):
            return deferred.DeferredScores(q, d, q_mask, mask, masked)
    return _maxsim_of_groups()(q, d, q_mask, mask, masked)


def _announced(module: Any, host: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A contrastive loss that takes nothing but the cross entropy of ``ColBERTScores`` lets these wait for it."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores = getattr(module, "ColBERTScores", None)
        if scores is None or type(getattr(self, "score_metric", None)) is not scores:
            return original(self, *args, **kwargs)
        token = _for_a_loss.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _for_a_loss.reset(token)

    return call


def _xtr(masked, self, queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
    """``XTRScores``: documents (Q, N, tokens, d); ``XTRKDScores`` comes by here too."""
    from flashot_backends.ops.maxsim import xtr

    if "_score" in vars(self):
        raise NotApplicable("its scoring was compiled by the caller")
    q, d = _sides(queries_embeddings, documents_embeddings, 4)
    mask = _mask(documents_mask)
    mask = None if mask is None else mask.flatten(0, 1)
    return xtr(q, d.flatten(0, 1), self.k, _mask(queries_mask), mask).float()


def _rerank(masked, documents_ids, queries_embeddings, documents_embeddings, device=None):
    """``rank.rerank`` for all queries together, without padding to the longest candidate."""
    queries = _items(queries_embeddings, 2)
    candidates = [_items(documents, 3) for documents in _sets_of(documents_embeddings)]
    queries = [q.to(device) for q in queries] if device is not None else queries
    calls = list(zip(queries, documents_ids, candidates))  # noqa: B905  (the host stops at the shortest too)
    results = []
    for group in _launches(calls):
        for scores, (_, ids, _) in zip(_score_group(masked, group), group, strict=True):
            results.append(_ranked(scores, ids))
    return results


def _score_group(masked, group):
    import torch

    device = group[0][0].device
    queries = [query for query, _, _ in group]
    orders = [_longest_first(own) for _, _, own in group]
    documents = [own[i] for (_, _, own), order in zip(group, orders, strict=True) for i in order]
    _check(queries, documents)
    lengths = [len(document) for document in documents]
    counts = [len(order) for order in orders]
    if documents:  # one copy to the device
        documents = list(torch.cat(documents).to(device, non_blocking=True).split(lengths))
    first, sets, floors = 0, [], []
    for count in counts:
        sets.append(documents[first : first + count])
        floors += [length < lengths[first] for length in lengths[first : first + count]]
        first += count
    found = _maxsim()(queries, sets, floors=floors if masked == "zero" else None)
    return [scores[_inverse(order, device)] for scores, order in zip(found, orders, strict=True)]


def _longest_first(documents):
    lengths = [len(document) for document in documents]
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _inverse(order, device):
    """Longest documents are started first; this brings their scores back into the order that was given."""
    import torch

    places = torch.tensor(order, dtype=torch.int64)
    return torch.empty_like(places).scatter_(0, places, torch.arange(len(places))).to(device)


def _launches(calls: list[Any]) -> Iterator[list[Any]]:
    """Queries with their candidates in groups of about ``GROUP_BYTES``, each on one device."""
    room = GROUP_BYTES.get(calls[0][0].device.type, GROUP_BYTES["other"]) if calls else 0
    group: list[Any] = []
    size = 0
    for call in calls:
        own = sum(document.nbytes for document in call[2])
        if group and (size + own > room or call[0].device != group[0][0].device):
            yield group
            group, size = [], 0
        group.append(call)
        size += own
    if group:
        yield group


def _ranked(scores, ids):
    import torch

    values, places = torch.sort(scores, descending=True, stable=True)
    return [{"id": ids[i], "score": score} for i, score in zip(places.tolist(), values.tolist(), strict=True)]


def _score_pids(masked, self, config, Q, pids, centroid_scores):
    """The Stanford index's search after it has candidates: cut twice by centroids, then scored from their codes."""
    from flashot_backends.ops.maxsim import Residuals
    from flashot_backends.ops.maxsim.pruning import gathered, pruned

    codes, residuals = self.embeddings.codes, self.embeddings.residuals
    offsets = self.offsets.to(codes.device)
    if centroid_scores is not None:
        threshold = config.centroid_score_threshold
        pids = pruned(centroid_scores, pids, codes, offsets, threshold, config.ndocs)
    places, lengths = gathered(offsets, pids.to(codes.device).long())
    device, codec = Q.device, self.codec
    packed = codes[places].to(device), residuals[places].to(device)
    tables = codec.centroids.to(device), codec.bucket_weights.to(device)
    documents = Residuals(*packed, lengths, *tables)
    aligned = len(Q) > 1
    scores = _maxsim()(Q.float(), documents, pairs=aligned)
    return _unreached(scores if aligned else scores[0], Q.shape[1]), pids


def _decompressed(masked, self, compressed_embs):
    """The Stanford index's tokens from their codes, of length 1."""
    import torch

    from flashot_backends.ops.maxsim import Residuals

    device = self.centroids.device
    codes, residuals = compressed_embs.codes.to(device), compressed_embs.residuals.to(device)
    coded = Residuals(codes, residuals, [len(codes)], self.centroids, self.bucket_weights.to(device))
    parts = [coded[first : first + (1 << 15)] for first in range(0, len(codes), 1 << 15)]
    found = torch.cat(parts) if parts else coded[:]
    return found.half() if self.use_gpu else found


def _packed(masked, Q, D_packed, D_lengths, config=None):
    """The Stanford index's exact scores: one query, documents one after the other."""
    import torch

    _check(Q, D_packed)
    offsets = torch.nn.functional.pad(D_lengths.to(D_packed.device, torch.int64).cumsum(0), (1, 0))
    documents = torch.nested.nested_tensor_from_jagged(D_packed, offsets)
    return _unreached(_maxsim()(Q.to(D_packed.device, D_packed.dtype), documents)[0], Q.shape[1])


def _padded(masked, Q, D_padded, D_mask, config=None):
    """The same for padded documents: one query for all of them, or one for each."""
    _check(Q, D_padded)
    mask = D_mask.view(D_padded.shape[:2]).bool()
    Q = Q.to(D_padded.device, D_padded.dtype)
    scores = _maxsim()(Q, D_padded, documents_mask=mask, pairs=len(Q) > 1)
    return _unreached(scores if len(Q) > 1 else scores[0], Q.shape[1])


def _unreached(scores, length):
    """The host gives a document without tokens -9999 for every query token."""
    return scores.masked_fill(scores == -float("inf"), -9999.0 * length)


# Reading PyLate's arguments


@functools.cache
def _maxsim():
    from flashot_backends.ops.maxsim import maxsim

    return maxsim


@functools.cache
def _maxsim_of_groups():
    from flashot_backends.ops.maxsim.scores import groups

    return groups


@functools.cache
def _deferred():
    from flashot_backends.ops.maxsim import deferred

    return deferred


@functools.cache
def _floats():
    import torch

    return torch.Tensor, (torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.bool


def _sides(queries: Any, documents: Any, dimensions: int) -> tuple[Any, Any]:
    """Queries and documents as the operation takes them; tensors of floats, the usual case, are seen quickly."""
    kind, floats, _ = _floats()
    usual = type(queries) is type(documents) is kind and queries.dim() == 3 and documents.dim() == dimensions
    if usual and queries.dtype in floats and documents.dtype in floats:
        return queries, documents
    q, d = _tokens(queries, "queries"), _tokens(documents, "documents", dimensions)
    _check(q, d)
    return q, d


def _tensor(value: Any) -> Any:
    import numpy
    import torch

    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32)


def _tokens(value: Any, name: str, dimensions: int = 3, alone: bool = False) -> Any:
    """A tensor of the given number of dimensions, or a list of ragged (tokens, d) tensors."""
    import numpy
    import torch

    if isinstance(value, (list, tuple)):
        if not alone and any(isinstance(item, numpy.ndarray) for item in value):
            value = [numpy.asarray(item, dtype=numpy.float32) for item in value]  # as the host joins arrays
        value = [_tensor(item) for item in value]
        if not value or any(item.shape != value[0].shape for item in value):
            return value
        value = torch.stack(value)
    value = _tensor(value)
    if value.dim() != dimensions:
        raise NotApplicable(f"{name}_embeddings has {value.dim()} dimensions, not {dimensions}")
    return value


def _items(value: Any, single: int) -> list[Any]:
    """One tensor for each item; a lone item counts as a list of one, as in the host's ``reshape_embeddings``."""
    if getattr(value, "ndim", 0) == single:
        value = value[None] if single == 2 else value
    return [_tensor(item) for item in value]


def _sets_of(documents: Any) -> Iterable[Any]:
    return documents[None] if getattr(documents, "ndim", 0) == 2 else documents


def _mask(mask: Any) -> Any:
    """A boolean mask; other numbers than 0 and 1 are weights, which only the host's own path has."""
    kind, _, boolean = _floats()
    if mask is None or (type(mask) is kind and mask.dtype is boolean):
        return mask
    mask = _tensor(mask)
    if mask.dtype != boolean and not bool(((mask == 0) | (mask == 1)).all()):
        raise NotApplicable("a mask holds other numbers than 0 and 1")
    return mask.bool()


def _check(queries: Any, documents: Any) -> None:
    floats = _floats()[1]
    for value in (queries, documents):
        for item in value if isinstance(value, list) else [value]:
            if item.dtype not in floats:
                raise NotApplicable(f"embeddings of {item.dtype} are not scored")


_SCORES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "colbert_scores": (_scores, SCORED),
    "colbert_scores_pairwise": (_pairwise, SCORED[:2]),
    "colbert_kd_scores": (_candidates, SCORED),
    "ColBERTScores.__call__": (_groups, ("self", *SCORED)),
}
_WRAPPERS: dict[str, dict[str, tuple[Callable[..., Any], tuple[str, ...]]]] = {
    "pylate.scores.colbert": _SCORES,
    "pylate.scores.scores": _SCORES,
    "pylate.scores.xtr": {"XTRScores.__call__": (_xtr, ("self", *SCORED))},
    "pylate.rank.rank": {
        "rerank": (_rerank, ("documents_ids", "queries_embeddings", "documents_embeddings", "device"))
    },
    "pylate.indexes.stanford_nlp.modeling.colbert": {
        "colbert_score_packed": (_packed, ("Q", "D_packed", "D_lengths", "config")),
        "colbert_score": (_padded, ("Q", "D_padded", "D_mask", "config")),
    },
    "pylate.indexes.stanford_nlp.search.index_storage": {
        "IndexScorer.score_pids": (_score_pids, ("self", "config", "Q", "pids", "centroid_scores")),
    },
    "pylate.indexes.stanford_nlp.indexing.codecs.residual": {
        "ResidualCodec.decompress": (_decompressed, ("self", "compressed_embs")),
    },
}
_LOSSES = {
    "pylate.losses.contrastive": ("Contrastive.forward",),
    "pylate.losses.cached_contrastive": ("CachedContrastive.calculate_loss",),
}


def __getattr__(name: str) -> Any:
    if name == "Index":
        from .pylate_index import Index

        return Index
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
