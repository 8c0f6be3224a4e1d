"""Compiles every variant of the MaxSim kernels for compute capability 9.0, with no card in sight.

Run without ``TRITON_INTERPRET``. The interpreter never looks at a branch that is not taken, and takes an absent pointer
for a number; the compiler does neither. Everything goes down the road of a real call, up to the start of the kernel.
"""

import itertools
import random
import sys

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import compile, make_backend
from triton.runtime import driver

from flashot_backends.kernels.maxsim import device, triton, tuning
from flashot_backends.kernels.maxsim.launch import arguments
from flashot_backends.kernels.maxsim.layout import index_dtype, winners_shape
from flashot_backends.ops.maxsim import Int8, Residuals
from flashot_backends.ops.maxsim.problem import Problem

KERNELS = device.scores_kernel, device.gradients_kernel
table_forward = tuning.forward
LENGTHS, SIZE = [5, 0, 33, 2], 16
DTYPES = torch.float16, torch.float32, torch.bfloat16
OWNED = "all", "sets", "owners"


class Card:
    """Just enough of a driver to compile for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def front_end(source, target, options):
    """The part of the compiler that knows about pointers: from Python to Triton's own representation."""
    backend = make_backend(target)
    options, context = backend.parse_options(dict(options)), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def start(kernel, plan, tensors, more):
    """Instead of a launch."""
    kernel.warmup(*arguments(kernel, plan, tensors, more), grid=(plan.programs,), **plan.constants)


def tokens(packed, dtype=torch.float16, size=SIZE):
    lengths = torch.tensor([0, *LENGTHS]).cumsum(0)
    shape = (int(lengths[-1]), size) if packed else (len(LENGTHS), max(LENGTHS), size)
    return torch.zeros(shape, dtype=dtype), lengths if packed else None


def problem(owned, q_packed, d_packed, q_mask, d_mask, floors, masked="zero", **kind):
    """A problem with exactly the optional tensors that were asked for."""
    q, q_offsets = tokens(q_packed, **kind)
    d, d_offsets = tokens(d_packed, **kind)
    masks = (x.new_ones(x.shape[:-1]).bool() if wanted else None for x, wanted in ((q, q_mask), (d, d_mask)))
    owners = torch.arange(len(LENGTHS)) if owned == "owners" else None
    floors = torch.ones(len(LENGTHS), dtype=torch.bool) if floors else None
    set_size = {"all": 0, "sets": 1, "owners": -1}[owned]
    longest = max(LENGTHS)
    return Problem(q, d, *masks, q_offsets, d_offsets, owners, floors, longest, longest, set_size, masked)


def coded(bits):
    count = sum(LENGTHS)
    if not bits:
        return Int8(torch.zeros(count, SIZE, dtype=torch.int8), torch.zeros(count), LENGTHS)
    residuals = torch.zeros(count, SIZE * bits // 8, dtype=torch.uint8)
    codes = torch.zeros(count, dtype=torch.int64)
    return Residuals(codes, residuals, LENGTHS, torch.zeros(7, SIZE), torch.zeros(1 << bits))


def pairwise(**options):
    """Few settings in which any two options meet in every combination of their values."""
    pairs = list(itertools.combinations(options, 2))
    left = {(a, x, b, y) for a, b in pairs for x in options[a] for y in options[b]}
    choose = random.Random(0)
    while left:
        tries = [{name: choose.choice(values) for name, values in options.items()} for _ in range(50)]
        met = [{(a, x[a], b, x[b]) for a, b in pairs} & left for x in tries]
        best = max(range(len(tries)), key=lambda i: len(met[i]))
        left -= met[best]
        yield tries[best]


YES_NO = False, True
TENSORS = {"owned": OWNED, "q_packed": YES_NO, "d_packed": YES_NO, "q_mask": YES_NO, "d_mask": YES_NO, "floors": YES_NO}
BASIC = {"BQ": 32, "BT": 32, "STAGES": 2, "num_warps": 4}
LAUNCHES = {
    "table": None,
    "queries": {**BASIC, "DOCUMENT_ROWS": False},
    "long queries": {**BASIC, "DOCUMENT_ROWS": False, "BQ": 16, "BT": 64, "FOLD": 8},
    "documents": {**BASIC, "DOCUMENT_ROWS": True},
    "registers": {**BASIC, "DOCUMENT_ROWS": False, "REGISTERS": True, "FOLD": 8},
    "shared": {**BASIC, "DOCUMENT_ROWS": False, "FOLD": 8, "PROGRAMS": 1},
    "flat": {**BASIC, "DOCUMENT_ROWS": False, "PROGRAMS": 1, "FLAT": True},
}


def forward(launch, record, bits=None, whole=False, **options):
    rows = LAUNCHES[launch]
    tuning.forward = table_forward if rows is None else lambda *_: dict(rows)
    triton._are_enough = lambda *_: whole
    found = problem(**options)
    triton.forward(found if bits is None else found._replace(documents=coded(bits)), record)


def backward(wanted, **options):
    found = problem(**options)
    winners = torch.zeros(winners_shape(found), dtype=index_dtype(found.longest_document))
    shape = (len(LENGTHS),) if found.set_size else (len(LENGTHS),) * 2
    triton.backward(found, winners, torch.zeros(shape), *wanted)


def variants():
    """(call, its arguments)"""
    kinds = {"dtype": DTYPES, "size": (SIZE, 300)}
    way = {"record": YES_NO, "masked": ("zero", "exclude"), "whole": YES_NO}
    for options in pairwise(launch=[*LAUNCHES], **way, **kinds, **TENSORS):
        yield forward, options
    coded_kinds = {**TENSORS, "d_packed": (True,), "dtype": DTYPES[:2], "record": (False,)}
    for options in pairwise(launch=[*LAUNCHES], bits=(0, 2, 4), **coded_kinds):
        yield forward, options
    for options in pairwise(wanted=((True, True), (True, False), (False, True)), **kinds, **TENSORS):
        yield backward, options


def main():
    """Compile the front half of everything, and every so many variants to the end."""
    driver.set_active(Card())
    triton.start = start
    tuning.processors = lambda _: 1
    tuning._rules = lambda direction, _: [
        *tuning._table()[direction].get("sm90", []),
        *tuning._table()[direction]["default"],
    ]
    failures = 0
    for i, (call, options) in enumerate(variants()):
        for kernel in KERNELS:
            kernel.device_caches[0]  # looking sets the compiler
            kernel.compile = front_end if i % 8 else compile
        triton._layouts.clear()
        try:
            call(**options)
        except Exception as error:
            failures += 1
            print(f"{call.__name__} {options}: {error}")
    print(f"{i + 1} compiled, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main() != 0)
