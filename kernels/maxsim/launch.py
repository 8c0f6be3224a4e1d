"""Thin launches: a compiled kernel is kept for each kind of call and started without Triton's binding."""

import torch
import triton

# The layout of ``CompiledKernel.run``'s arguments that the short way relies on was read in these versions.
KNOWN = ("3.5.", "3.6.")


def launch(kernel, grid, arguments, constants):
    """Start a kernel the ordinary way; returns the compiled kernel (None when interpreted)."""
    tensor = arguments[0]
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            return kernel[grid](*arguments, **constants)
    return kernel[grid](*arguments, **constants)


class Ready:
    """A compiled kernel with its grid and everything but the tensors: what is left is one call."""

    __slots__ = ("device", "function", "grid", "metadata", "rest", "run")

    def __init__(self, compiled, grid, device, numbers, constants, names):
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.grid, self.device = grid, device
        self.rest = (*numbers, *(constants[name] for name in names if name in constants))

    def __call__(self, pointers):
        """Start on the current stream of the device; ``pointers`` are addresses or None, all multiples of 16."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.run(self.grid, 1, 1, stream, self.function, self.metadata, None, None, None, *pointers, *self.rest)


def can_be_ready(compiled):
    """Whether the short way is known to work for what was compiled."""
    return compiled is not None and triton.__version__.startswith(KNOWN) and hasattr(compiled, "packed_metadata")
