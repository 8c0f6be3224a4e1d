"""An index with the interface of PyLate's own, on ``ops.maxsim``'s index: for ``retrieve.ColBERT`` and by itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class Index:
    """Documents in residual codes of a few bits, cut by their centroids and scored from the codes; in a folder.

    Parameters
    ----------
    index_folder, index_name
        The index lives in ``index_folder/index_name``; what is there already is loaded.
    override
        Forget what is there.
    nbits
        Bits for each dimension of a residual: 1, 2, 4 or 8.
    exact
        Keep the embeddings too and order the best documents by them; ``get_documents_embeddings`` returns these then.
    n_ivf_probe, n_full_scores, centroid_score_threshold
        How many centroids of each query token are looked at; how many documents pass the first cut (a quarter of it is
        scored); which centroids it leaves out (None: it is not made).
    seed
        Of the choice of tokens that become centroids.
    device
        Where codes live and are scored: "cuda" if there is one, else "cpu".
    """

    is_end_to_end_index = True

    def __init__(
        self,
        index_folder: str = "indexes",
        index_name: str = "colbert",
        override: bool = False,
        nbits: int = 4,
        exact: bool = False,
        n_ivf_probe: int = 8,
        n_full_scores: int = 8192,
        centroid_score_threshold: float | None = None,
        seed: int = 42,
        device: str | None = None,
    ) -> None:
        import torch

        from flashot_backends.ops.maxsim.index import Index as Engine

        _is_one_of_pylates()
        self.folder = Path(index_folder) / index_name
        self.n_ivf_probe, self.n_full_scores = n_ivf_probe, n_full_scores
        self.centroid_score_threshold = centroid_score_threshold
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        names = self.folder / "documents.json"
        if override or not names.exists():
            self._engine, self._ids = Engine(nbits, exact, device, seed), []
        else:
            self._engine, self._ids = Engine.load(self.folder, device), json.loads(names.read_text())
        self._number = {name: i for i, name in enumerate(self._ids)}

    def __len__(self) -> int:
        return len(self._ids)

    def add_documents(self, documents_ids: Any, documents_embeddings: Any, batch_size: int = 2000) -> Index:
        """Add documents, in place of those that have the same id, and write the index.

        Parameters
        ----------
        documents_ids
            Strings or integers, one for each document.
        documents_embeddings
            ``(tokens, d)`` arrays or tensors.
        batch_size
            Taken for PyLate's sake; memory is bounded without it.
        """
        ids = [documents_ids] if isinstance(documents_ids, str) else list(documents_ids)
        documents = _tokens(documents_embeddings)
        if len(ids) != len(documents) or len(set(ids)) != len(ids):
            raise ValueError(f"documents_ids holds {len(set(ids))} different ids for {len(documents)} documents")
        if any(isinstance(name, bool) or not isinstance(name, (str, int)) for name in ids):
            raise TypeError("documents_ids must be strings or integers")
        self._forget([name for name in ids if name in self._number])
        self._engine.add(documents)
        self._name([*self._ids, *ids])
        self._write()
        return self

    def update_documents(self, documents_ids: Any, documents_embeddings: Any) -> Index:
        """The same as ``add_documents``, for documents that are there."""
        self._numbers(documents_ids)
        return self.add_documents(documents_ids, documents_embeddings)

    def remove_documents(self, documents_ids: Any) -> Index:
        """Take documents out, and write the index."""
        self._numbers(documents_ids)
        self._forget(list(documents_ids))
        self._write()
        return self

    def __call__(self, queries_embeddings: Any, k: int = 10, subset: Any = None) -> list[list[dict[str, Any]]]:
        """The best documents of each query, best first, as ``{"id": ..., "score": ...}``.

        Parameters
        ----------
        queries_embeddings
            ``(tokens, d)`` arrays or tensors, or one of them.
        k
            How many documents.
        subset
            Ids to search among: one list for all queries, or one list for each.
        """
        queries = _tokens(queries_embeddings)
        each = [None] * len(queries) if subset is None else _for_each(subset, len(queries))
        return [self._search(query, k, ids) for query, ids in zip(queries, each, strict=True)]

    def _search(self, query: Any, k: int, subset: Any) -> list[dict[str, Any]]:
        numbers = None if subset is None else [self._number[name] for name in subset if name in self._number]
        scores, found = self._engine.search(
            query, k, self.n_ivf_probe, self.n_full_scores, self.centroid_score_threshold, numbers
        )
        return [{"id": self._ids[i], "score": s} for i, s in zip(found.tolist(), scores.tolist(), strict=True)]

    def get_documents_embeddings(self, documents_ids: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Embeddings of documents, one list of ``(tokens, d)`` numpy arrays for each list of ids."""
        documents = [[self._engine.document(number) for number in self._numbers(ids)] for ids in documents_ids]
        return [[document.cpu().float().numpy() for document in row] for row in documents]

    def _numbers(self, ids: Iterable[Any]) -> list[int]:
        unknown = [name for name in ids if name not in self._number]
        if unknown:
            raise KeyError(f"the index has no document {unknown[0]!r}")
        return [self._number[name] for name in ids]

    def _forget(self, ids: list[Any]) -> None:
        if ids:
            self._engine.remove([self._number[name] for name in ids])
            gone = set(ids)
            self._name([name for name in self._ids if name not in gone])

    def _name(self, ids: list[Any]) -> None:
        self._ids, self._number = ids, {name: i for i, name in enumerate(ids)}

    def _write(self) -> None:
        self._engine.save(self.folder)
        part = self.folder / "documents.json.part"
        part.write_text(json.dumps(self._ids))
        os.replace(part, self.folder / "documents.json")


def _tokens(value: Any) -> list[Any]:
    """``(tokens, d)`` tensors of floats; a lone item counts as a list of one."""
    import numpy
    import torch

    if getattr(value, "ndim", 0) == 2:
        value = value[None]
    items = [item if isinstance(item, torch.Tensor) else torch.from_numpy(numpy.asarray(item)) for item in value]
    return [item.detach() if item.is_floating_point() else item.float() for item in items]


def _for_each(subset: Any, count: int) -> list[Any]:
    if not subset or not isinstance(subset[0], (list, tuple, set)):
        return [subset] * count
    if len(subset) != count:
        raise ValueError(f"subset holds {len(subset)} lists for {count} queries")
    return list(subset)


def _is_one_of_pylates() -> None:
    """PyLate's retrievers may ask whether an index is one."""
    base = getattr(sys.modules.get("pylate.indexes.base"), "Base", None)
    if base is not None:
        base.register(Index)
