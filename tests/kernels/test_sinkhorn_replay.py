"""Launches that are run again with other tensors: only those change, in the order of the first time."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn.launch import Launch, Replay  # noqa: E402


def laid_out(args, log):
    """A launch as it is after it was started once: a grid of four numbers, arguments, one constant."""
    one = Launch.__new__(Launch)
    pointers = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
    one.args, one.constants, one.ready = args, (True,), [7, 1, 1, 0, *pointers, True]
    one.start = lambda *ready: log.append(ready)
    return one


def test_only_what_was_named_changes():
    x, y, buffer, notes = torch.ones(3), torch.ones(4), torch.ones(5), torch.ones(6)
    log = []
    launches = [laid_out((x, buffer, 12, y), log), laid_out((buffer, y), log), laid_out((notes, x), log)]
    replay = Replay(launches, {"x": x, "y": y}, (notes,))
    assert all(one.args == () for one in launches), "nobody's arrays are kept"
    assert replay.bytes == 4 * (5 + 6)
    other_x, other_y = torch.zeros(3), torch.zeros(4)
    found = replay({"x": other_x, "y": other_y}, lambda: log.append("before the last two") or "seen", 2)
    assert found == "seen"
    a, b = other_x.data_ptr(), other_y.data_ptr()
    assert log == [
        (7, 1, 1, 0, a, buffer.data_ptr(), 12, b, True),
        "before the last two",
        (7, 1, 1, 0, buffer.data_ptr(), b, True),
        (7, 1, 1, 0, notes.data_ptr(), a, True),
    ]
    assert not notes.any(), "notes are zero at the start"


def test_one_tensor_in_two_places():
    x, log = torch.ones(3), []
    replay = Replay([laid_out((x, x), log)], {"x": x, "y": x}, ())
    other = torch.ones(3)
    replay({"x": other, "y": other}, lambda: None, 1)
    assert log == [(7, 1, 1, 0, other.data_ptr(), other.data_ptr(), True)]
