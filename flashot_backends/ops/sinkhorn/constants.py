"""Numbers on a device, made once: a small solve on a card takes less time than filling a few tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .streamed import plain


def constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor () that nobody writes to, the same one for every call where a device may keep it.

    Under a compiler, a transform or a graph that is captured, a new one: those keep what they see.
    """
    if device.type != "cuda" or not plain(()) or torch.cuda.is_current_stream_capturing():
        return torch.full((), number, dtype=dtype, device=device)
    return kept(number, dtype, device)


@functools.lru_cache(maxsize=64)
def kept(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same where it is known that nothing looks on."""
    # From the host, which waits until it is there: any stream may read it then.
    return torch.tensor(number, dtype=dtype, device=device)
