"""A user's script: POT's own names, the method "flash", numpy arrays."""

import numpy as np
import ot

rng = np.random.default_rng(0)
X, Y = rng.random((120, 2)), rng.random((90, 2))
a, b, M = ot.unif(120), ot.unif(90), ot.dist(X, Y)

plan, log = ot.sinkhorn(a, b, M, 0.05, method="flash", log=True)
expected, host_log = ot.sinkhorn(a, b, M, 0.05, method="sinkhorn_log", log=True)
np.testing.assert_allclose(plan, expected, rtol=1e-8, atol=1e-14)
assert log["niter"] == host_log["niter"]

loss = ot.sinkhorn2(a, b, M, 0.05, method="flash")
np.testing.assert_allclose(loss, (expected * M).sum(), rtol=1e-9)

divergence = ot.bregman.empirical_sinkhorn_divergence(X, Y, 0.05, method="flash")
np.testing.assert_allclose(divergence, ot.bregman.empirical_sinkhorn_divergence(X, Y, 0.05), rtol=1e-6)

moved = ot.da.SinkhornTransport(reg_e=0.05, method="flash").fit_transform(Xs=X, Xt=Y)
assert moved.shape == X.shape
print("agrees")
