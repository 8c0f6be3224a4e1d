"""Every metric of JAX points, brought to one that kernels have: C_ij = kernel's cost of (x'_i, y'_j) + α_i + β_j.

The JAX twin of `metrics`: cosine, inner product and a table of labels run on the kernels of squared distances.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.sinkhorn.jax_pairs import METRICS, product, root

from .costs import DenseCost, PointCloud


class Form(NamedTuple):
    """What a kernel is given: points or a matrix, the metric, and the terms of rows (..., n) and columns (..., m)."""

    x: jax.Array
    y: jax.Array | None
    metric: str
    offsets: tuple[jax.Array, jax.Array] | None = None


def kernel_form(cost: PointCloud | DenseCost) -> Form:
    """Bring a cost to what kernels have; transformed points of 16 bits become float32, so that nothing is rounded."""
    if isinstance(cost, DenseCost):
        return Form(cost.M, None, "matrix")
    x, y = _featured(cost)
    form = Form(x, y, cost.metric if cost.metric in METRICS else "sqeuclidean")
    if cost.metric == "inner":
        form = form._replace(offsets=(-(x**2).sum(-1), -(y**2).sum(-1)))
    return form if cost.labels is None else _labelled(form, cost)


def _featured(cost: PointCloud) -> tuple[jax.Array, jax.Array]:
    """Points with their features weighted, brought to unit length for the cosine; halved squares for products."""
    points = cost.x, cost.y
    if cost.feature_weights is not None:
        weights = wide(cost.feature_weights)
        weights = (weights if cost.metric == "l1" else root(weights))[..., None, :]
        points = tuple(wide(part) * weights for part in points)
    if cost.metric == "cosine":
        points = tuple(_directions(wide(part)) for part in points)
    if cost.metric in ("cosine", "inner"):
        points = tuple(wide(part) * math.sqrt(0.5) for part in points)
    return points


def _directions(points: jax.Array) -> jax.Array:
    """x/|x|, scaled first so that no square under- or overflows; NaN at the origin."""
    scaled = points / lax.stop_gradient(abs(points).max(-1, keepdims=True, initial=0))
    return scaled / jnp.sqrt((scaled**2).sum(-1, keepdims=True))


def _labelled(form: Form, cost: PointCloud) -> Form:
    """Append w T[l_i, k_j] as a product of |classes| coordinates: |u − v|² = |u|² + |v|² − 2 u·v.

    With u_i = −w T[l_i] / (2 c) and v_j = c e_{k_j}, −2 u·v is the table's entry; c makes both of one size.
    """
    table = wide(cost.table) * cost.label_weight
    mean = table.mean(-1, keepdims=True)
    deviation = table - mean
    widest = lax.stop_gradient(abs(deviation).max((-1, -2), keepdims=True))
    scale = jnp.sqrt(jnp.where(widest > 0, 0.5 * widest, 1))
    rows, columns = cost.labels
    u = _rows_of(-deviation / (2 * scale), rows)
    v = scale * jax.nn.one_hot(columns, table.shape[-1], dtype=table.dtype)
    alpha, beta = _rows_of(mean, rows)[..., 0] - (u**2).sum(-1), -(v**2).sum(-1)
    if form.offsets is not None:
        alpha, beta = form.offsets[0] + alpha, form.offsets[1] + beta
    return Form(_joined(form.x, u), _joined(form.y, v), form.metric, (alpha, beta))


def _rows_of(table: jax.Array, labels: jax.Array) -> jax.Array:
    """table[labels] where both may have batch axes: (..., K, c) and (..., n) to (..., n, c)."""
    batch = jnp.broadcast_shapes(table.shape[:-2], labels.shape[:-1])
    table, labels = (jnp.broadcast_to(part, batch + part.shape[k:]) for part, k in ((table, -2), (labels, -1)))
    return jnp.take_along_axis(table, labels[..., None], -2)


def _joined(points: Any, extra: jax.Array) -> jax.Array:
    batch = jnp.broadcast_shapes(points.shape[:-2], extra.shape[:-2])
    parts = (jnp.broadcast_to(part, batch + part.shape[-2:]) for part in (wide(points), extra))
    return jnp.concatenate(list(parts), -1)


def wide(array: Any) -> jax.Array:
    """float64 as it is, anything narrower in float32."""
    return jnp.asarray(array, jnp.promote_types(array.dtype, jnp.float32))


def dense(cost: PointCloud) -> jax.Array:
    """The cost as a matrix (..., n, m), in plain formulas, from direct differences."""
    x, y, weights = cost.x, cost.y, cost.feature_weights
    if weights is not None:
        scale = (weights if cost.metric == "l1" else root(weights))[..., None, :]
        x, y = x * scale, y * scale
    if cost.metric in ("cosine", "inner"):
        if cost.metric == "cosine":
            x, y = (part / jnp.sqrt((part**2).sum(-1, keepdims=True)) for part in (x, y))
        out = float(cost.metric == "cosine") - product(x, jnp.swapaxes(y, -1, -2))
    else:
        out = pairwise(x, y, cost.metric)
    if cost.labels is None:
        return out
    chosen = _rows_of(cost.table, cost.labels[0])
    chosen = _rows_of(jnp.swapaxes(chosen, -1, -2), cost.labels[1])
    return out + cost.label_weight * jnp.swapaxes(chosen, -1, -2)


def pairwise(x: jax.Array, y: jax.Array, metric: str) -> jax.Array:
    """A kernel's cost as a matrix: x (..., n, d) and y (..., m, d) to (..., n, m), without the array of differences."""
    term = abs if metric == "l1" else jnp.square
    batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    start = jnp.zeros((*batch, x.shape[-2], y.shape[-2]), x.dtype)
    terms = (term(x[..., :, None, k] - y[..., None, :, k]) for k in range(x.shape[-1]))
    total = sum(terms, start=start)
    return root(total) if metric == "euclidean" else total
