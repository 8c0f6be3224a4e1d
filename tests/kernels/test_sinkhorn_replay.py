"""Loops that are run again on other tensors: only addresses change, in the order of the first time."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashot_backends.kernels.sinkhorn import launch, triton, triton_loop  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402


class Started(dict):
    """Every kernel is compiled already; starting one writes down its arguments."""

    def __init__(self):
        self.log = []

    def get(self, key):
        name = key[0]
        return SimpleNamespace(head=(), start=lambda *ready: self.log.append((name, ready)))


@pytest.fixture
def started(monkeypatch):
    found = Started()
    monkeypatch.setattr(launch, "_started", found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(triton_loop.Fetch, "result", lambda self: [0.0] * 4 + [1.0, 1.0, 1.0])
    return found


def tensors(kind, n, m, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    cost = Cost(None, None, draw(1, n, m)) if kind == "matrix" else Cost(draw(1, n, kind), draw(1, m, kind), None)
    return cost, (torch.ones(1, dtype=torch.float64), draw(1, n), draw(1, m), draw(1, n))


def addresses(cost, others, outputs):
    named = [*zip((*triton_loop.GIVEN, "penalty", *triton_loop.OFFSETS), others, strict=False)]
    named += [*zip(triton_loop.RESULTS, outputs, strict=True), *zip("xyM", cost[:3], strict=True)]
    return {name: part.data_ptr() for name, part in named if part is not None}


@pytest.mark.parametrize("size", [(40, 50), (400, 500)], ids=["resident", "streamed"])
@pytest.mark.parametrize(
    ("kind", "missed", "every"),
    [(kind, missed, 5) for kind in ("matrix", 2, 64) for missed in ("binding", "reach")]
    + [(2, "offsets", 5), (64, "offsets", 1), ("matrix", "reach", 1)],
)
def test_only_what_was_given_changes(started, kind, missed, every, size):
    control = triton_loop.Control(12, 0.0, every, 0, 0.3 if every == 1 else 1.0)

    def more():
        penalty = () if missed == "binding" else (torch.rand(1, 8),)
        return penalty + tuple(torch.rand(1, count) for count in (size if missed == "offsets" else ()))

    cost, others = tensors(kind, *size, seed=0)
    others += more()
    given = (*others[1:4], control, *others[4:5], *([others[5:]] if missed == "offsets" else []))
    loop = triton_loop.Loop(triton.Fused(cost, others[0]), *given)
    assert (getattr(loop, "settle", None) is not None) == (every == 1)
    outputs, parts = loop.outputs, set(addresses(cost, others, loop.outputs).values())
    loop.run(lambda seen: None)
    first = list(started.log)
    assert loop.keep()
    assert not loop.given and not loop.outputs, "nobody's arrays are kept"
    assert not any(one.args for one in loop.launches)
    assert not any(part is kept for kept in loop.kept for part in (*cost[:3], *others, *outputs) if part is not None)

    other_cost, other_others = tensors(kind, *size, seed=1)
    other_others += more()
    other_outputs = triton_loop.new_outputs(1, *size, control.looks, torch.device("cpu"))
    started.log.clear()
    wanted = addresses(other_cost, other_others, other_outputs)
    loop.again(wanted, lambda seen: None)
    assert [name for name, _ in started.log] == [name for name, _ in first]
    named = dict(zip(addresses(cost, others, outputs).values(), wanted.values(), strict=True))
    moved = 0
    for (_, before), (_, after) in zip(first, started.log, strict=True):
        assert tuple(named.get(value, value) for value in before) == after
        moved += sum(value in parts for value in before)
    assert moved >= len(parts)


def test_what_was_noted_is_zero_again_after_a_failure(started, monkeypatch):
    cost, others = tensors(2, 40, 50, seed=0)
    loop = triton_loop.Loop(triton.Fused(cost, others[0]), *others[1:], triton_loop.Control(12, 0.0, 5, 0, 1.0))
    given = addresses(cost, others, loop.outputs)
    loop.run(lambda seen: None)
    assert loop.keep()
    loop.notes.fill_(7)
    loop.scratch.fill_(7)

    def refuse(seen):
        raise ValueError("a holds -1")

    monkeypatch.setattr(triton_loop.Fetch, "result", lambda self: [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="a holds"):
        loop.again(given, refuse)
    assert not loop.notes.any() and not loop.scratch.any()


def test_results_lie_where_they_are_written():
    """Every result has its own place, aligned as tensors of their own would be."""
    batch, n, m, looks = 3, 5, 7, 4
    results = triton_loop.Results((batch, n, m), looks, torch.device("cpu"))
    results.words.zero_()
    f, g, iterations, error, converged, errors, gaps = results.tensors()
    shapes = ((batch, n), (batch, m), (batch,), (batch,), (batch,), (batch, looks), (batch, looks))
    for part, shape in zip((f, g, iterations, error, converged, errors, gaps), shapes, strict=True):
        assert part.shape == shape
    where = results.addresses()
    base = results.words.data_ptr()
    for name, part in zip(triton_loop.RESULTS, (f, g, iterations, error, converged, errors), strict=True):
        assert where[name] == part.data_ptr() and (where[name] - base) % 16 == 0
    for value, part in enumerate((f, g, iterations, error, errors, gaps), 1):
        part.fill_(value)
    converged.fill_(True)
    for value, part in enumerate((f, g, iterations, error, errors, gaps), 1):
        assert (part == value).all()
    assert converged.all() and converged.dtype == torch.bool and iterations.dtype == torch.int64


def test_one_tensor_in_two_places():
    x, log = torch.ones(3), []
    one = launch.Launch.__new__(launch.Launch)
    one.args, one.constants, one.ready, one.programs = (x, x), (True,), [7, x.data_ptr(), x.data_ptr(), True], 1
    one.start = lambda *ready: log.append(ready)
    assert one.detach({id(x): "x"}) == []
    one.attach({"x": 5})
    one.start(*one.ready)
    assert log == [(7, 5, 5, True)]
