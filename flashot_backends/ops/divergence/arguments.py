"""From arguments to checked tensors with one flat batch axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import restorer, to_torch
from ..sinkhorn.control import backend_names
from ..sinkhorn.costs import PointCloud, broadcast_batch
from ..sinkhorn.problem import flatten, weights
from . import KERNELS
from .schedule import Settings

DEFAULTS: dict[str, Any] = {
    "p": 2, "blur": 0.05, "reach": None, "diameter": None, "scaling": 0.5, "debias": True, "verbose": False,
}  # fmt: skip


class Clouds(NamedTuple):
    """Two clouds, flat: x (B, n, d), a (B, n), y (B, m, d), b (B, m)."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    batch: tuple[int, ...]
    restore: Callable[[Any], Any]

    def restored(self, flat: Tensor) -> Any:
        """Give a result its batch axes back, as the kind of array that came in."""
        return self.restore(flat.reshape(self.batch + tuple(flat.shape[1:])))


def clouds(x: Any, y: Any, a: Any, b: Any) -> Clouds:
    """Check points and weights (not the values, which cost a pass over the data) and flatten their batch."""
    cost = PointCloud(to_torch(x, "x"), to_torch(y, "y"))
    n, m = cost.shape[-2:]
    if n == 0 or m == 0:
        raise ValueError(f"x has {n} points and y {m}; accepted is at least one each")
    a_, b_ = weights(a, "a", n, cost), weights(b, "b", m, cost)
    batch = broadcast_batch(broadcast_batch(cost.batch, a_.shape[:-1], "x and y", "a"), b_.shape[:-1], "x and y", "b")
    parts = cost.x, a_, cost.y, b_
    tails = (n, cost.x.shape[-1]), (n,), (m, cost.x.shape[-1]), (m,)
    flat = tuple(flatten(part, batch, tail) for part, tail in zip(parts, tails, strict=True))
    return Clouds(flat, batch, restorer(x))  # type: ignore[arg-type]


def settings(
    found: Clouds, p: Any, blur: Any, reach: Any, diameter: Any, scaling: Any, debias: Any, verbose: Any
) -> Settings:
    """Check what steers the loop."""
    if p not in (1, 2):
        raise ValueError(f"p is {p!r}; accepted are 1 and 2")
    if not (isinstance(scaling, int | float) and 0 < scaling < 1):
        raise ValueError(f"scaling is {scaling!r}; accepted is a number between 0 and 1")
    reach = math.inf if reach is None else length("reach", reach)
    starts, each = _diameters(diameter, found.tensors[0].shape[0])
    return Settings(int(p), length("blur", blur), reach, float(scaling), starts, each, bool(debias), bool(verbose))


def length(name: str, given: Any) -> float:
    """A positive finite number."""
    if isinstance(given, str) or not 0 < (value := float(given)) < math.inf:
        raise ValueError(f"{name} is {given!r}; accepted is a positive finite number")
    return value


def _diameters(given: Any, batch: int) -> tuple[list[float], bool]:
    if given is None or (isinstance(given, str) and given == "each"):
        return [], given is not None
    if isinstance(given, int | float):
        return [length("diameter", given)], False
    if isinstance(given, str):
        raise ValueError(f"diameter is {given!r}; accepted are positive numbers, 'each' and None")
    values = [length("diameter", value) for value in (given.reshape(-1) if hasattr(given, "reshape") else given)]
    if len(values) not in (1, batch):
        raise ValueError(f"diameter holds {len(values)} numbers; accepted are one, or one for each of {batch} elements")
    return values, False


def kernel(name: Any) -> str:
    """One of the kernels' names."""
    if name not in KERNELS:
        raise ValueError(f"kernel is {name!r}; accepted is one of {KERNELS}")
    return str(name)


def how(found: Clouds, precision: str | None, backend: Any) -> tuple[bool, bool, str, str]:
    """Whose derivatives will be wanted, and on which kernels."""
    if precision not in ("high", "fast", None):
        raise ValueError(f"precision is {precision!r}; accepted are 'high' and 'fast'")
    wanted = [part.requires_grad and torch.is_grad_enabled() for part in found.tensors[::2]]
    return wanted[0], wanted[1], precision or "", backend_names(backend)
