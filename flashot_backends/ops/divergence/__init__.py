"""Losses between weighted point clouds: Sinkhorn divergences and kernel norms, streamed, differentiable.

Feydy et al., "Interpolating between optimal transport and MMD using Sinkhorn divergences", AISTATS 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["KERNELS", "kernel_norm", "kernel_potentials", "sinkhorn_divergence", "sinkhorn_potentials"]

KERNELS = ("gaussian", "laplacian", "energy")


def sinkhorn_divergence(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    p: int = 2,
    blur: float = 0.05,
    reach: float | None = None,
    diameter: Any = None,
    scaling: float = 0.5,
    debias: bool = True,
    verbose: bool = False,
    precision: str | None = None,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """Return entropic transport costs (...), less half the costs of each cloud to itself when ``debias`` is set.

    The potentials follow averaged updates, from the temperature diameter^p down to ε = blur^p by factors of scaling^p,
    and one last update. Their derivatives are those of the last update: exact at convergence (envelope theorem).

    Parameters
    ----------
    x, y : arrays (..., n, d) and (..., m, d)
        Points. The cost is |x − y|²/2 for p = 2, and max(|x − y|, 1e-4) for p = 1.
    a, b : arrays (..., n) and (..., m), optional
        Weights, uniform of mass 1 if left out. Zero weights count nothing. Balanced transport needs equal masses.
    blur, reach : float
        Lengths in the points' unit: ε = blur^p, and ρ = reach^p for the strength of the marginal constraints; without
        reach the marginals are kept (balanced transport).
    diameter : float, sequence of floats, "each" or None
        Where the descent starts: one for all, one for each element of the batch, measured for each element ("each"), or
        measured over the whole batch (None). Measuring waits for the device.
    scaling : float
        Between 0 and 1.
    precision, backend
        As in ``flashot_backends.ops.sinkhorn.solve``.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, shape, dtype, device or value; the message says which and what is accepted.
    NotImplementedError
        A second derivative is asked for.
    """
    from . import again, arguments, torch_ops

    options = p, blur, reach, diameter, scaling, debias
    key = None if verbose else again.key_of(x, y, a, b, options, (precision, backend))
    if key is not None and (found := again.divergence(key, x, y, a, b)) is not None:
        return found
    clouds = arguments.clouds(x, y, a, b)
    settings = arguments.settings(clouds, p, blur, reach, diameter, scaling, debias, verbose)
    how = arguments.how(clouds, precision, backend)
    if key is not None and (found := again.first(key, clouds, settings, how, (x, a, y, b))) is not None:
        return found
    return clouds.restored(torch_ops.divergence(*clouds.tensors, *settings, *how)[0])


def sinkhorn_potentials(x: Any, y: Any, a: Any = None, b: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return the potentials (..., n) and (..., m) of ``sinkhorn_divergence``, which takes the same options.

    With ``debias``, each is less the cloud's own: the gradients of the divergence by a and b in the balanced case.
    """
    from . import arguments, torch_ops

    clouds = arguments.clouds(x, y, a, b)
    how = arguments.how(clouds, options.pop("precision", None), options.pop("backend", None))
    settings = arguments.settings(clouds, **{**arguments.DEFAULTS, **options})
    f, g = torch_ops.divergence_potentials(*clouds.tensors, *settings, *how)[:2]
    return clouds.restored(f), clouds.restored(g)


def kernel_norm(
    kernel: str,
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    blur: float = 0.05,
    precision: str | None = None,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """Return ½ ⟨α − β, k ⋆ (α − β)⟩, (...), for the measures α = Σ a_i δ(x_i) and β = Σ b_j δ(y_j).

    Parameters
    ----------
    kernel : "gaussian", "laplacian" or "energy"
        k(x, y) = exp(−|x − y|²/2σ²), exp(−|x − y|/σ) or −|x − y|, with σ = blur. Distances are at least 1e-4 (in units
        of σ for "laplacian").
    x, y, a, b, precision, backend
        As in ``sinkhorn_divergence``. Weights may be negative.
    """
    from . import arguments, kernels

    clouds = arguments.clouds(x, y, a, b)
    how = arguments.how(clouds, precision, backend)
    return clouds.restored(kernels.norm(arguments.kernel(kernel), clouds.tensors, arguments.length("blur", blur), how))


def kernel_potentials(
    kernel: str,
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    blur: float = 0.05,
    precision: str | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Any, Any]:
    """Return k ⋆ (α − β) at the points x, and k ⋆ (β − α) at the points y. Arguments as in ``kernel_norm``."""
    from . import arguments, kernels

    clouds = arguments.clouds(x, y, a, b)
    how = arguments.how(clouds, precision, backend)[2:]
    found = kernels.potentials(arguments.kernel(kernel), clouds.tensors, arguments.length("blur", blur), how)
    return clouds.restored(found[0]), clouds.restored(found[1])
