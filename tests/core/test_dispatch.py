"""Which kernel serves a call, and what is said about the others."""

import itertools
import logging
import warnings
from types import SimpleNamespace

import pytest

from flashot_backends import dispatch
from flashot_backends.config import use
from flashot_backends.dispatch import BackendError, NotApplicable, select
from flashot_backends.plugins import KernelSpec
from flashot_backends.plugins.manager import registry

pytestmark = pytest.mark.usefixtures("clean_settings")
_numbers = itertools.count()
TORCH_CPU = SimpleNamespace(array="torch", device="cpu", size=10)


class Kernel:
    def __init__(self, reason=None):
        self.reason = reason
        self.asked = 0

    def applies(self, request):
        self.asked += 1
        if isinstance(self.reason, Exception):
            raise self.reason
        return self.reason


@pytest.fixture
def operation():
    """An operation of its own for each test, with its kernels taken out at the end."""
    name = f"toy{next(_numbers)}"
    yield name
    for spec in registry().kernels(name):
        dispatch.unregister(spec)


@pytest.fixture
def add(operation):
    def add(name, kernel=None, priority=0, arrays=("torch",), target="nowhere.at.all", **fields):
        spec = KernelSpec(operation, name, target, frozenset(arrays), priority=priority, **fields)
        dispatch.register(spec, kernel)
        return kernel or spec

    return add


def test_the_highest_priority_that_applies(operation, add):
    add("low", Kernel())
    middle = add("middle", Kernel(), 1)
    add("high", Kernel("too large"), 2)
    assert select(operation, TORCH_CPU) is middle


def test_kernels_of_other_arrays_and_devices_are_not_asked(operation, add):
    card = add("card", Kernel(), 9, devices=frozenset({"cuda"}))
    jax = add("jax", Kernel(), 8, arrays=("jax",))
    plain = add("plain", Kernel())
    assert select(operation, TORCH_CPU) is plain
    assert select(operation, SimpleNamespace(array="torch", device="cuda")) is card
    assert select(operation, SimpleNamespace(array="jax", device="cpu")) is jax
    assert (card.asked, jax.asked, plain.asked) == (1, 1, 1)


def test_a_name_must_apply(operation, add):
    add("good", Kernel())
    add("bad", Kernel("it is Tuesday"))
    with pytest.raises(BackendError, match=r"'bad' was asked for by name and does not apply: it is Tuesday"):
        select(operation, TORCH_CPU, "bad")


def test_a_list_is_the_order_and_the_whole_choice(operation, add):
    first, second = add("first", Kernel(), 5), add("second", Kernel())
    add("bad", Kernel("no"))
    assert select(operation, TORCH_CPU, ["second", "first"]) is second
    assert select(operation, TORCH_CPU, ["bad", "first"]) is first
    with pytest.raises(BackendError, match=r"no kernel applies to torch arrays on cpu:\n  bad: no$"):
        select(operation, TORCH_CPU, ["bad"])


def test_the_setting_chooses_and_the_argument_beats_it(operation, add):
    first, second = add("first", Kernel(), 5), add("second", Kernel())
    with use(backend=["second"]):
        assert select(operation, TORCH_CPU) is second
        assert select(operation, TORCH_CPU, "first") is first
    assert select(operation, TORCH_CPU) is first


def test_unknown_names_suggest_the_nearest(operation, add):
    add("triton", Kernel())
    add("torch", Kernel())
    with pytest.raises(BackendError, match=r"has no kernel named 'tritn'\. Did you mean 'triton'\?"):
        select(operation, TORCH_CPU, "tritn")
    with pytest.raises(BackendError, match=r"Did you mean 'torch'\?"):
        select(operation, TORCH_CPU, ["triton", "tortch"])
    with use(backend=["zzz"]), pytest.raises(BackendError, match=r"Known: 'torch', 'triton'"):
        select(operation, TORCH_CPU)


def test_a_setting_may_name_kernels_of_other_operations(operation, add, caplog):
    torch = add("torch", Kernel())
    dispatch.register(other := KernelSpec(operation + "-b", "elsewhere", "nowhere", frozenset({"torch"})), Kernel())
    with use(backend=["elsewhere", "torch"]):
        assert select(operation, TORCH_CPU) is torch
    add("other", Kernel("no"), 9, arrays=("jax",))
    with use(backend=["elsewhere"], fallback="error"), caplog.at_level(logging.INFO, "flashot_backends"):
        assert [select(operation, TORCH_CPU) for _ in range(3)] == [torch] * 3
    assert sum("names no kernel for torch arrays (elsewhere)" in line for line in caplog.messages) == 1
    with use(backend=["other"]):
        assert select(operation, TORCH_CPU) is torch
    with pytest.raises(BackendError, match="no kernel named 'elsewhere'"):
        select(operation, TORCH_CPU, ["elsewhere", "torch"])
    dispatch.unregister(other)


def test_unknown_operation():
    with pytest.raises(BackendError, match=r"'sinkhron'\. Did you mean 'sinkhorn'\?"):
        select("sinkhron", TORCH_CPU)


def test_missing_requirements_and_modules_are_reasons(operation, add):
    add("absent", None, requires=("no_such_module_anywhere", "sys"))
    add("broken", None, target="flashot_backends.kernels.no_such_file")
    with pytest.raises(BackendError) as caught:
        select(operation, TORCH_CPU)
    assert "absent: no_such_module_anywhere cannot be imported" in str(caught.value)
    assert "broken: flashot_backends.kernels.no_such_file cannot be imported" in str(caught.value)
    reasons = {spec.name: reason for spec, reason in dispatch.report() if spec.operation == operation}
    assert set(reasons) == {"absent", "broken"}
    assert None not in reasons.values()


def test_targets_are_imported_when_first_considered(operation, add, tmp_path, monkeypatch):
    name = f"kernel_of_{operation}"
    (tmp_path / f"{name}.py").write_text("class Kernel:\n    applies = staticmethod(lambda request: None)\n")
    monkeypatch.syspath_prepend(tmp_path)
    add("lazy", None, target=f"{name}:Kernel")
    assert name not in __import__("sys").modules
    assert select(operation, TORCH_CPU).__name__ == "Kernel"


def test_not_applicable_is_a_reason_and_other_exceptions_propagate(operation, add):
    add("refuses", Kernel(NotApplicable("no room")), 2)
    good = add("good", Kernel())
    assert select(operation, TORCH_CPU) is good
    add("buggy", Kernel(RuntimeError("a real bug")), 3)
    with pytest.raises(RuntimeError, match="a real bug"):
        select(operation, TORCH_CPU)


def test_one_info_line_per_kernel_and_reason(operation, add, caplog):
    caplog.set_level(logging.INFO, "flashot_backends")
    bad = add("bad", Kernel("too large"), 1)
    add("good", Kernel())
    for _ in range(3):
        select(operation, TORCH_CPU)
    bad.reason = "too small"
    for _ in range(3):
        select(operation, TORCH_CPU)
    assert [record.getMessage() for record in caplog.records] == [
        f"{operation}: passing over bad: too large",
        f"{operation}: running on good (cpu)",
        f"{operation}: passing over bad: too small",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_fallback_warn_warns_once(operation, add):
    add("bad", Kernel("too large"), 1)
    add("good", Kernel())
    with use(fallback="warn"):
        with pytest.warns(RuntimeWarning, match="passing over bad: too large"):
            select(operation, TORCH_CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            select(operation, TORCH_CPU)


def test_fallback_error_raises_for_candidates_only(operation, add):
    add("card", Kernel(), 9, devices=frozenset({"cuda"}))
    good = add("good", Kernel())
    with use(fallback="error"):
        assert select(operation, TORCH_CPU) is good  # a kernel for another device is no fallback
        with pytest.raises(BackendError, match=r"'card' does not apply \(fallback='error'\): it runs on cuda"):
            select(operation, TORCH_CPU, ["card", "good"])
        add("bad", Kernel("too large"), 1)
        with pytest.raises(BackendError, match="too large"):
            select(operation, TORCH_CPU)


def test_registering_and_unregistering_take_effect_at_once(operation, add):
    low = add("low", Kernel())
    assert select(operation, TORCH_CPU) is low
    high = Kernel()
    dispatch.register(spec := KernelSpec(operation, "high", "nowhere", frozenset({"torch"}), priority=5), high)
    assert select(operation, TORCH_CPU) is high
    dispatch.unregister(spec)
    assert select(operation, TORCH_CPU) is low
    with pytest.raises(ValueError, match=r"kernel 'low' of operation .* is registered by both"):
        dispatch.register(KernelSpec(operation, "low", "nowhere", frozenset({"torch"})))


def test_the_repeated_path_costs_microseconds(operation, add):
    from timeit import repeat

    add("good", Kernel())
    assert min(repeat(lambda: select(operation, TORCH_CPU), number=1000, repeat=5)) / 1000 < 20e-6  # measured: 1e-6
