"""Settings, and where each value came from.

From strongest to weakest: a call's own argument, ``with use(...)``, ``configure(...)``, ``FLASHOT_*`` variables,
``./flashot.toml``, ``[tool.flashot]`` in ``./pyproject.toml``, the user's ``flashot/flashot.toml``, the defaults.
Variables and files are read once, when the first setting is needed; ``reload()`` reads them again.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("flashot_backends")

PREFIX = "FLASHOT_"
SWITCHES = tuple(PREFIX + key for key in ("ENABLE", "WATCH", "DISABLE_PLUGINS", "TRACE_PLUGINS", "PLAIN_LAUNCH"))


class SettingsError(ValueError):
    """A setting has an unknown name or a value that is not accepted. The message says which, where and what is."""


class Settings(NamedTuple):
    """The settings in force.

    Attributes:
        backend: kernel names, tried in this order and no others; ``None`` for all by priority.
        precision: ``"high"`` for dtype-grade results, ``"fast"`` where an operation offers a faster, coarser product.
        fallback: what happens when a kernel that we chose does not apply: ``"auto"`` takes the next and logs one INFO
            line, ``"warn"`` warns once, ``"error"`` raises.
        substitute: the hosts whose own default is replaced, e.g. ``("pot",)``.
        numpy_device: where problems that arrive as numpy arrays are solved, ``"cpu"`` or ``"cuda"``.
        log: print our INFO lines to standard error, whatever the application's logging says.
    """

    backend: tuple[str, ...] | None = None
    precision: str = "high"
    fallback: str = "auto"
    substitute: tuple[str, ...] = ()
    numpy_device: str = "cpu"
    log: bool = False


_lock = threading.RLock()
_outside: list[tuple[str, dict[str, Any]]] | None = None  # variables and files, weakest first, checked
_configured: dict[str, Any] = {}
_base: Settings | None = None


class _Layer:
    """The overrides of the ``use`` blocks around the running code, merged over the base that they were resolved for."""

    __slots__ = ("base", "merged", "overrides")

    def __init__(self, overrides: dict[str, Any]) -> None:
        self.overrides = overrides
        self.base: Settings | None = None
        self.merged = self.settings()

    def settings(self) -> Settings:
        if self.base is None or self.base is not _base:
            base = _current_base()
            self.merged = base._replace(**self.overrides)
            self.base = base
        return self.merged


_used: ContextVar[_Layer | None] = ContextVar("flashot_backends_use", default=None)


def settings() -> Settings:
    """Return the settings in force here: in this thread or task, now."""
    layer = _used.get()
    if layer is not None:
        return layer.settings()
    return _base if _base is not None else _current_base()


def configure(**given: Any) -> None:
    """Set settings for the whole process; ``None`` takes back what an earlier call set for that key."""
    global _base
    values = _checked(given, "configure")
    with _lock:
        for key in given:
            _configured.pop(key, None)
        _configured.update(values)
        _base = None
        _current_base()


@contextlib.contextmanager
def use(**given: Any) -> Iterator[None]:
    """Set settings inside a ``with`` block, for this thread or task; blocks nest, and ``None`` leaves a key alone."""
    values = _checked(given, "use")
    outer = _used.get()
    layer = _Layer({**outer.overrides, **values} if outer is not None else values)
    if layer.merged.log:
        _print_log()
    token = _used.set(layer)
    try:
        yield
    finally:
        _used.reset(token)


def sources() -> dict[str, tuple[Any, str]]:
    """Return each setting's value and the source that it came from."""
    current, found = settings(), dict.fromkeys(Settings._fields, "default")
    for label, values in _layers():
        found.update(dict.fromkeys(values, label))
    return {key: (getattr(current, key), label) for key, label in found.items()}


def reload() -> None:
    """Read the variables and files again. What ``configure`` and ``use`` set stays."""
    global _outside, _base
    with _lock:
        _outside = _base = None


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known name, or the list of all of them."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name).lower(), folded, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {folded[near[0]]!r}?"
    return f" Known: {', '.join(map(repr, known))}." if known else ""


def _layers() -> list[tuple[str, dict[str, Any]]]:
    layer = _used.get()
    used = layer.overrides if layer is not None else {}
    return [*(_outside or []), ("configure()", _configured), ("use()", used)]


def user_file() -> Path:
    """Return the path of the user's own settings file, which need not exist."""
    if sys.platform == "win32":
        folder = os.environ.get("APPDATA") or os.path.expanduser("~/AppData/Roaming")
    else:
        folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder, "flashot", "flashot.toml")


def _is_anything_set() -> bool:
    """Whether there is anything to read: what reads it takes a quarter of a second to import."""
    if any(name.upper().startswith(PREFIX) and name not in SWITCHES for name in os.environ):
        return True
    try:
        return _exists("flashot.toml") or _exists(user_file()) or b"flashot" in _content("pyproject.toml")
    except OSError:  # whatever is wrong is said by who reads it
        return True


def _exists(path: str | Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _content(path: str) -> bytes:
    return Path(path).read_bytes() if _exists(path) else b""


def _current_base() -> Settings:
    global _base, _outside
    with _lock:
        if _base is None:
            if _outside is None and not _is_anything_set():
                _outside = []
            if _outside is None:
                from . import _sources

                _outside = _sources.read()
            values: dict[str, Any] = {}
            for _, layer in [*_outside, ("configure()", _configured)]:
                values.update(layer)
            _base = Settings(**values)
            if _base.log:
                _print_log()
        return _base


def _checked(given: dict[str, Any], where: str) -> dict[str, Any]:
    from . import _sources

    unset = {key for key, value in given.items() if value is None and key in Settings._fields}
    return _sources.check({key: value for key, value in given.items() if key not in unset}, where)


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if settings().log:
            print(f"flashot: {record.getMessage()}", file=sys.stderr)


def _print_log() -> None:
    if not any(isinstance(handler, _Printer) for handler in logger.handlers):
        logger.addHandler(_Printer(logging.INFO))
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
