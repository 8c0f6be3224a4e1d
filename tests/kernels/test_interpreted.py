"""The tests of the Triton kernels in Triton's interpreter, which must be switched on before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*_triton.py"))


def interpreted(name, which):
    switches = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, "-p", "no:cacheprovider", str(HERE / name)]
    return subprocess.run(command, cwd=HERE.parents[1], env=os.environ | switches, capture_output=True, text=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run in this process")
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name):
    done = interpreted(name, "not slow")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinkhorn", "symmetric", "near", "pull", "maxsim"])
def test_interpreted_at_length(name):
    done = interpreted(f"test_{name}_triton.py", "slow")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
