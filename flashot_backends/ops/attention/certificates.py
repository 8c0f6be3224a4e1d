"""What stopping the base costs, bounded beforehand or measured (arXiv 2605.08123, the contraction and bias
certificates)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.attention.pairs import Pairs, spread
from flashot_backends.ops.attention.api import Options, Prepared, prepare, read_tokens, sinkhorn_attention
from flashot_backends.ops.attention.dustbin import DustbinToken
from flashot_backends.ops.attention.solve import forward, tail_adjoint


class Contraction(NamedTuple):
    """Per problem, leading axes of q. diameter: Δ, an upper bound on max S_ij + S_kl − S_il − S_kj over active tokens;
    kappa: tanh(Δ/4), the factor by which a half-step contracts Hilbert's metric; gap: 1 − kappa without cancellation.
    Infinite, 1 and 0 under a band or a dense mask: Birkhoff's theorem wants positive blocks.
    """

    diameter: jax.Array
    kappa: jax.Array
    gap: jax.Array


class BiasBound(NamedTuple):
    """Per problem. bound: at least ‖dS_full − dS_tail‖₁ for the scores S; stopped: ‖g_0‖₁, the gradient at the stopped
    potential; kappa: the contraction it was summed with (1 where none is known, and the bound counts the base
    steps)."""

    bound: jax.Array
    stopped: jax.Array
    kappa: jax.Array


class ExactBias(NamedTuple):
    """dq, dk: gradient through everything minus the surrogate's; relative: their norm over that of the full
    gradient."""

    dq: jax.Array
    dk: jax.Array
    relative: jax.Array


class TailDepth(NamedTuple):
    """tail_steps: the smallest depth within the tolerance, or the largest tried; relative: the bias at 1, 2, …"""

    tail_steps: int
    relative: tuple[float, ...]
    within_tolerance: bool


def contraction_certificate(q, k, **options) -> Contraction:
    """Bound how fast Sinkhorn's potentials forget their start: Δ ≤ diam(Q) · diam(K) · scale / epsilon.

    Loose, and free of the solve: O(n² + m²) work, O(n + m) memory. q, k and options: as for `sinkhorn_attention`.
    """
    q, k = read_tokens(q, k, k)[:2]
    return _contraction(prepare(q, k, k, Options(**options)), options.get("dustbin"))


def bias_certificate(q, k, v, cotangent, *, mode: str = "bound", **options) -> BiasBound | ExactBias:
    """Tell how far the surrogate's gradient is from the gradient through every step.

    Args:
        q, k, v: as for `sinkhorn_attention`.
        cotangent: (…, n, e), ∂loss/∂output.
        mode: "bound", ‖g_0‖₁ summed over the base by the contraction, one pass more than a backward; or "exact", two
            backwards, one of them as deep as the base.
        **options: as for `sinkhorn_attention`.
    """
    if mode == "exact":
        return _exact_bias(q, k, v, cotangent, options)
    if mode != "bound":
        raise ValueError(f'mode: "bound" or "exact", not {mode!r}')
    q, k, v = read_tokens(q, k, v)
    prepared = prepare(q, k, v, Options(**options))
    stopped = jnp.abs(_stopped_gradient(prepared, cotangent)).sum(1)
    contraction, steps = _contraction(prepared, options.get("dustbin")), prepared.schedule.base
    kappa = contraction.kappa.reshape(-1)
    # Σ κ^s over the base's half-steps; −expm1 keeps the digits that 1 − κ^steps would lose.
    lost = -jnp.expm1(steps * jnp.log1p(-contraction.gap.reshape(-1)))
    factor = jnp.where(kappa < 1, lost / jnp.maximum(contraction.gap.reshape(-1), 1e-30), steps)
    factor = jnp.minimum(factor, steps)
    return BiasBound(*(prepared.layout.unfold(part) for part in (stopped * factor, stopped, kappa)))


def select_tail_depth(q, k, v, cotangent, *, tolerance: float, max_tail: int = 4, **options) -> TailDepth:
    """Find the smallest whole `tail_steps` whose exact relative bias is at most `tolerance`, for one cotangent.

    Runs outside jit. A choice made on one batch is evidence for that batch. q, k, v, cotangent and options: as for
    `bias_certificate`.
    """
    seen: list[float] = []
    for steps in range(1, max_tail + 1):
        bias = _exact_bias(q, k, v, cotangent, {**options, "tail_steps": steps})
        seen.append(float(bias.relative))
        if seen[-1] <= tolerance:
            return TailDepth(steps, tuple(seen), True)
    return TailDepth(max_tail, tuple(seen), False)


def _exact_bias(q, k, v, cotangent, options) -> ExactBias:
    base, tail = options.get("base_steps", 15), options.get("tail_steps", 2)

    def gradient(base_steps, tail_steps):
        steps = {**options, "base_steps": base_steps, "tail_steps": tail_steps}
        return jax.vjp(lambda q, k: sinkhorn_attention(q, k, v, **steps), q, k)[1](cotangent)

    full, surrogate = gradient(0, base + tail), gradient(base, tail)
    difference = tuple(one - other for one, other in zip(full, surrogate, strict=True))
    return ExactBias(difference[0], difference[1], _norm(difference) / _norm(full))


def _norm(arrays):
    return jnp.sqrt(sum((array.astype(jnp.float32) ** 2).sum() for array in arrays))


def _stopped_gradient(prepared: Prepared, cotangent):
    """g_0, (P, n or m): the gradient at the potential the tail started from."""
    if prepared.kernel.whole:
        raise ValueError("backend: the reference tier has no adjoint to look into; use another one or mode='exact'")
    kernel, schedule, problem, plan = prepared.kernel, prepared.schedule, prepared.problem, prepared.layout
    (out, unmatched), (_, ladder, _) = forward(kernel, schedule, problem)
    d_out = plan.spread(jnp.asarray(cotangent, out.dtype), 2)
    cotangents = d_out, jax.tree.map(jnp.zeros_like, unmatched)
    return tail_adjoint(kernel, schedule, problem, ladder, out, cotangents, stopped=True).stopped


def _contraction(prepared: Prepared, dustbin) -> Contraction:
    pairs = prepared.problem.pairs
    diameter = _diameter(pairs, prepared.problem.border, dustbin)
    gap = 2 / (1 + jnp.exp(diameter / 2))
    return Contraction(*(prepared.layout.unfold(part) for part in (diameter, jnp.tanh(diameter / 4), gap)))


def _diameter(pairs: Pairs, border, dustbin):
    if pairs.window is not None or pairs.mask is not None:
        return jnp.full(pairs.problems, jnp.inf, pairs.scale.dtype)
    x, y = (_tokens(pairs, *side) for side in ((pairs.x, pairs.x_ids), (pairs.y, pairs.y_ids)))
    inner = _spread_of(*x) * _spread_of(*y) * pairs.scale
    if pairs.bias is not None:
        inner = inner + 2 * (pairs.bias.max((1, 2)) - pairs.bias.min((1, 2)))
    return inner if border is None else _with_dustbin(pairs, border, dustbin, x, y, inner)


def _with_dustbin(pairs: Pairs, border, dustbin, x, y, inner):
    """The differences that cross the border: S_ij + S_dl − S_il − S_dj, its mirror image, and the corner's."""
    if pairs.bias is not None:
        return jnp.full_like(inner, jnp.inf)
    longest = [jnp.where(keep, jnp.linalg.norm(tokens, axis=-1), 0).max(1) for tokens, keep in (x, y)]
    right, below = (jnp.where(jnp.isfinite(part), jnp.abs(part), 0).max(1) for part in (border.right, border.below))
    product = longest[0] * longest[1] * pairs.scale
    corner = product + jnp.abs(border.corner) + right + below
    if isinstance(dustbin, DustbinToken):
        crossing = 2 * (product + jnp.maximum(right, below))
    else:  # the border's scores are all equal and cancel
        corner = product + jnp.abs(border.corner)
        crossing = jnp.maximum(_spread_of(*x) * longest[1], longest[0] * _spread_of(*y)) * pairs.scale
    return jnp.maximum(jnp.maximum(inner, crossing), corner)


def _tokens(pairs: Pairs, side, ids):
    tokens = spread(side, pairs.problems).astype(pairs.scale.dtype)
    keep = jnp.ones(tokens.shape[:2], bool) if ids is None else ids >= 0
    return lax.stop_gradient(tokens), keep


def _spread_of(tokens, keep):
    """Largest distance between two kept tokens, (P,), one token against all at a time."""

    def farthest(index):
        squares = ((tokens - tokens[:, index, None]) ** 2).sum(-1)
        return jnp.where(keep & keep[:, index, None], squares, 0).max(1)

    return jnp.sqrt(lax.map(farthest, jnp.arange(tokens.shape[1])).max(0))
