"""Scripts that know nothing of us, run unchanged in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "hosts"


def run(*arguments, **environment):
    """Standard output of python with these arguments, started from the checkout."""
    pytest.importorskip("ot")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["pot_flash", "pot_names", "pot_torch"])
def test_flash_in_an_unchanged_script(script):
    assert run("-m", "flashot_backends", SCRIPTS / f"{script}.py") == "agrees\n"


def test_the_host_imported_before_we_are_enabled():
    code = "import ot, runpy, sys, flashot_backends; flashot_backends.enable(); runpy.run_path(sys.argv[1])"
    assert run("-c", code, SCRIPTS / "pot_flash.py") == "agrees\n"


def test_our_adapter_imported_before_the_host():
    code = (
        "import runpy, sys, flashot_backends; from flashot_backends.adapters import pot; flashot_backends.enable(); "
        "assert 'ot' not in sys.modules; runpy.run_path(sys.argv[1])"
    )
    assert run("-c", code, SCRIPTS / "pot_names.py") == "agrees\n"


def test_substituted_it_prints_the_same():
    script = SCRIPTS / "pot_plain.py"
    plain = run(script)
    assert run("-m", "flashot_backends", script) == plain
    assert run("-m", "flashot_backends", script, FLASHOT_SUBSTITUTE="pot") == plain


def test_importing_the_adapter_loads_no_framework():
    code = "import sys; from flashot_backends.adapters import pot; print({'torch', 'jax', 'ot'} & set(sys.modules))"
    assert run("-c", code) == "set()\n"
