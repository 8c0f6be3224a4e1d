"""PyLate's contrastive losses without a matrix of scores: the same loss and gradients, and only where it is theirs."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pylate")

import pylate.losses  # noqa: E402
import pylate.scores  # noqa: E402

import flashot_backends  # noqa: E402
from flashot_backends import use  # noqa: E402
from flashot_backends.ops.maxsim import deferred  # noqa: E402

newer = pytest.mark.skipif(not hasattr(pylate.scores, "ColBERTScores"), reason="PyLate 1.4 and older score otherwise")


class Model(torch.nn.Module):
    """As much of a ColBERT as the losses ask for."""

    def __init__(self, expand):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(50, 16, generator=generator))
        self.skiplist, self.do_query_expansion = [3, 4], expand

    def forward(self, features):
        return {"token_embeddings": self.table[features["input_ids"]]}


def features(texts, count=5, length=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(texts):
        ids = torch.randint(0, 50, (count, length), generator=generator)
        keep = torch.arange(length) < torch.randint(2, length + 1, (count, 1), generator=generator)
        found.append({"input_ids": ids, "attention_mask": keep.long()})
    return found


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    monkeypatch.setattr(deferred, "worthwhile", lambda *_: True)
    flashot_backends.enable()
    yield
    flashot_backends.disable()


@pytest.fixture
def fused(monkeypatch):
    seen = []
    contrastive = deferred.contrastive
    monkeypatch.setattr(deferred, "contrastive", lambda *a, **k: seen.append(k) or contrastive(*a, **k))
    return seen


def both(kind, expand=True, texts=3, **options):
    """Loss and gradient of the model, on PyLate's path and on ours."""
    results = []
    for substitute in ([], ["pylate"]):
        with use(substitute=substitute):
            model = Model(expand)
            loss = getattr(pylate.losses, kind)(model, **options)(features(texts), None)
            loss.backward()
            results.append((loss, model.table.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@newer
@pytest.mark.parametrize("options", [{}, {"size_average": False, "temperature": 0.3}], ids=["mean", "sum"])
@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("parts", [None, 2])
def test_contrastive(options, expand, parts, fused):
    both("Contrastive", expand, score_mini_batch_size=parts, **options)
    assert len(fused) == 1


@newer
@pytest.mark.parametrize("parts", [2, 5])
def test_cached_contrastive(parts, fused):
    both("CachedContrastive", mini_batch_size=2, score_mini_batch_size=parts, temperature=0.5)
    assert len(fused) == -(-5 // parts)


def test_small_batches_keep_their_scores(monkeypatch):
    monkeypatch.undo()  # of what makes everything worthwhile
    monkeypatch.delattr(deferred, "contrastive")
    both("Contrastive")


@pytest.mark.parametrize("kind", ["Contrastive", "CachedContrastive"])
def test_every_version_learns_the_same(kind, monkeypatch):
    monkeypatch.undo()
    both(kind)


@newer
def test_scores_outside_the_losses_are_tensors(fused):
    with use(substitute=["pylate"]):
        scores = pylate.scores.ColBERTScores()(torch.randn(2, 3, 4), torch.randn(2, 1, 5, 4))
    assert isinstance(scores, torch.Tensor)


@newer
def test_another_metric_sees_tensors(fused):
    class Own(pylate.scores.ColBERTScores):
        def __call__(self, *args, **kwargs):
            scores = super().__call__(*args, **kwargs)
            assert isinstance(scores, torch.Tensor)
            return scores

    both("Contrastive", score_metric=Own())
    assert not fused
