"""What a solved problem can be asked."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import scaling

from . import envelope, torch_ops
from .costs import DenseCost, PointCloud, floating
from .metrics import pairwise
from .problem import Problem, log_weights
from .solver import State
from .transforms import TopK, at, largest

CONVENTIONS = ("kl", "entropy")


class Solution:
    """Potentials of an entropic transport problem, and its plan without the matrix.

    The plan is P_ij = a_i b_j exp((f_i + g_j − C_ij)/ε) (Peyré and Cuturi, Computational Optimal Transport, 2019,
    eq. 4.12). Results come as the kind of array that the cost was given in; torch results carry the gradient that
    ``solve`` was asked for.

    Attributes
    ----------
    f, g : arrays (..., n) and (..., m)
        Potentials, in the unit of the cost; float64 for float64 costs, else float32.
    iterations : integer array (...)
        Iterations run: a column update and a row update each.
    error : array (...)
        ‖Pᵀ1 − b‖ in the norm asked for, or ‖Pᵀ1 − b e^(−g/ρ₂)‖ where the columns may miss b: the gradient of the dual
        by g. Rows are exact: P1 = a, or a e^(−f/ρ₁).
    converged : boolean array (...)
        Whether the error is below the tolerance.
    errors : array (..., looks)
        The error at every look: after iterations 1, 1 + check_every, … and the last. NaN where nothing was looked at:
        after the end, and where over-relaxation made a cycle longer.
    """

    def __init__(
        self, cost: PointCloud | DenseCost, problem: Problem, state: State, how: tuple[str, str, str],
        fixed_point: tuple[Tensor, Tensor] | None = None,
    ):  # fmt: skip
        self._cost, self._problem, self._state, self._how = cost, problem, state, how
        restore, shaped = problem.restore, problem.shaped
        self.f, self.g = (restore(shaped(potential)) for potential in self._potentials())
        self.iterations, self.error = restore(shaped(state.iterations)), restore(shaped(state.error))
        self.converged, self.errors = restore(shaped(state.converged)), restore(shaped(state.errors))
        self._fixed_point = fixed_point

    def plan(self) -> Any:
        """Return P as a matrix (..., n, m)."""
        problem, (s, t) = self._problem, self._scalings()
        matrix, scalings = self._matrix(), s[:, :, None] + t[:, None, :]
        if problem.epsilon.requires_grad:  # +inf/ε has no derivative by ε
            forbidden = matrix == torch.inf
            matrix, scalings = matrix.masked_fill(forbidden, 0.0), scalings.masked_fill(forbidden, -torch.inf)
        scaled = matrix / problem.epsilon.to(s.dtype)[:, None, None]
        return problem.restore(problem.shaped(torch.exp(scalings - scaled)))

    def apply(self, values: Any) -> Any:
        """Return P V for V of shape (..., m) or (..., m, k), streamed."""
        return self._product(values, transposed=False)

    def apply_transpose(self, values: Any) -> Any:
        """Return Pᵀ U for U of shape (..., n) or (..., n, k), streamed."""
        return self._product(values, transposed=True)

    def marginals(self) -> tuple[Any, Any]:
        """Return P1 (..., n) and Pᵀ1 (..., m)."""
        restore, shaped = self._problem.restore, self._problem.shaped
        rows, columns = self._marginals()
        return restore(shaped(rows)), restore(shaped(columns))

    def top_k(self, k: int) -> TopK:
        """Return the k largest entries of every row of P, largest first, and their columns: two arrays (..., n, k).

        Streamed; entries are differentiable, columns are not. Rows with fewer than k entries above zero end with zeros.
        """
        return self._top(k, transposed=False)

    def top_k_transpose(self, k: int) -> TopK:
        """Return the k largest entries of every column of P and their rows, (..., m, k); see ``top_k``."""
        return self._top(k, transposed=True)

    def entropy(self) -> Any:
        """Return −Σ P (log P − 1), (...) (Peyré and Cuturi, 2019, eq. 4.1), streamed."""
        problem, (s, t) = self._problem, self._scalings()
        rows, columns = self._marginals()
        linear = torch_ops.linear_cost(problem.x, problem.y, s, t, problem.epsilon, *self._how)
        found = rows.sum(-1) + linear / problem.epsilon.to(s.dtype) - dot(rows, s) - dot(columns, t)
        return problem.restore(problem.shaped(found))

    def linear_cost(self) -> Any:
        """Return ⟨P, C⟩ (...), streamed. Its gradient is that of the plan too."""
        s, t = self._scalings()
        problem = self._problem
        found = torch_ops.linear_cost(problem.x, problem.y, s, t, problem.epsilon, *self._how)
        if problem.offsets is not None:
            found = found + sum(dot(*pair) for pair in zip(self._marginals(), problem.offsets, strict=True))
        return problem.restore(problem.shaped(found))

    def value(self, convention: str = "kl") -> Any:
        """Return the regularised value (...), from the marginals.

        Parameters
        ----------
        convention : "kl" or "entropy"
            ⟨P, C⟩ + ε KL(P | a bᵀ) with KL(P|Q) = Σ P log(P/Q) − ΣP + ΣQ; or ⟨P, C⟩ + ε Σ P (log P − 1). Where a side
            has a reach ρ, ρ KL of its marginal is part of both.
        """
        if convention not in CONVENTIONS:
            raise ValueError(f"convention is {convention!r}; accepted is one of {CONVENTIONS}")
        # With a reach the plan does not minimise the entropy's value, and the envelope theorem says nothing of it.
        if self._fixed_point is None or (convention == "entropy" and self._problem.reach is not None):
            total = self._value(convention)
        else:
            total = self._optimal_value(convention, *self._fixed_point)
        return self._problem.restore(self._problem.shaped(total))

    def _optimal_value(self, convention: str, f: Tensor, g: Tensor) -> Tensor:
        """The value with the derivatives of the minimum, (B,)."""
        with torch.no_grad():
            total = self._value(convention)
        problem, offsets = self._problem, self._problem.offsets or (None, None)
        tensors = (*problem[:5], f, g, *offsets, problem.reach, total)
        return envelope.optimum(*tensors, convention == "entropy", *self._how)  # type: ignore[no-any-return]

    def _value(self, convention: str) -> Tensor:
        problem, epsilon = self._problem, self._problem.epsilon.to(self._state.f.dtype)
        rows, columns = self._marginals()
        if convention == "kl":
            dual = sum(dot(*pair) for pair in zip((rows, columns), self._potentials(), strict=True))
            total = dual + epsilon * (mass(problem.a) * mass(problem.b) - rows.sum(-1))
        else:
            s, t = self._scalings()
            total = epsilon * (dot(rows, s) + dot(columns, t) - rows.sum(-1))
            if problem.offsets is not None:
                total = total + dot(rows, problem.offsets[0]) + dot(columns, problem.offsets[1])
        return total if problem.reach is None else total + self._penalties(problem.reach.to(total.dtype), rows, columns)

    def _penalties(self, reach: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """ρ KL of the marginals that may be missed, (B,)."""
        finite = torch.where(reach.isinf(), 0.0, reach)
        missed = torch.stack([divergence(rows, self._problem.a), divergence(columns, self._problem.b)], -1)
        return (finite * missed).sum(-1)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self._cost.shape))
        return f"Solution({shape}, iterations={self.iterations}, error={self.error}, converged={self.converged})"

    def _potentials(self) -> tuple[Tensor, Tensor]:
        """f and g of the whole cost, flat."""
        state, offsets = self._state, self._problem.offsets
        return (state.f, state.g) if offsets is None else (state.f + offsets[0], state.g + offsets[1])

    def _scalings(self) -> tuple[Tensor, Tensor]:
        """log a + f/ε and log b + g/ε, flat."""
        problem, state = self._problem, self._state
        epsilon, sides = problem.epsilon.to(state.f.dtype), ((problem.a, state.f), (problem.b, state.g))
        if problem.reach is not None:  # mass that can go nowhere is given up
            sides = tuple((torch.where(part.isinf(), 0.0, weight), part) for weight, part in sides)  # type: ignore[assignment]
        first, second = (scaling(log_weights(weight), part, epsilon) for weight, part in sides)
        return first, second

    def _marginals(self) -> tuple[Tensor, Tensor]:
        problem, (s, t) = self._problem, self._scalings()
        x, y, epsilon = problem.x, problem.y, problem.epsilon
        rows = torch_ops.apply(x, y, s, t, epsilon, torch.ones_like(t)[:, :, None], *self._how)
        columns = torch_ops.apply(*_exchanged(x, y), t, s, epsilon, torch.ones_like(s)[:, :, None], *self._how)
        return rows[:, :, 0], columns[:, :, 0]

    def _product(self, given: Any, transposed: bool) -> Any:
        problem, (s, t) = self._problem, self._scalings()
        x, y = problem.x, problem.y
        if transposed:
            (x, y), s, t = _exchanged(x, y), t, s
        name, count, batch_axes = "U" if transposed else "V", t.shape[-1], len(problem.batch)
        values = floating(given, name).to(s.dtype)
        vector = values.ndim <= batch_axes + 1 and values.shape[-1:] == (count,)
        values = values.unsqueeze(-1) if vector else values
        if values.ndim < 2 or values.shape[-2] != count:
            shape = tuple(given.shape)
            raise ValueError(f"{name} has shape {shape}; accepted are (..., {count}) and (..., {count}, k)")
        flat = problem.flat(values, tuple(values.shape[-2:]), name)
        out = problem.shaped(torch_ops.apply(x, y, s, t, problem.epsilon, flat, *self._how))
        return problem.restore(out[..., 0] if vector else out)

    def _top(self, k: int, transposed: bool) -> TopK:
        problem, (s, t) = self._problem, self._scalings()
        x, y = problem.x, problem.y
        if transposed:
            (x, y), s, t = _exchanged(x, y), t, s
        if isinstance(k, bool) or not isinstance(k, numbers.Integral) or not 1 <= k <= t.shape[-1]:
            raise ValueError(f"k is {k!r}; accepted is a whole number from 1 to {t.shape[-1]}")
        index = largest(x, y, t, problem.epsilon, int(k), self._how)
        cost = torch_ops.chosen(x, y, index, problem.metric, s.dtype)
        forbidden = cost == torch.inf  # +inf/ε has no derivative by ε
        scaled = cost.masked_fill(forbidden, 0.0) / problem.epsilon.to(s.dtype)[:, None, None]
        entries = torch.exp((s[:, :, None] + at(t, index)).masked_fill(forbidden, -torch.inf) - scaled)
        entries, order = entries.sort(dim=-1, descending=True, stable=True)
        index = index.gather(-1, order)
        return TopK(problem.restore(problem.shaped(entries)), problem.restore(problem.shaped(index)))

    def _matrix(self) -> Tensor:
        """The kernels' cost as a matrix (B, n, m)."""
        problem = self._problem
        if problem.y is None:
            return problem.x.to(self._state.f.dtype)
        return pairwise(problem.x.to(self._state.f.dtype), problem.y.to(self._state.f.dtype), problem.metric)


def divergence(marginal: Tensor, weights: Tensor) -> Tensor:
    """KL(p | a) = Σ p log(p/a) − Σp + Σa, (B,); p is zero where a is."""
    there = marginal > 0
    ratio = torch.where(there, marginal, 1.0) / torch.where(there, weights, 1.0)
    return (torch.where(there, marginal * ratio.log(), 0.0) - marginal).sum(-1) + mass(weights)


def mass(weights: Tensor) -> Tensor:
    """Σ_i a_i, (B,), which no weight of zero has a derivative of: there is nothing there to take part."""
    return torch.where(weights > 0, weights, 0.0).sum(-1)


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ_i first_i second_i, nothing where there is no mass."""
    return torch.where(first == 0, 0.0, first * torch.where(first == 0, 0.0, second)).sum(-1)


def _exchanged(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (x.transpose(-1, -2), None) if y is None else (y, x)
