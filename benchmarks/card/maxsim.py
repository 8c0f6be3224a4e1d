"""MaxSim on one H200: correctness against float64, launch-shape variants for the PERFORMANCE rows, host overhead.

python benchmarks/card/maxsim.py [check] [fwd] [bwd] [bench]   (default: all, about 100 s)
python benchmarks/card/maxsim.py quick                        (<= 60 s: new forward variants, backward shapes; all compiled in parallel first)
"""

import os
import sys
import time

sys.path.insert(0, os.getcwd())
T00 = time.time()
import torch

from flashot_backends.dispatch import register
from flashot_backends.plugins.manager import registry
from flashot_backends.plugins.specs import KernelSpec

_K = "flashot_backends.kernels.maxsim."
_t = frozenset({"torch"})
if not registry().kernels("maxsim"):
    for s in [
        KernelSpec("maxsim", "triton", _K + "triton", _t, frozenset({"cuda"}), ("triton",), 20),
        KernelSpec("maxsim", "torch", _K + "blocks", _t, priority=10),
        KernelSpec("maxsim", "reference", _K + "reference", _t, priority=0),
    ]:
        register(s)
from flashot_backends.kernels.maxsim import triton as K
from flashot_backends.kernels.maxsim import tuning
from flashot_backends.kernels.maxsim.launch import arguments
from flashot_backends.ops.maxsim import maxsim
from flashot_backends.ops.maxsim.inputs import build

dev = "cuda"
WHAT = sys.argv[1:] or ["check", "fwd", "bwd", "bench"]
DEADLINE = 55 if "quick" in WHAT else 1e9
h, b16, f32 = torch.float16, torch.bfloat16, torch.float32
t0 = time.time()
q = torch.randn(2, 32, 128, device=dev, dtype=h)
x = torch.randn(50, 180, 128, device=dev, dtype=h)
maxsim(q, x)
torch.cuda.synchronize()
print(f"first call {time.time() - t0:.1f}s", torch.cuda.get_device_name(), torch.__version__, flush=True)


def emb(*s, dt=h, seed=0):
    g = torch.Generator(dev).manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*s, device=dev, generator=g), dim=-1).to(dt)


def relative(a, b):
    return ((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)).item()


def check(label, dt, q, x, qm=None, dm=None, masked="exclude", pairs=False):
    def flat(v):
        return torch.cat([flat(t) for t in v]) if isinstance(v, (list, tuple)) else v.reshape(-1)

    def run(cast, backend):
        leaves = []

        def walk(v):
            if isinstance(v, list):
                return [walk(t) for t in v]
            leaf = v.to(cast).detach().requires_grad_()
            leaves.append(leaf)
            return leaf

        s = flat(maxsim(walk(q), walk(x), qm, dm, masked, pairs, backend=backend))
        w = torch.randn(s.shape, device=dev, generator=torch.Generator(dev).manual_seed(3)) * torch.isfinite(s)
        s2 = torch.where(torch.isfinite(s), s, torch.zeros_like(s))
        return s2.detach(), torch.autograd.grad((s2 * w.to(s2.dtype)).sum(), leaves)

    try:
        s, g = run(dt, None)
        r, gr = run(torch.float64, "torch")
        es = relative(s, r)
        eg = max(relative(torch.cat([t.reshape(-1) for t in g]), torch.cat([t.reshape(-1) for t in gr])), 0)
        ok = es < (2e-6 if dt == f32 else 2e-6) and eg < {f32: 2e-5, h: 2e-3, b16: 8e-3}[dt]
        if not ok:
            print(f"BAD {label} {dt}: scores {es:.1e} gradients {eg:.1e}", flush=True)
        return es, eg, ok
    except Exception as ex:
        print(f"BAD {label} {dt}: {type(ex).__name__} {str(ex)[:300]}", flush=True)
        return 0, 0, False


if "check" in WHAT:
    for dt in (f32, h, b16):
        t0 = time.time()
        out = []
        for s in [
            (1, 1, 1, 1, 1),
            (3, 5, 4, 7, 8),
            (2, 33, 5, 17, 7),
            (5, 3, 2, 65, 33),
            (4, 32, 6, 180, 128),
            (3, 130, 5, 300, 96),
            (2, 600, 3, 513, 128),
            (1, 32, 37, 1000, 768),
            (7, 32, 9, 64, 300),
        ]:
            nq, lq, nd, ld, d = s
            out.append(check(s, dt, emb(nq, lq, d, dt=dt), emb(nd, ld, d, dt=dt, seed=1)))
        for masked in ("exclude", "zero"):
            q, x = emb(6, 32, 128, dt=dt).abs(), -emb(9, 300, 128, dt=dt, seed=1).abs()
            dm = torch.rand(9, 300, device=dev) < 0.6
            dm[3] = False
            dm[4, 100:] = False
            out.append(check("mask " + masked, dt, q, x, torch.rand(6, 32, device=dev) < 0.7, dm, masked))
        out.append(
            check(
                "sets",
                dt,
                emb(5, 32, 128, dt=dt),
                emb(5, 7, 180, 128, dt=dt, seed=1),
                None,
                torch.rand(5, 7, 180, device=dev) < 0.6,
                "zero",
            )
        )
        out.append(check("pairs", dt, emb(50, 40, 128, dt=dt), emb(50, 90, 128, dt=dt, seed=1), pairs=True))
        ql, xl = (
            [emb(n, 128, dt=dt, seed=n) for n in (32, 7, 140)],
            [emb(n, 128, dt=dt, seed=n) for n in (300, 5, 64, 1, 700, 33)],
        )
        out.append(check("lists", dt, ql, xl))
        out.append(check("nested", dt, ql, [xl[:1], xl[1:4], xl[4:]]))
        print(
            f"check {dt}: {sum(o[2] for o in out)}/{len(out)} right, worst scores {max(o[0] for o in out):.1e} gradients {max(o[1] for o in out):.1e} ({time.time() - t0:.0f}s)",
            flush=True,
        )
    from flashot_backends.ops.maxsim import Int8, Residuals

    def coded(n, t, bits, seed=0):
        g = torch.Generator(dev).manual_seed(seed)
        if not bits:
            return Int8(
                torch.randint(-127, 128, (n, t, 128), device=dev, generator=g).to(torch.int8),
                torch.rand(n, t, device=dev, generator=g) / 127,
            )
        return Residuals(
            torch.randint(0, 4096, (n * t,), device=dev, generator=g),
            torch.randint(0, 256, (n * t, 16 * bits), device=dev, generator=g).to(torch.uint8),
            torch.full((n,), t),
            emb(4096, 128, seed=1),
            torch.randn(1 << bits, device=dev, generator=g) / 20,
        )

    for bits in (0, 2, 4):
        for dt in (h, f32):
            try:
                c = coded(70, 180, bits)
                q = emb(5, 32, 128, dt=dt)
                print(
                    "coded",
                    bits,
                    dt,
                    "error {:.1e}".format(relative(maxsim(q, c), maxsim(q.double(), c, backend="torch"))),
                    flush=True,
                )
            except Exception as ex:
                print("BAD coded", bits, dt, repr(ex)[:300])
    q, x = emb(4, 32, 128).requires_grad_(), emb(6, 180, 128, seed=1).requires_grad_()
    def f(a, b):
        return maxsim(a, b, masked="zero").log_softmax(-1)
    try:
        c = torch.compile(f, fullgraph=True)
        g1 = torch.autograd.grad(c(q, x).square().sum(), (q, x))
        g2 = torch.autograd.grad(f(q, x).square().sum(), (q, x))
        print("compile fullgraph", relative(g1[0], g2[0]), relative(g1[1], g2[1]))
    except Exception as ex:
        print("BAD compile", repr(ex)[:300])
    with torch.no_grad():
        out = maxsim(q, x)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            cap = maxsim(q, x)
        cap.fill_(-1)
        g.replay()
        torch.cuda.synchronize()
        print("cuda graph", torch.equal(cap, out))
        big = torch.empty(20000, 1024, 128, device=dev, dtype=h)
        for i in range(0, 20000, 2000):
            big[i : i + 2000] = emb(2000, 1024, 128, seed=i)
        s = maxsim(q[:1], big)
        e = [
            abs((q[0].double() @ big[j].double().T).max(-1).values.sum() - s[0, j].double()).item()
            for j in (0, 9999, 16500, 19999)
        ]
        print("beyond 2^31 elements, errors", e)
        del big, s
    one, two = (torch.autograd.grad(maxsim(q, x).sum(), (q, x)) for _ in range(2))
    print("deterministic", all(torch.equal(a, b) for a, b in zip(one, two, strict=False)))


def queued(fn, k=20):
    fn()
    fn()
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(3):
        s, e = torch.cuda.Event(True), torch.cuda.Event(True)
        s.record()
        for _ in range(k):
            fn()
        e.record()
        torch.cuda.synchronize()
        best = min(best, s.elapsed_time(e) / k * 1e3)
    return best


def variants(label, direction, fn, shapes, names, k=20):
    keep = getattr(tuning, direction)
    rows = []
    for v in shapes:
        tuning.__dict__[direction] = lambda *_, v=v: dict(zip(names, v, strict=False))
        K._layouts.clear()
        if time.time() - T00 > DEADLINE:
            break
        try:
            rows.append((queued(fn, k), v))
        except Exception as ex:
            rows.append((float("inf"), v))
            print(label, v, repr(ex)[:120])
    tuning.__dict__[direction] = keep
    K._layouts.clear()
    print(
        f"{direction} {label}: " + " | ".join(f"{t:.0f} {','.join(str(int(i)) for i in v)}" for t, v in sorted(rows)),
        flush=True,
    )


FN = ("BQ", "BT", "DOCUMENT_ROWS", "STAGES", "num_warps", "REGISTERS", "FOLD", "PROGRAMS", "maxnreg")
BN = ("BT", "BK", "SCAN", "ROWS", "STAGES", "GATHERS", "PROGRAMS", "num_warps", "maxnreg")


def problem(nq, lq, nd, ld, d, dt):
    return build(emb(nq, lq, d, dt=dt), emb(nd, ld, d, dt=dt, seed=1), None, None, "exclude", False, None)


def compile_all(jobs):
    """jobs: (direction, fn, shapes, names): every variant compiled side by side, nothing started."""
    from concurrent.futures import ThreadPoolExecutor

    found, launch, t0 = [], K.start, time.time()
    K.start = lambda kernel, plan, tensors, more: found.append((kernel, plan, tensors, more))
    for direction, fn, shapes, names in jobs:
        keep = getattr(tuning, direction)
        for v in shapes:
            tuning.__dict__[direction] = (lambda *a, v=v: dict(zip(names, v, strict=False))) if v else keep
            K._layouts.clear()
            fn()
        tuning.__dict__[direction] = keep
    K.start = launch
    K._layouts.clear()

    def one(job):
        kernel, plan, tensors, more = job
        try:
            kernel.warmup(*arguments(kernel, plan, tensors, more), grid=(1,), **plan.constants)
        except Exception as ex:
            print("BAD compile", {k: v for k, v in plan.constants.items() if k in FN + BN}, repr(ex)[:200], flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, found))
    print(f"{len(found)} variants compiled in {time.time() - t0:.0f}s", flush=True)


if "quick" in WHAT:
    S = [
        (128, 64, 0, 2, 4, 0, 0, 0),
        (128, 64, 0, 2, 4, 0, 8, 0),
        (128, 64, 0, 3, 4, 0, 8, 0),
        (128, 64, 0, 2, 4, 0, 8, 3),
        (128, 64, 0, 3, 4, 0, 8, 2),  # queries in shared memory
        (128, 64, 0, 2, 4, 1, 8, 0),
        (128, 64, 0, 3, 4, 1, 8, 0),
        (128, 64, 0, 4, 4, 1, 8, 0),
        (128, 32, 0, 4, 4, 1, 8, 0),
        (128, 128, 0, 2, 8, 1, 8, 0),
        (128, 128, 0, 2, 4, 1, 8, 0),
        (64, 128, 0, 2, 4, 1, 8, 0),  # in registers
        (256, 64, 0, 2, 8, 0, 8, 0),
        (256, 64, 0, 3, 8, 0, 8, 0),
        (256, 64, 0, 3, 8, 0, 8, 2),
        (256, 64, 0, 2, 8, 0, 8, 2),
        (256, 128, 0, 2, 8, 0, 8, 0),
        (256, 64, 0, 3, 8, 1, 8, 0),
        (256, 64, 0, 3, 16, 1, 8, 0),
        (256, 128, 0, 2, 16, 1, 8, 0),
    ]
    R = [
        (256, 64, 0, 3, 8, 0, 8, 2, 128),
        (256, 64, 0, 2, 8, 0, 8, 2, 128),
        (256, 64, 0, 3, 8, 0, 8, 0, 128),
        (128, 64, 0, 2, 4, 0, 8, 3, 168),
        (128, 64, 0, 2, 4, 0, 8, 0, 128),
        (128, 64, 0, 3, 8, 0, 8, 2, 128),
        (128, 32, 0, 2, 4, 0, 8, 4, 128),
        (128, 32, 0, 2, 4, 0, 0, 0, 128),
    ]
    T = [(32, 64, 1, 4, 4), (32, 64, 1, 3, 4), (32, 64, 1, 5, 4)]
    E = [
        (128, 64, 0, 2, 8),
        (128, 64, 0, 2, 8, 0, 8),
        (64, 64, 0, 2, 4, 0, 8),
        (128, 32, 0, 3, 8, 0, 8),
        (64, 128, 0, 2, 8, 0, 8),
    ]
    B = [
        (64, 64, 1024, 32, 2, 1, 4, 4, 128),
        (64, 64, 1024, 32, 3, 1, 4, 4, 128),
        (64, 64, 1024, 32, 3, 3, 3, 4, 168),
        (64, 32, 1024, 32, 4, 1, 4, 4, 128),
        (64, 64, 2048, 32, 3, 1, 4, 4, 128),
        (64, 64, 1024, 64, 3, 1, 2, 8, 128),
        (128, 64, 1024, 16, 3, 1, 2, 8, 128),
    ]
    BE = [(32, 32, 1024, 32, 3, 1, 4, 4, 128), (64, 32, 1024, 32, 2, 1, 2, 8, 128), (64, 64, 1024, 32, 2, 1, 1, 8, 255)]
    cases = [
        ("32x1000 32x300", (32, 32, 1000, 300, 128, h), S, False, 20),
        ("1x10000 1024x1024", (1, 1024, 10000, 1024, 128, h), S, False, 3),
        ("1x10000 32x300", (1, 32, 10000, 300, 128, h), T, False, 10),
        ("1x10000 32x180", (1, 32, 10000, 180, 128, h), T, False, 10),
        ("64x256 32x300 record", (64, 32, 256, 300, 128, b16), R, True, 20),
        ("16x16 512x1024 record", (16, 512, 16, 1024, 128, b16), R[:7], True, 20),
        ("1024x1024 32x180 record", (1024, 32, 1024, 180, 128, b16), R[:7], True, 3),
        ("32x1000 32x300 float32", (32, 32, 1000, 300, 128, f32), E, False, 5),
    ]
    backs = [
        ((32, 32, 32, 180, 128, b16), B, 20),
        ((64, 32, 256, 300, 128, b16), B, 20),
        ((16, 512, 16, 1024, 128, b16), B, 20),
        ((1024, 32, 1024, 180, 128, b16), B, 3),
        ((64, 32, 256, 300, 128, f32), BE, 20),
    ]
    P = {c[1]: problem(*c[1]) for c in cases}
    P.update({c[0]: problem(*c[0]) for c in backs if c[0] not in P})
    jobs = [("forward", (lambda c=c, r=r: K.forward(P[c], r)), shapes, FN) for _, c, shapes, r, _ in cases]
    jobs += [("forward", (lambda c=c: K.forward(P[c], False)), [None], FN) for _, c, *_ in cases] + [
        ("forward", (lambda c=c: K.forward(P[c], True)), [None], FN) for c, *_ in backs
    ]
    compile_all(jobs)
    W = {c[0]: K.forward(P[c[0]], True) for c in backs}
    W = {c: (w, torch.randn_like(s)) for c, (s, w) in W.items()}
    want = {c: K.forward(P[c], False)[0] for _, c, *_ in cases}
    jobs = [
        ("backward", (lambda c=c: K.backward(P[c], *W[c], True, True)), [None, *shapes], BN) for c, shapes, _ in backs
    ]
    compile_all(
        jobs
        + [
            ("backward", (lambda c=c, w=w: K.backward(P[c], *W[c], *w)), [None], BN)
            for c, *_ in backs
            for w in ((True, False), (False, True))
        ]
    )
    for label, c, shapes, r, k in cases:
        for v in shapes:
            keep = tuning.forward
            tuning.forward = lambda *_, v=v: dict(zip(FN, v, strict=False))
            K._layouts.clear()
            try:
                e = relative(K.forward(P[c], r)[0], want[c])
            except Exception as ex:
                e = 0
                print("BAD", label, v, repr(ex)[:200])
            tuning.forward = keep
            if not e < 2e-6:
                print("WRONG", label, v, e, flush=True)
        variants(label, "forward", lambda: K.forward(P[c], r), shapes, FN, k)
    for c, shapes, k in backs:
        variants(str(c[:4]) + str(c[5])[6:], "backward", lambda: K.backward(P[c], *W[c], True, True), shapes, BN, k)
        print(
            "   documents only {:.0f}  queries only {:.0f}".format(*tuple(queued(lambda w=w: K.backward(P[c], *W[c], *w), k) for w in ((False, True), (True, False)))),
            flush=True,
        )
    del P, W

if "fwd" in WHAT:
    thin = [
        (32, 64, 1, 2, 4),
        (32, 64, 1, 3, 4),
        (32, 64, 1, 4, 4),
        (32, 128, 1, 2, 4),
        (32, 128, 1, 3, 4),
        (32, 128, 1, 2, 8),
        (32, 64, 0, 3, 4),
        (32, 256, 1, 1, 8),
        (32, 32, 1, 4, 4),
        (32, 64, 1, 3, 2),
    ]
    wide = [
        (128, 64, 0, 2, 4),
        (128, 64, 0, 3, 4),
        (128, 64, 0, 4, 4),
        (128, 128, 0, 2, 8),
        (128, 128, 0, 3, 8),
        (128, 64, 1, 3, 4),
        (128, 128, 1, 2, 8),
        (256, 64, 0, 3, 8),
        (128, 32, 0, 4, 4),
        (128, 64, 0, 3, 8),
    ]
    for case in [(1, 32, 10000, 180, 128, h), (1, 32, 10000, 300, 128, h)]:
        p = problem(*case)
        variants(str(case[:4]), "forward", lambda: K.forward(p, False), thin, FN)
    p = problem(32, 32, 1000, 300, 128, h)
    variants("32x1000 32x300", "forward", lambda: K.forward(p, False), wide, FN)
    p = problem(64, 32, 256, 300, 128, b16)
    variants("64x256 record", "forward", lambda: K.forward(p, True), wide, FN)
    p = problem(16, 512, 16, 1024, 128, b16)
    variants("16x16 512x1024 record", "forward", lambda: K.forward(p, True), wide[:7], FN)
    p = problem(1, 1024, 10000, 1024, 128, h)
    variants("1x10000 1024x1024", "forward", lambda: K.forward(p, False), wide[:3] + wide[3:8], FN, 3)
    del p
    p = problem(32, 32, 1000, 300, 128, f32)
    variants(
        "32x1000 float32",
        "forward",
        lambda: K.forward(p, False),
        [(64, 64, 1, 2, 4), (128, 64, 1, 2, 8), (128, 64, 0, 2, 8), (64, 128, 1, 2, 8), (128, 64, 1, 3, 8)],
        FN,
    )
    p = problem(1, 32, 10000, 180, 128, f32)
    variants(
        "1x10000 180 float32",
        "forward",
        lambda: K.forward(p, False),
        [(32, 64, 1, 2, 4), (32, 64, 1, 3, 4), (32, 128, 1, 2, 8), (32, 32, 1, 3, 4)],
        FN,
    )

if "bwd" in WHAT:
    shapes = [
        (bt, bk, 1024, rows, stages, gathers, 4, 4, 128)
        for bt, bk, rows, stages, gathers in [(64, 64, 32, 2, 1), (64, 64, 32, 3, 3), (64, 32, 16, 4, 1), (64, 64, 64, 2, 1)]
    ]
    for case in [
        (32, 32, 32, 180, 128, b16),
        (64, 32, 256, 300, 128, b16),
        (16, 512, 16, 1024, 128, b16),
        (1024, 32, 1024, 180, 128, b16),
    ]:
        p = problem(*case)
        s, w = K.forward(p, True)
        g = torch.randn_like(s)
        k = 3 if case[0] > 500 else 20
        variants(
            str(case[:4]), "backward", lambda: K.backward(p, w, g, True, True), shapes if k > 3 else shapes[:7], BN, k
        )
        print(
            f"   documents only {queued(lambda: K.backward(p, w, g, False, True), k):.0f}  queries only {queued(lambda: K.backward(p, w, g, True, False), k):.0f}",
            flush=True,
        )
    p = problem(64, 32, 256, 300, 128, f32)
    s, w = K.forward(p, True)
    g = torch.randn_like(s)
    variants(
        "64x256 float32",
        "backward",
        lambda: K.backward(p, w, g, True, True),
        [(32, 32, 1024, 32, 3, 1, 4, 4, 128), (64, 32, 1024, 32, 2, 1, 2, 8, 128)],
        BN,
    )

if "bench" in WHAT:
    sys.path.insert(0, os.path.join(os.getcwd(), "shared", "bench"))
    sys.path.insert(0, "/work/shared/bench")
    try:
        from ot_gpu import bench
    except Exception as ex:
        bench = None
        print("no bench()", ex)
    if bench:
        for case in [
            (1, 32, 10000, 180, 128, h),
            (1, 32, 10000, 300, 128, h),
            (32, 32, 1000, 300, 128, h),
            (1, 32, 100, 180, 128, h),
            (1, 1024, 10000, 1024, 128, h),
        ]:
            nq, lq, nd, ld, d, dt = case
            q, x = emb(nq, lq, d, dt=dt), emb(nd, ld, d, dt=dt, seed=1)
            r = bench(lambda: maxsim(q, x))
            print(
                f"bench infer {case[:4]} latency {r['ms'] * 1e3:.0f} queued {r['queued'] * 1e3:.0f} us peak {r['peak_mb']:.0f} MB",
                flush=True,
            )
        for case in [
            (32, 32, 32, 180, 128, b16),
            (64, 32, 256, 300, 128, b16),
            (16, 512, 16, 1024, 128, b16),
            (1024, 32, 1024, 180, 128, b16),
        ]:
            nq, lq, nd, ld, d, dt = case
            q, x = emb(nq, lq, d, dt=dt).requires_grad_(), emb(nd, ld, d, dt=dt, seed=1).requires_grad_()
            W = torch.randn(nq, nd, device=dev)

            def step():
                q.grad = x.grad = None
                (maxsim(q, x).float() * W).sum().backward()

            r = bench(step)
            size = (q.numel() + x.numel()) * 2 / 2**20
            print(
                f"bench train {case[:4]} latency {r['ms'] * 1e3:.0f} queued {r['queued'] * 1e3:.0f} us peak {r['peak_mb']:.0f} MB (inputs {size:.0f}, gradients {size:.0f})",
                flush=True,
            )
        from flashot_backends.ops.maxsim import contrastive

        for fused in (False, True):
            q, x = emb(1024, 32, 128, dt=b16).requires_grad_(), emb(1024, 180, 128, dt=b16, seed=1).requires_grad_()

            def step():
                q.grad = x.grad = None
                (
                    contrastive(q, x)
                    if fused
                    else torch.nn.functional.cross_entropy(maxsim(q, x), torch.arange(1024, device=dev))
                ).backward()

            r = bench(step)
            print(
                f"bench contrastive 1024x1024 {'fused' if fused else 'plain'} latency {r['ms'] * 1e3:.0f} us peak {r['peak_mb']:.0f} MB",
                flush=True,
            )
        if "check" in WHAT:
            for bits in (0, 2, 4):
                c = coded(10000, 180, bits)
                q = emb(1, 32, 128)
                r = bench(lambda: maxsim(q, c))
                print(
                    f"bench 1x10000 32x180 in {bits or 8} bits queued {r['queued'] * 1e3:.0f} us latency {r['ms'] * 1e3:.0f}",
                    flush=True,
                )
            lens = torch.randint(20, 300, (10000,)).tolist()
            docs = [emb(n, 128, seed=n) for n in lens]
            p = build(q, docs, None, None, "exclude", False, None)
            print(
                f"ragged 10000 docs of 20-300: queued {(t := queued(lambda: K.forward(p, False))):.0f} us, {sum(lens) * 256 / t / 1e3:.0f} GB/s",
                flush=True,
            )
            del docs, p
    q, x = emb(1, 32, 128), emb(100, 180, 128, seed=1)
    maxsim(q, x)
    torch.cuda.synchronize()

    def host(fn, n=2000):
        for _ in range(50):
            fn()
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        for i in range(n):
            fn()
            if i % 200 == 199:
                torch.cuda.synchronize()
        return (time.perf_counter() - t0) / n * 1e6

    from flashot_backends.dispatch import select

    p = build(q, x, None, None, "exclude", False, None)
    print(
        "host us: maxsim {:.1f}  build {:.1f}  select {:.1f}  forward {:.1f}  empty {:.1f}".format(
            host(lambda: maxsim(q, x)),
            host(lambda: build(q, x, None, None, "exclude", False, None)),
            host(lambda: select("maxsim", p)),
            host(lambda: K.forward(p, False)),
            host(lambda: q.new_empty((1, 100), dtype=f32)),
        ),
        flush=True,
    )
print(f"total {time.time() - T00:.0f}s")
