"""What a plugin hands over: frozen descriptors, and the two hooks that return lists of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

PROJECT = "flashot_backends"
hookspec = pluggy.HookspecMarker(PROJECT)

_NAME = re.compile(r"[a-z][a-z0-9_.-]*\Z")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?\Z")


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, described without importing it.

    Attributes:
        operation: ``"sinkhorn"``, ``"maxsim"`` or ``"attention"``.
        name: what users write in ``backend=[...]``, e.g. ``"triton"``.
        target: ``"package.module"`` or ``"package.module:attribute"``, imported when the kernel is first considered.
            The object found there has ``applies(request) -> str | None``: the reason why it cannot serve the request.
        arrays: the frameworks whose arrays it computes with, e.g. ``{"torch"}``.
        devices: the device types it runs on, e.g. ``{"cuda"}``; ``None`` for any.
        requires: importable top-level modules without which it cannot run, e.g. ``("triton",)``.
        priority: higher is tried first when the user named nothing.

    Raises ``TypeError`` or ``ValueError`` when a field is of the wrong kind.
    """

    operation: str
    name: str
    target: str
    arrays: frozenset[str]
    devices: frozenset[str] | None = None
    requires: tuple[str, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        _check_name("operation", self.operation)
        _check_name("name", self.name)
        _check_target(self.target)
        object.__setattr__(self, "arrays", frozenset(_strings("arrays", self.arrays)))
        if self.devices is not None:
            object.__setattr__(self, "devices", frozenset(_strings("devices", self.devices)))
        object.__setattr__(self, "requires", _strings("requires", self.requires))
        if not isinstance(self.priority, int):
            raise TypeError(f"priority must be an int, not {self.priority!r}")


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter of one host, described without importing it or the host.

    Attributes:
        name: what users write in ``substitute=[...]``, e.g. ``"pot"``.
        modules: the leaf host modules whose import triggers the adapter, e.g. ``("ot.bregman._sinkhorn",)``.
        target: ``"package.module:function"``, called as ``function(module, host)`` right after such a module executed.
        distribution: the host's distribution name, whose installed version is checked; ``""`` to check none.
        versions: the tested range, e.g. ``">=0.9,<0.10"``.

    Raises ``TypeError`` or ``ValueError`` when a field is of the wrong kind.
    """

    name: str
    modules: tuple[str, ...]
    target: str
    distribution: str
    versions: str

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        object.__setattr__(self, "modules", _strings("modules", self.modules))
        if not self.modules:
            raise ValueError(f"adapter {self.name!r}: modules is empty")
        _check_target(self.target)
        if ":" not in self.target:
            raise ValueError(f"target must be 'package.module:function', not {self.target!r}")


class Hooks:
    """The hooks that a plugin may implement, each marked with ``flashot_backends.plugins.hookimpl``."""

    @hookspec
    def flashot_register_kernels(self) -> list[KernelSpec]:  # type: ignore[empty-body]
        """Return the kernels of this plugin."""

    @hookspec
    def flashot_register_adapters(self) -> list[AdapterSpec]:  # type: ignore[empty-body]
        """Return the adapters of this plugin."""


def _check_name(field: str, value: str) -> None:
    if not isinstance(value, str) or not _NAME.match(value):
        raise ValueError(f"{field} must be lower-case letters, digits, '-', '_' or '.', not {value!r}")


def _check_target(target: str) -> None:
    if not isinstance(target, str) or not _TARGET.match(target):
        raise ValueError(f"target must be 'package.module' or 'package.module:attribute', not {target!r}")


def _strings(field: str, values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{field} must be a collection of strings, not {values!r}")
    return tuple(values)
