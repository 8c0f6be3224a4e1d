"""GeomLoss on one CUDA card: errors against float64, times beside tensorized, and what tuning.json holds of them.

python benchmarks/card/divergence.py [check] [ot] [host] [table] [first] [million]   (default: these; about 90 seconds)
python benchmarks/card/divergence.py [tune] [far] [near] [train]                     (about a minute each)

`quick` beside any but `first`, `tune`, `far` and `near`: tiny sizes, on a CPU where there is no card, to see that it runs.
SECONDS_LEFT in the environment is when to stop: parts that would take longer are left out, and say so.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time

START, SECONDS = time.time(), float(os.environ.get("SECONDS_LEFT", "600"))
QUICK = "quick" in sys.argv or bool(os.environ.get("QUICK"))
FRESH = """
import time
marks = [time.perf_counter()]
def mark():
    marks.append(time.perf_counter())
import torch
mark()
import geomloss, flashot_backends
flashot_backends.enable()
from geomloss import SamplesLoss
mark()
x, y = torch.rand(1000, 3, device="cuda", requires_grad=True), torch.rand(1000, 3, device="cuda")
(x * y).sum().item()
mark()
from triton import knobs
rows = []
def listen(*, src, metadata, metadata_group, times, cache_hit):
    stages = [("front", times.ir_initialization), *times.lowering_stages]
    rows.append(f"    {src.fn.__name__}: " + ", ".join(f"{name} {micros / 1e6:.2f}" for name, micros in stages))
knobs.compilation.listener = listen
mark()
SamplesLoss(backend="flash")(x, y).backward()
torch.cuda.synchronize()
mark()
names = "torch", "geomloss and ours", "the card", "triton", "FIRST CALL"
print("fresh process:", ", ".join(f"{n} {b - a:.2f} s" for n, a, b in zip(names, marks, marks[1:])), *rows, sep="\\n")
for n, m, blur in ((1000, 1000, 0.05), (700, 1300, 0.1)):
    u, v = torch.rand(n, 3, device="cuda", requires_grad=True), torch.rand(m, 3, device="cuda")
    start = time.perf_counter()
    SamplesLoss(blur=blur, backend="flash")(u, v).backward()
    torch.cuda.synchronize()
    print(f"    afterwards {n} and {m} points, blur {blur}: {1e3 * (time.perf_counter() - start):.2f} ms")
"""


def say(*parts):
    print(f"[{time.time() - START:5.1f}]", *parts, flush=True)


def time_for(seconds, what):
    if QUICK or time.time() - START + seconds < SECONDS:
        return True
    say("no time for", what)
    return False


def first():
    """The first call in a fresh process, everything compiled."""
    if not time_for(20, "first"):
        return
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TRITON_CACHE_DIR": folder}
        done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, timeout=90)
    say(done.stdout, done.stderr[-600:])


WANTED = [word for word in sys.argv[1:] if word != "quick"]
WANTED = WANTED or ["check", "ot", "host", "table", *([] if QUICK else ["first"]), "million"]
if WANTED == ["first"]:
    first()
    sys.exit()

import torch

import flashot_backends

flashot_backends.enable()
from geomloss import SamplesLoss, ot

from flashot_backends.kernels.sinkhorn import blocks, far, launch, triton_near, triton_symmetric
from flashot_backends.ops.divergence import again

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA or not QUICK else "cpu"


class Nothing:
    """Stands for torch.cuda where a CPU shows that this runs."""

    elapsed_time = staticmethod(lambda _: 1.0)

    def __getattr__(self, name):
        return lambda *_, **__: self if name == "Event" else 0


card = torch.cuda if CUDA or not QUICK else Nothing()
FLOOR = 3e-6  # an error that is never too large, where tensorized happens to have none


def cloud(B, n, d, seed):
    generator, n = torch.Generator(DEVICE).manual_seed(seed), few(n)
    shape = (B, n, d) if B else (n, d)
    return torch.rand(*shape, device=DEVICE, generator=generator, dtype=torch.float64)


def few(count):
    """A number of points or repetitions, small ones to see that a script runs."""
    return min(count, 20) if QUICK else count


def problem(B, n, m, d, seed=0, spread=1.0):
    """a, x, b, y in float32."""
    n, m = few(n), few(m)
    x, y = spread * cloud(B, n, d, seed), spread * (0.8 * cloud(B, m, d, seed + 100) + 0.1)
    a, b = cloud(B, n, 1, seed + 200)[..., 0] + 0.1, cloud(B, m, 1, seed + 300)[..., 0] + 0.1
    return [part.float() for part in (a / a.sum(-1, keepdim=True), x, b / b.sum(-1, keepdim=True), y)]


def value_and_gradients(loss, inputs, wanted):
    inputs = [part.detach().clone().requires_grad_(k in wanted) for k, part in enumerate(inputs)]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), [inputs[k] for k in wanted])]


def error(found, exact, free=False):
    if free:  # potentials are known up to a constant
        found, exact = found - found.mean(-1, keepdim=True), exact - exact.mean(-1, keepdim=True)
    return float((found.double() - exact).norm() / exact.norm())


class Judge:
    """Errors over those of tensorized in float32."""

    def __init__(self):
        self.bad, self.count, self.worst = 0, 0, 0.0

    def __call__(self, label, losses, inputs, wanted, free=()):
        flash, tensorized = losses
        ours, host = (value_and_gradients(loss, inputs, wanted) for loss in losses)
        exact = value_and_gradients(tensorized, [part.double() for part in inputs], wanted)
        parts = zip(ours, host, exact, strict=True)
        ratios = [error(o, e, k in free) / max(error(h, e, k in free), FLOOR) for k, (o, h, e) in enumerate(parts)]
        self.count += 1
        self.worst = max(self.worst, *ratios)
        if not max(ratios) <= 1:
            self.bad += 1
            say("WRONG", label, " ".join(f"{ratio:.2f}" for ratio in ratios))


def both(**options):
    return [SamplesLoss("sinkhorn", backend=backend, **options) for backend in ("flash", "tensorized")]


def check():
    """Values and gradients; the second problem of a layout repeats the launches of the first, with more steps."""
    judge = Judge()
    grid = [(*options, 700, 900, 3, 0.05) for options in itertools.product((1, 2), (None, 0.3), (True, False), (0, 3))]
    grid += [(2, 0.3, True, 0, 600, 500, 8, 0.3), (2, None, True, 3, 600, 500, 8, 0.3)]
    for (p, reach, debias, B, n, m, d, blur), seed in itertools.product(grid[:: 5 if QUICK else 1], (0, 1)):
        losses = both(p=p, reach=reach, debias=debias, blur=blur)
        label = f"p={p} reach={reach} debias={debias} B={B} d={d} seed={seed}"
        inputs = problem(B, n, m, d, seed, 1 + 1.5 * seed)
        judge(label, losses, inputs, (0, 1, 2, 3), (1, 3) if reach is None else ())
    # Uniform weights, gradients by x alone; the last two take a launch for each step
    for (B, n, d), seed in itertools.product(((0, 1000, 3), (16, 300, 3), (0, 1000, 1), (0, 9000, 3), (0, 2500, 64)), range(3)):
        inputs = [part.float() * (1 + seed) for part in (cloud(B, n, d, seed), 0.9 * cloud(B, n, d, seed + 50))]
        judge(f"uniform B={B} n={n} d={d} seed={seed}", both(blur=0.05 * max(d, 3) ** 0.5), inputs, (0,))
    verdict = "WRONG" if judge.bad else "right"
    say(verdict, f"{judge.bad} of {judge.count} bad, the largest error is {judge.worst:.2f} of what is allowed")
    a, x, b, y = problem(0, 1000, 1000, 3, 7)
    for loss in (both()[0], both(p=1, reach=0.4)[0]):
        runs, elsewhere = [], again.ELSEWHERE
        for again.ELSEWHERE in (elsewhere, (*elsewhere, DEVICE)):
            runs.append([value_and_gradients(loss, (a, x, b, y), (0, 1, 2, 3)) for _ in range(3)])
        again.ELSEWHERE = elsewhere
        same = all(torch.equal(u, v) for one, two in zip(*runs, strict=True) for u, v in zip(one, two, strict=True))
        say("what is repeated equals what is not, bit for bit:", same)
    loss, z = both()[0], x.clone().requires_grad_()
    earlier = loss(z, y)
    held = earlier.detach().clone()
    if QUICK:
        other = loss(z, y)
    else:
        with card.stream(card.Stream()):
            card.current_stream().wait_stream(card.default_stream())
            other = loss(z, y)
    card.synchronize()
    loss(2 * z, y)
    say("an earlier value stays:", bool(earlier == held), "and another stream agrees:", bool(other == held))
    for name in ("energy", "gaussian", "laplacian"):
        inputs, losses = problem(2, 700, 900, 3), [SamplesLoss(name, blur=0.3, backend=kind) for kind in ("flash", "tensorized")]
        ours = value_and_gradients(losses[0], inputs, (0, 1, 2, 3))
        exact = value_and_gradients(losses[1], [part.double() for part in inputs], (0, 1, 2, 3))
        say(name, " ".join(f"{error(o, e):.0e}" for o, e in zip(ours, exact, strict=True)))


def check_ot():
    """geomloss.ot: errors against the same in float64, and how often torch streams where kernels should run."""
    streamed, original = [], blocks.operator
    blocks.operator = lambda *given: (streamed.append(1), original(*given))[1]

    def solved(parts, dtype, method, **options):
        a, x, b, y = (part.to(dtype) for part in parts)
        x, y = x.requires_grad_(), y.requires_grad_()
        s = ot.solve_sample(x, y, a=a, b=b, max_iter=12, method=method, **options)
        moved = s.plan_operator @ y.detach() if method == "flash" else s.value[None]
        potentials = (part - part.mean() for part in (s.potential_a, s.potential_b))
        return [part.detach() for part in (s.value, *potentials, *torch.autograd.grad(s.value, (x, y)), moved)]

    cases = ((True, None, 700, 3), (True, 0.5, 700, 3), (False, None, 400, 20), (True, None, 9000, 3))
    for debias, unbalanced, n, d in cases:
        parts, options = problem(0, n, n + 100, d, 3), {"reg": 0.05 * d / 3, "unbalanced": unbalanced, "debias": debias}
        before = len(streamed)
        ours, taken = solved(parts, torch.float32, "flash", **options), len(streamed) - before
        exact = solved(parts, torch.float64, "flash", **options)  # GeomLoss's to rounding (tests/adapters)
        text = " ".join(f"{error(o, e):.0e}" for o, e in zip(ours, exact, strict=True))
        if n < 5000:
            host = solved(parts, torch.float32, "auto", **options)[:3]
            text += "; GeomLoss " + " ".join(f"{error(h, e):.0e}" for h, e in zip(host, exact, strict=False))
        fn = lambda parts=parts, options=options: solved(parts, torch.float32, "flash", **options)
        say(f"solve_sample n={n} d={d} debias={debias} unbalanced={unbalanced}: value, f, g, by x, by y, plan @ y")
        say(f"    errors {text}; streamed by torch {taken} times; {bench(fn, 5)[0]:.2f} ms")
    a, x, b, y = problem(3, 300, 350, 3, 5)
    options = {"reg": 0.05, "max_iter": 9, "method": "flash"}
    batch = ot.solve_sample_batch(x, y, a=a, b=b, debias=True, **options).value
    alone = [ot.solve_sample(x[k], y[k], a=a[k], b=b[k], debias=True, **options).value for k in range(3)]
    before, C = len(streamed), torch.cdist(x, y)
    ours = ot.solve_batch(C, a=a, b=b, **options).value
    taken = len(streamed) - before
    exact = ot.solve_batch(C.double(), a=a.double(), b=b.double(), **options).value
    apart = error(batch, torch.stack(alone).double())
    say(f"a batch against its elements {apart:.0e}; matrices {error(ours, exact):.0e}, streamed by torch {taken} times")
    blocks.operator = original
    for n in (300, 1000, 4000):
        C = torch.cdist(cloud(0, n, 3, 1), cloud(0, n, 3, 2)).float()
        each = []
        for method in ("flash", "auto"):
            each.append("%.2f" % bench(lambda C=C, m=method: ot.solve(C, reg=0.05, max_iter=50, method=m).value, 5)[2])
        say(f"solve, matrix {n} x {n}, 50 steps, queued: flash {each[0]} ms, GeomLoss {each[1]} ms")


def bench(fn, repetitions=15):
    """Milliseconds of one call from an idle queue (median, best) and queued (best of three), and peak memory in MB."""
    fn()
    card.synchronize()
    start = time.time()
    fn()
    card.synchronize()
    second = time.time() - start
    card.reset_peak_memory_stats()
    base = card.memory_allocated()

    def timed(calls):
        begin, end = card.Event(enable_timing=True), card.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            fn()
        end.record()
        card.synchronize()
        return begin.elapsed_time(end) / calls

    if QUICK:
        return 1e3 * second, 1e3 * second, 1e3 * second, 0
    ones = sorted(timed(1) for _ in range(max(2, min(repetitions, int(1.5 / second)))))
    queued = min(timed(max(1, min(20, int(1 / second)))) for _ in range(3 if second < 0.1 else 1))
    return ones[len(ones) // 2], ones[0], queued, (card.max_memory_allocated() - base) / 2**20


def step(loss, x, y):
    """Value and gradient by x."""

    def once():
        z = x.detach().requires_grad_()
        value = loss(z, y)
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    return once


def table():
    """The rows of PERFORMANCE.md, tensorized beside ours."""
    cases = [
        (0, 1000, 3, 0.05, True), (0, 10000, 3, 0.05, True), (16, 1000, 3, 0.05, True), (0, 10000, 64, 0.3, False),
        (0, 50000, 3, 0.05, True),
    ]
    for B, n, d, blur, debias in cases:
        if not time_for(6, f"B={B} n={n} d={d}"):
            return
        x, y = cloud(B, n, d, 1), cloud(B, n, d, 2) * 0.8 + 0.1
        flash, tensorized = both(blur=blur, debias=debias)
        exact = step(tensorized, x, y)() if n <= 10000 else None
        for name, loss in (("flash", flash), ("tensorized", tensorized)):
            if exact is None and loss is tensorized:
                continue
            fn = step(loss, x.float(), y.float())
            one, best, queued, peak = bench(fn)
            text = "" if exact is None else " ".join(f"{error(f, e):.1e}" for f, e in zip(fn(), exact, strict=True))
            say(f"B={B} n={n} d={d} {name:10s} one call {one:.3f} (best {best:.3f}), queued {queued:.3f} ms, {peak:.0f} MB; {text}")
            card.empty_cache()


def host():
    """Microseconds of the host alone: nothing waits for the card."""
    for B, n in ((0, 1000), (16, 1000), (0, 10000)):
        x, y, loss, rows = cloud(B, n, 3, 1).float(), cloud(B, n, 3, 2).float(), both()[0], []
        for _ in range(71 if QUICK else 120):
            card.synchronize()
            marks = [time.perf_counter()]
            z = x.detach().requires_grad_()
            value = loss(z, y)
            marks.append(time.perf_counter())
            total = value.sum()
            marks.append(time.perf_counter())
            torch.autograd.grad(total, z)
            marks.append(time.perf_counter())
            card.synchronize()
            marks.append(time.perf_counter())
            rows.append([1e6 * (after - before) for before, after in zip(marks, marks[1:], strict=False)])
        forward, added, backward, rest = (sorted(row[k] for row in rows[20:])[50] for k in range(4))
        say(f"host B={B} n={n}: adapter and forward {forward:.0f}, sum {added:.0f}, backward {backward:.0f}, then the card {rest:.0f} us")


def with_entries(work, **changed):
    """``work`` under other entries of tuning.json."""
    default = launch._tuning()["default"]
    places = {name: default["limits"] if name in default["limits"] else default for name in changed}
    before = {name: place[name] for name, place in places.items()}

    def put(entries):
        for name, entry in entries.items():
            places[name][name] = entry
        for cached in (launch.table, launch.limit, launch.named_shape, triton_symmetric._laid_out, triton_symmetric.cut):
            cached.cache_clear()
        again._kept.clear()
        triton_symmetric._ready.clear()

    put(changed)
    try:
        return work()
    except Exception as problem_:
        return f"{type(problem_).__name__}: {problem_}"[:80]
    finally:
        put(before)


def tune():
    """``waiting-pairs``: from where one launch for each step is quicker; ``waiting-3`` and ``sloped-3``: the tiles."""
    tiles = [16, 64, 2, 1, 6, 160], [16, 128, 4, 1, 3, 160], [16, 128, 4, 1, 4, 128], [16, 64, 2, 1, 8, 128]
    ways = {"a launch each": {"waiting-pairs": 0}}
    ways |= {str(tile): {"waiting-pairs": 1 << 40, "waiting-3": tile} for tile in tiles}
    for n in (2048, 4096, 6000, 10000, 20000):
        fn, line = step(both()[0], cloud(0, n, 3, 1).float(), cloud(0, n, 3, 2).float()), []
        for name, entries in ways.items():
            if time_for(5, f"waiting, n={n} {name}"):
                found = with_entries(lambda fn=fn: "{0:.3f}/{2:.3f}".format(*bench(fn, 9)), **entries)
                line.append(f"{name} {found}")
        say(f"waiting, n={n}, one call/queued ms:", "; ".join(line))
    for n in (1000, 10000):
        fn, line = step(both()[0], cloud(0, n, 3, 1).float(), cloud(0, n, 3, 2).float()), []
        for tile in ([16, 64, 2, 1, 4], [16, 64, 4, 1, 3], [16, 32, 2, 1, 6], [8, 64, 2, 1, 6]):
            if time_for(5, f"sloped, n={n} {tile}"):
                line.append(f"{tile} {with_entries(lambda fn=fn: '{2:.3f}'.format(*bench(fn, 9)), **{'sloped-3': tile})}")
        say(f"sloped, n={n}, queued ms:", "; ".join(line))


def far_costs():
    """What ``far-pair`` to ``far-share`` promise of a step, beside what it takes."""
    for n in (200_000, 1_000_000):
        if not time_for(8, f"far, n={n}"):
            return
        x, y = cloud(1, n, 3, 1).float(), cloud(1, n, 3, 2).float()
        (field,) = far.fields(x, y)
        biases = [torch.zeros(n, device=DEVICE)] * 4
        for epsilon in (1.0, 0.1, 0.03, 0.012):
            cells = torch.tensor(far.cells_across(field.low, field.high, epsilon)).prod().item()
            if cells > far.MOST_CELLS:
                continue
            for _ in range(2):
                card.synchronize()
                start = time.perf_counter()
                field.softmins(epsilon, biases)
                card.synchronize()
                taken = time.perf_counter() - start
            promised, dense = field.seconds(epsilon, True), field.dense(True)
            say(f"far, n={n} epsilon={epsilon}: {cells} cells, {taken:.4f} s, promised {promised:.4f}; all pairs promised {dense:.4f}")


def near():
    """Steps over the tiles that count, beside all pairs: seconds, peak memory, errors; and tiles for tuning.json."""

    def seconds(n, blur, **entries):
        x, y = cloud(0, n, 3, 1).float().requires_grad_(), cloud(0, n, 3, 2).float() * 0.8 + 0.1
        taken, kept = [], triton_near.Nearby.__init__

        def noted(self, clouds):
            kept(self, clouds)
            taken.append(self)

        def once():
            card.synchronize()
            start = time.time()
            value = both(blur=blur)[0](x, y)
            (gradient,) = torch.autograd.grad(value, x)
            card.synchronize()
            return time.time() - start, value.detach(), gradient

        def work():
            triton_near.Nearby.__init__ = noted
            try:
                if n < 500_000 or n not in warm:
                    once()
                    warm.add(n)
                taken.clear()
                card.reset_peak_memory_stats()
                base = card.memory_allocated()
                found = once()
                return *found, (card.max_memory_allocated() - base) / 2**20, sum(each.taken for each in taken)
            finally:
                triton_near.Nearby.__init__ = kept

        return with_entries(work, **entries)

    warm = set()
    for n, blur in ((50_000, 0.05), (50_000, 0.01), (100_000, 0.05), (100_000, 0.01), (300_000, 0.05), (300_000, 0.01), (1_000_000, 0.05), (1_000_000, 0.01)):
        if not time_for(3 + 30 * (n / 1e6) ** 2, f"near, n={n} blur={blur}"):
            continue
        ours, all_pairs = (seconds(n, blur, **{"near-pairs": most}) for most in (0, 1 << 60))
        if isinstance(ours, str) or isinstance(all_pairs, str):
            say(f"near, n={n} blur={blur}:", ours, all_pairs)
            continue
        apart = float((ours[2] - all_pairs[2]).norm() / all_pairs[2].norm())
        say(
            f"near, n={n} blur={blur}: {ours[0]:.4f} s, {ours[3]:.0f} MB, {ours[4]} steps over tiles; without {all_pairs[0]:.4f} s, "
            f"{all_pairs[3]:.0f} MB; values {float(ours[1] / all_pairs[1] - 1):.1e}, gradients {apart:.1e} apart"
        )
    for tile in ([16, 128, 4, 1, 4, 128], [32, 128, 4, 1, 2], [16, 64, 2, 1, 8], [16, 64, 4, 1, 4], [32, 64, 4, 1, 4, 128], [16, 256, 4, 1, 2], [8, 128, 4, 1, 6], [32, 128, 8, 1, 2], [64, 128, 8, 1, 1]):
        line = []
        for n, blur in ((100_000, 0.01), (300_000, 0.05)):
            if time_for(4, f"listed {tile}"):
                found = seconds(n, blur, **{"near-pairs": 0, "listed-3": tile})
                line.append(found if isinstance(found, str) else f"{found[0]:.4f} s")
        say(f"listed-3 {tile}:", *line)


def million():
    if not time_for(14, "million"):
        return
    x, y = cloud(0, 10**6, 3, 1).float().requires_grad_(), cloud(0, 10**6, 3, 2).float()
    card.synchronize()
    card.reset_peak_memory_stats()
    start = time.time()
    value = both()[0](x, y)
    torch.autograd.grad(value, x)
    card.synchronize()
    peak = card.max_memory_allocated() / 2**20
    say(f"n=1000000: {time.time() - start:.2f} s, {peak:.0f} MB, value {float(value):.6f}")


def train(steps=100 if QUICK else 1000, n=1000):
    """A gradient flow with an optimiser: memory and the curves of the loss."""

    def run(backend, steps, dtype=torch.float32):
        y, curve, seen = (0.5 * cloud(0, n, 3, 1) + 1.0).to(dtype), [], []
        z, loss = torch.nn.Parameter(cloud(0, n, 3, 0).to(dtype)), SamplesLoss(blur=0.05, backend=backend)
        optimiser = torch.optim.SGD([z], lr=0.05 * len(z))
        card.synchronize()
        start = time.time()
        for k in range(steps):
            optimiser.zero_grad(set_to_none=True)
            value = loss(z, y)
            value.backward()
            optimiser.step()
            curve.append(value.detach())
            if k % 50 == 49:
                card.synchronize()
                seen += [card.memory_allocated()] * (k in (49, 199, 499, 999))
                if not time_for(5, f"more than {k + 1} steps of {backend}"):
                    break
        return torch.stack(curve).double(), seen, (time.time() - start) / len(curve) * 1e3

    curves = {}
    for backend in ("flash", "tensorized"):
        card.reset_peak_memory_stats()
        curves[backend], seen, each = run(backend, steps)
        peak = card.max_memory_allocated() / 2**20
        say(f"training, {backend}: {each:.3f} ms a step, peak {peak:.1f} MB, bytes after 50, 200, 500, 1000 steps {seen}")
    count = min(map(len, curves.values()))
    ours, theirs = (curves[backend][:count] for backend in ("flash", "tensorized"))
    apart = (ours - theirs).abs().max()
    say(f"curves over {count} steps, {ours[0]:.4f} to {ours[-1]:.2e}: apart {apart / ours[0]:.1e} of the first, {apart / ours[-1]:.1e} of the last")
    if time_for(25, "float64"):
        exact = run("tensorized", min(count, 300), torch.float64)[0]
        errors = [float((curve[: len(exact)] - exact).abs().max() / exact[0]) for curve in (ours, theirs)]
        say(f"from float64 over {len(exact)} steps, of the first: flash {errors[0]:.1e}, tensorized {errors[1]:.1e}")


PARTS = {
    "check": check, "ot": check_ot, "host": host, "table": table, "first": first, "million": million, "tune": tune,
    "far": far_costs, "near": near, "train": train,
}
if __name__ == "__main__":
    say(card.get_device_name(), torch.__version__)
    for part in WANTED:
        PARTS[part]()
