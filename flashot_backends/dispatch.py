"""Which kernel serves this call, and why not the others."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from .config import Settings, settings, suggestion
from .plugins.manager import registry
from .plugins.specs import KernelSpec

logger = logging.getLogger("flashot_backends")


class NotApplicable(Exception):
    """A kernel does not apply to a request; the message is the reason. The one class that means so."""


class BackendError(ValueError):
    """A kernel asked for by name is unknown or does not apply, or none applies. The message gives every reason."""


class _Candidate(NamedTuple):
    name: str
    kernel: Any  # None when it can never serve this kind of request
    refusal: str | None
    counts: bool  # whether passing it over is a fallback: the user named it, or it is made for such arrays and devices


_lock = threading.RLock()
_plans: dict[tuple[Any, ...], list[_Candidate]] = {}
_kernels: dict[KernelSpec, Any] = {}
_said: set[tuple[str, ...]] = set()
_version = -1


def select(operation: str, request: Any, backend: str | Sequence[str] | None = None) -> Any:
    """Return the kernel that serves ``request``.

    Args:
        operation: ``"sinkhorn"``, ``"maxsim"``, ``"attention"`` or a plugin's own.
        request: has ``array`` (``"torch"``, ``"jax"``, ``"numpy"``), ``device`` (``"cpu"``, ``"cuda"``, ...) and what
            else the operation's kernels look at in ``applies``.
        backend: one kernel name, which must apply; or an ordered sequence of names; or ``None`` for the setting
            ``backend``, and for every kernel by priority where that is unset or names none for such arrays.

    Raises ``BackendError`` when a name is unknown, when the one named kernel does not apply, or when none does.
    """
    current = settings()
    names = current.backend if backend is None else backend if isinstance(backend, str) else tuple(backend)
    key = (operation, request.array, request.device, names, backend is None)
    plan = _plans.get(key) if _version == registry().version else None
    if plan is None:
        plan = _plan(key)
    for position, candidate in enumerate(plan):
        reason = candidate.refusal or _refusal(candidate.kernel, request)
        if reason is None:
            _say_chosen(operation, candidate.name, request)
            return candidate.kernel
        _pass_over(operation, plan[position:], reason, isinstance(names, str), current)
    raise BackendError(_nothing_applies(operation, request, plan))


def version() -> int:
    """A number that changes when kernels come or go."""
    return registry().version


def register(spec: KernelSpec, kernel: Any = None, owner: str = "registered at run time") -> None:
    """Add a kernel without a plugin; ``kernel`` is the object itself, else ``spec.target`` is imported when needed."""
    with _lock:
        registry().add([spec], owner)
        if kernel is not None:
            _kernels[spec] = kernel


def unregister(spec: KernelSpec) -> None:
    """Take a kernel out again."""
    with _lock:
        registry().remove(spec)
        _kernels.pop(spec, None)


def report() -> list[tuple[KernelSpec, str | None]]:
    """Return every kernel with the reason why it cannot serve anything on this machine, or ``None``."""
    specs = sorted(registry().kernels(), key=lambda spec: (spec.operation, -spec.priority))
    return [(spec, _missing(spec) or _no_device(spec) or _load(spec)[1]) for spec in specs]


def _plan(key: tuple[Any, ...]) -> list[_Candidate]:
    global _version
    operation, array, device, names, from_settings = key
    with _lock:
        version = registry().version
        if _version != version:
            _plans.clear()
        specs = _named(operation, array, names, from_settings)
        named = names is not None and all(spec.name in names for spec in specs)
        plan = [_candidate(spec, array, device, named) for spec in specs]
        _plans[key] = plan
        _version = version
        return plan


def _named(operation: str, array: str, names: Any, from_settings: bool) -> list[KernelSpec]:
    specs = registry().kernels(operation)
    if not specs:
        known = {spec.operation for spec in registry().kernels()}
        raise BackendError(f"no kernel is registered for the operation {operation!r}.{suggestion(operation, known)}")
    if names is None:
        return specs
    by_name = {spec.name: spec for spec in specs}
    names = (names,) if isinstance(names, str) else names
    elsewhere = {spec.name for spec in registry().kernels()} if from_settings else set()
    for name in names:
        if name not in by_name and name not in elsewhere:
            raise BackendError(f"{operation} has no kernel named {name!r}.{suggestion(name, by_name)}")
    chosen = [by_name[name] for name in names if name in by_name]
    if from_settings and not any(array in spec.arrays for spec in chosen):  # the setting is about something else
        said = f"the setting backend names no kernel for {array} arrays ({', '.join(names)})"
        _say(operation, array, *names, line=f"{operation}: {said}; by priority then")
        return specs
    return chosen


def _candidate(spec: KernelSpec, array: str, device: str, named: bool) -> _Candidate:
    mismatch = _mismatch(spec, array, device)
    refusal = mismatch or _missing(spec)
    kernel = None
    if refusal is None:
        kernel, refusal = _load(spec)
    return _Candidate(spec.name, kernel, refusal, named or mismatch is None)


def _mismatch(spec: KernelSpec, array: str, device: str) -> str | None:
    if array not in spec.arrays:
        return f"it computes with {_either(spec.arrays)} arrays, and these are {array} arrays"
    if spec.devices is not None and device not in spec.devices:
        return f"it runs on {_either(spec.devices)}, and the arrays are on {device}"
    return None


def _either(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))


def _missing(spec: KernelSpec) -> str | None:
    missing = [name for name in spec.requires if not _importable(name)]
    return f"{' and '.join(missing)} cannot be imported" if missing else None


def _importable(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _load(spec: KernelSpec) -> tuple[Any, str | None]:
    if spec not in _kernels:
        try:
            _kernels[spec] = _resolve(spec.target)
        except ImportError as error:
            return None, f"{spec.target} cannot be imported: {error}"
    return _kernels[spec], None


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attribute.split(".")):
        found = getattr(found, name)
    return found


def _no_device(spec: KernelSpec) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or "torch" not in spec.arrays or spec.devices != frozenset({"cuda"}) or torch.cuda.is_available():
        return None
    return "torch sees no CUDA device"


def _refusal(kernel: Any, request: Any) -> str | None:
    try:
        return kernel.applies(request)
    except NotApplicable as reason:
        return str(reason)


def _pass_over(operation: str, rest: list[_Candidate], reason: str, strict: bool, current: Settings) -> None:
    refused = rest[0]
    if strict:
        named = f"the kernel {refused.name!r} was asked for by name"
        raise BackendError(f"{operation}: {named} and does not apply: {reason}")
    if not refused.counts or current.fallback == "auto":
        _say(operation, refused.name, f"{operation}: passing over {refused.name}: {reason}")
    elif current.fallback == "error":
        raise BackendError(f"{operation}: the kernel {refused.name!r} does not apply (fallback='error'): {reason}")
    elif ("warned", operation, refused.name, reason) not in _said:
        _said.add(("warned", operation, refused.name, reason))
        warnings.warn(f"{operation}: passing over {refused.name}: {reason}", RuntimeWarning, stacklevel=4)


def _say_chosen(operation: str, name: str, request: Any) -> None:
    if logger.isEnabledFor(logging.INFO):
        _say(operation, name, request.array, request.device, line=f"{operation}: running on {name} ({request.device})")


def _say(*key: str, line: str | None = None) -> None:
    if key not in _said and logger.isEnabledFor(logging.INFO):
        _said.add(key)
        logger.info("%s", line if line is not None else key[-1])


def _nothing_applies(operation: str, request: Any, plan: list[_Candidate]) -> str:
    reasons = [f"\n  {c.name}: {c.refusal or _refusal(c.kernel, request)}" for c in plan]
    tail = "".join(reasons) or "\n  backend names no kernel"
    return f"{operation}: no kernel applies to {request.array} arrays on {request.device}:{tail}"
