"""`sinkhorn_attention`: checks, then P flat problems, then one tier, then the caller's shape again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashot_backends.kernels.attention.pairs import Pairs
from flashot_backends.ops.attention.dustbin import DustbinScore, DustbinToken, capacities, read_border
from flashot_backends.ops.attention.layout import Layout, layout
from flashot_backends.ops.attention.masses import active_tokens, full_activity, log_masses, read_masses
from flashot_backends.ops.attention.problem import Problem, Schedule
from flashot_backends.ops.attention.solve import solve
from flashot_backends.ops.attention.support import check_vector, read_support


def sinkhorn_attention(
    q,
    k,
    v,
    *,
    epsilon=1.0,
    base_steps: float = 15,
    tail_steps: float = 2,
    last_update: str = "columns",
    window: int | None = None,
    mask=None,
    query_mask=None,
    key_mask=None,
    segments=None,
    bias=None,
    query_mass=None,
    key_mass=None,
    dustbin: DustbinToken | DustbinScore | None = None,
    return_unmatched: bool = False,
    scale: float | None = None,
    backend=None,
):
    """Attend with the weights of an entropic transport plan between queries and keys: O = P V.

    P_ij = exp(S_ij + u_i + v_j) with S_ij = (scale · q_i·k_j + bias_ij) / epsilon. `base_steps` Sinkhorn steps are
    taken without derivative and `tail_steps` more with their exact derivative (arXiv 2605.08123); the certificates of
    this package bound what stopping the base leaves out. Memory is O(L · d), forward and backward.

    Args:
        q: (…, n, d), float16, bfloat16, float32 or float64. Leading axes broadcast with those of k and v, and axis −3
            may be a multiple of theirs (grouped heads: query head h reads key head h // (heads / key heads)).
        k: (…, m, d).
        v: (…, m, e).
        epsilon: temperature, scalar or leading axes, differentiable. Small values need more steps.
        base_steps: whole or half steps, from 0.
        tail_steps: whole or half steps, from 0.5. `base_steps=0, tail_steps=0.5, last_update="rows"` is softmax
            attention.
        last_update: `"columns"`, every key gets exactly its mass and queries to the Sinkhorn residual; or `"rows"`.
        window: pairs with |i − j| > window carry no mass and cost nothing.
        mask: bool, True where a pair may carry mass, broadcasting to (…, n, m); (…, 1, m) and (…, n, 1) stay vectors.
            Causal masks are refused: they have no balanced plan.
        query_mask: bool (…, n), True for real tokens. Leading axes broadcast with those of q, so a mask (batch, n) for
            q (batch, heads, n, d) is written mask[:, None, :]. Masked tokens get outputs and gradients of exactly 0.
        key_mask: bool (…, m). With n = m and no query mask it is taken for padding and masks the queries as well.
        segments: integer ids (…, L), or a pair for queries and keys: only equal ids see each other, negative ids are
            padding.
        bias: (…, n, m), differentiable; dense by nature, and so is its gradient.
        query_mass: (…, n), what each row sums to, differentiable; a token of mass 0 is masked. Default 1.
        key_mass: (…, m), the same for columns. Default: the rows' total shared evenly, so 1 when n = m. Totals should
            agree, else rows and columns cannot both hold.
        dustbin: `DustbinToken` or `DustbinScore`, where tokens that match nothing go. Not with `segments`.
        return_unmatched: return also the mass that each query (…, n) and each key (…, m) sends to the dustbin.
        scale: default 1/√d.
        backend: name or ordered names of tiers: "chunked", "pallas_gpu", "pallas_tpu", "reference". Default: settings.

    Returns (…, n, e) in the promoted dtype of q, k, v; scores, potentials and sums are float32, float64 for float64.
    Raises ValueError or TypeError naming the argument.
    """
    options = Options(epsilon, base_steps, tail_steps, last_update, window, mask, query_mask, key_mask, segments, bias,
                      query_mass, key_mass, dustbin, scale, backend)  # fmt: skip
    q, k, v = read_tokens(q, k, v)
    if return_unmatched and dustbin is None:
        raise ValueError("return_unmatched: needs a dustbin; without one no mass goes unmatched")
    if min(q.size, k.size, v.size) == 0:
        return _empty(q, k, v, return_unmatched)
    prepared = prepare(q, k, v, options)
    out, unmatched = run_tier(prepared)
    out = prepared.layout.unfold(out).astype(v.dtype)
    return (out, tuple(prepared.layout.unfold(part) for part in unmatched)) if return_unmatched else out


def transport_plan(q, k, **options):
    """Return the plan itself, (…, n, m) and dense: for looking at small ones. Attends to an identity matrix.

    Args:
        q: (…, n, d).
        k: (…, m, d).
        **options: as for `sinkhorn_attention`, which also names the errors.
    """
    identity = jnp.eye(k.shape[-2], dtype=k.dtype)
    dustbin = options.get("dustbin")
    if isinstance(dustbin, DustbinToken):  # its value has no place among these columns
        options["dustbin"] = replace(dustbin, value=jnp.zeros(k.shape[-2], k.dtype))
    return sinkhorn_attention(q, k, identity, **options)


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `sinkhorn_attention`."""

    epsilon: Any = 1.0
    base_steps: float = 15
    tail_steps: float = 2
    last_update: str = "columns"
    window: int | None = None
    mask: Any = None
    query_mask: Any = None
    key_mask: Any = None
    segments: Any = None
    bias: Any = None
    query_mass: Any = None
    key_mass: Any = None
    dustbin: Any = None
    scale: float | None = None
    backend: Any = None


@dataclass(frozen=True)
class Prepared:
    """A checked call: which tier, which half-steps, which arrays, and the way back to the caller's shape."""

    kernel: Any
    schedule: Schedule
    problem: Problem
    layout: Layout


@dataclass(frozen=True)
class AttentionRequest:
    """What the dispatcher and the tiers' `applies` look at."""

    device: str
    dtype: str
    problems: int
    n: int
    m: int
    d: int
    e: int
    window: int | None
    dense: bool  # a dense mask or bias
    ids: bool
    array: str = "jax"


def run_tier(prepared: Prepared):
    """Output (P, n, e) and the dustbin's masses, or None."""
    kernel = prepared.kernel
    run = kernel.attention if kernel.whole else lambda *arguments: solve(kernel, *arguments)
    return run(prepared.schedule, prepared.problem)


def read_tokens(q, k, v):
    """Check shapes and dtypes of queries, keys and values, and promote them to one dtype."""
    tokens = {"q": q, "k": k, "v": v}
    for name, array in tokens.items():
        if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: a float array, not {getattr(array, 'dtype', type(array).__name__)}")
        if array.ndim < 2:
            raise ValueError(f"{name}: (..., tokens, features), got shape {array.shape}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: {k.shape[-1]} features, but q has {q.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"v: {v.shape[-2]} tokens, but k has {k.shape[-2]}")
    dtype = jnp.result_type(q, k, v)
    return tuple(jnp.asarray(array, dtype) for array in tokens.values())


def _empty(q, k, v, return_unmatched):
    lead = jnp.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    out = jnp.zeros((*lead, q.shape[-2], v.shape[-1]), v.dtype)
    return (out, (jnp.zeros((*lead, q.shape[-2])), jnp.zeros((*lead, k.shape[-2])))) if return_unmatched else out


def prepare(q, k, v, options: Options) -> Prepared:
    """Everything of a call that does not depend on its tier but the choice of the tier itself."""
    schedule, plan = read_schedule(options), layout(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    given = ("query_mass", options.query_mass, n), ("key_mass", options.key_mass, m)
    masses = tuple(_mass(plan, *item) for item in given)
    pairs = _pairs(plan, q, k, options, [None if mass is None else mass > 0 for mass in masses])
    values = plan.fold(v, 2)
    kernel = choose(_request(q, pairs, values), options.backend)
    return Prepared(kernel, schedule, _problem(plan, kernel, pairs, values, masses, options), plan)


def read_schedule(options: Options) -> Schedule:
    """Count the half-steps."""
    if options.last_update not in ("columns", "rows"):
        raise ValueError(f'last_update: "columns" or "rows", not {options.last_update!r}')
    base = _half_steps("base_steps", options.base_steps, 0)
    return Schedule(base, _half_steps("tail_steps", options.tail_steps, 1), options.last_update)


def _half_steps(name: str, steps: float, least: int) -> int:
    halves = 2 * steps
    if halves != int(halves) or halves < least:
        raise ValueError(f"{name}: a multiple of one half, at least {least / 2:g}, not {steps!r}")
    return int(halves)


def _mass(plan: Layout, name: str, mass, length: int):
    if mass is None:
        return None
    mass = jnp.asarray(mass)
    check_vector(name, mass, length)
    if not jnp.issubdtype(mass.dtype, jnp.floating):
        raise TypeError(f"{name}: floats, not {mass.dtype}")
    return plan.spread(mass)


def _pairs(plan: Layout, q, k, options: Options, massive) -> Pairs:
    acc = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    n, m = q.shape[-2], k.shape[-2]
    unit = _per_epsilon(plan, options.epsilon, acc)
    scale = unit * (1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale)
    massive = [None if side is None else plan.unfold(side) for side in massive]
    if options.segments is not None and options.dustbin is not None:
        raise ValueError("dustbin: not with segments, which it would connect; give each segment a batch element")
    support = read_support(plan, n, m, options.mask, options.query_mask, options.key_mask, options.segments, massive)
    return Pairs(
        plan.fold(q, 2), plan.fold(k, 2), scale, *support[:2], support.mask,
        _bias(plan, options.bias, unit, n, m), _window(options.window, max(n, m)),
        packed=options.segments is not None,
    )  # fmt: skip


def _per_epsilon(plan: Layout, epsilon, acc):
    if not isinstance(epsilon, jax.core.Tracer) and not (np.asarray(epsilon) > 0).all():
        raise ValueError(f"epsilon: positive, not {epsilon}")
    return 1 / plan.spread(jnp.asarray(epsilon, acc), 0)


def _window(window, longest: int):
    if window is None:
        return None
    if isinstance(window, bool) or int(window) != window or window < 0:
        raise ValueError(f"window: a whole number of tokens, at least 0, not {window!r}")
    return int(window) if window < longest - 1 else None


def _bias(plan: Layout, bias, unit, n, m):
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    if bias.ndim < 2 or bias.shape[-2] not in (1, n) or bias.shape[-1] not in (1, m):
        raise ValueError(f"bias: shape {bias.shape} does not broadcast to (..., {n}, {m})")
    full = plan.fold(jnp.broadcast_to(bias, (*bias.shape[:-2], n, m)), 2)
    per_problem = jnp.repeat(full, plan.problems // full.shape[0], axis=0)
    return per_problem.astype(unit.dtype) * unit[:, None, None]


def _request(q, pairs: Pairs, values) -> AttentionRequest:
    dense = pairs.mask is not None or pairs.bias is not None
    shape = pairs.rows, pairs.columns, pairs.x.shape[-1], values.shape[-1]
    return AttentionRequest(
        _platform(q), str(values.dtype), pairs.problems, *shape, pairs.window, dense, pairs.x_ids is not None
    )


def _platform(array) -> str:
    """Where the call will run, as the registry names it; inside jit the default device is all there is to know."""
    concrete = not isinstance(array, jax.core.Tracer) and hasattr(array, "devices")
    platform = next(iter(array.devices())).platform if concrete else jax.default_backend()
    return {"gpu": "cuda"}.get(platform, platform)


def choose(request: AttentionRequest, backend):
    """The tier that serves `request`."""
    from flashot_backends.dispatch import select

    return select("attention", request, backend)


def _problem(plan: Layout, kernel, pairs: Pairs, values, given, options: Options) -> Problem:
    dustbin = options.dustbin
    fixed = dustbin is not None and (isinstance(dustbin, DustbinScore) or dustbin.capacity is not None)
    active = active_tokens(kernel, pairs, dustbin is not None)
    masses = read_masses(kernel, pairs, given, active, dustbin is not None, fixed)
    log_a, log_b = (log_masses(mass) for mass in masses)
    if dustbin is None:
        return Problem(pairs, values, log_a, log_b)
    active, unit = full_activity(pairs, active), _per_epsilon(plan, options.epsilon, pairs.scale.dtype)
    border = read_border(plan, dustbin, pairs, active, unit, values.shape[-1])
    last = capacities(plan, dustbin, active, masses, pairs.scale.dtype)
    log_a, log_b = (jnp.concatenate(side, 1) for side in zip((log_a, log_b), last, strict=True))
    return Problem(pairs, values, log_a, log_b, border)
