"""Launches: tile shapes from a table, and a thin way to start a kernel that was started before.

Shapes come from ``tuning.json`` by card class and size, and from its defaults elsewhere; nothing is searched at run
time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashot_backends.kernels import ahead
from flashot_backends.kernels.environment import plain_launches

KINDS = ("dot", "fma", "matrix")
PROCESSORS = 108  # assumed where no card can be asked
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Shape(NamedTuple):
    """A tile of pairs, the warps that share it, the depth of its pipeline, how many fit on a multiprocessor, and how
    many
    registers a thread may use for that (0: as the compiler likes)."""

    rows: int
    columns: int
    warps: int
    stages: int
    resident: int
    registers: int = 0


@functools.cache
def _tuning() -> dict[str, dict[str, Any]]:
    return json.loads(Path(__file__).with_name("tuning.json").read_text())  # type: ignore[no-any-return]


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    """The measured shapes: by card class, then by kind and size bucket."""
    return {card: {key: entry for key, entry in found.items() if key != "limits"} for card, found in _tuning().items()}


@functools.cache
def limit(name: str, device: torch.device) -> float:
    """A measured number: up to which size a way is the quicker one, or what something costs in seconds."""
    found = (_tuning().get(card, {}).get("limits", {}) for card in (card_class(device), "default"))
    return float(next(limits[name] for limits in found if name in limits))


@functools.cache
def named_shape(name: str, device: torch.device) -> Shape:
    """The tile of a launch that comes in one size: the card's own entry, or the default's."""
    found = (table().get(card, {}) for card in (card_class(device), "default"))
    return Shape(*next(entries[name] for entries in found if name in entries))


def launch_shape(kind: int, dimension: int, rows: int, device: torch.device, transposed: bool = False) -> Shape:
    """The tile for one update of so many rows (of the whole batch): the card's own entry, or the default's."""
    name = f"{KINDS[kind]}-{dimension_bucket(kind, dimension, transposed)}"
    for card in (card_class(device), "default"):
        entries = table().get(card, {})
        for key in (f"{name}-{size_bucket(rows)}", name):
            if key in entries:
                return Shape(*entries[key])
    raise KeyError(f"tuning.json has no default for {name}")


def dimension_bucket(kind: int, dimension: int, transposed: bool) -> str:
    """Coordinates, in classes; for a matrix, whether its rows or its columns lie together."""
    if kind == 2:
        return "columns" if transposed else "rows"
    classes = ((3, "3"), (8, "8")) if kind == 1 else ((32, "32"), (64, "64"), (128, "128"), (1 << 30, "wide"))
    return next(name for limit, name in classes if dimension <= limit)


def size_bucket(rows: int) -> str:
    """Rows of the whole batch, in classes."""
    return "small" if rows <= 6000 else "large" if rows <= 20_000 else "huge"


@functools.cache
def card_class(device: torch.device) -> str:
    """The table's name for a card."""
    if device.type != "cuda":
        return "default"
    name = torch.cuda.get_device_name(device).lower()
    return next((card for card in table() if card in name), "default")


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a card."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


@functools.cache
def splits_for(shape: Shape, blocks: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts to cut the columns, and how many tiles each takes.

    A grid fills the card in waves, and the last wave should be full; every part costs a partial sum and a start.
    """
    slots = processors(device) * shape.resident
    tiles = -(-columns // shape.columns)
    best: tuple[float, int, int] = (float("inf"), 1, tiles)
    for splits in range(1, min(tiles, 64) + 1):
        each = -(-tiles // splits)
        used = -(-tiles // each)
        waves = -(-blocks * used // slots)
        best = min(best, (waves * (each + 1.5), used, each))
    return best[1], best[2]


_started: dict[Any, Any] = {}
_one_at_a_time = threading.RLock()  # compiling together changes how Triton reads
_recorded: ContextVar[list[Any] | None] = ContextVar("flashot_sinkhorn_launches", default=None)


def launch(
    kernel: Any, programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], options: Any, variant: Any = None,
) -> None:
    """Start ``kernel``; from the second time on without looking at its arguments again.

    ``constants`` are the trailing compile-time parameters, in order; ``options`` is a tuple of pairs. Integers have
    declared types; ``variant`` tells whatever else the compiled code depends on: dtypes, and pointers that may not be
    aligned.
    """
    Launch(kernel, programs, args, constants, options, variant)()


class Launch:
    """A launch that may be repeated with another number (``at``: its place among the arguments)."""

    __slots__ = ("args", "at", "constants", "kernel", "key", "options", "places", "programs", "ready", "start")

    def __init__(
        self, kernel: Any, programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], options: Any,
        variant: Any = None, at: int = -1,
    ):
        self.kernel, self.programs, self.args, self.constants, self.options = kernel, programs, args, constants, options
        self.key = (id(kernel), -1 if INTERPRETED else torch._C._cuda_getDevice(), constants, options, variant)
        self.at = at
        self.start: Any = None
        self.ready: list[Any] = []
        self.places: list[tuple[int, str]] = []

    @property
    def repeatable(self) -> bool:
        """Whether its arguments are laid out, for any number of launches."""
        return bool(self.programs) and (self.start is not None or self._look_up())

    def detach(self, names: dict[int, str]) -> list[Any]:
        """Let go of the arguments: return those that stay, and remember the places of those with a name (by id)."""
        first = len(self.ready) - len(self.args) - len(self.constants)
        self.places = [(first + k, names[id(arg)]) for k, arg in enumerate(self.args) if id(arg) in names]
        stay = [arg for arg in self.args if hasattr(arg, "data_ptr") and id(arg) not in names]
        self.args = ()
        return stay

    def attach(self, addresses: dict[str, int]) -> None:
        """Put other addresses where the named arguments were."""
        for place, name in self.places:
            self.ready[place] = addresses[name]

    def __call__(self, number: int | None = None) -> None:
        """Start it."""
        if self.programs == 0:
            return
        if self.start is None and not self._look_up():
            self._start_first(number)
            return
        if number is not None:
            self.ready[self.at] = number
        self.start(*self.ready)

    def _look_up(self) -> bool:
        """Find what was compiled before, and lay its arguments out: pointers as numbers, which nothing looks into."""
        started = None if _recorded.get() is not None else _started.get(self.key)
        if started is None:
            return False
        pointers = [arg if isinstance(arg, int | float) else arg.data_ptr() for arg in self.args]
        stream = torch._C._cuda_getCurrentRawStream(self.key[1])
        head = (self.programs, 1, 1, stream, *started.head)
        self.ready = [*head, *pointers, *self.constants]
        self.start, self.at = started.start, self.at + len(head)
        return True

    def _start_first(self, number: int | None) -> None:
        args = self.args if number is None else (*self.args[: self.at], number, *self.args[self.at + 1 :])
        recorded = _recorded.get()
        if recorded is not None:
            recorded.append((self.kernel, args, self.constants, self.options))
            return
        compiled = self.kernel[(self.programs,)](*args, *self.constants, **dict(self.options))
        if not INTERPRETED and _thin(compiled):
            _started[self.key] = _Started(compiled)


def compiling() -> bool:
    """Whether launches are recorded at present, not made."""
    return _recorded.get() is not None


class _Started:
    """A compiled kernel's launcher, and what goes between the grid and its arguments."""

    __slots__ = ("head", "start")

    def __init__(self, compiled: Any):
        run = compiled.run
        kinds: tuple[Any, ...] = ()
        self.start = run
        if _version() == (3, 6):  # its Python half only looks for scratch space, and ``_thin`` knows there is none
            self.start, kinds = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self.head = (compiled.function, *kinds, compiled.packed_metadata, None, None, None)


def compile_once(ready: set[Any], key: Any, work: Callable[[], Any]) -> None:
    """Compile the kernels of some work together, unless that was done before, or a graph is captured."""
    if key in ready or torch.cuda.is_current_stream_capturing():
        return
    with _one_at_a_time:
        if key not in ready:
            compile_together(work)
            ready.add(key)


def compile_together(work: Callable[[], Any]) -> None:
    """Go through ``work`` without starting anything, then compile all the kernels it would start, side by side.

    Most of compiling is spent where Python's lock is free, but for reading the kernel's Python code. So kernels are
    read one after the other, the longest first, and meanwhile the C compiler builds launchers.
    """
    ahead.begin()
    with _one_at_a_time, ThreadPoolExecutor(max_workers=16) as others, ThreadPoolExecutor(max_workers=16) as pool:
        calls: list[Any] = []
        token = _recorded.set(calls)
        try:
            work()
        finally:
            _recorded.reset(token)
        device = torch.cuda.current_device()
        distinct = {(kernel, constants, options): args for kernel, args, constants, options in calls}
        longest_first = sorted(distinct.items(), key=lambda item: -len(getattr(item[0][0], "src", "")))
        launchers = [others.submit(_build_launcher, kernel, args) for (kernel, *_), args in longest_first]

        def build(place: int, item: Any) -> None:
            (kernel, constants, options), args = item
            with turns.at(place):
                torch.cuda.set_device(device)
                compiled = kernel.warmup(*args, *constants, grid=(1,), **dict(options))
            launchers[place].result()
            getattr(compiled, "_init_handles", lambda: None)()

        ahead.wait()
        with _Turns(len(longest_first)) as turns, _no_collection(), ahead.lock_handed_on():
            list(pool.map(build, range(len(longest_first)), longest_first))


class _Turns:
    """Lets threads turn Python code into Triton's one after the other; together all would be as late as the last."""

    def __init__(self, count: int):
        self.read = [threading.Event() for _ in range(count)]
        self.mine = threading.local()

    def __enter__(self) -> _Turns:
        from triton.compiler.compiler import ASTSource

        self.plain = plain = ASTSource.make_ir

        def make_ir(*args: Any, **options: Any) -> Any:
            try:
                return plain(*args, **options)
            finally:
                getattr(self.mine, "is_over", lambda: None)()

        ASTSource.make_ir = make_ir
        return self

    def __exit__(self, *_: object) -> None:
        from triton.compiler.compiler import ASTSource

        ASTSource.make_ir = self.plain

    @contextlib.contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Wait for one's turn, which is over when the code was read, or need not be."""
        if place:
            self.read[place - 1].wait()
        self.mine.is_over = self.read[place].set
        try:
            yield
        finally:
            self.read[place].set()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Leave the search for cyclic garbage until later: it goes through all that torch has in memory."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()


def _build_launcher(kernel: Any, args: tuple[Any, ...]) -> None:
    """Build what Triton 3.6 starts a kernel with, and leave it in Triton's cache: it depends on types alone."""
    with contextlib.suppress(Exception):  # another Triton: it builds one when the kernel is compiled
        from triton.backends.nvidia import driver
        from triton.runtime.jit import mangle_type

        numbers = len(kernel.params) - len(args)
        types = [one.annotation_type or mangle_type(arg) for arg, one in zip(args, kernel.params, strict=False)]
        driver.compile_module_from_src(
            src=driver.make_launcher({}, dict(enumerate([*types, *["constexpr"] * numbers])), None),
            name="__triton_launcher", library_dirs=driver.library_dirs(), include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )  # fmt: skip


def _thin(compiled: Any) -> bool:
    """Whether this Triton's launcher is the one that ``Launch`` knows, and no profiler wants to see launches."""
    if plain_launches() or not (3, 4) <= _version() <= (3, 6):
        return False
    run = compiled.run
    return not (getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0))


@functools.cache
def _version() -> tuple[int, ...]:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))
