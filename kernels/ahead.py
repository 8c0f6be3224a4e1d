"""What Triton does once in a process before it compiles anything, done beside other work.

It reads all of itself, to know what the same Triton compiled before, and has the C compiler build its link to the
card's driver: 0.4 s each, or more, in which Python's lock is mostly free.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor


@functools.cache
def begin() -> tuple[Future[None], ...]:
    """Start it, unless that was done before."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ()
    try:
        import triton  # noqa: F401  (here: two threads that import parts of it can each see the other's half done)
    except Exception:  # whatever is wrong with it, dispatch says so to who needs it
        return ()
    pool = ThreadPoolExecutor(2, "flashot-ahead")
    works = tuple(pool.submit(work) for work in (_link, _key))
    pool.shutdown(wait=False)
    return works


def wait() -> None:
    """Go on when it is done; whatever is wrong shows when a kernel is compiled."""
    for work in begin():
        work.result()


_count = threading.Lock()
_hasty, _before = 0, 0.0  # who wants the lock handed on at present, and how it was before


@contextlib.contextmanager
def lock_handed_on() -> Iterator[None]:
    """Who waits for Python's lock gets it soon: who often lets go of it would wait 5 ms each time for who does not."""
    global _hasty, _before
    with _count:
        if _hasty == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, 2e-4))
        _hasty += 1
    try:
        yield
    finally:
        with _count:
            _hasty -= 1
            if _hasty == 0:
                sys.setswitchinterval(_before)


def _link() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime import driver

        driver.active.get_current_device()


def _key() -> None:
    with contextlib.suppress(Exception), lock_handed_on():
        try:
            from triton.runtime.cache import triton_key
        except ImportError:  # before Triton 3.5
            from triton.compiler.compiler import triton_key
        triton_key()
