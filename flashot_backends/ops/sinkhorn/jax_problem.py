"""From arguments to a checked problem of JAX arrays with one flat batch axis. No torch here.

Shapes and dtypes are checked everywhere; values where they are known, so not inside ``jit``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .costs import broadcast_batch
from .jax_costs import as_jax
from .values import judge

MASS_TOLERANCE = {"float64": 1e-5, "float32": 1e-4}
NORMS, GRADIENTS = ("l1", "l2"), ("unrolled", "envelope", "implicit")


class Problem(NamedTuple):
    """A batch of B problems, flat: x (B or 1, n, d) and y, or x a matrix (B or 1, n, m) and y None; a (B, n), b (B, m),
    ε (B,), all but the cost in the dtype of the potentials."""

    x: jax.Array
    y: jax.Array | None
    a: jax.Array
    b: jax.Array
    epsilon: jax.Array

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, n, m)."""
        return (*self.a.shape, self.b.shape[1])


class Control(NamedTuple):
    """What is known before the loop is compiled."""

    max_iterations: int
    check_every: int
    norm: str
    stops: bool  # the tolerance is not 0
    gradient: str
    residual: float  # of the linear system of the implicit gradient; 0 for the default


def make_problem(cost: Any, a: Any, b: Any, epsilon: Any) -> tuple[Problem, tuple[int, ...]]:
    """Check a transport problem and flatten its batch; return the batch's shape too."""
    n, m = cost.shape[-2:]
    if n == 0 or m == 0:
        raise ValueError(f"cost has shape {cost.shape}; accepted are at least one row and one column")
    a_, b_ = weights(a, "a", n, cost), weights(b, "b", m, cost)
    epsilon_ = regularisation(epsilon, a_.dtype)
    batch = cost.batch
    for name, shape in (("a", a_.shape[:-1]), ("b", b_.shape[:-1]), ("epsilon", epsilon_.shape)):
        batch = broadcast_batch(batch, shape, "cost", name)
    parts = [flat_cost(part, batch) for part in cost.tensors]
    problem = Problem(
        parts[0], parts[1] if len(parts) > 1 else None, flat(a_, batch, 1), flat(b_, batch, 1), flat(epsilon_, batch, 0)
    )
    check_values(problem)
    return problem, batch


def weights(given: Any, name: str, count: int, cost: Any) -> jax.Array:
    """Weights (..., count) in the dtype of the potentials, uniform where none were given."""
    like = cost.tensors[0].dtype
    dtype = jnp.promote_types(like, jnp.float32)
    if given is None:
        return jnp.full((count,), 1 / count, dtype)
    array = as_jax(given, name)
    if array.ndim == 0 or array.shape[-1] != count:
        raise ValueError(f"{name} has shape {array.shape}; accepted is (..., {count}) for a cost {cost.shape}")
    if array.dtype not in (like, dtype):
        raise TypeError(f"{name} has dtype {array.dtype} and the cost {like}; accepted is {dtype}")
    return array.astype(dtype)


def regularisation(given: Any, dtype: Any) -> jax.Array:
    """ε as an array."""
    if isinstance(given, bool | str) or given is None:
        raise TypeError(f"epsilon is {given!r}; accepted is a positive number, or an array of one for each problem")
    if isinstance(given, numbers.Real) and not 0 < float(given) < math.inf:
        raise ValueError(f"epsilon is {given}; accepted is a positive finite number")
    return jnp.asarray(given if isinstance(given, numbers.Real) else as_jax(given, "epsilon"), dtype)


def flat(array: jax.Array, batch: tuple[int, ...], tail: int) -> jax.Array:
    """Expand to (*batch, …) and merge the batch axes, in front of ``tail`` axes."""
    shape = array.shape[array.ndim - tail :]
    return jnp.broadcast_to(array, batch + shape).reshape(math.prod(batch), *shape)


def flat_cost(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """The same, but a cost that every problem shares stays one."""
    if math.prod(array.shape[:-2]) == 1:
        return array.reshape(1, *array.shape[-2:])
    return flat(array, batch, 2)


def flat_argument(array: jax.Array, batch: tuple[int, ...], tail: int, name: str) -> jax.Array:
    """Broadcast an argument to the problem's batch, which it must not enlarge."""
    given = array.shape[: array.ndim - tail]
    if broadcast_batch(batch, given, "cost", name) != batch:
        raise ValueError(f"the leading axes of {name} are {given}; accepted are those of the problem, {batch}")
    return flat(array, batch, tail)


def starting_point(problem: Problem, batch: tuple[int, ...], init: Any) -> jax.Array:
    """The row potentials to start from, (B, n)."""
    if init is None:
        return jnp.zeros_like(problem.a)
    if not isinstance(init, tuple | list) or len(init) != 2:
        raise TypeError(f"init is a {type(init).__name__}; accepted is a pair (f, g) of potentials")
    for name, given, weight in (("f", init[0], problem.a), ("g", init[1], problem.b)):
        if given is None and name == "g":
            continue
        shape = as_jax(given, f"init's {name}").shape
        if shape[-1:] != weight.shape[-1:]:
            raise ValueError(f"init's {name} has shape {shape}; accepted is (..., {weight.shape[-1]})")
    return flat_argument(jnp.asarray(init[0], problem.a.dtype), batch, 1, "init's f")


def checked_control(
    max_iterations: Any, tolerance: Any, check_every: Any, norm: Any, acceleration: Any, precision: Any, gradient: Any,
    gradient_tolerance: Any,
) -> Control:
    """Refuse what makes no sense, naming the argument."""
    for name, value in (("max_iterations", max_iterations), ("check_every", check_every)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
            raise ValueError(f"{name} is {value!r}; accepted is a whole number from 1")
    if not isinstance(tolerance, numbers.Real) or not 0 <= float(tolerance) < math.inf:
        raise ValueError(f"tolerance is {tolerance!r}; accepted is a finite number from 0")
    given: Any = gradient_tolerance
    if given is not None and (not isinstance(given, numbers.Real) or not 0 < float(given) < 1):
        raise ValueError(f"gradient_tolerance is {given!r}; accepted is a number between 0 and 1")
    choices = {"norm": (norm, NORMS), "acceleration": (acceleration, ("auto", None)),
               "precision": (precision, ("high", "fast", None)), "gradient": (gradient, GRADIENTS)}  # fmt: skip
    for name, (value, accepted) in choices.items():
        if value not in accepted:
            raise ValueError(f"{name} is {value!r}; accepted for JAX arrays is one of {accepted}")
    return Control(int(max_iterations), int(check_every), norm, float(tolerance) > 0, gradient, float(given or 0))


# ---------------------------------------------------------------------------------------------------------- values


def check_values(problem: Problem) -> None:
    """Look at the numbers where they are known: one pass over the data."""
    if any(isinstance(part, jax.core.Tracer) for part in problem) or math.prod(problem.shape) == 0:
        return
    found = jax.device_get(_measure(*problem))
    for name, value in found.items():
        judge(name, float(value), MASS_TOLERANCE[str(problem.a.dtype)])


@jax.jit
def _measure(x: Any, y: Any, a: Any, b: Any, epsilon: Any) -> dict[str, jax.Array]:
    masses = a.sum(-1), b.sum(-1)
    points = {"M": x.min()} if y is None else {"x": _soundness(x), "y": _soundness(y)}
    return points | {
        "epsilon": jnp.where(epsilon < jnp.inf, epsilon, jnp.nan).min(),
        "a": a.min(), "mass of a": masses[0].min(), "b": b.min(), "mass of b": masses[1].min(),
        "mass": abs(masses[1] / masses[0] - 1).max(),
    }  # fmt: skip


def _soundness(points: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(points).all(), 0.0, jnp.nan)


# --------------------------------------------------------------------------------------------------------- kernels


class Request(NamedTuple):
    """What a kernel is asked to serve."""

    array: str
    device: str
    kind: str  # "points" or "matrix"
    dtype: str
    metric: str
    shape: tuple[int, int, int]
    width: int  # coordinates of a point


def choose(problem: Problem, backend: str | Sequence[str] | None) -> Any:
    """The kernel that serves; decided before anything is compiled."""
    from ...dispatch import select

    x, points = problem.x, problem.y is not None
    kind, width = ("points", x.shape[-1]) if points else ("matrix", 0)
    request = Request("jax", _platform(x), kind, str(x.dtype), "sqeuclidean", problem.shape, width)
    return select("sinkhorn", request, backend)


def _platform(array: Any) -> str:
    """Where the call will run, as the registry names it; inside jit the default device is all there is to know."""
    if isinstance(array, jax.core.Tracer):
        chosen = jax.config.jax_default_device
        platform = jax.default_backend() if chosen is None else getattr(chosen, "platform", str(chosen))
    else:
        platform = next(iter(array.devices())).platform
    return {"gpu": "cuda"}.get(platform, platform)
