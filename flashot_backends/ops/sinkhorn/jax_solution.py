"""What a solved problem of JAX arrays can be asked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from .jax_ops import State, log_weights, moment, scaling
from .jax_problem import as_jax, flat_argument

CONVENTIONS = ("kl", "entropy")


class Solution:
    """The JAX twin of `solution.Solution`: the same attributes and methods. A pytree, so that ``jit`` can return it."""

    def __init__(
        self, kernel: Any, batch: tuple[int, ...], pairs: Pairs, a: jax.Array, b: jax.Array, state: State
    ):
        self._kernel, self._batch, self._pairs, self._a, self._b, self._state = kernel, batch, pairs, a, b, state

    @property
    def f(self) -> jax.Array:
        """Row potentials (..., n), in the unit of the cost."""
        return self._shaped(self._state.f)

    @property
    def g(self) -> jax.Array:
        """Column potentials (..., m), in the unit of the cost."""
        return self._shaped(self._state.g)

    @property
    def iterations(self) -> jax.Array:
        """Iterations run (...), int32: a column update and a row update each."""
        return self._shaped(self._state.iterations)

    @property
    def error(self) -> jax.Array:
        """‖Pᵀ1 − b‖ (...) in the norm asked for. Rows are exact."""
        return self._shaped(self._state.error)

    @property
    def converged(self) -> jax.Array:
        """Whether the error is below the tolerance (...)."""
        return self._shaped(self._state.converged)

    def plan(self) -> jax.Array:
        """Return P as a matrix (..., n, m)."""
        s, t = self._scalings()
        matrix, scalings = self._matrix(), s[:, :, None] + t[:, None, :]
        forbidden = matrix == jnp.inf  # +inf/ε has no derivative by ε
        exponents = scalings - jnp.where(forbidden, 0, matrix) / self._pairs.epsilon[:, None, None]
        return self._shaped(jnp.exp(jnp.where(forbidden, -jnp.inf, exponents)))

    def apply(self, values: Any) -> jax.Array:
        """Return P V for V of shape (..., m) or (..., m, k), streamed."""
        return self._product(values, transposed=False)

    def apply_transpose(self, values: Any) -> jax.Array:
        """Return Pᵀ U for U of shape (..., n) or (..., n, k), streamed."""
        return self._product(values, transposed=True)

    def marginals(self) -> tuple[jax.Array, jax.Array]:
        """Return P1 (..., n) and Pᵀ1 (..., m)."""
        rows, columns = self._marginals()
        return self._shaped(rows), self._shaped(columns)

    def linear_cost(self) -> jax.Array:
        """Return ⟨P, C⟩ (...), streamed. Its gradient is that of the plan too."""
        s, t = self._scalings()
        return self._shaped(moment(self._kernel, 1, self._pairs, s, t, jnp.ones_like(t)[:, :, None]).sum((1, 2)))

    def value(self, convention: str = "kl") -> jax.Array:
        """Return the regularised value (...), from the marginals; see `solution.Solution.value`."""
        if convention not in CONVENTIONS:
            raise ValueError(f"convention is {convention!r}; accepted is one of {CONVENTIONS}")
        epsilon, (rows, columns) = self._pairs.epsilon, self._marginals()
        if convention == "kl":
            dual = _dot(rows, self._state.f) + _dot(columns, self._state.g)
            return self._shaped(dual + epsilon * (self._a.sum(-1) * self._b.sum(-1) - rows.sum(-1)))
        s, t = self._scalings()
        return self._shaped(epsilon * (_dot(rows, s) + _dot(columns, t) - rows.sum(-1)))

    def __repr__(self) -> str:
        shape = "×".join(map(str, (*self._batch, self._a.shape[-1], self._b.shape[-1])))
        return f"Solution({shape}, iterations={self.iterations}, error={self.error}, converged={self.converged})"

    def _shaped(self, flat: jax.Array) -> jax.Array:
        return flat.reshape(*self._batch, *flat.shape[1:])

    def _scalings(self) -> tuple[jax.Array, jax.Array]:
        """log a + f/ε and log b + g/ε, flat."""
        state, epsilon = self._state, self._pairs.epsilon
        return scaling(log_weights(self._a), state.f, epsilon), scaling(log_weights(self._b), state.g, epsilon)

    def _marginals(self) -> tuple[jax.Array, jax.Array]:
        s, t = self._scalings()
        rows = moment(self._kernel, 0, self._pairs, s, t, jnp.ones_like(t)[:, :, None])
        columns = moment(self._kernel, 0, self._pairs.T, t, s, jnp.ones_like(s)[:, :, None])
        return rows[:, :, 0], columns[:, :, 0]

    def _product(self, given: Any, transposed: bool) -> jax.Array:
        pairs, (s, t) = self._pairs, self._scalings()
        if transposed:
            pairs, s, t = pairs.T, t, s
        name, count = "U" if transposed else "V", t.shape[-1]
        values = as_jax(given, name).astype(s.dtype)
        vector = values.ndim <= len(self._batch) + 1 and values.shape[-1:] == (count,)
        values = values[..., None] if vector else values
        if values.ndim < 2 or values.shape[-2] != count:
            raise ValueError(f"{name} has shape {given.shape}; accepted are (..., {count}) and (..., {count}, k)")
        out = moment(self._kernel, 0, pairs, s, t, flat_argument(values, self._batch, 2, name))
        return self._shaped(out[:, :, 0] if vector else out)

    def _matrix(self) -> jax.Array:
        """The cost as a matrix (B or 1, n, m), without the (n, m, d) array of differences."""
        pairs = self._pairs
        if pairs.matrix is not None:
            return pairs.matrix
        terms = ((pairs.x[:, :, None, k] - pairs.y[:, None, :, k]) ** 2 for k in range(pairs.x.shape[-1]))
        return sum(terms, start=jnp.zeros((pairs.x.shape[0], pairs.rows, pairs.columns), pairs.epsilon.dtype))


def _dot(first: jax.Array, second: jax.Array) -> jax.Array:
    """Σ_i first_i second_i, nothing where there is no mass."""
    return jnp.where(first == 0, 0, first * jnp.where(first == 0, 0, second)).sum(-1)


def _flatten(solution: Solution) -> Any:
    parts = solution._pairs, solution._a, solution._b, solution._state
    return parts, (solution._kernel, solution._batch)


def _unflatten(meta: Any, parts: Any) -> Solution:
    return Solution(*meta, *parts)


jax.tree_util.register_pytree_node(Solution, _flatten, _unflatten)
