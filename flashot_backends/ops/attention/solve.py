"""The surrogate and its exact derivative, for any number of half-steps (arXiv 2605.08123).

Write the half-steps of the tail as w_1 … w_H, w_0 the stopped potential: w_t = log target_t − LSE(S + w_{t−1}),
alternating sides, and P_t the plan of the pair (w_t, w_{t−1}). The output is O = P_H V. With g_t = ∂loss/∂w_t and
G = P_H ∘ (dO Vᵀ),

    g_H = sums of G on the side of w_H
    g_{H−1} = sums of G on the other side − P_Hᵀ (g_H / target_H)
    g_{t−1} = −P_tᵀ (g_t / target_t)
    dS = G − Σ_t P_t ∘ (g_t / target_t)          broadcast across the other side of w_t

P_t = P_H scaled by exp(w_t − w_last of its side) on rows and columns, so one exponential per pair serves many terms.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.attention.pairs import gather, spread
from flashot_backends.ops.attention.problem import OTHER, Border, Problem, Schedule
from flashot_backends.ops.attention.transport import Bordered

#: Half-steps that share one reference tile. Potentials half-steps apart differ by at most log L each, so six stay far
#: inside float32's range; a longer tail takes one more pass for every six.
GROUP = 6


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def solve(kernel: Any, schedule: Schedule, problem: Problem):
    """Output (P, n, e) and, with a border, the masses (P, n) and (P, m) that go to the dustbin."""
    return forward(kernel, schedule, problem)[0]


def forward(kernel, schedule, problem):
    """What `solve` returns, and what its derivative keeps: the problem, the ladder and the output."""
    views = _views(kernel, problem)
    ladder = run(views, schedule, problem)
    u, v = _final(schedule, ladder)
    rows = views["rows"]
    out, unmatched = rows.apply(u, v, problem.values), None
    if problem.border is not None:
        right, below, _ = rows.border_plan(u, v)
        out, unmatched = out + right[:, :, None] * problem.border.value[:, None, :], (right, below)
    return (out, unmatched), (problem, ladder, out)


def _views(kernel, problem: Problem) -> dict[str, Bordered]:
    rows = Bordered(kernel, kernel.prepare(problem.pairs), problem.border)
    return {"rows": rows, "columns": rows.T}


def run(views, schedule: Schedule, problem: Problem) -> tuple[jax.Array, ...]:
    """The ladder w_0 … w_H: w_0 after the stopped base, then one potential for each half-step of the tail."""
    targets = {"rows": problem.log_a, "columns": problem.log_b}
    side, other = schedule.tail_sides[0], OTHER[schedule.tail_sides[0]]
    near, w = lax.stop_gradient(_base(views, schedule, targets))
    ladder = [w]
    for _ in range(schedule.tail // 2):
        ladder += views[side].full_step(targets[side], targets[other], ladder[-1], near)
        near = ladder[-2]
    if schedule.tail % 2:
        ladder.append(views[side].half_step(targets[side], ladder[-1], near))
    return tuple(ladder)


def _base(views, schedule: Schedule, targets) -> tuple[jax.Array, jax.Array]:
    """Potentials that the tail starts from: on the side of its first half-step, only a guess, and on the other."""
    side, other = schedule.tail_sides[0], OTHER[schedule.tail_sides[0]]
    near, w = jnp.zeros_like(targets[side]), jnp.zeros_like(targets[other])
    if schedule.base == 0:
        return near, w
    if schedule.base % 2:
        w = views[other].half_step(targets[other], near, w)

    def step(_, potentials):
        return views[side].full_step(targets[side], targets[other], potentials[1], potentials[0])

    near, w = lax.fori_loop(0, schedule.base // 2, step, (near, w), unroll=views[side].kernel.unroll)
    shift = w.mean(1, keepdims=True)
    return near + shift, w - shift


def _final(schedule: Schedule, ladder):
    """Row and column potentials of the reference plan."""
    last, before = ladder[-1], ladder[-2]
    return (last, before) if schedule.last == "rows" else (before, last)


# --- the derivative ---------------------------------------------------------------------------------------------------


class Adjoint(NamedTuple):
    """gradients: g_1 … g_H, then `stopped` = g_0, the gradient at the stopped potential that the surrogate leaves
    out."""

    gradients: tuple[jax.Array, ...]
    stopped: jax.Array | None
    values: jax.Array  # (P, m, e)
    border_value: jax.Array | None  # (P, e)


def _forward_rule(kernel, schedule, problem):
    return forward(kernel, schedule, problem)


def _backward_rule(kernel, schedule, residuals, cotangents):
    problem, ladder, out = residuals
    adjoint = tail_adjoint(kernel, schedule, problem, ladder, out, cotangents)
    return (_pull_back(kernel, schedule, problem, ladder, cotangents, adjoint),)


solve.defvjp(_forward_rule, _backward_rule)


def tail_adjoint(kernel, schedule, problem, ladder, out, cotangents, stopped=False) -> Adjoint:
    """Gradients of every potential of the tail. `stopped`: also of w_0 (one more pass; the certificates want it)."""
    views, targets = _views(kernel, problem), {"rows": problem.log_a, "columns": problem.log_b}
    direct, d_values, d_bin = _direct(views["rows"], schedule, problem, ladder, out, cotangents)
    gradients = [direct[schedule.last]]
    for step in range(schedule.tail, 0 if stopped else 1, -1):
        side = schedule.tail_sides[step - 1]
        shares = gradients[-1] * jnp.exp(-targets[side])
        moved = -views[OTHER[side]].matvec(ladder[step - 1], ladder[step], shares)
        gradients.append(moved + direct[OTHER[side]] if step == schedule.tail else moved)
    gradients.reverse()
    return Adjoint(tuple(gradients[stopped:]), gradients[0] if stopped else None, d_values, d_bin)


def _direct(rows: Bordered, schedule, problem, ladder, out, cotangents):
    """Row and column sums of G, without a pass of their own, and the gradients of the values."""
    d_out, d_unmatched = cotangents
    u, v = _final(schedule, ladder)
    d_values = rows.T.apply(v, u, d_out.astype(problem.values.dtype))
    by_row = (d_out * out).sum(-1)
    by_column = (d_values * spread(problem.values, d_values.shape[0])).sum(-1)
    if problem.border is None:
        return {"rows": by_row, "columns": by_column}, d_values, None
    right, below, _ = rows.border_plan(u, v)
    d_right, d_below = d_unmatched
    d_bin = jnp.einsum("pn,pne->pe", right, d_out, precision=lax.Precision.HIGHEST)
    last_row = (below * d_below).sum(1, keepdims=True)
    last_column = ((d_bin * problem.border.value).sum(1) + (right * d_right).sum(1))[:, None]
    by_row = jnp.concatenate([by_row + right * d_right, last_row], 1)
    by_column = jnp.concatenate([by_column + below * d_below, last_column], 1)
    return {"rows": by_row, "columns": by_column}, d_values, d_bin


class _Terms(NamedTuple):
    """One group of the sum over t: a reference plan (u, v) and dS = P ∘ (left rightᵀ − x yᵀ)."""

    u: jax.Array
    v: jax.Array
    x: jax.Array  # (P, rows, terms)
    y: jax.Array  # (P, columns, terms)
    direct: bool


def _groups(schedule: Schedule, problem: Problem, ladder, gradients) -> list[_Terms]:
    """Cut t = H … 1 into runs of at most GROUP half-steps, the first with the direct part."""
    ends = range(schedule.tail, 0, -GROUP)
    return [_group(schedule, problem, ladder, gradients, end, max(0, end - GROUP)) for end in ends]


def _group(schedule, problem, ladder, gradients, end, start) -> _Terms:
    targets = {"rows": problem.log_a, "columns": problem.log_b}
    side = schedule.tail_sides[end - 1]
    reference = {side: ladder[end], OTHER[side]: ladder[end - 1]}
    factors: dict[str, list[jax.Array]] = {"rows": [], "columns": []}
    for step in range(end, start, -1):
        near = schedule.tail_sides[step - 1]
        moved = ladder[step] - reference[near]
        factors[near].append(jnp.exp(moved - targets[near]) * gradients[step - 1])
        factors[OTHER[near]].append(jnp.exp(ladder[step - 1] - reference[OTHER[near]]))
    x, y = (jnp.stack(factors[name], -1) for name in ("rows", "columns"))
    return _Terms(reference["rows"], reference["columns"], x, y, end == schedule.tail)


def _pull_back(kernel, schedule, problem, ladder, cotangents, adjoint) -> Problem:
    """Cotangents of every array of the problem; None for the integer and boolean ones."""
    rows = Bordered(kernel, problem.pairs, problem.border)
    groups = _groups(schedule, problem, ladder, adjoint.gradients)
    d_out = cotangents[0].astype(problem.values.dtype)
    border = None if rows.border is None else _border_gradient(rows, rows.border.value, groups, cotangents, adjoint)
    return Problem(
        pairs=_pairs_gradient(kernel, problem, groups, d_out),
        values=_shared(adjoint.values, problem.values),
        log_a=_target_gradient(schedule, problem.log_a, adjoint, "rows"),
        log_b=_target_gradient(schedule, problem.log_b, adjoint, "columns"),
        border=border,
    )


def _pairs_gradient(kernel, problem: Problem, groups, d_out):
    pairs = problem.pairs
    n, m = pairs.rows, pairs.columns
    laid, dx, dy, bias = kernel.prepare(pairs), 0, 0, 0
    for group in groups:
        u, v, x, y = group.u[:, :n], group.v[:, :m], group.x[:, :n], group.y[:, :m]
        left, right = (d_out, problem.values) if group.direct else (None, None)
        dx = dx + kernel.pull(laid, u, v, left, right, x, y)
        dy = dy + kernel.pull(laid.T, v, u, right, left, y, x)
        if pairs.bias is not None:
            bias = bias + kernel.score_gradient(pairs, u, v, left, right, x, y)
    scale = pairs.scale[:, None, None]
    return _like(
        pairs,
        x=_shared(scale * dx, pairs.x),
        y=_shared(scale * dy, pairs.y),
        scale=(dx * spread(pairs.x, pairs.problems)).sum((1, 2)),
        bias=None if pairs.bias is None else _shared(bias, pairs.bias),
    )


def _like(pairs, **gradients):
    blank = dict.fromkeys(("x_ids", "y_ids", "mask"))
    return type(pairs)(**gradients, **blank, window=pairs.window, packed=pairs.packed)


def _shared(gradient, original):
    return gather(gradient, original.shape[0]).astype(original.dtype)


def _target_gradient(schedule: Schedule, log_target, adjoint: Adjoint, side: str):
    parts = [g for g, near in zip(adjoint.gradients, schedule.tail_sides, strict=True) if near == side]
    return sum(parts, jnp.zeros_like(log_target))


def _border_gradient(rows: Bordered, value, groups, cotangents, adjoint) -> Border:
    d_out, (d_right, d_below) = cotangents
    n, m = rows.pairs.rows, rows.pairs.columns
    right = below = corner = 0
    for group in groups:
        plan = rows.border_plan(group.u, group.v)
        terms = -_border_terms(group.x[:, :n], group.y[:, m:]), -_border_terms(group.y[:, :m], group.x[:, n:])
        if group.direct:
            from_bin = jnp.einsum("pne,pe->pn", d_out, value, precision=lax.Precision.HIGHEST)
            terms = terms[0] + from_bin + d_right, terms[1] + d_below
        right, below = right + plan[0] * terms[0], below + plan[1] * terms[1]
        corner = corner - plan[2][:, 0] * (group.x[:, n] * group.y[:, m]).sum(-1)
    return Border(right, below, corner, adjoint.border_value)


def _border_terms(near, far):
    """Σ over terms of near (P, k, terms) times the dustbin's far (P, 1, terms)."""
    return (near * far).sum(-1)
