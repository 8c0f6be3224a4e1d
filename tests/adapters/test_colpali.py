"""colpali-engine's scores on our MaxSim: the numbers of its torch path, and whose turn it is."""

import pytest

torch = pytest.importorskip("torch")
host = pytest.importorskip("colpali_engine.utils.maxsim")

import flashot_backends  # noqa: E402
from flashot_backends import dispatch, use  # noqa: E402

VARIABLE = "COLPALI_SCORES_BACKEND"


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    flashot_backends.enable()
    seen = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *args: seen.append(args) or select(*args))
    yield seen
    flashot_backends.disable()


def tokens(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., shape[-2] // 2 :, :][: len(x) // 2] = 0  # padding
    return x


@pytest.mark.parametrize(("name", "shape"), [("maxsim_inbatch", (5, 9, 16)), ("maxsim_kd", (4, 3, 9, 16))])
def test_scores_and_gradients(name, shape, calls, monkeypatch):
    query, doc = tokens(4, 6, 16), tokens(*shape, seed=1)
    results = []
    for backend in ("torch", "flashot"):
        monkeypatch.setenv(VARIABLE, backend)
        leaves = query.clone().requires_grad_(), doc.clone().requires_grad_()
        scores = getattr(host, name)(*leaves)
        weights = torch.linspace(-1, 1, scores.numel()).view(scores.shape)
        found = torch.autograd.grad(scores, leaves, weights)
        real = [x.detach().abs().sum(-1, keepdim=True) > 0 for x in leaves]  # the host spreads ties over padding
        results.append((scores, *[x * keep for x, keep in zip(found, real, strict=True)]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


def test_whose_turn_it_is(calls, monkeypatch):
    query, doc = tokens(2, 3, 8), tokens(2, 5, 8)
    expected = host.maxsim_inbatch(query, doc)
    assert not calls
    with use(substitute=["colpali"]):
        torch.testing.assert_close(host.maxsim_inbatch(query, doc), expected)
        assert len(calls) == 1
        monkeypatch.setenv(VARIABLE, "torch")
        host.maxsim_inbatch(query, doc)
    assert len(calls) == 1
    monkeypatch.setenv(VARIABLE, "flashot")
    with pytest.raises(ValueError, match="dimensions"):
        host.maxsim_inbatch(query, doc[0])
    flashot_backends.disable()
    with pytest.raises(ValueError, match="flashot"):
        host.maxsim_inbatch(query, doc)
