"""Errors against float64, as tables: ``python -m benchmarks.accuracy`` (in a checkout, after installing it).

Every problem is solved twice with the same number of plain iterations, by the kernel that is asked for and, from the
same rounded inputs, by the plain reference in float64: what differs is the kernel's arithmetic and nothing else.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve

from .measure import about

SCALES = (1.0, 0.1, 0.01, 0.001)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDE = (torch.float64, torch.float32)
ITERATIONS = 30
HEADER = """| points | dtype | ε / median cost | f ⊕ g, in ε | plan, mass | P V | value | gradient | value's gradient |
|---|---|---|---|---|---|---|---|---|"""


class Case(NamedTuple):
    """A pair of clouds, made in float64."""

    name: str
    x: Tensor
    y: Tensor
    dtypes: tuple[torch.dtype, ...]


class Outcome(NamedTuple):
    """What is compared: potentials, plan, a product with it, value, gradients of another number and of the value."""

    f: Tensor
    g: Tensor
    plan: Tensor
    product: Tensor
    value: Tensor
    gradient: Tensor
    envelope: Tensor


def cases(count: int) -> Iterator[Case]:
    """Normal points in few and in many dimensions, far from the origin, and in clusters."""
    for d in (3, 64):
        x, y = normal(count, d, 0), 1.1 * normal(count + 7, d, 1) + 0.2
        yield Case(f"d = {d}", x, y, DTYPES)
        for offset in (1e3, 1e4):
            yield Case(f"d = {d}, all moved by {offset:g}", x + offset, y + offset, WIDE)
        far = 30 * normal(5, d, 2)
        yield Case(f"d = {d}, 5 clusters", *(part * 0.3 + far[torch.arange(len(part)) % 5] for part in (x, y)), DTYPES)


def normal(n: int, d: int, seed: int) -> Tensor:
    """Standard normal points."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcome(x: Tensor, y: Tensor, epsilon: float, backend: str) -> Outcome:
    """Solve and differentiate; the reference gets the matrix of direct differences."""
    x, y = x.clone().requires_grad_(), y.clone()
    options: dict[str, Any] = {"tolerance": 0, "max_iterations": ITERATIONS, "acceleration": None, "backend": backend}
    points = PointCloud(x, y)
    cost = DenseCost(points.dense()) if backend == "reference" else points
    solution = solve(cost, epsilon=epsilon, **options)
    (gradient,) = torch.autograd.grad(solution.linear_cost(), x, retain_graph=True)
    held = solve(cost, epsilon=epsilon, gradient="envelope", **options)
    (envelope,) = torch.autograd.grad(held.value(), x)
    values = normal(len(y), 4, 3).to(x.device, solution.f.dtype)
    found = (solution.f, solution.g, solution.plan(), solution.apply(values), solution.value(), gradient, envelope)
    return Outcome(*(part.detach().double() for part in found))


def row(case: Case, dtype: torch.dtype, scale: float, device: str, backend: str) -> str:
    """One line of the table."""
    x, y = (part.to(device, dtype) for part in (case.x, case.y))
    median = float(PointCloud(x.double(), y.double()).dense().median())
    found = outcome(x, y, scale * median, backend)
    exact = outcome(x.double(), y.double(), scale * median, "reference")
    potentials = (found.f - exact.f)[:, None] + (found.g - exact.g)
    errors = [
        float(potentials.abs().max()) / (scale * median),
        float((found.plan - exact.plan).abs().sum()),
        relative(found.product, exact.product),
        relative(found.value, exact.value),
        relative(found.gradient, exact.gradient),
        relative(found.envelope, exact.envelope),
    ]
    cells = " | ".join(f"{error:.0e}" for error in errors)
    return f"| {case.name} | {str(dtype).removeprefix('torch.')} | {scale:g} | {cells} |"


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over that of what is right."""
    return float((found - exact).norm() / exact.norm())


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", default="torch", help="the kernel to look at: torch, triton")
    parser.add_argument("--points", type=int, default=300, help="points a side (default: %(default)s)")
    options = parser.parse_args(arguments)
    flags = ["--device", options.device, "--backend", options.backend, "--points", str(options.points)]
    header = about(shlex.join(["python", "-m", "benchmarks.accuracy", *flags]), options.device)
    print("\n".join(f"- {name}: {value}" for name, value in header.items()) + "\n")
    print(HEADER)
    for case in cases(options.points):
        for dtype in case.dtypes if options.backend != "triton" else [d for d in case.dtypes if d != torch.float64]:
            for scale in SCALES:
                print(row(case, dtype, scale, options.device, options.backend), flush=True)


if __name__ == "__main__":
    main()
