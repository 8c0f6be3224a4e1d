"""Scores as a differentiable function: eager autograd of any order, and custom operators for compilers and vmap.

Once the winners are fixed, a kernel's backward pass is linear in three things (the gradient and either side's tokens),
and so is the sum of the selected inner products; each is the other's derivative, which gives every higher order.
"""

import torch

from .codes import Coded
from .problem import Problem


def kernel_for(problem, backend=None):
    """The kernel that serves this problem."""
    from flashot_backends.dispatch import select

    return select("maxsim", problem, backend)


def score(problem, backend=None):
    """Scores of a problem, through the cheapest route that the context allows."""
    if isinstance(problem.documents, Coded):
        return _coded(problem, backend)
    if transformed():
        from . import operators

        return operators.score(problem, backend)
    if torch.is_grad_enabled() and (problem.queries.requires_grad or problem.documents.requires_grad):
        return _Score.apply(problem.queries, problem.documents, problem, backend)
    return kernel_for(problem, backend).forward(problem, False)[0]


def _coded(problem, backend):
    if transformed() or (torch.is_grad_enabled() and problem.queries.requires_grad):
        raise NotImplementedError("documents in few bits are scored without gradients, torch.compile and torch.func")
    return kernel_for(problem, backend).forward(problem, False)[0]


def transformed():
    """Whether torch.compile is tracing or torch.func is transforming this call."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def bare(problem):
    """The problem without its tokens, safe to keep in an autograd context."""
    return Problem(None, None, *problem[2:])


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, documents, problem, backend):
        ctx.kernel = kernel_for(problem, backend)
        scores, winners = ctx.kernel.forward(problem, True)
        ctx.save_for_backward(queries, documents, winners)
        ctx.problem = bare(problem)
        return scores

    @staticmethod
    def backward(ctx, gradient):
        queries, documents, winners = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            found = _Gradients.apply(gradient, queries, documents, winners, ctx.problem, ctx.kernel, *wanted)
        else:
            problem = Problem(queries, documents, *ctx.problem[2:])
            found = ctx.kernel.backward(problem, winners, gradient, *wanted)
        return *found, None, None


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, queries, documents, winners, problem, kernel, for_queries, for_documents):
        ctx.save_for_backward(gradient, queries, documents, winners)
        ctx.problem, ctx.kernel = problem, kernel
        problem = problem._replace(queries=queries, documents=documents)
        return kernel.backward(problem, winners, gradient, for_queries, for_documents)

    @staticmethod
    def backward(ctx, along_queries, along_documents):
        gradient, queries, documents, winners = ctx.saved_tensors
        zero_q, zero_d = along_queries is None, along_documents is None
        along_queries = torch.zeros_like(queries) if zero_q else along_queries
        along_documents = torch.zeros_like(documents) if zero_d else along_documents
        needs = ctx.needs_input_grad
        to_gradient = to_queries = to_documents = None
        if needs[0]:
            one = selected(ctx.problem._replace(queries=along_queries, documents=documents), winners)
            two = selected(ctx.problem._replace(queries=queries, documents=along_documents), winners)
            to_gradient = (one + two).to(gradient.dtype)
        if needs[1] or needs[2]:
            to_queries, to_documents = _Gradients.apply(
                gradient, along_queries, along_documents, winners, ctx.problem, ctx.kernel, needs[1], needs[2]
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
        ctx.kernel = kernel_for(problem, backend)
        ctx.save_for_backward(queries, documents, winners)
        ctx.problem = bare(problem)
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        queries, documents, winners = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        return *_Gradients.apply(gradient, queries, documents, winners, ctx.problem, ctx.kernel, *wanted), *[None] * 4
