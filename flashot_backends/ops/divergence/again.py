"""A divergence of small clouds, laid out like one before: what was looked at then is not looked at again.

Such a call takes a card a tenth of a millisecond, and checks, allocations and launches one by one would take the host
ten times that. Kernels that can repeat their launches do so with other tensors in the same places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import dispatch
from ...config import settings as session
from ..sinkhorn.streamed import plain
from .arguments import Clouds
from .loop import in_one_go, task
from .schedule import Settings

MOST = 8  # layouts of which something is kept
ELSEWHERE = ("cpu",)  # where nothing is launched
NUMBERS = (float, int, type(None), bool, np.float64)
_kept: dict[Any, Work] = {}  # who uses one takes it out

Needed = tuple[bool, bool, bool, bool]  # gradients by x, a, y and b


class Work(NamedTuple):
    """What a call comes down to."""

    start: Callable[[dict[str, Tensor]], None]
    need: Needed
    batch: tuple[int, ...]

    def outputs(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Tensor | None]]:
        """Values and gradients, to be filled."""
        x = inputs[0]
        assert x is not None
        value = torch.empty(self.batch, dtype=torch.float32, device=x.device)
        wanted = zip(inputs, self.need, strict=True)
        return value, [_like(part) if need and part is not None else None for part, need in wanted]


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


NAMES = ("x", "a", "y", "b", "value", "by_x", "by_a", "by_y", "by_b")


def _named(inputs: tuple[Tensor | None, ...], value: Tensor, gradients: list[Tensor | None]) -> dict[str, Tensor]:
    parts = zip(NAMES, (*inputs, value, *gradients), strict=True)
    return {name: part for name, part in parts if part is not None}


def key_of(x: Any, y: Any, a: Any, b: Any, options: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
    """All that a call depends on but addresses and values; None where calls are not repeated.

    ``options`` are p, blur, reach, diameter, scaling and debias, ``how`` the arguments precision and backend.
    """
    parts = x, a, y, b
    if not plain(parts) or not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.device.type in ELSEWHERE:
        return None
    device, grad = x.device, torch.is_grad_enabled()
    stream = _stream(device)
    if stream is None or any(type(option) not in NUMBERS for option in options):
        return None
    layout: list[Any] = []
    for part in parts:
        if part is None:
            layout.append(None)
        elif not isinstance(part, Tensor) or part.device != device:
            return None
        else:
            wanted = grad and part.requires_grad
            layout.append((part.shape, part.stride(), part.dtype, part.data_ptr() % 16, wanted))
    precision, backend = how[0], tuple(how[1]) if isinstance(how[1], list) else how[1]
    same = x is y, a is b
    return (*layout, same, device, stream, options, precision, backend, session(), dispatch.version())


def _stream(device: torch.device) -> Any:
    """Where launches go; None where they are not repeated: on a device that is not the current one, into a graph."""
    if device.type != "cuda":
        return 0
    if torch._C._cuda_getDevice() != device.index or torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


def divergence(key: Any, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The values, if something was kept of a call like this one."""
    work = _kept.pop(key, None)
    if work is None:
        return None
    found = _done(work, x, a, y, b)
    _keep(key, work)
    return found


def first(
    key: Any, clouds: Clouds, settings: Settings, how: tuple[bool, bool, str, str], given: tuple[Tensor | None, ...]
) -> Tensor | None:
    """The values from the first call of its kind, of which something is kept; None where nothing can be.

    ``given`` are x, a, y and b as they came, None for uniform weights.
    """
    need_x, need_y, precision, backend = how
    x, _, y, _ = clouds.tensors
    kernel = in_one_go(x, y, settings.metric, backend)
    if not hasattr(kernel, "divergence_into") or settings.verbose or not _as_they_came(clouds, given):
        return None
    steps = settings.p, settings.blur, settings.scaling, settings.debias
    if settings.each or not (settings.diameters or kernel.measures(x, y, *steps)):
        return None  # the steps depend on values
    flat, todo = task(kernel, clouds.tensors, settings, need_x, need_y, precision)
    if not kernel.repeats(flat, todo):
        return None
    repeat: list[Any] = [None]

    def start(named: dict[str, Tensor]) -> None:
        outputs = kernel.Outputs(*(named.get(name) for name in NAMES[4:]))
        inputs = {name: part for name, part in zip(NAMES, flat, strict=False) if name in named}
        rest = {name: part for name, part in named.items() if name not in NAMES[:4]}
        repeat[0] = kernel.divergence_into(flat, todo, outputs, inputs | rest)

    grad = torch.is_grad_enabled()
    need = tuple(part is not None and grad and part.requires_grad for part in given)
    work = Work(start, need, clouds.batch)  # type: ignore[arg-type]
    found = _done(work, *given)
    if repeat[0] is not None:
        _keep(key, work._replace(start=repeat[0]))
    return found


def _as_they_came(clouds: Clouds, given: tuple[Tensor | None, ...]) -> bool:
    """Whether the flat tensors are those given, without a copy, a conversion or a repetition."""
    if len(clouds.batch) > 1 or 0 in clouds.tensors[0].shape:
        return False
    pairs = [(flat, part) for flat, part in zip(clouds.tensors, given, strict=True) if part is not None]
    return all(
        flat.data_ptr() == part.data_ptr() and flat.dtype == part.dtype and flat.numel() == part.numel()
        for flat, part in pairs
    )


def _keep(key: Any, work: Work) -> None:
    """Put work back for the next call of its kind; the oldest makes room."""
    _kept[key] = work
    while len(_kept) > MOST:
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread takes some out
            _kept.pop(next(iter(_kept)), None)


def _done(work: Work, *inputs: Tensor | None) -> Tensor:
    if any(work.need):
        found: Tensor = _Divergence.apply(*inputs, work)
        return found
    value, gradients = work.outputs(inputs)
    work.start(_named(inputs, value, gradients))
    return value


class _Divergence(torch.autograd.Function):
    """The values of a divergence, whose gradients come along."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor | None, y: Tensor, b: Tensor | None, work: Work) -> Tensor:
        inputs = x, a, y, b
        value, gradients = work.outputs(inputs)
        work.start(_named(inputs, value, gradients))
        wanted = (part if need else None for part, need in zip(inputs, work.need, strict=True))
        ctx.save_for_backward(*gradients, *wanted)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *(None if by is None else _Scaled.apply(by, grad, *saved[4:]) for by in saved[:4]), None
        return *(None if by is None else scaled(by, grad) for by in saved[:4]), None


def scaled(by: Tensor, grad: Tensor) -> Tensor:
    """A gradient (..., ·) times that by the values (...)."""
    grad = grad.to(by.dtype)
    return by * (grad.reshape(-1, *[1] * (by.dim() - 1)) if grad.dim() else grad)


class _Scaled(torch.autograd.Function):
    """The gradient by an input, which depends on all inputs and can not be differentiated."""

    @staticmethod
    def forward(ctx: Any, by: Tensor, grad: Tensor, *inputs: Tensor | None) -> Tensor:
        return scaled(by, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from .torch_ops import refuse_second

        return refuse_second(ctx, *grads)
