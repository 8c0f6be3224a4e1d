"""Contrastive loss of MaxSim scores, its gradients made block by block: no score matrix, no record of all winners."""

from typing import Any

import torch

from .derivatives import kernel_for, score, transformed
from .inputs import build

SCORES = 1 << 20  # scores alive at a time where no winners are wanted
WINNERS = 11 << 20  # winners alive at a time: with 32 x 180 tokens enough for two rounds of programs on an H200


def contrastive(
    queries,
    documents,
    labels=None,
    queries_mask=None,
    documents_mask=None,
    masked="exclude",
    *,
    temperature=1.0,
    reduction="mean",
    backend=None,
):
    """Cross entropy of each query's scores with all documents, against its own document.

    The scores are computed twice: once for the log-sum-exp over all documents, once more, if a gradient is wanted, with
    their winners, for a block of documents at a time. Beyond the inputs and gradients it holds one block and float32
    gradients of the queries.

    Parameters
    ----------
    queries, documents, queries_mask, documents_mask, masked, backend
        As in ``maxsim``, padded tensors ``(Q, tokens, d)`` and ``(D, tokens, d)``.
    labels
        int64 ``(Q,)``: the document of each query; by default query i has document i.
    temperature
        Scores are divided by it.
    reduction
        "mean", "sum", or "none" for one loss per query.

    Returns
    -------
    Loss in float32 (float64 for float64 input), differentiable once.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    if not isinstance(documents, torch.Tensor) or not isinstance(queries, torch.Tensor):
        raise TypeError("queries and documents must be padded tensors; use maxsim for lists")
    if documents.is_nested or queries.is_nested or documents.dim() != 3:
        raise ValueError("queries and documents must be padded tensors with three dimensions")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is {reduction!r}; it may be "mean", "sum" or "none"')
    problem = build(queries, documents, queries_mask, documents_mask, masked, False, None)
    labels = _labels(labels, problem)
    if transformed():  # by torch.compile or torch.func, which follow the plain composition only
        scores = score(problem, backend) / temperature
        return torch.nn.functional.cross_entropy(scores, labels, reduction=reduction)
    losses = _Contrastive.apply(problem.queries, problem.documents, labels, problem, float(temperature), backend)
    return losses if reduction == "none" else getattr(losses, reduction)()


def _labels(labels, problem):
    queries, documents = problem.queries.shape[0], problem.documents.shape[0]
    if labels is None:
        if queries > documents:
            raise ValueError(f"labels is needed: there are {queries} queries and only {documents} documents")
        return torch.arange(queries, device=problem.queries.device)
    labels = torch.as_tensor(labels, device=problem.queries.device)
    if labels.shape != (queries,) or labels.dtype != torch.int64:
        raise ValueError(f"labels is {labels.dtype} {tuple(labels.shape)}; it must be int64 ({queries},)")
    return labels


def _blocks(problem, step):
    """The problem in runs of documents: (first, last, part)."""
    step = max(step, 1)
    for first in range(0, len(problem.documents), step):
        last = min(first + step, len(problem.documents))
        mask = problem.documents_mask
        part = problem.documents[first:last], None if mask is None else mask[first:last]
        yield first, last, problem._replace(documents=part[0], documents_mask=part[1])


class _Contrastive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, documents, labels, problem, temperature, backend):
        kernel = kernel_for(problem, backend)
        total: Any = None
        own: Any = None
        for first, last, part in _blocks(problem, SCORES // max(len(queries), 1)):
            scores = kernel.forward(part, False)[0] / temperature
            sums = scores.logsumexp(1)
            total = sums if total is None else torch.logaddexp(total, sums)
            mine = _of_label(scores, labels, first, last)
            own = mine if own is None else own + mine
        ctx.save_for_backward(queries, documents, labels, total)
        ctx.rest = problem._replace(queries=None, documents=None), temperature, kernel
        return total - own

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("contrastive is differentiable once; take cross_entropy of maxsim for more")
        queries, documents, labels, total = ctx.saved_tensors
        problem, temperature, kernel = ctx.rest
        problem = problem._replace(queries=queries, documents=documents)
        for_queries, for_documents = ctx.needs_input_grad[:2]
        wide = torch.promote_types(queries.dtype, torch.float32)
        to_queries = queries.new_zeros(queries.shape, dtype=wide) if for_queries else None
        to_documents: Any = (
            torch.empty_like(documents, memory_format=torch.contiguous_format) if for_documents else None
        )
        for first, last, part in _blocks(problem, WINNERS // max(queries[..., 0].numel(), 1)):
            scores, winners = kernel.forward(part, True)
            slope = scores.div_(temperature).sub_(total[:, None]).exp_()
            inside = (labels >= first) & (labels < last)
            own = (labels - first).clamp(0, last - first - 1)[:, None]
            slope.scatter_add_(1, own, -inside[:, None].to(slope.dtype))
            slope *= (gradient / temperature)[:, None]
            if for_queries:
                _add(kernel, part, winners, slope, to_queries)
            if for_documents:
                to_documents[first:last] = kernel.backward(part, winners, slope, False, True)[1]
        return None if to_queries is None else to_queries.to(queries.dtype), to_documents, None, None, None, None


def _add(kernel, problem, winners, gradient, total):
    """Add a block's gradient of the queries, in place where the kernel can."""
    if hasattr(kernel, "add_queries"):
        kernel.add_queries(problem, winners, gradient, total)
    else:
        total += kernel.backward(problem, winners, gradient, True, False)[0]


def _of_label(scores, labels, first, last):
    """Score of each query's own document where it lies in this block, else 0."""
    inside = (labels >= first) & (labels < last)
    found = scores.gather(1, (labels - first).clamp(0, last - first - 1)[:, None])[:, 0]
    return torch.where(inside, found, 0.0)
