"""OTT-JAX: point clouds whose log-sum-exp runs on the Sinkhorn operation of this package, in linear memory.

``PointCloud(x, y, batch_size="flash")`` of ``ott.geometry.pointcloud`` becomes this module's ``PointCloud``, which may
be imported too. Where OTT is listed in the setting ``substitute``, every online point cloud (``batch_size=1024``, say)
does. Solvers, problems and their gradients stay the host's: they see a geometry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

VERSIONS = ">=0.5,<0.7"
PARAMETERS = ("self", "x", "y", "cost_fn", "batch_size", "scale_cost")
FLASH = "flash"


def adapt(module: Any, host: Any) -> None:
    """Teach the host's class the batch size "flash"."""
    host.wrap(module, "PointCloud.__init__", lambda original: _routed(original, module, host), PARAMETERS)


def _routed(original: Callable[..., None], module: Any, host: Any) -> Callable[..., None]:
    signature = inspect.signature(original)

    def routed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments.get("batch_size")
        flash = isinstance(given, str) and given == FLASH
        if type(self) is module.PointCloud and (flash or (host.substituted and given is not None)):
            self.__class__ = PointCloud  # the host builds it with its own class: `type(geom)(...)`, `tree_unflatten`
            self.__init__(*args, **kwargs)
        elif isinstance(given, str):
            accepted = "None, a positive number and, for ott.geometry.pointcloud.PointCloud itself, 'flash'"
            raise ValueError(f"batch_size is {given!r}; accepted are {accepted}")
        else:
            original(self, *args, **kwargs)

    return routed


# The host, when it is imported because of us, imports us in turn: until here we are complete enough for that.
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from ott.geometry import pointcloud  # noqa: E402

from flashot_backends.ops import sinkhorn  # noqa: E402
from flashot_backends.ops.sinkhorn.jax_ops import plan_product, softmin  # noqa: E402


@jax.tree_util.register_pytree_node_class
class PointCloud(pointcloud.PointCloud):
    """A ``ott.geometry.pointcloud.PointCloud`` that never holds an (n, m) matrix while a solver iterates.

    Squared Euclidean costs run on the kernels of ``flashot_backends``; other cost functions are streamed in plain JAX,
    a few rows at a time. Reverse-mode derivatives (``jax.grad``, the solver's implicit differentiation) are streamed
    as well. What asks for a matrix (``cost_matrix``, ``kernel_matrix``, ``transport_from_potentials``) gets one.

    Parameters
    ----------
    x, y, cost_fn, scale_cost, **kwargs
        As in the host. ``scale_cost="median"`` needs a matrix and is refused.
    batch_size : "flash", int or None
        Rows streamed at a time where the cost is not squared Euclidean: "flash" chooses. None is the host's dense mode.
    """

    def __init__(
        self, x: Any, y: Any = None, cost_fn: Any = None, batch_size: Any = FLASH, scale_cost: Any = 1.0, **kwargs: Any
    ):
        flash = isinstance(batch_size, str)
        if flash and batch_size != FLASH:
            raise ValueError(f"batch_size is {batch_size!r}; accepted are 'flash', a positive number and None")
        super().__init__(x, y, cost_fn, None if flash else batch_size, scale_cost, **kwargs)
        self._batch_size = batch_size

    @property
    def batch_size(self) -> int | None:
        """Rows streamed at a time."""
        if self._batch_size != FLASH:
            return super().batch_size
        n, m = self.shape
        return max(1, min(n, m, (1 << 22) // max(n, m)))

    @property
    def is_online(self) -> bool:
        """Whether costs are computed on the fly."""
        return self._batch_size is not None

    def apply_lse_kernel(
        self, f: Any, g: Any, eps: Any, vec: Any = None, axis: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Return ε log |Σ_j exp((g_j − C_ij)/ε) vec_j| and its sign (axis 1), or along columns from f (axis 0)."""
        if not self.is_online:
            return super().apply_lse_kernel(f, g, eps, vec, axis)
        potential, before = (g, f) if axis == 1 else (f, g)
        if not self.is_squared_euclidean:
            return self._streamed_lse(potential, eps, vec, axis)
        cost, epsilon = self._cost(axis), eps / self.inv_scale_cost
        sums = -softmin(cost, potential / eps, epsilon, guess=before * epsilon / eps) / epsilon
        if vec is None:
            return eps * sums, jnp.ones_like(sums)
        top = lax.stop_gradient(jnp.where(jnp.isfinite(sums), sums, 0))  # any stabiliser gives the same derivative
        return _signed_log(plan_product(cost, -top, potential / eps, vec, epsilon), top, eps)

    def apply_kernel(self, vec: Any, eps: Any = None, axis: int = 0) -> jax.Array:
        """Return K vec (axis 1) or Kᵀ vec (axis 0) for K = exp(−C/ε)."""
        if not self.is_online:
            return super().apply_kernel(vec, eps, axis)
        eps = self.epsilon if eps is None else eps
        if not self.is_squared_euclidean:
            scale = self.inv_scale_cost
            return self._streamed(lambda costs: _dot(jnp.exp(-costs * scale / eps), vec), axis)
        n, m = self.shape if axis == 1 else self.shape[::-1]
        s, t = jnp.zeros(n, self.dtype), jnp.zeros(m, self.dtype)
        return plan_product(self._cost(axis), s, t, vec, eps / self.inv_scale_cost)

    def _apply_cost_to_vec(
        self, vec: Any, axis: int = 0, fn: Any = None, is_linear: bool = False, scale_cost: Any = None
    ) -> jax.Array:
        expands = self.is_squared_euclidean and (fn is None or is_linear)
        if expands or not self.is_online:
            return super()._apply_cost_to_vec(vec, axis, fn, is_linear, scale_cost)
        scale = self.inv_scale_cost if scale_cost is None else scale_cost
        return self._streamed(lambda costs: _dot(costs * scale if fn is None else fn(costs * scale), vec), axis)

    def _compute_summary_online(self, summary: str) -> jax.Array:
        if summary != "max_cost":
            return super()._compute_summary_online(summary)
        return jnp.max(self._streamed(lambda costs: jnp.abs(costs).max(), 1))

    def _cost(self, axis: int) -> sinkhorn.PointCloud:
        """The cost as the operation takes it, reduced along columns of the matrix (axis 0) or along rows (axis 1)."""
        return sinkhorn.PointCloud(*((self.x, self.y) if axis == 1 else (self.y, self.x)))

    def _streamed_lse(self, potential: Any, eps: Any, vec: Any, axis: int) -> tuple[jax.Array, jax.Array]:
        scale = self.inv_scale_cost

        def sums(costs: jax.Array) -> tuple[jax.Array, jax.Array]:
            exponents = (potential - costs * scale) / eps
            top = lax.stop_gradient(exponents.max())
            top = jnp.where(jnp.isfinite(top), top, 0)
            weights = jnp.exp(exponents - top)
            return weights.sum() if vec is None else _dot(weights, vec), top

        total, top = self._streamed(sums, axis)
        return _signed_log(total, top, eps)

    def _streamed(self, reduce: Callable[[jax.Array], Any], axis: int) -> Any:
        """``reduce(costs of one row)`` for every row (axis 1) or column (axis 0), a batch at a time."""
        points, others = (self.x, self.y) if axis == 1 else (self.y, self.x)

        def of_one(point: jax.Array) -> Any:
            pair = (point[None], others) if axis == 1 else (others, point[None])
            return reduce(self.cost_fn.all_pairs(*pair).reshape(-1))

        return lax.map(jax.checkpoint(of_one), points, batch_size=self.batch_size)


def _dot(weights: jax.Array, vec: Any) -> jax.Array:
    """A sum in the dtype of the numbers: XLA's default on a card has 11 bits for float32."""
    return jnp.matmul(weights, vec, precision=lax.Precision.HIGHEST)


def _signed_log(total: jax.Array, top: jax.Array, eps: Any) -> tuple[jax.Array, jax.Array]:
    """Return ε (log |total| + top) and the sign; −∞ and 0 without a derivative where nothing is left."""
    nothing = total == 0
    logarithm = jnp.log(jnp.where(nothing, 1, jnp.abs(total)))
    return eps * jnp.where(nothing, -jnp.inf, logarithm + top), jnp.sign(total)
