"""The index behind PyLate's retriever, and the search of its Stanford index on our kernels."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pylate")

import pylate.indexes.base  # noqa: E402
import pylate.retrieve  # noqa: E402

import flashot_backends  # noqa: E402
from flashot_backends import use  # noqa: E402
from flashot_backends.adapters.pylate import Index  # noqa: E402
from flashot_backends.ops.maxsim import maxsim  # noqa: E402


def documents(count=30, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [torch.nn.functional.normalize(torch.randn(n, size, generator=generator), dim=-1) for n in lengths]


DOCUMENTS = documents()
IDS = [f"d{i}" for i in range(len(DOCUMENTS))]


@pytest.fixture
def index(tmp_path):
    return Index(str(tmp_path), "a", nbits=8).add_documents(IDS, [x.numpy() for x in DOCUMENTS])


def test_pylates_retriever_takes_it(index):
    assert isinstance(index, pylate.indexes.base.Base)
    assert index.is_end_to_end_index
    queries = [DOCUMENTS[3][:4], DOCUMENTS[8][:4]]
    found = pylate.retrieve.ColBERT(index).retrieve(queries, k=5)
    assert [row[0]["id"] for row in found] == ["d3", "d8"]
    for query, row in zip(queries, found, strict=True):
        right = maxsim(query[None], DOCUMENTS)[0]
        assert [r["score"] for r in row] == pytest.approx([float(right[IDS.index(r["id"])]) for r in row], abs=0.05)
        assert [r["score"] for r in row] == sorted((r["score"] for r in row), reverse=True)
    one = pylate.retrieve.ColBERT(index).retrieve(queries[0], k=5)
    assert one == found[:1]


def test_opened_again(index, tmp_path):
    again = Index(str(tmp_path), "a")
    assert len(again) == len(IDS)
    assert again(DOCUMENTS[5], k=3) == index(DOCUMENTS[5], k=3)
    assert len(Index(str(tmp_path), "a", override=True)) == 0


def test_removed_updated_and_added(index):
    index.remove_documents(["d3", "d7"])
    assert len(index) == len(IDS) - 2
    assert index(DOCUMENTS[3], k=1)[0][0]["id"] != "d3"
    assert index(DOCUMENTS[4], k=1)[0][0]["id"] == "d4"
    index.update_documents(["d4"], [DOCUMENTS[3]])
    assert index(DOCUMENTS[3], k=1)[0][0]["id"] == "d4"
    index.add_documents([99], [DOCUMENTS[7]])
    assert index(DOCUMENTS[7], k=1)[0][0]["id"] == 99
    with pytest.raises(KeyError, match="nothing"):
        index.remove_documents(["nothing"])
    with pytest.raises(ValueError, match="2 different ids for 1 documents"):
        index.add_documents(["x", "y"], DOCUMENTS[:1])
    with pytest.raises(TypeError, match="strings or integers"):
        index.add_documents([1.5], DOCUMENTS[:1])


def test_subset(index):
    queries = [DOCUMENTS[3], DOCUMENTS[8]]
    shared = index(queries, k=30, subset=["d1", "d8", "unknown"])
    assert all({r["id"] for r in row} <= {"d1", "d8"} for row in shared)
    own = index(queries, k=1, subset=[["d3"], ["d2"]])
    assert [r["id"] for row in own for r in row] == ["d3", "d2"]
    with pytest.raises(ValueError, match="1 lists for 2 queries"):
        index(queries, subset=[["d1"]])


def test_embeddings_of_documents(tmp_path):
    index = Index(str(tmp_path), "b", exact=True).add_documents(IDS, DOCUMENTS)
    (row,) = Index(str(tmp_path), "b").get_documents_embeddings([["d2", "d0"]])
    for mine, right in zip(row, (DOCUMENTS[2], DOCUMENTS[0]), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), right)
    assert index(DOCUMENTS[2], k=1)[0][0]["score"] == pytest.approx(len(DOCUMENTS[2]), abs=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("near", [False, True], ids=["given", "cut"])
def test_stanford_search_from_codes(bits, near):
    """Against the host's own decompression (its path without compiled extensions) and plain scores."""
    storage = pytest.importorskip("pylate.indexes.stanford_nlp.search.index_storage")
    residual = pytest.importorskip("pylate.indexes.stanford_nlp.indexing.codecs.residual")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([len(x) for x in DOCUMENTS])
    centroids = torch.nn.functional.normalize(torch.randn(9, 32, generator=generator), dim=-1)
    weights = torch.linspace(-0.3, 0.3, 1 << bits)
    config = SimpleNamespace(
        total_visible_gpus=0, dim=32, nbits=bits, rank=0, ndocs=8, centroid_score_threshold=0.3, search_batch_size=5
    )
    codec = residual.ResidualCodec(config, centroids, bucket_cutoffs=weights[1:], bucket_weights=weights)
    stored = codec.compress(torch.cat(DOCUMENTS))
    query = DOCUMENTS[4][None]
    ranker = SimpleNamespace(
        embeddings=stored, doclens=lengths, offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), codec=codec
    )
    flashot_backends.enable()
    pids, table = torch.arange(0, 30, 2, dtype=torch.int32), (centroids @ query[0].T if near else None)
    decoded = codec.decompress(stored)
    with use(substitute=["pylate"]):
        torch.testing.assert_close(codec.decompress(stored), decoded)
        scores, found = storage.IndexScorer.score_pids(ranker, config, query, pids, table)
    flashot_backends.disable()
    parts = decoded.split(lengths.tolist())
    torch.testing.assert_close(scores, maxsim(query, [parts[i] for i in found.tolist()])[0])
    if near:
        assert len(found) == 2
        assert 4 in found
    else:
        assert torch.equal(found, pids)
