"""The fused contrastive loss, against cross entropy of the scores."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.maxsim import contrastive, maxsim  # noqa: E402

from .maxsim_cases import mask, tokens  # noqa: E402


def dense(q, x, labels, *masks, temperature, reduction):
    return torch.nn.functional.cross_entropy(maxsim(q, x, *masks) / temperature, labels, reduction=reduction)


@pytest.mark.parametrize("block", [1 << 24, 60], ids=["one block", "many blocks"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("masked", [False, True])
def test_like_cross_entropy(block, reduction, masked, monkeypatch):
    monkeypatch.setattr("flashot_backends.ops.maxsim.loss.WINNERS", block)
    monkeypatch.setattr("flashot_backends.ops.maxsim.loss.SCORES", block)
    q, x = tokens(4, 5, 8, dtype=torch.float64), tokens(7, 6, 8, seed=1, dtype=torch.float64)
    labels = torch.tensor([6, 0, 3, 3])
    masks = ()
    if masked:
        masks = mask(4, 5), mask(7, 6, seed=3)
        masks[1][:, 2] = True
    results = []
    for fused in (True, False):
        a, b = q.clone().requires_grad_(), x.clone().requires_grad_()
        loss = (contrastive if fused else dense)(a, b, labels, *masks, temperature=2.0, reduction=reduction)
        results.append((loss, *torch.autograd.grad(loss.square().sum(), (a, b))))
    torch.testing.assert_close(*results)


def test_default_labels_and_one_side():
    q, x = tokens(3, 4, 8).requires_grad_(), tokens(5, 6, 8, seed=1)
    expected = torch.nn.functional.cross_entropy(maxsim(q, x), torch.arange(3))
    torch.testing.assert_close(contrastive(q, x), expected)
    contrastive(q, x).backward()
    assert q.grad.shape == q.shape


def test_documents_without_tokens_have_no_share():
    q, x = tokens(2, 4, 8).requires_grad_(), tokens(3, 6, 8, seed=1).requires_grad_()
    dm = torch.ones(3, 6, dtype=torch.bool)
    dm[2] = False
    loss = contrastive(q, x, documents_mask=dm)
    torch.testing.assert_close(loss, contrastive(q, x[:2]))
    loss.backward()
    assert torch.isfinite(q.grad).all()
    assert (x.grad[2] == 0).all()


def test_errors_name_the_argument():
    q, x = tokens(3, 4, 8), tokens(2, 6, 8)
    with pytest.raises(ValueError, match="labels is needed"):
        contrastive(q, x)
    with pytest.raises(ValueError, match="labels is"):
        contrastive(q, x, torch.zeros(3))
    with pytest.raises(ValueError, match="reduction"):
        contrastive(q, x, torch.zeros(3, dtype=torch.int64), reduction="max")
    with pytest.raises(TypeError, match="padded tensors"):
        contrastive(list(q), x)
    loss = contrastive(q.requires_grad_(), tokens(3, 6, 8))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, q, create_graph=True)


def test_compiled_and_transformed():
    torch._dynamo.reset()
    q, x = tokens(3, 4, 8), tokens(5, 6, 8, seed=1)
    compiled = torch.compile(contrastive, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, x), contrastive(q, x))
    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(contrastive(leaf, x), leaf)[0]
    torch.testing.assert_close(torch.func.grad(contrastive)(q, x), expected)
