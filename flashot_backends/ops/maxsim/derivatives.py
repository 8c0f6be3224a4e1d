"""Scores as a differentiable function: eager autograd of any order, and custom operators for compilers and vmap.

Once the winners are fixed, a kernel's backward pass is linear in three things (the gradient and either side's tokens),
and so is the sum of the selected inner products; each is the other's derivative, which gives every higher order.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from ..forward_mode import refuse_tangents
from .codes import Coded
from .problem import Problem


def kernel_for(problem, backend=None):
    """The kernel that serves this problem."""
    from flashot_backends.dispatch import select

    return select("maxsim", problem, backend)


def call_for(problem, backend=None, shape=None):
    """What serves problems of this layout: what the kernel prepared for it, or the kernel itself.

    The former gives scores in ``shape``, if there is one.
    """
    kernel = kernel_for(problem, backend)
    return kernel.prepared(problem, shape) if hasattr(kernel, "prepared") else Unprepared(kernel)


class Unprepared:
    """A kernel, called as what is prepared is called: with the tokens apart from a problem's other fields."""

    def __init__(self, kernel):
        self.kernel = kernel

    def forward(self, queries, documents, others, record):
        """Scores, and winners or None."""
        return self.kernel.forward(Problem(queries, documents, *others), record)

    def recorded(self, queries, documents, others, for_documents):
        """Scores, winners, and nothing that these lie inside of."""
        return *self.forward(queries, documents, others, True), None

    def backward(self, queries, documents, others, winners, gradient, for_queries, for_documents):
        """Gradients for queries and for documents, or None."""
        problem = Problem(queries, documents, *others)
        return self.kernel.backward(problem, winners, gradient, for_queries, for_documents)


def score(problem, backend=None):
    """Scores of a problem, through the cheapest route that the context allows."""
    if isinstance(problem.documents, Coded):
        return _coded(problem, backend)
    if transformed():
        from . import operators

        return operators.score(problem, backend)
    return scored(problem.queries, problem.documents, problem[2:], call_for(problem, backend))


def scored(queries, documents, others, call):
    """The same outside of every transformation, where it is known what serves the problem."""
    if forward_ad._current_level >= 0 and queries.is_cuda:  # a kernel sees no tangents; plain torch on a CPU does
        refuse_tangents((queries, documents))
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad):
        return _apply_score(queries, documents, others, call)
    return call.forward(queries, documents, others, False)[0]


def _coded(problem, backend):
    if transformed() or (torch.is_grad_enabled() and problem.queries.requires_grad):
        raise NotImplementedError("documents in few bits are scored without gradients, torch.compile and torch.func")
    return kernel_for(problem, backend).forward(problem, False)[0]


def transformed():
    """Whether torch.compile is tracing or torch.func is transforming this call."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, documents, others, call):
        scores, winners, ctx.home = call.recorded(queries, documents, others, ctx.needs_input_grad[1])
        ctx.save_for_backward(queries, documents, winners)
        ctx.others, ctx.call = others, call
        return scores

    @staticmethod
    def backward(ctx, gradient):
        queries, documents, winners = ctx.saved_tensors
        for_queries, for_documents, _, _ = ctx.needs_input_grad
        call, others = ctx.call, ctx.others
        if ctx.home is not None:
            found = _from_home(ctx, queries, documents, winners, gradient)
        elif torch.is_grad_enabled():
            found = _differentiable(ctx, queries, documents, winners, gradient)
        else:
            found = call.backward(queries, documents, others, winners, gradient, for_queries, for_documents)
        return *found, None, None


# ``apply`` without its questions about torch.func, which were asked before.
_apply_score: Any = super(torch.autograd.Function, _Score).apply  # type: ignore[misc]
_SPENT = object()


def _from_home(ctx, queries, documents, winners, gradient):
    """Winners that lie where the documents' gradient goes serve once; whoever asks again waits for new ones."""
    for_queries, for_documents, _, _ = ctx.needs_input_grad
    if ctx.home is _SPENT:
        winners = ctx.call.forward(queries, documents, ctx.others, True)[1]
    if torch.is_grad_enabled():
        return _differentiable(ctx, queries, documents, winners.clone(), gradient)
    if ctx.home is _SPENT:
        return ctx.call.backward(queries, documents, ctx.others, winners, gradient, for_queries, for_documents)
    home, ctx.home = ctx.home, _SPENT
    return ctx.call.backward_at_home(queries, documents, ctx.others, winners, gradient, for_queries, home)


def _differentiable(ctx, queries, documents, winners, gradient):
    """Gradients that have gradients themselves."""
    flat = documents.flatten(0, 1) if documents.dim() == 4 else documents
    gradient = gradient.flatten() if Problem(queries, flat, *ctx.others).set_size else gradient
    wanted = ctx.needs_input_grad[:2]
    to_queries, to_documents = _Gradients.apply(gradient, queries, flat, winners, ctx.others, ctx.call, *wanted)
    return to_queries, None if to_documents is None else to_documents.view(documents.shape)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, queries, documents, winners, others, call, for_queries, for_documents):
        ctx.save_for_backward(gradient, queries, documents, winners)
        ctx.others, ctx.call = others, call
        return call.backward(queries, documents, others, winners, gradient, for_queries, for_documents)

    @staticmethod
    def backward(ctx, along_queries, along_documents):
        gradient, queries, documents, winners = ctx.saved_tensors
        zero_q, zero_d = along_queries is None, along_documents is None
        along_queries = torch.zeros_like(queries) if zero_q else along_queries
        along_documents = torch.zeros_like(documents) if zero_d else along_documents
        needs = ctx.needs_input_grad
        to_gradient = to_queries = to_documents = None
        if needs[0]:
            one = selected(Problem(along_queries, documents, *ctx.others), winners)
            two = selected(Problem(queries, along_documents, *ctx.others), winners)
            to_gradient = (one + two).to(gradient.dtype)
        if needs[1] or needs[2]:
            to_queries, to_documents = _Gradients.apply(
                gradient, along_queries, along_documents, winners, ctx.others, ctx.call, needs[1], needs[2]
            )
        return to_gradient, to_queries, to_documents, None, None, None, None, None


def selected(problem, winners):
    """Sum of the inner products at fixed winners, in plain differentiable torch; needed for second derivatives only."""
    from flashot_backends.kernels.maxsim.layout import none_of, owners_of, query_count, score_dtype

    kind = score_dtype(problem)
    queries, documents = _flat(problem.queries).to(kind), _flat(problem.documents).to(kind)
    starts_q, starts_d = _starts(problem, "queries"), _starts(problem, "documents")
    at = owners_of(problem)[:, None] if problem.set_size else torch.arange(query_count(problem), device=queries.device)
    winners = winners[:, None] if problem.set_size else winners
    scores = []
    for j in range(len(winners)):  # one document at a time bounds the gathered rows
        found = winners[j].long()
        chosen = found != none_of(winners.dtype)
        mine = at[j] if problem.set_size else at
        rows_q = (starts_q[mine][:, None] + torch.arange(found.shape[1], device=found.device))[chosen]
        inner = (queries[rows_q] * documents[starts_d[j] + found[chosen]]).sum(-1)
        owner = torch.arange(len(found), device=found.device)[:, None].expand_as(found)[chosen]
        scores.append(inner.new_zeros(len(found)).index_add(0, owner, inner))
    if not scores:
        return queries.sum() * 0 + queries.new_zeros((0,) if problem.set_size else (query_count(problem), 0))
    return torch.cat(scores) if problem.set_size else torch.stack(scores, 1)


def _flat(tokens):
    return tokens.flatten(0, 1) if tokens.dim() == 3 else tokens


def _starts(problem, side):
    offsets = getattr(problem, side + "_offsets")
    if offsets is not None:
        return offsets
    tokens = getattr(problem, side)
    return torch.arange(tokens.shape[0], device=tokens.device) * tokens.shape[1]


def fixed(total, problem, winners, backend=None):
    """``total``, the sum of inner products at given winners, as a differentiable function of the tokens."""
    return _Fixed.apply(problem.queries, problem.documents, total, winners, problem, backend)


class _Fixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, documents, total, winners, problem, backend):
        ctx.call, ctx.others = call_for(problem, backend), problem[2:]
        ctx.save_for_backward(queries, documents, winners)
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        queries, documents, winners = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        found = _Gradients.apply(gradient, queries, documents, winners, ctx.others, ctx.call, *wanted)
        return *found, None, None, None, None
