"""What kernels are told by variables."""

import os


def plain_launches() -> bool:
    """Whether kernels are to be started Triton's own way, so that its profilers see every launch."""
    return os.environ.get("FLASHOT_PLAIN_LAUNCH", "").strip().lower() not in ("", "0", "false", "no", "off")
