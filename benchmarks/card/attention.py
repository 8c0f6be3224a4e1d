"""Sinkhorn attention on one H200: parity, PERFORMANCE's attention rows, memory, bands, launch shapes. ~120 s.

python3 benchmarks/card/attention.py [check] [bench] [long] [band] [tune]   (default: all)
"""

import os
import sys
import time

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.insert(0, os.getcwd())
T0 = time.time()
import functools
import statistics
import traceback

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
from flashot_backends import dispatch
from flashot_backends.plugins.manager import registry
from flashot_backends.plugins.specs import KernelSpec

K, J = "flashot_backends.kernels.attention.", frozenset({"jax"})
if not registry().kernels("attention"):
    for s in [
        KernelSpec("attention", "pallas_gpu", K + "pallas_gpu", J, frozenset({"cuda"}), ("jax",), 20),
        KernelSpec("attention", "chunked", K + "chunked", J, None, ("jax",), 10),
        KernelSpec("attention", "reference", K + "reference", J, None, ("jax",), 0),
    ]:
        dispatch.register(s)
from flashot_backends.kernels.attention import pallas_gpu
from flashot_backends.ops.attention import DustbinScore, DustbinToken, sinkhorn_attention

WHAT = sys.argv[1:] or ["check", "bench", "long", "band", "tune"]
print(jax.__version__, jax.devices(), f"import {time.time() - T0:.1f}s", flush=True)


def say(*a):
    print(f"[{time.time() - T0:5.1f}]", *a, flush=True)


def tokens(P, L, d, dt, m=None, seed=0, kv=None):
    ks = jax.random.split(jax.random.key(seed), 3)
    kv = kv or P
    return (
        jax.random.normal(ks[0], (P, L, d), dt),
        jax.random.normal(ks[1], (kv, m or L, d), dt),
        jax.random.normal(ks[2], (kv, m or L, d), dt),
    )


def rel(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-30))


def grads(backend, opts, bins=None):
    def loss(q, k, v, parts):
        D = None if bins is None else DustbinToken(*parts[:3]) if bins == "token" else DustbinScore(parts[3])
        o = sinkhorn_attention(q, k, v, backend=backend, dustbin=D, **opts)
        w = jnp.cos(jnp.arange(o.size)).reshape(o.shape)
        return (o.astype(w.dtype) * w).sum(), o

    return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))


def check():
    parts = tuple(jax.random.normal(jax.random.key(i), (64,)) for i in range(3)) + (jnp.asarray(0.3),)
    cases = [
        ("dense", 300, None, {}, None, 64),
        ("band", 1000, None, {"window": 100}, None, 64),
        ("band+pad", 1000, None, {"window": 100, "key_mask": jnp.arange(1000) < 800}, None, 64),
        ("rect", 300, 450, {}, None, 64),
        ("segments", 500, None, {"segments": jnp.arange(500) // 130}, None, 64),
        ("token", 333, None, {}, "token", 64),
        ("score", 300, 260, {}, "score", 64),
        ("rows R=3.5", 256, None, {"tail_steps": 3.5, "last_update": "rows"}, None, 64),
        ("d=80", 256, None, {}, None, 80),
        ("d=128", 256, None, {}, None, 128),
        ("eps=.1", 512, None, {"epsilon": 0.1}, None, 64),
    ]
    for name, L, m, opts, bins, d in cases:
        for dt in (jnp.float32, jnp.bfloat16):
            try:
                q, k, v = tokens(4, L, d, dt, m, kv=2)
                q = q.reshape(2, 2, L, d)
                k = k[:, None]
                v = v[:, None]
                pr = tuple(p.astype(dt) for p in parts)
                # the truth: float64 arithmetic on the same rounded inputs
                g64, o64 = grads("reference", opts, bins)(
                    *(x.astype(jnp.float64) for x in (q, k, v)), tuple(p.astype(jnp.float64) for p in pr)
                )
                g, o = grads("pallas_gpu", opts, bins)(q, k, v, pr)
                es = (
                    [rel(o, o64)]
                    + [rel(a, b) for a, b in zip(g[:3], g64[:3], strict=False)]
                    + ([rel(a, b) for a, b in zip(g[3], g64[3], strict=False) if np.abs(b).max() > 0])
                )
                tol = (2e-5 if "eps" not in name else 2e-4) if dt == jnp.float32 else 2e-2
                say(
                    "ok " if max(es) < tol else "BAD",
                    name,
                    dt.__name__,
                    "out/dq/dk/dv/..",
                    " ".join(f"{e:.1e}" for e in es),
                )
            except Exception as ex:
                say("FAIL", name, dt.__name__, type(ex).__name__, str(ex)[:600])


def plain(q, k, v, T=15, R=2):
    """The same surrogate in plain JAX: products in the inputs' dtype, float32 scores, autodiff."""
    s = jnp.einsum("pnd,pmd->pnm", q, k, preferred_element_type=jnp.float32) / np.float32(q.shape[-1] ** 0.5)
    def row(v):
        return -jax.nn.logsumexp(s + v[:, None, :], 2)
    def col(u):
        return -jax.nn.logsumexp(s + u[:, :, None], 1)
    v0 = (
        jax.lax.fori_loop(0, T, lambda _, w: jax.lax.stop_gradient(col(row(w))), jnp.zeros(k.shape[:2], jnp.float32))
        if T
        else jnp.zeros(k.shape[:2], jnp.float32)
    )
    w = jax.lax.stop_gradient(v0 - v0.mean(1, keepdims=True))
    for _ in range(R):
        u = row(w)
        w = col(u)
    P = jnp.exp(s + u[:, :, None] + w[:, None, :])
    return jnp.einsum("pnm,pme->pne", P.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(v.dtype)


def clock(f, *a, reps=7, queue=5):
    t = time.time()
    jax.block_until_ready(f(*a))
    first = time.time() - t
    out = []
    for _ in range(reps):
        t = time.time()
        jax.block_until_ready(f(*a))
        out.append(time.time() - t)
    t = time.time()
    for _ in range(queue):
        r = f(*a)
    jax.block_until_ready(r)
    q = (time.time() - t) / queue
    return first, statistics.median(out) * 1e3, q * 1e3


def both(fn):
    fwd = jax.jit(fn)
    bwd = jax.jit(jax.grad(lambda *t: (fn(*t).astype(jnp.float32) ** 2).sum(), (0, 1, 2)))
    return fwd, bwd


def peak():
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**20


def temp(f, *a):
    try:
        return f.lower(*a).compile().memory_analysis().temp_size_in_bytes / 2**20
    except Exception:
        return float("nan")


def row(label, fn, args, reps=7):
    for kind, f in zip(("fwd", "fwd+bwd"), both(fn), strict=False):
        try:
            first, lat, queued = clock(f, *args, reps=reps)
            say(
                f"{label:38s} {kind:8s} first {first:6.2f} s  latency {lat:9.3f} ms  queued {queued:9.3f} ms  temp {temp(f, *args):9.1f} MiB"
            )
        except Exception as ex:
            say(f"{label:38s} {kind:8s} {type(ex).__name__} {str(ex)[:160]!r}")


def tier(backend, **o):
    return functools.partial(sinkhorn_attention, backend=backend, **o)


def bench():
    for P in (8, 1):
        args = tokens(P, 4096, 64, jnp.bfloat16)
        for name, fn in (("pallas_gpu", tier("pallas_gpu")), ("plain jit", plain), ("chunked", tier("chunked"))):
            row(f"{name} P={P} L=4096 d=64 bf16", fn, args)
    a, b = jax.jit(tier("pallas_gpu"))(*args), jax.jit(plain)(*args)
    say("agreement with plain", rel(a, b))
    row("pallas_gpu P=8 L=4096 d=64 float32", tier("pallas_gpu"), tokens(8, 4096, 64, jnp.float32), 3)
    row("pallas_gpu P=8 L=4096 d=128 bf16", tier("pallas_gpu"), tokens(8, 4096, 128, jnp.bfloat16), 3)


def long():
    for L in (16384, 65536):
        row(f"pallas_gpu P=1 L={L} bf16", tier("pallas_gpu"), tokens(1, L, 64, jnp.bfloat16), 3)
    row("plain jit P=1 L=65536 bf16", plain, tokens(1, 65536, 64, jnp.bfloat16), 1)


def band():
    for W in (128, 512, 2048):
        row(f"pallas_gpu P=8 L=16384 W={W}", tier("pallas_gpu", window=W), tokens(8, 16384, 64, jnp.bfloat16), 3)


def tune():
    """One half-step (lse), one vector pass, one pull, at P=8 L=4096 d=64, bf16 and float32."""
    from flashot_backends.kernels.attention.pairs import Pairs

    keep = pallas_gpu.gpu_blocks
    for dt, shapes in (
        (
            jnp.bfloat16,
            [
                (128, 64, 4, 3),
                (128, 64, 4, 2),
                (128, 64, 8, 3),
                (128, 128, 8, 2),
                (128, 128, 4, 2),
                (64, 64, 4, 3),
                (64, 128, 4, 2),
                (256, 64, 8, 2),
                (128, 32, 4, 3),
            ],
        ),
        (jnp.float32, [(64, 32, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 1), (128, 32, 8, 2)]),
    ):
        q, k, v = tokens(8, 4096, 64, dt)
        pairs = Pairs(q, k, jnp.full(8, 1 / 8, jnp.float32))
        w = jnp.zeros((8, 4096), jnp.float32) - 8.4
        terms = jnp.ones((8, 4096, 4), jnp.float32)
        for shape in shapes:
            pallas_gpu.gpu_blocks = lambda *a, shape=shape: shape
            line = []
            for name, f in (
                ("lse", lambda q, k, v, w: pallas_gpu.lse(Pairs(q, k, pairs.scale), w)),
                ("matvec", lambda q, k, v, w: pallas_gpu.matvec(Pairs(q, k, pairs.scale), w, w, w)),
                ("apply", lambda q, k, v, w: pallas_gpu.apply(Pairs(q, k, pairs.scale), w, w, v)),
                ("pull", lambda q, k, v, w: pallas_gpu.pull(Pairs(q, k, pairs.scale), w, w, v, v, terms, terms)),
            ):
                try:
                    line.append(f"{name} {clock(jax.jit(f), q, k, v, w, reps=3, queue=20)[2] * 1e3:7.1f} us")
                except Exception as ex:
                    line.append(f"{name} {type(ex).__name__}")
            say(dt.__name__, shape, "  ".join(line))
    pallas_gpu.gpu_blocks = keep


for name in WHAT:
    say("---", name)
    try:
        {"check": check, "bench": bench, "long": long, "band": band, "tune": tune}[name]()
    except Exception:
        traceback.print_exc()
say("done", f"peak {peak():.0f} MiB")
