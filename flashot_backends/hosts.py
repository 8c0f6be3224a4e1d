"""Adapt a host right after it is imported, and switch the adaptations on and off.

A wrapped function is replaced by a trampoline that stays for the life of the process and reads one switch at each call.
Locks are held for bookkeeping only, never while something is imported: another thread's import may be waiting for us.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from . import _imports, _versions
from .config import settings
from .plugins.manager import registry
from .plugins.specs import AdapterSpec

logger = logging.getLogger("flashot_backends")

_lock = threading.RLock()
_enabled = False
_hosts: dict[str, Host] = {}
_watched: set[AdapterSpec] = set()  # those whose modules an import hook is registered for
_warned: set[str] = set()
_MARK = "__flashot_adapters__"


class Host:
    """One host, as its adapter sees it: ``adapt(module, host)`` calls ``wrap`` and ``register``.

    Attributes:
        spec: the adapter's descriptor.
        version: the installed version, e.g. ``"0.9.7.post1"``, or ``None`` when no distribution tells it.
        problem: why the host was left alone, or ``None``.
        adapted: the host modules that were adapted.
    """

    def __init__(self, spec: AdapterSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.version = _installed(spec.distribution)
        self.problem: str | None = None
        self.adapted: set[str] = set()
        self._entries: list[_Entry] = []
        self._replaced: list[tuple[Any, Any]] = []

    @property
    def enabled(self) -> bool:
        """Whether the adaptations answer: between ``enable()`` and ``disable()``."""
        return _enabled

    @property
    def substituted(self) -> bool:
        """Whether the host's own default is to be replaced: it is enabled and listed in the setting ``substitute``."""
        return _enabled and self.name in settings().substitute

    @property
    def release(self) -> tuple[int, ...]:
        """The release numbers of ``version``: (0, 9, 7)."""
        return _versions.release(self.version or "0")

    def wrap(
        self,
        module: ModuleType,
        name: str,
        factory: Callable[[Callable[..., Any]], Callable[..., Any]],
        parameters: Iterable[str] = (),
    ) -> bool:
        """Replace the function ``module.name``, e.g. ``"sinkhorn"`` or ``"Scores.forward"``; say whether it is done.

        While enabled, calls go to ``factory(original)``, otherwise to the original. Name, signature, docstring, source
        and pickling stay those of the original. Wrapping twice does nothing.

        Args:
            module: the module that defines the function.
            name: its name there, dotted for a method.
            factory: takes the original and returns the replacement; it is called once.
            parameters: the names that the original's parameters must begin with, in this order. Where they do not, or
                where there is no such function, one ``RuntimeWarning`` is given and the host keeps its own.
        """
        owner, attribute = _owner(module, name)
        original: Any = getattr(owner, "__dict__", {}).get(attribute)
        if self.name in getattr(original, _MARK, ()):
            return True
        problem = _unlike(original, tuple(parameters))
        if problem is not None:
            self._complain(f"{module.__name__}.{name} {problem}; it keeps its own behaviour")
            return False
        trampoline = _trampoline(self, original, factory(original))
        with _lock:
            if owner.__dict__.get(attribute) is original:
                setattr(owner, attribute, trampoline)
                self._replaced.append((original, trampoline))
        return True

    def register(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> bool:
        """Add ``mapping[key] = value`` to a registry of the host while enabled; a key that it has already stays."""
        with _lock:
            if any(entry.mapping is mapping and entry.key == key for entry in self._entries):
                return True
            if key in mapping:
                self._complain(f"it has its own {key!r} already, which stays")
                return False
            entry = _Entry(mapping, key, value)
            self._entries.append(entry)
            entry.show(_enabled)
            return True

    def _show(self, shown: bool) -> None:
        for entry in self._entries:
            entry.show(shown)

    def _complain(self, problem: str) -> None:
        self.problem = problem
        _warn_once(f"flashot_backends: {self.spec.distribution or self.name} {self.version or ''}: {problem}")

    def _take_replaced(self) -> list[tuple[Any, Any]]:
        with _lock:
            taken, self._replaced = self._replaced, []
            return taken


class _Entry:
    """One key that we add to a host's registry and take out again."""

    def __init__(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        self.mapping, self.key, self.value = mapping, key, value

    def show(self, shown: bool) -> None:
        if shown:
            self.mapping.setdefault(self.key, self.value)
        elif self.mapping.get(self.key) is self.value:
            del self.mapping[self.key]


def enable() -> None:
    """Adapt every host that is loaded, and have the others adapted when they are imported."""
    _switch(True)
    watched = [(spec, module) for spec in registry().adapters() for module in spec.modules]
    for spec, module in watched:
        if spec not in _watched:
            _imports.after(module, functools.partial(_on_import, spec))
    _watched.update(spec for spec, _ in watched)
    for spec, module in watched:
        _wait_for_other_threads(module)
        if module in sys.modules:
            _adapt_loaded(spec, module)


def disable() -> None:
    """Let every adapted host answer as it does without us."""
    _switch(False)


def is_enabled() -> bool:
    """Return whether the hosts are switched to us."""
    return _enabled


def report() -> list[tuple[AdapterSpec, str | None, str]]:
    """Return every adapter with the host's installed version and a line on its state."""
    return [(spec, _host(spec).version, _state(_host(spec))) for spec in registry().adapters()]


def _state(host: Host) -> str:
    if host.problem is not None:
        return host.problem
    if host.adapted:
        return "adapted" if _enabled else "adapted, switched off"
    if host.version is None and host.spec.distribution:
        return "not installed"
    return _outside_range(host) or ("waits for its import" if _enabled else "ready")


def _switch(on: bool) -> None:
    global _enabled
    with _lock:
        _enabled = on
        for host in _hosts.values():
            host._show(on)


def _host(spec: AdapterSpec) -> Host:
    with _lock:
        host = _hosts.get(spec.name)
        if host is None or host.spec != spec:
            host = _hosts[spec.name] = Host(spec)
        return host


def _on_import(spec: AdapterSpec, module: ModuleType) -> None:
    _adapt(spec, module)
    _sweep(_host(spec)._take_replaced(), spec, module.__name__.partition(".")[0])


def _wait_for_other_threads(module: str) -> None:
    """Wait for an import that is under way and may have passed by our finder before it knew the module."""
    wait = getattr(importlib._bootstrap, "_lock_unlock_module", None)  # type: ignore[attr-defined]
    if wait is not None:
        wait(module)


def _adapt_loaded(spec: AdapterSpec, name: str) -> None:
    """Adapt a module that is in ``sys.modules`` already, then give the wrappers to those who hold the originals."""
    module = sys.modules[name]
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return logger.debug("%s is being imported by this very thread, and adapted when it is complete", name)
    _adapt(spec, module)
    replaced = _host(spec)._take_replaced()
    _sweep(replaced, spec)
    if replaced:
        logger.info(
            "%s: adapted after its import; copies held in containers, closures or default arguments stay the host's",
            name,
        )
    return None


def _adapt(spec: AdapterSpec, module: ModuleType) -> None:
    """Run the adapter on a host module. Whatever goes wrong here is ours, and the host must not notice."""
    try:
        host = _host(spec)
        problem = _outside_range(host)
        if problem is not None:
            return host._complain(f"{problem}; it is left alone")
        target, _, function = spec.target.partition(":")
        getattr(importlib.import_module(target), function)(module, host)
        host.adapted.add(module.__name__)
    except Exception as error:
        logger.debug("adapter %s", spec.name, exc_info=error)
        _host(spec)._complain(f"its adapter {spec.target} failed: {type(error).__name__}: {error}")
    return None


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution) if distribution else None
    except PackageNotFoundError:
        return None


def _outside_range(host: Host) -> str | None:
    if not host.spec.distribution or not host.spec.versions:
        return None
    if host.version is None:
        return f"no installed distribution {host.spec.distribution!r} tells its version"
    if not _versions.within(host.version, host.spec.versions):
        return f"version {host.version} is outside the tested range {host.spec.versions}"
    return None


def _owner(module: ModuleType, name: str) -> tuple[Any, str]:
    owner: Any = module
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute


def _unlike(original: Any, parameters: tuple[str, ...]) -> str | None:
    if not inspect.isroutine(original) or isinstance(original, (staticmethod, classmethod)):
        return "is not there, or is no plain function"
    found = tuple(inspect.signature(original).parameters)
    if found[: len(parameters)] != parameters:
        return f"takes ({', '.join(found)}), and we know ({', '.join(parameters)})"
    return None


def _trampoline(host: Host, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _enabled:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(call, _MARK, (*getattr(original, _MARK, ()), host.name))
    return call


def _sweep(replaced: list[tuple[Any, Any]], spec: AdapterSpec, package: str = "") -> None:
    """Rebind the module-level names, in ``package`` or everywhere, that still hold an original."""
    by_id = {id(original): (original, trampoline) for original, trampoline in replaced}
    for name, module in sys.modules.copy().items() if by_id else ():  # a copy in one step: other threads import
        inside = not package or name.partition(".")[0] == package
        if inside and isinstance(module, ModuleType) and not _adapts(name, spec):
            _rebind(object.__getattribute__(module, "__dict__"), by_id)  # a lazy module must not wake up


def _adapts(module: str, spec: AdapterSpec) -> bool:
    """Whether a module is on our side, where an original is held on purpose."""
    return module.partition(".")[0] == "flashot_backends" or module == spec.target.partition(":")[0]


def _rebind(namespace: dict[str, Any], by_id: dict[int, tuple[Any, Any]]) -> None:
    for name, value in namespace.copy().items():
        pair = by_id.get(id(value))
        if pair is not None and value is pair[0]:
            namespace[name] = pair[1]


def _warn_once(message: str) -> None:
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # warnings are errors here, and the host must stay whole
        logger.error(message)
