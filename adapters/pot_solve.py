"""POT's unified solvers with ``method="flash"``: ``ot.solve``, ``ot.solve_sample``, and batches of both.

Values follow the host's conventions, with P log P for 0 where P is 0: ⟨P, M⟩ + reg Σ P log(P / a bᵀ) for "KL" and
⟨P, M⟩ + reg Σ P log P for "entropy". All four derivatives that the host names are those of what is returned.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashot_backends.adapters import pot_unbalanced
from flashot_backends.adapters.pot_arrays import (
    GRADS,
    LAZY_METRICS,
    Problem,
    asked,
    backend,
    check_control,
    check_kinds,
    check_values,
    defines,
    detached,
    filled,
    floating,
    in_dtype,
    inside,
    is_flash,
    is_lazy,
    lazy_cost,
    lazy_plan,
    log_scalings,
    logarithm,
    operation,
    print_errors,
    read,
    regularisation,
    say_once,
    shown,
    solved,
    start_from,
    utils,
    warn_unless,
    way_there_and_back,
    wide,
    words_of_the_host,
)
from flashot_backends.ops.arrays import framework

PARAMETERS = {
    "solve": ("M", "a", "b", "reg"),
    "solve_sample": ("X_a", "X_b", "a", "b", "metric", "reg"),
    "solve_batch": ("M", "reg", "a", "b", "max_iter", "tol"),
    "solve_sample_batch": ("X_a", "X_b", "reg", "a", "b", "metric", "p", "max_iter", "tol"),
}
REG_TYPES = ("kl", "entropy")
WORDS = {"max_iterations": "max_iter", "tolerance": "tol", "init": "potentials_init", "warmstart": "potentials_init"}


def adapt(module: Any, host: Any) -> None:
    """Add the method "flash" to the functions of POT that this leaf module defines."""
    ways = {"solve": _solve, "solve_sample": _solve_sample, "solve_batch": _batch, "solve_sample_batch": _sample_batch}
    for name, way in ways.items():
        if defines(module, name):
            host.wrap(module, name, functools.partial(_routed, answer=way), PARAMETERS[name])
    if defines(module, "bregman_log_projection_batch"):
        projection = functools.partial(_projection, host=host)
        host.wrap(module, "bregman_log_projection_batch", projection, ("K", "a", "b", "nx", "max_iter", "tol", "grad"))


def _routed(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    name, of_samples = "method" if "method" in signature.parameters else "solver", answer is _solve_sample  # POT 0.9.6

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        method = bound.arguments[name]
        if is_flash(method) or (of_samples and method is None and asked.get()):
            return answer(bound.arguments, original)
        if is_lazy(bound.arguments.get("M")):
            raise ValueError(f"M is a lazy cost and method is {method!r}; accepted with it is method='flash'")
        return original(*args, **kwargs)

    return routed


# One problem


@dataclass(frozen=True)
class Request:
    """What is asked of a problem, by the host's names."""

    reg: Any
    reg_type: str
    unbalanced: Any
    c: Any
    potentials_init: Any
    max_iter: int
    tol: float
    verbose: bool
    grad: str


def _request(given: dict[str, Any]) -> Request:
    reg_type, unbalanced, c = _reg_type(given["reg_type"]), given["unbalanced"], given["c"]
    if given["reg"] is None or _is_zero(given["reg"]):
        raise ValueError(f"reg is {given['reg']!r}; accepted with method='flash' is a positive number")
    if unbalanced is not None and str(given["unbalanced_type"]).lower() != "kl":
        raise ValueError(f"unbalanced_type is {given['unbalanced_type']!r}; accepted with method='flash' is 'KL'")
    if c is not None and (unbalanced is None or reg_type == "entropy"):
        raise ValueError("c is given; accepted with method='flash' is None, but for reg_type 'KL' with unbalanced")
    if given["plan_init"] is not None:
        raise ValueError("plan_init is given; accepted with method='flash' is None: it starts from potentials_init")
    grad = _grad(given.get("grad", "autodiff"))
    max_iter = 1000 if given["max_iter"] is None else given["max_iter"]
    tol = 1e-9 if given["tol"] is None else given["tol"]
    check_control(max_iter=max_iter, tol=tol)
    return Request(
        given["reg"], reg_type, unbalanced, c, given["potentials_init"], max_iter, tol, given["verbose"], grad
    )


def _reg_type(reg_type: Any) -> str:
    if not isinstance(reg_type, str) or reg_type.lower() not in REG_TYPES:
        raise ValueError(f"reg_type is {reg_type!r}; accepted with method='flash' is one of {REG_TYPES}")
    return reg_type.lower()


def _grad(grad: Any) -> str:
    if grad not in GRADS:
        raise ValueError(f"grad is {grad!r}; accepted is one of {GRADS}")
    return str(grad)


def _is_zero(reg: Any) -> bool:
    return isinstance(reg, int | float) and reg == 0


def _solve(given: dict[str, Any], original: Callable[..., Any]) -> Any:
    """``ot.solve``; for a lazy cost the plan is lazy."""
    M = given["M"]
    return _result(M, given["a"], given["b"], _request(given), wants_plan=not is_lazy(M))


def _solve_sample(given: dict[str, Any], original: Callable[..., Any]) -> Any:
    """``ot.solve_sample``. Debiasing is the host's own, of values of ours."""
    X_a, X_b = given["X_a"], given["X_b"]
    if given.get("scaler") is not None:
        X_a, X_b = utils().apply_scaler(X_a, X_b, scaler=given["scaler"])
        given["scaler"] = None
    if given.get("debias"):
        with inside():
            return original(**given | {"X_a": X_a, "X_b": X_b, "method": None})
    request, lazy = _request(given), bool(given["lazy"])
    M = _cost_of_samples(X_a, X_b, given["metric"], lazy, dense=request.c is not None)
    return _result(M, given["a"], given["b"], request, wants_plan=not lazy)


def _cost_of_samples(X: Any, Y: Any, metric: Any, lazy: bool, dense: bool) -> Any:
    """A lazy cost where the operation knows the metric; else the host's matrix."""
    if metric in LAZY_METRICS and not dense:
        return lazy_cost(X, Y, metric)
    if lazy:
        why = "c is given" if dense else f"metric is {metric!r}"
        raise ValueError(f"{why}; accepted with lazy=True is one of the metrics {LAZY_METRICS}, without c")
    return utils().dist(*utils().list_to_array(X, Y), metric=metric)


def _result(M: Any, a: Any, b: Any, request: Request, wants_plan: bool) -> Any:
    """The host's ``OTResult``."""
    if request.grad == "detach":
        M, a, b = (detached(part) for part in (M, a, b))
        request = dataclasses.replace(request, reg=detached(request.reg), c=detached(request.c))
    if request.unbalanced is not None:
        return pot_unbalanced.result(M, a, b, request, wants_plan)
    problem, grad = read(M, a, b, request.reg), request.grad
    if problem.histograms:
        raise ValueError(f"b has shape {tuple(problem.b.shape)}; accepted is ({problem.shape[1]},)")
    with words_of_the_host(**WORDS):
        start = start_from(problem, _rows_of(request.potentials_init, problem))
        solution, converged = solved(problem, grad, start, request.max_iter, request.tol, norm="l2")
    warn_unless(problem.leave(converged))
    if request.verbose:
        print_errors(problem, solution)
    log_u, log_v = (shown(part, grad) for part in log_scalings(problem, solution))
    plan = shown(in_dtype(problem.leave(solution.plan()), problem.dtype), grad) if wants_plan else None
    return utils().OTResult(
        potentials=(log_u, log_v),
        value=in_dtype(_value(problem, solution, request.reg_type), problem.dtype),
        value_linear=shown(in_dtype(problem.leave(solution.linear_cost()), problem.dtype), grad),
        plan=plan,
        lazy_plan=None if wants_plan else lazy_plan(shown(M, grad), log_u, log_v, shown(problem.reg, grad)),
        backend=problem.nx,
    )


def _value(problem: Problem, solution: Any, reg_type: str) -> Any:
    """The operation's values hold the masses Σ P, here that of a, and Σ a Σ b; the host's do not."""
    mass, other = (problem.nx.sum(wide(weight)) for weight in (problem.a, problem.b))
    without = mass if reg_type == "entropy" else mass - mass * other
    return problem.leave(solution.value(reg_type)) + problem.reg * without


def _rows_of(potentials: Any, problem: Problem) -> Any:
    """log u to start from, 0 as in the host's loop where none is given."""
    if potentials is None:
        return filled(problem.nx, problem.shape[:1], 0.0, wide(problem.a))
    try:
        rows, columns = potentials
        found = tuple(rows.shape), tuple(columns.shape)
    except (AttributeError, TypeError, ValueError):
        kind = type(potentials).__name__
        raise TypeError(f"potentials_init is a {kind}; accepted is a pair (log_u, log_v)") from None
    if found != tuple((size,) for size in problem.shape):
        n, m = problem.shape
        raise ValueError(f"potentials_init has shapes {found}; accepted are (({n},), ({m},))")
    return rows


# Batches: the host updates rows first, so columns are exact at the end. The operation solves the transposed problems.


@dataclass(frozen=True)
class Batch:
    """A batch of problems: weights (B, n) and (B, m), and the operation's cost, (B, m, n)."""

    a: Any
    b: Any
    reg: Any
    cost: Any
    dtype: Any
    nx: Any
    enter: Callable[[Any], Any]
    leave: Callable[[Any], Any]

    @property
    def weights(self) -> dict[str, Any]:
        """The arguments a and b of the operation."""
        return {"a": self.enter(self.b), "b": self.enter(self.a)}

    def detached(self) -> Batch:
        """The same numbers, which depend on nothing."""
        turned = Problem(self.b, self.a, (0, 0), self.reg, self.cost, self.dtype, self.nx, self.enter, self.leave)
        alone = turned.detached()
        return dataclasses.replace(self, a=alone.b, b=alone.a, reg=alone.reg, cost=alone.cost)

    @property
    def start(self) -> Any:
        """Potentials of the host's v = 1."""
        return self.enter(self.reg * -logarithm(self.nx, self.b, massless=0.0))

    def log_scalings(self, solution: Any) -> tuple[Any, Any]:
        """log u (B, n) and log v (B, m)."""
        return (
            logarithm(self.nx, self.a) + self.leave(solution.g) / self.reg,
            logarithm(self.nx, self.b) + self.leave(solution.f) / self.reg,
        )


def _read_batch(tensors: dict[str, Any], make: Callable[..., Any], a: Any, b: Any, reg: Any) -> Batch:
    arrays = {name: value for name, value in tensors.items() if value is not None}
    weights = {name: value for name, value in (("a", a), ("b", b)) if value is not None}
    check_kinds(**arrays, **weights)
    parts = floating(*(utils().list_to_array(part) for part in (*arrays.values(), *weights.values())))
    arrays, weights = dict(zip(arrays, parts, strict=False)), dict(zip(weights, parts[len(arrays) :], strict=True))
    first = next(iter(arrays.values()))
    nx, (enter, leave) = backend().get_backend(first), way_there_and_back(first)
    for name, array in arrays.items():
        if len(array.shape) != 3:
            raise ValueError(f"{name} has shape {tuple(array.shape)}; accepted are three axes, the first for the batch")
    with words_of_the_host(**{name: name for name in arrays}):
        cost = make(*(enter(array) for array in arrays.values()))
    batch, n, m = cost.shape
    for name, size in (("a", n), ("b", m)):
        weight = weights.setdefault(name, filled(nx, (batch, size), 1 / size, first))
        if tuple(weight.shape) != (batch, size):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}; accepted is ({batch}, {size})")
    return Batch(weights["a"], weights["b"], regularisation(reg), cost.T, first.dtype, nx, enter, leave)


def _batch(given: dict[str, Any], original: Callable[..., Any]) -> Any:
    """``ot.solve_batch``."""
    return _batch_result({"M": given["M"]}, operation().DenseCost, given)


def _sample_batch(given: dict[str, Any], original: Callable[..., Any]) -> Any:
    """``ot.solve_sample_batch``: points where the operation knows the metric, else the host's matrices."""
    metric = _metric_of_batch(given["metric"], given["p"])
    if metric is not None:
        make = functools.partial(operation().PointCloud, metric=metric)
        return _batch_result({"X_a": given["X_a"], "X_b": given["X_b"]}, make, given)
    from ot.batch import dist_batch

    M = dist_batch(given["X_a"], given["X_b"], metric=given["metric"], p=given["p"])
    return _batch_result({"M": M}, operation().DenseCost, given)


def _metric_of_batch(metric: Any, p: Any) -> str | None:
    name = str(metric).lower()
    if name == "minkowski":
        return {1: "l1", 2: "euclidean"}.get(p)
    return name if name in ("sqeuclidean", "euclidean") else None


def _batch_result(tensors: dict[str, Any], make: Callable[..., Any], given: dict[str, Any]) -> Any:
    if given["reg"] is None or _is_zero(given["reg"]):
        raise ValueError(f"reg is {given['reg']!r}; accepted with method='flash' is a positive number")
    reg_type, grad = _reg_type(given["reg_type"]), _grad("detach" if given["grad"] is None else given["grad"])
    check_control(max_iter=given["max_iter"], tol=given["tol"])
    batch = _read_batch(tensors, make, given["a"], given["b"], given["reg"])
    batch = batch.detached() if grad == "detach" else batch
    with words_of_the_host(**WORDS):
        solution, converged = solved(batch, grad, batch.start, given["max_iter"], given["tol"], norm="l2")
    warn_unless(batch.leave(converged))
    mass, other = (batch.nx.sum(wide(weight), axis=1) for weight in (batch.b, batch.a))
    without = mass if reg_type == "entropy" else mass - mass * other
    value = batch.leave(solution.value(reg_type)) + batch.reg * without
    iterations = batch.leave(solution.iterations).max() - 1
    return utils().OTResult(
        potentials=tuple(shown(part, grad) for part in batch.log_scalings(solution)),
        value=in_dtype(value, batch.dtype),
        value_linear=shown(in_dtype(batch.leave(solution.linear_cost()), batch.dtype), grad),
        plan=shown(in_dtype(batch.leave(solution.plan()), batch.dtype).swapaxes(-1, -2), grad),
        backend=batch.nx,
        log={"n_iter": iterations if framework(iterations) == "jax" else int(iterations)},
    )


def _projection(original: Callable[..., Any], host: Any) -> Callable[..., Any]:
    """The host's loop of ``solve_batch``, by itself: the same iterates in ``substitute``."""
    signature = inspect.signature(original)

    def routed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found = _projected(bound.arguments) if host.substituted else None
        return original(*args, **kwargs) if found is None else found

    return routed


def _projected(given: dict[str, Any]) -> dict[str, Any] | None:
    K, max_iter, tol = given["K"], given["max_iter"], given["tol"]
    try:
        if given["grad"] == "last_step":
            raise ValueError("grad is 'last_step', in which it leaves K out")
        check_control(max_iter=max_iter, tol=tol)
        K = detached(K) if given["grad"] == "detach" else K
        batch = _read_batch({"K": -K}, operation().DenseCost, given["a"], given["b"], 1.0)
        check_values(batch)
    except (TypeError, ValueError) as refusal:
        say_once(f"POT's bregman_log_projection_batch stays with POT: {refusal}")
        return None
    f, done, nx = batch.start, 0, batch.nx
    while done < max_iter:
        steps = 1 if done == 0 else min(10, max_iter - done)
        solution, _ = solved(batch, "autodiff", f, steps, 0.0, norm="l2")
        f, done = solution.f, done + steps
        if (done - 1) % 10 == 0 and bool(nx.max(batch.leave(solution.error)) < tol):
            break
    u, v = (in_dtype(part, batch.dtype) for part in batch.log_scalings(solution))
    log_T = K + u[:, :, None] + v[:, None, :]
    return {"T": nx.exp(log_T), "log_T": log_T, "n_iters": done - 1, "potentials": (u, v)}
