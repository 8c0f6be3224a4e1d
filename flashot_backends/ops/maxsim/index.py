"""An index of multi-vector documents: a centroid and a few bits for each token, searched by centroids first.

Residual codes as in ColBERTv2 (Santhanam et al., 2022, section 3.3), pruning as in PLAID (the same, 2022). What is left
after pruning is scored from the codes as they are and, where the documents' own embeddings are kept, once more by them.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from .codes import Residuals
from .pruning import gathered, pruned
from .scores import maxsim, topk

FORMAT = 1
BLOCK = {"cpu": 1 << 22, "other": 1 << 27}  # similarities with centroids alive at a time
SAMPLE = 1 << 18  # tokens that the centroids are made from
ROUNDS = 8
GROWTH = 4  # centroids are made anew when there are so many times the tokens they were made from


class Index:
    """Documents by number, 0 to ``len(index) - 1``, in the order in which they were added.

    Parameters
    ----------
    bits
        1, 2, 4 or 8 bits for each dimension of a residual.
    exact
        Keep the embeddings too (as they come, in main memory) and order the best documents by them.
    device
        Where codes live and scores are computed; default "cpu".
    seed
        Of the choice of tokens that become centroids.
    """

    def __init__(self, bits=4, exact=False, device="cpu", seed=0):
        if bits not in (1, 2, 4, 8):
            raise ValueError(f"bits is {bits!r}; it may be 1, 2, 4 or 8")
        self.bits, self.exact, self.device, self.seed = bits, bool(exact), torch.device(device), seed
        self.trained = 0
        nothing: Any = None  # until the first documents are added
        self.centroids = self.cutoffs = self.weights = self.codes = self.residuals = self.embeddings = nothing
        self.offsets = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._lists: Any = None

    def __len__(self):
        return len(self.offsets) - 1

    def add(self, documents):
        """Add ``(tokens, d)`` tensors of floats; d must be a multiple of 8 / bits."""
        documents = list(documents)
        if not documents:
            return
        tokens = self._checked(documents)
        lengths = torch.tensor([len(document) for document in documents], dtype=torch.int64, device=self.device)
        if self.exact:
            kept = tokens.cpu() if self.embeddings is None else torch.cat([self.embeddings, tokens.cpu()])
            self.embeddings = kept
        if self.centroids is None or len(self.codes) + len(tokens) > GROWTH * self.trained:
            tokens = self._all_tokens(tokens)
            self._train(tokens)
            self.codes, self.residuals = self._encode(tokens)
        else:
            codes, residuals = self._encode(tokens)
            self.codes, self.residuals = torch.cat([self.codes, codes]), torch.cat([self.residuals, residuals])
        self.offsets = torch.cat([self.offsets, self.offsets[-1] + lengths.cumsum(0)])
        self._lists = None

    def remove(self, documents):
        """Take out documents by number; those behind move up."""
        stay = torch.ones(len(self), dtype=torch.bool, device=self.device)
        stay[torch.as_tensor(documents, dtype=torch.int64, device=self.device)] = False
        places, lengths = gathered(self.offsets, stay.nonzero()[:, 0])
        self.codes, self.residuals = self.codes[places], self.residuals[places]
        if self.exact:
            self.embeddings = self.embeddings[places.cpu()]
        self.offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self._lists = None

    def document(self, number):
        """Embeddings of a document, ``(tokens, d)``: its own where they are kept, else as its codes say."""
        places = slice(*self.offsets[number : number + 2].tolist())
        return self.embeddings[places] if self.exact else self._coded([number])[slice(None)]

    def search(self, query, k=10, probes=8, candidates=8192, threshold=None, subset=None):
        """The best documents of one query, best first: (scores, numbers), each of up to k.

        Parameters
        ----------
        query
            ``(tokens, d)`` floats.
        k
            How many documents.
        probes
            How many centroids of each query token are looked at for documents; all of them make the search exhaustive.
        candidates
            How many documents may pass the first cut by centroids (with ``threshold``); a quarter passes the second.
        threshold
            Centroids below it are left out of the first cut. None: there is one cut only.
        subset
            Numbers of the documents to search among; None: all.
        """
        query = query.to(self.device, torch.float32)
        if not len(self) or not len(query):
            return query.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=self.device)
        table = self.centroids @ query.T
        candidates = max(candidates, 4 * k)
        found = self._found(table, probes, candidates // 4, subset)
        found = pruned(table, found, self.codes, self.offsets, threshold, candidates)
        if not len(found):
            return query.new_zeros(0), found
        scores, order = topk(query[None], self._coded(found), min(len(found), 4 * k if self.exact else k))
        scores, found = scores[0], found[order[0]]
        return self._again(query, found, k) if self.exact else (scores, found)

    def _again(self, query, found, k):
        """The order of the documents' own embeddings."""
        documents = [self.document(number).to(self.device, torch.float32) for number in found.tolist()]
        scores = maxsim(query[None], documents)[0]
        scores, order = scores.sort(descending=True, stable=True)
        return scores[:k], found[order[:k]]

    def _found(self, table, probes, few, subset):
        """Documents with a token near to a query token, in ascending order; all of a subset of a few."""
        wanted = None
        if subset is not None:
            wanted = torch.as_tensor(subset, dtype=torch.int64, device=self.device).unique()
        if probes >= len(table) or (wanted is not None and len(wanted) <= few):
            return torch.arange(len(self), device=self.device) if wanted is None else wanted
        cells = table.topk(probes, dim=0).indices.unique()
        starts, documents = self._postings()
        found = documents[gathered(starts, cells)[0]].unique()
        return found if wanted is None else found[torch.isin(found, wanted)]

    def _postings(self):
        """For each centroid the documents with a token there: (offsets, documents)."""
        if self._lists is None:
            count = len(self)
            owners = torch.repeat_interleave(torch.arange(count, device=self.device), self.offsets.diff())
            entries = (self.codes.long() * count + owners).unique()
            sizes = torch.bincount(entries // count, minlength=len(self.centroids))
            self._lists = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), entries % count
        return self._lists

    def _coded(self, documents):
        places, lengths = gathered(self.offsets, torch.as_tensor(documents, dtype=torch.int64, device=self.device))
        return Residuals(self.codes[places], self.residuals[places], lengths, self.centroids, self.weights)

    def _checked(self, documents):
        for document in documents:
            if not isinstance(document, torch.Tensor) or document.dim() != 2 or not document.is_floating_point():
                given = tuple(document.shape) if isinstance(document, torch.Tensor) else type(document).__name__
                raise TypeError(f"documents hold {given}; each must be a (tokens, d) tensor of floats")
        size = documents[0].shape[1] if self.centroids is None else self.centroids.shape[1]
        if any(document.shape[1] != size for document in documents):
            raise ValueError(f"documents have embeddings of another size than {size}")
        if size * self.bits % 8:
            raise ValueError(f"embeddings of size {size} in {self.bits} bits do not fill whole bytes")
        return torch.cat([document.detach() for document in documents]).to(self.device)

    def _all_tokens(self, new):
        """What centroids are made from: every token, the old ones as they are kept."""
        if self.centroids is None:
            return new
        old = self.embeddings[: len(self.codes)].to(new) if self.exact else self._coded(range(len(self)))[slice(None)]
        return torch.cat([old.to(new.dtype), new])

    def _train(self, tokens):
        self.trained = max(len(tokens), 1)
        generator = torch.Generator().manual_seed(self.seed)
        sample = torch.randperm(len(tokens), generator=generator)[:SAMPLE].to(self.device)
        sample = torch.nn.functional.normalize(tokens[sample].float(), dim=-1)
        # PLAID's number: the power of two at 16 times the square root of the number of tokens
        count = 1 << int(math.log2(16 * math.sqrt(self.trained)))
        self.centroids = _centroids(sample, min(count, max(len(sample), 1)), generator)
        rest = sample - self.centroids[_nearest(sample, self.centroids)]
        levels = torch.arange((1 << self.bits) * 2, device=self.device)[1:] / ((1 << self.bits) * 2)
        picked = rest.flatten()[: 1 << 23]
        found = picked.quantile(levels) if len(picked) else torch.zeros(len(levels), device=self.device)
        self.cutoffs, self.weights = found[1::2].contiguous(), found[::2].contiguous()

    def _encode(self, tokens):
        codes, residuals = [], []
        for block in tokens.split(_step(self.centroids)):
            unit = torch.nn.functional.normalize(block.float(), dim=-1)
            nearest = _nearest(unit, self.centroids)
            codes.append(nearest.int())
            residuals.append(packed(torch.bucketize(unit - self.centroids[nearest], self.cutoffs), self.bits))
        return torch.cat(codes), torch.cat(residuals)

    def save(self, folder):
        """Write to a folder, which is made; what was there before is replaced file by file."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = ("centroids", "cutoffs", "weights", "codes", "residuals", "offsets", "embeddings")
        state = {name: getattr(self, name) for name in names}
        _replace(folder / "index.pt", lambda path: torch.save({k: v for k, v in state.items() if v is not None}, path))
        about = {"format": FORMAT, "bits": self.bits, "exact": self.exact, "seed": self.seed, "trained": self.trained}
        _replace(folder / "index.json", lambda path: Path(path).write_text(json.dumps(about)))

    @classmethod
    def load(cls, folder, device="cpu"):
        """Read what ``save`` wrote; nothing in it is run."""
        folder = Path(folder)
        about = json.loads((folder / "index.json").read_text())
        if about.pop("format", None) != FORMAT:
            raise ValueError(f"{folder} holds an index of another format; this one reads format {FORMAT}")
        trained = about.pop("trained")
        index = cls(**about, device=device)
        index.trained = trained
        for name, value in torch.load(folder / "index.pt", map_location="cpu", weights_only=True).items():
            setattr(index, name, value if name == "embeddings" else value.to(index.device))
        return index


def packed(buckets, bits):
    """Bytes of buckets ``(tokens, d)``, as ``Residuals`` reads them."""
    at = torch.arange(8, device=buckets.device)
    stream = ((buckets[..., None] >> at[:bits]) & 1).flatten(1).unflatten(1, (-1, 8))
    return (stream << (7 - at)).sum(-1).to(torch.uint8)


def _nearest(tokens, centroids):
    return torch.cat([(block @ centroids.T).argmax(1) for block in tokens.split(_step(centroids))])


def _step(centroids):
    """How many tokens meet the centroids at a time."""
    return max(BLOCK.get(centroids.device.type, BLOCK["other"]) // max(centroids.shape), 1)


def _centroids(sample, count, generator):
    """Spherical k-means from seeded tokens; a centroid that nothing chose stays where it is."""
    centroids = sample[torch.randperm(len(sample), generator=generator)[:count].to(sample.device)]
    for _ in range(ROUNDS if len(sample) > count else 0):
        nearest, order = _nearest(sample, centroids).sort(stable=True)
        edges = torch.searchsorted(nearest, torch.arange(count, device=sample.device))
        sums = torch.nn.functional.embedding_bag(order, sample, edges, mode="sum")
        means = torch.nn.functional.normalize(sums, dim=-1)
        centroids = torch.where(sums.norm(dim=-1, keepdim=True) > 0, means, centroids)
    return centroids


def _replace(path, write):
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)
