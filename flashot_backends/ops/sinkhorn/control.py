"""The arguments that steer the loop, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .constants import constant
from .costs import floating
from .problem import Problem
from .solver import ERROR_NORMS, Control

ACCELERATIONS = ("auto", "overrelaxation", "annealing", None)
GRADIENTS = ("unrolled", "envelope", "implicit")


def checked_control(
    max_iterations: int, tolerance: float, check_every: int, norm: str, acceleration: str | None, precision: str | None
) -> Control:
    """Refuse what makes no sense, naming the argument."""
    for name, value in (("max_iterations", max_iterations), ("check_every", check_every)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name} is {value!r}; accepted is a whole number from 1")
    if not isinstance(tolerance, numbers.Real) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance!r}; accepted is a finite number from 0")
    choices = {"norm": (norm, tuple(ERROR_NORMS)), "acceleration": (acceleration, ACCELERATIONS),
               "precision": (precision, ("high", "fast", None))}  # fmt: skip
    for name, (given, accepted) in choices.items():
        if given not in accepted:
            raise ValueError(f"{name} is {given!r}; accepted is one of {accepted}")
    return Control(int(max_iterations), float(tolerance), int(check_every), norm, acceleration or "")


def check_gradient(gradient: str, tolerance: float | None) -> None:
    """Refuse unknown ways to differentiate."""
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient is {gradient!r}; accepted is one of {GRADIENTS}")
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real)):
        raise TypeError(f"gradient_tolerance is {tolerance!r}; accepted is a number between 0 and 1")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(f"gradient_tolerance is {tolerance!r}; accepted is a number between 0 and 1")


def starting_point(problem: Problem, init: tuple[Any, Any] | None) -> Tensor:
    """The row potentials to start from, (B, n)."""
    if init is None:
        if problem.offsets is not None:
            return -problem.offsets[0]
        return constant(0.0, problem.a.dtype, problem.a.device).expand(problem.a.shape)
    if not isinstance(init, tuple | list) or len(init) != 2:
        raise TypeError(f"init is a {type(init).__name__}; accepted is a pair (f, g) of potentials")
    for name, given, weight in (("f", init[0], problem.a), ("g", init[1], problem.b)):
        _check_potential(name, given, weight)
    f = floating(init[0], "init's f").to(problem.a.dtype)
    flat = problem.flat(f, (problem.a.shape[-1],), "init's f")
    return flat.clone() if problem.offsets is None else flat - problem.offsets[0]


def _check_potential(name: str, given: Any, weight: Tensor) -> None:
    if given is None and name == "g":
        return
    potential = floating(given, f"init's {name}")
    if potential.shape[-1:] != weight.shape[-1:]:
        raise ValueError(f"init's {name} has shape {tuple(potential.shape)}; accepted is (..., {weight.shape[-1]})")
    if potential.device != weight.device:
        raise ValueError(f"init's {name} is on {potential.device}; accepted is the device of the cost, {weight.device}")


def backend_names(backend: str | Sequence[str] | None) -> str:
    """Kernel names as one string, for an op's schema; empty for the setting."""
    if backend is None:
        return ""
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"backend is {backend!r}; accepted is a kernel's name, or a sequence of names")
    return "|".join(names)
