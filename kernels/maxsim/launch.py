"""Thin launches: what a kind of call compiles to is kept, and started without Triton's binding of arguments."""

from typing import Any

import torch
import triton

# The order of ``CompiledKernel.run``'s arguments that the short way relies on was read in these versions.
KNOWN = ("3.5.", "3.6.")


class Plan:
    """A launch but for its tensors: number of programs, the kernel's numbers and constants, and what else is told."""

    shape: Any
    parts: bool
    winners: Any
    index: Any
    ring: Any

    def __init__(self, programs, numbers, constants, copies, **told):
        self.programs, self.numbers, self.constants, self.copies = programs, numbers, constants, copies
        self.__dict__.update(told)
        self.ready: Any = None  # started before, with aligned addresses, on self.device
        self.device: Any = None


def start(kernel, plan, tensors):
    """Launch on the tensors' device and its current stream: the short way when this plan ran before."""
    pointers, together = [], 0
    for tensor in tensors:
        pointer = None if tensor is None else tensor.data_ptr()
        together |= pointer or 0
        pointers.append(pointer)
    aligned = not together & 15
    if aligned and plan.ready is not None and torch._C._cuda_getDevice() == plan.device:
        run, function, metadata, rest = plan.ready
        stream = torch._C._cuda_getCurrentRawStream(plan.device)
        run(plan.programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *rest)
        return
    compiled = _ordinary(kernel, plan, tensors)
    if aligned and compiled is not None and triton.__version__.startswith(KNOWN):
        constants = [plan.constants[name] for name in kernel.arg_names if name in plan.constants]
        plan.device = tensors[0].device.index
        plan.ready = compiled.run, compiled.function, compiled.packed_metadata, (*plan.numbers, *constants)


def _ordinary(kernel, plan, tensors):
    """Triton's own launch, on the right device; the compiled kernel, or None when interpreted."""
    device = tensors[0].device
    arguments = (*tensors, *plan.numbers)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[(plan.programs,)](*arguments, **plan.constants)
    return kernel[(plan.programs,)](*arguments, **plan.constants)
