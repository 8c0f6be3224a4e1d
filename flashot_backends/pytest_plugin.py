"""Run any host's own test-suite on our kernels: ``pytest -p flashot_backends.pytest_plugin``.

``--flashot-substitute=pot`` replaces the named hosts' defaults, ``--flashot-backend=torch`` chooses the kernels; the
``FLASHOT_*`` variables and files work as ever. Workers of pytest-xdist do the same.
"""

from __future__ import annotations

import pytest

_OPTIONS = {
    "substitute": "hosts whose own default is replaced, e.g. pot",
    "backend": "kernels, tried in this order, e.g. triton,torch",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--flashot-substitute`` and ``--flashot-backend``."""
    group = parser.getgroup("flashot", "flashot-backends")
    for key, text in _OPTIONS.items():
        group.addoption(f"--flashot-{key}", metavar="NAME[,NAME]", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Enable before the first conftest is imported, so that nothing captures a host's function earlier."""
    from . import configure, enable
    from .config import SettingsError

    options = early_config.known_args_namespace
    given = {key: getattr(options, f"flashot_{key}", None) for key in _OPTIONS}
    try:
        configure(**{key: value for key, value in given.items() if value is not None})
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    enable()


def pytest_report_header() -> str:
    """Say what the run is on."""
    from . import __version__
    from .config import settings

    current = settings()
    backend = ", ".join(current.backend) if current.backend else "by priority"
    return f"flashot-backends {__version__}: substitute: {', '.join(current.substitute) or 'none'}; backend: {backend}"
