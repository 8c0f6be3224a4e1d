"""One loop of updates on the card: its state, its launches, and how they are run once more.

A loop of a layout that was seen before runs in the buffers and by the launches of the earlier one: only the addresses
of what was given and of what comes out are exchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import triton
from .launch import INTERPRETED, Launch, compiling, processors

Inspect = Callable[[dict[str, float]], None]
MOST_LOOPS, MOST_BYTES = 8, 64 << 20  # loops that are kept, and how large the buffers of one may be
GIVEN = ("epsilon", "a", "b", "start")  # beside the cost
OFFSETS = ("alpha", "beta")
RESULTS = ("f", "g", "iterations", "error", "converged", "errors")


class Control(NamedTuple):
    """When to look, when to stop, and how far to relax."""

    max_iterations: int
    tolerance: float
    check_every: int
    squared: int  # whether the error is the norm "l2"
    gap: float  # 1 for plain iterations

    @property
    def looks(self) -> int:
        """Looks at the error that there can be."""
        return 1 - (1 - self.max_iterations) // self.check_every

    def looked_at(self, iteration: int) -> bool:
        """Whether some problem's error may be looked at after this iteration."""
        return (iteration - 1) % self.check_every == 0 or iteration == self.max_iterations


class Vectors:
    """Base-2 potentials, biases and partial sums of a batch, and the launches that alternate on them."""

    steady = False  # whether factors are those of a stage of annealing
    control: Control
    done: Tensor
    gaps: Tensor
    column_gaps: Tensor  # of column updates
    cycles: Tensor
    penalty: Tensor

    def __init__(self, op: triton.Fused, offsets: tuple[Tensor, Tensor] | None, epsilon: Tensor):
        rows, columns, batch = op.prepared.rows, op.prepared.columns, op.batch
        self.log_a, self.row_bias, self.u, self.rest = op.new(4, batch, rows.blocks * triton.PAD).unbind()
        self.log_b, self.column_bias, self.ratio, *self.v = op.new(5, batch, columns.blocks * triton.PAD).unbind()
        # What potentials lack of those that count where marginals may be missed: norms, and offsets where there are.
        self.offset, self.lacks = offsets is not None, (rows.half_norm, columns.half_norm)
        self.lay: tuple[Launch, ...] = ()
        if offsets is not None:
            self.lacks = op.new(batch, rows.blocks * triton.PAD), op.new(batch, columns.blocks * triton.PAD)
            parts = zip((rows, columns), offsets, self.lacks, strict=True)
            self.lay = tuple(_lay(op, side, offset, epsilon, lack) for side, offset, lack in parts)

    def _steps(self, op: triton.Fused) -> tuple[Launch, tuple[Any, ...], Launch]:
        """The first column update; what iteration 1, even and odd ones launch, as a tuple with places 1, 2, 3; and a
        row update alone."""
        rows, columns, most = triton.Update(op), triton.Update(op.T), self.control.max_iterations
        paced, v = (self.cycles, self.penalty), self.v
        row_lack, column_lack = self.lacks if self.offset else (None, None)
        ends = (self.column_bias, self.ratio, self.done, self.column_gaps, *paced)
        begin = columns.bind(self.row_bias, v[1], self.log_b, v[1], *ends, 0, 1, lack=column_lack)
        forth, back = (
            columns.bind(self.row_bias, v[i], self.log_b, v[1 - i], *ends, most, 1, False, self.steady, column_lack)
            for i in (1, 0)
        )
        to_rows = (
            self.column_bias, self.u, self.log_a, self.u, self.row_bias, self.rest, self.done, self.gaps, *paced, most,
            0,
        )  # fmt: skip
        again = rows.bind(*to_rows, False, self.steady, row_lack)
        first = InTurn(again if self.steady else rows.bind(*to_rows, lack=row_lack), forth)
        if triton.Strips.fit(op):
            strips = triton.Strips(op)
            return begin, (None, first, strips.bind(self, v[0], v[1]), strips.bind(self, v[1], v[0])), again
        return begin, (None, first, InTurn(again, back), InTurn(again, forth)), again

    def _translate(self, op: triton.Fused) -> Launch:
        """What moves f up and g down before a look, where marginals may be missed."""
        from .triton_kernels import translate

        rows, columns = op.prepared.rows, op.prepared.columns
        tensors = (
            self.u, self.v[0], self.log_a, self.log_b, self.row_bias, self.column_bias, *self.lacks, self.penalty,
            self.done, self.cycles,
        )  # fmt: skip
        numbers = (
            0, self.control.max_iterations, rows.length, columns.length, rows.blocks, columns.blocks, self.v[0].numel(),
        )  # fmt: skip
        constants = (self.lacking(op), 1024)
        return Launch(translate, op.batch, (*tensors, *numbers), constants, (("num_warps", 4),), at=len(tensors))

    def lacking(self, op: triton.Fused) -> bool:
        """Whether potentials lack something of those that count."""
        return self.offset or op.prepared.kind == triton.DOT


def _lay(op: triton.Fused, side: triton.Side, offset: Tensor, epsilon: Tensor, out: Tensor) -> Launch:
    """The launch that finds what potentials of a side lack."""
    from .triton_kernels import lack

    args = (offset, epsilon, side.half_norm, out, side.blocks, side.length, *offset.stride(), epsilon.stride(0))
    constants, variant = (op.prepared.kind, triton.BLOCK), tuple(p.data_ptr() % 16 for p in args[:2])
    return Launch(lack, side.blocks * op.batch, args, constants, (("num_warps", 4),), variant)


class Loop(Vectors):
    """One loop's state on the card, what it counts and notes, and all that it launches."""

    def __init__(
        self, op: triton.Fused, a: Tensor, b: Tensor, f: Tensor, control: Control, penalty: Tensor | None = None,
        offsets: tuple[Tensor, Tensor] | None = None,
    ):  # fmt: skip
        super().__init__(op, offsets, op.exact_epsilon)
        self.control, self.batch, self.columns, self.device = control, op.batch, op.columns, op.device
        self.given = dict(zip(GIVEN, (op.exact_epsilon, *map(in_rows, (a, b)), f), strict=True))
        self.of_matrix = op.cost.matrix is not None
        self.given |= {"M": op.cost.matrix} if self.of_matrix else {"x": op.cost.x, "y": op.cost.y}
        self.outputs = new_outputs(op.batch, op.rows, op.columns, control.looks, op.device)
        self.notes, *notes = _zeros(op.device, op.batch)
        self.seen, self.done, self.iterations, self.gaps, self.cycles, binding = notes
        self.turns = op.zeros(op.batch)
        self.penalty = binding if penalty is None else penalty
        self.given |= {} if penalty is None else {"penalty": penalty}
        self.given |= {} if offsets is None else dict(zip(OFFSETS, offsets, strict=True))
        # A matrix that is read as it lies has nothing prepared, and no flags of bad coordinates; of zeros we have some.
        self.scratch = self.done if op.prepared.scratch is None else op.prepared.scratch
        self.slopes = op.prepared.slopes
        tile = triton.fitting_tile(op, control.max_iterations) if penalty is None else None
        # Elsewhere the first potentials tell of every cost; what takes one launch is looked through before it.
        looks_through = tile is not None and self.of_matrix
        self.preparation, self.begin = op.prepared.launches, self._start(op, looks_through)
        self.end = self._finish(op, tile is None)
        self.whole: Launch | None = None
        if tile is not None:
            self.whole = self._resident(op, tile)
        else:
            # With a look at every iteration the columns wait for it, where it says whether the next one is translated.
            waits = penalty is not None and control.check_every == 1 and control.gap < 1
            self.column_gaps = torch.ones_like(self.gaps) if waits else self.gaps
            self.first, self.steps, _ = self._steps(op)
            self.check = self._check(op)
            self.translate = None if penalty is None else self._translate(op)
            self.settle = self._settle(op) if waits else None
        # What is fetched of a matrix in many launches lies elsewhere each time.
        self.of_values = Refetch() if self.whole is not None or not self.of_matrix else Fetch()
        self.of_ends = Fetch(), Fetch()
        self.kept: list[Any] = []

    @property
    def launches(self) -> list[Launch]:
        """Everything that is ever launched, once each."""
        inner = [self.whole] if self.whole is not None else [self.first, *self.steps[1:], self.check]
        inner += [] if self.whole is not None else [one for one in (self.translate, self.settle) if one is not None]
        found = (*self.preparation, self.begin, *self.lay, *(one for step in inner for one in _single(step)), self.end)
        return list(dict.fromkeys(found))

    def run(self, inspect: Inspect) -> None:
        """Launch everything but the preparation of the costs, and hand what was seen of the values to ``inspect``."""
        self.begin()
        for one in self.lay:
            one()
        if self.whole is None:
            self.alternate(inspect)
            self.end()
            return
        report = self.report(inspect)
        self.whole()
        self.end()
        report()

    def keep(self) -> bool:
        """Make ready to run again: let go of what was given and returned. False where that cannot be."""
        if not all(one.repeatable for one in self.launches):
            return False
        named = self.given | dict(zip(RESULTS, self.outputs, strict=True))
        names = {id(tensor): name for name, tensor in named.items()}
        self.kept = [part for one in self.launches for part in one.detach(names)]
        self.kept += [self.notes, self.scratch]
        self.given, self.outputs = {}, ()
        storages = (part.untyped_storage() for part in self.kept)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) <= MOST_BYTES

    def again(self, addresses: dict[str, int], inspect: Inspect) -> None:
        """Run once more, with these addresses of what is given and of the results."""
        for one in self.changing:
            one.attach(addresses)
        try:
            for one in self.preparation:
                one()
            self.run(inspect)
        except BaseException:
            self.of_values.settle()
            self.notes.zero_()  # what the last launch leaves zero, had it come to that
            self.scratch.zero_()
            raise

    @functools.cached_property
    def changing(self) -> list[Launch]:
        """The launches in which something changes from run to run."""
        return [one for one in self.launches if one.places]

    def _start(self, op: triton.Fused, looks_through: bool) -> Launch:
        from .triton_kernels import start

        prepared = op.prepared
        rows, columns = prepared.rows, prepared.columns
        epsilon, a, b, f = (self.given[name] for name in GIVEN)
        matrix = rows.half_norm if op.cost.matrix is None else op.cost.matrix
        looking = triton.lookers(op) if looks_through else 0
        programs = rows.blocks + columns.blocks + looking
        args = (
            a, b, f, epsilon, matrix, rows.half_norm, self.slopes, self.log_a, self.log_b, self.row_bias,
            self.column_bias, self.seen, self.scratch, self.gaps, self.cycles, self.outputs[5], self.penalty,
            self.control.gap, self.control.check_every, self.control.looks, programs, self.batch, rows.length,
            columns.length, rows.blocks, columns.blocks, a.stride(0), b.stride(0), *f.stride(), epsilon.stride(0),
            prepared.batch_stride, rows.stride, columns.stride,
        )  # fmt: skip
        variant = (matrix.dtype, *(tensor.data_ptr() % 16 for tensor in (a, b, f, epsilon, matrix)))
        constants = (prepared.kind, looks_through, triton.BLOCK)
        return Launch(start, programs * self.batch, args, constants, (("num_warps", 4),), variant)

    def report(self, inspect: Inspect, lowest: Tensor | None = None) -> Callable[[], None]:
        """Fetch what was seen of the values while the card goes on; the result hands it to ``inspect``.

        ``lowest`` is NaN or −inf where a matrix holds such costs, unless the first flag says so. While a CUDA graph is
        captured nothing can be fetched, and nothing is inspected.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return lambda: None
        seen = self.seen if lowest is None else torch.cat((self.seen, lowest.double().reshape(1)))
        self.of_values.begin(seen)

        def read() -> None:
            numbers = self.of_values.result()
            if not plainly_sound(numbers, self.batch):
                inspect(values_seen(numbers, self.batch, self.of_matrix))

        return read

    def alternate(self, inspect: Inspect) -> None:
        """Two launches an iteration, until all problems are done; the host looks one check behind the card."""
        control, polled = self.control, None
        self.first(0)
        # The first potentials have met every cost: NaN and −inf show in them, without another pass over a matrix.
        report = self.report(inspect, self.v[1][:, : self.columns].amin() if self.of_matrix else None)
        polls = control.tolerance > 0 and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        for k in range(1, control.max_iterations + 1):
            if self.translate is not None and control.looked_at(k):
                self.translate(k)
            self.steps[min(k, 2 + k % 2)](k)
            if k == 1:
                report()
            if control.looked_at(k):
                self.check(k)
                if self.settle is not None:
                    self.settle(k)
                if polled is not None and all(polled.result()):
                    break
                if polls:
                    polled = self.of_ends[0] if polled is not self.of_ends[0] else self.of_ends[1]
                    polled.begin(self.done)

    def _check(self, op: triton.Fused) -> Launch:
        from .triton_kernels import check

        columns, control, b = op.prepared.columns, self.control, self.given["b"]
        tensors = (
            self.ratio, b, self.done, self.iterations, self.outputs[3], self.gaps, self.cycles, self.outputs[5],
            self.penalty, self.v[0], self.lacks[1],
        )  # fmt: skip
        numbers = (
            0, control.max_iterations, control.check_every, control.looks, self.batch, control.tolerance,
            columns.length, columns.blocks, b.stride(0), control.squared, self.v[0].numel(),
        )  # fmt: skip
        variant, options = b.data_ptr() % 16, (("num_warps", 4),)
        constants = (self.lacking(op), 1024)
        return Launch(check, self.batch, (*tensors, *numbers), constants, options, variant, at=len(tensors))

    def _settle(self, op: triton.Fused) -> Launch:
        """What relaxes columns after a look."""
        from .triton_kernels import settle

        columns, batch = op.prepared.columns, op.batch
        tensors = (
            self.v[0], self.log_b, self.column_bias, self.gaps, self.cycles, op.new(2, batch), self.done,
        )  # fmt: skip
        numbers = (0, self.control.max_iterations, columns.blocks, batch, columns.length, self.v[0].numel())
        options, programs = (("num_warps", 4),), columns.blocks * batch
        return Launch(settle, programs, (*tensors, *numbers), (triton.BLOCK,), options, at=len(tensors))

    def _resident(self, op: triton.Fused, tile: triton.Tile) -> Launch:
        """The whole loop in one launch."""
        from .triton_kernels import resident

        prepared, control, b = op.prepared, self.control, self.given["b"]
        rows, columns = prepared.rows, prepared.columns
        tiles_q, tiles_k = -(-rows.length // tile.rows), -(-columns.length // tile.columns)
        sizes = (2 * tiles_k * rows.blocks * triton.PAD, 2 * tiles_q * columns.blocks * triton.PAD, tiles_k)
        words = torch.zeros(op.batch * sum(sizes), dtype=torch.int64, device=op.device)
        row_parts, column_parts, error_parts = words.split([op.batch * size for size in sizes])
        args = (
            rows.first, rows.second, columns.first, columns.second, self.row_bias, self.log_a, self.log_b, b,
            self.u, self.v[0], self.iterations, self.outputs[3], row_parts, column_parts, error_parts, self.turns,
            prepared.slopes, self.gaps, self.outputs[5], control.looks, op.batch, rows.length, columns.length, tiles_q,
            tiles_k, control.max_iterations, control.check_every, control.tolerance, rows.blocks, columns.blocks,
            b.stride(0), prepared.width // 64, prepared.batch_stride, *triton.strides(prepared), control.squared,
        )  # fmt: skip
        counts = (triton.FEW_TILES if tiles <= triton.FEW_TILES else triton.MOST_TILES for tiles in (tiles_q, tiles_k))
        constants = (*op.constants, tile.rows, tile.columns, *counts, 32 * tile.warps)
        options = [("num_warps", tile.warps), ("num_stages", 2)]
        if not INTERPRETED:
            options.append(("launch_cooperative_grid", True))
            if op.batch * tiles_q * tiles_k > processors(op.device) * tile.resident // 2:
                options.append(("maxnreg", triton.REGISTERS))
        variant = (prepared.variant, b.data_ptr() % 16)
        return Launch(resident, op.batch * tiles_q * tiles_k, args, constants, tuple(options), variant)

    def _finish(self, op: triton.Fused, alternates: bool) -> Launch:
        """Potentials in the unit of the cost, iterations, and whether the error is below the tolerance."""
        from .triton_kernels import finish

        rows, columns, epsilon = op.prepared.rows, op.prepared.columns, self.given["epsilon"]
        f, g, iterations, error, converged, _ = self.outputs
        other = self.v[0].numel() if alternates else 0
        args = (
            self.u, self.v[0], rows.half_norm, columns.half_norm, epsilon, self.iterations, error, f, g,
            iterations, converged, self.seen, self.scratch, self.done, self.turns, self.gaps, self.cycles,
            rows.blocks + columns.blocks, rows.length, columns.length, rows.blocks, columns.blocks, other,
            epsilon.stride(0), self.control.tolerance, self.batch,
        )  # fmt: skip
        variant, programs = epsilon.data_ptr() % 16, (rows.blocks + columns.blocks) * self.batch
        constants = (op.prepared.kind, triton.BLOCK)
        return Launch(finish, programs, args, constants, (("num_warps", 4),), variant)


class InTurn:
    """Two launches, one after the other, of the same iteration."""

    def __init__(self, first: Launch, then: Launch):
        self.first, self.then = first, then

    def __call__(self, iteration: int) -> None:
        """Launch both."""
        self.first(iteration)
        self.then(iteration)


def _single(step: Launch | InTurn) -> tuple[Launch, ...]:
    return (step.first, step.then) if isinstance(step, InTurn) else (step,)


def in_rows(weights: Tensor) -> Tensor:
    """Weights, those of a problem one after the other."""
    return weights if weights.stride(-1) == 1 else weights.contiguous()


class Fetch:
    """Copies a few numbers to the host while the card goes on."""

    def __init__(self) -> None:
        self.host: Tensor | None = None
        self.ready: Any = None

    def begin(self, found: Tensor) -> None:
        """Order the copy."""
        if found.device.type != "cuda":
            self.host = found.clone()
            return
        if self.host is None:
            self.host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            # Without its device named, torch asks the driver first whether there are any: up to a millisecond.
            self.stream, self.ready = torch.cuda.current_stream(found.device), torch.cuda.Event()
        self.host.copy_(found, non_blocking=True)
        self.ready.record(self.stream)

    def result(self) -> list[Any]:
        """Wait for them."""
        assert self.host is not None
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.tolist()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Where something went wrong: have no copy under way."""


class Refetch(Fetch):
    """Copies from one place, each waited for before the next: ordered of the driver itself, in a third of torch's time.

    Torch notes each copy, so that no pinned memory is given away under it; here it is ours until the copy is there.
    """

    orders: tuple[Callable[[], int], ...] = ()
    wait: Callable[[], int]

    def begin(self, found: Tensor) -> None:
        """Order the copy."""
        if not self.orders:
            super().begin(found)  # makes the event
            self._prepare(found)
            return
        for order in self.orders:
            _sound(order())

    def result(self) -> list[Any]:
        """Wait for them."""
        if not self.orders:
            return super().result()
        assert self.host is not None
        _sound(self.wait())
        return self.host.tolist()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Where something went wrong: have no copy under way."""
        if self.orders:
            self.wait()

    def _prepare(self, found: Tensor) -> None:
        driver = _driver()
        if found.device.type != "cuda" or driver is None:
            return
        assert self.host is not None
        event, stream = ctypes.c_void_p(self.ready.cuda_event), ctypes.c_void_p(self.stream.cuda_stream)
        places = ctypes.c_uint64(self.host.data_ptr()), ctypes.c_uint64(found.data_ptr())
        size = ctypes.c_size_t(found.numel() * found.element_size())
        self.kept = found
        self.orders = (
            functools.partial(driver.cuMemcpyAsync, *places, size, stream),
            functools.partial(driver.cuEventRecord, event, stream),
        )
        self.wait = functools.partial(driver.cuEventSynchronize, event)


@functools.cache
def _driver() -> Any:
    """The card's driver, whose functions return 0 where all is well; None where it goes by another name."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _sound(status: int) -> None:
    if status:
        torch.cuda.synchronize()  # which says what went wrong, if it was the card
        raise RuntimeError(f"the driver's error {status} on the way of a problem's values to the host")


_kept: dict[Any, Loop] = {}  # by layout and stream; who runs one takes it out


def layout(op: triton.Fused, others: tuple[Tensor, ...], control: Control) -> Any:
    """All that a loop's launches depend on but addresses; None where they are not to be repeated."""
    if op.device.type != "cuda" or compiling() or torch.cuda.is_current_stream_capturing():
        return None
    if others[1].stride(-1) != 1 or others[2].stride(-1) != 1:
        return None
    tensors = (*(part for part in op.cost[:3] if part is not None), *others)
    which = [id(part) for part in tensors]  # one tensor in two places is told from two tensors
    places = tuple([(part.shape, part.stride(), part.data_ptr() % 16, which.index(id(part))) for part in tensors])
    stream = torch._C._cuda_getCurrentRawStream(op.device.index)
    return places, tensors[0].dtype, op.device.index, stream, op.precision, control


def solve(
    op: triton.Fused, a: Tensor, b: Tensor, f: Tensor, control: Control, inspect: Inspect, reach: Tensor | None = None,
    offsets: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Run a loop, in the buffers of an earlier one of the same layout if there is one."""
    penalty = None if reach is None else penalties(reach, op.exact_epsilon, control)
    others = (op.exact_epsilon, a, b, f, *([] if penalty is None else [penalty]), *(offsets or ()))
    key = layout(op, others, control)
    loop = None if key is None else _kept.pop(key, None)
    if loop is None:
        loop = Loop(op, a, b, f, control, penalty, offsets)
        outputs = loop.outputs
        loop.run(inspect)
        if key is not None and loop.keep():
            _keep(key, loop)
            op.again = functools.partial(again, key, control.looks) if penalty is None else None
        return *outputs[:5], *outputs[5].unbind()
    outputs = new_outputs(op.batch, op.rows, op.columns, control.looks, op.device)
    addresses = {name: part.data_ptr() for name, part in zip((*GIVEN, "penalty", *OFFSETS), others, strict=False)}
    addresses |= {name: part.data_ptr() for name, part in zip(RESULTS, outputs, strict=True)}
    addresses |= {name: part.data_ptr() for name, part in zip("xyM", op.cost[:3], strict=True) if part is not None}
    try:
        loop.again(addresses, inspect)
    finally:
        _keep(key, loop)
    op.again = functools.partial(again, key, control.looks) if penalty is None else None
    return *outputs[:5], *outputs[5].unbind()


def penalties(reach: Tensor, epsilon: Tensor, control: Control) -> Tensor:
    """What the kernels are told of marginals that may be missed, (B, 8): see ``triton_kernels.SLACK``."""
    rate = epsilon[:, None] / reach.double()  # zero where binding
    slack = rate / (1 + rate)
    floor = (1 - (1 - slack).prod(-1, keepdim=True)).clamp(min=0).sqrt()
    floor = floor if control.gap < 1 else torch.zeros_like(floor)
    missed = torch.ones_like(floor)
    return torch.cat((slack, rate, floor, missed, 0 * missed, 0 * missed), -1).float()


def _keep(key: Any, loop: Loop) -> None:
    """Put a loop back for the next solve of this layout on this stream; the oldest make room."""
    _kept[key] = loop
    while len(_kept) > MOST_LOOPS:
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread takes some out
            _kept.pop(next(iter(_kept)), None)


def again(
    key: Any, looks: int, cost: tuple[Tensor, ...], others: tuple[Tensor, ...], sizes: tuple[int, int, int],
    inspect: Inspect,
) -> Results | None:
    """The solve of a layout that was kept, of (x, y) or (M,) and ε, a, b and f; None if its loop is not there now.

    Nothing is looked at but the values: the caller knows that everything else is as it was.
    """
    loop = _kept.pop(key, None)
    if loop is None:
        return None
    results = Results(sizes, looks, cost[0].device)
    addresses = results.addresses()
    names = ("x", "y") if len(cost) == 2 else ("M",)
    for name, part in zip((*names, *GIVEN), (*cost, *others), strict=True):
        addresses[name] = part.data_ptr()
    try:
        if torch._C._cuda_getDevice() == loop.device.index:
            loop.again(addresses, inspect)
        else:
            with triton.on(loop.device):
                loop.again(addresses, inspect)
    finally:
        _keep(key, loop)
    return results


class Results:
    """What a solve returns, in one allocation, as tensors when they are asked for."""

    def __init__(self, sizes: tuple[int, int, int], looks: int, device: torch.device):
        self.sizes, self.looks = sizes, looks
        self.starts, count = _starts(*sizes, looks)
        self.words = torch.empty(count, dtype=torch.int32, device=device)

    def addresses(self) -> dict[str, int]:
        """Where each result begins."""
        base = self.words.data_ptr()
        return {name: base + 4 * start for name, start in zip(RESULTS, self.starts, strict=True)}

    def tensors(self) -> tuple[Tensor, ...]:
        """f, g, iterations, error, converged; errors and gaps at every look."""
        batch, n, m = self.sizes
        f, g, iterations, error, converged, errors = (self.words[start:] for start in self.starts)
        real, whole, truth = torch.float32, torch.int64, torch.bool
        history = errors[: 2 * batch * self.looks].view(real).view(2, batch, self.looks)
        return (
            f[: batch * n].view(real).view(batch, n), g[: batch * m].view(real).view(batch, m),
            iterations[: 2 * batch].view(whole), error[:batch].view(real), converged[:batch].view(truth)[:batch],
            *history.unbind(),
        )  # fmt: skip


@functools.cache
def _starts(batch: int, n: int, m: int, looks: int) -> tuple[tuple[int, ...], int]:
    """Where each result begins, in words of 32 bits, and their number; each at a multiple of 16 bytes."""
    starts, count = [], 0
    for words in (batch * n, batch * m, 2 * batch, batch, batch, 2 * batch * looks):
        starts.append(count)
        count += -(-words // 4) * 4
    return tuple(starts), count


def new_outputs(batch: int, n: int, m: int, looks: int, device: torch.device) -> tuple[Tensor, ...]:
    """f, g, iterations, error, converged, and errors with gaps (2, B, looks), to be filled."""
    f, g = torch.empty(batch, n, device=device), torch.empty(batch, m, device=device)
    iterations = torch.empty(batch, device=device, dtype=torch.int64)
    converged = torch.empty(batch, device=device, dtype=torch.bool)
    error, errors = torch.empty(batch, device=device), torch.empty(2, batch, looks, device=device)
    return f, g, iterations, error, converged, errors


def _zeros(device: torch.device, batch: int) -> tuple[Tensor, ...]:
    """What a loop counts and notes, in one allocation, and that as a whole first.

    Values seen (float64); done and iterations (int32); per problem the gap and the last error (float32), the cycle and
    the last look (int32), and what is told of marginals that may be missed (float32): nothing, where they are binding.
    """
    sizes = (2 * (4 + 3 * batch), batch, batch, 2 * batch, 2 * batch, 8 * batch)
    whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    seen, *counts, gaps, cycles, penalty = whole.split(sizes)
    return whole, seen.view(torch.float64), *counts, gaps.view(torch.float32), cycles, penalty.view(torch.float32)


def plainly_sound(numbers: list[float], batch: int) -> bool:
    """Whether nothing about the numbers is worth a second look, whatever is accepted of them."""
    masses, rest = numbers[4 : 4 + 2 * batch], numbers[4 + 2 * batch :]  # ε, and the least entry of a matrix
    if any(numbers[:4]) or not min(masses) > 0 or not max(masses) < math.inf or not min(rest[:batch]) > 0:
        return False
    if not max(rest) < math.inf or not all(value > -math.inf for value in rest):
        return False
    return all(abs(other - one) <= 1e-6 * one for one, other in zip(masses[::2], masses[1::2], strict=True))


def values_seen(numbers: list[float], batch: int, matrix: bool) -> dict[str, float]:
    """What the kernels saw of the values, under the names that the operation judges them by."""
    flags, masses, epsilons = numbers[:4], numbers[4 : 4 + 2 * batch], numbers[4 + 2 * batch : 4 + 3 * batch]
    pairs = list(zip(masses[::2], masses[1::2], strict=True))
    nan = math.nan
    seen = {"epsilon": next((value for value in epsilons if not 0 < value < math.inf), epsilons[0])}
    if matrix:
        seen["M"] = nan if flags[0] else max(numbers[4 + 3 * batch :], default=0.0)
    else:
        seen |= {"x": nan if flags[0] else 0.0, "y": nan if flags[1] else 0.0}
    seen |= {"a": nan if flags[2] else 0.0, "b": nan if flags[3] else 0.0}
    seen |= {"mass of a": min(first for first, _ in pairs), "mass of b": min(second for _, second in pairs)}
    seen["mass"] = max(abs(second / first - 1) if first else nan for first, second in pairs)
    return seen
