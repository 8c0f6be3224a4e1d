"""What the tests of the POT adapter share: the host with our method, and problems to solve."""

import warnings
from typing import NamedTuple

import numpy as np
import pytest

import flashot_backends
from flashot_backends import dispatch


class Problem(NamedTuple):
    """An entropic transport problem in float64 numpy."""

    a: np.ndarray
    b: np.ndarray
    M: np.ndarray
    reg: float
    X: np.ndarray
    Y: np.ndarray


def _problem(n=17, m=23, d=3, reg=0.05, seed=0):
    """Points in the unit cube with uneven weights."""
    rng = np.random.default_rng(seed)
    X, Y = rng.random((n, d)), rng.random((m, d))
    a, b = rng.random(n) + 0.1, rng.random(m) + 0.1
    M = ((X[:, None] - Y) ** 2).sum(-1)
    return Problem(a / a.sum(), b / b.sum(), M, reg, X, Y)


@pytest.fixture
def pot():
    """``ot`` while its adapter is enabled."""
    ot = pytest.importorskip("ot")
    flashot_backends.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield ot
    flashot_backends.disable()


@pytest.fixture
def make_problem():
    """The function that makes problems."""
    return _problem


@pytest.fixture
def problem():
    """One small problem."""
    return _problem()


@pytest.fixture
def lazy_tensors(pot):
    """Skip where the host is older than its own LazyTensor."""
    if not hasattr(pot.utils, "LazyTensor"):
        pytest.skip("POT is older than 0.9.2")


@pytest.fixture
def complete(pot):
    """Skip where the host is older than what we know of its other solvers."""
    if tuple(int(part) for part in pot.__version__.split(".")[:3]) < (0, 9, 5):
        pytest.skip("POT is older than 0.9.5")


@pytest.fixture
def calls(monkeypatch):
    """What the dispatcher was asked for."""
    asked, select = [], dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *args, **kwargs: asked.append(args[0]) or select(*args, **kwargs))
    return asked


@pytest.fixture(autouse=True)
def _card(request):
    """Skip tests marked ``gpu`` where torch sees no card."""
    if request.node.get_closest_marker("gpu") and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
