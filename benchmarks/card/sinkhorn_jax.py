"""Sinkhorn on JAX arrays on one CUDA card: errors against float64, times beside plain JAX and OTT-JAX, launch shapes.

python benchmarks/card/sinkhorn_jax.py [check] [host] [bench] [shapes]   (default: the first three; about 80 seconds)

Each row stands on its own. SECONDS_LEFT in the environment is when to stop: what would take longer is left out, and says so.
"""

import os
import sys
import time

START, SECONDS = time.time(), float(os.environ.get("SECONDS_LEFT", "600"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, os.getcwd())
import jax
import jax.numpy as jnp
import numpy as np

from flashot_backends.kernels.sinkhorn import pallas_gpu
from flashot_backends.kernels.sinkhorn.jax_pairs import prepare
from flashot_backends.ops.sinkhorn import PointCloud, solve

SIZES = [(1024, 64), (4096, 64), (10000, 3), (10000, 64)]
PROBLEMS = [  # name, n, m, d, options
    ("few coordinates, plain", 700, 900, 3, {"acceleration": None, "tolerance": 0.0, "max_iterations": 30}),
    ("64 coordinates, relaxed", 500, 600, 64, {"tolerance": 1e-6}),
    ("12 coordinates, a reach", 500, 600, 12, {"tolerance": 1e-6, "reach": (3.0, 20.0)}),
    ("euclidean", 500, 600, 3, {"metric": "euclidean", "tolerance": 1e-6}),
    ("inner, a reach", 500, 600, 16, {"metric": "inner", "tolerance": 1e-6, "reach": 3.0}),
]
# Rows, columns, warps, stages, and programs at once on a processor, by kind, n and d.
SHAPES = {
    ("lse", 10000, 3): "16,256,4,2,5 16,512,4,2,4 32,128,4,2,2 64,64,4,2,2 16,128,4,2,6 8,256,2,2,8",
    ("lse", 4096, 3): "16,256,4,2,5 16,128,4,2,6 8,256,2,2,8",
    ("lse", 10000, 64): "64,128,4,2,2 64,128,4,3,2 64,256,4,2,1 128,128,8,2,1 128,256,8,2,1 128,64,4,2,3 64,64,4,2,4",
    ("lse", 4096, 64): "64,128,4,2,2 64,64,4,2,4 128,128,8,2,1 32,128,4,2,3",
    ("vector", 10000, 64): "64,128,4,2,2 64,64,4,2,4 128,128,8,2,1",
    ("matrix", 10000, 64): "64,64,4,2,2 64,32,4,2,3 128,64,8,2,1 128,32,4,2,2",
}


def say(*parts):
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def time_for(seconds, what):
    if time.time() - START + seconds < SECONDS:
        return True
    say("no time for", what)
    return False


def clouds(n, m, d, dtype="float32"):
    rng = np.random.default_rng(0)
    x, y, a, b = rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.random(n) + 0.1, rng.random(m) + 0.1
    return tuple(np.asarray(part, dtype) for part in (x, y, a / a.sum(), b / b.sum()))


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

        @jax.jit
        def ours(x, y, a, b, metric=metric, epsilon=epsilon, options=options):
            s = solve(PointCloud(x, y, metric), a, b, epsilon=epsilon, **options)
            return s.value(), (s.f, s.g, s.iterations, s.error)

        def loss(x, ours=ours, rest=(y, a, b)):
            return ours(x, *rest)

        (value, (f, g, iterations, error)), by_x = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(x))
        wide = [torch.tensor(np.asarray(part, "float64")) for part in (x, y, a, b)]
        wide[0].requires_grad_()
        options |= {"acceleration": None, "tolerance": 0.0} if "max_iterations" in options else {"tolerance": 1e-10}
        theirs = solve(PointCloud(*wide[:2], metric), *wide[2:], epsilon=epsilon, gradient="envelope", **options)
        if options["tolerance"] == 0:
            theirs = solve(PointCloud(*wide[:2], metric), *wide[2:], epsilon=epsilon, **options)
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
        verdict = "good" if max(found.values()) < bound else "BAD"
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
    scaled = ((x**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * jnp.matmul(x, y.T, precision="highest")) / epsilon
    log_a, log_b = jnp.log(a), jnp.log(b)

    def once(_, f):
        g = -jax.nn.logsumexp((log_a + f)[:, None] - scaled, 0)
        return -jax.nn.logsumexp(log_b + g - scaled, 1)

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


def one_launch(kind, n, d, chosen, repeats=10):
    """µs of one kernel among those of a loop on the device, several written out in a round; the launch shape."""
    x, y, _, _ = map(jnp.asarray, clouds(n, n, d))
    level = jnp.full((1, n), -np.log(n), jnp.float32)

    def once(pairs, h):
        if kind == "lse":
            out = pallas_gpu.lse(pairs, h, -h + level)
            return level - out
        values = jnp.concatenate([jnp.ones_like(y[None, :, :1]), y[None]], -1) if kind == "matrix" else h[:, :, None]
        return h + 1e-30 * pallas_gpu.reduce(pairs, h, h, values).sum(-1)

    @jax.jit
    def run(count):
        pairs = prepare(x[None], y[None], jnp.full(1, 0.1 * d, jnp.float32))
        pairs = pairs._replace(held=pallas_gpu.hold(pairs).held)

        def several(_, h):
            for _ in range(repeats):
                h = once(pairs, h)
            return h

        return jax.lax.fori_loop(0, count, several, level)

    kept = pallas_gpu.shape
    pallas_gpu.shape = kept if chosen is None else lambda kind, width: chosen
    try:
        few, many = (seconds(lambda count=count: run(count), calls=1) for count in (1, 7))
        return (many - few) / 6 / repeats * 1e6
    finally:
        pallas_gpu.shape = kept


def shapes():
    """Times of a kernel by launch shape; the best belongs into kernels/sinkhorn/pallas_tuning.json."""
    for (kind, n, d), candidates in SHAPES.items():
        found = {}
        for candidate in candidates.split():
            if not time_for(5, f"{kind} {n} × {d} {candidate}"):
                break
            try:
                found[candidate] = one_launch(kind, n, d, tuple(map(int, candidate.split(","))))
            except Exception as error:
                say(kind, n, d, candidate, type(error).__name__, str(error)[:80])
        if found:
            best = min(found, key=found.get)
            say(kind, f"{n} × {d}: best {best}", *(f"{shape}: {time:.1f} µs" for shape, time in found.items()))


if __name__ == "__main__":
    say(jax.__version__, jax.devices())
    everything = {"check": check, "host": host, "bench": bench, "shapes": shapes}
    for part in sys.argv[1:] or ["check", "host", "bench"]:
        everything[part]()
