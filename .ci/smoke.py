"""A POT user's script, run by `flashot run` in an environment with the wheel, POT and torch, and nothing else."""

import importlib.util
import sys
import warnings

import numpy as np
import ot
import torch

warnings.simplefilter("error")
package = sys.modules["flashot_backends"]
assert package.__file__.startswith(sys.argv[1]), package.__file__
for name in ("adapters", "kernels", "tests"):
    found = importlib.util.find_spec(name)
    assert found is None or not str(found.origin).startswith(sys.argv[1]), f"the wheel installed a top-level {name}"

generator = np.random.default_rng(0)
x, y = generator.normal(size=(200, 3)), generator.normal(size=(150, 3)) + 0.5
a, b = np.full(200, 1 / 200), np.full(150, 1 / 150)
cost = ot.dist(x, y)
theirs = ot.sinkhorn(a, b, cost, 1.0, method="sinkhorn_log", stopThr=1e-12)
ours = ot.sinkhorn(a, b, cost, 1.0, method="flash", stopThr=1e-12)
assert isinstance(ours, np.ndarray)
assert ours.dtype == theirs.dtype
np.testing.assert_allclose(ours, theirs, rtol=1e-7)

points = torch.tensor(x, requires_grad=True)
loss = ot.sinkhorn2(torch.tensor(a), torch.tensor(b), ot.dist(points, torch.tensor(y)), 1.0, method="flash")
loss.backward()
assert torch.isfinite(points.grad).all()

package.disable()
try:
    ot.sinkhorn(a, b, cost, 1.0, method="flash")
except ValueError as error:
    assert "Unknown method" in str(error)
else:
    raise AssertionError("disable() left the method in place")
print(f"smoke test: torch {torch.__version__}, POT {ot.__version__}, loss {float(loss.detach()):.6f}")
