"""The Triton kernels, interpreted on the CPU or compiled where there is a GPU, against the float64 reference."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from flashot_backends.kernels.maxsim import reference, triton, tuning  # noqa: E402
from flashot_backends.ops.maxsim import xtr  # noqa: E402
from flashot_backends.ops.maxsim.inputs import build  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
# The interpreter multiplies bfloat16 as the integers that hold it.
DTYPES = [(torch.float32, 3e-6), (torch.float16, 2e-6)] + ([(torch.bfloat16, 2e-6)] if GPU else [])
SMALL = [(1, 1, 1, 1, 1), (3, 5, 4, 37, 8), (2, 33, 3, 17, 7), (5, 3, 2, 65, 33), (1, 40, 3, 9, 16), (3, 7, 2, 20, 300)]


def tokens(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def mask(*shape, seed=1):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6).to(DEVICE)


@pytest.fixture(autouse=True, params=["documents", "queries"])
def launches(request, monkeypatch):
    """Both orientations, in tiles small enough that the interpreter meets several of them; documents shared or not."""
    rows = {"BQ": 32, "BT": 16, "DOCUMENT_ROWS": request.param == "documents", "STAGES": 2, "num_warps": 4}
    if request.param == "queries":
        rows.update(REGISTERS=True, FOLD=8, PROGRAMS=1, FLAT=True)
        monkeypatch.setattr(triton, "TOGETHER", 10)
    monkeypatch.setattr(tuning, "processors", lambda _: 2)
    monkeypatch.setattr(tuning, "forward", lambda *_: dict(rows))
    back = {"BT": 16, "BK": 16, "SCAN": 32, "ROWS": 8, "STAGES": 2, "GATHERS": 2, "PROGRAMS": 2, "num_warps": 4}
    monkeypatch.setattr(tuning, "backward", lambda *_: dict(back))
    triton._layouts.clear()


def check(problem, tolerance):
    exact = problem._replace(queries=problem.queries.double(), documents=problem.documents.double())
    scores, winners = triton.forward(problem, True)
    expected, right = reference.forward(exact, True)
    scale = float(problem.queries.double().norm(dim=-1).sum()) / max(problem.queries.shape[0], 1) + 1e-9
    finite = torch.isfinite(expected)
    assert torch.equal(scores.isfinite(), finite)
    assert ((scores.double() - expected)[finite].abs() <= tolerance * scale * 10 + 1e-7).all()
    # The same maxima, which a launch of another shape may add up in another order: a unit in the last place.
    torch.testing.assert_close(triton.forward(problem, False)[0], scores, rtol=3e-7, atol=0)
    slots = _slots(problem, winners.shape)
    assert (winners == right)[slots].double().mean() > 0.999
    gradient = tokens(*scores.shape, seed=5)
    mine = triton.backward(problem, winners, gradient, True, True)
    theirs = reference.backward(exact, winners, gradient, True, True)
    loose = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[problem.queries.dtype]
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == problem.queries.dtype
        assert (a.double() - b).norm() <= loose * b.norm() + 1e-9
    alone = triton.backward(problem, winners, gradient, False, True)
    assert alone[0] is None
    assert torch.equal(alone[1], mine[1])


def _slots(problem, shape):
    """Which recorded winners mean something."""
    if problem.queries_offsets is None:
        return torch.ones(shape, dtype=torch.bool, device=DEVICE)
    lengths = problem.queries_offsets.diff()
    if problem.set_size == 1:
        owners = torch.arange(shape[0], device=DEVICE)
    else:
        owners = problem.owners
    real = torch.arange(problem.longest_query, device=DEVICE) < lengths[:, None]
    return real[owners] if problem.set_size else real.expand(shape)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_all_pairs(shape, dtype, tolerance):
    nq, lq, nd, ld, d = shape
    q, x = tokens(nq, lq, d, dtype=dtype), tokens(nd, ld, d, seed=2, dtype=dtype)
    check(build(q, x, None, None, "exclude", False, None), tolerance)


@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("shape", SMALL[:4], ids=str)
def test_masks(shape, masked):
    nq, lq, nd, ld, d = shape
    q, x = tokens(nq, lq, d).abs(), -tokens(nd, ld, d, seed=2).abs()
    dm = mask(nd, ld, seed=3)
    dm[-1] = False
    check(build(q, x, mask(nq, lq), dm, masked, False, None), 3e-6)
    check(build(q, x, None, dm, masked, False, mask(nd, seed=4)), 3e-6)


HALF = pytest.param(torch.float16, marks=() if GPU else pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_sets_pairs_and_lists(dtype):
    q, x = tokens(3, 5, 8, dtype=dtype), tokens(3, 4, 18, 8, seed=1, dtype=dtype)
    check(build(q, x, None, mask(3, 4, 18), "zero", False, None), 3e-6)
    check(build(q, x[:, 1], None, None, "exclude", True, None), 3e-6)
    a = [tokens(n, 8, seed=n, dtype=dtype) for n in (3, 40, 1)]
    b = [tokens(n, 8, seed=50 + n, dtype=dtype) for n in (5, 0, 33, 2, 17)]
    check(build(a, b, None, None, "exclude", False, None), 3e-6)
    check(build(a, [b[:2], [], b[2:]], None, None, "exclude", False, None), 3e-6)
    check(
        build(q, [b[:1], b[2:4], b[4:]], None, None, "exclude", False, torch.tensor([True, False, True, False])), 3e-6
    )
    masks = [mask(len(t), seed=i) for i, t in enumerate(b)]
    check(build(a, b, [mask(len(t), seed=9) for t in a], masks, "zero", False, None), 3e-6)


def test_queries_gradient_is_added():
    q, x = tokens(3, 5, 8, dtype=torch.float16), tokens(4, 37, 8, seed=1, dtype=torch.float16)
    problem = build(q, x, None, None, "exclude", False, None)
    scores, winners = triton.forward(problem, True)
    gradient, total = tokens(*scores.shape, seed=5), tokens(3, 5, 8, seed=6)
    expected = total + reference.backward(problem, winners, gradient, True, False)[0]
    triton.add_queries(problem, winners, gradient, total)
    torch.testing.assert_close(total, expected, rtol=2e-3, atol=2e-3)


def test_ties_go_to_the_first_and_any_scale_is_exact():
    q, x = torch.ones(2, 3, 8, device=DEVICE), torch.ones(2, 40, 8, device=DEVICE)
    _, winners = triton.forward(build(q, x, None, None, "exclude", False, None), True)
    assert (winners == 0).all()
    for scale in (1e-20, 1e15):
        far = build(tokens(2, 3, 8) * scale, tokens(3, 20, 8, seed=1), None, None, "exclude", False, None)
        expected = reference.forward(far, False)[0]
        torch.testing.assert_close(triton.forward(far, False)[0], expected, rtol=1e-5, atol=1e-6 * scale)


def test_not_a_number_is_not_hidden():
    q, x = tokens(2, 3, 8), tokens(3, 20, 8)
    x[1, 4, 2] = float("nan")
    scores = triton.forward(build(q, x, None, None, "exclude", False, None), False)[0]
    assert scores.isnan().tolist() == [[False, True, False]] * 2


def test_strides():
    q, x = tokens(8, 5, 3).permute(2, 1, 0), tokens(6, 20, 2, 8)[:, :, 1]
    check(build(q, x, None, None, "exclude", False, None), 3e-6)
    check(build(q, x[:1].expand(5, 20, 8), None, None, "exclude", False, None), 3e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_strides_of_winners(shared):
    """As XTR makes them: the documents' axis last in memory."""
    queries, documents = (tokens(3, 5, 8), tokens(4, 20, 8)) if shared else (tokens(2, 5, 8), tokens(2, 2, 20, 8))
    problem = build(queries, documents, None, None, "exclude", False, None)
    scores, winners = triton.forward(problem, True)
    winners[1] = torch.iinfo(winners.dtype).max  # chose nothing
    order = range(winners.dim())
    moved = winners.permute(*reversed(order)).contiguous().permute(*reversed(order))
    gradient = tokens(*scores.shape, seed=5)
    for wanted in ((True, True), (True, False), (False, True)):
        expected = triton.backward(problem, winners, gradient, *wanted)
        assert moved.stride() != winners.stride()
        found = triton.backward(problem, moved, gradient, *wanted)
        assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.skipif(not GPU, reason="needs a GPU: the function chooses the kernel")
@pytest.mark.parametrize("k", [1, 40])
def test_xtr(k):
    q, x, keep = tokens(5, 7, 16), tokens(6, 33, 16), mask(6, 33)
    results = []
    for kind in (torch.float32, torch.float64):
        a, b = q.to(kind).requires_grad_(), x.to(kind).requires_grad_()
        scores = xtr(a, b, k, None, keep)
        results.append((scores.double(), *(g.double() for g in torch.autograd.grad(scores.square().sum(), (a, b)))))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0, 4097])
def test_sizes_it_leaves_to_others(size):
    problem = build(torch.zeros(1, 1, size), torch.zeros(1, 1, size), None, None, "exclude", False, None)
    assert "4096" in triton.applies(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [0, 1, 2, 4, 8])
def test_documents_in_few_bits(bits, dtype):
    from flashot_backends.ops.maxsim import Int8, Residuals

    q, lengths = tokens(3, 5, 16, dtype=dtype), [20, 3, 0, 17]
    generator = torch.Generator().manual_seed(1)
    if bits:
        packed = torch.randint(0, 256, (40, 16 * bits // 8), generator=generator).to(torch.uint8).to(DEVICE)
        codes = torch.randint(0, 5, (40,), generator=generator).to(DEVICE)
        coded = Residuals(codes, packed, lengths, tokens(5, 16, seed=2), tokens(1 << bits, seed=3) / 4)
    else:
        values = torch.randint(-127, 128, (40, 16), generator=generator).to(torch.int8).to(DEVICE)
        coded = Int8(values, tokens(40, seed=4).abs() / 127, lengths)
    problem = build(q, coded, None, mask(40), "zero", False, None)
    assert triton.applies(problem) is None
    expected = reference.forward(problem, False)[0]
    tolerance = 3e-3 if dtype == torch.float16 and bits else 1e-5
    torch.testing.assert_close(triton.forward(problem, False)[0], expected, rtol=tolerance, atol=tolerance)
