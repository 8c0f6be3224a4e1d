"""What a small MaxSim training step takes of the host, beside a step with a function that does nothing.

python benchmarks/host_step.py

Tensors lie on the CPU and no kernel is started, so that the rest is Python and torch: checks, allocations, autograd.
One thread, microseconds, the least mean of five.
"""

import time

import torch

from flashot_backends.kernels.maxsim import triton
from flashot_backends.ops.maxsim import derivatives, maxsim

CALLS = 3000


class Nothing(torch.autograd.Function):
    """Saves and allocates what a step needs."""

    @staticmethod
    def forward(ctx, q, d):
        """Scores that hold anything."""
        ctx.save_for_backward(q, d)
        return torch.empty(len(q), len(d))

    @staticmethod
    def backward(ctx, gradient):
        """Gradients that hold anything."""
        q, d = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(d)


def microseconds(call):
    """The least mean of five runs."""
    means = []
    for _ in range(6):  # the first one warms up
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(means[1:])


def main():
    """Measure and print."""
    torch.set_num_threads(1)
    triton.start = lambda *_: None
    derivatives.kernel_for = lambda problem, backend=None: triton
    q, d = (torch.zeros(2, 8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weights = torch.ones(2, 2)

    def step(score):
        q.grad = d.grad = None
        (score(q, d).float() * weights).sum().backward()

    ours, nothing = (microseconds(lambda score=score: step(score)) for score in (maxsim, Nothing.apply))
    print(f"a step: {ours:.0f} us; one of nothing: {nothing:.0f} us")
    with torch.no_grad():
        print(f"scores without gradients: {microseconds(lambda: maxsim(q, d)):.1f} us")


if __name__ == "__main__":
    main()
