"""The few lines of PEP 440 that a tested range such as ``">=0.9,<0.10"`` needs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

_RELEASE = re.compile(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|~=|>|<)\s*(\d+(?:\.\d+)*)(\.\*)?\s*\Z")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: ``"0.9.7.post1"`` gives (0, 9, 7). ``ValueError`` without any."""
    match = _RELEASE.match(version)
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    return tuple(int(part) for part in match[1].split("."))


def within(version: str, specifier: str) -> bool:
    """Return whether ``version``, by its release numbers alone, is in the comma-separated ``specifier``."""
    return all(_holds(release(version), clause) for clause in specifier.split(",") if clause.strip())


def _holds(given: tuple[int, ...], clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        raise ValueError(f"{clause.strip()!r} is not a version clause such as '>=1.2'")
    sign, wanted = match[1], release(match[2])
    if sign == "~=":
        return _padded(given, wanted)[0] >= wanted and given[: len(wanted) - 1] == wanted[:-1]
    if match[3]:  # ==1.2.* and !=1.2.*
        given = given[: len(wanted)]
    return _COMPARE[sign](*_padded(given, wanted))


def _padded(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = max(len(left), len(right))
    return left + (0,) * (size - len(left)), right + (0,) * (size - len(right))
