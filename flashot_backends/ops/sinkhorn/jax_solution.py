"""What a solved problem of JAX arrays can be asked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs

from .jax_costs import as_jax
from .jax_duals import log_weights, scaling
from .jax_loop import State
from .jax_metrics import pairwise
from .jax_problem import flat_argument
from .jax_streams import moment

CONVENTIONS = ("kl", "entropy")


class Solution:
    """The JAX twin of `solution.Solution`: the same attributes and methods. A pytree, so that ``jit`` can return it."""

    def __init__(
        self, kernel: Any, batch: tuple[int, ...], envelope: bool, pairs: Pairs, weights: tuple[jax.Array, jax.Array],
        offsets: tuple[jax.Array, jax.Array] | None, reach: jax.Array | None, state: State,
        sizes: tuple[int, int] | None = None,
    ):  # fmt: skip
        """``sizes`` are the problem's own (n, m), where it is padded."""
        self._sizes = sizes
        self._kernel, self._batch, self._envelope = kernel, batch, envelope
        self._pairs, self._weights, self._offsets, self._reach, self._state = pairs, weights, offsets, reach, state

    @property
    def f(self) -> jax.Array:
        """Row potentials (..., n), in the unit of the cost."""
        return self._cut(self._result(self._potentials()[0], 1), 0)

    @property
    def g(self) -> jax.Array:
        """Column potentials (..., m), in the unit of the cost."""
        return self._cut(self._result(self._potentials()[1], 1), 1)

    @property
    def iterations(self) -> jax.Array:
        """Iterations run (...), int32: a column update and a row update each."""
        return self._shaped(self._state.iterations, 0)

    @property
    def error(self) -> jax.Array:
        """‖Pᵀ1 − b‖ (...) in the norm asked for, or ‖Pᵀ1 − b e^(−g/ρ₂)‖ where columns may miss b. Rows are exact."""
        return self._shaped(self._state.error, 0)

    @property
    def errors(self) -> jax.Array:
        """The error at every look, (..., looks); NaN where nothing was looked at."""
        return self._shaped(self._state.errors, 1)

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
        return self._cut(self._result(jnp.exp(jnp.where(forbidden, -jnp.inf, exponents))), 0, 1)

    def apply(self, values: Any) -> jax.Array:
        """Return P V for V of shape (..., m) or (..., m, k), streamed."""
        return self._product(values, transposed=False)

    def apply_transpose(self, values: Any) -> jax.Array:
        """Return Pᵀ U for U of shape (..., n) or (..., n, k), streamed."""
        return self._product(values, transposed=True)

    def marginals(self) -> tuple[jax.Array, jax.Array]:
        """Return P1 (..., n) and Pᵀ1 (..., m)."""
        rows, columns = self._marginals()
        return self._cut(self._result(rows), 0), self._cut(self._result(columns), 1)

    def linear_cost(self) -> jax.Array:
        """Return ⟨P, C⟩ (...), streamed. Its gradient is that of the plan too."""
        found = self._inner_cost()
        return self._result(found if self._offsets is None else found + _dots(self._marginals(), self._offsets))

    def entropy(self) -> jax.Array:
        """Return −Σ P (log P − 1), (...), streamed."""
        (s, t), (rows, columns) = self._scalings(), self._marginals()
        scaled = self._inner_cost() / self._pairs.epsilon
        return self._result(rows.sum(-1) + scaled - _dot(rows, s) - _dot(columns, t))

    def value(self, convention: str = "kl") -> jax.Array:
        """Return the regularised value (...), from the marginals; see `solution.Solution.value`."""
        if convention not in CONVENTIONS:
            raise ValueError(f"convention is {convention!r}; accepted is one of {CONVENTIONS}")
        total = self._value(convention)
        if not self._envelope:
            return self._shaped(total)
        if convention == "entropy" and self._reach is not None:  # the plan does not minimise it
            return self._result(total)
        dual = self._dual(convention)
        return self._shaped(jax.lax.stop_gradient(total) + dual - jax.lax.stop_gradient(dual))

    def _value(self, convention: str) -> jax.Array:
        (s, t), (a, b), epsilon = self._scalings(), self._weights, self._pairs.epsilon
        rows, columns = self._marginals()
        if convention == "kl":
            f, g = self._potentials()
            total = _dot(rows, f) + _dot(columns, g) + epsilon * (_mass(a) * _mass(b) - rows.sum(-1))
        else:
            total = epsilon * (_dot(rows, s) + _dot(columns, t) - rows.sum(-1))
            total = total if self._offsets is None else total + _dots((rows, columns), self._offsets)
        if self._reach is None:
            return total
        missed = jnp.stack([_divergence(rows, a), _divergence(columns, b)], -1)
        return total + (jnp.where(self._reach == jnp.inf, 0, self._reach) * missed).sum(-1)

    def _dual(self, convention: str) -> jax.Array:
        """The dual objective at fixed potentials, (B,): its derivative is that of the value, at the optimum.

        −ρ Σ a (e^(−f/ρ) − 1), or ⟨a, f⟩, for rows and the like for columns, and −ε Σ P (for "kl" + ε Σ a Σ b).
        """
        (a, b), epsilon = self._weights, self._pairs.epsilon
        if convention == "kl":
            held = jax.lax.stop_gradient(self._potentials())
            offset, logs = _mass(a) * _mass(b), tuple(map(log_weights, self._reachable()))
        else:
            scaled = (epsilon[:, None] * part for part in self._scalings())
            held = jax.lax.stop_gradient(tuple(map(jnp.add, scaled, self._offsets or (0, 0))))
            offset, logs = jnp.zeros_like(epsilon), tuple(jnp.where(w > 0, 0, -jnp.inf) for w in self._weights)
        inside = held if self._offsets is None else tuple(map(jnp.subtract, held, self._offsets))
        s, t = (scaling(log, part, epsilon) for log, part in zip(logs, inside, strict=True))
        mass = moment(self._kernel, 0, self._pairs, s, t, jnp.ones_like(t)[:, :, None]).sum((1, 2))
        reaches = (None, None) if self._reach is None else (self._reach[:, :1], self._reach[:, 1:])
        sides = zip((a, b), held, reaches, strict=True)
        return sum(_dot(w, _price(part, reach)) for w, part, reach in sides) + epsilon * (offset - mass)

    def __repr__(self) -> str:
        shape = "×".join(map(str, (*self._batch, self._count(0), self._count(1))))
        return f"Solution({shape}, iterations={self.iterations}, error={self.error}, converged={self.converged})"

    def parts(self, sizes: list[tuple[int, int]]) -> list[Solution]:
        """The problems of a padded batch, each with its own (n, m)."""
        (leaves, tree), count = jax.tree.flatten(_flatten(self)[0]), len(sizes)
        split = [jnp.split(leaf, count) if len(leaf) == count else [leaf] * count for leaf in leaves]
        each = (jax.tree.unflatten(tree, part) for part in zip(*split, strict=True))
        known = self._kernel, (), self._envelope
        return [_unflatten((*known, size), mine) for mine, size in zip(each, sizes, strict=True)]

    def _count(self, side: int) -> int:
        """n (0) or m (1)."""
        return self._weights[side].shape[-1] if self._sizes is None else self._sizes[side]

    def _cut(self, padded: jax.Array, *sides: int) -> jax.Array:
        """Without what is padded at the end of the last axes, which are rows (0) or columns (1)."""
        if self._sizes is None:
            return padded
        return padded[(Ellipsis,) + tuple(slice(self._sizes[side]) for side in sides)]

    def _result(self, flat: jax.Array, tail: int | None = None) -> jax.Array:
        """Under the envelope gradient, only the value has a derivative."""
        inputs = self._pairs, self._weights, self._offsets
        return self._shaped(_without_gradient(flat, inputs) if self._envelope else flat, tail)

    def _shaped(self, flat: jax.Array, tail: int | None = None) -> jax.Array:
        """Give a result its batch axes back. With ``tail`` axes of its own, it may have come out of ``vmap``."""
        at = 0 if tail is None else flat.ndim - tail - 1
        return flat.reshape(*flat.shape[:at], *self._batch, *flat.shape[at + 1 :])

    def _potentials(self) -> tuple[jax.Array, jax.Array]:
        """f and g of the whole cost, flat."""
        f, g = self._state.f, self._state.g
        return (f, g) if self._offsets is None else (f + self._offsets[0], g + self._offsets[1])

    def _reachable(self) -> tuple[jax.Array, jax.Array]:
        """Weights; with a reach, mass that can go nowhere is given up."""
        if self._reach is None:
            return self._weights
        (a, b), (f, g) = self._weights, self._state[:2]
        return jnp.where(jnp.isinf(f), 0, a), jnp.where(jnp.isinf(g), 0, b)

    def _scalings(self) -> tuple[jax.Array, jax.Array]:
        """log a + f/ε and log b + g/ε, flat."""
        (a, b), (f, g), epsilon = self._reachable(), self._state[:2], self._pairs.epsilon
        return scaling(log_weights(a), f, epsilon), scaling(log_weights(b), g, epsilon)

    def _inner_cost(self) -> jax.Array:
        """⟨P, C⟩ (B,), of the cost without its terms of one side."""
        s, t = self._scalings()
        return moment(self._kernel, 1, self._pairs, s, t, jnp.ones_like(t)[:, :, None]).sum((1, 2))

    def _marginals(self) -> tuple[jax.Array, jax.Array]:
        s, t = self._scalings()
        rows = moment(self._kernel, 0, self._pairs, s, t, jnp.ones_like(t)[:, :, None])
        columns = moment(self._kernel, 0, self._pairs.T, t, s, jnp.ones_like(s)[:, :, None])
        return rows[:, :, 0], columns[:, :, 0]

    def _product(self, given: Any, transposed: bool) -> jax.Array:
        pairs, (s, t) = self._pairs, self._scalings()
        if transposed:
            pairs, s, t = pairs.T, t, s
        name, count = "U" if transposed else "V", self._count(0 if transposed else 1)
        values = as_jax(given, name).astype(s.dtype)
        vector = values.ndim <= len(self._batch) + 1 and values.shape[-1:] == (count,)
        values = values[..., None] if vector else values
        if values.ndim < 2 or values.shape[-2] != count:
            raise ValueError(f"{name} has shape {given.shape}; accepted are (..., {count}) and (..., {count}, k)")
        if count < t.shape[-1]:
            values = jnp.pad(values, [*[(0, 0)] * (values.ndim - 2), (0, t.shape[-1] - count), (0, 0)])
        out = moment(self._kernel, 0, pairs, s, t, flat_argument(values, self._batch, 2, name))
        out = out[:, : self._count(1 if transposed else 0)]
        return self._result(out[:, :, 0] if vector else out)

    def _matrix(self) -> jax.Array:
        """The kernels' cost as a matrix (B or 1, n, m)."""
        pairs = self._pairs
        return pairs.matrix if pairs.matrix is not None else pairwise(pairs.x, pairs.y, pairs.metric)


def _dot(first: jax.Array, second: jax.Array) -> jax.Array:
    """Σ_i first_i second_i, nothing where there is no mass."""
    return jnp.where(first == 0, 0, first * jnp.where(first == 0, 0, second)).sum(-1)


def _dots(firsts: Any, seconds: Any) -> jax.Array:
    return sum(map(_dot, firsts, seconds))


def _divergence(marginal: jax.Array, weights: jax.Array) -> jax.Array:
    """KL(p | a) = Σ p log(p/a) − Σp + Σa, (B,); p is zero where a is."""
    there = marginal > 0
    ratio = jnp.where(there, marginal, 1) / jnp.where(there, weights, 1)
    return (jnp.where(there, marginal * jnp.log(ratio), 0) - marginal).sum(-1) + _mass(weights)


def _mass(weights: jax.Array) -> jax.Array:
    """Σ_i a_i, (B,), which no weight of zero has a derivative of: there is nothing there to take part."""
    return jnp.where(weights > 0, weights, 0).sum(-1)


def _price(potential: jax.Array, reach: jax.Array | None) -> jax.Array:
    """What a unit of weight adds to the dual: f, or ρ (1 − e^(−f/ρ)) where it may be missed."""
    if reach is None:
        return potential
    bound = reach == jnp.inf
    finite = jnp.where(bound, 1, reach)
    return jnp.where(bound, potential, -finite * jnp.expm1(-potential / finite))


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
    parts = solution._pairs, solution._weights, solution._offsets, solution._reach, solution._state
    return parts, (solution._kernel, solution._batch, solution._envelope, solution._sizes)


def _unflatten(meta: Any, parts: Any) -> Solution:
    return Solution(*meta[:3], *parts, *meta[3:])


jax.tree_util.register_pytree_node(Solution, _flatten, _unflatten)
