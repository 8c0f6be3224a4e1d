"""The MaxSim operation: what it returns for every way of asking, against plain torch and the float64 reference."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashot_backends.dispatch import BackendError  # noqa: E402
from flashot_backends.kernels.maxsim.shapes import SHAPE_IDS, SHAPES  # noqa: E402
from flashot_backends.ops.maxsim import maxsim, topk  # noqa: E402

from .maxsim_cases import mask, negative, plain, ragged, tokens  # noqa: E402

KERNELS = ["reference", "torch"]


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


def close(a, b, rtol=1e-5, atol=1e-5):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_dtype=False)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
def test_all_pairs_with_holes(shape, masked, kernel):
    nq, lq, nd, ld, d = shape
    q, x = tokens(nq, lq, d), tokens(nd, ld, d, seed=2)
    qm, dm = mask(nq, lq), mask(nd, ld, seed=3)
    dm[:, 0] |= ~dm.any(1)
    close(maxsim(q, x, qm, dm, masked, backend=kernel), plain(q.double(), x.double(), qm, dm, masked))
    close(maxsim(q, x, backend=kernel), plain(q.double(), x.double()))


def test_masked_zero_beats_negative_similarities(kernel):
    q, x = tokens(2, 4, 8).abs(), negative(3, 5, 8)
    dm = torch.ones(3, 5)
    dm[1, 2] = dm[2, 4] = 0
    scores = maxsim(q, x, documents_mask=dm, masked="zero", backend=kernel)
    assert (scores[:, 0] < 0).all()
    assert (scores[:, 1:] == 0).all()
    assert (maxsim(q, x, documents_mask=dm, backend=kernel) < 0).all()


def test_pairs_and_candidate_sets(kernel):
    q, x = tokens(3, 4, 8), tokens(3, 5, 6, 8, seed=1)
    every = maxsim(q, x.flatten(0, 1), backend=kernel).view(3, 3, 5)
    close(maxsim(q, x, backend=kernel), torch.stack([every[i, i] for i in range(3)]))
    close(maxsim(q, x[:, 2], pairs=True, backend=kernel), torch.stack([every[i, i, 2] for i in range(3)]))
    dm = mask(3, 5, 6)
    dm[..., 0] = True
    expected = torch.stack([plain(q[i : i + 1], x[i], None, dm[i])[0] for i in range(3)])
    close(maxsim(q, x, documents_mask=dm, backend=kernel), expected)


def test_lists_nested_and_padded_agree(kernel):
    q, x = ragged([3, 1, 7], 8), ragged([5, 2, 9, 1], 8, seed=9)
    expected = torch.stack([torch.cat([plain(a[None], b[None])[0] for b in x]) for a in q])
    close(maxsim(q, x, backend=kernel), expected)
    nested = torch.nested.nested_tensor(x, layout=torch.jagged)
    close(maxsim(torch.nested.nested_tensor(q, layout=torch.jagged), nested, backend=kernel), expected)
    padded = torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
    dm = torch.arange(9) < torch.tensor([len(item) for item in x])[:, None]
    close(maxsim(q, padded, documents_mask=dm, backend=kernel), expected)
    sets = maxsim(q, [x[:2], x[2:], []], backend=kernel)
    assert [len(s) for s in sets] == [2, 2, 0]
    close(torch.cat(sets), torch.stack([expected[0, 0], expected[0, 1], expected[1, 2], expected[1, 3]]))
    close(maxsim(q, x[:3], pairs=True, backend=kernel), expected.diagonal())


def test_masks_of_lists(kernel):
    q, x = ragged([3, 2], 8), ragged([5, 2, 4], 8, seed=9)
    dm, qm = [mask(len(item), seed=i) for i, item in enumerate(x)], [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
    dm[1][0] = True
    for masked in ("exclude", "zero"):
        expected = torch.stack(
            [torch.cat([plain(a[None], b[None], m[None], n[None], masked)[0] for b, n in zip(x, dm, strict=True)])
             for a, m in zip(q, qm, strict=True)]
        )  # fmt: skip
        close(maxsim(q, x, qm, dm, masked, backend=kernel), expected)


def test_floors_act_as_zero_padding(kernel):
    q, x = tokens(2, 4, 8).abs(), negative(3, 5, 8)
    scores = maxsim(q, list(x), floors=torch.tensor([True, False, True]), backend=kernel)
    padded = maxsim(q, torch.nn.functional.pad(x, (0, 0, 0, 1)), backend=kernel)
    close(scores[:, [0, 2]], padded[:, [0, 2]])
    close(scores[:, 1], plain(q, x)[:, 1])


@pytest.mark.parametrize("masked", ["exclude", "zero"])
def test_empty_queries_and_documents(masked, kernel):
    q, x = tokens(2, 3, 4), tokens(3, 5, 4)
    none = torch.zeros(3, 5, dtype=torch.bool)
    assert maxsim(q[:0], x, backend=kernel).shape == (0, 3)
    assert maxsim(q, x[:0], backend=kernel).shape == (2, 0)
    assert maxsim([], [], backend=kernel).shape == (0, 0)
    assert (maxsim(q[:, :0], x, masked=masked, backend=kernel) == 0).all()
    assert (maxsim(q, x[:, :0], masked=masked, backend=kernel) == -torch.inf).all()
    worst = 0 if masked == "zero" else -torch.inf
    assert (maxsim(q, x, documents_mask=none, masked=masked, backend=kernel) == worst).all()
    assert (maxsim(q, x, torch.zeros(2, 3), masked=masked, backend=kernel) == 0).all()
    assert maxsim(q, [tokens(2, 4), tokens(0, 4)], masked=masked, backend=kernel)[0, 1] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_are_summed_wide(dtype, kernel):
    q, x = tokens(2, 300, 16, dtype=dtype), tokens(3, 50, 16, dtype=dtype, seed=1)
    scores = maxsim(q, x, backend=kernel)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(scores.double(), plain(q.double(), x.double()), rtol=tolerance, atol=tolerance)


def test_mean_and_normalize(kernel):
    q, x = tokens(2, 5, 8), tokens(3, 4, 8, seed=1)
    qm = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    close(maxsim(q, x, qm, mean=True, backend=kernel)[0], plain(q, x, qm)[0] / 2)
    assert (maxsim(q, x, qm, mean=True, backend=kernel)[1] == 0).all()
    close(maxsim(list(q), x, mean=True, backend=kernel), plain(q, x) / 5)
    unit = torch.nn.functional.normalize
    close(maxsim(q, x, normalize=True, backend=kernel), plain(unit(q, dim=-1), unit(x, dim=-1)))
    close(maxsim(list(q), list(x), normalize=True, backend=kernel), plain(unit(q, dim=-1), unit(x, dim=-1)))


def test_topk():
    q, x = tokens(2, 5, 8), tokens(6, 4, 8, seed=1)
    x[3] = x[1]
    values, places = topk(q, x, 4)
    every = plain(q, x)
    close(values, every.gather(1, places))
    assert (values.diff(dim=1) <= 0).all()
    assert all(row.index(1) + 1 == row.index(3) for row in topk(q, x, 9)[1].tolist())
    values, places = topk(q, [list(x[:2]), list(x[2:])], 3)
    assert [len(v) for v in values] == [2, 3]
    with pytest.raises(ValueError, match="k is 0"):
        topk(q, x, 0)


def test_any_strides(kernel):
    q, x = tokens(8, 5, 3).permute(2, 1, 0), tokens(6, 4, 2, 8)[:, :, 1]
    close(maxsim(q, x, backend=kernel), plain(q, x))
    close(maxsim(q, x[:1].expand(5, 4, 8), backend=kernel), plain(q, x[:1]).expand(3, 5))


def test_autocast_narrows_as_matrix_products_do():
    q, x = tokens(2, 5, 8), tokens(3, 4, 8, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = maxsim(q, x)
    assert narrow.dtype == torch.float32
    close(narrow, maxsim(q.bfloat16(), x.bfloat16()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((2, 3), (4, 5, 6)), ValueError, "queries has shape"),
        (((2, 3, 4), (4, 5, 6)), ValueError, "embedding size 4 and documents 6"),
        (((2, 3, 4), (3, 5, 6, 4)), ValueError, "3 candidate sets for 2 queries"),
    ],
)
def test_bad_shapes_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        maxsim(*(torch.zeros(shape) for shape in arguments))


def test_bad_values_are_named():
    q, x = tokens(2, 3, 4), tokens(5, 6, 4)
    with pytest.raises(ValueError, match="documents_mask has shape"):
        maxsim(q, x, documents_mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match="masked is 'skip'"):
        maxsim(q, x, masked="skip")
    with pytest.raises(TypeError, match=r"dtype torch\.int64"):
        maxsim(q, x.long())
    with pytest.raises(TypeError, match="queries is a str"):
        maxsim("text", x)
    with pytest.raises(ValueError, match="as many documents as queries"):
        maxsim(q, x, pairs=True)
    with pytest.raises(ValueError, match="mix embedding sizes"):
        maxsim(q, [tokens(2, 4), tokens(2, 5)])
    with pytest.raises(BackendError, match="nonsense"):
        maxsim(q, x, backend="nonsense")


def test_batch_elements_do_not_see_their_neighbours(kernel):
    q, x = tokens(4, 5, 8), tokens(6, 7, 8, seed=1)
    every = maxsim(q, x, backend=kernel)
    assert torch.equal(every[2:3, 4:5], maxsim(q[2:3], x[4:5], backend=kernel))


def test_numpy_and_jax_are_answered_in_kind():
    q, x, dm = tokens(2, 3, 8), tokens(4, 5, 8, seed=1), mask(4, 5, share=0.9)
    expected = maxsim(q, x, documents_mask=dm)
    scores = maxsim(q.numpy(), x.numpy(), documents_mask=dm.numpy())
    assert type(scores).__module__ == "numpy"
    close(torch.from_numpy(scores), expected)
    sets = maxsim(q.numpy(), [list(x[:2].numpy()), [x[3].numpy()]])
    assert [s.shape for s in sets] == [(2,), (1,)]
    jax = pytest.importorskip("jax")
    a, b = jax.numpy.asarray(q.numpy()), jax.numpy.asarray(x.numpy())
    values, places = topk(a, b, 2, documents_mask=jax.numpy.asarray(dm.numpy()))
    assert isinstance(values, jax.Array)
    close(torch.from_numpy(np.array(values)), topk(q, x, 2, documents_mask=dm)[0])
    assert places.shape == (2, 2)
    close(torch.from_numpy(np.array(jax.jit(maxsim)(a, b))), maxsim(q, x))
