"""A user's script that names no method: what it prints must not depend on who computes."""

import numpy as np
import ot

rng = np.random.default_rng(0)
X, Y = rng.random((60, 2)), rng.random((50, 2))
a, b, M = ot.unif(60), ot.unif(50), ot.dist(X, Y)

plan, log = ot.sinkhorn(a, b, M, 0.05, log=True)
print("iterations", log["niter"])
print("loss", f"{ot.sinkhorn2(a, b, M, 0.05):.9e}")
print("losses", [f"{loss:.9e}" for loss in ot.sinkhorn(a, np.stack([b, b[::-1]], 1), M, 0.05)])
print("plan", f"{(plan**2).sum():.9e}")
print("barycentric", f"{abs(plan @ Y).sum():.9e}")
