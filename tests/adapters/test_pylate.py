"""PyLate on our MaxSim: the numbers of its own torch path, and whose turn it is."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pylate")

import pylate.rank  # noqa: E402
import pylate.scores  # noqa: E402

import flashot_backends  # noqa: E402
from flashot_backends import dispatch, use  # noqa: E402

newer = pytest.mark.skipif(
    not hasattr(pylate.scores, "ColBERTScores"), reason="PyLate 1.4 and older have no such class"
)


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    flashot_backends.enable()
    yield
    flashot_backends.disable()


@pytest.fixture
def calls(monkeypatch):
    """Every problem that our MaxSim is given."""
    seen = []
    select = dispatch.select

    def watched(operation, request, backend=None):
        seen.append(request)
        return select(operation, request, backend)

    monkeypatch.setattr(dispatch, "select", watched)
    return seen


def tokens(*shape, seed=0, sign=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x.abs() * sign if sign else x).requires_grad_()


def mask(*shape, seed=1, share=0.6):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def same(function, *inputs, **options):
    """Values and gradients of the two backends agree."""
    results = []
    for backend in ("flashot", "torch"):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        scores = function(*leaves, backend=backend, **options)
        weights = torch.linspace(-1, 1, scores.numel()).view(scores.shape)
        results.append((scores, *torch.autograd.grad(scores, leaves, weights)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sign", [0, -1], ids=["any", "all negative"])
@pytest.mark.parametrize("share", [None, 0.6, 0.0], ids=["whole", "holes", "nothing"])
def test_scores(sign, share):
    q, d = tokens(3, 5, 8, sign=abs(sign)), tokens(4, 7, 8, seed=1, sign=sign)
    masks = {}
    if share is not None:
        masks = {"queries_mask": mask(3, 5), "documents_mask": mask(4, 7, seed=2, share=share).float()}
    same(pylate.scores.colbert_scores, q, d, **masks)


def test_pairwise_is_differentiable():
    same(pylate.scores.colbert_scores_pairwise, tokens(3, 5, 8), tokens(3, 7, 8, seed=1))


def test_pairwise_of_ragged_lists():
    q, d = [tokens(n, 8, seed=n) for n in (3, 5)], [tokens(n, 8, seed=n) for n in (9, 2, 4)]
    ours, theirs = (pylate.scores.colbert_scores_pairwise(q, d, backend=b) for b in ("flashot", "torch"))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
def test_distillation_scores(masked):
    q, d = tokens(3, 5, 8), tokens(3, 4, 7, 8, seed=1)
    masks = {"queries_mask": mask(3, 5).float(), "documents_mask": mask(3, 4, 7)} if masked else {}
    same(pylate.scores.colbert_kd_scores, q, d, **masks)


@newer
def test_groups_in_one_launch(calls):
    q, d = tokens(3, 5, 8), tokens(3, 2, 7, 8, seed=1)
    same(pylate.scores.ColBERTScores(), q, d, queries_mask=mask(3, 5), documents_mask=mask(3, 2, 7))
    assert len(calls) == 1


@newer
@pytest.mark.parametrize("kind", ["XTRScores", "XTRKDScores"])
def test_xtr_scores(kind):
    q, d = tokens(3, 5, 8), tokens(3, 2, 7, 8, seed=1)
    masks = {"queries_mask": mask(3, 5), "documents_mask": mask(3, 2, 7, share=0.9)}
    score = getattr(pylate.scores, kind)(k=6)
    results = []
    for substitute in ([], ["pylate"]):
        with use(substitute=substitute):
            scores = score(q, d, **masks)
        results.append((scores, *torch.autograd.grad(scores.square().sum(), (q, d))))
    torch.testing.assert_close(*results)


def test_numpy_and_lists():
    q, d = np.random.default_rng(0).normal(size=(2, 3, 4)), np.random.default_rng(1).normal(size=(3, 5, 4))
    theirs = pylate.scores.colbert_scores(q, d, backend="torch")
    torch.testing.assert_close(pylate.scores.colbert_scores(q, d, backend="flashot"), theirs)
    lists = pylate.scores.colbert_scores(q.tolist(), list(d), backend="flashot")
    torch.testing.assert_close(lists, theirs.float())


def test_exclusion_on_request():
    q, d = tokens(1, 2, 4, sign=1).detach(), tokens(1, 3, 4, sign=-1).detach()
    hidden = torch.tensor([[1, 0, 1]])
    zero, excluded = (
        pylate.scores.colbert_scores(q, d, documents_mask=hidden, backend=b) for b in ("flashot", "flashot:exclude")
    )
    assert float(zero) == 0
    assert float(excluded) < 0


def test_whose_turn_it_is(calls, monkeypatch):
    q, d = tokens(2, 3, 4), tokens(2, 5, 4)
    pylate.scores.colbert_scores(q, d)
    pylate.scores.colbert_scores(q, d, backend="torch")
    assert not calls
    with use(substitute=["pylate"]):
        pylate.scores.colbert_scores(q, d)
        pylate.scores.colbert_scores(q, d, backend="torch")
    assert len(calls) == 1
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "flashot")
    pylate.scores.colbert_scores(q, d)
    assert len(calls) == 2
    flashot_backends.disable()
    if not pylate.__version__.startswith(("1.3", "1.4", "1.5")):  # these take any name
        with pytest.raises(ValueError, match="flashot"):
            pylate.scores.colbert_scores(q, d)
    assert len(calls) == 2


def test_weights_instead_of_masks_stay_with_the_host(calls):
    q, d, weights = tokens(2, 3, 4), tokens(2, 5, 4), torch.full((2, 5), 0.5)
    theirs = pylate.scores.colbert_scores(q, d, documents_mask=weights)
    with use(substitute=["pylate"]):
        torch.testing.assert_close(pylate.scores.colbert_scores(q, d, documents_mask=weights), theirs)
    assert not calls
    with pytest.raises(ValueError, match="other numbers than 0 and 1"):
        pylate.scores.colbert_scores(q, d, documents_mask=weights, backend="flashot")


@pytest.mark.parametrize("sign", [0, -1], ids=["any", "all negative"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "one query"])
def test_rerank_in_one_launch(kind, sign, calls):
    queries = [tokens(n, 8, seed=n, sign=abs(sign)).detach() for n in (4, 4)]
    documents = [[tokens(n, 8, seed=n, sign=sign).detach() for n in lengths] for lengths in ((3, 9, 5), (6, 6), ())[:2]]
    ids = [["a", "b", "c"], [1, 2]]
    if kind == "numpy":
        queries, documents = [q.numpy() for q in queries], [[d.numpy() for d in group] for group in documents]
    if kind == "one query":
        queries, documents, ids = queries[0], documents[:1], ids[:1]
    theirs = pylate.rank.rerank(ids, queries, documents)
    with use(substitute=["pylate"]):
        ours = pylate.rank.rerank(ids, queries, documents)
    assert len(calls) == 1
    for mine, other in zip(ours, theirs, strict=True):
        assert sorted(str(r["id"]) for r in mine) == sorted(str(r["id"]) for r in other)
        assert [r["score"] for r in mine] == pytest.approx([r["score"] for r in other], abs=1e-4)
        if not sign:
            assert [r["id"] for r in mine] == [r["id"] for r in other]


def test_rerank_in_groups_of_bounded_size(calls, monkeypatch):
    from flashot_backends.adapters import pylate as adapter

    queries = [tokens(4, 8, seed=n).detach() for n in range(3)]
    documents = [[tokens(n, 8, seed=n).detach() for n in (3, 9)] for _ in range(3)]
    whole = pylate.rank.rerank([[1, 2]] * 3, queries, documents)
    monkeypatch.setitem(adapter.GROUP_BYTES, "cpu", 500)
    with use(substitute=["pylate"]):
        parts = pylate.rank.rerank([[1, 2]] * 3, queries, documents)
    assert len(calls) == 3
    assert [[r["id"] for r in result] for result in parts] == [[r["id"] for r in result] for result in whole]


def test_stanford_index_scores():
    host = pytest.importorskip("pylate.indexes.stanford_nlp.modeling.colbert")
    q, lengths = tokens(1, 4, 8).detach(), torch.tensor([3, 5, 1])
    documents = [tokens(int(n), 8, seed=int(n)).detach() for n in lengths]
    expected = torch.stack([(q[0] @ d.T).max(1).values.sum() for d in documents])
    with use(substitute=["pylate"]):
        packed = host.colbert_score_packed(q, torch.cat(documents), lengths)
        padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        keep = torch.arange(5) < lengths[:, None]
        shared = host.colbert_score(q, padded, keep[..., None])
        aligned = host.colbert_score(q.expand(3, 4, 8), padded, keep)
        none = host.colbert_score(q, padded, torch.zeros_like(keep))
    for scores in (packed, shared, aligned):
        torch.testing.assert_close(scores, expected)
    assert (none == -9999 * 4).all()


def test_defaults_of_loaded_losses():
    import pylate.losses

    default = pylate.losses.Distillation.__init__.__defaults__[0]
    assert default is pylate.scores.colbert_kd_scores
