"""The command line and the report."""

import importlib.util
import io

import pytest

import flashot_backends
from flashot_backends import dispatch
from flashot_backends.config import use
from flashot_backends.plugins import KernelSpec

COMMAND = ("-c", "from flashot_backends.cli import main; main()")


def test_status_in_a_fresh_process(python):
    (python.work / "flashot.toml").write_text('fallback = "warn"')
    out = python(*COMMAND, "status", FLASHOT_BACKEND="torch,reference").stdout
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "backend torch, reference environment" in rows
    assert "fallback warn ./flashot.toml" in rows
    assert "precision high default" in rows
    assert "fakehost fakehost 1.4 >=1,<2 no ready" in rows
    assert any(row.startswith("pot POT") for row in rows)
    assert any(row.startswith("sinkhorn triton torch cuda 20 builtin") for row in rows)
    state = "available" if importlib.util.find_spec("torch") else "cannot be imported: No module named 'torch'"
    assert any("reference torch any 0 builtin" in row and row.endswith(state) for row in rows)
    assert "autoload: off" in out


def test_status_check_adapts_for_real(python):
    python.environment["FLASHOT_DISABLE_PLUGINS"] = "builtin"
    assert "adapted" in python(*COMMAND, "status", "--check", FLASHOT_SUBSTITUTE="fakehost").stdout
    (python.folder / "fakehost_adapter.py").write_text("1 / 0")
    out = python(*COMMAND, "status", "--check").stdout
    assert "ZeroDivisionError" in out


def test_status_with_a_bad_setting_is_a_plain_error(python):
    done = python(*COMMAND, "status", check=False, FLASHOT_FALLBACK="wran")
    assert done.returncode == 2
    assert "FLASHOT_FALLBACK: 'wran' is not one of 'auto', 'warn', 'error'. Did you mean 'warn'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("clean_settings")
def test_status_function_writes_where_it_is_told():
    spec = KernelSpec("toy-operation", "toy", "no.such.module", {"torch"}, requires=("no_such_module",))
    dispatch.register(spec)
    out = io.StringIO()
    try:
        with use(substitute=["pot"]):
            flashot_backends.status(out)
    finally:
        dispatch.unregister(spec)
    text = out.getvalue()
    assert "no_such_module cannot be imported" in text
    assert "substitute pot use()" in " ".join(text.split())


def test_no_arguments_show_the_commands(python):
    for arguments in ([], ["--help"]):
        out = python(*COMMAND, *arguments, check=False).stdout
        for command in ("run", "status", "demo", "bench", "autoload"):
            assert command in out
    assert python(*COMMAND, "--version").stdout.strip() == flashot_backends.__version__


def test_bench_outside_of_a_checkout_is_a_plain_error(python):
    hide = "import sys; sys.modules['flashot_backends.benchmarks'] = None"
    done = python("-c", f"{hide}; {COMMAND[1]}", "bench", check=False)
    assert done.returncode == 2
    assert "run this in a checkout" in done.stderr
