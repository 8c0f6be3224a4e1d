"""Compilation for TPUs on a machine that has none, by the libtpu package of this jax."""

import importlib.util
import os
import subprocess
import sys

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the libtpu package of this jax"
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def check(script, lines):
    """The script says "compiled" so many times. In a process of its own, for libtpu reads the environment."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout.count("compiled") == lines, done.stderr[-3000:]
