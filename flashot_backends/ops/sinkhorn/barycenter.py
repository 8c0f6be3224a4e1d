"""Barycenters of histograms on fixed points: iterative Bregman projections in the log domain, made of softmins.

Benamou, Carlier, Cuturi, Nenna and Peyré, "Iterative Bregman projections for regularized transportation problems",
2015, section 3.2; debiased as in Janati, Cuturi and Gramfort, "Debiased Sinkhorn barycenters", 2020. With
K = exp(−C/ε), u_k = a_k/(K v_k), q = Π (Kᵀu_k)^(λ_k) and v_k = q/(Kᵀu_k); debiased, q is multiplied by d, for which
d = √(d q/(Kᵀd)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arrays import framework
from . import softmin
from .costs import DenseCost, PointCloud

DEBIASING_STEPS = 10  # after every iteration


class Barycenter(NamedTuple):
    """log q (m,), iterations run, the errors at every look, and whether the last of them is below the tolerance."""

    log_weights: Any
    iterations: int
    errors: list[Any]
    converged: bool


def barycenter(
    cost: PointCloud | DenseCost,
    histograms: Any,
    mixture: Any,
    *,
    epsilon: Any,
    max_iterations: int,
    tolerance: float,
    least_iterations: int = 0,
    debias: bool = False,
    correction: int = 0,
    backend: str | Sequence[str] | None = None,
) -> Barycenter:
    """Return the weights q on the columns that are nearest to all histograms on the rows, Σ_k λ_k OT_ε(a_k, q) least.

    Parameters
    ----------
    cost : PointCloud or DenseCost
        Of shape (n, m).
    histograms, mixture : arrays (k, n) and (k,)
        The a_k, which may hold zeros, and λ.
    epsilon : float or array ()
        Regularisation, in the unit of the cost.
    max_iterations, tolerance, least_iterations
        Stop when the error, looked at after iterations 2, 12, 22, …, is below the tolerance, later than after
        ``least_iterations``. The error is how far the columns' marginals deviate from one another, summed over columns:
        standard deviations with ``k − correction`` in the denominator.
    debias : bool
        Whether to take off the blur that ε brings.
    backend : str or sequence of str, optional
        As in ``solve``.

    Returns
    -------
    Barycenter
        Differentiable through the iterations by the cost's arrays, histograms, λ and ε, in memory that grows by
        k (n + m) numbers an iteration, for torch and JAX inputs.
    """
    xp = _functions_for(cost)
    there = histograms > 0
    log_a = xp.where(there, xp.log(xp.where(there, histograms, 1.0)), -xp.inf)
    count = histograms.shape[0]
    log_v = xp.zeros_like(softmin(cost.T, log_a, epsilon, backend=backend))
    log_d, errors, iteration, converged = log_v[0], [], 0, False
    while True:
        iteration += 1
        log_u = log_a + softmin(cost, log_v, epsilon, backend=backend) / epsilon
        log_ku = -softmin(cost.T, log_u, epsilon, backend=backend) / epsilon
        log_q = (mixture[:, None] * log_ku).sum(0) + log_d
        if iteration % 10 == 2:
            marginals = xp.exp(log_v + log_ku)
            deviations = ((marginals - marginals.mean(0)) ** 2).sum(0) / max(count - correction, 1)
            errors.append((deviations**0.5).sum())
            converged = bool(errors[-1] < tolerance) and iteration > least_iterations
        if converged or iteration == max_iterations:
            return Barycenter(log_q, iteration, errors, converged)
        log_v = log_q - log_ku
        for _ in range(DEBIASING_STEPS if debias else 0):
            log_d = 0.5 * (log_d + log_q + softmin(cost.T, log_d, epsilon, backend=backend) / epsilon)


def _functions_for(cost: Any) -> Any:
    if framework(cost.tensors[0]) == "jax":
        import jax.numpy

        return jax.numpy
    import torch

    return torch
