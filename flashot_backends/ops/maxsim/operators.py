"""The same scores as ``torch.library`` operators: for ``torch.compile``, ``torch.export`` and ``torch.func``."""

import torch
from torch import Tensor

from flashot_backends.kernels.maxsim.layout import document_count, index_dtype, query_count, score_dtype, winners_shape

from .derivatives import kernel_for, selected
from .problem import Problem


@torch.library.custom_op("flashot_backends::maxsim", mutates_args=())
def maxsim_operator(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    queries_offsets: Tensor | None,
    documents_offsets: Tensor | None,
    owners: Tensor | None,
    floors: Tensor | None,
    longest_query: int,
    longest_document: int,
    set_size: int,
    masked: str,
    record: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Scores and winners (an empty tensor unless ``record``)."""
    problem = Problem(
        queries, documents, queries_mask, documents_mask, queries_offsets, documents_offsets, owners, floors,
        longest_query, longest_document, set_size, masked,
    )  # fmt: skip
    scores, winners = kernel_for(problem, _names(backend)).forward(problem, record)
    return scores, queries.new_empty(0, dtype=index_dtype(longest_document)) if winners is None else winners


@maxsim_operator.register_fake
def _(*arguments):
    problem, record = Problem(*arguments[:12]), arguments[12]
    shape = (document_count(problem),) if problem.set_size else (query_count(problem), document_count(problem))
    scores = problem.queries.new_empty(shape, dtype=score_dtype(problem))
    kind = index_dtype(problem.longest_document)
    return scores, problem.queries.new_empty(winners_shape(problem) if record else (0,), dtype=kind)


@torch.library.custom_op("flashot_backends::maxsim_gradients", mutates_args=())
def gradients_operator(
    gradient: Tensor,
    winners: Tensor,
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    queries_offsets: Tensor | None,
    documents_offsets: Tensor | None,
    owners: Tensor | None,
    floors: Tensor | None,
    longest_query: int,
    longest_document: int,
    set_size: int,
    masked: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Gradients for queries and documents with the winners held fixed."""
    problem = Problem(
        queries, documents, queries_mask, documents_mask, queries_offsets, documents_offsets, owners, floors,
        longest_query, longest_document, set_size, masked,
    )  # fmt: skip
    return kernel_for(problem, _names(backend)).backward(problem, winners, gradient, True, True)


@gradients_operator.register_fake
def _(gradient, winners, queries, documents, *rest):
    return queries.new_empty(queries.shape), documents.new_empty(documents.shape)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], output[1])
    ctx.rest, ctx.backend = inputs[8:12], inputs[13]
    ctx.recorded = inputs[12]
    ctx.mark_non_differentiable(output[1])


def _derive(ctx, gradient, _):
    *tensors, winners = ctx.saved_tensors
    if not ctx.recorded:
        raise RuntimeError("this MaxSim operator was called without record=True; its gradient was not prepared")
    found = gradients_operator(gradient, winners, *tensors, *ctx.rest, ctx.backend)
    return *found, *[None] * 12


def _keep_gradients(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:10])
    ctx.rest, ctx.backend = inputs[10:14], inputs[14]


def _derive_gradients(ctx, along_queries, along_documents):
    return _second(ctx, along_queries, along_documents, gradients_operator)


def _second(ctx, along_queries, along_documents, gradients):
    gradient, winners, queries, documents, *others = ctx.saved_tensors
    one = selected(Problem(along_queries, documents, *others, *ctx.rest), winners)
    two = selected(Problem(queries, along_documents, *others, *ctx.rest), winners)
    found = gradients(gradient, winners, along_queries, along_documents, *others, *ctx.rest, ctx.backend)
    return (one + two).to(gradient.dtype), None, *found, *[None] * 11


maxsim_operator.register_autograd(_derive, setup_context=_keep)
gradients_operator.register_autograd(_derive_gradients, setup_context=_keep_gradients)


def _one_by_one(operator):
    """Batching rule: solve the elements one after the other."""

    def rule(info, dims, *arguments):
        def element(b):
            return [
                x.select(dim, b) if isinstance(x, Tensor) and dim is not None else x
                for x, dim in zip(arguments, dims, strict=True)
            ]

        results = [operator(*element(b)) for b in range(info.batch_size)]
        return tuple(torch.stack(part) for part in zip(*results, strict=True)), (0, 0)

    return rule


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    for _operator in (maxsim_operator, gradients_operator):
        torch.library.register_vmap(_operator, _one_by_one(_operator))


class _Score(torch.autograd.Function):
    """The operator for ``torch.func``, which does not differentiate operators by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return maxsim_operator(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx, gradient, _):
        *tensors, winners = ctx.saved_tensors
        return *_Gradients.apply(gradient, winners, *tensors, *ctx.rest, ctx.backend), *[None] * 12


class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return gradients_operator(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep_gradients(ctx, inputs, output)

    @staticmethod
    def backward(ctx, along_queries, along_documents):
        return _second(ctx, along_queries, along_documents, _Gradients.apply)


def score(problem, backend):
    """Scores through the operator."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return _Score.apply(*problem, torch.is_grad_enabled(), _text(backend))[0]
    needs = problem.queries.requires_grad or problem.documents.requires_grad
    return maxsim_operator(*problem, torch.is_grad_enabled() and needs, _text(backend))[0]


def _text(backend):
    """An operator's argument for a name, or for several: these end in a comma."""
    return backend if backend is None or isinstance(backend, str) else "".join(name + "," for name in backend)


def _names(text):
    return tuple(text.split(",")[:-1]) if text is not None and "," in text else text
