"""XTR scores, against the dense definition."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.maxsim import retrieval, xtr  # noqa: E402

from .maxsim_cases import mask, tokens  # noqa: E402


def dense(queries, documents, k, queries_mask=None, documents_mask=None):
    """Everything at once."""
    similar = torch.einsum("ash,bth->asbt", queries, documents)
    if documents_mask is not None:
        similar = similar.masked_fill(~documents_mask, torch.finfo(similar.dtype).min)
    flat = similar.flatten(2)
    chosen = torch.zeros_like(flat).scatter(-1, flat.topk(k, dim=-1).indices, 1.0)
    best = (flat * chosen).view(similar.shape).max(-1).values
    if queries_mask is not None:
        best = best * queries_mask[..., None]
    return best.sum(1) / (best > 0).sum(1).clamp(min=1e-3)


@pytest.fixture(autouse=True, params=[1 << 20, 64], ids=["one block", "many blocks"])
def block(request, monkeypatch):
    monkeypatch.setitem(retrieval.BLOCK, "cpu", request.param)


@pytest.mark.parametrize("k", [1, 5, 17, 30])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients(k, masked):
    q, x = tokens(3, 4, 8, dtype=torch.float64), tokens(5, 6, 8, seed=1, dtype=torch.float64)
    qm, dm = (mask(3, 4), mask(5, 6, share=0.95)) if masked else (None, None)
    if masked and k > int(dm.sum()):
        pytest.skip("retrieves masked tokens, whose similarity overflows the sum")
    results = []
    for function in (xtr, dense):
        a, b = q.clone().requires_grad_(), x.clone().requires_grad_()
        scores = function(a, b, k, qm, dm)
        results.append((scores, *torch.autograd.grad(scores.square().sum(), (a, b))))
    torch.testing.assert_close(*results)


def test_bad_k():
    with pytest.raises(ValueError, match="k is 7"):
        xtr(tokens(1, 2, 4), tokens(2, 3, 4), 7)
