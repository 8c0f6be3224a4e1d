"""A user's script that names no backend."""

import torch
from geomloss import SamplesLoss

torch.manual_seed(0)
x = torch.rand(200, 2, dtype=torch.float64, requires_grad=True)
y = torch.rand(150, 2, dtype=torch.float64)
value = SamplesLoss(blur=0.05)(x, y)
value.backward()
print(f"{value.item():.12f} {x.grad.norm().item():.12f}")
