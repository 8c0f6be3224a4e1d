"""The Pallas kernels without their chips: values through the interpreter, lowering, and compilation."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flashot_backends.kernels.sinkhorn import jax_reference, pallas_gpu, pallas_tpu  # noqa: E402
from flashot_backends.kernels.sinkhorn.jax_pairs import Pairs, prepare  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, jax_ops, solve  # noqa: E402
from flashot_backends.ops.sinkhorn.jax_problem import Request  # noqa: E402
from tests.kernels import ahead_of_time  # noqa: E402
from tests.kernels import sinkhorn_pallas_cases as cases  # noqa: E402
from tests.ops.attention.conftest import x64  # noqa: E402, F401

# Problems, whether they share one cost, rows, columns, coordinates.
SIZES = [(1, False, 37, 50, 3), (2, True, 70, 300, 2), (2, False, 20, 140, 12)]


def operands(problems, shared, n, m, d):
    """Pairs in float32, and h with a column left out."""
    rng = np.random.default_rng(0)
    leading = 1 if shared else problems
    x, y = (jnp.asarray(rng.normal(size=(leading, k, d)) + 3, "float32") for k in (n, m))
    h = jnp.asarray(rng.normal(size=(problems, m)) - 5, "float32").at[:, 0].set(-jnp.inf)
    return prepare(x, y, jnp.linspace(0.5, 1, problems, dtype="float32") * d / 3), h


@pytest.fixture(params=[pallas_gpu, pallas_tpu], ids=["gpu", "tpu"])
def kernel(request, monkeypatch):
    monkeypatch.setattr(request.param, "interpret", True)
    return request.param


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lse(kernel, size):
    pairs, h = operands(*size)
    wanted = jax_reference.lse(pairs, h)
    for guess in (None, wanted, wanted + 300, wanted - 300):
        np.testing.assert_allclose(kernel.lse(pairs, h, guess), wanted, rtol=1e-6, atol=5e-6)
        if kernel is pallas_tpu:
            break  # it needs no guess
    nothing = kernel.lse(pairs, jnp.full_like(h, -jnp.inf), None)
    assert bool((nothing == -jnp.inf).all())


# Columns of values are added up by ordinary units, by the matrix units, or by both; factors of one column multiply.
@pytest.mark.parametrize(("size", "power", "width", "rank"), [
    (SIZES[0], 0, 5, 5), (SIZES[1], 2, 1, 0), (SIZES[2], 1, 5, 1), (SIZES[0], 1, 13, 3), (SIZES[2], 0, 17, 0),
])  # fmt: skip
def test_reduce(kernel, size, power, width, rank):
    pairs, h = operands(*size)
    problems, _, n, m, _ = size
    shapes = (m, width), (n, rank), (m, rank)
    values, *factors = (jnp.cos(jnp.arange(problems * k * c * 1.0)).reshape(problems, k, c) for k, c in shapes)
    factors = factors if rank else (None, None)
    s = -jax_reference.lse(pairs, h)
    wanted = jax_reference.reduce(pairs, s, h, values, power, *factors)
    found = kernel.reduce(pairs, s, h, values, power, *factors)
    np.testing.assert_allclose(found, wanted, atol=3e-6 * float(abs(wanted).max()))


def test_second_derivatives_are_refused(kernel):
    pairs, h = operands(*SIZES[0])
    with pytest.raises(NotImplementedError, match="backend='chunked'"):
        jax.jvp(lambda h: kernel.lse(pairs, h), (h,), (h,))


def test_wide_values(kernel, monkeypatch):
    """More columns than a tile holds."""
    monkeypatch.setattr(pallas_gpu, "LARGEST_WIDTH", 4)
    pairs, h = operands(*SIZES[0])
    values, s = jnp.cos(jnp.arange(450.0)).reshape(1, 50, 9), -jax_reference.lse(pairs, h)
    np.testing.assert_allclose(kernel.reduce(pairs, s, h, values), jax_reference.reduce(pairs, s, h, values), atol=5e-6)


def test_split():
    numbers = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, 10_000), "float32") * pallas_gpu.LARGEST_PART
    hi, lo = pallas_gpu.split(numbers)
    restored = np.asarray(hi, float) + np.asarray(lo, float)
    assert abs(restored - np.asarray(numbers, float)).max() < 2**-22 * pallas_gpu.LARGEST_PART


@pytest.mark.parametrize("name", cases.SMALL)
def test_matrices_and_metrics_against_float64(kernel, name):
    """Sums, products and slopes of costs that no product expands: both ways, forbidden pairs, points that meet."""
    cases.check(kernel, **cases.SMALL[name])


@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_is_read_where_it_lies(kernel, turned):
    """Not a copy: neither its transpose nor one of whole tiles is written, and 16 bits stay 16 bits."""
    M, rest = jax.ShapeDtypeStruct((1, 300, 200), jnp.bfloat16), ((1,), (1, 300), (1, 200))

    def log_sum_exp(M, epsilon, s, t):
        pairs = kernel.hold(prepare(M, None, epsilon))
        return kernel.lse(pairs.T, s) if turned else kernel.lse(pairs, t)

    jaxpr = jax.make_jaxpr(log_sum_exp)(M, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in rest))
    wide = [out.aval for e in jaxpr.eqns for out in e.outvars if e.primitive.name != "custom_jvp_call"]
    assert {str(aval.dtype) for aval in wide if aval.ndim == 3 and aval.size >= 300 * 200} == {"float32", "bfloat16"}
    assert all(aval.shape == M.shape for aval in wide if aval.size >= 300 * 200)
    (call,) = (e for e in jaxpr.eqns if e.primitive.name == "custom_jvp_call")
    assert sum(v.aval.shape == M.shape and v.aval.dtype == jnp.bfloat16 for v in call.invars) == 1


def test_a_solution_of_matrices_and_its_gradient(x64, monkeypatch):  # noqa: F811
    """Through `solve`, `vmap` and the unrolled gradient, beside streamed JAX in float64; a column without mass."""
    n, m = 20, 150
    M = cases.costs(*cases.points(2, n, m, 2), "euclidean").astype("float32")
    b, towards = np.where(np.arange(m) == 4, 0, 1 / (m - 1)), np.cos(np.arange(m))

    def value(M):
        options = {"epsilon": 0.5, "max_iterations": 3, "tolerance": 0, "acceleration": None}
        solution = solve(DenseCost(M), b=b.astype(M.dtype), **options)
        return solution.value() + solution.apply(towards.astype(M.dtype)).sum()

    def run(M):
        return jax.jit(jax.vmap(jax.value_and_grad(value)), compiler_options=cases.QUICK)(M)

    wanted = run(M.astype(float))
    monkeypatch.setattr(jax_ops, "choose", lambda problem, backend: pallas_gpu)
    monkeypatch.setattr(pallas_gpu, "interpret", True)
    for found, exact in zip(run(M), wanted, strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-5 * float(abs(exact).max()), rtol=0)


def exported(kernel, function, platform, size=(1, False, 1000, 700, 64)):
    _, _, n, m, d = size
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, n, d), (1, m, d), (1,), (1, n), (1, m))]
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    export = jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)
    return export(*arrays).mlir_module()


@pytest.mark.parametrize(("kernel_", "platform", "call"), [
    (pallas_gpu, "cuda", "xla.gpu.triton"), (pallas_tpu, "tpu", "tpu_custom_call"),
])  # fmt: skip
@pytest.mark.parametrize("d", [3, 64])
def test_lowering(kernel_, platform, call, d):
    def both(x, y, epsilon, s, t):
        pairs = prepare(x, y, epsilon)
        return kernel_.lse(pairs, t, s), kernel_.reduce(pairs, s, t, pairs.y, 1, s[:, :, None], t[:, :, None])

    assert exported(kernel_, both, platform, (1, False, 1000, 700, d)).count(call) >= 2

    def metrics(x, y, epsilon, s, t):
        pairs = [prepare(x, y, epsilon, metric) for metric in ("euclidean", "l1")]
        pairs.append(prepare((s[:, :, None] + t[:, None, :]).astype(jnp.bfloat16), None, epsilon))
        sums = [kernel_.lse(kernel_.hold(p), t) for p in pairs] + [kernel_.lse(kernel_.hold(p).T, s) for p in pairs]
        return sums, [kernel_.pull(p, s, t, s[:, :, None], t[:, :, None], 1) for p in pairs[:2]]

    assert exported(kernel_, metrics, platform, (1, False, 1000, 700, d)).count(call) >= 8


@pytest.mark.slow
def test_no_races_on_a_tpu(monkeypatch):
    from jax.experimental.pallas import tpu as pltpu

    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    monkeypatch.setattr(pallas_tpu, "interpret", pltpu.InterpretParams(detect_races=True))
    pairs, h = operands(2, True, 300, 700, 12)
    np.testing.assert_allclose(pallas_tpu.lse(pairs, h), jax_reference.lse(pairs, h), rtol=1e-6, atol=5e-6)
    assert not interpreter.races.races_found
    pallas_tpu.reduce(pairs, -jax_reference.lse(pairs, h), h, h[:, :, None])
    assert not interpreter.races.races_found
    for name in ("bfloat16, shared", "l1 of many"):
        cases.check(pallas_tpu, **cases.SMALL[name] | {"n": 300, "m": 700})
        assert not interpreter.races.races_found


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, False, 777, 2049, 64), (3, False, 130, 520, 12), (2, True, 5000, 333, 3)])
def test_on_a_card(size):
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    pairs, h = operands(*size)
    wanted = jax_reference.lse(pairs, h)
    for guess in (None, wanted, wanted - 300):
        found = jax.jit(pallas_gpu.lse)(pairs, h, guess)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    for width, rank in ((1, 0), (5, 1), (17, 0), (65, 7)):
        shapes = (size[3], width), (size[2], rank), (size[3], rank)
        values, *factors = (jnp.cos(jnp.arange(size[0] * k * c * 1.0)).reshape(size[0], k, c) for k, c in shapes)
        given = pairs, -wanted, h, values, *([0, *factors] if rank else [])
        found = jax.jit(pallas_gpu.reduce, static_argnums=4)(*given)
        plain = jax_reference.reduce(*given)
        np.testing.assert_allclose(found, plain, atol=5e-6 * float(abs(plain).max()))


COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from flashot_backends.kernels.sinkhorn import pallas_tpu
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, jax_problem, solve
jax_problem.choose = lambda problem, backend: pallas_tpu
from flashot_backends.ops.sinkhorn import jax_ops
jax_ops.choose = jax_problem.choose
for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"):
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    for d in (3, 64):
        shape = jax.ShapeDtypeStruct((32768, d), jnp.float32, sharding=SingleDeviceSharding(device))
        loss = lambda x, y: solve(PointCloud(x, y), epsilon=1.0, max_iterations=50).value()
        compiled = jax.jit(jax.grad(loss)).lower(shape, shape).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 256 << 20
        print("compiled", name, d)
    shapes = [((2, 1000, 700), (2, 700)), ((1, 300, 20), (1, 450, 20)), ((1, 40, 3), (1, 90, 3))]
    for metric, pair in zip(("matrix", "euclidean", "l1"), shapes, strict=True):
        def loss(x, y):
            cost = DenseCost(x.astype(jnp.bfloat16)) if metric == "matrix" else PointCloud(x, y, metric)
            solution = solve(cost, epsilon=1.0, max_iterations=9)
            return (solution.value() + solution.apply(jnp.ones(cost.shape[-1])).sum()).sum()
        given = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=SingleDeviceSharding(device)) for s in pair]
        jax.jit(jax.grad(loss)).lower(*given).compile()
        print("compiled", name, metric)
    matrix = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    potentials = lambda M: solve(DenseCost(M), epsilon=1.0, max_iterations=9).f
    compiled = jax.jit(potentials).lower(matrix).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20  # no copy: neither turned nor of 32 bits
    print("compiled", name, "in place")
jax.config.update("jax_enable_x64", True)
jax.jit(jax.grad(loss)).lower(*given).compile()
print("compiled with float64 at hand")
"""


@pytest.mark.slow
@ahead_of_time.needs_libtpu
def test_ahead_of_time_compilation_of_32768_points():
    """Catches what lowering does not: scoped memory, layouts."""
    ahead_of_time.check(COMPILE, 19)


def test_reasons():
    request = Request("jax", "cuda", "points", "float32", "sqeuclidean", (1, 8, 8), 3)
    for kernel_ in (pallas_gpu, pallas_tpu):
        served = {"metric": "euclidean"}, {"metric": "l1"}, {"kind": "matrix", "metric": "matrix", "width": 0}
        for fields in ({}, *served):
            assert kernel_.applies(request._replace(**fields)) is None
        refused = ("dtype", "float64", "float64"), ("width", 1024, "1024")
        for field, value, word in refused:
            assert word in kernel_.applies(request._replace(**{field: value}))


def test_pairs_turn():
    pairs, _ = operands(*SIZES[0])
    assert (pairs.T.rows, pairs.T.columns, pairs.problems) == (50, 37, 1)
    matrix = Pairs(None, None, jnp.zeros((2, 3, 4)), jnp.ones(2))
    assert (matrix.T.rows, matrix.T.columns, matrix.T.costs.shape) == (4, 3, (2, 4, 3))
