"""``solve`` and ``softmin``: values against POT, a plain solver and the definition."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

from .sinkhorn_cases import INF, close, make, normal, plan, sinkhorn, uniform, weights  # noqa: E402

KINDS = ["matrix", "points1", "points3", "points20"]
BACKENDS = ["torch", "reference"]
EPSILON = 0.7
both = pytest.mark.parametrize("backend", BACKENDS)
kinds = pytest.mark.parametrize("kind", KINDS)


def exactly(cost, a, b, iterations, backend, epsilon=EPSILON, **options):
    options |= {"max_iterations": iterations, "tolerance": 0, "acceleration": None, "backend": backend}
    return solve(cost, a, b, epsilon=epsilon, **options)


@both
@kinds
@pytest.mark.parametrize("iterations", [1, 2, 7])
def test_is_the_plain_loop(kind, backend, iterations):
    cost, _, M = make(kind)
    a, b = weights(7), weights(9, seed=1)
    solution = exactly(cost, a, b, iterations, backend)
    f, g = sinkhorn(M, a, b, EPSILON, iterations)
    close(solution.f, f)
    close(solution.g, g)
    assert solution.iterations == iterations
    assert solution.f.dtype == torch.float64


@both
@pytest.mark.parametrize("kind", ["matrix", "points3"])
def test_is_the_loop_of_pot(kind, backend):
    ot = pytest.importorskip("ot")
    cost, _, M = make(kind)
    a, b = weights(7), weights(9, seed=1)
    start = (-EPSILON * a.log(), None)
    solution = exactly(cost, a, b, 11, backend, init=start, norm="l2")
    P, log = ot.bregman.sinkhorn_log(
        a.numpy(), b.numpy(), M.numpy(), EPSILON, numItermax=11, stopThr=0, log=True, warn=False
    )
    close(solution.plan(), torch.from_numpy(P))
    close(solution.f, EPSILON * (torch.from_numpy(log["log_u"]) - a.log()))
    assert float(solution.error) == pytest.approx(log["err"][-1], rel=1e-8)


@both
@kinds
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.float16, 3e-6), (torch.bfloat16, 3e-6), (torch.float64, 1e-12)],
    ids=str,
)
def test_dtypes(kind, backend, dtype, tolerance):
    """Whatever the numbers were rounded to, what is computed from them is right to the dtype of the potentials."""
    cost, _, M = make(kind, dtype=dtype)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = weights(7, dtype=real), weights(9, seed=1, dtype=real)
    solution = exactly(cost, a, b, 8, backend, epsilon=2.0)
    f, g = sinkhorn(M, a.double(), b.double(), 2.0, 8)
    assert {solution.f.dtype, solution.g.dtype, solution.error.dtype} == {real}
    scale = 1 + float(M.max()) / 2
    close(solution.f, f, rtol=0, atol=tolerance * scale)
    close(solution.g, g, rtol=0, atol=tolerance * scale)


@both
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_stops_when_the_columns_are_right(backend, norm):
    cost, _, M = make("points3")
    a, b = weights(7), weights(9, seed=1)
    options = {"epsilon": EPSILON, "check_every": 3, "acceleration": None, "norm": norm, "backend": backend}
    solution = solve(cost, a, b, tolerance=1e-5, **options)
    iterations, order = int(solution.iterations), 1 if norm == "l1" else 2
    assert solution.converged
    assert iterations % 3 == 1

    def violation(count):
        f, g = sinkhorn(M, a, b, EPSILON, count)
        return float((plan(M, a, b, f, g, EPSILON).sum(0) - b).norm(p=order))

    assert float(solution.error) == pytest.approx(violation(iterations), rel=1e-6, abs=1e-14)
    assert float(solution.error) < 1e-5
    if iterations > 1:
        assert violation(iterations - 3) >= 1e-5


@both
def test_says_when_it_did_not_converge(backend):
    cost, _, _ = make("matrix")
    options = {"epsilon": 0.01, "tolerance": 1e-12, "max_iterations": 4, "acceleration": None, "backend": backend}
    solution = solve(cost, **options)
    assert not solution.converged
    assert solution.iterations == 4
    assert solution.error > 1e-12
    last = solve(cost, check_every=1, **options)
    close(last.error, solution.error)


@both
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (2, 300)], ids=str)
def test_odd_sizes(backend, shape):
    M = normal(*shape).abs()
    a, b = weights(shape[0]), weights(shape[1], seed=1)
    f, g = sinkhorn(M, a, b, EPSILON, 3)
    solution = exactly(DenseCost(M), a, b, 3, backend)
    close(solution.f, f)
    close(solution.g, g)


@both
def test_weights_left_out_are_uniform(backend):
    cost, _, M = make("points3")
    given = solve(cost, uniform(7, M), uniform(9, M), epsilon=1.0, backend=backend)
    left_out = solve(cost, epsilon=1.0, backend=backend)
    close(left_out.f, given.f)
    close(left_out.g, given.g)


@both
def test_any_mass(backend):
    cost, _, M = make("points3")
    a, b = 40 * weights(7), 40 * weights(9, seed=1)
    f, _ = sinkhorn(M, a, b, EPSILON, 5)
    solution = exactly(cost, a, b, 5, backend)
    close(solution.f, f)
    close(solution.marginals()[0], a)


@both
def test_batches_broadcast(backend):
    x, y = normal(2, 1, 5, 3), normal(4, 6, 3, seed=1)
    a, b = weights(4, 5), weights(2, 1, 6, seed=1)
    epsilon = torch.tensor([0.5, 1.0, 2.0, 4.0])
    solution = exactly(PointCloud(x, y), a, b, 4, backend, epsilon=epsilon)
    assert solution.f.shape == (2, 4, 5)
    assert solution.g.shape == (2, 4, 6)
    assert solution.error.shape == solution.iterations.shape == solution.converged.shape == (2, 4)
    for i in range(2):
        for j in range(4):
            M = (x[i, 0][:, None] - y[j]).square().sum(-1)
            f, g = sinkhorn(M, a[j], b[i, 0], float(epsilon[j]), 4)
            close(solution.f[i, j], f)
            close(solution.g[i, j], g)


@both
def test_batch_from_epsilon_or_weights_alone(backend):
    M = normal(5, 6).abs()
    solution = exactly(DenseCost(M), weights(3, 5), weights(6), 4, backend, epsilon=torch.tensor([[0.5], [2.0]]))
    assert solution.f.shape == (2, 3, 5)
    f, _ = sinkhorn(M, weights(3, 5)[2], weights(6), 2.0, 4)
    close(solution.f[1, 2], f)


@both
def test_elements_stop_on_their_own(backend):
    M = torch.stack([normal(8, 8).abs() * scale for scale in (0.01, 1, 6)])
    together = solve(DenseCost(M), epsilon=0.5, check_every=1, tolerance=1e-7, backend=backend)
    assert len(set(together.iterations.tolist())) == 3
    for k in range(3):
        alone = solve(DenseCost(M[k]), epsilon=0.5, check_every=1, tolerance=1e-7, backend=backend)
        assert alone.iterations == together.iterations[k]
        close(together.f[k], alone.f, rtol=1e-11)
        close(together.g[k], alone.g, rtol=1e-11)


@both
def test_an_empty_batch(backend):
    solution = solve(DenseCost(torch.zeros(0, 3, 4)), epsilon=1.0, backend=backend)
    assert solution.f.shape == (0, 3)
    assert solution.plan().shape == (0, 3, 4)
    assert solution.converged.shape == (0,)


@both
@kinds
def test_rows_and_columns_without_mass(backend, kind):
    """They stay out of every sum, and have the potential that the definition gives them."""
    cost, _, M = make(kind)
    a, b = weights(7, zeros=2), weights(9, seed=1, zeros=3)
    solution = exactly(cost, a, b, 6, backend)
    f, g = sinkhorn(M[2:, 3:], a[2:], b[3:], EPSILON, 6)
    close(solution.f[2:], f)
    close(solution.g[3:], g)
    rows = -EPSILON * torch.logsumexp((b[3:].log() + g / EPSILON) - M[:2, 3:] / EPSILON, -1)
    close(solution.f[:2], rows)
    before, _ = sinkhorn(M[2:, 3:], a[2:], b[3:], EPSILON, 5)
    columns = -EPSILON * torch.logsumexp((a[2:].log() + before / EPSILON)[:, None] - M[2:, :3] / EPSILON, 0)
    close(solution.g[:3], columns)
    assert (solution.plan()[:2] == 0).all()
    assert (solution.plan()[:, :3] == 0).all()


@both
def test_forbidden_pairs(backend):
    M = normal(6, 6).abs()
    forbidden = torch.eye(6, dtype=torch.bool)
    solution = solve(DenseCost(M.masked_fill(forbidden, INF)), epsilon=EPSILON, tolerance=1e-10, backend=backend)
    wanted = solve(DenseCost(M.masked_fill(forbidden, 1e4)), epsilon=EPSILON, tolerance=1e-10, backend="reference")
    assert solution.converged
    close(solution.plan(), wanted.plan())
    assert (solution.plan()[forbidden] == 0).all()


@both
@pytest.mark.parametrize("side", ["rows", "columns", "both"])
@pytest.mark.parametrize("height", [1, 3])
def test_padding_that_may_go_nowhere(backend, side, height):
    """Padding as users write it: no mass, and only forbidden pairs."""
    M, a, b = normal(7, 9).abs(), weights(7), weights(9, seed=1)
    real = solve(DenseCost(M), a, b, epsilon=EPSILON, tolerance=1e-9, backend="reference")
    rows, columns = height * (side != "columns"), height * (side != "rows")
    padded = torch.nn.functional.pad(M, (0, columns, 0, rows), value=INF)
    pad = torch.nn.functional.pad
    solution = solve(
        DenseCost(padded), pad(a, (0, rows)), pad(b, (0, columns)), epsilon=EPSILON, tolerance=1e-9, backend=backend
    )
    assert solution.converged
    assert solution.iterations == real.iterations
    close(solution.f[:7], real.f)
    close(solution.g[:9], real.g)
    close(solution.value(), real.value())
    close(solution.linear_cost(), real.linear_cost())
    assert (solution.plan()[7:] == 0).all() and (solution.plan()[:, 9:] == 0).all()


@both
def test_what_cannot_be_transported_never_converges(backend):
    M = torch.tensor([[1.0, 2.0], [INF, INF]], dtype=torch.float64)
    solution = solve(DenseCost(M), epsilon=1.0, max_iterations=30, backend=backend)
    assert not solution.converged


@both
@pytest.mark.parametrize("kind", ["matrix", "points3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_regularisation_stays_finite(backend, kind, dtype):
    cost, _, M = make(kind, dtype=dtype)
    solution = exactly(cost, None, None, 20, backend, epsilon=1e-3)
    f, g = sinkhorn(M, uniform(7, M), uniform(9, M), 1e-3, 20)
    tolerance = 1e-9 if dtype == torch.float64 else 3e-6 * (1 + float(M.max()))
    close(solution.f, f, rtol=0, atol=tolerance)
    close(solution.g, g, rtol=0, atol=tolerance)


@both
def test_a_bad_start_costs_no_digits(backend):
    """The previous potential stabilises the sums of ``torch``; one that is far off must not show."""
    cost, _, M = make("points3")
    start = 1e5 * normal(7, seed=5)
    a, b = weights(7), weights(9, seed=1)
    f, g = sinkhorn(M, a, b, EPSILON, 2, start)
    solution = exactly(cost, a, b, 2, backend, init=(start, None))
    close(solution.f, f, rtol=1e-9)
    close(solution.g, g, rtol=1e-9)


@both
def test_warm_start(backend):
    cost, _, _ = make("points3")
    first = solve(cost, epsilon=EPSILON, tolerance=1e-10, backend=backend)
    second = solve(cost, epsilon=EPSILON, tolerance=1e-9, init=(first.f, first.g), backend=backend)
    assert second.iterations == 1
    close(second.f, first.f, rtol=1e-8)
    epsilon = torch.tensor([EPSILON, 1.0], dtype=torch.float64)
    batch = solve(cost, epsilon=epsilon, tolerance=1e-9, init=(first.f, None), backend=backend)
    assert batch.iterations[0] == 1


@both
@kinds
def test_softmin_is_its_definition(backend, kind):
    cost, _, M = make(kind, batch=(2,))
    h = normal(2, 9, seed=3)
    h[0, 4] = -INF
    wanted = -EPSILON * torch.logsumexp(h[:, None] - M / EPSILON, -1)
    close(softmin(cost, h, EPSILON, backend=backend), wanted)
    epsilon = torch.tensor([0.3, 3.0])
    wanted = -epsilon[:, None] * torch.logsumexp(h[1] - M / epsilon[:, None, None], -1)
    close(softmin(cost, h[1], epsilon, backend=backend), wanted)


@both
def test_softmin_over_nothing_is_infinite(backend):
    h = torch.full((9,), -INF, dtype=torch.float64)
    assert (softmin(make("matrix")[0], h, 1.0, backend=backend) == INF).all()


def test_numbers_of_numpy_are_numbers():
    cost, _, _ = make("matrix")
    wanted = solve(cost, epsilon=0.5, tolerance=2.0**-10, max_iterations=3)
    given = solve(cost, epsilon=np.float32(0.5), tolerance=np.float32(2.0**-10), max_iterations=np.int64(3))
    close(given.f, wanted.f)
    close(solve(cost, epsilon=np.float64(0.5), max_iterations=3, tolerance=0).f, wanted.f, rtol=1e-2)


@pytest.mark.parametrize("backend", [["torch", "reference"], ("reference",), None])
def test_backends_by_preference(backend):
    cost, _, _ = make("matrix")
    close(solve(cost, epsilon=1.0, backend=backend).f, solve(cost, epsilon=1.0, backend="reference").f)
