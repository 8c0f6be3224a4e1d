"""A user's script that learns points by the gradient of POT's loss in torch."""

import ot
import torch

torch.manual_seed(0)
X = torch.rand(30, 2, dtype=torch.float64, requires_grad=True)
Y = torch.rand(40, 2, dtype=torch.float64) + 1
a, b = torch.full((30,), 1 / 30, dtype=torch.float64), torch.full((40,), 1 / 40, dtype=torch.float64)

gradients = []
for method in ("flash", "sinkhorn_log"):
    loss = ot.sinkhorn2(a, b, ot.dist(X, Y), 0.1, method=method)
    gradients.append(torch.autograd.grad(loss, X)[0])
torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-10)

optimiser = torch.optim.SGD([X], lr=5.0)
losses = []
for _ in range(15):
    optimiser.zero_grad()
    loss = ot.sinkhorn2(a, b, ot.dist(X, Y), 0.1, method="flash")
    loss.backward()
    optimiser.step()
    losses.append(float(loss))
assert losses[-1] < losses[0] / 3, losses
print("agrees")
