"""MaxSim at sizes that are odd, large, or many, against float64."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.maxsim import maxsim, topk  # noqa: E402

from .maxsim_cases import plain, tokens  # noqa: E402


@pytest.mark.parametrize("length", [1, 127, 1000, 4097])
@pytest.mark.parametrize("size", [1, 63, 257])
def test_long_and_odd(length, size):
    q, x = tokens(2, 33, size), tokens(3, length, size, seed=1)
    expected = plain(q.double(), x.double())
    torch.testing.assert_close(maxsim(q, x).double(), expected, rtol=3e-6, atol=1e-5)


def test_largest_embeddings():
    q, x = tokens(1, 3, 4096), tokens(2, 5, 4096, seed=1)
    torch.testing.assert_close(maxsim(q, x).double(), plain(q.double(), x.double()), rtol=3e-6, atol=1e-4)


@pytest.mark.slow
def test_the_ranking_of_ten_thousand_documents_is_that_of_float64():
    unit = torch.nn.functional.normalize
    q, x = unit(tokens(1, 32, 128), dim=-1), unit(tokens(10_000, 20, 128, seed=1), dim=-1)
    x[5_000] = x[17]  # a tie
    exact = torch.cat([plain(q.double(), part.double())[0] for part in x.split(1000)])
    places = topk(q, x, 10_000)[1][0]
    assert places.sort().values.tolist() == list(range(10_000))
    assert (exact[places].diff() <= 2e-6).all()  # in order, but for what float32 cannot tell apart
    assert places.tolist().index(17) + 1 == places.tolist().index(5_000)
    assert places[:100].tolist() == exact.sort(descending=True, stable=True).indices[:100].tolist()
