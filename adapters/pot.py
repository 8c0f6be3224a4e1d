"""POT (Python Optimal Transport): its entropic solvers on the Sinkhorn operation of this package.

``method="flash"`` is added to ``ot.sinkhorn`` and ``ot.sinkhorn2`` here, and elsewhere to the solvers of
`pot_solve`, `pot_unbalanced` and `pot_barycenter`. Where POT is listed in the setting ``substitute``, the methods
"sinkhorn", "sinkhorn_log" and "sinkhorn_stabilized" run on the operation too, and so does whatever calls them: they are
the same alternating iterations, so plan, errors and iteration counts are the host's. "greenkhorn" and
"sinkhorn_epsilon_scaling" visit other iterates and stop by other rules, so they stay with the host.

The host's scalings and the operation's potentials describe one plan:
log u = log a + f / reg, log v = log b + g / reg, P_ij = exp(log u_i + log v_j - M_ij / reg).
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashot_backends.adapters import pot_barycenter, pot_solve, pot_unbalanced
from flashot_backends.adapters.pot_arrays import (
    NOT_CONVERGED,
    Problem,
    asked,
    check_control,
    check_shapes,
    check_values,
    defines,
    filled,
    in_dtype,
    inside,
    is_flash,
    is_lazy,
    known,
    lazy_cost,
    lazy_plan,
    log_scalings,
    operation,
    read,
    say_once,
    start_from,
    transposed,
    wide,
    words_of_the_host,
)

__all__ = ["VERSIONS", "adapt", "lazy_cost"]

VERSIONS = ">=0.9,<0.10"
PARAMETERS = ("a", "b", "M", "reg", "method", "numItermax", "stopThr", "verbose", "log", "warn", "warmstart")
SAMPLE_PARAMETERS = ("X_s", "X_t", "reg", "a", "b", "metric", "numIterMax", "stopThr", "isLazy")
LEAVES = {"sinkhorn_knopp": "sinkhorn", "sinkhorn_log": "sinkhorn_log", "sinkhorn_stabilized": "sinkhorn_stabilized"}
OPTIONS = ("backend", "precision")
COMPLETE = (0, 9, 5)  # from here on the host's other solvers take the arguments that we know


def adapt(module: Any, host: Any) -> None:
    """Add the method "flash" to the functions of POT that this leaf module defines."""
    for name in ("sinkhorn", "sinkhorn2"):
        if defines(module, name):
            host.wrap(module, name, functools.partial(_routed, host=host, wants_plan=name == "sinkhorn"), PARAMETERS)
    for name in ("empirical_sinkhorn", "empirical_sinkhorn2"):
        if defines(module, name):
            host.wrap(module, name, functools.partial(_lazily_routed, wants_loss=name[-1] == "2"), SAMPLE_PARAMETERS)
    for name, method in LEAVES.items():
        if defines(module, name):
            host.wrap(module, name, functools.partial(_leaf, host=host, method=method), PARAMETERS[:4])
    if host.release >= COMPLETE:
        for part in (pot_solve, pot_unbalanced, pot_barycenter):
            part.adapt(module, host)
        if hasattr(getattr(module, "SinkhornTransport", None), "fit") and module.__name__ == "ot.da":
            host.wrap(module, "SinkhornTransport.fit", _transport, ("self", "Xs", "ys", "Xt", "yt"))


# Which calls are ours


def _routed(original: Callable[..., Any], host: Any, wants_plan: bool) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _Call(wants_plan=wants_plan, options=bound.arguments.pop("kwargs", {}), **bound.arguments)
        call, problem = _understood(call, host)
        if problem is not None:
            return _answer(call, problem)
        if is_lazy(call.M):
            raise ValueError(f"M is a lazy cost and method is {call.method!r}; accepted with it is method='flash'")
        return original(*args, **kwargs)

    return routed


def _leaf(original: Callable[..., Any], host: Any, method: str) -> Callable[..., Any]:
    """One method of the host by itself, as some of its functions call it."""
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        options = given.pop("kwargs", {}) | {name: given.pop(name) for name in ("tau", "print_period") if name in given}
        call, problem = _understood(_Call(wants_plan=True, method=method, options=options, **given), host)
        return original(*args, **kwargs) if problem is None else _answer(call, problem)

    return routed


def _transport(original: Callable[..., Any]) -> Callable[..., Any]:
    """``fit`` of a class that takes no name but its own where it maps new points."""

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_flash(self.method) or getattr(self, "out_of_sample_map", "ferradans") != "continuous":
            return original(self, *args, **kwargs)
        name, self.method = self.method, "sinkhorn_log"
        try:
            with inside():
                return original(self, *args, **kwargs)
        finally:
            self.method = name

    return fit


def _understood(call: _Call, host: Any) -> tuple[_Call, Problem | None]:
    """The call as we take it, and its problem; None where it stays with the host."""
    if asked.get() and call.name == "sinkhorn_log":
        call = replace(call, method="flash")
    if is_flash(call.method):
        return call, _asked_for(call)
    return call, _substitution(call) if host.substituted else None


def _asked_for(call: _Call) -> Problem:
    """Read a call of the method "flash"."""
    unknown = sorted(set(call.options) - set(OPTIONS))
    if unknown:
        accepted = ", ".join((*PARAMETERS, *OPTIONS))
        raise TypeError(f"method='flash' got the unknown argument {unknown[0]!r}; accepted are {accepted}")
    return _read(call)


def _substitution(call: _Call) -> Problem | None:
    """Read a call of one of the host's own methods, or say in the log why it stays with the host."""
    try:
        if call.name not in _DIALECTS:
            raise ValueError("its iterates and its stopping rule are others")
        problem = _read(call)
        if problem.histograms and call.name == "sinkhorn_stabilized":
            raise ValueError("it stops several histograms by the change of their scalings")
        check_values(problem)
        return problem
    except (TypeError, ValueError) as refusal:
        say_once(f"POT's method {call.name!r} stays with POT: {refusal}")
        return None


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


def _read(call: _Call) -> Problem:
    check_control(numItermax=call.numItermax, stopThr=call.stopThr)
    return read(call.M, call.a, call.b, call.reg)


# The iterations


@dataclass(frozen=True)
class _Run:
    """What the iterations ended with."""

    solution: Any
    iterations: int
    converged: bool
    errors: list[Any] = field(default_factory=list)


def _answer(call: _Call, problem: Problem) -> Any:
    """Solve, warn, and return what the host would."""
    watched = call.dialect.joint if problem.histograms else call.log or call.verbose
    with words_of_the_host():
        run = (_watched if watched else _unwatched)(call, problem)
    if call.warn and not run.converged:
        warnings.warn(NOT_CONVERGED, stacklevel=4)
    potentials = log_scalings(problem, run.solution)
    if problem.histograms or not call.wants_plan:
        result = _loss(problem, run.solution)
    else:
        result = _plan(call, problem, run.solution, potentials)
    return (result, _log_of(call, problem, run, potentials)) if call.log else result


def _unwatched(call: _Call, problem: Problem) -> _Run:
    """Let the operation run to its end; every histogram stops by itself."""
    solution = _solve(call, problem, _start(call, problem), call.numItermax, call.stopThr)
    iterations, converged = problem.leave(solution.iterations), problem.leave(solution.converged)
    if call.verbose:  # one line for each histogram: where it stopped
        for done, error in zip(iterations, problem.leave(solution.error), strict=True):
            _print(int(done) - 1, error, call.check_every)
    done = known(converged.all())
    if done is None:
        return _Run(solution, iterations.max(), True)  # nobody can be warned
    return _Run(solution, int(iterations.max()), done)


def _watched(call: _Call, problem: Problem) -> _Run:
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
    small = known(error <= call.stopThr if call.name == "sinkhorn_stabilized" else error < call.stopThr)
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


def _solve(call: _Call, problem: Problem, f: Any, iterations: int, tolerance: float, norm: str = "l2") -> Any:
    return operation().solve(
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


def _start(call: _Call, problem: Problem) -> Any:
    """The row potentials of the host's starting point."""
    return start_from(problem, _start_log_u(call, problem))


def _start_log_u(call: _Call, problem: Problem) -> Any:
    n, a = problem.shape[0], wide(problem.a)
    shift = -math.log(n) if call.dialect.shift else 0.0
    if call.warmstart is None:
        size = (n, problem.histograms) if problem.histograms else (n,)
        return filled(problem.nx, size, shift, a)
    log_u = _warm_rows(call.warmstart, problem)
    return log_u / problem.reg + shift if call.name == "sinkhorn_stabilized" else log_u


def _warm_rows(warmstart: Any, problem: Problem) -> Any:
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


def _is_list_of_pairs(warmstart: Any, problem: Problem) -> bool:
    return bool(problem.histograms) and isinstance(warmstart[0], list | tuple)


# From the operation's results to the host's


def _loss(problem: Problem, solution: Any) -> Any:
    return in_dtype(problem.leave(solution.linear_cost()), problem.dtype)


def _plan(call: _Call, problem: Problem, solution: Any, potentials: tuple[Any, Any]) -> Any:
    if not is_lazy(call.M):
        return in_dtype(problem.leave(solution.plan()), problem.dtype)
    return lazy_plan(call.M, *potentials, problem.reg)


def _log_of(call: _Call, problem: Problem, run: _Run, potentials: tuple[Any, Any]) -> dict[str, Any]:
    """The host's log, under the names that the method gives its entries."""
    (log_u, log_v), nx = potentials, problem.nx
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


# Lazy solvers of samples


def _lazily_routed(original: Callable[..., Any], wants_loss: bool) -> Callable[..., Any]:
    """Take ``isLazy=True, method="flash"``. Without isLazy the host calls ``sinkhorn``, which knows the method."""
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments.pop("kwargs", {})
        if bound.arguments["isLazy"] and is_flash(options.get("method")):
            return _solve_samples(bound.arguments, options, wants_loss)
        return original(*args, **kwargs)

    return routed


def _solve_samples(given: dict[str, Any], options: dict[str, Any], wants_loss: bool) -> Any:
    """The host's lazy loop updates rows first, so columns are exact: the operation's loop with the sides exchanged."""
    call = _exchanged(given, options)
    check_shapes(call.M.shape[::-1], *(np.asarray(w) if isinstance(w, list) else w for w in (call.b, call.a)))
    with words_of_the_host(numItermax="numIterMax"):
        problem = _asked_for(call)
        run = _in_tens(call, problem)
    if call.warn and not run.converged:
        warnings.warn(NOT_CONVERGED, stacklevel=4)
    log_v, log_u = log_scalings(problem, run.solution)
    answer = (_loss(problem, run.solution),) if wants_loss else (log_u, log_v)
    if call.log:
        plan = lazy_plan(transposed(call.M), log_u, log_v, problem.reg)
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


def _in_tens(call: _Call, problem: Problem) -> _Run:
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
