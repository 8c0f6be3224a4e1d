"""Launch shapes by heuristic: nothing is searched at run time."""

from __future__ import annotations

import jax.numpy as jnp


def gpu_blocks(dtype, features: int, reduction: bool) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, pipeline stages. reduction: one running sum per row and no matrix result."""
    if dtype == jnp.float32:  # IEEE products on the ordinary units, from registers: small tiles
        return (64, 32, 4, 2) if features <= 64 else (32, 32, 4, 2)
    if features <= 64:
        return (128, 64, 4, 3) if reduction else (128, 64, 8, 3)
    return (128, 64, 8, 2) if features <= 128 else (64, 32, 8, 2)
