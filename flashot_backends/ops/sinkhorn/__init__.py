"""Entropic optimal transport: ``solve`` a problem, or take the ``softmin`` that every solver is made of.

Cuturi, "Sinkhorn distances", NeurIPS 2013; log-domain updates as in Peyré and Cuturi, "Computational Optimal
Transport", 2019, section 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from ..arrays import framework
from .costs import DenseCost, PointCloud

if TYPE_CHECKING:
    from .solution import Solution
    from .transforms import CTransform

_repeat: Any = None  # the module that knows calls like earlier ones, once a kernel has said that it can repeat itself

__all__ = ["DenseCost", "PointCloud", "Solution", "c_transform", "softmin", "solve"]


@overload
def solve(cost: PointCloud | DenseCost, a: Any = None, b: Any = None, *, epsilon: Any, **options: Any) -> Solution: ...


@overload
def solve(
    cost: Sequence[PointCloud | DenseCost], a: Any = None, b: Any = None, *, epsilon: Any, **options: Any
) -> list[Solution]: ...


def solve(  # type: ignore[misc]
    cost: Any,
    a: Any = None,
    b: Any = None,
    *,
    epsilon: Any,
    reach: Any = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
    check_every: int = 10,
    acceleration: str | None = "auto",
    init: tuple[Any, Any] | None = None,
    gradient: str = "unrolled",
    gradient_tolerance: float | None = None,
    precision: str | None = None,
    backend: str | Sequence[str] | None = None,
    norm: str = "l1",
) -> Any:
    """Solve entropic optimal transport, min ⟨P, C⟩ + ε KL(P | a bᵀ) over the plans with marginals a and b.

    With a ``reach`` ρ a side may miss its marginal, at the price ρ KL(P1 | a).

    Parameters
    ----------
    cost : PointCloud or DenseCost, or a list of them
        Costs of shape (..., n, m). Every element of the batch is solved as it would be alone. A list (as
        ``PointCloud.ragged`` makes it) holds problems of different sizes (n_k, m_k): those of similar size are solved
        in one batch, and what comes back is a list of solutions. Weights and starting points are lists too, ε is one
        number or one for each.
    a, b : arrays (..., n) and (..., m), optional
        Weights of equal mass (of any mass where a side has a reach), in the cost's dtype (float32 too for 16-bit
        costs); uniform, of mass 1, if left out. Zero weights are allowed.
    epsilon : float or array (...)
        Regularisation, in the unit of the cost.
    reach : float, or pair (rows, columns) of float, array (...) or None, optional
        Strength ρ of the penalty ρ KL(P1 | a) on rows and ρ KL(Pᵀ1 | b) on columns, in the unit of the cost; one number
        holds for both. None and infinity: the marginal is binding. No gradient goes through it. Before every look, f
        and −g are moved by the constant that is best, so that large reaches converge as fast as binding marginals.
    max_iterations, tolerance, check_every, norm
        Stop when the error ‖Pᵀ1 − b‖ in the norm "l1" or "l2", looked at after iterations 1, 1 + check_every, …, is
        below the tolerance (with a reach: see ``Solution.error``). ``tolerance=0`` runs exactly ``max_iterations``.
    acceleration : "auto", "overrelaxation", "annealing" or None
        How to get there in fewer iterations; where that is, does not change, and no iteration lowers the dual.
        "overrelaxation" goes beyond each update, by factors that follow from the errors seen; an iteration that is
        looked at is plain, and while convergence is slow only every second look (or fourth…, up to 32 iterations) takes
        place. "annealing" begins with ten relaxed iterations under each of 4ᵏε, …, 4ε, from the costs' deviation down;
        they count, and pay where ε is below a thousandth of the costs. "auto": over-relaxation; but ``tolerance=0``
        asks for a number of iterations, and they are plain. None: plain alternating iterations.
    init : (f, g), optional
        Potentials to start from, (..., n) and (..., m). The first update makes g from f.
    gradient : "unrolled", "envelope" or "implicit"
        "unrolled": the derivative of the iterations that were run, in memory that grows by n + m numbers an iteration
        (twice that where updates are relaxed, or a side has a reach).
        The others are derivatives of the fixed point, whatever led there, in memory that does not grow, and are as
        right as the solution has converged. "implicit": of every result, by conjugate gradients on streamed products;
        second derivatives too. Only f_i + g_j is determined by the problem: f and g alone are differentiated as if
        ⟨a, f⟩ − ⟨b, g⟩ were held. "envelope": of ``value()`` alone, one pass over the pairs; other results refuse a
        backward pass.
    gradient_tolerance : float, optional
        Relative residual of the linear system of "implicit"; 1e-10 in float64 and 1e-6 in float32 if left out.
    precision : "high" or "fast", optional
        "fast" allows products of 11-bit numbers. Defaults to the setting.
    backend : str or sequence of str, optional
        Kernels to use: a name must apply; from a sequence the first that applies is taken. Defaults to the setting.

    Returns
    -------
    Solution, or a list of them
        Potentials and the plan's products, differentiable by x, y, M, a, b and ε (unrolled: by init too) for torch
        inputs, in memory linear in the points. Factors of over-relaxation are held.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, shape, dtype, device or value; the message says which and what is accepted.
    """
    global _repeat
    like = None  # what an earlier call may have had in common with this one
    if _repeat is not None and reach is None and init is None and gradient == "unrolled":
        options = (max_iterations, tolerance, check_every, acceleration, gradient_tolerance, precision, backend, norm)
        like = _repeat.layout(cost, a, b, epsilon, options)
        if like is not None and (found := _repeat.again(like, cost, a, b, epsilon)) is not None:
            return found
    if _holds_jax_arrays(cost) or (isinstance(cost, list | tuple) and any(map(_holds_jax_arrays, cost))):
        from . import jax_ops

        return jax_ops.solve(
            cost, a, b, epsilon=epsilon, reach=reach, max_iterations=max_iterations, tolerance=tolerance,
            check_every=check_every, acceleration=acceleration, init=init, gradient=gradient,
            gradient_tolerance=gradient_tolerance, precision=precision, backend=backend, norm=norm,
        )  # fmt: skip
    from . import ragged
    from .control import backend_names, check_gradient, checked_control, starting_point
    from .problem import make_problem
    from .run import Run, run
    from .solution import Solution

    check_gradient(gradient, gradient_tolerance)
    control = checked_control(max_iterations, tolerance, check_every, norm, acceleration, precision)
    how = Run(control, gradient, gradient_tolerance, precision or "", backend_names(backend))
    if isinstance(cost, list | tuple):
        return ragged.solve(cost, a, b, epsilon, reach, init, how)
    problem = make_problem(cost, a, b, epsilon, reach)
    start = starting_point(problem, init)
    outcome, kernel = run(problem, start, how), how.kernel(problem)
    if outcome.again is not None:
        if _repeat is None:
            from . import repeat as _repeat
        elif like is not None:
            _repeat.keep(like, cost, a, b, problem, start, outcome.again, kernel)
    return Solution(cost, problem, outcome.state, kernel, outcome.fixed)


def softmin(
    cost: PointCloud | DenseCost,
    h: Any,
    epsilon: Any,
    *,
    precision: str | None = None,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """Return −ε log Σ_j exp(h_j − C_ij/ε), (..., n), for h of shape (..., m); h = −inf leaves a column out.

    Differentiable by the cost's arrays, h and ε for torch inputs, streamed in both directions. Errors as in ``solve``.
    """
    if _holds_jax_arrays(cost):
        from . import jax_ops

        return jax_ops.softmin(cost, h, epsilon, backend=backend)
    from . import torch_ops
    from .control import backend_names
    from .problem import make_softmin

    *arguments, shaped = make_softmin(cost, h, epsilon)
    return cost.restore(shaped(torch_ops.softmin(*arguments, precision or "", backend_names(backend))))


def c_transform(cost: PointCloud | DenseCost, g: Any, *, backend: str | Sequence[str] | None = None) -> CTransform:
    """Return min_j C_ij − g_j and a column j that attains it, ``values`` and ``indices`` (..., n), for g (..., m).

    The hard minimum that a softmin tends to as ε falls (Peyré and Cuturi, "Computational Optimal Transport", 2019,
    section 5.1), streamed. g_j = −inf leaves a column out. Of columns that are equal to rounding, any may be taken.
    Values are differentiable by the cost's arrays and g for torch inputs, at the column that attains the minimum.
    ``c_transform(cost.T, f)`` is the transform of the rows' potential. Errors as in ``solve``.
    """
    if _holds_jax_arrays(cost):
        raise TypeError("cost holds JAX arrays; accepted by c_transform are numpy, torch and cupy arrays")
    from . import transforms

    return transforms.c_transform(cost, g, backend)


def _holds_jax_arrays(cost: Any) -> bool:
    return isinstance(cost, PointCloud | DenseCost) and framework(cost.tensors[0]) == "jax"


def __getattr__(name: str) -> Any:
    if name == "Solution":
        from .solution import Solution

        return Solution
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
