"""POT (Python Optimal Transport): ``ot.sinkhorn`` and ``ot.sinkhorn2`` on the Sinkhorn operation of this package.

``method="flash"`` is added to both. Where POT is listed in the setting ``substitute``, the methods "sinkhorn",
"sinkhorn_log" and "sinkhorn_stabilized" run on the operation too: they are the same alternating iterations, so plan,
errors and iteration counts are the host's. "greenkhorn" and "sinkhorn_epsilon_scaling" visit other iterates and stop by
other rules, so they stay with the host.

The host's scalings and the operation's potentials describe one plan:
log u = log a + f / reg, log v = log b + g / reg, P_ij = exp(log u_i + log v_j - M_ij / reg).
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashot_backends.config import settings
from flashot_backends.ops.arrays import framework, require_torch, restorer, to_torch

VERSIONS = ">=0.9,<0.10"
PARAMETERS = ("a", "b", "M", "reg", "method", "numItermax", "stopThr", "verbose", "log", "warn", "warmstart")
SAMPLE_PARAMETERS = ("X_s", "X_t", "reg", "a", "b", "metric", "numIterMax", "stopThr", "isLazy")
OPTIONS = ("backend", "precision")
ARRAYS = "numpy, torch, jax and cupy arrays, and lists of numbers"
NOT_CONVERGED = (
    "Sinkhorn did not converge. You might want to increase the number of iterations `numItermax` "
    "or the regularization parameter `reg`."
)  # the host's own words: people filter on them

_log = logging.getLogger("flashot_backends")


def adapt(module: Any, host: Any) -> None:
    """Add the method "flash" to the functions of POT that this leaf module defines."""
    for name in ("sinkhorn", "sinkhorn2"):
        if _defines(module, name):
            host.wrap(module, name, functools.partial(_routed, host=host, wants_plan=name == "sinkhorn"), PARAMETERS)
    for name in ("empirical_sinkhorn", "empirical_sinkhorn2"):
        if _defines(module, name):
            host.wrap(module, name, functools.partial(_lazily_routed, wants_loss=name[-1] == "2"), SAMPLE_PARAMETERS)


def _defines(module: Any, name: str) -> bool:
    return bool(getattr(getattr(module, name, None), "__module__", None) == module.__name__)


LAZY_METRICS = ("sqeuclidean", "euclidean", "cityblock", "cosine")  # the host's names


def lazy_cost(X: Any, Y: Any, metric: str = "sqeuclidean") -> Any:
    """Return the cost between two clouds of points as a POT ``LazyTensor``, to pass where a cost matrix goes.

    Parameters
    ----------
    X, Y : arrays of shape (n, d) and (m, d)
        Points of one kind of array, one floating dtype, on one device.
    metric : str
        "sqeuclidean", "euclidean", "cityblock" or "cosine", as ``ot.dist`` means them. JAX arrays: "sqeuclidean".

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
    utils = _utils()
    if not hasattr(utils, "LazyTensor"):
        raise ImportError("a lazy cost needs POT 0.9.2 or newer, which has ot.utils.LazyTensor")
    X, Y = utils.list_to_array(X, Y)
    if metric not in LAZY_METRICS:
        raise ValueError(f"metric is {metric!r}; accepted is one of {LAZY_METRICS}")
    with _words_of_the_host(x="X", y="Y"):
        shape = _operation().PointCloud(X, Y, metric).shape
    if len(shape) != 2:
        raise ValueError(f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}; accepted are (n, d) and (m, d)")
    return utils.LazyTensor(shape, _cost_block, X=X, Y=Y, metric=metric)


# Which calls are ours


def _routed(original: Callable[..., Any], host: Any, wants_plan: bool) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _Call(wants_plan=wants_plan, options=bound.arguments.pop("kwargs", {}), **bound.arguments)
        problem = None
        if call.name == "flash":
            problem = _asked_for(call)
        elif host.substituted:
            problem = _substitution(call)
        if problem is not None:
            return _answer(call, problem)
        if _is_lazy(call.M):
            raise ValueError(f"M is a lazy cost and method is {call.method!r}; accepted with it is method='flash'")
        return original(*args, **kwargs)

    return routed


def _asked_for(call: _Call) -> _Problem:
    """Read a call of the method "flash"."""
    unknown = sorted(set(call.options) - set(OPTIONS))
    if unknown:
        accepted = ", ".join((*PARAMETERS, *OPTIONS))
        raise TypeError(f"method='flash' got the unknown argument {unknown[0]!r}; accepted are {accepted}")
    return _read(call)


def _substitution(call: _Call) -> _Problem | None:
    """Read a call of one of the host's own methods, or say in the log why it stays with the host."""
    try:
        if call.name not in _DIALECTS:
            raise ValueError("its iterates and its stopping rule are others")
        problem = _read(call)
        if problem.histograms and call.name == "sinkhorn_stabilized":
            raise ValueError("it stops several histograms by the change of their scalings")
        _check_values(problem)
        return problem
    except (TypeError, ValueError) as refusal:
        _say_once(f"POT's method {call.name!r} stays with POT: {refusal}")
        return None


@functools.lru_cache(maxsize=256)
def _say_once(sentence: str) -> None:
    _log.info(sentence)


# What the host's methods call things


@dataclass(frozen=True)
class _Dialect:
    """One of the host's methods: when it looks at its error, and what its log holds."""

    names: tuple[str, ...]
    check_every: int = 10
    shift: bool = False  # it starts from u = 1/n, not from u = 1
    joint: bool = False  # several histograms stop together
    prints_last: bool = True  # verbose prints the error that ended the loop as well


_LOGARITHMIC = _Dialect(("err", "niter", "log_u", "log_v", "u", "v"))
_DIALECTS = {
    "flash": _LOGARITHMIC,
    "sinkhorn_log": _LOGARITHMIC,
    "sinkhorn": _Dialect(("err", "niter", "u", "v"), shift=True, joint=True, prints_last=False),
    "sinkhorn_stabilized": _Dialect(
        ("err", "n_iter", "logu", "logv", "alpha", "beta", "warmstart"), check_every=20, shift=True
    ),
}


@dataclass(frozen=True)
class _Call:
    """One call of ``ot.sinkhorn`` or ``ot.sinkhorn2``, by the host's names."""

    a: Any
    b: Any
    M: Any
    reg: Any
    method: str
    numItermax: int  # noqa: N815 - the host's name
    stopThr: float  # noqa: N815
    verbose: bool
    log: bool
    warn: bool
    warmstart: Any
    wants_plan: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method as the host compares it."""
        return str(self.method).lower()

    @property
    def dialect(self) -> _Dialect:
        """How that method behaves."""
        return _DIALECTS[self.name]

    @property
    def check_every(self) -> int:
        """Iterations between two looks at the error."""
        return self.options.get("print_period", self.dialect.check_every) if self.dialect.check_every == 20 else 10


# From the host's arguments to the operation's


@dataclass(frozen=True)
class _Problem:
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


def _read(call: _Call) -> _Problem:
    _check_control(call)
    M = call.M.X if _is_lazy(call.M) else call.M
    a, b = ([] if weights is None else weights for weights in (call.a, call.b))
    _check_kinds(M=M, a=a, b=b)
    M, a, b = _floating(*_utils().list_to_array(M, a, b))
    shape = tuple(call.M.shape if _is_lazy(call.M) else M.shape)
    _check_shapes(shape, a, b)
    nx = _backend().get_backend(M)
    a, b = (w if len(w) else _filled(nx, (n,), 1 / n, M) for w, n in zip((a, b), shape, strict=True))
    enter, leave = _way_there_and_back(M)
    with _words_of_the_host():
        cost = _cost(call.M if _is_lazy(call.M) else M, enter)
    return _Problem(a, b, shape, _regularisation(call.reg), cost, M.dtype, nx, enter, leave)


def _check_control(call: _Call) -> None:
    """Refuse before the first iteration what the operation would refuse in the middle of a watched run."""
    if not hasattr(call.numItermax, "__index__") or call.numItermax < 1:
        raise ValueError(f"numItermax is {call.numItermax!r}; accepted is a whole number from 1")
    if not call.stopThr < math.inf:
        raise ValueError(f"stopThr is {call.stopThr!r}; accepted is a finite number")


def _check_kinds(**arrays: Any) -> None:
    """Refuse a mixture of frameworks, and frameworks that we do not compute with. Lists go with any."""
    kinds = {name: framework(array) for name, array in arrays.items() if not isinstance(array, list)}
    for name, kind in kinds.items():
        first = next(iter(kinds))
        if kind in (None, "tensorflow"):
            found, also = type(arrays[name]), ", and lazy_cost(X, Y)" if name == "M" else ""
            raise TypeError(f"{name} is a {found.__module__}.{found.__qualname__}; accepted are {ARRAYS}{also}")
        if kind != kinds[first]:
            raise TypeError(f"{name} is a {kind} array and {first} is a {kinds[first]} array; accepted is one kind")


def _floating(*arrays: Any) -> list[Any]:
    """Turn integers into the floating dtype of the other arrays, or the framework's own default."""
    whole = [re.search("int|bool", str(array.dtype)) is not None for array in arrays]
    like = next((array for array, is_whole in zip(arrays, whole, strict=True) if not is_whole), None)
    return [_cast(array, like) if is_whole else array for array, is_whole in zip(arrays, whole, strict=True)]


def _cast(array: Any, like: Any) -> Any:
    return array * 1.0 if like is None else _in_dtype(array, like.dtype)


def _check_shapes(shape: tuple[int, ...], a: Any, b: Any) -> None:
    if len(shape) != 2:
        raise ValueError(f"M has shape {shape}; accepted is (n, m)")
    n, m = shape
    if tuple(a.shape) not in ((0,), (n,)):
        raise ValueError(f"a has shape {tuple(a.shape)}; accepted is ({n},), or nothing for uniform weights")
    if tuple(b.shape) not in ((0,), (m,)) and (len(b.shape) != 2 or b.shape[0] != m or b.shape[1] == 0):
        raise ValueError(f"b has shape {tuple(b.shape)}; accepted are ({m},), ({m}, histograms), or nothing")


def _filled(nx: Any, size: tuple[int, ...], value: float, like: Any) -> Any:
    """An array of one value. POT asks a jax array for its device, which is unknown inside of transformations."""
    if framework(like) == "jax":
        import jax.numpy

        return jax.numpy.full(size, value, like.dtype)
    return nx.full(size, value, type_as=like)


def _regularisation(reg: Any) -> Any:
    if getattr(reg, "requires_grad", False) or (framework(reg) == "jax" and math.prod(reg.shape) == 1):
        return reg.reshape(())
    try:
        return float(reg if isinstance(reg, int | float) else reg.reshape(()))
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"reg is {reg!r}; accepted is a positive number") from None


def _cost(M: Any, enter: Callable[[Any], Any]) -> Any:
    if _is_lazy(M):
        return _operation().PointCloud(enter(M.X), enter(M.Y), M.metric)
    return _operation().DenseCost(enter(M))


def _check_values(problem: _Problem) -> None:
    """Have the operation look at the numbers, so that the host can still take a call that we refuse."""
    if framework(problem.cost.tensors[0]) == "jax":
        from flashot_backends.ops.sinkhorn import jax_problem

        jax_problem.make_problem(problem.cost, **problem.weights, epsilon=problem.reg)
        return
    from flashot_backends.ops.sinkhorn.problem import check_values, make_problem

    made = make_problem(problem.cost, **problem.weights, epsilon=problem.reg)
    check_values(made.x, made.y, made.a, made.b, made.epsilon)


# Where numpy problems are computed


def _way_there_and_back(like: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the way to the device of the setting ``numpy_device`` and back; other kinds stay where they are."""
    if framework(like) != "numpy" or settings().numpy_device == "cpu":
        return _same, _as_number
    device, back = _card(), restorer(like)
    return lambda array: to_torch(array, "M").to(device), lambda tensor: _as_number(back(tensor))


def _card() -> str:
    if not require_torch().cuda.is_available():
        raise ValueError("numpy_device is 'cuda' and torch sees no CUDA device; accepted here is 'cpu'")
    return "cuda"


def _same(array: Any) -> Any:
    return array


def _as_number(array: Any) -> Any:
    """Return a numpy scalar for a numpy array without axes, as numpy's own reductions do."""
    return array[()] if framework(array) == "numpy" else array


# The iterations


@dataclass(frozen=True)
class _Run:
    """What the iterations ended with."""

    solution: Any
    iterations: int
    converged: bool
    errors: list[Any] = field(default_factory=list)


def _answer(call: _Call, problem: _Problem) -> Any:
    """Solve, warn, and return what the host would."""
    watched = call.dialect.joint if problem.histograms else call.log or call.verbose
    with _words_of_the_host():
        run = (_watched if watched else _unwatched)(call, problem)
    if call.warn and not run.converged:
        warnings.warn(NOT_CONVERGED, stacklevel=4)
    potentials = _Potentials.of(problem, run.solution)
    if problem.histograms or not call.wants_plan:
        result = _loss(problem, run.solution)
    else:
        result = _plan(call, problem, run.solution, potentials)
    return (result, _log_of(call, problem, run, potentials)) if call.log else result


def _unwatched(call: _Call, problem: _Problem) -> _Run:
    """Let the operation run to its end; every histogram stops by itself."""
    solution = _solve(call, problem, _start(call, problem), call.numItermax, call.stopThr)
    iterations, converged = problem.leave(solution.iterations), problem.leave(solution.converged)
    if call.verbose:  # one line for each histogram: where it stopped
        for done, error in zip(iterations, problem.leave(solution.error), strict=True):
            _print(int(done) - 1, error, call.check_every)
    done = _known(converged.all())
    if done is None:
        return _Run(solution, iterations.max(), True)  # nobody can be warned
    return _Run(solution, int(iterations.max()), done)


def _known(truth: Any) -> bool | None:
    """A truth, or None inside of ``jax.jit`` and ``jax.vmap``, where nobody knows it yet."""
    if framework(truth) != "jax":
        return bool(truth)
    from jax.errors import ConcretizationTypeError

    try:
        return bool(truth)
    except ConcretizationTypeError:
        return None


def _watched(call: _Call, problem: _Problem) -> _Run:
    """Run from one look at the error to the next, to report all of them; histograms stop together."""
    errors: list[Any] = []
    solution, f, done = None, _start(call, problem), 0
    for steps in _schedule(call):
        solution = _solve(call, problem, f, steps, 0.0)
        f, done = solution.f, done + steps
        if (done - 1) % call.check_every:
            break
        error = problem.leave(solution.error)
        errors.append(problem.nx.norm(error) if problem.histograms else error)
        stop = _is_small(call, errors[-1])
        if call.verbose and (call.dialect.prints_last or not stop):
            _print(done - 1, errors[-1], call.check_every)
        if stop:
            return _Run(solution, done, True, errors)
    return _Run(solution, done, False, errors)


def _schedule(call: _Call) -> Iterator[int]:
    """Yield the iterations up to each look: 1, then ``check_every`` a time, and a rest that ends unlooked at."""
    yield 1
    left = call.numItermax - 1
    while left > 0:
        yield min(left, call.check_every)
        left -= call.check_every


def _is_small(call: _Call, error: Any) -> bool:
    small = _known(error <= call.stopThr if call.name == "sinkhorn_stabilized" else error < call.stopThr)
    if small is None:
        raise TypeError(
            f"method={call.method!r} with log=True, verbose=True or several histograms of POT's own methods looks at "
            "errors on the way, and inside of jax.jit or jax.vmap there is nothing to look at; accepted is log=False"
        )
    return small


def _print(iteration: int, error: Any, check_every: int) -> None:
    if iteration % (20 * check_every) == 0:
        print(f"{'It.':5s}|{'Err':12s}\n" + "-" * 19)
    print(f"{iteration:5d}|{float(error):8e}|")


def _solve(call: _Call, problem: _Problem, f: Any, iterations: int, tolerance: float, norm: str = "l2") -> Any:
    return _operation().solve(
        problem.cost,
        **problem.weights,
        epsilon=problem.reg,
        max_iterations=int(iterations),
        tolerance=0.0 if tolerance < 0 else float(tolerance),
        check_every=call.check_every,
        acceleration=None,
        init=(f, None),
        norm=norm,
        **{name: value for name, value in call.options.items() if name in OPTIONS and call.name == "flash"},
    )


def _start(call: _Call, problem: _Problem) -> Any:
    """The row potentials of the host's starting point, (n,) or (k, n): f = reg (log u - log a)."""
    a = _wide(problem.a)
    log_a = problem.nx.log(problem.nx.where(a > 0, a, a * 0 + 1))
    if problem.histograms:
        log_a = log_a[:, None]
    return problem.enter(problem.turned(problem.reg * (_start_log_u(call, problem, a) - log_a)))


def _start_log_u(call: _Call, problem: _Problem, a: Any) -> Any:
    n = problem.shape[0]
    shift = -math.log(n) if call.dialect.shift else 0.0
    if call.warmstart is None:
        size = (n, problem.histograms) if problem.histograms else (n,)
        return _filled(problem.nx, size, shift, a)
    log_u = _warm_rows(call.warmstart, problem)
    return log_u / problem.reg + shift if call.name == "sinkhorn_stabilized" else log_u


def _warm_rows(warmstart: Any, problem: _Problem) -> Any:
    """The row part of a warm start: a pair of vectors; for histograms a list of pairs, or a pair of matrices."""
    try:
        rows: Any
        columns: Any
        rows, columns = zip(*warmstart, strict=True) if _is_list_of_pairs(warmstart, problem) else warmstart
        if isinstance(rows, tuple):
            rows, columns = problem.nx.stack(rows, 1), problem.nx.stack(columns, 1)
        found = tuple(rows.shape), tuple(columns.shape)
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"warmstart is a {type(warmstart).__name__}; accepted is a pair (log_u, log_v)") from None
    tail = problem.b.shape[1:]
    expected = tuple((size, *tail) for size in problem.shape)
    if found != expected:
        raise ValueError(f"warmstart has shapes {found}; accepted are {expected}")
    return rows


def _is_list_of_pairs(warmstart: Any, problem: _Problem) -> bool:
    return bool(problem.histograms) and isinstance(warmstart[0], list | tuple)


# From the operation's results to the host's


@dataclass(frozen=True)
class _Potentials:
    """log u (n,) and log v (m,), with a second axis for several histograms."""

    log_u: Any
    log_v: Any

    @classmethod
    def of(cls, problem: _Problem, solution: Any) -> _Potentials:
        """Turn f and g into the logarithms of the host's scalings."""
        a, b = _wide(problem.a), _wide(problem.b)
        f, g = (problem.turned(problem.leave(potential)) for potential in (solution.f, solution.g))
        with np.errstate(divide="ignore"):
            log_a, log_b = problem.nx.log(a), problem.nx.log(b)
        return cls((log_a[:, None] if problem.histograms else log_a) + f / problem.reg, log_b + g / problem.reg)


def _loss(problem: _Problem, solution: Any) -> Any:
    return _in_dtype(problem.leave(solution.linear_cost()), problem.dtype)


def _plan(call: _Call, problem: _Problem, solution: Any, potentials: _Potentials) -> Any:
    if not _is_lazy(call.M):
        return _in_dtype(problem.leave(solution.plan()), problem.dtype)
    return _utils().LazyTensor(
        problem.shape, _plan_block, M=call.M, log_u=potentials.log_u, log_v=potentials.log_v, reg=problem.reg
    )


def _log_of(call: _Call, problem: _Problem, run: _Run, potentials: _Potentials) -> dict[str, Any]:
    """The host's log, under the names that the method gives its entries."""
    log_u, log_v, nx = potentials.log_u, potentials.log_v, problem.nx
    alpha, beta = log_u * problem.reg, log_v * problem.reg
    values = {"err": run.errors, "log_u": log_u, "log_v": log_v, "logu": log_u, "logv": log_v}
    values |= {"niter": run.iterations - 1, "n_iter": run.iterations - 1}
    values |= {"alpha": alpha, "beta": beta, "warmstart": (alpha, beta)}
    with np.errstate(over="ignore"):
        values |= {"u": nx.exp(log_u), "v": nx.exp(log_v)}
    names = call.dialect.names
    if problem.histograms and not call.dialect.joint:
        names = ("log_u", "log_v", "u", "v")  # each has its own count and errors, and the host keeps none
    return {name: values[name] for name in names}


def _wide(array: Any) -> Any:
    """Return 16-bit floats in the dtype of their potentials, float32."""
    if str(array.dtype).removeprefix("torch.") not in ("float16", "bfloat16"):
        return array
    return array.float() if framework(array) == "torch" else array.astype("float32")


def _in_dtype(array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return array
    return array.to(dtype) if framework(array) == "torch" else array.astype(dtype)


# Lazy solvers of samples


def _lazily_routed(original: Callable[..., Any], wants_loss: bool) -> Callable[..., Any]:
    """Take ``isLazy=True, method="flash"``. Without isLazy the host calls ``sinkhorn``, which knows the method."""
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments.pop("kwargs", {})
        if bound.arguments["isLazy"] and str(options.get("method")).lower() == "flash":
            return _solve_samples(bound.arguments, options, wants_loss)
        return original(*args, **kwargs)

    return routed


def _solve_samples(given: dict[str, Any], options: dict[str, Any], wants_loss: bool) -> Any:
    """The host's lazy loop updates rows first, so columns are exact: the operation's loop with the sides exchanged."""
    call = _exchanged(given, options)
    _check_shapes(call.M.shape[::-1], *(np.asarray(w) if isinstance(w, list) else w for w in (call.b, call.a)))
    with _words_of_the_host(numItermax="numIterMax"):
        problem = _asked_for(call)
        run = _in_tens(call, problem)
    if call.warn and not run.converged:
        warnings.warn(NOT_CONVERGED, stacklevel=4)
    potentials = _Potentials.of(problem, run.solution)
    log_u, log_v = potentials.log_v, potentials.log_u
    answer = (_loss(problem, run.solution),) if wants_loss else (log_u, log_v)
    if call.log:
        plan = _utils().LazyTensor(
            problem.shape[::-1], _plan_block, M=_transposed(call.M), log_u=log_u, log_v=log_v, reg=problem.reg
        )
        log = {"err": run.errors, "u": log_u, "v": log_v, "niter": run.iterations - 1, "lazy_plan": plan}
        answer = (*answer, log)
    return answer[0] if len(answer) == 1 else answer


def _exchanged(given: dict[str, Any], options: dict[str, Any]) -> _Call:
    warmstart = given["warmstart"]
    a, b = ([] if given[name] is None else given[name] for name in "ab")
    return _Call(
        a=b,
        b=a,
        M=lazy_cost(given["X_t"], given["X_s"], given["metric"]),
        reg=given["reg"],
        method="flash",
        numItermax=given["numIterMax"],
        stopThr=given["stopThr"],
        verbose=given["verbose"],
        log=given["log"],
        warn=given["warn"],
        warmstart=None if warmstart is None else tuple(warmstart)[::-1],
        wants_plan=False,
        options={name: value for name, value in options.items() if name != "method"},
    )


def _in_tens(call: _Call, problem: _Problem) -> _Run:
    """Ten iterations, a look at the L1 error, and so on: where the host looks."""
    errors: list[Any] = []
    solution, f, done = None, _start(call, problem), 0
    while done < call.numItermax:
        steps = min(10, call.numItermax - done)
        solution = _solve(call, problem, f, steps, 0.0, norm="l1")
        f, done = solution.f, done + steps
        if steps < 10:
            break
        errors.append(problem.leave(solution.error))
        if call.verbose and done % 100 == 0:
            print(f"Error in marginal at iteration {done} = {errors[-1]}")
        if errors[-1] <= call.stopThr:
            return _Run(solution, done, True, errors)
    return _Run(solution, done, False, errors)


def _transposed(M: Any) -> Any:
    return lazy_cost(M.Y, M.X, M.metric)


# Lazy costs and plans


def _is_lazy(M: Any) -> bool:
    return getattr(M, "_getitem", None) is _cost_block


def _cost_block(i: Any, j: Any, X: Any, Y: Any, metric: str) -> Any:
    """Rows i and columns j of the cost; distances around a common centre, so that far-off points keep their digits."""
    X, Y, centre = X[_rows(i)], Y[_rows(j)], X[:1]
    if metric in ("sqeuclidean", "euclidean"):
        return _utils().dist(X - centre, Y - centre, metric=metric)
    cost = _operation().PointCloud(X, Y, metric)  # the host takes these from scipy, for numpy arrays alone
    return cost.restore(cost.dense())


def _plan_block(i: Any, j: Any, M: Any, log_u: Any, log_v: Any, reg: Any) -> Any:
    """Rows i and columns j of the plan exp(log u_i + log v_j - M_ij / reg)."""
    exponent = log_u[_rows(i)][:, None] + log_v[_rows(j)][None, :] - M[i, j] / reg
    return _backend().get_backend(exponent).exp(exponent)


def _rows(index: Any) -> Any:
    """Keep the axis of a single index, as the host's own lazy plans do."""
    return slice(index, index + 1) if isinstance(index, int) else index


# What is imported when it is needed: the host must not be, while it imports us


def _utils() -> Any:
    import ot.utils

    return ot.utils


def _backend() -> Any:
    import ot.backend

    return ot.backend


def _operation() -> Any:
    from flashot_backends.ops import sinkhorn

    return sinkhorn


_HOST_WORDS = {"epsilon": "reg", "max_iterations": "numItermax", "tolerance": "stopThr", "init": "warmstart"}


@contextmanager
def _words_of_the_host(**words: str) -> Iterator[None]:
    """Say the operation's complaints with the names that the host's user wrote."""
    names = _HOST_WORDS | words
    try:
        yield
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            raise
        said = re.sub(r"\b(" + "|".join(names) + r")\b", lambda word: names[word[0]], str(error))
        raise type(error)(said) from error
