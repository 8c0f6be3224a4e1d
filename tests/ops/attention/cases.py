"""Seeded problems, and the error measure, that all attention tests share."""

import jax
import jax.numpy as jnp
import numpy as np

from flashot_backends.ops.attention import DustbinScore, DustbinToken

SUPPORTS = ("dense", "band", "padding", "band+padding", "segments", "mask", "rectangular", "masses")
KERNEL_KINDS = (
    ("dense", None),
    ("band", None),
    ("padding", None),
    ("rectangular", "score"),
    ("segments", None),
)
DUSTBINS = (None, "token", "score", "token+capacity", "score+capacity")


def normal(seed, *shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def tokens(n=11, m=11, d=5, e=3, lead=(2,), dtype=jnp.float64):
    return normal(1, *lead, n, d, dtype=dtype), normal(2, *lead, m, d, dtype=dtype), normal(3, *lead, m, e, dtype=dtype)


def support(kind, n=11, lead=2):
    """Keyword arguments of one kind of support, and the number of keys."""
    lengths = jnp.arange(n) < jnp.asarray([n - 4, n - 1])[:lead, None]
    circulant = (jnp.arange(n)[:, None] - jnp.arange(n)[None, :]) % n
    return {
        "dense": ({}, n),
        "band": ({"window": 3}, n),
        "padding": ({"key_mask": lengths}, n),
        "band+padding": ({"window": 2, "key_mask": lengths}, n),
        "segments": ({"segments": jnp.asarray([0] * 4 + [1] * (n - 6) + [-1] * 2)}, n),
        "mask": ({"mask": circulant < 5}, n),
        "rectangular": ({}, n + 4),
        "masses": ({"query_mass": jnp.linspace(0.5, 1.5, n), "key_mass": jnp.linspace(1.5, 0.5, n)}, n),
    }[kind]


def dustbin(kind, parts):
    """parts: (query (d,), key (d,), value (e,), score, capacity (2,)), so that a test can differentiate them."""
    query, key, value, score, capacity = parts
    return {
        None: None,
        "token": DustbinToken(query, key, value),
        "token+capacity": DustbinToken(query, key, value, (capacity[0], capacity[1])),
        "score": DustbinScore(score),
        "score+capacity": DustbinScore(score, (capacity[0], capacity[1])),
    }[kind]


def parts(d=5, e=3, dtype=jnp.float64):
    return (
        normal(4, d, dtype=dtype),
        normal(5, d, dtype=dtype),
        normal(6, e, dtype=dtype),
        jnp.asarray(0.3, dtype),
        jnp.asarray([6.0, 6.0], dtype),
    )


def worst_error(got, wanted):
    """Largest difference over all leaves, each relative to the largest entry of its own wanted leaf."""
    errors = [
        float(jnp.abs(g - w).max() / (jnp.abs(w).max() + 1e-9))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    ]
    assert np.isfinite(errors).all(), errors
    return max(errors)
