"""What the tests of the Sinkhorn operation on JAX arrays share: problems, and a plain loop that JAX differentiates."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

ROWS, COLUMNS = 7, 9


def normal(*shape, seed=0, dtype=None):
    """Standard normal numbers, the same in every dtype up to rounding."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def weights(*shape, seed=0, zeros=0, dtype=None):
    """Uneven weights of mass 1 along the last axis, the first ``zeros`` of them zero."""
    out = np.random.default_rng(seed).random(shape) + 0.1
    out[..., :zeros] = 0
    return jnp.asarray(out / out.sum(-1, keepdims=True), dtype)


def problem(zeros=0, batch=(), d=3):
    """x, y, a, b, ε."""
    x, y = normal(*batch, ROWS, d), normal(*batch, COLUMNS, d, seed=1)
    return x, y, weights(*batch, ROWS, zeros=zeros), weights(*batch, COLUMNS, seed=1, zeros=zeros), jnp.asarray(0.5)


def distances(x, y):
    """Squared distances, from direct differences."""
    return ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(-1)


def log(weight):
    """log a without a NaN in its derivative at 0."""
    return jnp.where(weight > 0, jnp.log(jnp.where(weight > 0, weight, 1)), -jnp.inf)


def loop(M, a, b, epsilon, iterations, f=None):
    """Alternating updates in the log domain, columns first: (f, g, plan)."""
    scaled = M / epsilon

    def columns(f):
        return -epsilon * jax.nn.logsumexp((log(a) + f / epsilon)[..., :, None] - scaled, -2)

    def once(f, _):
        g = columns(f)
        return -epsilon * jax.nn.logsumexp((log(b) + g / epsilon)[..., None, :] - scaled, -1), g

    f, gs = jax.lax.scan(once, jnp.zeros(M.shape[:-1]) if f is None else f, length=iterations)
    g = gs[-1]
    return f, g, jnp.exp((log(a) + f / epsilon)[..., :, None] + (log(b) + g / epsilon)[..., None, :] - scaled)


def close(found, wanted, rtol=1e-10, atol=None):
    """Compare, by default to the same tolerance absolute and relative."""
    atol = rtol if atol is None else atol
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(wanted, float), rtol=rtol, atol=atol)


@contextlib.contextmanager
def float64(quick=True):
    """JAX with float64, and compiling quickly: most of these tests' time is compilation.

    Not ``quick`` where gradients pass relaxed or translated iterations: without its optimisations, XLA 0.10.2 for CPUs
    gets nested loops of a known length wrong, as ``jax.disable_jit`` and the optimised program agree.
    """
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_enable_x64", before)
    jax.config.update("jax_disable_most_optimizations", False)
