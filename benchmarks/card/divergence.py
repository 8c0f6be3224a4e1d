"""backend="flash" on a card: correctness against tensorized in float64, a training loop's memory, a large cloud."""

import itertools
import time

import torch

import flashot_backends

flashot_backends.enable()
from geomloss import SamplesLoss  # noqa: E402


def problem(B, n, m, d, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *s: torch.rand(*((B,) if B else ()), *s, generator=g, device="cuda", dtype=torch.float64)  # noqa: E731
    x, y, a, b = draw(n, d), 0.8 * draw(m, d) + 0.1, draw(n) + 0.1, draw(m) + 0.1
    return [t.to(dtype) for t in (a / a.sum(-1, keepdim=True), x, b / b.sum(-1, keepdim=True), y)]


def run(loss, inputs):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]


def error(found, exact, free):
    if free:
        found, exact = found - found.mean(-1, keepdim=True), exact - exact.mean(-1, keepdim=True)
    return float((found.double() - exact).norm() / exact.norm())


bad = 0
cases = list(itertools.product((1, 2), (None, 0.3), (True, False), (0, 3), ((3, 0.05), (64, 0.5))))
for p, reach, debias, B, (d, blur) in cases:
    for dtype in (torch.float32, torch.float64):
        inputs = problem(B, 700, 900, d, dtype)
        make = lambda backend: SamplesLoss("sinkhorn", p=p, reach=reach, debias=debias, blur=blur, backend=backend)  # noqa: E731
        try:
            exact = run(make("tensorized"), [t.double() for t in inputs])
            host = run(make("tensorized"), inputs)
            ours = run(make("flash"), inputs)
        except Exception as problem_:
            bad += 1
            print(
                f"p={p} reach={reach} debias={debias} B={B} d={d} {dtype} RAISED {type(problem_).__name__}: {problem_}"[
                    :300
                ]
            )
            continue
        floor = 3e-6 if dtype == torch.float32 else 1e-9
        errors = []
        for name, o, h, e in zip("vaxby", ours, host, exact, strict=False):
            free = name in "ab" and reach is None
            errors.append((error(o, e, free), max(error(h, e, free), floor)))
        if any(not mine <= theirs for mine, theirs in errors):
            bad += 1
            print(
                f"p={p} reach={reach} debias={debias} B={B} d={d} {dtype}",
                " ".join(f"{m:.0e}/{t:.0e}" for m, t in errors),
            )
for name in ("energy", "gaussian", "laplacian"):
    inputs = problem(2, 700, 900, 3, torch.float32)
    exact = run(SamplesLoss(name, blur=0.3, backend="tensorized"), [t.double() for t in inputs])
    ours = run(SamplesLoss(name, blur=0.3, backend="flash"), inputs)
    errors = [error(o, e, False) for o, e in zip(ours, exact, strict=False)]
    print(name, " ".join(f"{e:.0e}" for e in errors))
    bad += max(errors) > 1e-3
print("WRONG" if bad else "right", f"{bad} of {2 * len(cases) + 3}", flush=True)

_, x, _, y = problem(0, 2000, 2000, 3, torch.float32)
loss, curves = {b: SamplesLoss(backend=b) for b in ("flash", "tensorized")}, {}
for backend in loss:
    z, curve, seen = x.clone(), [], []
    for k in range(200):
        z = z.detach().requires_grad_()
        v = loss[backend](z, y)
        (g,) = torch.autograd.grad(v, z)
        z = z - 0.3 * len(z) * g
        curve.append(v.detach())
        if k in (20, 199):
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    curves[backend] = torch.stack(curve)
    print(backend, "memory after 20 and 200 steps", seen, "last value", float(curve[-1]))
print(
    "curves differ by",
    float((curves["flash"] - curves["tensorized"]).abs().max() / curves["tensorized"][0]),
    flush=True,
)

for n in (100_000, 250_000):
    _, x, _, y = problem(0, n, n, 3, torch.float32)
    x.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    t = time.time()
    v = SamplesLoss(backend="flash", blur=0.05)(x, y)
    (g,) = torch.autograd.grad(v, x)
    torch.cuda.synchronize()
    print(
        f"n={n}: {time.time() - t:.2f} s, peak {torch.cuda.max_memory_allocated() / 1e6:.0f} MB, value {float(v):.6f}",
        flush=True,
    )
