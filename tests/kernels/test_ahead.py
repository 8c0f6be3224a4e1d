"""What is done before the first kernel is compiled, beside other work."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
from flashot_backends.kernels import ahead
assert "triton" not in sys.modules, "nothing is begun by an import"
ahead.wait()
from triton.runtime.cache import triton_key
assert triton_key.cache_info().currsize == 1, "Triton's key is known"
begun = ahead.begin()
assert begun is ahead.begin() and len(begun) == 2
assert all(work.done() and work.exception() is None for work in begun), "no card is no failure"
"""


def test_once_and_without_a_card():
    pytest.importorskip("triton.runtime.cache", reason="an older Triton")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("why", ["interpreted", "absent"])
def test_not_where_nothing_is_compiled(monkeypatch, why):
    from flashot_backends.kernels import ahead

    if why == "absent":
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if why == "interpreted" else "0")
    assert ahead.begin.__wrapped__() == ()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("0", False), ("False ", False), ("", False)])
def test_plain_launches(monkeypatch, text, value):
    from flashot_backends.kernels.environment import plain_launches

    monkeypatch.setenv("FLASHOT_PLAIN_LAUNCH", text)
    assert plain_launches() is value


def test_the_lock_is_handed_on_as_before():
    from flashot_backends.kernels import ahead

    before = sys.getswitchinterval()
    for wanted in (0.005, 1e-5):
        sys.setswitchinterval(wanted)
        try:
            with pytest.raises(ValueError, match="nothing"), ahead.lock_handed_on():
                assert sys.getswitchinterval() == pytest.approx(min(wanted, 2e-4), rel=1e-3)
                raise ValueError("nothing")
            assert sys.getswitchinterval() == pytest.approx(wanted, rel=1e-3)
        finally:
            sys.setswitchinterval(before)


def test_the_lock_is_handed_on_until_the_last_is_done():
    from flashot_backends.kernels import ahead

    before = sys.getswitchinterval()
    one, other = ahead.lock_handed_on(), ahead.lock_handed_on()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() < before
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == before
