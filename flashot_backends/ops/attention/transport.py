"""Plan-times-something with the dustbin's border added: O(n + m) vector work around the tier's five functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flashot_backends.kernels.attention.pairs import Pairs, potential
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

    def half_step(self, log_target: jax.Array, w: jax.Array, guess: jax.Array) -> jax.Array:
        """log target − log-sum-exp of the rows; 0 in rows without support. guess: about what it will be."""
        if self.border is None:
            return self.kernel.half_step(self.pairs, w, log_target, None, guess)
        border, n, m = self.border, self.pairs.rows, self.pairs.columns
        extra = border.right + w[:, m:]
        u = self.kernel.half_step(self.pairs, w[:, :m], log_target[:, :n], extra, guess[:, :n])
        return jnp.concatenate([u, potential(log_target[:, n:], _below_lse(border, w))], 1)

    def full_step(self, log_target, log_other, w, guess) -> tuple[jax.Array, jax.Array]:
        """A half-step on the rows and the half-step on the columns that follows: (rows, columns)."""
        if not self.kernel.one_pass:
            u = self.half_step(log_target, w, guess)
            return u, self.T.half_step(log_other, u, w)
        if self.border is None:
            u, sums = self.kernel.full_step(self.pairs, w, log_target, None)
            return u, potential(log_other, sums)
        border, m = self.border, self.pairs.columns
        u, sums = self.kernel.full_step(self.pairs, w[:, :m], log_target[:, :-1], border.right + w[:, m:])
        last = potential(log_target[:, -1:], _below_lse(border, w))
        u, sums = jnp.concatenate([u, last], 1), jnp.logaddexp(sums, border.below + last)
        return u, potential(log_other, jnp.concatenate([sums, _below_lse(border.T, u)], 1))

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
