"""Plan-times-something with the dustbin's border added: O(n + m) vector work around the tier's five functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flashot_backends.kernels.attention.pairs import Pairs
from flashot_backends.ops.attention.problem import Border


@dataclass(frozen=True)
class Bordered:
    """Scores seen from the rows; `.T` sees them from the columns. Potentials carry the dustbin in their last entry."""

    kernel: Any
    pairs: Pairs
    border: Border | None

    @property
    def T(self) -> Bordered:  # noqa: N802
        """The same scores seen from the columns."""
        return Bordered(self.kernel, self.pairs.T, None if self.border is None else self.border.T)

    def half_step(self, log_target: jax.Array, w: jax.Array) -> jax.Array:
        """log target − log-sum-exp of the rows; 0 in rows without support."""
        return _potential(log_target, self.lse(w))

    def full_step(self, log_target: jax.Array, log_other: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A half-step on the rows and the half-step on the columns that follows: (rows, columns)."""
        if self.border is None:
            u, sums = self.kernel.full_step(self.pairs, w, log_target, None)
            return u, _potential(log_other, sums)
        border, m = self.border, self.pairs.columns
        inner = w[:, :m]
        u, sums = self.kernel.full_step(self.pairs, inner, log_target[:, :-1], border.right + w[:, m:])
        last = _potential(log_target[:, -1:], _below_lse(border, w))
        u = jnp.concatenate([u, last], 1)
        sums = jnp.logaddexp(sums, border.below + last)
        return u, _potential(log_other, jnp.concatenate([sums, _below_lse(border.T, u)], 1))

    def lse(self, w: jax.Array) -> jax.Array:
        """Log-sum-exp of scores + w over the columns, dustbin included."""
        if self.border is None:
            return self.kernel.lse(self.pairs, w)
        m = self.pairs.columns
        rows = jnp.logaddexp(self.kernel.lse(self.pairs, w[:, :m]), self.border.right + w[:, m:])
        return jnp.concatenate([rows, _below_lse(self.border, w)], 1)

    def matvec(self, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
        """Plan of the potentials (u, w) times z, dustbin included."""
        if self.border is None:
            return self.kernel.matvec(self.pairs, u, w, z)
        n, m = self.pairs.rows, self.pairs.columns
        right, below, corner = self.border_plan(u, w)
        inner = self.kernel.matvec(self.pairs, u[:, :n], w[:, :m], z[:, :m])
        last = (below * z[:, :m]).sum(1, keepdims=True) + corner * z[:, m:]
        return jnp.concatenate([inner + right * z[:, m:], last], 1)

    def border_plan(self, u: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The plan's entries on the border: (P, n), (P, m), (P, 1)."""
        border, n, m = self.border, self.pairs.rows, self.pairs.columns
        assert border is not None  # only bordered plans are asked for it
        right = jnp.exp(border.right + u[:, :n] + w[:, m:])
        below = jnp.exp(border.below + w[:, :m] + u[:, n:])
        return right, below, jnp.exp(border.corner[:, None] + u[:, n:] + w[:, m:])

    def apply(self, u: jax.Array, w: jax.Array, z: jax.Array) -> jax.Array:
        """The plan's real rows and columns times z (P or fewer, m, e)."""
        return self.kernel.apply(self.pairs, u[:, : self.pairs.rows], w[:, : self.pairs.columns], z)


def _below_lse(border: Border, w: jax.Array) -> jax.Array:
    scores = jnp.concatenate([border.below, border.corner[:, None]], 1) + w
    return jax.nn.logsumexp(scores, axis=1, keepdims=True)


def _potential(log_target: jax.Array, sums: jax.Array) -> jax.Array:
    return jnp.where(sums == -jnp.inf, 0, log_target - sums)
