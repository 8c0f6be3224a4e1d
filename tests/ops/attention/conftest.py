import pytest

jax = pytest.importorskip("jax")


@pytest.fixture
def x64():
    """float64 for one test; the flag is global, so it is put back."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
