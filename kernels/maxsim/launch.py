"""Thin launches: what a kind of call compiles to is kept, and started without Triton's binding of arguments."""

from typing import Any

import torch
import triton

from flashot_backends.kernels import ahead
from flashot_backends.kernels.environment import plain_launches

# The order of the launcher's arguments that the short way relies on was read in these versions.
KNOWN = ((3, 5), (3, 6))
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
NOTHING: tuple[Any, ...] = ()  # none of a kernel's rarer tensors


class Plan:
    """A launch but for its tensors: number of programs, the kernel's numbers and constants, and what else is told."""

    simple: bool
    parts: bool
    scores: Any
    winners: Any
    index: Any
    apart: Any
    ring: Any
    scattered: bool

    def __init__(self, programs, numbers, constants, copies, **told):
        self.programs, self.numbers, self.constants, self.copies = programs, numbers, constants, copies
        self.__dict__.update(told)
        self.ready: Any = None  # started before, with aligned addresses, on self.device
        self.device: Any = None


def start(kernel, plan, tensors, more):
    """Launch on the tensors' device and its current stream: the short way when this plan ran before.

    ``more``: the kernel's rarer tensors, or ``NOTHING``, the same for every launch of a plan.
    """
    pointers: list[Any] = []
    together = 0
    for tensor in (*tensors, *more) if more else tensors:
        if tensor is None:
            pointers.append(None)
        else:
            pointer = tensor.data_ptr()
            together |= pointer
            pointers.append(pointer)
    aligned = not together & 15
    if aligned and plan.ready is not None and torch._C._cuda_getDevice() == plan.device:
        launch, head, rest = plan.ready
        launch(plan.programs, 1, 1, torch._C._cuda_getCurrentRawStream(plan.device), *head, *pointers, *rest)
        return
    values = arguments(kernel, plan, tensors, more)
    compiled = _ordinary(kernel, plan, values)
    if aligned and compiled is not None:
        constants = [plan.constants[name] for name in kernel.arg_names if name in plan.constants]
        plan.device = tensors[0].device.index
        plan.ready = _short(compiled, (*values[len(pointers) :], *constants))


def arguments(kernel, plan, tensors, more):
    """All that a kernel is called with but its constants."""
    missing = sum(name not in plan.constants for name in kernel.arg_names)
    missing -= len(tensors) + len(more) + len(plan.numbers)
    return *tensors, *more, *[None] * missing, *plan.numbers


def _ordinary(kernel, plan, arguments):
    """Triton's own launch, on the right device; the compiled kernel, or None when interpreted."""
    ahead.wait()
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[(plan.programs,)](*arguments, **plan.constants)
    return kernel[(plan.programs,)](*arguments, **plan.constants)


def _short(compiled, rest):
    """The launcher, what it takes before the pointers, and what behind them; None where the long way is the only one.

    Scratch space would have to be found for a kernel that wants some, and ``FLASHOT_PLAIN_LAUNCH`` lets profilers see
    launches.
    """
    run = compiled.run
    scratch = getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0)
    if VERSION not in KNOWN or scratch or plain_launches():
        return None
    head = (compiled.packed_metadata, None, None, None)
    if VERSION == (3, 6):  # its Python half only looks for scratch space
        return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *head), rest
    return run, (compiled.function, *head), rest
