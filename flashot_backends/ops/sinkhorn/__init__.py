"""Entropic optimal transport: ``solve`` a problem, or take the ``softmin`` that every solver is made of.

Cuturi, "Sinkhorn distances", NeurIPS 2013; log-domain updates as in Peyré and Cuturi, "Computational Optimal
Transport", 2019, section 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..arrays import framework
from .costs import DenseCost, PointCloud

if TYPE_CHECKING:
    from .solution import Solution

__all__ = ["DenseCost", "PointCloud", "Solution", "softmin", "solve"]


def solve(
    cost: PointCloud | DenseCost,
    a: Any = None,
    b: Any = None,
    *,
    epsilon: Any,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
    check_every: int = 10,
    acceleration: str | None = "auto",
    init: tuple[Any, Any] | None = None,
    precision: str | None = None,
    backend: str | Sequence[str] | None = None,
    norm: str = "l1",
) -> Solution:
    """Solve entropic optimal transport, min ⟨P, C⟩ + ε KL(P | a bᵀ) over the plans with marginals a and b.

    Parameters
    ----------
    cost : PointCloud or DenseCost
        Costs of shape (..., n, m). Every element of the batch is solved as it would be alone.
    a, b : arrays (..., n) and (..., m), optional
        Weights of equal mass, in the cost's dtype (float32 too for 16-bit costs); uniform, of mass 1, if left out. Zero
        weights are allowed.
    epsilon : float or array (...)
        Regularisation, in the unit of the cost.
    max_iterations, tolerance, check_every, norm
        Stop when ‖Pᵀ1 − b‖ in the norm "l1" or "l2", looked at after iterations 1, 1 + check_every, …, is below the
        tolerance. ``tolerance=0`` runs exactly ``max_iterations``.
    acceleration : "auto" or None
        None asks for plain alternating iterations. So far "auto" runs those too.
    init : (f, g), optional
        Potentials to start from, (..., n) and (..., m). The first update makes g from f.
    precision : "high" or "fast", optional
        "fast" allows products of 11-bit numbers. Defaults to the setting.
    backend : str or sequence of str, optional
        Kernels to use: a name must apply; from a sequence the first that applies is taken. Defaults to the setting.

    Returns
    -------
    Solution
        Potentials and the plan's products, differentiable by x, y, M, a, b, ε and init for torch inputs: exactly the
        derivative of the iterations run, in memory linear in the points.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, shape, dtype, device or value; the message says which and what is accepted.
    """
    if _holds_jax_arrays(cost):
        from . import jax_ops

        return jax_ops.solve(
            cost, a, b, epsilon=epsilon, max_iterations=max_iterations, tolerance=tolerance, check_every=check_every,
            acceleration=acceleration, init=init, precision=precision, backend=backend, norm=norm,
        )  # fmt: skip
    from . import torch_ops
    from .control import backend_names, checked_control, starting_point
    from .problem import make_problem
    from .solution import Solution
    from .solver import State

    control = checked_control(max_iterations, tolerance, check_every, norm, acceleration, precision)
    problem = make_problem(cost, a, b, epsilon)
    f = starting_point(problem, init)
    how = (problem.metric, precision or "", backend_names(backend))
    tensors = (problem.x, problem.y, problem.a, problem.b, problem.epsilon, f)
    return Solution(cost, problem, State(*torch_ops.solve(*tensors, *control, *how)), how)


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


def _holds_jax_arrays(cost: Any) -> bool:
    return isinstance(cost, PointCloud | DenseCost) and framework(cost.tensors[0]) == "jax"


def __getattr__(name: str) -> Any:
    if name == "Solution":
        from .solution import Solution

        return Solution
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
