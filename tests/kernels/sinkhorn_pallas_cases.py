"""Costs that the Pallas kernels read or take from direct differences, against float64 by numpy, on any device."""

import jax
import jax.numpy as jnp
import numpy as np

from flashot_backends.kernels.sinkhorn.jax_pairs import prepare

# Problems, whether they share one cost, rows, columns, and coordinates or the dtype of a matrix.
SMALL = {
    "float32": {"metric": "matrix", "problems": 2, "shared": False, "n": 37, "m": 150, "of": "float32"},
    "bfloat16, shared": {"metric": "matrix", "problems": 2, "shared": True, "n": 140, "m": 41, "of": "bfloat16"},
    "euclidean": {"metric": "euclidean", "problems": 2, "shared": True, "n": 37, "m": 150, "of": 2},
    "l1 of many": {"metric": "l1", "problems": 1, "shared": False, "n": 20, "m": 33, "of": 11},
}
OTHERS = {  # on a card
    "float16": {"metric": "matrix", "problems": 1, "shared": False, "n": 20, "m": 33, "of": "float16"},
    "euclidean of many": {"metric": "euclidean", "problems": 1, "shared": False, "n": 20, "m": 135, "of": 13},
    "l1": {"metric": "l1", "problems": 2, "shared": False, "n": 37, "m": 50, "of": 2},
    "large float32": {"metric": "matrix", "problems": 1, "shared": False, "n": 2500, "m": 3100, "of": "float32"},
    "large float16": {"metric": "matrix", "problems": 3, "shared": True, "n": 1111, "m": 777, "of": "float16"},
    "wide euclidean": {"metric": "euclidean", "problems": 1, "shared": False, "n": 900, "m": 1301, "of": 64},
    "wide l1": {"metric": "l1", "problems": 2, "shared": True, "n": 600, "m": 1025, "of": 200},
    "long l1": {"metric": "l1", "problems": 1, "shared": False, "n": 3000, "m": 500, "of": 8},
}
TOLERANCE = 5e-6

#: Compile for a test: the interpreter's programs are long, and run once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def points(problems, n, m, d):
    """float32 points; many meet, and many more have a coordinate in common."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(problems, k, d)) + 3 for k in (n, m))
    x, y = (np.where(rng.random(part.shape) < 0.3, 2.0, part).astype("float32") for part in (x, y))
    shared = min(n, m) // 2
    y[:, :shared] = x[:, :shared]
    return jnp.asarray(x), jnp.asarray(y)


def costs(x, y, metric):
    """float64 costs of points from direct differences."""
    differences = np.asarray(x, float)[:, :, None] - np.asarray(y, float)[:, None]
    return abs(differences).sum(-1) if metric == "l1" else np.sqrt((differences**2).sum(-1))


def log_sum_exp(exponents):
    """Along the last axis; −inf where nothing is finite."""
    top = exponents.max(-1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return safe[..., 0] + np.log(np.exp(exponents - safe).sum(-1))


def slopes(x, y, metric):
    """∂C_ij/∂x_i (…, n, m, d), 0 where points, or coordinates, meet."""
    differences = np.asarray(x, float)[:, :, None] - np.asarray(y, float)[:, None]
    if metric == "l1":
        return np.sign(differences)
    lengths = np.sqrt((differences**2).sum(-1, keepdims=True))
    return differences / np.where(lengths > 0, lengths, 1)


def check(kernel, metric, problems, shared, n, m, of, optimized=False):
    """What a kernel offers, some of it of the pairs and the rest of their transpose; a column of each is left out."""
    rng, leading = np.random.default_rng(1), 1 if shared else problems
    epsilon = np.linspace(0.5, 1, problems).astype("float32")
    if metric == "matrix":
        M = abs(rng.normal(size=(leading, n, m)))
        M[rng.random(M.shape) < 0.2] = np.inf
        M[:, 3], M[:, :, 5] = np.inf, np.inf  # a row and a column that may go nowhere
        M = jnp.asarray(M, of)
        pairs, exact, bent = prepare(M, None, jnp.asarray(epsilon)), np.asarray(M, float), None
    else:
        epsilon *= max(1, np.float32(of / 4))  # costs of more coordinates are larger, and so are their last digits
        x, y = points(leading, n, m, of)
        pairs, exact = prepare(x, y, jnp.asarray(epsilon), metric), costs(x, y, metric)
        bent = slopes(x, y, metric)
    h = [(rng.normal(size=(problems, k)) - 5).astype("float32") for k in (m, n)]
    for part in h:
        part[:, 0] = -np.inf
    options = None if optimized else QUICK
    wide = epsilon.astype(float)[:, None, None]
    _check_side(kernel, pairs, False, exact, bent, h[0], wide, options)
    turned = None if bent is None else -bent.swapaxes(1, 2)
    _check_side(kernel, pairs, True, exact.swapaxes(1, 2), turned, h[1], wide, options)


def _check_side(kernel, pairs, turned, exact, bent, t, epsilon, options):
    problems, n, m, count = len(t), *exact.shape[1:], 2 if bent is None else bent.shape[-1]
    left, right = (np.cos(np.arange(problems * k * 3.0)).reshape(problems, k, 3).astype("float32") for k in (n, m))
    left, right = (left, right) if turned else (left[..., :1], right[..., :1])
    values = np.sin(np.arange(problems * m * count * 1.0)).reshape(problems, m, count).astype("float32")
    scaled = t[:, None, :].astype(float) - exact / epsilon
    sums = log_sum_exp(scaled)
    s = np.where(np.isfinite(sums), -sums, 0).astype("float32")
    plan = np.exp(s[:, :, None].astype(float) + scaled)
    moved = np.where(plan == 0, 0, plan * np.where(plan == 0, 0, exact))
    products = left.astype(float) @ right.astype(float).swapaxes(1, 2)
    weights = products * (moved if turned else plan)
    wide = values.astype(float)
    wanted = {"lse": sums, "one column": moved @ wide[..., :1], "columns": weights @ wide}
    if bent is not None:
        wanted["slopes"] = (weights[..., None] * bent).sum(2)

    def run(pairs, s, t, guess, values, left, right):
        held, power = kernel.hold(pairs), int(turned)
        pairs, held = (pairs.T, held.T) if turned else (pairs, held)
        out = {"lse": kernel.lse(held, t, guess)}
        out["columns"] = kernel.reduce(pairs, s, t, values, power, left, right)
        if turned:
            out["one column"] = kernel.reduce(pairs, s, t, values[..., :1], 1)
        if bent is not None:
            out["slopes"] = kernel.pull(pairs, s, t, left, right, power)
        return out

    guess = np.where(np.isfinite(sums), sums + (0 if turned else -300), 0).astype("float32")  # good, or bad
    found = jax.jit(run, compiler_options=options)(pairs, s, t, guess, values, left, right)
    for name, got in found.items():
        size = abs(wanted[name][np.isfinite(wanted[name])]).max()
        np.testing.assert_allclose(got, wanted[name], atol=TOLERANCE * size, rtol=0, err_msg=name)
