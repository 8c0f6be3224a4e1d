"""What the plan is: softmax, marginals, concatenation, masks, shapes, transformations, errors."""

import jax
import jax.numpy as jnp
import pytest

from flashot_backends.ops.attention import DustbinScore, DustbinToken, sinkhorn_attention, transport_plan
from tests.ops.attention import cases

BOTH = pytest.mark.parametrize("backend", ["chunked", "reference"])


def plan(q, k, **options):
    return sinkhorn_attention(q, k, jnp.eye(k.shape[-2], dtype=k.dtype), **options)


@BOTH
def test_one_row_half_step_is_softmax_attention(x64, backend):
    q, k, v = cases.tokens(m=7)
    got = sinkhorn_attention(q, k, v, base_steps=0, tail_steps=0.5, last_update="rows", epsilon=0.7, backend=backend)
    wanted = jax.nn.softmax(q @ k.mT / (0.7 * 5**0.5), axis=-1) @ v
    assert jnp.abs(got - wanted).max() < 1e-14


def test_one_row_half_step_matches_jax_attention_with_grouped_heads_and_gradients():
    q, k, v = (cases.normal(seed, 2, h, 9, 8, dtype=jnp.float32) for seed, h in ((1, 6), (2, 2), (3, 2)))
    softmax = {"base_steps": 0, "tail_steps": 0.5, "last_update": "rows", "backend": "chunked"}

    def ours(q, k, v):
        return sinkhorn_attention(q, k, v, **softmax)

    def jaxs(q, k, v):
        return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)

    assert cases.worst_error(ours(q, k, v), jaxs(q, k, v)) < 1e-5
    got, wanted = (jax.grad(lambda *t, f=f: (f(*t) ** 2).sum(), (0, 1, 2))(q, k, v) for f in (ours, jaxs))
    assert cases.worst_error(got, wanted) < 1e-5


@BOTH
@pytest.mark.parametrize("kind", cases.SUPPORTS)
def test_marginals(x64, kind, backend):
    options, m = cases.support(kind)
    q, k, _ = cases.tokens(m=m)
    P = plan(q, k, epsilon=2.0, base_steps=60, backend=backend, **options)
    rows, columns = P.sum(-1), P.sum(-2)
    a = options.get("query_mass", jnp.where(rows > 0, 1.0, 0.0))
    assert jnp.abs(rows - a).max() < 1e-6
    alive = columns > 0
    b = options.get("key_mass", jnp.where(alive, (rows > 0).sum(-1, keepdims=True) / alive.sum(-1, keepdims=True), 0))
    assert jnp.abs(columns - b).max() < 1e-12


def test_the_last_update_is_exact(x64):
    q, k, _ = cases.tokens()
    few = {"base_steps": 1, "tail_steps": 1, "backend": "chunked"}
    by_column, by_row = (plan(q, k, last_update=last, **few) for last in ("columns", "rows"))
    assert jnp.abs(by_column.sum(-2) - 1).max() < 1e-14 < jnp.abs(by_column.sum(-1) - 1).max()
    assert jnp.abs(by_row.sum(-1) - 1).max() < 1e-14 < jnp.abs(by_row.sum(-2) - 1).max()


@BOTH
def test_a_token_dustbin_equals_plain_concatenation_with_all_gradients(x64, backend):
    q, k, v = cases.tokens(lead=())
    parts = cases.parts()[:3]
    weights = cases.normal(9, 11, 3)

    def ours(q, k, v, parts):
        return (sinkhorn_attention(q, k, v, epsilon=0.5, dustbin=DustbinToken(*parts), backend=backend) * weights).sum()

    def plain(q, k, v, parts):
        longer = (jnp.concatenate([array, part[None]]) for array, part in zip((q, k, v), parts, strict=True))
        return (sinkhorn_attention(*longer, epsilon=0.5, backend="reference")[:-1] * weights).sum()

    got, wanted = (jax.value_and_grad(f, (0, 1, 2, 3))(q, k, v, parts) for f in (ours, plain))
    assert cases.worst_error(got, wanted) < 1e-12


def test_the_plan_is_what_attention_applies(x64):
    q, k, v = cases.tokens(m=14)
    token = DustbinToken(*cases.parts()[:3])
    P, out = transport_plan(q, k, dustbin=token), sinkhorn_attention(q, k, v, dustbin=token, return_unmatched=True)
    assert jnp.abs(P @ v + out[1][0][..., None] * token.value - out[0]).max() < 1e-12


def test_score_dustbin_marginals_and_unmatched_mass(x64):
    """SuperGlue: every token may go unmatched, so the dustbin takes as much as there are tokens across."""
    q, k, _ = cases.tokens(m=14, lead=())
    options = {"epsilon": 1.0, "base_steps": 300, "dustbin": DustbinScore(jnp.asarray(0.5)), "backend": "chunked"}
    P, (rows, columns) = plan(q, k, return_unmatched=True, **options)
    assert jnp.abs(P.sum(1) + rows - 1).max() < 1e-9
    assert jnp.abs(P.sum(0) + columns - 1).max() < 1e-12
    assert rows.shape == (11,)
    assert columns.shape == (14,)


def test_score_dustbin_capacity_is_what_the_dustbin_holds(x64):
    """Rows and columns of the dustbin sum to its capacities, corner included; the rest of the masses is matched."""
    q, k, _ = cases.tokens(lead=())
    dustbin = DustbinScore(jnp.asarray(0.5), (4.0, 4.0))
    P, (rows, columns) = plan(
        q, k, return_unmatched=True, epsilon=1.0, base_steps=300, dustbin=dustbin, backend="chunked"
    )
    assert jnp.abs(P.sum(1) + rows - 1).max() < 1e-9
    assert jnp.abs(P.sum(0) + columns - 1).max() < 1e-12
    corner = 4 - rows.sum()
    assert 0 < corner < 4
    assert jnp.abs(columns.sum() + corner - 4) < 1e-9


def test_grouped_heads_equal_repeated_keys(x64):
    q, k, v = cases.normal(1, 2, 6, 9, 5), cases.normal(2, 2, 3, 9, 5), cases.normal(3, 2, 3, 9, 4)
    mask = jnp.arange(9)[None, None, :] < jnp.asarray([6, 9])[:, None, None]
    bias = cases.normal(4, 6, 9, 9)

    def loss(repeat):
        def run(q, k, v, bias):
            k, v = (jnp.repeat(x, repeat, 1) for x in (k, v))
            return (sinkhorn_attention(q, k, v, key_mask=mask, bias=bias, window=4, backend="chunked") ** 2).sum()

        return jax.grad(run, (0, 1, 2, 3))(q, k, v, bias)

    assert cases.worst_error(loss(1), loss(2)) < 1e-12


def test_batch_axes_broadcast_and_elements_do_not_see_each_other(x64):
    q, k, v = cases.normal(1, 3, 1, 8, 4), cases.normal(2, 2, 8, 4), cases.normal(3, 3, 2, 8, 5)
    epsilon = jnp.asarray([[0.4], [0.8], [1.2]])
    out = sinkhorn_attention(q, k, v, epsilon=epsilon, backend="chunked")
    assert out.shape == (3, 2, 8, 5)
    for b in range(3):
        for h in range(2):
            solo = sinkhorn_attention(q[b, 0], k[h], v[b, h], epsilon=epsilon[b, 0], backend="chunked")
            assert jnp.abs(out[b, h] - solo).max() < 1e-13


def test_segments_equal_separate_calls(x64):
    q, k, v = cases.tokens(lead=())
    out = sinkhorn_attention(q, k, v, segments=jnp.asarray([0] * 5 + [1] * 6), backend="chunked")
    for part in (slice(0, 5), slice(5, 11)):
        solo = sinkhorn_attention(q[part], k[part], v[part], backend="chunked")
        assert jnp.abs(out[part] - solo).max() < 1e-9


def test_masks_of_every_shape_agree(x64):
    q, k, v = cases.tokens()
    keep = jnp.arange(11) < jnp.asarray([7, 10])[:, None]
    wanted = sinkhorn_attention(q, k, v, key_mask=keep, backend="chunked")
    dense = keep[:, :, None] & keep[:, None, :]
    zero = {"query_mass": keep.astype(float), "key_mass": keep.astype(float)}
    for options in ({"mask": dense}, {"mask": keep[:, None, :]}, {"query_mask": keep, "key_mask": keep}, zero):
        assert jnp.abs(sinkhorn_attention(q, k, v, backend="chunked", **options) - wanted).max() < 1e-13


@pytest.mark.parametrize("m", [11, 4, 30])
def test_tokens_out_of_reach_take_no_part(x64, m):
    """A band beside padding, or a rectangular one, leaves tokens without a partner; a dense mask says the same."""
    q, k, v = cases.tokens(m=m)
    keep = jnp.arange(m) < jnp.asarray([m - 3, m])[:, None]
    rows = jnp.arange(11) < jnp.asarray([11, 9])[:, None]
    near = abs(jnp.arange(11)[:, None] - jnp.arange(m)) <= 2
    options = {"base_steps": 3, "backend": "chunked"}
    got = sinkhorn_attention(q, k, v, window=2, query_mask=rows, key_mask=keep, **options)
    wanted = sinkhorn_attention(q, k, v, mask=near & rows[:, :, None] & keep[:, None, :], **options)
    assert jnp.abs(got - wanted).max() < 1e-12
    if m == 4:
        assert (got[:, 7:] == 0).all()


def test_a_fully_masked_row_gives_zeros(x64):
    q, k, v = cases.tokens(lead=())
    mask = jnp.ones((11, 11), bool).at[3].set(False)

    def loss(q, k, v):
        return (sinkhorn_attention(q, k, v, mask=mask, backend="chunked") ** 2).sum()

    assert (sinkhorn_attention(q, k, v, mask=mask, backend="chunked")[3] == 0).all()
    gradients = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert (gradients[0][3] == 0).all()
    assert all(jnp.isfinite(g).all() for g in gradients)


def test_jit_vmap_checkpoint_and_grad_compose(x64):
    q, k, v = cases.tokens(lead=(3,))
    keep = jnp.arange(11) < jnp.asarray([6, 9, 11])[:, None]

    def one(q, k, v, keep):
        return sinkhorn_attention(q, k, v, key_mask=keep, window=4, epsilon=0.5, backend="chunked")

    def loss(run):
        return jax.grad(lambda *t: (run(*t, keep) ** 2).sum(), (0, 1, 2))(q, k, v)

    wanted = loss(one)
    assert cases.worst_error(loss(jax.vmap(one)), wanted) < 1e-12
    assert cases.worst_error(loss(jax.jit(jax.vmap(one))), wanted) < 1e-12
    assert cases.worst_error(loss(jax.checkpoint(one)), wanted) < 1e-12
    per_example = jax.vmap(jax.grad(lambda *t: (one(*t) ** 2).sum(), (0, 1, 2)))(q, k, v, keep)
    assert cases.worst_error(per_example, wanted) < 1e-12


def test_vmap_over_queries_alone_sums_the_gradient_of_the_keys(x64):
    q, k, v = cases.normal(1, 3, 8, 4), cases.normal(2, 8, 4), cases.normal(3, 8, 5)

    def run(q, k, v):
        return sinkhorn_attention(q, k, v, backend="chunked")

    mapped = jax.grad(lambda k: (jax.vmap(run, (0, None, None))(q, k, v) ** 2).sum())(k)
    assert cases.worst_error(mapped, jax.grad(lambda k: (run(q, k, v) ** 2).sum())(k)) < 1e-12


def test_memory_stays_linear():
    """No buffer of the compiled backward is a fraction of L² (65 536² floats would be 17 GB)."""
    L = 16384
    shape = jax.ShapeDtypeStruct((L, 16), jnp.float32)

    def loss(*t):
        return (sinkhorn_attention(*t, backend="chunked") ** 2).sum()

    stats = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile().memory_analysis()
    assert stats.temp_size_in_bytes < 40e6 < L * L


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon: positive"),
        ({"base_steps": 1.3}, "base_steps"),
        ({"tail_steps": 0}, "tail_steps"),
        ({"last_update": "both"}, "last_update"),
        ({"window": -1}, "window"),
        ({"mask": jnp.tril(jnp.ones((11, 11), bool))}, "no balanced plan"),
        ({"mask": jnp.ones((3, 11), bool)}, "mask: shape"),
        ({"key_mask": jnp.ones(5, bool)}, "key_mask"),
        ({"return_unmatched": True}, "return_unmatched"),
        ({"segments": jnp.zeros(11, int), "dustbin": DustbinScore(0.0)}, "dustbin"),
        ({"backend": "chunky"}, "chunked"),
    ],
)
def test_errors_name_the_argument(options, message):
    q, k, v = cases.tokens(lead=(), dtype=jnp.float32)
    with pytest.raises(ValueError, match=message):
        sinkhorn_attention(q, k, v, **options)


def test_wrong_dtypes_and_shapes_are_named():
    q, k, v = cases.tokens(lead=(), dtype=jnp.float32)
    with pytest.raises(TypeError, match="q: a float array"):
        sinkhorn_attention(jnp.ones((3, 4), int), k, v)
    with pytest.raises(TypeError, match="mask: bool"):
        sinkhorn_attention(q, k, v, mask=jnp.ones((11, 11)))
    with pytest.raises(ValueError, match="k: 5 features"):
        sinkhorn_attention(q[:, :4], k, v)
    with pytest.raises(ValueError, match="v: 10 tokens"):
        sinkhorn_attention(q, k, v[:10])


def test_empty_inputs():
    q, k, v = cases.tokens(lead=(), dtype=jnp.float32)
    assert sinkhorn_attention(q[:0], k, v).shape == (0, 3)
    assert (sinkhorn_attention(q, k[:0], v[:0]) == jnp.zeros((11, 3))).all()
