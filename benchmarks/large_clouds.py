"""What sums over cells and over blocks save of a divergence of large clouds: value and gradient, processor time.

python benchmarks/large_clouds.py POINTS DIMENSION BLUR [RUNS] [WAY ...]

Uniform points in the unit cube, d up to 3, float32, debiased, scaling 0.5, one thread. Ways: ``flash``, ``cells`` (none
over blocks), ``pairs`` (all pairs in every step), ``tensorized`` (GeomLoss). Errors are those of value and gradient,
relative to ``flash`` in float64; above ``EXACT`` points, where that takes long, to the first way.
"""

import resource
import sys
import time

import torch

from flashot_backends.kernels.sinkhorn import near
from flashot_backends.ops.divergence import fields, sinkhorn_divergence

POINTS, DIMENSION, BLUR = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
RUNS = int(sys.argv[4]) if len(sys.argv) > 4 else 3
WAYS = sys.argv[5:] or ["flash", "cells", "pairs"]
EXACT = 5_000
OF, NEAR = fields.of, near.fields


def value_and_gradient(way, dtype=torch.float32):
    """Seconds, value and gradient by x."""
    torch.manual_seed(0)
    x, y = (torch.rand(POINTS, DIMENSION).to(dtype) for _ in range(2))
    x.requires_grad_()
    y.requires_grad_()
    fields.of = (lambda *given: fields.NOTHING) if way == "pairs" else OF
    near.fields = (lambda *given: []) if way == "cells" else NEAR
    started = time.process_time()
    value = _loss(way)(x, y)
    gradient, _ = torch.autograd.grad(value, (x, y))
    return time.process_time() - started, value.item(), gradient.double()


def _loss(way):
    if way != "tensorized":
        return lambda x, y: sinkhorn_divergence(x, y, blur=BLUR)
    from geomloss import SamplesLoss

    return SamplesLoss("sinkhorn", p=2, blur=BLUR, scaling=0.5, backend="tensorized")


def main():
    """All ways in turn, so many times."""
    torch.set_num_threads(1)
    exact = None if POINTS > EXACT else value_and_gradient("flash", torch.float64)[1:]
    seconds = {way: [] for way in WAYS}
    for _ in range(RUNS):
        for way in WAYS:
            taken, value, gradient = value_and_gradient(way)
            seconds[way].append(taken)
            exact = exact or (value, gradient)
            errors = abs(value / exact[0] - 1), float((gradient - exact[1]).abs().max() / exact[1].abs().max())
            print(f"  {way}: {taken:.2f} s, errors {errors[0]:.0e} and {errors[1]:.0e}", flush=True)
    best = ", ".join(f"{way} {min(taken):.2f}" for way, taken in seconds.items())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{POINTS} points, d = {DIMENSION}, blur {BLUR}: least seconds {best}; peak {peak:.0f} MB", flush=True)


main()
