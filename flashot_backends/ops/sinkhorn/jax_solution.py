"""What a solved problem of JAX arrays can be asked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from .jax_costs import as_jax
from .jax_loop import State, log_weights, scaling
from .jax_problem import flat_argument
from .jax_streams import moment

CONVENTIONS = ("kl", "entropy")


class Solution:
    """The JAX twin of `solution.Solution`: the same attributes and methods. A pytree, so that ``jit`` can return it."""

    def __init__(
        self, kernel: Any, batch: tuple[int, ...], envelope: bool, pairs: Pairs, a: jax.Array, b: jax.Array,
        state: State,
    ):
        self._kernel, self._batch, self._envelope = kernel, batch, envelope
        self._pairs, self._a, self._b, self._state = pairs, a, b, state

    @property
    def f(self) -> jax.Array:
        """Row potentials (..., n), in the unit of the cost."""
        return self._result(self._state.f, 1)

    @property
    def g(self) -> jax.Array:
        """Column potentials (..., m), in the unit of the cost."""
        return self._result(self._state.g, 1)

    @property
    def iterations(self) -> jax.Array:
        """Iterations run (...), int32: a column update and a row update each."""
        return self._shaped(self._state.iterations, 0)

    @property
    def error(self) -> jax.Array:
        """‖Pᵀ1 − b‖ (...) in the norm asked for. Rows are exact."""
        return self._shaped(self._state.error, 0)

    @property
    def converged(self) -> jax.Array:
        """Whether the error is below the tolerance (...)."""
        return self._shaped(self._state.converged, 0)

    def plan(self) -> jax.Array:
        """Return P as a matrix (..., n, m)."""
        s, t = self._scalings()
        matrix, scalings = self._matrix(), s[:, :, None] + t[:, None, :]
        forbidden = matrix == jnp.inf  # +inf/ε has no derivative by ε
        exponents = scalings - jnp.where(forbidden, 0, matrix) / self._pairs.epsilon[:, None, None]
        return self._result(jnp.exp(jnp.where(forbidden, -jnp.inf, exponents)))

    def apply(self, values: Any) -> jax.Array:
        """Return P V for V of shape (..., m) or (..., m, k), streamed."""
        return self._product(values, transposed=False)

    def apply_transpose(self, values: Any) -> jax.Array:
        """Return Pᵀ U for U of shape (..., n) or (..., n, k), streamed."""
        return self._product(values, transposed=True)

    def marginals(self) -> tuple[jax.Array, jax.Array]:
        """Return P1 (..., n) and Pᵀ1 (..., m)."""
        rows, columns = self._marginals()
        return self._result(rows), self._result(columns)

    def linear_cost(self) -> jax.Array:
        """Return ⟨P, C⟩ (...), streamed. Its gradient is that of the plan too."""
        s, t = self._scalings()
        return self._result(moment(self._kernel, 1, self._pairs, s, t, jnp.ones_like(t)[:, :, None]).sum((1, 2)))

    def value(self, convention: str = "kl") -> jax.Array:
        """Return the regularised value (...), from the marginals; see `solution.Solution.value`."""
        if convention not in CONVENTIONS:
            raise ValueError(f"convention is {convention!r}; accepted is one of {CONVENTIONS}")
        (s, t), epsilon = self._scalings(), self._pairs.epsilon
        rows, columns = self._marginals()
        if convention == "kl":
            dual = _dot(rows, self._state.f) + _dot(columns, self._state.g)
            total = dual + epsilon * (self._a.sum(-1) * self._b.sum(-1) - rows.sum(-1))
        else:
            total = epsilon * (_dot(rows, s) + _dot(columns, t) - rows.sum(-1))
        if self._envelope:
            dual = self._dual(convention)
            total = jax.lax.stop_gradient(total) + dual - jax.lax.stop_gradient(dual)
        return self._shaped(total)

    def _dual(self, convention: str) -> jax.Array:
        """The dual objective at fixed potentials, (B,): its derivative is that of the value, at the optimum."""
        a, b, epsilon, state = self._a, self._b, self._pairs.epsilon, self._state
        if convention == "kl":
            (s, t), f, g, offset = self._scalings(), state.f, state.g, a.sum(-1) * b.sum(-1)
        else:
            held = jax.lax.stop_gradient(tuple(epsilon[:, None] * part for part in self._scalings()))
            f, g, offset = held[0], held[1], jnp.zeros_like(epsilon)
            s, t = (jnp.where(part == -jnp.inf, -jnp.inf, _finite(part) / epsilon[:, None]) for part in held)
        mass = moment(self._kernel, 0, self._pairs, s, t, jnp.ones_like(t)[:, :, None]).sum((1, 2))
        return _dot(a, f) + _dot(b, g) + epsilon * (offset - mass)

    def __repr__(self) -> str:
        shape = "×".join(map(str, (*self._batch, self._a.shape[-1], self._b.shape[-1])))
        return f"Solution({shape}, iterations={self.iterations}, error={self.error}, converged={self.converged})"

    def _result(self, flat: jax.Array, tail: int | None = None) -> jax.Array:
        """Under the envelope gradient, only the value has a derivative."""
        flat = _without_gradient(flat, (self._pairs, self._a, self._b)) if self._envelope else flat
        return self._shaped(flat, tail)

    def _shaped(self, flat: jax.Array, tail: int | None = None) -> jax.Array:
        """Give a result its batch axes back. With ``tail`` axes of its own, it may have come out of ``vmap``."""
        at = 0 if tail is None else flat.ndim - tail - 1
        return flat.reshape(*flat.shape[:at], *self._batch, *flat.shape[at + 1 :])

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
        return self._result(out[:, :, 0] if vector else out)

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


def _finite(potential: jax.Array) -> jax.Array:
    return jnp.where(potential == -jnp.inf, 0, potential)


@jax.custom_vjp
def _without_gradient(result: jax.Array, inputs: Any) -> jax.Array:
    """Pass a result on, and refuse a backward pass towards what it was made of."""
    return result


def _refuse(_: Any, __: Any) -> Any:
    raise NotImplementedError(
        "flashot_backends: gradient='envelope' is the derivative of value() alone; accepted for other results are "
        "'unrolled' and 'implicit'"
    )


_without_gradient.defvjp(lambda result, inputs: (result, None), _refuse)


def _flatten(solution: Solution) -> Any:
    parts = solution._pairs, solution._a, solution._b, solution._state
    return parts, (solution._kernel, solution._batch, solution._envelope)


def _unflatten(meta: Any, parts: Any) -> Solution:
    return Solution(*meta, *parts)


jax.tree_util.register_pytree_node(Solution, _flatten, _unflatten)
