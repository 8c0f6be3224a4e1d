"""POT's unbalanced entropic solvers with ``method="flash"``: marginals that may be missed at the price of a divergence.

The host minimises ⟨P, M⟩ + reg KL(P | c) + reg_m KL(P1 | a) + reg_m KL(Pᵀ1 | b). For "kl" without c, c = a bᵀ, which is
the operation's problem. For "entropy" c is 1: with φ = reg_m/(reg_m + reg) that is the operation's problem for the
weights a^φ and b^φ, as penalties and entropy are Σ p log p less linear terms. Any other c is "entropy" for the costs
M − reg log c.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from flashot_backends.adapters.pot_arrays import (
    Problem,
    by_method,
    check_control,
    check_kinds,
    defines,
    floating,
    in_dtype,
    is_lazy,
    lazy_plan,
    logarithm,
    operation,
    print_errors,
    read,
    shown,
    solved,
    start_from,
    utils,
    warn_unless,
    wide,
    words_of_the_host,
)

PARAMETERS = ("a", "b", "M", "reg", "reg_m", "method", "reg_type", "c", "warmstart")
OPTIONS = ("backend", "precision")
REFERENCES = ("kl", "entropy")
COSTS = ("linear", "total")


def adapt(module: Any, host: Any) -> None:
    """Add the method "flash" to the functions of POT that this leaf module defines."""
    for name in ("sinkhorn_unbalanced", "sinkhorn_unbalanced2"):
        if defines(module, name):
            answer = functools.partial(_answer, wants_plan=name[-1] != "2")
            host.wrap(module, name, functools.partial(by_method, answer=answer), PARAMETERS)


def _answer(given: dict[str, Any], options: dict[str, Any], wants_plan: bool) -> Any:
    """The plan, or the cost, as the host gives it."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        accepted = ", ".join((*(name for name in given if name != "kwargs"), *OPTIONS))
        raise TypeError(f"method='flash' got the unknown argument {unknown[0]!r}; accepted are {accepted}")
    if given.get("returnCost", "linear") not in COSTS:
        raise ValueError(f"returnCost is {given['returnCost']!r}; accepted is one of {COSTS}")
    check_control(numItermax=given["numItermax"], stopThr=given["stopThr"])
    M, reg_type = given["M"], given["reg_type"]
    relaxed = understand(M, given["a"], given["b"], given["reg"], given["reg_m"], reg_type, given["c"])
    with words_of_the_host(reach="reg_m"):
        start = relaxed.start(given["warmstart"])
        solution = relaxed.solve("autodiff", start, given["numItermax"], given["stopThr"], options)
    problem = relaxed.problem
    if given["verbose"] and not problem.histograms:
        print_errors(problem, solution)
    costs: dict[str, Any] = {}
    if not problem.histograms and (given["log"] or not wants_plan):
        costs = relaxed.costs(solution)
    if problem.histograms:
        result = relaxed.linear(solution)
    elif wants_plan:
        result = relaxed.lazy_plan(solution) if is_lazy(M) else relaxed.plan(solution)
    else:
        result = costs["cost" if given["returnCost"] == "linear" else "total_cost"]
    if not given["log"]:
        return result
    log_u, log_v = relaxed.log_scalings(solution)
    log = {"err": relaxed.errors(solution), "logu": log_u, "logv": log_v}
    return result, log if problem.histograms else log | costs


@dataclass(frozen=True)
class Relaxed:
    """A problem whose marginals may be missed. ``problem`` is the operation's, a and b are the host's weights."""

    problem: Problem
    M: Any
    a: Any
    b: Any
    reach: tuple[float, float]
    product: bool  # the plan is compared with a bᵀ
    dense: Any = None  # the host's costs, where c is part of the operation's

    def start(self, warmstart: Any) -> Any:
        """Row potentials from a pair (log u, log v)."""
        if warmstart is None:
            return None
        tail = self.b.shape[1:]
        expected = tuple((size, *tail) for size in self.problem.shape)
        try:
            rows, columns = warmstart
            found = tuple(rows.shape), tuple(columns.shape)
        except (AttributeError, TypeError, ValueError):
            raise TypeError(f"warmstart is a {type(warmstart).__name__}; accepted is a pair (log u, log v)") from None
        if found != expected:
            raise ValueError(f"warmstart has shapes {found}; accepted are {expected}")
        if not self.product:
            return start_from(self.problem, rows)
        return self.problem.enter(self.problem.reg * rows)

    def solve(self, grad: str, f: Any, iterations: int, tolerance: float, options: dict[str, Any]) -> Any:
        """The operation's solution, with the host's warning where it falls short."""
        how = {"reach": self.reach, "acceleration": "auto"} | options
        solution, converged = solved(self.problem, grad, f, iterations, tolerance, envelope="implicit", **how)
        warn_unless(self.problem.leave(converged))
        return solution

    def log_scalings(self, solution: Any) -> tuple[Any, Any]:
        """log u and log v: the plan is u exp(−M/reg) c v."""
        f, g = (self.problem.turned(self.problem.leave(part)) for part in (solution.f, solution.g))
        first, second = self._base()
        return first + f / self.problem.reg, second + g / self.problem.reg

    def _base(self) -> tuple[Any, Any]:
        """What of log u and log v is no potential: the operation's weights, unless c is their product."""
        if self.product:
            return 0.0, 0.0
        first, second = (logarithm(self.problem.nx, weight) for weight in (self.problem.a, self.problem.b))
        return (first[:, None] if self.problem.histograms else first), second

    def plan(self, solution: Any) -> Any:
        """The plan as a matrix."""
        return in_dtype(self.problem.leave(solution.plan()), self.problem.dtype)

    def lazy_plan(self, solution: Any, grad: str = "autodiff") -> Any:
        """The plan as something to slice."""
        log_u, log_v = (shown(part, grad) for part in self.log_scalings(solution))
        if self.product:
            nx, weights = self.problem.nx, (self.problem.a, self.problem.b)
            log_a, log_b = (shown(logarithm(nx, weight), grad) for weight in weights)
            log_u, log_v = log_u + log_a, log_v + log_b
        return lazy_plan(shown(self.M, grad), log_u, log_v, shown(self.problem.reg, grad))

    def linear(self, solution: Any) -> Any:
        """⟨P, M⟩."""
        if self.dense is None:
            return in_dtype(self.problem.leave(solution.linear_cost()), self.problem.dtype)
        nx, plan = self.problem.nx, self.problem.leave(solution.plan())
        return in_dtype(nx.sum(nx.where(plan > 0, plan * wide(self.dense), 0 * plan)), self.problem.dtype)

    def costs(self, solution: Any, mass: bool = False) -> dict[str, Any]:
        """The host's two costs. Its divergences are Σ p log(p/q), and only with ``mass`` Σ p log(p/q) − Σp + Σq.

        log(P/c) is (F + G − M)/reg for F = reg log u and G = reg log v, so that ⟨P, M⟩ cancels out of the total.
        """
        nx, problem = self.problem.nx, self.problem
        marginals = [problem.leave(part) for part in solution.marginals()]
        total = 0.0
        for present, potential in zip(marginals, self.log_scalings(solution), strict=True):
            potential = nx.where(present > 0, potential, 0 * present)  # -inf without mass
            total = total + problem.reg * nx.sum(present * potential)
        if mass:
            total = total - problem.reg * nx.sum(marginals[0])  # less Σ P; what Σ c is, does not matter to 1
        for present, weight, strength in zip(marginals, (wide(self.a), wide(self.b)), self.reach, strict=True):
            if strength == math.inf:
                continue
            there = present > 0
            ratio = nx.where(there, present, 0 * present + 1) / nx.where(there, weight, 0 * weight + 1)
            total = total + strength * nx.sum(present * nx.log(ratio))
            if mass:
                total = total + strength * (nx.sum(weight) - nx.sum(present))
        return {"cost": self.linear(solution), "total_cost": in_dtype(total, problem.dtype)}

    def errors(self, solution: Any) -> list[Any]:
        """What the operation saw at its looks; of several histograms, where they ended."""
        if self.problem.histograms or not hasattr(solution, "errors"):
            return [self.problem.leave(solution.error)]
        return [error for error in self.problem.leave(solution.errors) if error == error]


def understand(M: Any, a: Any, b: Any, reg: Any, reg_m: Any, reg_type: str, c: Any) -> Relaxed:
    """The host's arguments as a problem of the operation."""
    if not isinstance(reg_type, str) or reg_type.lower() not in REFERENCES:
        raise ValueError(f"reg_type is {reg_type!r}; accepted with method='flash' is one of {REFERENCES}")
    problem = read(M, a, b, reg)
    entropy = reg_type.lower() == "entropy" or problem.histograms > 0
    if c is not None and entropy:
        why = "b holds several histograms" if problem.histograms else "reg_type is 'entropy'"
        raise ValueError(f"c is given and {why}; accepted with that is None")
    reach, weights = _reach(reg_m), (problem.a, problem.b)
    if c is None and not entropy:
        return Relaxed(problem, M, *weights, reach, True)
    a, b = (_powered(problem, weight, strength) for weight, strength in zip(weights, reach, strict=True))
    problem, dense = dataclasses.replace(problem, a=a, b=b), None
    if c is not None:
        problem, dense = _compared_with(problem, M, c)
    return Relaxed(problem, M, *weights, reach, False, dense)


def _compared_with(problem: Problem, M: Any, c: Any) -> tuple[Problem, Any]:
    """The problem for the costs M − reg log c, and M."""
    if is_lazy(M):
        raise ValueError("c is given and M is a lazy cost; accepted with it is None")
    M, c = utils().list_to_array(M, c)
    check_kinds(M=M, c=c)
    M, c = floating(M, c)
    if tuple(c.shape) != problem.shape:
        raise ValueError(f"c has shape {tuple(c.shape)}; accepted is {problem.shape}")
    nx, there = problem.nx, c > 0
    costs = M - problem.reg * nx.log(nx.where(there, c, 0 * c + 1))
    costs = in_dtype(nx.where(there, costs, 0 * c + math.inf), problem.dtype)
    return dataclasses.replace(problem, cost=operation().DenseCost(problem.enter(costs))), M


def _powered(problem: Problem, weight: Any, strength: float) -> Any:
    """a^φ, φ = reg_m/(reg_m + reg); nothing stays nothing, and has no derivative."""
    if strength == math.inf:
        return weight
    nx, there = problem.nx, weight > 0
    power = strength / (strength + problem.reg)
    whole = wide(nx.where(there, weight, 0 * weight + 1)) ** power
    return nx.where(there, in_dtype(whole, wide(weight).dtype), 0 * wide(weight))


def _reach(reg_m: Any) -> tuple[float, float]:
    """The strengths of both penalties, from a number or one or two of them."""
    if getattr(reg_m, "requires_grad", False):
        raise ValueError("reg_m requires a gradient; accepted are numbers: no derivative by it is given")
    try:
        parts = [reg_m] if not hasattr(reg_m, "__len__") or getattr(reg_m, "ndim", 1) == 0 else list(reg_m)
        numbers = [math.inf if part is None else float(part) for part in parts]
    except (TypeError, ValueError):
        raise TypeError(f"reg_m is {reg_m!r}; accepted are positive numbers, one or a pair") from None
    if len(numbers) not in (1, 2) or not all(number > 0 for number in numbers):
        raise ValueError(f"reg_m is {reg_m!r}; accepted are positive numbers, one or a pair")
    return numbers[0], numbers[-1]


def result(M: Any, a: Any, b: Any, request: Any, wants_plan: bool) -> Any:
    """``ot.solve`` with ``unbalanced``: for "KL" the host's Sinkhorn, for "entropy" what its L-BFGS minimises."""
    relaxed = understand(M, a, b, request.reg, request.unbalanced, request.reg_type, request.c)
    names = {"max_iterations": "max_iter", "tolerance": "tol", "init": "potentials_init", "reach": "unbalanced"}
    with words_of_the_host(**names, warmstart="potentials_init"):
        start = relaxed.start(request.potentials_init)
        solution = relaxed.solve(request.grad, start, request.max_iter, request.tol, {})
    costs, grad = relaxed.costs(solution, mass=request.reg_type == "entropy"), request.grad
    if request.verbose:
        print_errors(relaxed.problem, solution)
    return utils().OTResult(
        potentials=tuple(shown(part, grad) for part in relaxed.log_scalings(solution)),
        value=costs["total_cost"],
        value_linear=shown(costs["cost"], grad),
        plan=shown(relaxed.plan(solution), grad) if wants_plan else None,
        lazy_plan=None if wants_plan else relaxed.lazy_plan(solution, grad),
        backend=relaxed.problem.nx,
    )
