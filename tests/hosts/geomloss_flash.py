"""A user's script: GeomLoss's own names, the backend "flash"."""

import torch
from geomloss import SamplesLoss

torch.manual_seed(0)
x = torch.rand(300, 3, dtype=torch.float64, requires_grad=True)
y = torch.rand(250, 3, dtype=torch.float64)

for options in ({"loss": "sinkhorn"}, {"loss": "sinkhorn", "p": 1, "reach": 0.5}, {"loss": "energy"}):
    results = []
    for backend in ("flash", "tensorized"):
        value = SamplesLoss(**options, backend=backend)(x, y)
        results.append((value, *torch.autograd.grad(value, x)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-13)

batch = SamplesLoss("sinkhorn", blur=0.1, backend="flash")(x.expand(4, -1, -1), y.expand(4, -1, -1))
assert batch.shape == (4,)
print("agrees")
