"""``flashot demo``, and the plain script that it runs."""

import re

import pytest

from flashot_backends import demo
from tests.core.conftest import ROOT

CLI = "from flashot_backends.cli import main; main()"


@pytest.fixture
def needs_everything():
    for module in demo.NEEDED:
        pytest.importorskip(module)


def test_the_script_is_the_one_in_examples_and_knows_nothing_of_us():
    assert demo.script() == ROOT / "examples" / "colour_transfer.py"
    assert not re.search(r"^\s*(import|from) flashot", demo.script().read_text(), re.MULTILINE)


def test_the_demo_prints_a_table_and_draws_a_picture(python, needs_everything):
    from PIL import Image

    done = python("-c", CLI, "demo", "--quick", "--iterations", "20", "--out", "drawn.png", FLASHOT_SUBSTITUTE="pot")
    rows = [line.split() for line in done.stdout.splitlines() if " × " in line and line.rstrip()[-1].isalnum()]
    by_method = {" ".join(row[: row.index("×") - 1]): row for row in rows}
    assert set(by_method) >= {"sinkhorn_log", "flash"}
    assert float(by_method["flash"][-1]) < 1  # of 255
    assert Image.open(python.work / "drawn.png").size[0] > 1000


@pytest.mark.parametrize(("module", "name"), [("ot", "POT"), ("sklearn", "scikit-learn")])
def test_what_is_missing_is_said_plainly(python, module, name):
    code = f"import sys; sys.modules[{module!r}] = None; {CLI}"
    done = python("-c", code, "demo", check=False)
    assert done.returncode == 2
    assert name in done.stderr and 'pip install "flashot-backends[demo]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failing_script_is_shown(python, needs_everything):
    done = python("-c", CLI, "demo", "--quick", "--iterations", "-3", check=False)
    assert done.returncode == 1
    assert "colour_transfer.py" in done.stderr
