"""The operation on the Triton kernels: calls like earlier ones, winners kept inside of a gradient, every layout."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from flashot_backends import dispatch, use  # noqa: E402
from flashot_backends.kernels.maxsim import triton, tuning  # noqa: E402
from flashot_backends.ops.maxsim import maxsim, repeat  # noqa: E402
from flashot_backends.ops.maxsim.scores import groups  # noqa: E402
from flashot_backends.plugins.specs import KernelSpec  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SPEC = KernelSpec("maxsim", "here", "flashot_backends.kernels.maxsim.triton", frozenset({"torch"}), None, (), 30)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """The Triton kernels serve tensors wherever they are, in small tiles; nothing is remembered from other tests."""
    rows = {"BQ": 16, "BT": 16, "DOCUMENT_ROWS": False, "STAGES": 1, "num_warps": 4, "FOLD": 8, "PROGRAMS": 1}
    monkeypatch.setattr(tuning, "processors", lambda _: 2)
    monkeypatch.setattr(tuning, "forward", lambda *_: dict(rows))
    back = {"BT": 16, "BK": 16, "SCAN": 32, "ROWS": 8, "STAGES": 1, "GATHERS": 1, "PROGRAMS": 2, "num_warps": 4}
    monkeypatch.setattr(tuning, "backward", lambda *_: dict(back))
    triton._layouts.clear()
    repeat._known.clear()
    dispatch.register(SPEC)
    yield
    dispatch.unregister(SPEC)
    triton._layouts.clear()
    repeat._known.clear()


@pytest.fixture
def asked(monkeypatch):
    """How often a kernel was chosen."""
    seen = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *a: seen.append(a) or select(*a))
    return seen


def tokens(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def mask(*shape, seed=1):
    found = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    found[..., 0] = True
    return found.to(DEVICE)


def both(function, *inputs, rtol=2e-5):
    """Values and gradients of the Triton kernels and of plain float64 blocks agree; the former's, detached."""
    results = []
    for backend, kind in ((None, inputs[0].dtype), ("torch", torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        scores = function(*leaves, backend)
        weights = tokens(*scores.shape, seed=9).to(scores.dtype)
        results.append([x.double() for x in (scores.detach(), *torch.autograd.grad(scores, leaves, weights))])
    torch.testing.assert_close(*results, rtol=rtol, atol=rtol)
    return results[0]


LAYOUTS = {
    "all pairs": ((3, 5, 8), (4, 21, 8), False),
    "long queries": ((2, 40, 8), (3, 18, 8), False),
    "sets": ((3, 5, 8), (3, 4, 21, 8), False),
    "aligned": ((3, 5, 8), (3, 21, 8), True),
}


@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_again(layout, holes, masked, asked):
    q_shape, d_shape, pairs = LAYOUTS[layout]
    q_mask, d_mask = (mask(*q_shape[:-1]), mask(*d_shape[:-1], seed=2)) if holes else (None, None)
    run = lambda q, d, backend: maxsim(q, d, q_mask, d_mask, masked, pairs, backend=backend)  # noqa: E731
    for seed in (0, 10, 20):  # other numbers at other addresses, the second and third time without a question
        both(run, tokens(*q_shape, seed=seed), tokens(*d_shape, seed=seed + 1))
        plain = maxsim(tokens(*q_shape, seed=seed), tokens(*d_shape, seed=seed + 1), q_mask, d_mask, masked, pairs)
        assert plain.grad_fn is None
    assert len(asked) == 1 + 3  # ours once, "torch" for every comparison
    assert len(repeat._known) == 1


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("masked", ["exclude", "zero"])
def test_masks_as_words(monkeypatch, masked, columns):
    rows = {"BQ": 16, "BT": columns, "DOCUMENT_ROWS": False, "STAGES": 1, "num_warps": 4, "FOLD": 8, "PROGRAMS": 1}
    monkeypatch.setattr(tuning, "forward", lambda *_: dict(rows))
    d_mask = mask(3, 100, seed=3)
    d_mask[1, 40:] = False
    d_mask[2] = torch.arange(100) % 32 == 31
    run = lambda q, d, backend: maxsim(q, d, None, d_mask, masked, backend=backend)  # noqa: E731
    both(run, tokens(2, 5, 8).abs(), -tokens(3, 100, 8, seed=1).abs())


def test_other_layouts_and_settings_are_other_calls(asked):
    q, d = tokens(2, 3, 8), tokens(3, 5, 8)
    first = maxsim(q, d)
    assert torch.equal(maxsim(q, d), first) and len(asked) == 1
    maxsim(q, d.transpose(1, 2).contiguous().transpose(1, 2))
    maxsim(q.half(), d.half())
    maxsim(q, d, masked="zero")
    maxsim(q, d[:2], pairs=True)
    assert len(asked) == 5
    with use(backend="reference"):
        torch.testing.assert_close(maxsim(q, d), first)
    assert len(asked) == 6
    assert asked[-1][1] is not None and len(repeat._known) == 5  # the reference prepares nothing
    maxsim(q, d, backend=["here"])
    assert len(asked) == 7


def test_bad_input_is_refused_after_good(asked):
    q, d = tokens(2, 3, 8), tokens(3, 5, 8)
    maxsim(q, d)
    for bad, said in [
        ((q, d[..., :7]), "embedding size"),
        ((q[0], d), "queries"),
        ((q.int(), d.int()), "dtype"),
        ((q, d, mask(2, 4)), "queries_mask"),
        ((q, d, None, mask(3, 4)), "documents_mask"),
        ((q, d, None, None, "both"), "masked"),
        ((q, d, None, None, "zero", True), "pairs"),
    ]:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=said):
                maxsim(*bad)
    with pytest.raises(ValueError, match="masked"):
        maxsim(q, d, masked=["zero"])
    maxsim(q, d, mask(2, 3).int(), mask(3, 5).tolist())  # numbers and lists are masks too, though never remembered
    assert len(repeat._known) == 1


def test_casts_are_part_of_a_call():
    q, d = tokens(2, 3, 8), tokens(3, 21, 8)
    for _ in range(2):
        mixed = both(lambda a, b, backend: maxsim(a.half().to(a.dtype), b, backend=backend), q, d)
        wide = maxsim(q.half(), d)
        assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), mixed[0])
    assert any(known.kind == torch.float32 for known in repeat._known.values())
    if GPU:
        with torch.autocast("cuda", torch.float16):
            narrow = [maxsim(q, d) for _ in range(2)]
        assert torch.equal(*narrow) and not torch.equal(narrow[0], maxsim(q, d))


def test_groups():
    q, d, d_mask, weights = tokens(3, 5, 8), tokens(2, 3, 21, 8, seed=1), mask(2, 3, 21), tokens(3, 6, seed=5)
    flat = d.flatten(0, 1).requires_grad_()
    expected = maxsim(q, flat, None, d_mask.flatten(0, 1), "zero", backend="torch")
    (expected_gradient,) = torch.autograd.grad(expected, flat, weights)
    for _ in range(2):
        leaf = d.clone().requires_grad_()
        scores = groups(q, leaf, None, d_mask, "zero")
        torch.testing.assert_close(scores, expected)
        (found,) = torch.autograd.grad(scores, leaf, weights)
        torch.testing.assert_close(found, expected_gradient.view_as(d))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_winners_inside_of_the_gradient(monkeypatch, dtype, masked):
    monkeypatch.setattr(triton, "AT_HOME", 1)
    monkeypatch.setattr(triton, "HEAVY", 1000)
    d_mask = mask(7, 37) if masked else None
    run = lambda q, d, backend: maxsim(q, d, None, d_mask, "zero", backend=backend)  # noqa: E731
    for _ in range(2):
        found = both(run, tokens(3, 5, 16, dtype=dtype), tokens(7, 37, 16, seed=1, dtype=dtype), rtol=2e-3)
    assert found[2].abs().sum() > 0
    apart = [plan.apart for each in triton._layouts.values() for plan in each.plans.values() if hasattr(plan, "apart")]
    assert any(apart)


def second_exactly(q, d, weights):
    """The documents' derivative of the squared gradient of the queries, in float64."""
    q, d = (x.detach().double().requires_grad_() for x in (q, d))
    (first,) = torch.autograd.grad(maxsim(q, d, backend="torch"), q, weights.double(), create_graph=True)
    return torch.autograd.grad(first.square().sum(), d)[0]


def test_winners_inside_of_the_gradient_serve_more_than_once(monkeypatch):
    q, d = tokens(3, 5, 16).requires_grad_(), tokens(7, 37, 16, seed=1).requires_grad_()
    weights = tokens(3, 7, seed=5)
    expected = torch.autograd.grad(maxsim(q, d), (q, d), weights)
    monkeypatch.setattr(triton, "AT_HOME", 1)
    monkeypatch.setattr(triton, "HEAVY", 1000)
    triton._layouts.clear()
    repeat._known.clear()
    scores = maxsim(q, d)
    assert scores.grad_fn.home is not None
    once = torch.autograd.grad(scores, (q, d), weights, retain_graph=True)
    kept = [x.clone() for x in once]
    again = torch.autograd.grad(scores, (q, d), weights, retain_graph=True)
    for x in once:  # what a caller does to a gradient is his
        x.zero_()
    (only,) = torch.autograd.grad(scores, q, weights, retain_graph=True)
    last = torch.autograd.grad(scores, (q, d), weights, create_graph=True)
    for found in (kept, again, last):
        torch.testing.assert_close(tuple(found), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(only, expected[0], rtol=1e-6, atol=1e-6)
    (second,) = torch.autograd.grad(last[0].square().sum(), d)
    torch.testing.assert_close(second.double(), second_exactly(q, d, weights), rtol=1e-5, atol=1e-5)


def test_second_derivatives_before_the_first(monkeypatch):
    """Winners that a graph still holds are not written over."""
    monkeypatch.setattr(triton, "AT_HOME", 1)
    monkeypatch.setattr(triton, "HEAVY", 1000)
    q, d = tokens(3, 5, 16).requires_grad_(), tokens(7, 37, 16, seed=1).requires_grad_()
    scores = maxsim(q, d)
    (with_graph,) = torch.autograd.grad(scores, q, torch.ones_like(scores), create_graph=True)
    torch.autograd.grad(scores, (q, d), torch.ones_like(scores), retain_graph=True)
    (second,) = torch.autograd.grad(with_graph.square().sum(), d)
    expected = second_exactly(q, d, torch.ones_like(scores.detach()))
    torch.testing.assert_close(second.double(), expected, rtol=1e-5, atol=1e-5)


def test_divisors():
    numbers = torch.tensor([0, 1, 2, 31, 32, 33, 4095, 65536, 2**31 - 2, 2**31 - 1])
    for divisor in (1, 2, 3, 7, 31, 32, 33, 180, 512, 1000, 4097, 2**20, 2**31 - 1):
        factor, places = triton._divisor(divisor)
        near = torch.tensor([k * divisor + e for k in (1, 2, 5) for e in (-1, 0, 1) if k * divisor + e < 2**31])
        for n in torch.cat([numbers, near]).tolist():
            assert (n * factor) >> places == n // divisor
        assert factor < 2**33 and (2**31 - 1) * factor < 2**63
