"""What a solved problem can be asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashot_backends.kernels.sinkhorn.operator import scaling

from . import torch_ops
from .costs import DenseCost, PointCloud, floating
from .metrics import pairwise
from .problem import Problem, log_weights
from .solver import State

CONVENTIONS = ("kl", "entropy")


class Solution:
    """Potentials of an entropic transport problem, and its plan without the matrix.

    The plan is P_ij = a_i b_j exp((f_i + g_j − C_ij)/ε) (Peyré and Cuturi, Computational Optimal Transport, 2019,
    eq. 4.12). Results come as the kind of array that the cost was given in; torch results carry the exact gradient of
    the iterations that were run.

    Attributes
    ----------
    f, g : arrays (..., n) and (..., m)
        Potentials, in the unit of the cost; float64 for float64 costs, else float32.
    iterations : integer array (...)
        Iterations run: a column update and a row update each.
    error : array (...)
        ‖Pᵀ1 − b‖ in the norm asked for. Rows are exact.
    converged : boolean array (...)
        Whether the error is below the tolerance.
    """

    def __init__(self, cost: PointCloud | DenseCost, problem: Problem, state: State, how: tuple[str, str, str]):
        self._cost, self._problem, self._state, self._how = cost, problem, state, how
        restore, shaped = problem.restore, problem.shaped
        self.f, self.g = (restore(shaped(potential)) for potential in self._potentials())
        self.iterations, self.error = restore(shaped(state.iterations)), restore(shaped(state.error))
        self.converged = restore(shaped(state.converged))

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
            ⟨P, C⟩ + ε KL(P | a bᵀ) with KL(P|Q) = Σ P log(P/Q) − ΣP + ΣQ; or ⟨P, C⟩ + ε Σ P (log P − 1).
        """
        if convention not in CONVENTIONS:
            raise ValueError(f"convention is {convention!r}; accepted is one of {CONVENTIONS}")
        problem, epsilon = self._problem, self._problem.epsilon.to(self._state.f.dtype)
        rows, columns = self._marginals()
        if convention == "kl":
            dual = sum(dot(*pair) for pair in zip((rows, columns), self._potentials(), strict=True))
            total = dual + epsilon * (problem.a.sum(-1) * problem.b.sum(-1) - rows.sum(-1))
        else:
            s, t = self._scalings()
            total = epsilon * (dot(rows, s) + dot(columns, t) - rows.sum(-1))
            if problem.offsets is not None:
                total = total + dot(rows, problem.offsets[0]) + dot(columns, problem.offsets[1])
        return problem.restore(problem.shaped(total))

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
        epsilon = problem.epsilon.to(state.f.dtype)
        return scaling(log_weights(problem.a), state.f, epsilon), scaling(log_weights(problem.b), state.g, epsilon)

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

    def _matrix(self) -> Tensor:
        """The kernels' cost as a matrix (B, n, m)."""
        problem = self._problem
        if problem.y is None:
            return problem.x.to(self._state.f.dtype)
        return pairwise(problem.x.to(self._state.f.dtype), problem.y.to(self._state.f.dtype), problem.metric)


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ_i first_i second_i, nothing where there is no mass."""
    return torch.where(first == 0, 0.0, first * torch.where(first == 0, 0.0, second)).sum(-1)


def _exchanged(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (x.transpose(-1, -2), None) if y is None else (y, x)
