"""The compressed index: what it finds against exhaustive search, its codes, its changes, and its folder."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.maxsim import Residuals, maxsim  # noqa: E402
from flashot_backends.ops.maxsim.index import Index, packed  # noqa: E402
from flashot_backends.ops.maxsim.pruning import UNSEEN, at_centroids, gathered, pruned  # noqa: E402

SIZE = 32


def collection(count=400, seed=0):
    """Documents about few topics each, and queries that are parts of some of them, all of unit tokens."""
    generator = torch.Generator().manual_seed(seed)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    topics = unit(torch.randn(60, SIZE, generator=generator))
    documents = []
    for length in torch.randint(4, 30, (count,), generator=generator).tolist():
        own = torch.randint(0, 60, (3,), generator=generator)[torch.randint(0, 3, (length,), generator=generator)]
        documents.append(unit(topics[own] + 0.15 * torch.randn(length, SIZE, generator=generator)))
    queries = [unit(x[:6] + 0.05 * torch.randn(len(x[:6]), SIZE, generator=generator)) for x in documents[::40]]
    return documents, queries


DOCUMENTS, QUERIES = collection()


def best(query, documents, k):
    return maxsim(query[None], documents)[0].topk(k)


@pytest.mark.parametrize(("bits", "least"), [(1, 0.6), (2, 0.75), (4, 0.85), (8, 0.95)])
def test_recall_of_codes(bits, least):
    index = Index(bits)
    index.add(DOCUMENTS)
    found = [index.search(query, 10)[1].tolist() for query in QUERIES]
    right = [best(query, DOCUMENTS, 10).indices.tolist() for query in QUERIES]
    shared = sum(len({*a} & {*b}) for a, b in zip(found, right, strict=True)) / (10 * len(QUERIES))
    assert shared >= least
    assert [a[0] for a in found] == [b[0] for b in right]


@pytest.mark.parametrize("bits", [2, 4])
def test_scores_are_those_of_the_decoded_documents(bits):
    index = Index(bits)
    index.add(DOCUMENTS)
    decoded = [index.document(i) for i in range(len(index))]
    for query in QUERIES:
        scores, found = index.search(query, 10, probes=1 << 20, candidates=1 << 20)
        right = best(query, decoded, 10)
        torch.testing.assert_close(scores, right.values)
        torch.testing.assert_close(maxsim(query[None], [decoded[i] for i in found.tolist()])[0], scores)


def test_kept_embeddings_give_exact_scores_in_exact_order():
    index = Index(2, exact=True)
    index.add(DOCUMENTS)
    shared = 0
    for query in QUERIES:
        scores, found = index.search(query, 10)
        torch.testing.assert_close(scores, maxsim(query[None], DOCUMENTS)[0][found])
        assert (scores.diff() <= 0).all()
        shared += len({*found.tolist()} & {*best(query, DOCUMENTS, 10).indices.tolist()})
    assert shared >= 0.95 * 10 * len(QUERIES)


def test_added_in_parts_and_taken_out():
    index = Index(4)
    for part in (DOCUMENTS[:3], DOCUMENTS[3:40], [], DOCUMENTS[40:]):
        index.add(part)
    assert len(index) == len(DOCUMENTS)
    assert index.trained * 4 >= len(index.codes)
    gone = [best(query, DOCUMENTS, 1).indices.item() for query in QUERIES]
    stay = [i for i in range(len(DOCUMENTS)) if i not in gone]
    index.remove(gone)
    assert len(index) == len(stay)
    for query in QUERIES:
        found = index.search(query, 1)[1]
        assert found.item() in best(query, [DOCUMENTS[i] for i in stay], 3).indices


@pytest.mark.parametrize("exact", [False, True])
def test_saved_and_loaded(tmp_path, exact):
    index = Index(4, exact)
    index.add(DOCUMENTS[:50])
    index.save(tmp_path / "a" / "b")
    again = Index.load(tmp_path / "a" / "b")
    for query in QUERIES:
        for mine, other in zip(index.search(query, 5), again.search(query, 5), strict=True):
            assert torch.equal(mine, other)
    again.add(DOCUMENTS[50:60])
    assert len(again) == 60
    (tmp_path / "a" / "b" / "index.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="another format"):
        Index.load(tmp_path / "a" / "b")


def test_subset_and_small_collections():
    index = Index(4)
    assert index.search(QUERIES[0])[1].numel() == 0
    index.add(DOCUMENTS[:5])
    assert sorted(index.search(QUERIES[0], 10, probes=1 << 20)[1].tolist()) == [0, 1, 2, 3, 4]
    assert set(index.search(QUERIES[0], 10, probes=1 << 20, subset=[4, 1])[1].tolist()) == {1, 4}
    assert index.search(QUERIES[0], 10, subset=[])[1].numel() == 0
    index.add([torch.zeros(0, SIZE)])
    assert len(index) == 6


def test_same_seed_same_index():
    one, two = Index(4, seed=3), Index(4, seed=3)
    one.add(DOCUMENTS[:80])
    two.add(DOCUMENTS[:80])
    assert torch.equal(one.codes, two.codes)
    assert torch.equal(one.residuals, two.residuals)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_are_read_as_they_are_packed(bits):
    buckets = torch.randint(0, 1 << bits, (7, 16), generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1 << bits).float()
    coded = Residuals(torch.zeros(7), packed(buckets, bits), [7], torch.zeros(1, 16), weights, unit=False)
    assert torch.equal(coded[:], buckets.float())


@pytest.mark.parametrize("near", [False, True])
def test_scores_at_centroids(near):
    generator = torch.Generator().manual_seed(0)
    table, codes = torch.randn(9, 4, generator=generator), torch.randint(0, 9, (12,), generator=generator)
    lengths, kept = torch.tensor([5, 0, 4, 3]), (torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0]).bool() if near else None)
    expected = []
    for part in codes.split(lengths.tolist()):
        rows = table[part if kept is None else part[kept[part]]]
        expected.append(rows.amax(0).sum() if len(rows) else torch.tensor(4 * UNSEEN))
    torch.testing.assert_close(at_centroids(table, codes, lengths, kept), torch.stack(expected))


def test_pruning_keeps_the_best_by_centroids():
    generator = torch.Generator().manual_seed(1)
    table, codes = torch.randn(9, 4, generator=generator), torch.randint(0, 9, (60,), generator=generator)
    offsets = torch.arange(0, 61, 3)
    scores = at_centroids(table, codes, offsets.diff())
    kept = pruned(table, torch.arange(20), codes, offsets, None, 8)
    assert set(kept.tolist()) == set(scores.topk(2).indices.tolist())
    near = at_centroids(table, codes, offsets.diff(), table.amax(1) >= 1.0).topk(8).indices
    right = near[scores[near].topk(2).indices]
    assert set(pruned(table, torch.arange(20), codes, offsets, 1.0, 8).tolist()) == set(right.tolist())


def test_positions_of_items():
    places, lengths = gathered(torch.tensor([0, 2, 2, 5, 9]), torch.tensor([2, 1, 0]))
    assert places.tolist() == [2, 3, 4, 0, 1]
    assert lengths.tolist() == [3, 0, 2]


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="bits is 3"):
        Index(3)
    with pytest.raises(TypeError, match="documents hold"):
        Index().add([torch.zeros(3)])
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        Index(1).add([torch.zeros(3, 12)])
    index = Index()
    index.add(DOCUMENTS[:2])
    with pytest.raises(ValueError, match="another size"):
        index.add([torch.zeros(3, 8)])
