"""One differentiable operation in three dresses, and what every such operation needs to say of its gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..forward_mode import has_tangents, refuse, refuse_tangents

_here = threading.local()  # ``many``: many gradients are taken in one backward pass, of tensors that hide their axis


def plain(tensors: Sequence[Any]) -> bool:
    """Whether real tensors are computed on right now: no compiler, tracer, mode, transform or tangent looks on."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or getattr(_here, "many", False):
        return False
    if has_tangents(tensors):
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors if isinstance(tensor, Tensor))


def transformed() -> bool:
    """Whether ``torch.func`` (grad, vmap) looks on, and no compiler."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


class StreamedOp:
    """One differentiable operation in three dresses.

    On plain tensors it is an ``autograd.Function``, which costs microseconds and imports nothing. Under
    ``torch.compile`` and other tracers it is the custom op ``flashot::sinkhorn_<name>``; ``torch.func``, which does not
    differentiate custom ops by itself, sees that op in an ``autograd.Function`` again.
    """

    def __init__(self, compute: Callable[..., Any]):
        name = compute.__name__
        self.compute = compute
        self.custom = torch.library.custom_op(f"flashot::sinkhorn_{name}", mutates_args=())(compute)
        self.function: Any = type(name, (torch.autograd.Function,), {})
        general = {"forward": staticmethod(self.custom), "generate_vmap_rule": True, "jvp": staticmethod(refuse)}
        self.general: Any = type(name, (torch.autograd.Function,), general)
        self.differentiable = False
        self.__name__, self.__doc__ = name, compute.__doc__

    def __call__(self, *args: Any) -> Any:
        """Compute, in the dress that fits."""
        if self.bare(args):
            return self.compute(*args)
        if not plain(args):
            refuse_tangents(args)
            return self.general.apply(*args) if transformed() and self.differentiable else self.custom(*args)
        return self.function.apply(*args)

    @staticmethod
    def bare(args: Sequence[Any]) -> bool:
        """Whether nothing is to be recorded, by autograd or anybody else."""
        if torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in args):
            return False
        return plain(args)

    def fake(self, shapes: Callable[..., Any]) -> None:
        """Say what shapes come out."""
        self.custom.register_fake(shapes)

    def batched(self) -> None:
        """Say that every tensor leads with the axis of problems: ``vmap`` then makes that axis longer."""
        self.custom.register_vmap(self._fold)

    def _fold(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size, folded = info.batch_size, []
        for part, axis in zip(args, in_dims, strict=True):
            if isinstance(part, Tensor):
                part = part.expand(size, *part.shape) if axis is None else part.movedim(axis, 0)
                part = part.flatten(0, 1)
            folded.append(part)
        found = self.custom(*folded)
        outs = found if isinstance(found, tuple) else (found,)
        shaped = tuple(out if _nothing(out) else out.unflatten(0, (size, -1)) for out in outs)
        axes = tuple(None if _nothing(out) else 0 for out in outs)
        return (shaped, axes) if isinstance(found, tuple) else (shaped[0], axes[0])

    def derivative(self, backward: Callable[..., Any], setup: Callable[..., None] | None = None) -> None:
        """Say how gradients flow back, and what is kept for that."""
        backward, self.differentiable = _of_many(backward), True
        self.custom.register_autograd(backward, setup_context=setup)
        prepare = setup or (lambda ctx, inputs, output: None)

        def forward(ctx: Any, *args: Any) -> Any:  # with ``setup_context`` torch inspects the signature at every call
            output = self.compute(*args)
            prepare(ctx, args, output)
            return output

        self.function.forward = staticmethod(forward)
        self.general.setup_context = staticmethod(prepare)
        for function in (self.function, self.general):
            function.backward = staticmethod(backward)


def _of_many(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that also takes many gradients at once, as ``is_grads_batched`` hands them on: one by one."""

    @functools.wraps(backward)
    def of_many(ctx: Any, *grads: Any) -> Any:
        hidden = torch._C._functorch.is_legacy_batchedtensor
        if getattr(_here, "many", False) or not any(isinstance(part, Tensor) and hidden(part) for part in grads):
            return backward(ctx, *grads)
        _here.many = True
        try:
            return backward(ctx, *grads)
        finally:
            _here.many = False

    return of_many


def _nothing(tensor: Tensor) -> bool:
    """Whether a tensor stands for no result."""
    return tensor.shape == (0,)


def cost_gradients(cost: tuple[Tensor, ...] | None, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients by the cost's tensors in their dtype; a tensor without elements where there is none."""
    nothing = x.new_empty(0)
    if cost is None:
        return nothing, x.new_empty(0)
    return cost[0].to(x.dtype), cost[1].to(x.dtype) if y is not None else nothing


def fake_cost(x: Tensor, y: Tensor | None, needed: bool) -> tuple[Tensor, Tensor]:
    """The shapes of ``cost_gradients``."""
    if not needed:
        return x.new_empty(0), x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(y) if y is not None else x.new_empty(0)


def given(tensor: Tensor, like: Tensor | None) -> Tensor | None:
    """A gradient, or None where an operation returned no elements for it."""
    return tensor.reshape(like.shape) if like is not None and tensor.numel() == like.numel() else None
