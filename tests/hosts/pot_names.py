"""A user's script that binds POT's functions early, calls them by position and from threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from ot import sinkhorn
from ot.bregman import sinkhorn2, sinkhorn_log

rng = np.random.default_rng(0)
M = rng.random((40, 30))


def error(seed):
    """How far the two answers lie apart for random weights."""
    a, b = (np.random.default_rng(seed).dirichlet(np.ones(size)) for size in M.shape)
    plan = sinkhorn(a, b, M, 0.1, "flash", 2000, 1e-11)
    loss = sinkhorn2(a, b, M, 0.1, "flash", 2000, 1e-11)
    expected = sinkhorn_log(a, b, M, 0.1, 2000, 1e-11)
    return max(abs(plan - expected).max(), abs(loss - (expected * M).sum()))


with ThreadPoolExecutor(4) as pool:
    assert max(pool.map(error, range(12))) < 1e-10
print("agrees")
