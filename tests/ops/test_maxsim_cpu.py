"""Scores against maxsim-cpu (PyPI), an implementation in Rust that shares nothing with ours."""

import pytest

torch = pytest.importorskip("torch")
oracle = pytest.importorskip("maxsim_cpu")

from flashot_backends.ops.maxsim import maxsim  # noqa: E402

from .maxsim_cases import ragged, tokens  # noqa: E402


@pytest.mark.parametrize("shape", [(1, 1, 8), (32, 180, 128), (7, 513, 96), (64, 33, 64)], ids=str)
def test_padded(shape):
    rows, length, size = shape
    q, x = tokens(rows, size), tokens(9, length, size, seed=1)
    expected = torch.from_numpy(oracle.maxsim_scores(q.numpy(), x.numpy()))
    torch.testing.assert_close(maxsim(q[None], x)[0], expected, rtol=1e-5, atol=1e-4)


def test_ragged():
    q, documents = tokens(32, 128), ragged([1, 300, 17, 64, 1000, 5], 128, seed=3)
    expected = oracle.maxsim_scores_variable(q.numpy(), [x.numpy() for x in documents])
    torch.testing.assert_close(maxsim(q[None], documents)[0], torch.as_tensor(expected), rtol=1e-5, atol=1e-4)


def test_order_of_many_documents():
    q = torch.nn.functional.normalize(tokens(32, 64), dim=-1)
    documents = [
        torch.nn.functional.normalize(x, dim=-1) for x in ragged([5 + i % 40 for i in range(2000)], 64, seed=9)
    ]
    scores, exact = maxsim(q[None], documents)[0], maxsim(q[None].double(), [x.double() for x in documents])[0]
    theirs = torch.as_tensor(oracle.maxsim_scores_variable(q.numpy(), [x.numpy() for x in documents]))
    torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-4)
    order = exact.argsort(descending=True)
    assert (exact[scores.argsort(descending=True)] - exact[order]).abs().max() < 1e-5
