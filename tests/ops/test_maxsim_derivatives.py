"""MaxSim's derivatives, under every transformation of torch."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.maxsim.shapes import SHAPE_IDS, SHAPES  # noqa: E402
from flashot_backends.ops.maxsim import maxsim  # noqa: E402

from .maxsim_cases import mask, plain, ragged, tokens  # noqa: E402


@pytest.fixture(params=["reference", "torch", "torch, as if large"])
def kernel(request, monkeypatch):
    name, _, large = request.param.partition(",")
    if large:
        monkeypatch.setattr("flashot_backends.kernels.maxsim.blocks.SMALL", 0)
    return name


def gradients(function, *inputs, seed=7):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    scores = function(*inputs)
    weights = tokens(*scores.shape, dtype=scores.dtype, seed=seed)
    return torch.autograd.grad(scores, inputs, weights)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
def test_grad_with_holes(shape, masked, kernel):
    nq, lq, nd, ld, d = shape
    q, x = tokens(nq, lq, d, dtype=torch.float64), tokens(nd, ld, d, dtype=torch.float64, seed=2)
    qm, dm = mask(nq, lq), mask(nd, ld, seed=3)
    dm[:, 0] |= ~dm.any(1)
    mine = gradients(lambda a, b: maxsim(a, b, qm, dm, masked, backend=kernel), q, x)
    theirs = gradients(lambda a, b: plain(a, b, qm, dm, masked), q, x)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grad_dtype(dtype, kernel):
    q, x = tokens(3, 5, 8, dtype=dtype), tokens(4, 6, 8, dtype=dtype, seed=2)
    mine = gradients(lambda a, b: maxsim(a, b, backend=kernel), q, x)
    theirs = gradients(lambda a, b: plain(a.double(), b.double()).float(), q, x)
    assert mine[0].dtype == mine[1].dtype == dtype
    torch.testing.assert_close(mine, theirs)


def test_grad_of_pairs_sets_and_lists(kernel):
    q, x = tokens(3, 4, 8, dtype=torch.float64), tokens(3, 5, 6, 8, dtype=torch.float64, seed=1)
    flat = lambda a, b: torch.stack([plain(a[i : i + 1], b[i])[0] for i in range(3)])  # noqa: E731
    torch.testing.assert_close(gradients(lambda a, b: maxsim(a, b, backend=kernel), q, x), gradients(flat, q, x))
    first = lambda a, b: maxsim(a, b[:, 0], pairs=True, backend=kernel)  # noqa: E731
    torch.testing.assert_close(gradients(first, q, x), gradients(lambda a, b: flat(a, b)[:, 0], q, x))
    items = ragged([4, 1, 7, 2], 8, dtype=torch.float64)
    sets = lambda a, *b: torch.cat(maxsim(list(a), [b[:1], b[1:3], b[3:]], backend=kernel))  # noqa: E731
    each = lambda a, *b: torch.cat([plain(a[i : i + 1], x[None])[0] for i, x in zip([0, 1, 1, 2], b, strict=True)])  # noqa: E731
    torch.testing.assert_close(gradients(sets, q, *items), gradients(each, q, *items))


def test_ties_go_to_the_first(kernel):
    q, x = torch.ones(1, 2, 3), torch.ones(2, 4, 3)
    dm = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    x[1, 3] = 2
    _, to_x = gradients(lambda a, b: maxsim(a, b, documents_mask=dm, backend=kernel), q, x)
    assert (to_x != 0).any(-1).tolist() == [[False, True, False, False], [False, False, False, True]]


def test_only_what_is_asked_for():
    q, x = tokens(2, 3, 4), tokens(3, 4, 4)
    only = maxsim(q.clone().requires_grad_(), x)
    only.sum().backward()
    with torch.no_grad():
        assert maxsim(q.clone().requires_grad_(), x).grad_fn is None


def test_no_gradient_from_empty_and_masked(kernel):
    q, x = tokens(2, 3, 4), tokens(2, 5, 4)
    dm = torch.tensor([[1] * 5, [0] * 5])
    to_q, to_x = gradients(lambda a, b: maxsim(a, b, documents_mask=dm, masked="zero", backend=kernel), q, x)
    assert torch.isfinite(to_q).all()
    assert (to_x[1] == 0).all()
    nothing = gradients(lambda a, b: maxsim(a, b, backend=kernel), q[:, :0], x)
    assert (nothing[1] == 0).all()


def test_gradcheck_and_gradgradcheck(kernel):
    q, x = tokens(2, 3, 4, dtype=torch.float64).requires_grad_(), tokens(3, 4, 4, dtype=torch.float64).requires_grad_()
    dm = mask(3, 4)
    dm[:, 0] = True
    function = lambda a, b: maxsim(a, b, documents_mask=dm, backend=kernel)  # noqa: E731
    assert torch.autograd.gradcheck(function, (q, x))
    assert torch.autograd.gradgradcheck(function, (q, x))
    assert torch.autograd.gradgradcheck(lambda a, b: maxsim(a, b[:2], pairs=True, backend=kernel), (q, x))


def test_third_derivative():
    q, x = tokens(1, 2, 3, dtype=torch.float64).requires_grad_(), tokens(2, 4, 3, dtype=torch.float64).requires_grad_()

    def third(function):
        (g,) = torch.autograd.grad(function(q, x).pow(4).sum(), q, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(h.pow(2).sum(), (q, x))

    torch.testing.assert_close(third(maxsim), third(plain))


def test_backward_is_deterministic():
    q, x = tokens(8, 16, 32), tokens(9, 70, 32, seed=1)
    one, two = (gradients(maxsim, q, x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_opcheck():
    from flashot_backends.ops.maxsim.operators import maxsim_operator

    q, x = tokens(2, 3, 4).requires_grad_(), tokens(3, 5, 4, seed=1).requires_grad_()
    none = (None,) * 6
    torch.library.opcheck(maxsim_operator, (q, x, *none, 3, 5, 0, "exclude", True, "torch"))
    dm = mask(3, 5)
    torch.library.opcheck(maxsim_operator, (q, x, None, dm, *none[:4], 3, 5, 0, "zero", True, None))
    torch.library.opcheck(maxsim_operator, (q[:1], x, *none, 3, 5, 3, "exclude", True, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()
    dm = mask(3, 5)
    dm[:, 0] = True

    def function(q, x, dm):
        return maxsim(torch.tanh(q), x, documents_mask=dm, masked="zero").log_softmax(-1)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    q, x = tokens(2, 3, 4), tokens(3, 5, 4, seed=1)
    torch.testing.assert_close(compiled(q, x, dm), function(q, x, dm))
    one = gradients(lambda a, b: compiled(a, b, dm), q, x)
    torch.testing.assert_close(one, gradients(lambda a, b: function(a, b, dm), q, x))


def test_no_recompilation_as_lengths_vary():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda a, b: maxsim(a, b), fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9, 17, 40):
        compiled(tokens(2, length, 4), tokens(3, length + 2, 4))
    assert counter.frame_count == 1


def test_vmap():
    q, x = tokens(4, 2, 3, 8), tokens(4, 5, 6, 8, seed=1)
    expected = torch.stack([plain(a, b) for a, b in zip(q, x, strict=True)])
    torch.testing.assert_close(torch.func.vmap(maxsim)(q, x), expected)
    torch.testing.assert_close(
        torch.func.vmap(maxsim, in_dims=(0, None))(q, x[0]), torch.stack([plain(a, x[0]) for a in q])
    )


def test_func_grad_and_its_vmap():
    q, x = tokens(4, 2, 3, 8), tokens(4, 5, 6, 8, seed=1)
    mine = torch.func.vmap(torch.func.grad(lambda a, b: maxsim(a, b).square().sum()))(q, x)
    theirs = torch.func.vmap(torch.func.grad(lambda a, b: plain(a, b).square().sum()))(q, x)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_func_hessian():
    q, x = tokens(1, 2, 3, dtype=torch.float64), tokens(2, 4, 3, dtype=torch.float64, seed=1)
    mine, theirs = (
        torch.func.jacrev(torch.func.grad(lambda a, f=f: f(a, x).square().sum()))(q) for f in (maxsim, plain)
    )
    torch.testing.assert_close(mine, theirs)


def test_what_masks_hide_stays_hidden(kernel):
    q, x = tokens(2, 3, 4), tokens(3, 5, 4)
    dm, qm = torch.ones(3, 5, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    dm[0, 3:] = qm[1, 2] = False
    expected = gradients(lambda a, b: maxsim(a, b, qm, dm, backend=kernel), q, x)
    x[0, 3], x[0, 4], q[1, 2] = torch.nan, torch.inf, torch.nan
    found = gradients(lambda a, b: maxsim(a, b, qm, dm, backend=kernel), q, x)
    torch.testing.assert_close(found, expected)
