"""Soft matching of two clouds of points."""

import numpy as np


def soft_match(x, y, width=1.0, method="plain"):
    """Return where each point of ``x`` (n, d) lands in the cloud ``y`` (m, d), by entropic optimal transport."""
    if method != "plain":
        raise ValueError(f"unknown method {method!r}")
    kernel = np.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / width)
    u, v = np.ones(len(x)), np.ones(len(y))
    for _ in range(500):
        v = 1 / len(y) / (kernel.T @ u)
        u = 1 / len(x) / (kernel @ v)
    return len(x) * (u[:, None] * kernel * v) @ y
