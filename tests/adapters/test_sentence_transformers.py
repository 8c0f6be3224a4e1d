"""sentence-transformers' multi-vector scores on our MaxSim, in the host's own convention."""

import pytest

torch = pytest.importorskip("torch")
host = pytest.importorskip("sentence_transformers.util.similarity")
if not hasattr(host, "maxsim"):
    pytest.skip("sentence-transformers 5 and older score no multi-vector embeddings", allow_module_level=True)

import flashot_backends  # noqa: E402
from flashot_backends import dispatch, use  # noqa: E402


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    flashot_backends.enable()
    seen = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *args: seen.append(args) or select(*args))
    yield seen
    flashot_backends.disable()


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged(lengths):
    return [tokens(n, 16, seed=n) for n in lengths]


def both(name, *args, **options):
    results = []
    for substitute in ([], ["sentence_transformers"]):
        with use(substitute=substitute):
            results.append(getattr(host, name)(*args, **options))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert results[1].dtype == torch.float32
    return results[1]


@pytest.mark.parametrize("name", ["maxsim", "mean_maxsim"])
@pytest.mark.parametrize("chunk", [None, 500])
def test_all_pairs(name, chunk, calls):
    both(name, ragged([3, 7, 5]), ragged([9, 4, 12, 1]), chunk_elements=chunk)
    padded = torch.nn.utils.rnn.pad_sequence(ragged([9, 4]), batch_first=True)
    both(name, tokens(3, 5, 16), padded, chunk_elements=chunk)
    hidden = tokens(4, 9, seed=2) > 0
    both(name, tokens(3, 5, 16), tokens(4, 9, 16, seed=1), tokens(3, 5) > 0, hidden, chunk_elements=chunk)
    assert calls


@pytest.mark.parametrize("name", ["maxsim_pairwise", "mean_maxsim_pairwise"])
def test_pairs(name, calls):
    both(name, ragged([3, 7, 5]), ragged([9, 4, 12]))
    assert calls


def test_negative_similarities_and_empty_documents(calls):
    nothing = torch.ones(3, 6, dtype=torch.bool)
    nothing[1] = False
    scores = both("maxsim", tokens(2, 4, 16).abs(), -tokens(3, 6, 16, seed=1).abs(), None, nothing)
    assert (scores[:, 0] < 0).all()
    assert (scores[:, 1] < scores.min() / 2).all() or (scores[:, 1] == scores.min()).all()
    both("maxsim", ragged([3]), [torch.zeros(0, 16), *ragged([4])])


def test_weights_and_other_dtypes_stay_with_the_host(calls):
    both("maxsim", tokens(2, 4, 16), tokens(3, 6, 16), torch.full((2, 4), 0.5))
    assert not calls


def test_gradients(calls):
    results = []
    for substitute in ([], ["sentence_transformers"]):
        a, b = tokens(2, 4, 16).requires_grad_(), tokens(3, 6, 16, seed=1).requires_grad_()
        with use(substitute=substitute):
            results.append(
                torch.autograd.grad(host.maxsim(a, b, None, tokens(3, 6, seed=3) > 0).square().sum(), (a, b))
            )
    torch.testing.assert_close(*results)
    assert calls
