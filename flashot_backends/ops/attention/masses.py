"""Masses: how much each token carries, and what is assumed for a side that was not given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from flashot_backends.kernels.attention.pairs import Pairs, spread


def read_masses(kernel, pairs: Pairs, given, active, dustbin: bool, fixed: bool):
    """Masses (P, n) and (P, m) of the tokens.

    given: (query, key) masses or None; active: bool (P, n) and (P, m), or None for what the ids say; dustbin: one more
    token of unit mass shares; fixed: the dustbin balances the totals, so a side that was not given has unit masses.
    """
    acc, sizes = pairs.scale.dtype, (pairs.rows, pairs.columns)
    ones = [jnp.ones((pairs.problems, size), acc) for size in sizes]
    if fixed:
        return tuple(one if mass is None else mass.astype(acc) for mass, one in zip(given, ones, strict=True))
    if given[0] is None and given[1] is not None:
        mirrored = None if active is None else active[::-1]
        return read_masses(kernel, pairs.T, given[::-1], mirrored, dustbin, fixed)[::-1]
    queries = ones[0] if given[0] is None else given[0].astype(acc)
    keys = _even_share(queries, pairs, active, dustbin) if given[1] is None else given[1].astype(acc)
    return queries, keys


def log_masses(mass):
    """Tokens without mass are already off the support; their target must only stay finite."""
    return jnp.log(jnp.where(mass > 0, mass, 1))


def _even_share(a, pairs: Pairs, active, dustbin):
    """The rows' total, shared evenly among the columns of the same id."""
    if pairs.x_ids is None and active is None:
        share = (a.sum(1, keepdims=True) + dustbin) / (pairs.columns + dustbin)
        return jnp.broadcast_to(share, (pairs.problems, pairs.columns))
    x_ids, y_ids = (jnp.zeros(shape, jnp.int32) for shape in (a.shape, (a.shape[0], pairs.columns)))
    if pairs.x_ids is not None:
        x_ids, y_ids = pairs.x_ids, pairs.y_ids
    if active is not None:
        x_ids, y_ids = jnp.where(active[0], x_ids, -1), jnp.where(active[1], y_ids, -2)
    supply = _sum_by_id(x_ids, a, y_ids) + dustbin
    takers = _sum_by_id(y_ids, jnp.ones(y_ids.shape, a.dtype), y_ids) + dustbin
    return jnp.where((supply > 0) & (takers > 0), supply / jnp.maximum(takers, 1), 1)


def _sum_by_id(ids, mass, wanted):
    """For each id in `wanted`, the mass of the tokens that carry it; sorted, so O(L log L) and never (n, m)."""

    def one(ids, mass, wanted):
        order = jnp.argsort(ids)
        running = jnp.concatenate([jnp.zeros(1, mass.dtype), jnp.cumsum(mass[order])])
        start, stop = (jnp.searchsorted(ids[order], wanted, side=side) for side in ("left", "right"))
        return running[stop] - running[start]

    return jax.vmap(one)(ids, mass, wanted)


def active_tokens(kernel, pairs: Pairs, dustbin: bool):
    """Rows and columns with at least one allowed partner, bool (P, n) and (P, m), or None where the ids say it all.

    The dustbin is in every token's reach, so a band switches nothing off beside it.
    """
    if pairs.mask is None and (dustbin or _band_reaches_all(pairs)):
        return None
    if dustbin and pairs.mask is not None:
        return tuple(spread(pairs.mask.any(axis), pairs.problems) for axis in (-1, -2))
    if pairs.mask is None and not pairs.packed and pairs.window is not None:
        return _within_reach(pairs, pairs.window), _within_reach(pairs.T, pairs.window)
    still = kernel.prepare(lax.stop_gradient(pairs))
    zeros = (jnp.zeros((pairs.problems, size), pairs.scale.dtype) for size in (pairs.columns, pairs.rows))
    return tuple(kernel.lse(side, zero) > -jnp.inf for side, zero in zip((still, still.T), zeros, strict=True))


def _band_reaches_all(pairs: Pairs) -> bool:
    return pairs.window is None or (pairs.rows == pairs.columns and pairs.x_ids is None)


def _within_reach(pairs: Pairs, window: int):
    """Rows that are no padding and have a column in their band that is none, bool (P, n): a running count tells."""
    x, y = (
        jnp.ones((pairs.problems, size), bool) if ids is None else ids >= 0
        for ids, size in ((pairs.x_ids, pairs.rows), (pairs.y_ids, pairs.columns))
    )
    seen = jnp.pad(jnp.cumsum(y, 1), ((0, 0), (1, 0)))
    rows = jnp.arange(pairs.rows)
    start, stop = (jnp.clip(rows + shift, 0, pairs.columns) for shift in (-window, window + 1))
    return x & (seen[:, stop] > seen[:, start])


def full_activity(pairs: Pairs, active):
    """The same as two bool arrays, ids included."""
    sides = ((pairs.x_ids, pairs.rows), (pairs.y_ids, pairs.columns))
    known = [jnp.ones((pairs.problems, size), bool) if ids is None else ids >= 0 for ids, size in sides]
    return known if active is None else [one & other for one, other in zip(known, active, strict=True)]
