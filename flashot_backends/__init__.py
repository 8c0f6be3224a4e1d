"""Fused kernels inside the libraries you already use.

``enable()`` lets the libraries found here (POT, GeomLoss, ...) offer our kernels under a name of their own, such as
``ot.sinkhorn(..., method="flash")``. Nothing else changes until a host is listed in the setting ``substitute``.

Importing this package is cheap: it loads no array framework, and each function imports what it needs when it is called.
"""

import os as _os

__version__ = "0.1.0"
__all__ = ["__version__", "configure", "disable", "enable", "status", "use"]

# In a checkout, adapters/ and kernels/ lie beside this folder; in an installed copy they lie in it.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if not _os.path.isdir(_os.path.join(_os.path.dirname(__file__), "adapters")) and _root not in __path__:
    __path__.append(_root)


def enable():
    """Adapt every supported host: now if it is loaded, else when it is imported. Call it as often as you like."""
    from .hosts import enable

    enable()


def disable():
    """Give the hosts their own behaviour back, also through functions that were captured while we were enabled."""
    from .hosts import disable

    disable()


def status(file=None):
    """Print the settings with their sources, the hosts and the kernels to ``file`` (default: standard output)."""
    from .report import show

    show(file)


def configure(**settings):
    """Set settings for this process, e.g. ``configure(backend=["triton", "torch"], substitute=["pot"])``.

    ``None`` takes an earlier ``configure`` of that key back. Keys: ``backend``, ``precision`` (``"high"`` or
    ``"fast"``), ``fallback`` (``"auto"``, ``"warn"`` or ``"error"``), ``substitute``, ``numpy_device`` (``"cpu"`` or
    ``"cuda"``) and ``log`` (a boolean). An unknown key or a bad value is a ``flashot_backends.config.SettingsError``.
    """
    from .config import configure

    configure(**settings)


def use(**settings):
    """Set settings inside a ``with`` block (or a decorated function), for this thread or task only."""
    from .config import use

    return use(**settings)


def load_ipython_extension(ipython):
    """``%load_ext flashot_backends``."""
    enable()


def unload_ipython_extension(ipython):
    """``%unload_ext flashot_backends``."""
    disable()
