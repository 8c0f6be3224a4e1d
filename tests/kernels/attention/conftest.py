from tests.ops.attention.conftest import x64  # noqa: F401
