"""The peak of memory, for scripts that a test runs in a process of their own.

Not ``ru_maxrss``: that begins with what the process held that started this one, so that nothing would ever be seen to
grow under a test worker that is large itself.
"""

import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux counts it")

PEAK = r"""
import re
from pathlib import Path

def peak():
    "Megabytes that this process has held at most."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
"""
