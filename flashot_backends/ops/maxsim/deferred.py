"""Scores that are not computed before it is known what for: a cross entropy of them needs no matrix of scores.

For host code that computes scores in one place and their cross entropy in another. The object stands in for the
``(Q, D)`` tensor of scores; whatever is done to it but dividing by a number, joining such objects and
``torch.nn.functional.cross_entropy`` makes it the tensor that it stands for.
"""

import torch
from torch.nn.functional import cross_entropy

from .derivatives import transformed
from .loss import contrastive
from .scores import groups, maxsim

LEAST = 1 << 24  # winners below which a record of them does no harm


def worthwhile(queries, documents):
    """Whether a record of the winning tokens would weigh as much as a quarter of the embeddings, and not little."""
    winners = queries.shape[:-1].numel() * documents.shape[:-2].numel()
    embeddings = queries.numel() + documents.numel()
    return winners >= LEAST and 4 * winners >= embeddings * queries.element_size() and not transformed()


class DeferredScores:
    """Scores of queries with documents, padded tensors as ``contrastive`` takes them, divided by ``temperature``.

    Documents may also be given in groups, ``(D, N, tokens, d)``; they count as ``(D * N, tokens, d)``.
    """

    def __init__(self, queries, documents, queries_mask, documents_mask, masked, temperature=1.0):
        self._sides = queries, documents, queries_mask, documents_mask
        self._masked, self._temperature = masked, temperature
        self._tensor = None

    def tensor(self):
        """The scores, differentiable."""
        if self._tensor is None:
            score = maxsim if self._sides[1].dim() == 3 else groups
            scores = score(*self._sides, self._masked)
            self._tensor = scores if self._temperature == 1.0 else scores / self._temperature
        return self._tensor

    def _flat(self):
        queries, documents, queries_mask, documents_mask = self._sides
        if documents.dim() == 4:
            documents = documents.flatten(0, 1)
            documents_mask = None if documents_mask is None else documents_mask.flatten(0, 1)
        return queries, documents, queries_mask, documents_mask

    def _like(self, other):
        """Whether both score the same documents in the same way."""
        same = all(a is b for a, b in zip(self._sides[1::2], other._sides[1::2], strict=True))
        masks = (self._sides[2] is None) == (other._sides[2] is None)
        return same and masks and (self._masked, self._temperature) == (other._masked, other._temperature)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __len__(self):
        return len(self._sides[0])

    def __truediv__(self, number):
        if isinstance(number, (int, float)):
            return DeferredScores(*self._sides, self._masked, self._temperature * number)
        return self.tensor() / number

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Called by torch in place of a function of it that was given one of us."""
        kwargs = kwargs or {}
        if function is cross_entropy:
            found = _loss(*args, **kwargs)
        elif function is torch.cat:
            found = _joined(*args, **kwargs)
        else:
            found = None
        return function(*_opened(args), **_opened(kwargs)) if found is None else found


for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__rtruediv__", "__pow__", "__neg__",
    "__matmul__", "__getitem__", "__iter__", "__float__", "__lt__", "__le__", "__gt__", "__ge__",
):  # fmt: skip

    def _method(self, *args, _name=_name):
        return getattr(self.tensor(), _name)(*_opened(args))

    setattr(DeferredScores, _name, _method)


def _loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
          label_smoothing=0.0):  # fmt: skip
    """The cross entropy without the scores, or None where it is another loss than ``contrastive`` knows."""
    plain = weight is size_average is reduce is None and not label_smoothing and reduction in ("mean", "sum", "none")
    if not plain or not isinstance(input, DeferredScores) or not isinstance(target, torch.Tensor):
        return None
    if target.dtype != torch.int64 or target.dim() != 1 or input._tensor is not None:
        return None
    queries, documents, queries_mask, documents_mask = input._flat()
    options = {"temperature": input._temperature, "reduction": reduction}
    return contrastive(queries, documents, target, queries_mask, documents_mask, input._masked, **options)


def _joined(tensors, dim=0, **other):
    """Queries of several parts with the same documents, or None."""
    first = tensors[0]
    if dim != 0 or other or not all(isinstance(part, DeferredScores) and part._like(first) for part in tensors):
        return None
    if len(tensors) == 1:
        return first
    queries = torch.cat([part._sides[0] for part in tensors])
    mask = None if first._sides[2] is None else torch.cat([part._sides[2] for part in tensors])
    return DeferredScores(queries, first._sides[1], mask, first._sides[3], first._masked, first._temperature)


def _opened(value):
    """The same arguments with tensors in our place."""
    if isinstance(value, DeferredScores):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        return type(value)(_opened(item) for item in value)
    return {name: _opened(item) for name, item in value.items()} if isinstance(value, dict) else value
