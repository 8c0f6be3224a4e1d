"""Load the plugins once, keep what they registered, and survive the broken ones."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from .specs import PROJECT, AdapterSpec, Hooks, KernelSpec

BUILTIN = "builtin"
logger = logging.getLogger(PROJECT)
_versions = itertools.count()


class Registry:
    """Kernels and adapters by name, with the plugin that each came from. Names are unique; the first one stays."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], KernelSpec] = {}
        self._adapters: dict[str, AdapterSpec] = {}
        self._owners: dict[object, str] = {}
        self.problems: list[str] = []
        self.version = next(_versions)

    def add(self, specs: Iterable[KernelSpec | AdapterSpec], owner: str) -> None:
        """Add all of ``specs`` or none; ``ValueError`` when a name is taken, naming both plugins."""
        specs = list(specs)
        keys = [_key(spec) for spec in specs]
        for index, key in enumerate(keys):
            if key in self._owners or key in keys[:index]:
                first = self._owners.get(key, owner)
                raise ValueError(f"{_describe(specs[index])} is registered by both {first!r} and {owner!r}")
        for key, spec in zip(keys, specs, strict=True):
            self._owners[key] = owner
            self._table(spec)[key] = spec
        self.version = next(_versions)

    def remove(self, spec: KernelSpec | AdapterSpec) -> None:
        """Remove one spec; ``KeyError`` when it is not here."""
        key = _key(spec)
        del self._table(spec)[key]
        del self._owners[key]
        self.version = next(_versions)

    def kernels(self, operation: str | None = None) -> list[KernelSpec]:
        """Return the kernels of ``operation`` (of all for ``None``), highest priority first, then by registration."""
        chosen = [spec for spec in self._kernels.values() if operation in (None, spec.operation)]
        return sorted(chosen, key=lambda spec: -spec.priority)

    def adapters(self) -> list[AdapterSpec]:
        """Return every adapter."""
        return list(self._adapters.values())

    def owner(self, spec: KernelSpec | AdapterSpec) -> str:
        """Return the name of the plugin that registered ``spec``."""
        return self._owners[_key(spec)]

    def _table(self, spec: KernelSpec | AdapterSpec) -> dict[Any, Any]:
        return self._kernels if isinstance(spec, KernelSpec) else self._adapters


def _key(spec: KernelSpec | AdapterSpec) -> Any:
    if isinstance(spec, KernelSpec):
        return (spec.operation, spec.name)
    if isinstance(spec, AdapterSpec):
        return spec.name
    raise TypeError(f"a plugin returns KernelSpec and AdapterSpec objects, not {spec!r}")


def _describe(spec: KernelSpec | AdapterSpec) -> str:
    if isinstance(spec, KernelSpec):
        return f"kernel {spec.name!r} of operation {spec.operation!r}"
    return f"adapter {spec.name!r}"


_lock = threading.Lock()
_registry: Registry | None = None
_loading = threading.local()


def registry() -> Registry:
    """Return what the plugins registered, loading them on the first call."""
    return _registry if _registry is not None else _load()


def _load() -> Registry:
    """Load in each thread that asks, and keep the first result: a lock held while plugins import could deadlock."""
    global _registry
    mine = getattr(_loading, "registry", None)
    if mine is not None:  # a plugin asks while it is being imported
        return mine
    _loading.registry = mine = Registry()
    try:
        _fill(mine)
    finally:
        del _loading.registry
    with _lock:
        kept = _registry = mine if _registry is None else _registry
    for message in mine.problems if kept is mine else ():
        _warn(message)
    return kept


def _fill(registry: Registry) -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    for name in _blocked():
        manager.set_blocked(name)
    if _switch("FLASHOT_TRACE_PLUGINS"):
        manager.trace.root.setwriter(sys.stderr.write)
        manager.enable_tracing()
    _register(manager, registry)
    _drop_misspelt(manager, registry)
    for name, plugin in _builtin_first(manager):
        _guarded(registry, name, functools.partial(_collect, manager, registry, name, plugin))


def _register(manager: pluggy.PluginManager, registry: Registry) -> None:
    # The built-in module is imported directly, so that a checkout that is not installed has its kernels too.
    if not manager.is_blocked(BUILTIN):
        manager.register(importlib.import_module(f"{PROJECT}.plugins.builtin"), BUILTIN)
    for entry_point in sorted(entry_points(group=PROJECT), key=lambda point: point.name):
        if entry_point.value != f"{PROJECT}.plugins.builtin" and not manager.is_blocked(entry_point.name):
            _guarded(registry, _title(entry_point), functools.partial(_import, manager, entry_point))


def _import(manager: pluggy.PluginManager, entry_point: EntryPoint) -> None:
    manager.register(entry_point.load(), entry_point.name)


def _title(entry_point: EntryPoint) -> str:
    distribution = getattr(entry_point, "dist", None)
    return f"{entry_point.name} ({distribution.name})" if distribution is not None else entry_point.name


def _drop_misspelt(manager: pluggy.PluginManager, registry: Registry) -> None:
    """Unregister the plugins whose hooks have no specification, one by one: ``check_pending`` stops at the first."""
    while True:
        try:
            return manager.check_pending()
        except pluggy.PluginValidationError as error:
            _skipped(registry, manager.get_name(error.plugin) or repr(error.plugin), error)
            manager.unregister(error.plugin)


def _builtin_first(manager: pluggy.PluginManager) -> Iterator[tuple[str, object]]:
    plugins = [(name, plugin) for name, plugin in manager.list_name_plugin() if plugin is not None]
    yield from sorted(plugins, key=lambda pair: pair[0] != BUILTIN)


def _collect(manager: pluggy.PluginManager, registry: Registry, name: str, plugin: object) -> None:
    others = [other for other in manager.get_plugins() if other is not plugin]
    specs: list[KernelSpec | AdapterSpec] = []
    for hook in ("flashot_register_kernels", "flashot_register_adapters"):
        for returned in manager.subset_hook_caller(hook, remove_plugins=others)():
            specs.extend(returned)
    registry.add(specs, name)


def _guarded(registry: Registry, name: str, step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:
        _skipped(registry, name, error)


def _skipped(registry: Registry, name: str, error: Exception) -> None:
    logger.debug("plugin %s", name, exc_info=error)
    registry.problems.append(f"flashot_backends: plugin {name!r} is skipped: {type(error).__name__}: {error}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # warnings are errors here, and a broken plugin must not break the host
        logger.error(message)


def _blocked() -> list[str]:
    return [name.strip() for name in os.environ.get("FLASHOT_DISABLE_PLUGINS", "").split(",") if name.strip()]


def _switch(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")
