"""From arguments to a checked problem with one flat batch axis."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import to_torch
from .constants import constant
from .costs import DenseCost, PointCloud, broadcast_batch, floating
from .metrics import kernel_form
from .values import judge

# Relative difference of two masses that rounding can explain.
MASS_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}


class Problem(NamedTuple):
    """A batch of problems. Tensors are flat: (B, n, d), (B, m, d) or (B, n, m); weights (B, n) and (B, m); ε (B,).

    ``offsets`` are terms of the cost that depend on its row (B, n) and on its column (B, m) alone; kernels do not see
    them, and the potentials inside are those of the cost without them.
    """

    x: Tensor
    y: Tensor | None
    a: Tensor
    b: Tensor
    epsilon: Tensor
    batch: tuple[int, ...]
    metric: str
    restore: Callable[[Any], Any]
    offsets: tuple[Tensor, Tensor] | None = None
    weighted: bool = True  # weights were given, and some may be zero
    reach: Tensor | None = None  # (B, 2) float64: ρ of rows and of columns, infinite where the marginal is binding
    rho: tuple[float, float] = (math.inf, math.inf)  # the same as numbers; NaN where they came as arrays
    narrow: str = ""  # the dtype of 16 bits that the cost holds in float32 here, where gradients are added

    def shaped(self, flat: Tensor) -> Tensor:
        """Give a result its batch axes back."""
        return flat.reshape(self.batch + tuple(flat.shape[1:])) if self.batch else flat.squeeze(0)

    def flat(self, shaped: Tensor, tail: tuple[int, ...], name: str) -> Tensor:
        """Broadcast an argument (..., *tail) to the batch and flatten it to (B, *tail)."""
        given = tuple(shaped.shape[: shaped.ndim - len(tail)])
        if broadcast_batch(self.batch, given, "cost", name) != self.batch:
            raise ValueError(f"the leading axes of {name} are {given}; accepted are those of the problem, {self.batch}")
        return flatten(shaped, self.batch, tail)


def make_problem(cost: Any, a: Any, b: Any, epsilon: Any, reach: Any = None, widen: bool = True) -> Problem:
    """Check a transport problem (all but the values, which cost a pass over the data) and flatten its batch.

    Gradients by a cost of 16 bits come in parts, that may cancel; ``widen`` has them added in float32.
    """
    if not isinstance(cost, PointCloud | DenseCost):
        raise TypeError(f"cost is a {type(cost).__name__}; accepted are PointCloud and DenseCost")
    n, m = cost.shape[-2:]
    if n == 0 or m == 0:
        raise ValueError(f"cost has shape {cost.shape}; accepted are at least one row and one column")
    a_, b_ = weights(a, "a", n, cost), weights(b, "b", m, cost)
    epsilon_, (reach_, rho) = regularisation(epsilon, a_.device), reaches(reach, a_.device)
    shapes = {"a": a_.shape[:-1], "b": b_.shape[:-1], "epsilon": epsilon_.shape}
    shapes |= {} if reach_ is None else {"reach": reach_.shape[:-1]}
    batch = cost.batch
    for name, shape in shapes.items():
        batch = broadcast_batch(batch, tuple(shape), "cost", name)
    form = kernel_form(cost)
    tensors, narrow = form.tensors, ""
    if widen and form.x.dtype in (torch.float16, torch.bfloat16) and any(part.requires_grad for part in tensors):
        tensors, narrow = tuple(part.float() for part in tensors), str(form.x.dtype).removeprefix("torch.")
    x, *y = (flatten(part, batch, tuple(part.shape[-2:])) for part in tensors)
    offsets = None
    if form.alpha is not None and form.beta is not None:
        offsets = flatten(form.alpha.to(a_.dtype), batch, (n,)), flatten(form.beta.to(a_.dtype), batch, (m,))
    flat = flatten(a_, batch, (n,)), flatten(b_, batch, (m,)), flatten(epsilon_, batch, ())
    weighted, reach_ = a is not None or b is not None, reach_ if reach_ is None else flatten(reach_, batch, (2,))
    whole = Problem(x, y[0] if y else None, *flat, batch, form.metric, cost.restore, offsets, weighted, reach_, rho)
    return whole._replace(narrow=narrow)


def weights(given: Any, name: str, count: int, cost: Any) -> Tensor:
    """Weights (..., count) in the dtype of the potentials, uniform where none were given."""
    first = cost.tensors[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    if given is None:
        return torch.full((count,), 1 / count, dtype=dtype, device=first.device)
    tensor = floating(given, name)
    if tensor.ndim == 0 or tensor.shape[-1] != count:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted is (..., {count}) for a cost {cost.shape}")
    if tensor.device != first.device:
        raise ValueError(f"{name} is on {tensor.device} and the cost on {first.device}; accepted is one device for all")
    if tensor.dtype not in (first.dtype, dtype):
        raise TypeError(f"{name} has dtype {tensor.dtype} and the cost {first.dtype}; accepted is {dtype}")
    return tensor.to(dtype)


def regularisation(given: Any, device: torch.device) -> Tensor:
    """ε as float64 on the device; a tensor keeps its gradient."""
    if isinstance(given, bool | str) or given is None:
        raise TypeError(f"epsilon is {given!r}; accepted is a positive number, or an array of one for each problem")
    if isinstance(given, numbers.Real):
        number = float(given)
        if not 0 < number < math.inf:
            raise ValueError(f"epsilon is {given}; accepted is a positive finite number")
        return constant(number, torch.float64, device)
    return to_torch(given, "epsilon").to(device=device, dtype=torch.float64)


def reaches(given: Any, device: torch.device) -> tuple[Tensor | None, tuple[float, float]]:
    """The reach of rows and columns, (..., 2) float64 (None where both are infinite), and as numbers or NaN."""
    sides = given if isinstance(given, tuple | list) else (given, given)
    if len(sides) != 2:
        raise ValueError(f"reach has {len(sides)} entries; accepted is one for both sides, or a pair (rows, columns)")
    rho = tuple(_as_number(side) for side in sides)
    if rho == (math.inf, math.inf):
        return None, rho
    tensors = [_reach_of(side, number, device) for side, number in zip(sides, rho, strict=True)]
    broadcast_batch(tensors[0].shape, tensors[1].shape, "reach's rows", "reach's columns")
    return torch.stack(torch.broadcast_tensors(*tensors), -1), rho  # type: ignore[return-value]


def _as_number(given: Any) -> float:
    if given is None:
        return math.inf
    if isinstance(given, bool | str):
        raise TypeError(f"reach is {given!r}; accepted are positive numbers, arrays of one for each problem, and None")
    if not isinstance(given, numbers.Real):
        return math.nan
    if not float(given) > 0:
        raise ValueError(f"reach is {given}; accepted are positive numbers, infinity or None for a binding marginal")
    return float(given)


def _reach_of(given: Any, number: float, device: torch.device) -> Tensor:
    if math.isnan(number):
        return to_torch(given, "reach").detach().to(device=device, dtype=torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


def log_weights(given: Tensor) -> Tensor:
    """log a, −inf without mass; no gradient flows where there is no mass."""
    massive = given > 0
    return torch.where(massive, torch.where(massive, given, 1).log(), -math.inf)


def flatten(tensor: Tensor, batch: tuple[int, ...], tail: tuple[int, ...]) -> Tensor:
    """Expand to (*batch, *tail) and merge the batch axes; a view wherever one exists."""
    if tensor.shape == batch + tail and len(batch) <= 1:  # the usual cases, in one view or none
        return tensor if batch else tensor.unsqueeze(0)
    return tensor.expand(batch + tail).reshape((math.prod(batch), *tail))


def check_values(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, reach: Tensor | None = None
) -> None:
    """Look at the numbers: one pass over the data and one wait for a device. Skipped while a CUDA graph is captured."""
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    if epsilon.numel() == 0:
        return
    found = measure(x, y, a, b, epsilon, reach)
    for name, value in zip(found, torch.stack(list(found.values())).tolist(), strict=True):
        judge(name, value, MASS_TOLERANCE[a.dtype])


def inspect_values(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, reach: Tensor | None, seen: dict[str, float]
) -> None:
    """Judge what a kernel saw of the values; look at them again for the message if something is wrong."""
    try:
        for name, value in seen.items():
            judge(name, value, MASS_TOLERANCE[a.dtype])
    except ValueError:
        check_values(x, y, a, b, epsilon, reach)
        raise


def measure(
    x: Tensor, y: Tensor | None, a: Tensor, b: Tensor, epsilon: Tensor, reach: Tensor | None
) -> dict[str, Tensor]:
    """The few numbers that tell whether the values are acceptable."""
    found = {"epsilon": torch.where(epsilon < math.inf, epsilon, math.nan).min()}
    if y is None:
        found["M"] = x.amin().double()
    else:
        found["x"], found["y"] = x.sum(dtype=torch.float64), y.sum(dtype=torch.float64)
    masses = []
    for name, weight in (("a", a), ("b", b)):
        mass = weight.sum(-1, dtype=torch.float64)
        found[name], found[f"mass of {name}"] = weight.amin().double(), mass.min()
        masses.append(mass)
    difference = (masses[1] / masses[0] - 1).abs()
    if reach is not None:  # a side that may miss its marginal makes up for different masses
        difference = torch.where((reach == math.inf).all(-1), difference, 0.0)
        found["reach"] = torch.where(reach > 0, reach, math.nan).min()
    found["mass"] = difference.max()
    return found


class SoftminProblem(NamedTuple):
    """The flat arguments of a softmin, and how to shape its result."""

    x: Tensor
    y: Tensor | None
    h: Tensor
    epsilon: Tensor
    metric: str
    shaped: Callable[[Tensor], Tensor]


def make_softmin(cost: Any, h: Any, epsilon: Any, name: str = "h") -> SoftminProblem:
    """Check the arguments of ``softmin`` and flatten them."""
    problem = make_problem(cost, None, None, epsilon, widen=False)
    h_ = column_vector(cost, h, name).to(problem.a.dtype)
    n, m = cost.shape[-2:]
    batch = broadcast_batch(problem.batch, tuple(h_.shape[:-1]), "cost", name)
    parts = [problem.x] if problem.y is None else [problem.x, problem.y]
    x, *y = (flatten(problem.shaped(part), batch, tuple(part.shape[1:])) for part in parts)
    flat_h, flat_epsilon = flatten(h_, batch, (m,)), flatten(problem.shaped(problem.epsilon), batch, ())
    alpha: Any = 0.0
    if problem.offsets is not None:
        alpha, beta = (problem.shaped(part) for part in problem.offsets)
        alpha = flatten(alpha, batch, (n,))
        flat_h = flat_h - flatten(beta, batch, (m,)) / flat_epsilon.to(h_.dtype)[:, None]

    def shaped(out: Tensor) -> Tensor:
        return (out + alpha).reshape(*batch, n) if problem.offsets is not None else out.reshape(*batch, n)

    return SoftminProblem(x, y[0] if y else None, flat_h, flat_epsilon, problem.metric, shaped)


def column_vector(cost: Any, given: Any, name: str) -> Tensor:
    """A number for every column, (..., m), on the device of the cost."""
    vector, m, device = floating(given, name), cost.shape[-1], cost.tensors[0].device
    if vector.shape[-1:] != (m,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; accepted is (..., {m}) for a cost {cost.shape}")
    if vector.device != device:
        raise ValueError(f"{name} is on {vector.device} and the cost on {device}; accepted is one device for all")
    return vector
