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
from .jax_costs import as_jax, visible
from .jax_metrics import kernel_form
from .pacing import most_stages
from .values import judge

MASS_TOLERANCE = {"float64": 1e-5, "float32": 1e-4}
NORMS, GRADIENTS = ("l1", "l2"), ("unrolled", "envelope", "implicit")
ACCELERATIONS = ("auto", "overrelaxation", "annealing", None)


class Problem(NamedTuple):
    """A batch of B problems, flat: x (B or 1, n, d) and y, or x a matrix (B or 1, n, m) and y None; a (B, n), b (B, m),
    ε (B,), all but the cost in the dtype of the potentials.

    ``offsets`` are terms of the cost that depend on its row (B, n) and on its column (B, m) alone; kernels do not see
    them, and the potentials inside are those of the cost without them. ``reach`` (B, 2) holds ρ of rows and of columns,
    infinite where a marginal is binding; None where all are.
    """

    x: jax.Array
    y: jax.Array | None
    a: jax.Array
    b: jax.Array
    epsilon: jax.Array
    metric: str
    offsets: tuple[jax.Array, jax.Array] | None = None
    reach: jax.Array | None = None

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
    relaxes: bool  # updates are over-relaxed
    gradient: str
    residual: float  # of the linear system of the implicit gradient; 0 for the default
    stages: int  # of annealing, at most

    @property
    def looks(self) -> int:
        """How often the error may be looked at."""
        return self.slot(self.max_iterations) + 1

    def slot(self, iteration: Any) -> Any:
        """The place in the history of a look after this iteration."""
        return -((1 - iteration) // self.check_every)


def make_problem(cost: Any, a: Any, b: Any, epsilon: Any, reach: Any = None) -> tuple[Problem, tuple[int, ...]]:
    """Check a transport problem and flatten its batch; return the batch's shape too."""
    n, m = cost.shape[-2:]
    if n == 0 or m == 0:
        raise ValueError(f"cost has shape {cost.shape}; accepted are at least one row and one column")
    a_, b_ = weights(a, "a", n, cost), weights(b, "b", m, cost)
    epsilon_, reach_ = regularisation(epsilon, a_.dtype), reaches(reach, a_.dtype)
    shapes = {"a": a_.shape[:-1], "b": b_.shape[:-1], "epsilon": epsilon_.shape}
    shapes |= {} if reach_ is None else {"reach": reach_.shape[:-1]}
    batch = cost.batch
    for name, shape in shapes.items():
        batch = broadcast_batch(batch, shape, "cost", name)
    form = kernel_form(cost)
    x, y = (None if part is None else flat_cost(part, batch) for part in form[:2])
    vectors = flat(a_, batch, 1), flat(b_, batch, 1), flat(epsilon_, batch, 0)
    offsets = None
    if form.offsets is not None:
        alpha, beta = (flat(part.astype(a_.dtype), batch, 1) for part in form.offsets)
        offsets = alpha, beta
    problem = Problem(x, y, *vectors, form.metric, offsets, None if reach_ is None else flat(reach_, batch, 1))
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


def reaches(given: Any, dtype: Any) -> jax.Array | None:
    """The reach of rows and columns, (..., 2); None where both are infinite numbers."""
    sides = given if isinstance(given, tuple | list) else (given, given)
    if len(sides) != 2:
        raise ValueError(f"reach has {len(sides)} entries; accepted is one for both sides, or a pair (rows, columns)")
    rho = [_as_number(side) for side in sides]
    if all(isinstance(side, float) and side == math.inf for side in rho):
        return None
    arrays = [jnp.asarray(side, dtype) if isinstance(side, float) else as_jax(side, "reach") for side in rho]
    broadcast_batch(arrays[0].shape, arrays[1].shape, "reach's rows", "reach's columns")
    stacked = jnp.stack(jnp.broadcast_arrays(*arrays), -1)
    return jax.lax.stop_gradient(stacked.astype(dtype))


def _as_number(given: Any) -> Any:
    """One side's reach as a number, or the array that it is."""
    if given is None:
        return math.inf
    if isinstance(given, bool | str):
        raise TypeError(f"reach is {given!r}; accepted are positive numbers, arrays of one for each problem, and None")
    if not isinstance(given, numbers.Real):
        return given
    if not float(given) > 0:
        raise ValueError(f"reach is {given}; accepted are positive numbers, infinity or None for a binding marginal")
    return float(given)


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
    """The row potentials to start from, (B, n), without the cost's terms of one side."""
    alpha = jnp.zeros_like(problem.a) if problem.offsets is None else problem.offsets[0]
    if init is None:
        return -alpha
    f = checked_start(init, problem.a.shape[1], problem.b.shape[1])
    return flat_argument(f.astype(problem.a.dtype), batch, 1, "init's f") - alpha


def checked_start(init: Any, n: int, m: int) -> jax.Array:
    """The f of a pair (f, g), (..., n)."""
    if not isinstance(init, tuple | list) or len(init) != 2:
        raise TypeError(f"init is a {type(init).__name__}; accepted is a pair (f, g) of potentials")
    for name, given, count in (("f", init[0], n), ("g", init[1], m)):
        if given is None and name == "g":
            continue
        shape = as_jax(given, f"init's {name}").shape
        if shape[-1:] != (count,):
            raise ValueError(f"init's {name} has shape {shape}; accepted is (..., {count})")
    return jnp.asarray(init[0])


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
    choices = {"norm": (norm, NORMS), "acceleration": (acceleration, ACCELERATIONS),
               "precision": (precision, ("high", "fast", None)), "gradient": (gradient, GRADIENTS)}  # fmt: skip
    for name, (value, accepted) in choices.items():
        if value not in accepted:
            raise ValueError(f"{name} is {value!r}; accepted for JAX arrays is one of {accepted}")
    stops = float(tolerance) > 0
    relaxes = acceleration in ("overrelaxation", "annealing") or (acceleration == "auto" and stops)
    stages = most_stages(int(max_iterations)) if acceleration == "annealing" else 0
    return Control(int(max_iterations), int(check_every), norm, stops, relaxes, gradient, float(given or 0), stages)


# ---------------------------------------------------------------------------------------------------------- values


def check_values(problem: Problem) -> None:
    """Look at the numbers where they are known: one pass over the data."""
    parts = (*problem[:5], problem.reach)
    if not all(map(visible, parts)) or math.prod(problem.shape) == 0:
        return
    found = jax.device_get(_measure(*parts))
    for name, value in found.items():
        judge(name, float(value), MASS_TOLERANCE[str(problem.a.dtype)])


@jax.jit
def _measure(x: Any, y: Any, a: Any, b: Any, epsilon: Any, reach: Any) -> dict[str, jax.Array]:
    masses = a.sum(-1), b.sum(-1)
    found = {"M": x.min()} if y is None else {"x": _soundness(x), "y": _soundness(y)}
    found |= {
        "epsilon": jnp.where(epsilon < jnp.inf, epsilon, jnp.nan).min(),
        "a": a.min(), "mass of a": masses[0].min(), "b": b.min(), "mass of b": masses[1].min(),
    }  # fmt: skip
    difference = abs(masses[1] / masses[0] - 1)
    if reach is not None:  # a side that may miss its marginal makes up for different masses
        difference = jnp.where((reach == jnp.inf).all(-1), difference, 0)
        found["reach"] = jnp.where(reach > 0, reach, jnp.nan).min()
    return found | {"mass": difference.max()}


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
    request = Request("jax", _platform(x), kind, str(x.dtype), problem.metric, problem.shape, width)
    return select("sinkhorn", request, backend)


def _platform(array: Any) -> str:
    """Where the call will run, as the registry names it; inside jit the default device is all there is to know."""
    if isinstance(array, jax.core.Tracer):
        chosen = jax.config.jax_default_device
        platform = jax.default_backend() if chosen is None else getattr(chosen, "platform", str(chosen))
    else:
        platform = next(iter(array.devices())).platform
    return {"gpu": "cuda"}.get(platform, platform)
