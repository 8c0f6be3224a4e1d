"""The Triton kernels on a real card: sizes, layouts and dtypes at scale, launches, streams, graphs, several cards."""

import os
import random
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("no CUDA device", allow_module_level=True)

from flashot_backends.kernels.sinkhorn import shapes, triton, triton_loop  # noqa: E402
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402
from flashot_backends.ops import sinkhorn  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, repeat, softmin, solve  # noqa: E402
from tests.ops.sinkhorn_cases import INF, normal  # noqa: E402

from .sinkhorn_loop_cases import as_the_host  # noqa: E402
from .sinkhorn_triton_cases import (  # noqa: E402
    LAYOUTS,
    check,
    check_gradients,
    check_products,
    make_cost,
    matrix,
    points,
    uneven,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """No loop of an earlier test, which may have been told to run otherwise."""
    monkeypatch.setattr(triton_loop, "_kept", {})
    monkeypatch.setattr(repeat, "_plans", {})
    monkeypatch.setattr(sinkhorn, "_repeat", repeat)


@pytest.fixture(params=["as it chooses", "streamed"])
def path(request, monkeypatch):
    """The path that the size asks for, and the streamed one whatever the size."""
    if request.param == "streamed":
        monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)


def problem(kind, n, m, batch=(), dtype=torch.float32):
    if kind == "matrix":
        return matrix(n, m, batch, dtype, CUDA)
    return points(n, m, kind, batch, dtype, CUDA)


@pytest.mark.parametrize("size", shapes.TEST_CARD, ids=str)
@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_sizes(path, kind, size):
    check("triton", *problem(kind, *size), *uneven(*size, device=CUDA))


@dtypes
@pytest.mark.parametrize("d", shapes.TEST_CARD_DIMENSIONS)
def test_dimensions(path, d, dtype):
    check("triton", *problem(d, 301, 777, dtype=dtype))


SOME = ["row-major", "odd offset, column-major"]
ALL_LAYOUTS = [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES if dtype == torch.float32 or layout in SOME]


@pytest.mark.parametrize(("layout", "dtype"), ALL_LAYOUTS, ids=str)
def test_layouts_of_a_matrix(path, layout, dtype):
    size = (301, 776)
    (M,), epsilon = problem("matrix", *size, dtype=dtype)
    check("triton", (LAYOUTS[layout](M),), epsilon, *uneven(*size, device=CUDA))
    batch = LAYOUTS[layout](M.expand(2, *size) * torch.tensor([1, 0.5], device=CUDA, dtype=dtype)[:, None, None])
    check("triton", (batch,), epsilon)


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [3, 64, 100])
def test_layouts_of_points(layout, d, dtype):
    (x, y), epsilon = problem(d, 301, 777, dtype=dtype)
    check("triton", (LAYOUTS[layout](x), LAYOUTS[layout](y)), epsilon)


@pytest.mark.parametrize("kind", ["matrix", 3, 8, 64, 128, 200])
@pytest.mark.parametrize("size", [(1500, 1500), (1500, 2800)], ids=str)
def test_as_much_as_fits_in_registers(kind, size):
    """All programs must run at once: promised are no more than there is room for, of registers and of shared memory."""
    check("triton", *problem(kind, *size))


def test_layouts_of_the_rest():
    """Weights, regularisations and starts that are views."""
    (x, y), epsilon = problem(3, 301, 777, (3,))
    a, b = uneven(301, 777, (3,), CUDA)
    scale = torch.tensor([1.0, 9, 2.0, 9, 5.0, 9], dtype=torch.float64, device=CUDA)
    start = normal(301, seed=4).to(CUDA, torch.float32)
    for change in (LAYOUTS["odd offset"], LAYOUTS["strided"], LAYOUTS["sliced"]):
        check("triton", (x, y), epsilon * scale[::2], change(a), change(b), start=change(start.expand(3, -1).clone()))
    check("triton", (x, y), epsilon, a[0].expand(3, -1), b[:1].expand(3, -1), start=start)


@pytest.mark.parametrize("kind", ["matrix", 3, 16])
@pytest.mark.parametrize(("batch", "size"), [((64,), (50, 60)), ((3, 2), (301, 555)), ((200,), (200, 190))], ids=str)
def test_batches(path, kind, batch, size):
    tensors, epsilon = problem(kind, *size, batch)
    own = epsilon * (0.5 + torch.rand(batch, device=CUDA, dtype=torch.float64))
    check("triton", tensors, own, *uneven(*size, batch, CUDA))
    check("triton", tensors, own)


@pytest.mark.parametrize("kind", ["matrix", 2])
def test_many_small_problems(kind):
    """More than a grid's second axis has room for."""
    n = 70_000
    if kind == "matrix":
        cost = (torch.rand(n, 3, 4, device=CUDA),)
    else:
        cost = torch.rand(n, 3, 2, device=CUDA), torch.rand(n, 4, 2, device=CUDA)
    check("triton", cost, 0.5, iterations=2)


@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_elements_stop_on_their_own(path, kind):
    tensors, epsilon = problem(kind, 301, 333, (5,))
    own = epsilon * torch.tensor([0.3, 1, 3, 10, 30], dtype=torch.float64, device=CUDA)
    options = {"tolerance": 1e-4, "check_every": 5, "max_iterations": 200}
    together = solve(make_cost(tensors), epsilon=own, backend="triton", **options)
    assert len(set(together.iterations.tolist())) > 1
    for k in range(5):
        alone = solve(make_cost([part[k] for part in tensors]), epsilon=float(own[k]), backend="triton", **options)
        assert alone.iterations == together.iterations[k] and alone.converged == together.converged[k]
        torch.testing.assert_close(alone.f, together.f[k], rtol=0, atol=1e-4 * float(own[k]))
        torch.testing.assert_close(alone.g, together.g[k], rtol=0, atol=1e-4 * float(own[k]))


@pytest.mark.parametrize("size", [(301, 777), (2049, 3001)], ids=str)
@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_no_mass_and_no_way(path, kind, size):
    tensors, epsilon = problem(kind, *size)
    if kind == "matrix":
        tensors[0][torch.rand(size, device=CUDA) < 0.2] = INF
    check("triton", tensors, epsilon, *uneven(*size, device=CUDA, zeros=100))


def test_padding_that_may_go_nowhere(path):
    (M,), epsilon = problem("matrix", 301, 500)
    a, b = uneven(301, 500, device=CUDA)
    pad = torch.nn.functional.pad
    padded = pad(M, (0, 140, 0, 211), value=INF)
    options = {"epsilon": epsilon, "tolerance": 1e-5, "max_iterations": 100, "backend": "triton"}
    found = solve(DenseCost(padded), pad(a, (0, 211)), pad(b, (0, 140)), **options)
    wanted = solve(DenseCost(M), a, b, **options)
    assert found.converged and found.iterations == wanted.iterations
    torch.testing.assert_close(found.f[:301], wanted.f, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.g[:500], wanted.g, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_a_stabiliser_that_is_far_off(path, kind):
    tensors, epsilon = problem(kind, 2049, 777)
    start = 300 * epsilon * normal(2049, seed=9).to(CUDA, torch.float32)
    check("triton", tensors, epsilon, start=start, grade=6e-5)


@pytest.mark.parametrize("d", [16, 100, 200])
def test_coordinates_too_large_for_float16(path, d):
    (x, y), _ = problem(d, 301, 777, (2,))
    x[1, 5] = 3e5
    check("triton", (x, y), torch.tensor([0.3 * d, 2.0], dtype=torch.float64, device=CUDA), iterations=2)


@pytest.mark.parametrize("d", [3, 64])
@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_offsets(d, offset):
    (x, y), epsilon = problem(d, 1001, 777)
    check("triton", (x + offset, y + offset), epsilon)


@dtypes
@pytest.mark.parametrize("kind", ["matrix", 3, 64, 200])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_products_with_the_plan(kind, dtype, batch):
    tensors, epsilon = problem(kind, 513, 301, batch, dtype)
    if kind == "matrix":
        tensors[0][..., 1, 2:90] = INF
    check_products("triton", tensors, epsilon)


@pytest.mark.parametrize("kind", ["matrix", 2, 64])
def test_gradients(path, kind):
    check_gradients("triton", *problem(kind, 257, 301), *uneven(257, 301, device=CUDA), grade=3e-4)


@pytest.mark.parametrize(("n", "d"), [size for size in shapes.GPU_POINTS if size[0] <= 10_000], ids=str)
def test_sizes_of_the_benchmark(n, d):
    tensors, _ = problem(d, n, n)
    check("triton", tensors, shapes.EPSILON_PER_DIMENSION * d, iterations=3)


def test_thin_launches_of_ever_other_problems():
    """From the second launch of a kernel on, arguments are not looked at again: every one must still be right."""
    rng = random.Random(0)
    for _ in range(60):
        kind, dtype = rng.choice(["matrix", 1, 3, 16, 64]), rng.choice(DTYPES)
        n, m, batch = rng.randint(1, 700), rng.randint(1, 900), rng.choice([(), (1,), (3,)])
        tensors, epsilon = problem(kind, n, m, batch, dtype)
        layouts = list(LAYOUTS) if dtype == torch.float32 else SOME
        tensors = [LAYOUTS[rng.choice(layouts)](part) for part in tensors]
        weights = uneven(n, m, batch, CUDA) if rng.random() < 0.5 else (None, None)
        if rng.random() < 0.5 and weights[0] is not None:
            weights = [LAYOUTS["odd offset"](part) for part in weights]
        check("triton", tensors, epsilon, *weights, iterations=rng.randint(1, 4), norm=rng.choice(["l1", "l2"]))


@pytest.mark.parametrize("size", [(2000, 100), (100, 2000), (700, 700), (64, 4096)], ids=str)
def test_programs_that_meet_never_miss_each_other(size):
    """Partial sums are exchanged between programs that run at the same time: the same answer every time, also while the
    card is busy with something else."""
    (x, y), epsilon = problem(3, *size)
    options = {"epsilon": epsilon, "tolerance": 0, "max_iterations": 200, "backend": "triton"}
    wanted, busy = solve(PointCloud(x, y), **options), torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device=CUDA)
    for round_ in range(60):
        if round_ % 3 == 0:
            with torch.cuda.stream(busy):
                noise = noise @ noise / noise.norm()
        found = solve(PointCloud(x, y), **options)
        assert torch.equal(found.f, wanted.f) and torch.equal(found.g, wanted.g)


def test_streams_and_threads():
    """Each call on its own stream, from its own thread."""
    problems = [problem(kind, 301, 777) for kind in ("matrix", 3, 64, 16)]
    options = {"tolerance": 0, "max_iterations": 30, "backend": "triton"}
    wanted = [solve(make_cost(tensors), epsilon=epsilon, **options).f for tensors, epsilon in problems]
    torch.cuda.synchronize()
    wrong = []

    def work(k):
        tensors, epsilon = problems[k]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = solve(make_cost(tensors), epsilon=epsilon, **options).f
                torch.cuda.current_stream().synchronize()
                if not torch.equal(found, wanted[k]):
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [(301, 333), (3001, 2049)], ids=["resident", "streamed"])
@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_a_graph_of_the_user(kind, size):
    """Captured once, replayed with other numbers."""
    tensors, epsilon = problem(kind, *size)
    regular = torch.tensor(epsilon, dtype=torch.float64, device=CUDA)
    options = {"tolerance": 1e-5, "max_iterations": 21, "backend": "triton"}

    def work():
        solution = solve(make_cost(tensors), epsilon=regular, **options)
        return solution.f, solution.g, solution.iterations, solution.error

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for scale in (1.0, 0.7, 1.3):
        for part in tensors:
            part.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        for found, wanted in zip(captured, work(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_tf32_and_autocast_narrow_nothing():
    tensors, epsilon = problem(64, 513, 301)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            check("triton", tensors, epsilon)
            check_products("triton", tensors, epsilon)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("shape", [(48_000, 48_000), (4, 24_000, 24_000)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_beyond_two_to_the_31(shape, transposed):
    """More elements than a 32-bit number can count; the last rows say whether they were found."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB")
    M = torch.rand(shape, device=CUDA, dtype=torch.float16)
    M = M.mT if transposed else M
    h = torch.randn(shape[-1], device=CUDA)
    found = softmin(DenseCost(M), h, 0.2, backend="triton")[..., -3:]
    wanted = -0.2 * torch.logsumexp(h.double() - M[..., -3:, :].double() / 0.2, -1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_memory_is_linear():
    """100 000 points a side: their matrix would take 40 GB."""
    x, y = (torch.randn(100_000, 3, device=CUDA).requires_grad_() for _ in range(2))

    def run(x, y):
        solution = solve(PointCloud(x, y), epsilon=1.0, tolerance=0, max_iterations=2, backend="triton")
        (solution.value() + solution.linear_cost()).backward()

    run(x[:50], y[:50])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(x, y)
    assert torch.cuda.max_memory_allocated() - before < 1 << 30


def test_no_wait_for_the_host_between_iterations():
    """With a tolerance of zero nothing is fetched but what was seen of the values, once."""
    tensors, epsilon = problem(3, 3001, 3001)
    before, _ = problem(3, 3001, 3002)  # what is compiled for the first problem of a kind is gone through once more
    solve(make_cost(before), epsilon=epsilon, tolerance=0, max_iterations=1, backend="triton")
    fetched = []
    original = triton_loop.Fetch.begin
    triton_loop.Fetch.begin = lambda *args: fetched.append(1) or original(*args)
    try:
        solve(make_cost(tensors), epsilon=epsilon, tolerance=0, max_iterations=50, backend="triton")
    finally:
        triton_loop.Fetch.begin = original
    assert len(fetched) == 1


ALSO_STRIPS = [(301, 777), (3001, 2049)]


@pytest.mark.parametrize("missed", [False, True], ids=["binding", "reach"])
@pytest.mark.parametrize("size", ALSO_STRIPS, ids=str)
@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_annealing(kind, size, missed, monkeypatch):
    """Two problems with different numbers of stages, as the host's loop in float64."""
    tensors, unit = problem(kind, *size, (2,))
    epsilon = unit * torch.tensor([0.02, 0.2], dtype=torch.float64, device=CUDA)
    options = {"epsilon": epsilon, "max_iterations": 121, "tolerance": 1e-4, "acceleration": "annealing", "slack": 1e-3}
    options |= {"reach": (5.0 * unit, 20.0 * unit)} if missed else {}
    costs = make_cost(tensors), make_cost([part.double() for part in tensors])
    found = as_the_host(monkeypatch, "triton", costs, *uneven(*size, (2,), CUDA), **options)
    assert len(set(found._state.stages.tolist())) == 2


@pytest.mark.parametrize("often", [1, 10])
@pytest.mark.parametrize("size", ALSO_STRIPS, ids=str)
@pytest.mark.parametrize("kind", ["inner, 3", "inner, 64", "labels"])
def test_terms_of_one_side_beside_a_reach(kind, size, often, monkeypatch):
    d = 64 if kind == "inner, 64" else 3
    (x, y), unit = problem(d, *size)
    more = {"metric": "inner"}
    if kind == "labels":
        labels = (torch.arange(size[0], device=CUDA) % 4, torch.arange(size[1], device=CUDA) % 3)
        more = {"labels": labels, "table": normal(4, 3, seed=8).abs().to(CUDA, torch.float32)}
    wide = {name: part.double() if name == "table" else part for name, part in more.items()}
    costs = PointCloud(x, y, **more), PointCloud(x.double(), y.double(), **wide)
    a, b = uneven(*size, device=CUDA)
    options = {"epsilon": 0.3 * unit, "reach": (unit, 4 * unit), "max_iterations": 31, "check_every": often}
    options |= {"tolerance": 1e-4, "acceleration": "overrelaxation", "slack": 1e-3}
    as_the_host(monkeypatch, "triton", costs, a, 1.3 * b, **options)


@pytest.mark.parametrize("missed", [False, True], ids=["binding", "reach"])
@pytest.mark.parametrize("size", ALSO_STRIPS, ids=str)
@pytest.mark.parametrize("kind", ["matrix", 3, 64])
def test_stages_wait_for_nobody(kind, size, missed):
    tensors, epsilon = problem(kind, *size, (2,))
    cost = Cost(None, None, *tensors) if kind == "matrix" else Cost(*tensors, None)
    op = triton.operator(cost, torch.full((2,), 0.1 * epsilon, dtype=torch.float64, device=CUDA))
    reach = torch.full((2, 2), epsilon, dtype=torch.float64, device=CUDA) if missed else None
    given = (*uneven(*size, (2,), CUDA), torch.zeros(2, size[0], device=CUDA), 3, 4.0, 10, 0.07, reach)
    wanted = op.anneal(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = op.anneal(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, wanted) and found.isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("kind", ["matrix", 3, 64])
@pytest.mark.parametrize("size", [(301, 333), (3001, 2049)], ids=["resident", "streamed"])
def test_the_other_card_is_current(kind, size):
    tensors, epsilon = problem(kind, *size)
    for device in ("cuda:0", "cuda:1"):
        moved = [part.to(device) for part in tensors]
        with torch.cuda.device(1 - int(device[-1])):
            current = torch.cuda.current_device()
            solution = check("triton", moved, epsilon, *uneven(*size, device=device))
            assert solution.f.device == torch.device(device) == solution.apply(solution.g).device
            check_gradients("triton", [part[:200, :200] for part in moved], epsilon, grade=3e-4)
            assert torch.cuda.current_device() == current


@pytest.mark.parametrize("size", [(70, 90), (1500, 1700), (3000, 2900)], ids=["few", "resident", "streamed"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("kind", ["matrix", 2, 64])
def test_the_same_layout_again(kind, batch, size):
    """Calls repeat the launches of an earlier one: nothing of it may be left, in values or in memory."""
    options = {"max_iterations": 12, "check_every": 5, "tolerance": 0.0}
    for seed in range(4):
        generator = torch.Generator(CUDA).manual_seed(seed)
        draw = lambda *shape: torch.rand(*shape, device=CUDA, generator=generator)  # noqa: B023, E731
        cost = [draw(*batch, *size)] if kind == "matrix" else [draw(*batch, count, kind) for count in size]
        a, b = (draw(*batch, count) + 0.1 for count in size)
        a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
        epsilon = 0.1 * (seed + 1) * (1 if kind == "matrix" else kind / 4)
        for tolerance in (0.0, 1e-4):
            found = solve(make_cost(cost), a, b, epsilon=epsilon, **(options | {"tolerance": tolerance}))
            assert (type(found) is repeat.Later) == (seed > 0), "by the second call it is known"
            wide = make_cost([part.double() for part in cost])
            wanted = solve(wide, a.double(), b.double(), epsilon=epsilon, **(options | {"tolerance": tolerance}))
            assert torch.equal(found.iterations, wanted.iterations)
            torch.testing.assert_close(found.errors.double(), wanted.errors, rtol=2e-3, atol=1e-6, equal_nan=True)
            off = (found.f.double() - wanted.f) / epsilon
            assert (off - off.mean(-1, keepdim=True)).abs().max() < 3e-5
            torch.testing.assert_close(found.marginals()[0], a, rtol=1e-3, atol=1e-7)
    for wrong, what in (([part * float("nan") for part in cost], "M" if kind == "matrix" else "x"), (cost, "a")):
        weights = (a, b) if what != "a" else (-a, b)
        with pytest.raises(ValueError, match=f"{what} holds"):
            solve(make_cost(wrong), *weights, epsilon=epsilon, **options)
    found = solve(make_cost(cost), a, b, epsilon=epsilon, **options)
    wanted = solve(make_cost([part.double() for part in cost]), a.double(), b.double(), epsilon=epsilon, **options)
    off = (found.f.double() - wanted.f) / epsilon
    assert (off - off.mean(-1, keepdim=True)).abs().max() < 3e-5, "what was wrong is forgotten"


@pytest.mark.parametrize("size", [(70, 90), (1500, 1700), (3000, 2900)], ids=["few", "resident", "streamed"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), float("inf")], ids=str)
def test_one_entry_of_a_matrix(size, turned, value):
    """Wherever it is, in a first call and in one like it; a forbidden pair is none."""
    batch, (n, m) = 2, size
    cost = torch.rand(batch, m, n, device=CUDA).mT if turned else torch.rand(batch, n, m, device=CUDA)
    call = lambda: solve(DenseCost(cost), epsilon=0.1, max_iterations=3, tolerance=0.0)  # noqa: E731
    for place in ((1, 0, 0), (0, n - 1, m - 1), (1, n // 2, m - 1), (0, n - 1, m // 3), (1, 17 * n // 32, 5 * m // 9)):
        kept, cost[place] = cost[place].item(), value
        if value == float("inf"):
            assert call().f.isfinite().all()
        else:
            with pytest.raises(ValueError, match="M holds"):
                call()
        cost[place] = kept
        assert call().f.isfinite().all(), "what was wrong is forgotten"


def test_the_same_layout_again_keeps_its_results():
    """A result is nobody's buffer."""
    clouds = [torch.rand(2, 100, 3, device=CUDA) for _ in range(3)]
    first = [solve(PointCloud(c[0], c[1]), epsilon=0.1, max_iterations=30, tolerance=0) for c in clouds]
    kept = [(s.f.clone(), s.g.clone(), s.error.clone()) for s in first]
    again = [solve(PointCloud(c[0], c[1]), epsilon=0.1, max_iterations=30, tolerance=0) for c in clouds]
    for s, t, (f, g, error) in zip(first, again, kept, strict=True):
        assert torch.equal(s.f, f) and torch.equal(s.g, g) and torch.equal(s.error, error)
        assert torch.equal(t.f, f) and torch.equal(t.g, g)


def test_the_same_layout_again_with_one_cloud_twice():
    """One tensor in two places, then two tensors of the same layout, and the other way round."""
    x, y = torch.rand(2, 100, 3, device=CUDA)
    for first, second in ((x, x), (x, y), (y, y), (y, x), (x, x)):
        check("triton", (first, second), 0.1)
        found = solve(PointCloud(first, second), epsilon=0.1, max_iterations=9, tolerance=0)
        wanted = solve(PointCloud(first.double(), second.double()), epsilon=0.1, max_iterations=9, tolerance=0)
        torch.testing.assert_close(found.value().double(), wanted.value(), rtol=1e-5, atol=1e-7)


def test_a_gradient_is_never_left_out_of_a_call_that_was_seen_before():
    x, y = torch.rand(2, 100, 3, device=CUDA)
    options = {"epsilon": 0.1, "max_iterations": 9, "tolerance": 0}
    plain = [solve(PointCloud(x, y), **options) for _ in range(2)][1]
    x.requires_grad_()
    assert not plain.value().requires_grad, "it was solved before"
    found = solve(PointCloud(x, y), **options)
    assert found.f.requires_grad
    with torch.no_grad():
        assert type(solve(PointCloud(x, y), **options)) is repeat.Later


def test_settings_and_kernels_are_looked_at_again():
    from flashot_backends import use

    x, y = torch.rand(2, 100, 3, device=CUDA)
    options = {"epsilon": 0.1, "max_iterations": 9, "tolerance": 0}
    assert type([solve(PointCloud(x, y), **options) for _ in range(2)][1]) is repeat.Later
    with use(backend="reference"):
        assert type(solve(PointCloud(x, y), **options)) is not repeat.Later
    with pytest.raises(ValueError, match="max_iterations"):
        solve(PointCloud(x, y), epsilon=0.1, max_iterations=0)
    with pytest.raises(ValueError, match="epsilon"):
        solve(PointCloud(x, y), **(options | {"epsilon": 0.0}))
