"""A kernel of the operation "sinkhorn" that computes in float64 whatever the dtype of the points."""

import torch

from flashot_backends.kernels.sinkhorn.operator import Operator, Weighted


def applies(request):
    if request.dtype == torch.float64:
        return "the points are float64 already, and other kernels are faster"
    return None


def operator(cost, epsilon, precision="high"):
    return Double(cost, epsilon)


class Double(Operator):
    """Matrices in float64; results in the potentials' dtype."""

    @property
    def T(self):
        return Double(self.cost.T, self.exact_epsilon)

    def matrix(self):
        if self.cost.matrix is not None:
            return self.cost.matrix.double()
        x, y = self.cost.x.double(), self.cost.y.double()
        return (x[:, :, None] - y[:, None]).square().sum(-1)

    def exponents(self, s, t):
        epsilon = self.exact_epsilon.double()[:, None, None]
        return s.double()[:, :, None] + t.double()[:, None, :] - self.matrix() / epsilon

    def softmin(self, h):
        zero = h.new_zeros(self.batch, self.rows)
        return (-self.exact_epsilon.double()[:, None] * self.exponents(zero, h).logsumexp(-1)).to(self.dtype)

    def apply(self, s, t, values):
        return (self.exponents(s, t).exp() @ values.double()).to(self.dtype)

    def cost_apply(self, s, t, power=1):
        plan = self.exponents(s, t).exp()
        return torch.where(plan == 0, plan, plan * self.matrix() ** power).sum(-1).to(self.dtype)

    def weighted(self, s, t, alpha=None, gamma=0.0, u=None, v=None):
        plan = self.exponents(s, t).exp()
        weights = torch.zeros_like(plan)
        if alpha is not None:
            weights += alpha.double()[:, :, None] * plan
        if gamma:
            weights += gamma * torch.where(plan == 0, plan, plan * self.matrix())
        if u is not None:
            weights += (u.double() @ v.double().transpose(-1, -2)) * plan
        return Weighted(self.pull_back(weights), weights.sum(-1).to(self.dtype), weights.sum(-2).to(self.dtype))

    def pull_back(self, weights):
        if self.cost.matrix is not None:
            return (weights.to(self.dtype),)
        x, y = self.cost.x.double(), self.cost.y.double()
        by_pair = 2 * weights[..., None] * (x[:, :, None] - y[:, None])
        return by_pair.sum(2).to(self.dtype), -by_pair.sum(1).to(self.dtype)
