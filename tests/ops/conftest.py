"""Fixtures that several files of tests here share."""

import pytest


@pytest.fixture
def jax_float64(request):
    """JAX with float64, compiling quickly; as carefully as for users where a test asks for ``optimised``."""
    from tests.ops import sinkhorn_jax_cases as cases

    with cases.float64(quick="optimised" not in request.fixturenames):
        yield


@pytest.fixture
def optimised():
    """For gradients through relaxed or translated iterations; see `sinkhorn_jax_cases.float64`."""
