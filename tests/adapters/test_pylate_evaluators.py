"""PyLate's evaluators and its distillation loss come to the same numbers on our scores."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pylate")

import pylate.evaluation  # noqa: E402
import pylate.losses  # noqa: E402

import flashot_backends  # noqa: E402
from flashot_backends import dispatch, use  # noqa: E402


class Model:
    """Texts are numbers: the seeds of their embeddings."""

    model_card_data = SimpleNamespace(set_evaluation_metrics=lambda *args, **kwargs: None)
    truncate_sentence_embeddings = nullcontext

    def encode(self, sentences, **options):
        found = []
        for text in sentences:
            generator = torch.Generator().manual_seed(int(text))
            length = 4 if options["is_query"] else 3 + int(text) % 5
            found.append(torch.nn.functional.normalize(torch.randn(length, 16, generator=generator), dim=-1))
        return found


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    flashot_backends.enable()
    yield
    flashot_backends.disable()


@pytest.fixture
def calls(monkeypatch):
    seen = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *args: seen.append(args) or select(*args))
    return seen


def on_both(function):
    results = []
    for substitute in ([], ["pylate"]):
        with use(substitute=substitute):
            results.append(function())
    return results


def texts(start, count=12):
    return [str(i) for i in range(start, start + count)]


def test_triplets(calls):
    evaluator = pylate.evaluation.ColBERTTripletEvaluator(texts(0), texts(100), texts(200))
    theirs, ours = on_both(lambda: evaluator(Model()))
    assert ours == theirs
    assert 0 < ours["accuracy"] < 1
    assert len(calls) == 2


def test_distillation(calls):
    documents = [texts(100 + 10 * i, 3) for i in range(4)]
    scores = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).tolist()
    evaluator = pylate.evaluation.ColBERTDistillationEvaluator(texts(0, 4), documents, scores)
    theirs, ours = on_both(lambda: evaluator(Model()))
    assert ours["kl_divergence"] == pytest.approx(theirs["kl_divergence"], abs=1e-6)
    assert len(calls) == 1


def test_distillation_loss(calls):
    class Tokens(torch.nn.Module):
        skiplist, do_query_expansion = (1, 2), False

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)))

        def forward(self, features):
            return {"token_embeddings": self.table[features["input_ids"]]}

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 30, shape, generator=generator) for shape in ((3, 5), (6, 7))]
    features = [{"input_ids": x, "attention_mask": (torch.arange(x.shape[1]) < x[:, :1] % 4 + 2).long()} for x in ids]
    labels = torch.rand(3, 2, generator=generator)

    def run():
        model = Tokens()
        loss = pylate.losses.Distillation(model)(features, labels)
        loss.backward()
        return loss, model.table.grad

    torch.testing.assert_close(*on_both(run), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
