"""Between POT's arrays and the Sinkhorn operation: arguments understood, lazy costs, and the way back."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flashot_backends.config import settings
from flashot_backends.ops.arrays import framework, require_torch, restorer, to_torch

ARRAYS = "numpy, torch, jax and cupy arrays, and lists of numbers"
LAZY_METRICS = ("sqeuclidean", "euclidean", "cityblock", "cosine")  # the host's names
NOT_CONVERGED = (
    "Sinkhorn did not converge. You might want to increase the number of iterations `numItermax` "
    "or the regularization parameter `reg`."
)  # the host's own words: people filter on them

log = logging.getLogger("flashot_backends")
asked = ContextVar("flashot_pot_asked", default=False)  # the host was told "flash" and calls its own method inside


@contextmanager
def inside() -> Iterator[None]:
    """Let what the host calls in here, by the name of a method of its own, be answered as "flash"."""
    token = asked.set(True)
    try:
        yield
    finally:
        asked.reset(token)


def is_flash(method: Any) -> bool:
    """Whether a method is ours, as the host compares names."""
    return str(method).lower() == "flash"


def by_method(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """The host's function, but ``answer(arguments, options)`` where the method is "flash"; lazy costs M ask for it."""
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if is_flash(given["method"]):
            return answer(given, given.pop("kwargs", {}))
        if is_lazy(given["M"]):
            raise ValueError(f"M is a lazy cost and method is {given['method']!r}; accepted with it is method='flash'")
        return original(*args, **kwargs)

    return routed


@functools.lru_cache(maxsize=256)
def say_once(sentence: str) -> None:
    """Tell the log, the first time."""
    log.info(sentence)


def defines(module: Any, name: str) -> bool:
    """Whether a function is defined in this module, rather than imported into it."""
    return bool(getattr(getattr(module, name, None), "__module__", None) == module.__name__)


# A problem


@dataclass(frozen=True)
class Problem:
    """A call that was understood: arrays of one kind, weights filled in, the cost as the operation takes it."""

    a: Any  # (n,)
    b: Any  # (m,), or (m, k) for k histograms
    shape: tuple[int, int]
    reg: Any  # a float, a torch scalar that requires a gradient, or a jax scalar
    cost: Any
    dtype: Any  # of the cost, and of the results
    nx: Any  # the host's functions for this kind of array
    enter: Callable[[Any], Any]  # to where it is computed
    leave: Callable[[Any], Any]  # and back, as the kind of array that came

    @property
    def histograms(self) -> int:
        """How many there are; 0 for a vector, as in the host."""
        return self.b.shape[1] if len(self.b.shape) == 2 else 0

    def turned(self, array: Any) -> Any:
        """Exchange the host's order (points, histograms) and the operation's (histograms, points)."""
        return array.T if self.histograms else array

    @property
    def weights(self) -> dict[str, Any]:
        """The arguments a and b of the operation, whose batch the histograms are."""
        return {"a": self.enter(self.a), "b": self.enter(self.turned(self.b))}

    def detached(self) -> Problem:
        """The same numbers, which depend on nothing."""
        cost = dataclasses.replace(self.cost, **{
            part.name: detached(value) for part in dataclasses.fields(self.cost)
            if part.init and framework(value := getattr(self.cost, part.name)) is not None
        })  # fmt: skip
        object.__setattr__(cost, "restore", self.cost.restore)
        return dataclasses.replace(self, a=detached(self.a), b=detached(self.b), reg=detached(self.reg), cost=cost)


def read(M: Any, a: Any, b: Any, reg: Any) -> Problem:
    """Understand a cost matrix or a lazy cost, weights (none or empty: uniform) and a regularisation."""
    like = M.X if is_lazy(M) else M
    a, b = ([] if weights is None else weights for weights in (a, b))
    check_kinds(M=like, a=a, b=b)
    like, a, b = floating(*utils().list_to_array(like, a, b))
    shape = tuple(M.shape if is_lazy(M) else like.shape)
    check_shapes(shape, a, b)
    nx = backend().get_backend(like)
    a, b = (w if len(w) else filled(nx, (n,), 1 / n, like) for w, n in zip((a, b), shape, strict=True))
    enter, leave = way_there_and_back(like)
    with words_of_the_host():
        cost = cost_of(M if is_lazy(M) else like, enter)
    return Problem(a, b, shape, regularisation(reg), cost, like.dtype, nx, enter, leave)


def check_kinds(**arrays: Any) -> None:
    """Refuse a mixture of frameworks, and frameworks that we do not compute with. Lists go with any."""
    kinds = {name: framework(array) for name, array in arrays.items() if not isinstance(array, list)}
    for name, kind in kinds.items():
        first = next(iter(kinds))
        if kind in (None, "tensorflow"):
            found, also = type(arrays[name]), ", and lazy_cost(X, Y)" if name == "M" else ""
            raise TypeError(f"{name} is a {found.__module__}.{found.__qualname__}; accepted are {ARRAYS}{also}")
        if kind != kinds[first]:
            raise TypeError(f"{name} is a {kind} array and {first} is a {kinds[first]} array; accepted is one kind")


def floating(*arrays: Any) -> list[Any]:
    """Turn integers into the floating dtype of the other arrays, or the framework's own default."""
    whole = [re.search("int|bool", str(array.dtype)) is not None for array in arrays]
    like = next((array for array, is_whole in zip(arrays, whole, strict=True) if not is_whole), None)
    return [_cast(array, like) if is_whole else array for array, is_whole in zip(arrays, whole, strict=True)]


def _cast(array: Any, like: Any) -> Any:
    return array * 1.0 if like is None else in_dtype(array, like.dtype)


def check_shapes(shape: tuple[int, ...], a: Any, b: Any) -> None:
    """Refuse weights that do not belong to the cost."""
    if len(shape) != 2:
        raise ValueError(f"M has shape {shape}; accepted is (n, m)")
    n, m = shape
    if tuple(a.shape) not in ((0,), (n,)):
        raise ValueError(f"a has shape {tuple(a.shape)}; accepted is ({n},), or nothing for uniform weights")
    if tuple(b.shape) not in ((0,), (m,)) and (len(b.shape) != 2 or b.shape[0] != m or b.shape[1] == 0):
        raise ValueError(f"b has shape {tuple(b.shape)}; accepted are ({m},), ({m}, histograms), or nothing")


def check_control(**numbers: Any) -> None:
    """Refuse before the first iteration what the operation would refuse in the middle of a watched run."""
    (steps, count), (threshold, small) = numbers.items()
    if not hasattr(count, "__index__") or count < 1:
        raise ValueError(f"{steps} is {count!r}; accepted is a whole number from 1")
    if not small < math.inf:
        raise ValueError(f"{threshold} is {small!r}; accepted is a finite number")


def filled(nx: Any, size: tuple[int, ...], value: float, like: Any) -> Any:
    """An array of one value. POT asks a jax array for its device, which is unknown inside of transformations."""
    if framework(like) == "jax":
        import jax.numpy

        return jax.numpy.full(size, value, like.dtype)
    return nx.full(size, value, type_as=like)


def regularisation(reg: Any) -> Any:
    """A number; as an array where there may be a derivative by it."""
    if getattr(reg, "requires_grad", False) or (framework(reg) == "jax" and math.prod(reg.shape) == 1):
        return reg.reshape(())
    try:
        return float(reg if isinstance(reg, int | float) else reg.reshape(()))
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"reg is {reg!r}; accepted is a positive number") from None


def cost_of(M: Any, enter: Callable[[Any], Any]) -> Any:
    """The cost as the operation takes it."""
    if is_lazy(M):
        return operation().PointCloud(enter(M.X), enter(M.Y), M.metric)
    return operation().DenseCost(enter(M))


def check_values(problem: Any) -> None:
    """Have the operation look at the numbers, so that the host can still take a call that we refuse."""
    if framework(problem.cost.tensors[0]) == "jax":
        from flashot_backends.ops.sinkhorn import jax_problem

        jax_problem.make_problem(problem.cost, **problem.weights, epsilon=problem.reg)
        return
    from flashot_backends.ops.sinkhorn import problem as checks

    made = checks.make_problem(problem.cost, **problem.weights, epsilon=problem.reg)
    checks.check_values(made.x, made.y, made.a, made.b, made.epsilon)


# Solving, and what scalings the potentials are


def start_from(problem: Problem, log_u: Any) -> Any:
    """The row potentials, (n,) or (k, n), of a scaling log u: f = reg (log u - log a)."""
    log_a = logarithm(problem.nx, problem.a, massless=0.0)
    if problem.histograms:
        log_a = log_a[:, None]
    return problem.enter(problem.turned(problem.reg * (log_u - log_a)))


def log_scalings(problem: Problem, solution: Any) -> tuple[Any, Any]:
    """log u (n,) and log v (m,), with a second axis for several histograms."""
    log_a, log_b = (logarithm(problem.nx, weight) for weight in (problem.a, problem.b))
    f, g = (problem.turned(problem.leave(potential)) for potential in (solution.f, solution.g))
    return (log_a[:, None] if problem.histograms else log_a) + f / problem.reg, log_b + g / problem.reg


GRADS = ("autodiff", "envelope", "last_step", "detach")  # what the host calls its derivatives


def solved(
    problem: Any, grad: str, f: Any, iterations: int, tolerance: float, envelope: str = "envelope", **options: Any
) -> tuple[Any, Any]:
    """The solution with the derivative that the host's ``grad`` asks for, and whether it has converged.

    "envelope" is the operation's derivative of that name. "last_step" is that of one more iteration from where the
    others led.
    """
    if grad == "last_step":
        converged: Any = None
        if iterations > 1:
            before, converged = solved(problem, "detach", f, iterations - 1, tolerance, **options)
            f = _of_held_scalings(problem, before.f)
        last, _ = solved(problem, "autodiff", f, 1, 0.0, **options)
        return last, last.converged if converged is None else converged
    if grad == "detach":
        problem, f = problem.detached(), None if f is None else detached(f)
    solution = operation().solve(
        problem.cost, **problem.weights, epsilon=problem.reg, max_iterations=int(iterations),
        tolerance=max(0.0, float(tolerance)), init=None if f is None else (f, None),
        gradient=envelope if grad == "envelope" else "unrolled", **{"acceleration": None} | options,
    )  # fmt: skip
    return solution, solution.converged


def _of_held_scalings(problem: Any, f: Any) -> Any:
    """The row potentials as if log a + f/reg did not depend on a and reg."""
    a = problem.weights["a"]
    if framework(a) not in ("torch", "jax"):
        return f
    log_a, reg = logarithm(problem.nx, a, massless=0.0), problem.reg
    return f * (reg / detached(reg)) + reg * (detached(log_a) - log_a)


def warn_unless(converged: Any) -> None:
    """The host's own warning, at the line of its user."""
    if known(converged.all()) is False:
        warnings.warn(NOT_CONVERGED, stacklevel=6)


def shown(array: Any, grad: str) -> Any:
    """A result other than the value: it has a derivative where the host's ``grad`` gives it one."""
    return detached(array) if grad in ("envelope", "detach") else array


def print_errors(problem: Problem, solution: Any) -> None:
    """The host's table, of what was looked at; of jax arrays, that at the end."""
    errors = problem.leave(solution.errors if hasattr(solution, "errors") else solution.error[None])
    for iteration, error in ((10 * k, float(error)) for k, error in enumerate(errors) if error == error):
        if iteration % 200 == 0:
            print(f"{'It.':5s}|{'Err':12s}\n" + "-" * 19)
        print(f"{iteration:5d}|{error:8e}|")


def known(truth: Any) -> bool | None:
    """A truth, or None inside of ``jax.jit`` and ``jax.vmap``, where nobody knows it yet."""
    if framework(truth) != "jax":
        return bool(truth)
    from jax.errors import ConcretizationTypeError

    try:
        return bool(truth)
    except ConcretizationTypeError:
        return None


# Where numpy problems are computed


def way_there_and_back(like: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the way to the device of the setting ``numpy_device`` and back; other kinds stay where they are."""
    if framework(like) != "numpy" or settings().numpy_device == "cpu":
        return _same, as_number
    device, back = _card(), restorer(like)
    return lambda array: to_torch(array, "M").to(device), lambda tensor: as_number(back(tensor))


def _card() -> str:
    if not require_torch().cuda.is_available():
        raise ValueError("numpy_device is 'cuda' and torch sees no CUDA device; accepted here is 'cpu'")
    return "cuda"


def _same(array: Any) -> Any:
    return array


def as_number(array: Any) -> Any:
    """Return a numpy scalar for a numpy array without axes, as numpy's own reductions do."""
    return array[()] if framework(array) == "numpy" else array


# Arrays


def wide(array: Any) -> Any:
    """Return 16-bit floats in the dtype of their potentials, float32."""
    if str(array.dtype).removeprefix("torch.") not in ("float16", "bfloat16"):
        return array
    return array.float() if framework(array) == "torch" else array.astype("float32")


def logarithm(nx: Any, weight: Any, massless: float = -math.inf) -> Any:
    """log a in the dtype of the potentials; no derivative where there is no mass."""
    weight = wide(weight)
    there = weight > 0
    return nx.where(there, nx.log(nx.where(there, weight, 0 * weight + 1)), 0 * weight + massless)


def in_dtype(array: Any, dtype: Any) -> Any:
    """Return an array in a dtype of its framework."""
    if array.dtype == dtype:
        return array
    return array.to(dtype) if framework(array) == "torch" else array.astype(dtype)


def detached(array: Any) -> Any:
    """An array or a lazy cost that depends on nothing; anything else as it is."""
    if is_lazy(array):
        return lazy_cost(detached(array.X), detached(array.Y), array.metric)
    if framework(array) == "torch":
        return array.detach()
    if framework(array) == "jax":
        import jax

        return jax.lax.stop_gradient(array)
    return array


# Lazy costs and plans


def lazy_cost(X: Any, Y: Any, metric: str = "sqeuclidean") -> Any:
    """Return the cost between two clouds of points as a POT ``LazyTensor``, to pass where a cost matrix goes.

    Parameters
    ----------
    X, Y : arrays of shape (n, d) and (m, d)
        Points of one kind of array, one floating dtype, on one device.
    metric : str
        "sqeuclidean", "euclidean", "cityblock" or "cosine", as ``ot.dist`` means them.

    Returns
    -------
    ot.utils.LazyTensor
        Of shape (n, m); ``M[2:5]`` computes three rows. ``ot.sinkhorn(a, b, M, reg, method="flash")`` uses memory
        linear in n + m and returns the plan as a LazyTensor.

    Raises
    ------
    TypeError, ValueError
        X and Y are no matching arrays of points, or the metric is unknown.
    ImportError
        POT is older than 0.9.2 and has no LazyTensor.
    """
    if not hasattr(utils(), "LazyTensor"):
        raise ImportError("a lazy cost needs POT 0.9.2 or newer, which has ot.utils.LazyTensor")
    X, Y = utils().list_to_array(X, Y)
    if metric not in LAZY_METRICS:
        raise ValueError(f"metric is {metric!r}; accepted is one of {LAZY_METRICS}")
    with words_of_the_host(x="X", y="Y"):
        shape = operation().PointCloud(X, Y, metric).shape
    if len(shape) != 2:
        raise ValueError(f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}; accepted are (n, d) and (m, d)")
    return utils().LazyTensor(shape, _cost_block, X=X, Y=Y, metric=metric)


def is_lazy(M: Any) -> bool:
    """Whether this is one of our lazy costs."""
    return getattr(M, "_getitem", None) is _cost_block


def transposed(M: Any) -> Any:
    """A lazy cost with its sides exchanged."""
    return lazy_cost(M.Y, M.X, M.metric)


def lazy_plan(M: Any, log_u: Any, log_v: Any, reg: Any) -> Any:
    """The plan exp(log u_i + log v_j − M_ij/reg) as a LazyTensor."""
    return utils().LazyTensor(tuple(M.shape), _plan_block, M=M, log_u=log_u, log_v=log_v, reg=reg)


def _cost_block(i: Any, j: Any, X: Any, Y: Any, metric: str) -> Any:
    """Rows i and columns j of the cost; distances around a common centre, so that far-off points keep their digits."""
    X, Y, centre = X[_rows(i)], Y[_rows(j)], X[:1]
    if metric in ("sqeuclidean", "euclidean"):
        return utils().dist(X - centre, Y - centre, metric=metric)
    cost = operation().PointCloud(X, Y, metric)  # the host takes these from scipy, for numpy arrays alone
    return cost.restore(cost.dense())


def _plan_block(i: Any, j: Any, M: Any, log_u: Any, log_v: Any, reg: Any) -> Any:
    exponent = log_u[_rows(i)][:, None] + log_v[_rows(j)][None, :] - M[i, j] / reg
    return backend().get_backend(exponent).exp(exponent)


def _rows(index: Any) -> Any:
    """Keep the axis of a single index, as the host's own lazy plans do."""
    return slice(index, index + 1) if isinstance(index, int) else index


# What is imported when it is needed: the host must not be, while it imports us


def utils() -> Any:
    """``ot.utils``."""
    import ot.utils

    return ot.utils


def backend() -> Any:
    """``ot.backend``."""
    import ot.backend

    return ot.backend


def operation() -> Any:
    """The Sinkhorn operation."""
    from flashot_backends.ops import sinkhorn

    return sinkhorn


_HOST_WORDS = {"epsilon": "reg", "max_iterations": "numItermax", "tolerance": "stopThr", "init": "warmstart"}


@contextmanager
def words_of_the_host(**words: str) -> Iterator[None]:
    """Say the operation's complaints with the names that the host's user wrote."""
    names = _HOST_WORDS | words
    try:
        yield
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            raise
        said = re.sub(r"\b(" + "|".join(names) + r")\b", lambda word: names[word[0]], str(error))
        raise type(error)(said) from error
