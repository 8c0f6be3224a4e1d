"""What the Pallas kernels for TPU share."""

from typing import Any

import jax


def without_x64() -> Any:
    """Where JAX has float64, whole numbers of Python are of 64 bits, which a TPU does not count with."""
    place = jax if hasattr(jax, "enable_x64") else jax.experimental  # of older releases
    return place.enable_x64(False)
