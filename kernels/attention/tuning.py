"""Launch shapes by heuristic: nothing is searched at run time."""

from __future__ import annotations

#: Tokens are padded to a multiple of this, so no block may be larger.
LARGEST_BLOCK = 128


def gpu_blocks(
    kernel: str, parts: int, features: int, problems: int, rows: int, columns: int
) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, pipeline stages.

    kernel: the kernel's name. parts: 1 for 16-bit operands, 2 for float32 in two parts. rows, columns: padded.
    """
    height, width, warps, stages = _shape(kernel, parts, features)
    return min(height, rows), min(width, columns), warps, stages


def _shape(kernel: str, parts: int, features: int) -> tuple[int, int, int, int]:
    matrix = kernel in ("_apply_kernel", "_pull_kernel")
    if features > 128:
        return 64, 32, 8, 2
    if parts == 2:
        return (64, 32, 4, 2) if matrix or features > 64 else (64, 64, 4, 3)
    if features > 64:
        return 64 if matrix else 128, 64, 8, 2
    return (128, 64, 8, 3) if matrix else (128, 64, 4, 3)
