"""Launch shapes by heuristic, nothing is searched at run time. Measured on an H200: benchmarks/card/attention.py."""

from __future__ import annotations

#: Tokens are padded to a multiple of this, so no block may be larger.
LARGEST_BLOCK = 128
#: Fewer programs than this leave processors idle: smaller blocks then, and more of them.
PROCESSORS = 132

Blocks = tuple[int, int, int, int]


def gpu_blocks(
    kernel: str, parts: int, features: int, problems: int, rows: int, columns: int, simple: bool = False
) -> Blocks:
    """Rows and columns of a tile, warps, pipeline stages.

    kernel: the kernel's name. parts: 1 for 16-bit operands, 2 for float32 in two parts. rows, columns: padded.
    simple: neither bias nor segments, which want registers, nor a band about as narrow as a tile.
    """
    height, width, warps, stages = _blocks(kernel, parts, features)
    if simple and kernel == "_half_step_kernel" and parts == 1 and 32 < features <= 64:
        height, width, warps, stages = 128, 128, 4, 2
    if height == 128 and problems * rows < 128 * PROCESSORS:
        height, warps = 64, 4
        if parts == 1 and kernel == "_half_step_kernel" and features <= 64:
            width, stages = 128, 3
    return min(height, rows), min(width, columns), warps, stages


def _blocks(kernel: str, parts: int, features: int) -> Blocks:
    if features > 128:  # both sides of a float32 gradient twice, and no room for a second stage
        return 64, 32, 8, 1 if parts == 2 and kernel == "_pull_kernel" else 2
    if features > 64:
        return _for_128_features(kernel, parts)
    if kernel == "_apply_kernel":
        return (128, 64, 8, 3) if parts == 1 else (128, 64, 8, 2)
    if kernel == "_pull_kernel":
        return (128, 64, 4, 2) if parts == 1 else (64, 64, 4, 2)
    return 128, 64, 4, 3


def _for_128_features(kernel: str, parts: int) -> Blocks:
    matrix = kernel in ("_apply_kernel", "_pull_kernel")
    if parts == 2:
        return (64, 32, 4, 2) if matrix else (64, 64, 4, 2)
    return (64, 64, 8, 2) if matrix else (128, 64, 8, 2)
