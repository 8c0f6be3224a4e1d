"""Deferred scores: the fused loss where it is the cross entropy, and the plain scores for anything else."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy  # noqa: E402

from flashot_backends.ops.maxsim import deferred as module  # noqa: E402
from flashot_backends.ops.maxsim import maxsim  # noqa: E402
from flashot_backends.ops.maxsim.deferred import DeferredScores, worthwhile  # noqa: E402

from .maxsim_cases import mask, tokens  # noqa: E402


@pytest.fixture
def losses(monkeypatch):
    """Every call of the fused loss."""
    seen = []
    fused = module.contrastive
    monkeypatch.setattr(module, "contrastive", lambda *args, **kwargs: seen.append(kwargs) or fused(*args, **kwargs))
    return seen


def sides(groups=2):
    q, d = tokens(3, 4, 8).requires_grad_(), tokens(3, groups, 5, 8, seed=1).requires_grad_()
    return q, d, mask(3, 4), mask(3, groups, 5, seed=2)


def plain(q, d, qm, dm):
    return maxsim(q, d.flatten(0, 1), qm, dm.flatten(0, 1), "zero")


LABELS = torch.arange(3) * 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_fused(losses, reduction):
    q, d, *masks = sides()
    results = []
    for scores in (DeferredScores(q, d, *masks, "zero"), plain(q, d, *masks)):
        loss = cross_entropy(input=scores / 0.5, target=LABELS, reduction=reduction)
        results.append((loss, *torch.autograd.grad(loss.sum(), (q, d))))
    torch.testing.assert_close(*results)
    assert losses == [{"temperature": 0.5, "reduction": reduction}]


def test_parts_of_the_queries_are_joined(losses):
    q, d, qm, dm = sides()
    parts = [DeferredScores(q[i : i + 2], d, qm[i : i + 2], dm, "zero") for i in (0, 2)]
    loss = cross_entropy(torch.cat(parts, dim=0), LABELS)
    torch.testing.assert_close(loss, cross_entropy(plain(q, d, qm, dm), LABELS))
    assert len(losses) == 1
    other = [parts[0], DeferredScores(q[2:], d.clone(), qm[2:], dm, "zero")]
    torch.testing.assert_close(torch.cat(other), plain(q, d, qm, dm))
    torch.testing.assert_close(torch.cat([parts[0], torch.zeros(1, 6)])[:2], parts[0].tensor())
    assert len(losses) == 1


def test_anything_else_is_done_to_the_scores(losses):
    q, d, *masks = sides()
    scores, right = DeferredScores(q, d, *masks, "zero"), plain(q, d, *masks)
    for function in (
        lambda s: s + 1, lambda s: 2 * s, lambda s: -s, lambda s: s[1], lambda s: s / torch.ones(6), lambda s: s.T,
        lambda s: torch.softmax(s, 1), lambda s: s.max(dim=1).values, lambda s: torch.stack([s, s]), lambda s: 1 - s,
        lambda s: torch.where(s > 0, s, 0.0), lambda s: cross_entropy(s, LABELS, label_smoothing=0.1),
        lambda s: cross_entropy(s, LABELS, weight=torch.arange(6.0)), lambda s: s.exp() @ torch.ones(6),
        lambda s: cross_entropy(s, right.softmax(1)),
    ):  # fmt: skip
        torch.testing.assert_close(function(scores), function(right))
    assert scores.shape == right.shape
    assert len(scores) == 3
    assert not losses


def test_where_it_pays(monkeypatch):
    q, d = torch.zeros(1024, 32, 1), torch.zeros(1024, 180, 1)
    assert worthwhile(q, d.expand(1024, 180, 1))
    wide = torch.empty(1024, 32, 4096, device="meta"), torch.empty(1024, 180, 4096, device="meta")
    assert not worthwhile(*wide)
    assert not worthwhile(q[:32], d[:32])
