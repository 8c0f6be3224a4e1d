"""JAX attention and MaxSim on one CUDA card: errors against float64, times against plain JAX, parts, launch shapes.

python benchmarks/card/attention.py [check] [bench] [parts] [long] [memory] [band] [maxsim] [quick]   (default: all)

About two minutes; `memory` another. `quick`: tiny sizes, on a CPU where there is no card, to see that it runs.
SECONDS_LEFT in the environment is when to stop: what would take longer is left out, and says so.
"""

import os
import sys
import time

START, SECONDS = time.time(), float(os.environ.get("SECONDS_LEFT", "600"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, os.getcwd())
import functools

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
from flashot_backends.kernels.attention import pallas_gpu
from flashot_backends.kernels.attention.pairs import Pairs
from flashot_backends.ops.attention import DustbinScore, DustbinToken, sinkhorn_attention
from flashot_backends.ops.maxsim.jax_ops import maxsim

QUICK = "quick" in sys.argv or bool(os.environ.get("QUICK"))
CARD = jax.default_backend() == "gpu"
KERNEL = "chunked" if QUICK and not CARD else "pallas_gpu"
pallas_gpu.interpret = QUICK and not CARD  # `parts` calls kernels where no array asks for them
FULL = {"base_steps": 1 if QUICK else 15, "tail_steps": 2}
FEW = {"base_steps": 3}  # for errors: float64 in plain JAX takes long to compile
CASES = [  # name, queries, keys, options, dustbin, features
    ("dense", 300, 300, FEW, None, 64),
    ("dense, large programs", 4300, 4300, FEW, None, 64),  # enough tokens for those of 128 x 128 pairs
    ("band and padding", 1000, 1000, {"window": 100, "key_mask": jnp.arange(1000) < 800, **FEW}, None, 64),
    ("rectangular, score", 300, 450, FEW, "score", 80),
    ("segments, rows last", 500, 500, {"segments": jnp.arange(500) // 130, "last_update": "rows", **FEW}, None, 64),
    ("token, epsilon 0.1", 333, 333, {"epsilon": 0.1, **FEW}, "token", 128),
]
SHAPES = {
    ("half", jnp.bfloat16): "128,64,4,3 128,64,8,3 128,128,8,3 64,64,4,3 64,128,4,3",
    ("half", jnp.float32): "128,64,4,3 128,64,8,3 64,64,4,3 64,128,4,2",
    ("apply", jnp.bfloat16): "128,64,8,3 128,64,4,3",
    ("apply", jnp.float32): "128,64,8,2 64,64,4,2",
    ("pull", jnp.bfloat16): "128,64,8,3 64,64,4,3",
    ("pull", jnp.float32): "128,64,8,2 64,64,4,2",
}


def say(*parts):
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def at_most(length):
    """A number of tokens, small ones to see that a script runs."""
    return min(length, 48) if QUICK else length


def time_for(seconds, what):
    if QUICK or time.time() - START + seconds < SECONDS:
        return True
    say("no time for", what)
    return False


def tokens(problems, length, features, dtype, keys=None, shared=None):
    seeds, count = jax.random.split(jax.random.key(0), 3), shared or problems
    shapes = (problems, length), (count, keys or length), (count, keys or length)
    return tuple(jax.random.normal(seed, (*shape, features), dtype) for seed, shape in zip(seeds, shapes, strict=True))


def relative(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted) / (np.linalg.norm(wanted) + 1e-30))


def milliseconds(function, *arguments, calls=10):
    """Of one call among several that wait for nothing; the best of three."""
    jax.block_until_ready(function(*arguments))
    best, calls = np.inf, 1 if QUICK else calls
    for _ in range(1 if QUICK else 3):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e3


def compiled(function, *arguments):
    start = time.time()
    program = jax.jit(function).lower(*arguments).compile()
    mebibytes = program.memory_analysis().temp_size_in_bytes / 2**20
    return program, f"compiled in {time.time() - start:.2f} s, {mebibytes:.0f} MiB beside inputs and results"


def with_gradients(function):
    def both(q, k, v, cotangent):
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(cotangent)

    return both


def ours(**options):
    return functools.partial(sinkhorn_attention, backend=KERNEL, **{**FULL, **options})


def plain(q, k, v):
    """The same surrogate written plainly: products in the inputs' dtype, float32 scores, automatic derivative."""
    scores = jnp.einsum("pnd,pmd->pnm", q, k, preferred_element_type=jnp.float32) / np.float32(q.shape[-1] ** 0.5)

    def rows(v):
        return -jax.nn.logsumexp(scores + v[:, None, :], 2)

    def columns(u):
        return -jax.nn.logsumexp(scores + u[:, :, None], 1)

    w = jax.lax.fori_loop(0, FULL["base_steps"], lambda _, w: columns(rows(w)), jnp.zeros(k.shape[:2], jnp.float32))
    w = jax.lax.stop_gradient(w - w.mean(1, keepdims=True))
    for _ in range(2):
        u = rows(w)
        w = columns(u)
    plan = jnp.exp(scores + u[:, :, None] + w[:, None, :]).astype(v.dtype)
    return jnp.einsum("pnm,pme->pne", plan, v, preferred_element_type=jnp.float32).astype(v.dtype)


def check():
    """Output and all gradients against float64 on the same rounded inputs, relative to each one's norm."""
    for name, length, keys, options, kind, features in CASES[4:5] if QUICK else CASES:
        for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)):
            if not time_for(8, f"{name} {dtype.__name__}"):
                return
            arrays = tokens(4, length, features, dtype, keys, shared=2)
            parts = tuple(jax.random.normal(jax.random.key(i), (features,), dtype) for i in range(3))
            arrays = (arrays[0].reshape(2, 2, length, features), *(array[:, None] for array in arrays[1:]))
            values = (*arrays, *parts, jnp.asarray(0.3, dtype))
            wide = tuple(value.astype(jnp.float64) for value in values)
            wanted = gradients("reference", options, kind, wide)
            errors = relatives(gradients(KERNEL, options, kind, values), wanted)
            shown, allowed = figures(errors), [tolerance] * len(errors)
            if max(errors) >= tolerance:  # a gradient may be small beside what adds up to it
                beside = relatives(gradients("chunked", options, kind, values), wanted)
                shown, allowed = f"{shown}; streamed JAX {figures(beside)}", [max(tolerance, 1.5 * e) for e in beside]
            good = all(error < most for error, most in zip(errors, allowed, strict=True))
            say("good" if good else "BAD", name, dtype.__name__, shown)


def relatives(got, wanted):
    return [relative(one, other) for one, other in zip(got, wanted, strict=True) if np.abs(other).max() > 0]


def figures(errors):
    return " ".join(f"{error:.1e}" for error in errors)


def gradients(backend, options, kind, values):
    def loss(q, k, v, query, key, value, score):
        bins = {None: None, "token": DustbinToken(query, key, value), "score": DustbinScore(score)}
        out = sinkhorn_attention(q, k, v, backend=backend, dustbin=bins[kind], **options)
        return (out.astype(jnp.float64) * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    found, out = jax.jit(jax.grad(loss, range(7), has_aux=True))(*values)
    return out, *found


def bench():
    """PERFORMANCE's row: 8 problems of 4 096 tokens, 64 features, bfloat16, against plain JAX under jit."""
    q, k, v = tokens(8, at_most(4096), 64, jnp.bfloat16)
    for name, function in (("ours", ours()), ("plain", plain)):
        for kind, run, arguments in (
            ("forward", function, (q, k, v)),
            ("both", with_gradients(function), (q, k, v, v)),
        ):
            if not time_for(6, f"{name} {kind}"):
                return
            program, how = compiled(run, *arguments)
            say(name, kind, f"{milliseconds(program, *arguments):.3f} ms,", how)
    for problems, length, features, dtype in (
        (8, 4096, 64, jnp.float32),
        (8, 4096, 128, jnp.bfloat16),
        (1, 4096, 64, jnp.bfloat16),
    ):
        if not time_for(5, f"{problems} × {length} × {features} {dtype.__name__}"):
            return
        q, k, v = tokens(problems, at_most(length), features, dtype)
        program, _ = compiled(with_gradients(ours()), q, k, v, v)
        say(f"ours both {problems} × {length} × {features} {dtype.__name__} {milliseconds(program, q, k, v, v):.3f} ms")


def one_launch(which, dtype, blocks, window=None, length=4096, problems=8):
    """Microseconds of one kernel inside a loop on the device; blocks: a launch shape to try, or None."""
    problems, length = (1, 128) if QUICK else (problems, length)
    q, k, v = tokens(problems, length, 64, dtype)
    w = jnp.full((problems, length), -np.log(length) / 2, jnp.float32)
    terms = jnp.ones((problems, length, 4), jnp.float32)

    def body(laid, z, values):
        if which == "half":
            return pallas_gpu.half_step(laid, z, 0 * w, None, z), values
        if which == "vector":
            return pallas_gpu.matvec(laid, w, w, z), values
        if which == "apply":
            return z, pallas_gpu.apply(laid, w, w, values).astype(dtype)
        return z, values + (1e-30 * pallas_gpu.pull(laid, w, w, q, values, terms, terms)).astype(dtype)

    @jax.jit
    def run(count):
        laid = pallas_gpu.prepare(Pairs(q, k, jnp.full(problems, 1 / 8, jnp.float32), window=window))
        return jax.lax.fori_loop(0, count, lambda _, carry: body(laid, *carry), (w, v))

    chosen = pallas_gpu.gpu_blocks
    pallas_gpu.gpu_blocks = chosen if blocks is None else lambda *_: blocks
    try:
        few, many = (1, 2) if QUICK else (10, 60)
        return (milliseconds(run, many, calls=1) - milliseconds(run, few, calls=1)) / (many - few) * 1e3
    finally:
        pallas_gpu.gpu_blocks = chosen


def parts():
    for which in ("half", "vector", "apply", "pull")[: 1 if QUICK else None]:
        times = (f"{dtype.__name__} {one_launch(which, dtype, None):.1f} µs" for dtype in (jnp.bfloat16, jnp.float32))
        say(which, *times)
    for (which, dtype), shapes in list(SHAPES.items())[: 1 if QUICK else None]:
        found = {shape: one_launch(which, dtype, tuple(map(int, shape.split(",")))) for shape in shapes.split()[: 2 if QUICK else None]}
        say(which, dtype.__name__, *(f"{shape}: {time:.1f}" for shape, time in found.items()))


def long():
    for problems in (1, 8):
        if not time_for(10, f"{problems} × 65 536"):
            return
        q, k, v = tokens(problems, at_most(65536), 64, jnp.bfloat16)
        program, how = compiled(with_gradients(ours()), q, k, v, v)
        say(f"ours {problems} × 65 536: {milliseconds(program, q, k, v, v, calls=1):.0f} ms,", how)
        try:
            say("plain:", compiled(with_gradients(plain), q, k, v, v)[1])
        except Exception as error:
            say("plain:", type(error).__name__, str(error)[:100])


def memory():
    """MiB beside inputs and results, against the number of tokens; and milliseconds of ours."""
    for length in (4096, 8192, 16384, 32768, 65536):
        if not time_for(8, f"memory at {length}"):
            return
        q, k, v = tokens(1, at_most(length), 64, jnp.bfloat16)
        program, how = compiled(with_gradients(ours()), q, k, v, v)
        took = milliseconds(program, q, k, v, v, calls=1)
        say(f"memory, {length} tokens, ours: {how}, {took:.1f} ms, inputs and results {7 * q.nbytes / 2**20:.0f} MiB")
        try:
            say(f"memory, {length} tokens, plain:", compiled(with_gradients(plain), q, k, v, v)[1])
        except Exception as error:
            say(f"memory, {length} tokens, plain:", type(error).__name__, str(error)[:100])


def band():
    q, k, v = tokens(8, at_most(16384), 64, jnp.bfloat16)
    for window in (64, 128, 256, 512, 1024, 2048, 4096, None):
        if not time_for(5, f"window {window}"):
            return
        program, _ = compiled(with_gradients(ours(window=window)), q, k, v, v)
        took = milliseconds(program, q, k, v, v, calls=3)
        say(f"window {window}: {took:.2f} ms" + (f", {1e3 * took / window:.1f} us for each of W" if window else ""))


def score():
    for queries, documents, dtype in ((64, 256, jnp.bfloat16), (32, 32, jnp.bfloat16), (64, 256, jnp.float32)):
        if QUICK:
            queries, documents = 2, 3
        if not time_for(6, f"maxsim {queries} × {documents} {dtype.__name__}"):
            return
        q = jax.random.normal(jax.random.key(1), (queries, 32, 128), dtype)
        d = jax.random.normal(jax.random.key(2), (documents, 300, 128), dtype)
        mask = jnp.arange(300) < jnp.linspace(100, 300, documents)[:, None]

        def train(q, d, backend, mask=mask):
            scores, pull = jax.vjp(lambda q, d: maxsim(q, d, documents_mask=mask, backend=backend), q, d)
            return scores, pull(jnp.cos(scores))

        times = []
        for backend in (KERNEL, "chunked"):
            program, _ = compiled(functools.partial(train, backend=backend), q, d)
            times.append(f"{backend} {milliseconds(program, q, d) * 1e3:.0f} µs")
        say(f"maxsim {queries} × {documents} {dtype.__name__}, with gradients:", *times)


if __name__ == "__main__":
    say(jax.__version__, jax.devices())
    everything = {
        "check": check, "bench": bench, "parts": parts, "long": long, "memory": memory, "band": band, "maxsim": score
    }
    for name in [word for word in sys.argv[1:] if word != "quick"] or everything:
        everything[name]()
