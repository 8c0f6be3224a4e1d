"""Lists under annealing: how many stages a problem begins with is read off its own costs, not off padded ones."""

import pytest

torch = pytest.importorskip("torch")

from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, acceleration, solve  # noqa: E402

from .sinkhorn_cases import close, normal  # noqa: E402

SIZES = [(38, 33), (40, 35), (37, 36), (38, 33)]


@pytest.mark.parametrize("kind", ["points", "matrix"])
def test_each_is_as_alone(kind):
    xs, ys = [normal(n, 3, seed=k) for k, (n, _) in enumerate(SIZES)], [normal(m, 3) for _, m in SIZES]
    costs = PointCloud.ragged(xs, ys)
    parts = [(cost.x[None], cost.y[None], None) for cost in costs]
    if kind == "matrix":
        costs = DenseCost.ragged([cost.dense() for cost in costs])
        parts = [(None, None, cost.M[None]) for cost in costs]
    epsilons = [0.999 * float(acceleration.deviation(Cost(*part))) / 16 for part in parts]  # two stages, just so
    options = {"acceleration": "annealing", "tolerance": 1e-8}
    for cost, epsilon, one in zip(costs, epsilons, solve(costs, epsilon=epsilons, **options), strict=True):
        alone = solve(cost, epsilon=epsilon, **options)
        assert int(one._state.stages) == int(alone._state.stages) == 2
        assert int(one.iterations) == int(alone.iterations)
        close(one.plan(), alone.plan(), rtol=1e-8)
