"""Sinkhorn on JAX arrays on one CUDA card: errors against float64, times beside plain JAX and OTT-JAX, launch shapes.

python benchmarks/card/sinkhorn_jax.py [check] [host] [bench] [costs] [shapes]   (default: the first three, 80 seconds)

`shapes` takes minutes; KIND=direct leaves those in whose name ends so. `costs` is what `bench` is for matrices, "euclidean" and "l1": beside streamed JAX, plain JAX, and the floor of a matrix.

Each row stands on its own. SECONDS_LEFT in the environment is when to stop: what would take longer is left out, and says so.
"""

import os
import sys
import time

from facts import say, time_for

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, os.getcwd())
import jax
import jax.numpy as jnp
import numpy as np

from flashot_backends.kernels.sinkhorn import pallas_gpu
from flashot_backends.kernels.sinkhorn.jax_pairs import prepare
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, solve

COPIED = 4.18e6  # bytes that the card copies in a µs
SIZES = [(1024, 64), (4096, 64), (10000, 3), (10000, 64)]
PROBLEMS = [  # name, n, m, d, options
    ("few coordinates, plain", 700, 900, 3, {"acceleration": None, "tolerance": 0.0, "max_iterations": 30}),
    ("64 coordinates, relaxed", 500, 600, 64, {"tolerance": 1e-6}),
    ("12 coordinates, a reach", 500, 600, 12, {"tolerance": 1e-6, "reach": (3.0, 20.0)}),
    ("euclidean", 500, 600, 3, {"metric": "euclidean", "tolerance": 1e-6}),
    ("inner, a reach", 500, 600, 16, {"metric": "inner", "tolerance": 1e-6, "reach": 3.0}),
    ("l1 of 20", 501, 603, 20, {"metric": "l1", "acceleration": None, "tolerance": 0.0, "max_iterations": 30}),
    ("matrix", 701, 905, 3, {"metric": "float32", "tolerance": 1e-6}),
    ("matrix, 16 bits", 704, 896, 3, {"metric": "bfloat16", "acceleration": None, "tolerance": 0.0, "max_iterations": 30}),
]
# Rows, columns, warps, stages, and programs at once on a processor, by kind, n and d.
SHAPES = {
    ("lse", 10000, 3): "16,256,4,2,5 16,512,4,2,4 32,128,4,2,2 64,64,4,2,2 16,128,4,2,6 8,256,2,2,8",
    ("lse", 4096, 3): "16,256,4,2,5 16,128,4,2,6 8,256,2,2,8",
    ("lse", 10000, 64): "64,128,4,2,2 64,128,4,3,2 64,256,4,2,1 128,128,8,2,1 128,256,8,2,1 128,64,4,2,3 64,64,4,2,4",
    ("lse", 4096, 64): "64,128,4,2,2 64,64,4,2,4 128,128,8,2,1 32,128,4,2,3",
    ("vector", 10000, 64): "64,128,4,2,2 64,64,4,2,4 128,128,8,2,1",
    ("matrix", 10000, 64): "64,64,4,2,2 64,32,4,2,3 128,64,8,2,1 128,32,4,2,2",
    # A matrix by its dtype, and metrics with direct differences.
    ("lse-read", 10000, "float32"): "16,256,4,2,4 8,512,4,2,4 16,512,8,2,2 32,128,4,2,4 4,1024,4,2,4 16,128,4,2,8",
    ("lse-read", 10000, "bfloat16"): "16,256,4,2,4 8,512,4,2,4 16,512,8,2,2 32,256,8,2,2",
    ("lse-turned", 10000, "float32"): "64,64,4,2,4 128,32,4,2,4 256,16,4,2,4 32,128,4,2,4 64,32,4,2,8 128,64,8,2,2",
    ("lse-turned", 10000, "bfloat16"): "64,64,4,2,4 128,32,4,2,4 256,16,4,2,4 128,64,8,2,2",
    ("lse-read", 2048, "float32"): "16,256,4,2,4 16,128,4,2,8 8,512,4,2,4",
    ("lse-turned", 2048, "float32"): "64,64,4,2,4 32,64,4,2,8 128,32,4,2,4",
    ("vector-read", 10000, "float32"): "16,256,4,2,3 16,128,4,2,6 8,512,4,2,3",
    ("vector-turned", 10000, "float32"): "64,64,4,2,3 128,32,4,2,3 64,32,4,2,6",
    ("lse", 10000, "euclidean 3"): "16,256,4,2,5 16,128,4,2,8 32,128,4,2,4",
    ("lse-direct", 10000, "euclidean 64"): "64,64,4,2,3 32,64,4,2,4 32,128,4,2,3 64,128,8,2,2 16,128,4,2,6",
    ("vector-direct", 10000, "euclidean 64"): "64,64,4,2,4 8,128,4,2,8 16,128,4,2,4 16,64,4,2,4",
    ("pull-direct", 10000, "euclidean 64"): "32,64,4,2,4 16,64,4,2,4 16,32,4,2,4 8,64,4,2,4 8,128,4,2,4 16,128,4,2,4",
    ("pull-direct", 10000, "l1 64"): "32,64,4,2,4 16,32,4,2,4 8,64,4,2,4 8,128,4,2,4",
}
MATRICES = ("float32", "bfloat16")  # instead of a metric: squared distances over d, rounded so


def clouds(n, m, d, dtype="float32"):
    rng = np.random.default_rng(0)
    x, y, a, b = rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.random(n) + 0.1, rng.random(m) + 0.1
    return tuple(np.asarray(part, dtype) for part in (x, y, a / a.sum(), b / b.sum()))


def cost_of(metric, x, y):
    """What a gradient is by, and the function that makes a cost of it and y."""
    if metric not in MATRICES:
        return x, lambda x, y: PointCloud(x, y, metric)
    M = (x**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * x @ y.T
    return jnp.asarray(np.maximum(M, 0) / x.shape[1], metric), lambda M, y: DenseCost(M)


def forbidden(M):
    """A tenth of the pairs."""
    return jnp.where(np.random.default_rng(1).random(M.shape) < 0.1, jnp.inf, M)


def seconds(run, calls=5):
    """Of one call among several that wait for nothing; the best of three."""
    jax.block_until_ready(run())
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def compiled(function, *arguments):
    start = time.time()
    lowered = jax.jit(function).lower(*arguments)
    traced = time.time()
    program = lowered.compile()
    took = f"traced {traced - start:.2f} s, compiled {time.time() - traced:.2f} s"
    return program, f"{took}, {program.memory_analysis().temp_size_in_bytes / 2**20:.1f} MiB"


# ------------------------------------------------------------------------------------------------------------ check


def check():
    """Potentials, value and its gradient of float32 on the card, against float64 by torch on the host."""
    import torch

    for name, n, m, d, options in PROBLEMS:
        if not time_for(8, name):
            return
        options = dict(options)
        metric, epsilon = options.pop("metric", "sqeuclidean"), 0.1 * d
        x, y, a, b = clouds(n, m, d)
        x, cost = cost_of(metric, x, y)
        if metric in MATRICES:
            x, epsilon = forbidden(x), 0.1

        @jax.jit
        def ours(x, y, a, b, cost=cost, epsilon=epsilon, options=options):
            s = solve(cost(x, y), a, b, epsilon=epsilon, **options)
            return s.value(), (s.f, s.g, s.iterations, s.error)

        def loss(x, ours=ours, rest=(y, a, b)):
            return ours(x, *rest)

        (value, (f, g, iterations, error)), by_x = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(x))
        wide = [torch.tensor(np.asarray(part, "float64")) for part in (x, y, a, b)]
        wide[0].requires_grad_()
        options |= {"acceleration": None, "tolerance": 0.0} if "max_iterations" in options else {"tolerance": 1e-10}
        theirs = solve(cost(*wide[:2]), *wide[2:], epsilon=epsilon, gradient="envelope", **options)
        if options["tolerance"] == 0:
            theirs = solve(cost(*wide[:2]), *wide[2:], epsilon=epsilon, **options)
        exact = theirs.value()
        (gradient,) = torch.autograd.grad(exact, wide[0])
        off = np.asarray(f, float) - theirs.f.detach().numpy()
        off = off - off.mean() * ("reach" not in options)
        found = {
            "f/eps": abs(off).max() / epsilon,
            "value": abs(float(value) / float(exact) - 1),
            "gradient": abs(np.asarray(by_x, float) - gradient.numpy()).max() / float(abs(gradient).max()),
        }
        bound = 1e-3 if options["tolerance"] else 2e-5  # of a solution to 1e-5, or of the same iterations
        rounded = 4e-3 if metric == "bfloat16" else bound  # a gradient has the dtype of what it is by
        good = max(found["f/eps"], found["value"]) < bound and found["gradient"] < rounded
        verdict = "good" if good else "BAD"
        say(verdict, name, *(f"{key} {number:.1e}" for key, number in found.items()), f"after {int(iterations)}, {error:.1e}")


def host():
    """OTT-JAX with our geometry against its dense mode, and MaxSim, both float32 on the card."""
    if not time_for(25, "OTT-JAX"):
        return
    import flashot_backends

    flashot_backends.enable()
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    x, y, a, b = map(jnp.asarray, clouds(1500, 1300, 12))

    def cost(x, how):
        geometry = pointcloud.PointCloud(x, y, epsilon=1.2, batch_size=how)
        out = sinkhorn.Sinkhorn(threshold=1e-4)(linear_problem.LinearProblem(geometry, a, b))
        return out.reg_ot_cost, out.n_iters

    found = {how: jax.jit(jax.value_and_grad(cost, has_aux=True), static_argnums=1)(x, how) for how in ("flash", None)}
    (mine, hosts), (value, exact) = (part[1] for part in found.values()), (part[0][0] for part in found.values())
    errors = abs(float(value) / float(exact) - 1), float(abs(mine - hosts).max() / abs(hosts).max())
    counts = [int(part[0][1]) for part in found.values()]
    say("good" if max(errors) < 1e-3 else "BAD", "OTT-JAX: value, gradient", *(f"{e:.1e}" for e in errors), counts)
    from flashot_backends.ops.maxsim.jax_ops import maxsim

    q, d = (np.random.default_rng(k).normal(size=(24, 40 + 90 * k, 96)).astype("float32") for k in (0, 1))
    scores = np.einsum("qia,dja->qdij", q.astype(float), d.astype(float)).max(-1).sum(-1)
    off = abs(np.asarray(jax.jit(maxsim)(jnp.asarray(q), jnp.asarray(d)), float) - scores).max() / abs(scores).max()
    say("good" if off < 2e-6 else "BAD", f"maxsim: {off:.1e}")


# ------------------------------------------------------------------------------------------------------------ bench


def row(name, function, *arguments, count=200):
    """µs an iteration, of so many in one program; and how the program came to be."""
    if not time_for(8, name):
        return
    try:
        program, how = compiled(lambda *given: function(count, *given), *arguments)
        each = seconds(lambda: program(*arguments), calls=2) / count * 1e6
        say(f"{name}: {each:.1f} µs an iteration; {how}")
    except Exception as error:
        say(f"{name}:", type(error).__name__, str(error)[:200])


def plain(count, x, y, a, b, epsilon):
    """Alternating updates of a matrix in plain JAX."""
    squares = (x**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * jnp.matmul(x, y.T, precision="highest")
    return plain_of_matrix(count, squares, a, b, epsilon)


def plain_of_matrix(count, M, a, b, epsilon):
    log_a, log_b = jnp.log(a), jnp.log(b)

    def once(_, f):
        g = -jax.nn.logsumexp((log_a + f)[:, None] - M / epsilon, 0)
        return -jax.nn.logsumexp(log_b + g - M / epsilon, 1)

    return jax.lax.fori_loop(0, count, once, jnp.zeros_like(a))


def bench():
    for n, d in SIZES:
        x, y, a, b = map(jnp.asarray, clouds(n, n, d))
        epsilon = 0.1 * d

        def ours(count, x, y, a, b, epsilon=epsilon, acceleration=None):
            options = {"max_iterations": count, "tolerance": 0.0, "acceleration": acceleration}
            return solve(PointCloud(x, y), a, b, epsilon=epsilon, **options).f

        def gradient(count, x, *rest, ours=ours):
            return jax.grad(lambda x: ours(count, x, *rest).sum())(x)

        row(f"{n} × {d}, ours", ours, x, y, a, b)
        if n == 10000:
            row(f"{n} × {d}, plain JAX", lambda *z, epsilon=epsilon: plain(*z, epsilon), x, y, a, b, count=50)
            row(f"{n} × {d}, ours with gradient", gradient, x, y, a, b, count=50)
        if (n, d) == SIZES[-1]:
            relaxed = lambda *z, ours=ours: ours(*z, acceleration="overrelaxation")  # noqa: E731
            row(f"{n} × {d}, ours, relaxed", relaxed, x, y, a, b)
    ott()


def costs():
    """Matrices, "euclidean" and "l1": our kernels, streamed JAX, plain JAX; and the time of one read of a matrix."""
    cases = [(n, "float32", 3) for n in (2048, 10000)] + [(10000, "bfloat16", 3), (9999, "float32", 3)]
    for n, metric, d in [*cases, (10000, "euclidean", 3), (10000, "l1", 3), (10000, "euclidean", 64), (4096, "l1", 64)]:
        x, y, a, b = clouds(n, n, d)
        epsilon = 0.1 if metric in MATRICES else 0.1 * d
        x, cost = cost_of(metric, x, y)
        x, y, a, b = map(jnp.asarray, (x, y, a, b))

        def ours(count, x, y, a, b, cost=cost, epsilon=epsilon, backend=None):
            options = {"max_iterations": count, "tolerance": 0.0, "acceleration": None, "backend": backend}
            return solve(cost(x, y), a, b, epsilon=epsilon, **options).f

        def gradient(count, x, *rest, ours=ours):
            return jax.grad(lambda x: ours(count, x, *rest).sum())(x)

        name = f"{n} × {n} {x.dtype}" if metric in MATRICES else f"{n} × {d} {metric}"
        streamed = lambda *z, ours=ours: ours(*z, backend="chunked")  # noqa: E731
        row(f"{name}, ours", ours, x, y, a, b, count=100)
        row(f"{name}, streamed JAX", streamed, x, y, a, b, count=20)
        row(f"{name}, ours with gradient", gradient, x, y, a, b, count=20)
        if metric in MATRICES:
            say(f"{name}, floor: {x.nbytes / COPIED:.1f} µs for one read")
            dense = lambda count, x, y, a, b, epsilon=epsilon: plain_of_matrix(count, x, a, b, epsilon)  # noqa: E731
            row(f"{name}, plain JAX", dense, x, y, a, b, count=20)


def ott():
    """OTT-JAX's own loop at 10 000 points, by each geometry."""
    import flashot_backends

    flashot_backends.enable()
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    x, y, a, b = map(jnp.asarray, clouds(10000, 10000, 64))

    def potentials(count, x, y, a, b, how):
        geometry = pointcloud.PointCloud(x, y, epsilon=6.4, batch_size=how)
        solver = sinkhorn.Sinkhorn(threshold=0.0, min_iterations=count, max_iterations=count)
        return solver(linear_problem.LinearProblem(geometry, a, b)).f

    for how in ("flash", None):
        row(f"OTT-JAX 10000 × 64, batch_size={how}", lambda *z, how=how: potentials(*z, how), x, y, a, b, count=50)


# ----------------------------------------------------------------------------------------------------------- shapes


def one_launch(kind, n, of, chosen, repeats=10):
    """µs of one kernel among those of a loop on the device, several written out in a round; the launch shape."""
    metric, d = (of, 3) if of in MATRICES else of.split() if isinstance(of, str) else ("sqeuclidean", of)
    x, y, _, _ = clouds(n, n, int(d))
    x, _ = cost_of(metric, x, y)
    given = (jnp.asarray(x)[None], None) if metric in MATRICES else (jnp.asarray(x)[None], jnp.asarray(y)[None])
    level = jnp.full((1, n), -np.log(n), jnp.float32)

    def once(pairs, h):
        if kind.startswith("lse"):
            out = pallas_gpu.lse(pairs, h, -h + level)
            return level - out
        column = h[:, :, None]
        if kind.startswith("pull"):
            return h + 1e-30 * pallas_gpu.pull(pairs, h, h, column, column).sum(-1)
        values = jnp.concatenate([jnp.ones_like(column), pairs.y], -1) if kind == "matrix" else column
        return h + 1e-30 * pallas_gpu.reduce(pairs, h, h, values).sum(-1)

    @jax.jit
    def run(count, x, y):
        pairs = prepare(x, y, jnp.full(1, 0.1 if y is None else 0.1 * int(d), jnp.float32), metric)
        pairs = pairs._replace(held=pallas_gpu.hold(pairs).held)
        pairs = pairs.T if kind.endswith("turned") else pairs

        def several(_, h):
            for _ in range(repeats):
                h = once(pairs, h)
            return h

        return jax.lax.fori_loop(0, count, several, level)

    kept = pallas_gpu.shape
    pallas_gpu.shape = kept if chosen is None else lambda kind, width: chosen
    try:
        few, many = (seconds(lambda count=count: run(count, *given), calls=1) for count in (1, 7))
        return (many - few) / 6 / repeats * 1e6
    finally:
        pallas_gpu.shape = kept


def shapes():
    """Times of a kernel by launch shape; the best belongs into kernels/sinkhorn/pallas_tuning.json."""
    for (kind, n, of), candidates in SHAPES.items():
        found = {}
        if not kind.endswith(os.environ.get("KIND", "")):
            continue
        for candidate in candidates.split():
            if not time_for(5, f"{kind} {n} × {of} {candidate}"):
                break
            try:
                found[candidate] = one_launch(kind, n, of, tuple(map(int, candidate.split(","))))
            except Exception as error:
                say(kind, n, of, candidate, type(error).__name__, str(error)[:80])
        if found:
            best = min(found, key=found.get)
            say(kind, f"{n} × {of}: best {best}", *(f"{shape}: {time:.1f} µs" for shape, time in found.items()))


if __name__ == "__main__":
    say(jax.__version__, jax.devices())
    everything = {"check": check, "host": host, "bench": bench, "costs": costs, "shapes": shapes}
    for part in sys.argv[1:] or ["check", "host", "bench"]:
        everything[part]()
