"""Forward-mode derivatives: operations that have none say so, rather than answer as if nothing was to be carried on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

REFUSAL = (
    "flashot_backends: forward-mode derivatives (torch.func.jvp, jacfwd, hessian and linearize, "
    "torch.autograd.forward_ad) are not available; reverse-mode ones are: torch.func.vjp, grad and jacrev, "
    "torch.autograd.functional.jvp and hvp, and jacrev of jacrev for a Hessian"
)


def has_tangents(tensors: Iterable[Any]) -> bool:
    """Whether one of these carries a tangent."""
    if forward_ad._current_level < 0:
        return False
    tensors = (part for part in tensors if isinstance(part, torch.Tensor))
    return any(forward_ad.unpack_dual(part).tangent is not None for part in tensors)


def refuse(*_: Any) -> Any:
    """Stand where a forward-mode derivative would."""
    raise NotImplementedError(REFUSAL)


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Raise where one of these carries a tangent."""
    if has_tangents(tensors):
        refuse()
