"""A user's script with online point clouds and their divergence: what it prints must not depend on who computes."""

import sys

import jax
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn
from ott.tools import sinkhorn_divergence

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else None
x, y = (jax.random.normal(jax.random.key(seed), (50 + seed, 3)) + seed for seed in (0, 1))


def cost(x):
    geometry = pointcloud.PointCloud(x, y, epsilon=0.5, batch_size=batch_size)
    return sinkhorn.Sinkhorn(threshold=1e-3)(linear_problem.LinearProblem(geometry)).reg_ot_cost


value, gradient = jax.value_and_grad(cost)(x)
print("value", f"{value:.4f}", "gradient", f"{abs(gradient).sum():.3f}")
divergence = sinkhorn_divergence.sinkhorn_divergence(pointcloud.PointCloud, x, y, epsilon=0.5, batch_size=batch_size)[0]
print("divergence", f"{divergence:.4f}")
