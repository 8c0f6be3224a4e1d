"""What every kernel of the operation "sinkhorn" answers, and the parts that need no loop over pairs.

A batch of B problems has costs C of shape (B, n, m) and regularisations ε of shape (B,). Log-scalings s (B, n) and
t (B, m) stand for the plan P_ij = exp(s_i + t_j − C_ij/ε); −inf leaves a row or a column out. All methods work along
rows; the transposed operator ``T`` works along columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The least distance between two points: what a metric's square root is kept away from zero by.
FLOORS = {"euclidean": 0.0, "clamped": 1e-4}


class Cost(NamedTuple):
    """A batch of costs as tensors: points (B, n, d) and (B, m, d), or a matrix (B, n, m).

    Metrics of points: "sqeuclidean" |x − y|²; "euclidean" |x − y|, without gradient where points meet; "clamped"
    max(|x − y|, 1e-4), without gradient below; "l1" Σ_k |x_k − y_k|, without gradient where coordinates meet.
    """

    x: Tensor | None
    y: Tensor | None
    matrix: Tensor | None
    metric: str = "sqeuclidean"

    @property
    def first(self) -> Tensor:
        """The tensor that tells dtype and device."""
        tensor = self.x if self.matrix is None else self.matrix
        assert tensor is not None
        return tensor

    @property
    def T(self) -> Cost:  # noqa: N802 - the field's name for a transpose
        """The same costs with rows and columns exchanged."""
        matrix = None if self.matrix is None else self.matrix.transpose(-1, -2)
        return Cost(self.y, self.x, matrix, self.metric)

    @property
    def size(self) -> tuple[int, int, int]:
        """(B, n, m)."""
        if self.matrix is not None:
            return tuple(self.matrix.shape)  # type: ignore[return-value]
        assert self.x is not None and self.y is not None
        return (self.x.shape[0], self.x.shape[1], self.y.shape[1])

    def select(self, index: Tensor) -> Cost:
        """The problems of the batch with these indices."""
        x, y, matrix = (None if part is None else part[index] for part in (self.x, self.y, self.matrix))
        return Cost(x, y, matrix, self.metric)


class Sweep(NamedTuple):
    """The outcome of one row update and the column update that follows it."""

    f: Tensor  # (B, n): the row potentials that follow from the given g
    g: Tensor  # (B, m): the softmin of the columns that belongs to f
    ratio: Tensor | None  # (B, m): column sums of the plan of (f, given g) over the wanted ones, 1 where none is wanted
    softmin: Tensor  # (B, n): the softmin of the rows that belongs to the given g; f itself without a rule


class Rule(NamedTuple):
    """How potentials follow from their softmin: to the target t = damping · softmin + shift, and beyond it by ω.

    The target is where the dual is largest by these potentials alone. Beyond it, new = t + (ω − 1)(t − old), but up
    no further than t + ε log(1 + (t − old)/ε).
    """

    omega: Tensor | None = None  # (B, 1) or (B, n), from 1 to 2
    damping: Tensor | None = None  # (B, 1)
    shift: Tensor | None = None  # (B, n)

    def of(self, batch: slice, rows: slice) -> Rule:
        """The rule of some rows of some problems."""
        omega, damping, shift = (part if part is None else part[batch] for part in self)
        omega = omega if omega is None or omega.shape[1] == 1 else omega[:, rows]
        return Rule(omega, damping, shift if shift is None else shift[:, rows])

    def target(self, softmin: Tensor) -> Tensor:
        """Where the potentials would go without relaxation."""
        out = softmin if self.damping is None else self.damping * softmin
        return out if self.shift is None else out + self.shift

    def follow(self, old: Tensor, softmin: Tensor, epsilon: Tensor) -> Tensor:
        """The new potentials (B, n)."""
        target = self.target(softmin)
        return target if self.omega is None else relaxed(old, target, self.omega, epsilon[:, None])


def relaxed(old: Tensor, target: Tensor, omega: Tensor, epsilon: Tensor) -> Tensor:
    """old + ω (target − old), upwards no further than target + ε log(1 + (target − old)/ε).

    So relaxed, potentials never lower the dual, whatever ω ∈ [1, 2]. By a potential at distance t ε from its target the
    dual is φ(t) = t − e^t (times weight and ε, up to a constant). From t > 0, the other side at −s with s ≤ t is no
    worse: φ(−s) ≥ φ(−t) ≥ φ(t). From −t < 0, the other side at s ≤ log(1 + t) is no worse, since e^s − s ≤ t + e^−t
    there: 1 − log(1 + t) ≤ e^−t. A penalty ρ KL of the marginal, ρ ≥ ε, adds a term that keeps both inequalities;
    below, ω stays so close to 1 that they hold too.
    """
    step = target - old
    beyond = torch.minimum((omega - 1) * step, epsilon * (step.clamp(min=0) / epsilon).log1p())
    return torch.where(step.isfinite(), target + beyond, target)


class Pullback(NamedTuple):
    """Gradients of a softmin by the cost's tensors, by h (B, m), and by ε (B,); None where not asked for."""

    cost: tuple[Tensor, ...] | None
    h: Tensor
    epsilon: Tensor | None


class Softmin(NamedTuple):
    """A softmin (B, n), and its derivative by each row's own point (B, n, d) where asked for."""

    value: Tensor
    slope: Tensor | None


class Weighted(NamedTuple):
    """Reductions of W_ij = P_ij w_ij: Σ W ∂C by the cost's tensors, row sums and column sums."""

    cost: tuple[Tensor, ...]
    rows: Tensor
    columns: Tensor


class Operator:
    """A batch of costs, ready to be reduced over its pairs. Subclasses fill in the loops.

    ``again``, after ``iterate``: how to run the same loop once more on other tensors of the same layout, or None.
    ``whole_loop``: whether ``iterate`` and ``anneal`` take every problem whose costs are served.
    """

    again: Callable[..., Any] | None = None
    whole_loop = False

    def __init__(self, cost: Cost, epsilon: Tensor):
        self.cost = cost
        self.exact_epsilon = epsilon
        self.batch, self.rows, self.columns = cost.size
        self.dtype = potential_dtype(cost.first.dtype)
        self.device = cost.first.device

    @functools.cached_property
    def epsilon(self) -> Tensor:
        """ε in the potentials' dtype; made when it is asked for."""
        return self.exact_epsilon.to(self.dtype)

    @property
    def T(self) -> Operator:  # noqa: N802
        """The operator that works along columns."""
        raise NotImplementedError

    def select(self, index: Tensor) -> Operator:
        """The operator of some problems of the batch."""
        return type(self)(self.cost.select(index), self.exact_epsilon[index])

    def at(self, epsilon: Tensor) -> Operator:
        """The same costs under another ε (B,)."""
        return type(self)(self.cost, epsilon)

    def softmin(self, h: Tensor) -> Tensor:
        """−ε log Σ_j exp(h_j − C_ij/ε): (B, m) to (B, n)."""
        raise NotImplementedError

    def softmin_gradient(self, h: Tensor, out: Tensor, grad: Tensor, need_cost: bool, need_epsilon: bool) -> Pullback:
        """Vector-Jacobian product of softmin, given its result and the gradient by it, both (B, n)."""
        s = out / self.epsilon[:, None]
        by_cost: tuple[Tensor, ...] | None = None
        if need_cost:
            by_cost, _, columns = self.weighted(s, h, alpha=grad)
        else:
            columns = self.T.apply(h, s, grad[:, :, None])[:, :, 0]
        by_epsilon = None
        if need_epsilon:
            inner = (grad * self.cost_apply(s, h)).sum(-1)
            by_epsilon = ((out * grad).sum(-1) - inner) / self.epsilon
        return Pullback(by_cost, -self.epsilon[:, None] * columns, by_epsilon)

    def pulls(self, need_cost: bool) -> Any:
        """What takes many softmins' gradients at once, or None where nothing is gained.

        Its ``pull(transposed, log_weight, given, softmin, gradient)`` returns Σ_i P_ij gradient_i (B, m) of the softmin
        (B, n) of log_weight + given/ε; its ``cost()`` the gradients by the cost's tensors of all that was pulled.
        Transposed softmins are those of ``T``.
        """
        return None

    def softmin_slope(self, h: Tensor) -> Softmin:
        """A softmin with its derivative by the rows' points, Σ_j p_ij ∂C_ij/∂x_i with p_ij ∝ exp(h_j − C_ij/ε)."""
        value = self.softmin(h)
        found = self.weighted(value / self.epsilon[:, None], h, alpha=torch.ones_like(value))
        return Softmin(value, found.cost[0])

    def both(self, log_a: Tensor, log_b: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Row potentials that follow from g, and column potentials that follow from f, both from what is given."""
        rows = self.softmin(scaling(log_b, g, self.epsilon))
        return rows, self.T.softmin(scaling(log_a, f, self.epsilon))

    def with_itself(self, log_a: Tensor, f: Tensor) -> Tensor:
        """Row potentials that follow from f where columns are the rows again: a cloud against itself."""
        return self.softmin(scaling(log_a, f, self.epsilon))

    def cost_product(self, values: Tensor) -> Tensor:
        """C V: values (B, m, k) to (B, n, k)."""
        raise NotImplementedError

    def sweep(self, log_a: Tensor, log_b: Tensor, g: Tensor, f: Tensor, rule: Rule | None = None) -> Sweep:
        """Update the rows from g, then find the columns' softmin; ``f`` is the previous row potential.

        It is a hint at most without a rule. Columns without mass keep their potential.
        """
        softmin = self.softmin(scaling(log_b, g, self.epsilon))
        f = softmin if rule is None else rule.follow(f, softmin, self.epsilon)
        after = self.T.softmin(scaling(log_a, f, self.epsilon))
        after = torch.where(log_b == -torch.inf, g, after)
        return Sweep(f, after, torch.exp((g - after) / self.epsilon[:, None]), softmin)

    def iterate(
        self, a: Tensor, b: Tensor, f: Tensor, max_iterations: int, tolerance: float, check_every: int, norm: str,
        gap: float, inspect: Callable[[dict[str, float]], None], reach: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """The whole loop of alternating updates in one go, or None where a kernel has no such thing.

        A kernel that has one looks at the values itself, and hands what it saw to ``inspect``, which raises. ``gap`` is
        what over-relaxation starts from, 1 for plain iterations. ``reach`` (B, 2), infinite where binding, says what it
        costs to miss a marginal; then values were looked at before, and ``check_every`` is 2 at least. A kernel with
        ``whole_loop`` also takes 1, and beside a reach the cost's one-sided terms ``offsets`` (B, n) and (B, m).
        Returns row and column potentials, iterations, error and whether it is below the tolerance, by batch element;
        and by look (B, looks) the error, NaN where there was no look, and the gap that holds after it.
        """
        return None

    def anneal(
        self, a: Tensor, b: Tensor, f: Tensor, stages: int, factor: float, iterations: int, gap: float,
        reach: Tensor | None = None, offsets: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The row potentials (B, n) that so many stages of annealing lead to, where there is a ``whole_loop``.

        In stage s, from the last to the first, ε is multiplied by ``factor``^s, and so many iterations are relaxed by
        the gap.
        """
        raise NotImplementedError

    def apply(self, s: Tensor, t: Tensor, values: Tensor) -> Tensor:
        """P V: values (B, m, k) to (B, n, k)."""
        raise NotImplementedError

    def moment(self, s: Tensor, t: Tensor, values: Tensor, power: int) -> Tensor:
        """(P∘C^power) V: values (B, m, k) to (B, n, k); forbidden pairs count nothing."""
        raise NotImplementedError

    def largest(self, t: Tensor, count: int) -> Tensor:
        """The columns with the largest t_j − C_ij/ε in each row, largest first: (B, m) to indices (B, n, count)."""
        raise NotImplementedError

    def cost_apply(self, s: Tensor, t: Tensor, power: int = 1) -> Tensor:
        """Row sums of P∘C or P∘C², (B, n); forbidden pairs (C = +inf) count nothing."""
        raise NotImplementedError

    def weighted(
        self, s: Tensor, t: Tensor, alpha: Tensor | None = None, gamma: float = 0.0, u: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Weighted:
        """Reductions of W_ij = P_ij (α_i + γ C_ij + u_i·v_j); alpha (B, n), u (B, n, k), v (B, m, k)."""
        raise NotImplementedError


def potential_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaling(log_weight: Tensor, potential: Tensor, epsilon: Tensor) -> Tensor:
    """log a + f/ε, and −inf without mass: its potential, +inf where it may go nowhere, has no derivative."""
    massless = log_weight == -torch.inf
    return torch.where(massless, log_weight, log_weight + torch.where(massless, 0.0, potential) / epsilon[:, None])
