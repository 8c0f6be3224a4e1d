"""What is wrong with the numbers of a problem, in words; for every framework."""

from __future__ import annotations

import math


def judge(name: str, value: float, mass_tolerance: float) -> None:
    """Raise what is wrong with one of the few numbers that tell whether the values are acceptable.

    Parameters
    ----------
    name : str
        "epsilon", "reach", "M", "a", "b" (the least of them), "x", "y" (NaN if a point is not sound), "mass of a",
        "mass of b", or "mass": the largest relative difference of two masses, which may be ``mass_tolerance``.
    """
    if name == "epsilon" and not (0 < value < math.inf):
        raise ValueError(f"epsilon holds {value}; accepted are positive finite numbers")
    if name == "reach" and math.isnan(value):
        raise ValueError("reach holds a number that is not positive; accepted are positive ones, infinity among them")
    if name == "M" and (math.isnan(value) or value == -math.inf):
        raise ValueError(f"M holds {value}; accepted are finite costs, and +inf for a forbidden pair")
    if name in ("x", "y") and not math.isfinite(value):
        raise ValueError(
            f"{name} holds NaN or infinite coordinates; accepted are finite ones, and for the metric 'cosine' no point "
            "at the origin"
        )
    if name in ("a", "b") and not (0 <= value < math.inf):
        raise ValueError(f"{name} holds {value}; accepted are finite weights that are not negative")
    if name.startswith("mass of") and not (0 < value < math.inf):
        raise ValueError(f"the {name} is {value}; accepted is a positive finite sum of weights")
    if name == "mass" and not value <= mass_tolerance:
        raise ValueError(
            f"the masses of a and b differ by {value:.3g} of the mass; accepted are equal masses, and any with a reach"
        )
