"""MaxSim of JAX arrays: the torch operation in float64, and jax.grad of the plain expression."""

import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from flashot_backends.kernels.maxsim import jax_blocks  # noqa: E402
from flashot_backends.ops.maxsim import jax_ops, maxsim, topk  # noqa: E402
from tests.ops.attention.conftest import x64  # noqa: E402, F401


def normal(seed, *shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def keep(seed, *shape, share=0.7):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)


def problem(kind, dtype=jnp.float64):
    """Arguments with holes in every mask, and one document without any token."""
    sizes = {"all": (4, 5, 9), "sets": (4, 3, 9), "pairs": (4, 4, 9)}[kind]
    shape = (4, *sizes[1:]) if kind == "sets" else sizes[1:]
    masks = keep(3, 4, 6), keep(4, *shape).at[(0,) * (len(shape) - 1)].set(False)
    return (normal(1, 4, 6, 8, dtype=dtype), normal(2, *shape, 8, dtype=dtype), *masks), {"pairs": kind == "pairs"}


def plain(queries, documents, queries_mask, documents_mask, masked, pairs, floors=None, mean=False):
    """The definition, dense: nothing is streamed and the derivative is JAX's own."""
    pattern = "qtc,qkjc->qktj" if documents.ndim == 4 else "qtc,qjc->qtj" if pairs else "qtc,djc->qdtj"
    similar = jnp.einsum(pattern, queries, documents)
    middle = queries_mask.shape[0], *(1,) * (similar.ndim - 3)
    alive = documents_mask[..., None, :] if documents.ndim == 4 or pairs else documents_mask[None, :, None, :]
    similar = jnp.where(alive, similar, 0 if masked == "zero" else -jnp.inf)
    if floors is not None:
        floors = floors.reshape(documents.shape[:-2])
        floors = floors if documents.ndim == 4 or pairs else floors[None]
        extra = jnp.where(floors, 0, -jnp.inf)[..., None, None]
        similar = jnp.concatenate([similar, jnp.broadcast_to(extra, (*similar.shape[:-1], 1))], -1)
    wanted = queries_mask.reshape(*middle, -1)
    scores = jnp.where(wanted, similar.max(-1), 0).sum(-1)
    return scores / jnp.maximum(wanted.sum(-1), 1) if mean else scores


def close(got, wanted, tolerance=1e-12):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    assert (got[~finite] == wanted[~finite]).all()
    assert np.abs(got[finite] - wanted[finite]).max() <= tolerance * np.abs(wanted[finite]).max()


@pytest.fixture(params=["one block", "a document at a time"])
def blocks(request, monkeypatch):
    if request.param != "one block":
        monkeypatch.setattr(jax_blocks, "BLOCK", {"cpu": 1, "other": 1})


@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("kind", ["all", "sets", "pairs"])
def test_values_and_gradients(x64, blocks, kind, masked):  # noqa: F811
    arguments, options = problem(kind)
    floors = keep(5, int(np.prod(arguments[1].shape[:-2])))
    weights = normal(6, *plain(*arguments, masked, **options, floors=floors).shape)

    def loss(function):
        def total(queries, documents):
            scores = function(queries, documents, *arguments[2:], masked=masked, floors=floors, **options)
            return jnp.where(jnp.isfinite(scores), scores * weights, 0).sum(), scores

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*arguments[:2])

    (got, scores), gradients = loss(maxsim)
    (wanted, expected), exact = loss(plain)
    close(scores, expected)
    close(got, wanted)
    for one, other in zip(gradients, exact, strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", ["all", "sets", "pairs"])
def test_the_torch_operation_says_the_same(x64, kind):  # noqa: F811
    torch = pytest.importorskip("torch")
    arguments, options = problem(kind)
    for more in ({}, {"masked": "zero"}, {"mean": True}, {"normalize": True}):
        ours = maxsim(*arguments, **options, **more)
        close(ours, maxsim(*(torch.from_numpy(np.array(a)) for a in arguments), **options, **more))
    if kind == "all":
        values, places = topk(*arguments[:2], 3, documents_mask=arguments[3])
        theirs = topk(*(torch.from_numpy(np.array(a)) for a in arguments[:2]), 3,
                      documents_mask=torch.from_numpy(np.array(arguments[3])))  # fmt: skip
        close(values, theirs[0])
        assert (np.asarray(places) == theirs[1].numpy()).all()


def test_lists_equal_padded_arrays(x64):  # noqa: F811
    queries = [normal(i, n, 8) for i, n in enumerate((3, 6, 1))]
    documents = [normal(10 + i, n, 8) for i, n in enumerate((5, 2, 7, 4))]
    scores = maxsim(queries, documents)
    for i, query in enumerate(queries):
        for j, document in enumerate(documents):
            close(scores[i, j], (query @ document.T).max(1).sum())
    rows = maxsim(queries, [documents[:2], documents[2:3], []])
    assert [row.shape for row in rows] == [(2,), (1,), (0,)]
    close(rows[0], scores[0, :2])
    close(rows[1], scores[1, 2:3])
    gradient = jax.grad(lambda items: maxsim(queries, items)[:, 1].sum())(documents)
    assert [g.shape for g in gradient] == [d.shape for d in documents]
    assert jnp.abs(gradient[1]).max() > 0
    assert jnp.abs(gradient[0]).max() == 0


def test_transformations(x64):  # noqa: F811
    (queries, documents, _, mask), _ = problem("all")

    def total(queries, documents):
        return (maxsim(queries, documents, documents_mask=mask.at[0].set(True)) ** 2).sum()

    wanted = jax.grad(total)(queries, documents)
    close(jax.jit(jax.grad(total))(queries, documents), wanted)
    close(jax.jit(jax.grad(jax.checkpoint(total)))(queries, documents), wanted)
    one_by_one = jax.jit(jax.vmap(jax.grad(total), (0, None)))(queries[:, None], documents)[:, 0]
    close(one_by_one, wanted)
    gradient, step = jax.jit(jax.grad(total)), 1e-5 * normal(7, *queries.shape)
    curved = jax.jit(jax.grad(lambda q: (jax.grad(total)(q, documents) * step).sum()))(queries)
    close(2 * curved, gradient(queries + step, documents) - gradient(queries - step, documents), 1e-6)


def test_the_first_of_equals_wins_and_16_bits_stay(x64):  # noqa: F811
    queries = jnp.ones((1, 2, 4), jnp.bfloat16)
    documents = jnp.ones((1, 3, 4), jnp.bfloat16)
    scores, pull = jax.vjp(maxsim, queries, documents)
    assert scores.dtype == jnp.float32
    to_queries, to_documents = pull(jnp.ones((1, 1), jnp.float32))
    assert to_queries.dtype == to_documents.dtype == jnp.bfloat16
    assert (to_documents[0] == jnp.asarray([2, 0, 0], jnp.bfloat16)[:, None]).all()


def test_padding_may_hold_anything(x64):  # noqa: F811
    (queries, documents, queries_mask, mask), _ = problem("all")
    mask = mask.at[0, 0].set(True)
    bad_queries = jnp.where(queries_mask[..., None], queries, jnp.nan)
    bad_documents = jnp.where(mask[..., None], documents, jnp.inf)

    def gradients(*tokens):
        return jax.value_and_grad(lambda *t: maxsim(*t, queries_mask, mask).sum(), (0, 1))(*tokens)

    got, wanted = gradients(bad_queries, bad_documents), gradients(queries, documents)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        close(one, other)


def test_torch_is_not_needed():
    program = (
        "import sys; sys.modules['torch'] = None; import jax.numpy as jnp;"
        "from flashot_backends.ops.maxsim import topk;"
        "print(topk(jnp.ones((2, 3, 4)), jnp.ones((3, 5, 4)), 2)[1].shape)"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "(2, 2)\n", done.stderr


def test_empty_sides():
    assert maxsim(jnp.zeros((0, 3, 4)), jnp.zeros((2, 5, 4))).shape == (0, 2)
    assert maxsim(jnp.zeros((2, 3, 4)), jnp.zeros((0, 5, 4))).shape == (2, 0)
    assert (maxsim(jnp.zeros((2, 0, 4)), jnp.zeros((3, 5, 4))) == jnp.zeros((2, 3))).all()
    assert (maxsim(jnp.zeros((2, 3, 4)), jnp.zeros((3, 0, 4))) == -jnp.inf).all()
    gradient = jax.grad(lambda q: maxsim(q, jnp.zeros((0, 5, 4))).sum())(jnp.ones((2, 3, 4)))
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"queries": jnp.zeros((2, 3))}, ValueError, "queries has shape"),
        ({"queries": jnp.zeros((2, 3, 5))}, ValueError, "embedding size 5 and documents 4"),
        ({"queries": jnp.zeros((2, 3, 4), int)}, TypeError, "queries have dtype"),
        ({"documents": jnp.zeros((3, 5, 6, 4))}, ValueError, "3 candidate sets for 2 queries"),
        ({"documents_mask": jnp.ones((5, 5))}, ValueError, "documents_mask has shape"),
        ({"masked": "skip"}, ValueError, "masked is 'skip'"),
        ({"pairs": True}, ValueError, "as many documents as queries"),
        ({"floors": jnp.ones(2)}, ValueError, "floors has shape"),
        ({"backend": "nonsense"}, ValueError, "nonsense"),
        ({"documents": [jnp.zeros((2, 4)), jnp.zeros((2, 5))]}, ValueError, "mix embedding sizes 4 and 5"),
        ({"documents": [jnp.zeros(4)]}, TypeError, "documents holds"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    good = {"queries": jnp.zeros((2, 3, 4)), "documents": jnp.zeros((5, 6, 4))}
    with pytest.raises(error, match=message):
        jax_ops.maxsim(**{**good, **change})
    with pytest.raises(ValueError, match="k is 0"):
        topk(good["queries"], good["documents"], 0)
