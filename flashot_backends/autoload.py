"""Enable at the first import of a host, in every Python of this environment or in the children of ``flashot run``.

This module is imported while Python starts, so it imports nothing but ``os`` and ``sys``, and nothing else of
ours loads until one of the watched packages is imported. What goes wrong on our side never stops a start-up.
"""

import os
import sys

from . import _imports

NAME = "flashot_backends_autoload"
_MARK = "# hosts:"
_CODE = r"import sys; exec('try:\n from flashot_backends.autoload import start\n start()\nexcept Exception:\n pass')"


def start():
    """Watch for the hosts, unless ``FLASHOT_ENABLE`` is false. Called at start-up; twice is as good as once."""
    if os.environ.get("FLASHOT_ENABLE", "").strip().lower() in ("0", "false", "no", "off"):
        return
    names = os.environ.get("FLASHOT_WATCH", "").split() or _recorded(sys.path)
    for name in names:
        _imports.before(name, _enable_quietly)
    if any(name in sys.modules for name in names):
        _enable_quietly()


def watched():
    """Return the top-level packages of every registered adapter's host, sorted."""
    from .plugins.manager import registry

    return sorted({module.partition(".")[0] for spec in registry().adapters() for module in spec.modules})


def turn_on(folder=None):
    """Write the start-up file and return its path.

    It goes to ``folder``, by default the active environment's site-packages. Raises ``OSError`` where that cannot be
    written, and ``RuntimeError`` where this package is not installed and the file would have no effect.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("flashot-backends")
    except PackageNotFoundError:
        raise RuntimeError("flashot-backends is not installed in this environment") from None
    turn_off(folder)
    path = paths(folder)[0]
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(content(watched(), path))
    os.replace(temporary, path)
    return path


def turn_off(folder=None):
    """Remove the start-up file and return the paths that were removed."""
    removed = [path for path in paths(folder) if os.path.exists(path)]
    for path in removed:
        os.remove(path)
    return removed


def state(folder=None):
    """Return the start-up file's path, or ``None`` when autoload is off, and the hosts that it does not watch yet."""
    for path in paths(folder):
        if os.path.exists(path):
            return path, sorted(set(watched()).difference(_recorded([os.path.dirname(path)])))
    return None, []


def paths(folder=None):
    """Return where the start-up file may be: in the form that this Python reads, then in the other one."""
    if folder is None:
        import sysconfig

        folder = sysconfig.get_path("purelib")
    endings = (".start", ".pth") if sys.version_info >= (3, 15) else (".pth", ".start")
    return [os.path.join(folder, NAME + ending) for ending in endings]


def content(names, path):
    """Return the text of the start-up file ``path``, which lists the packages to watch in a comment."""
    line = f"{__name__}:start" if path.endswith(".start") else _CODE
    note = "# Written by `flashot autoload on`; `flashot autoload off` removes it."
    return f"{note}\n{_MARK} {' '.join(names)}\n{line}\n"


def _recorded(folders):
    for folder in folders:
        for ending in (".pth", ".start"):
            try:
                with open(os.path.join(folder, NAME + ending), encoding="utf-8") as file:
                    lines = file.read().splitlines()
            except OSError:
                continue
            return [name for line in lines if line.startswith(_MARK) for name in line[len(_MARK) :].split()]
    return []


def _enable_quietly(module=None):
    try:
        from .hosts import enable

        enable()
    except Exception as error:
        import logging

        logging.getLogger("flashot_backends").error("could not enable: %s: %s", type(error).__name__, error)
