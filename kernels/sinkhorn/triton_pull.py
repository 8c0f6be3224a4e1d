"""The way back through many softmins of the same costs, with few launches and one pass for the costs' own gradient."""

from __future__ import annotations

from torch import Tensor

from . import triton
from .launch import Shape, launch, splits_for

SLOTS, BYTES = 16, 32 << 20  # half steps of a direction that wait for the costs, and memory of both directions'
# By what gives the scores, and what is summed: weights alone, a few columns of values, or many.
SHAPES = {
    (triton.DOT, 0): Shape(128, 64, 4, 2, 2), (triton.DOT, 2): Shape(128, 64, 8, 2, 1),
    (triton.FMA, 0): Shape(32, 64, 4, 1, 4), (triton.FMA, 1): Shape(32, 64, 4, 1, 3),
    (triton.FMA, 2): Shape(64, 32, 4, 1, 3), (triton.MATRIX, 0): Shape(64, 64, 8, 1, 2),
}  # fmt: skip
WIDE = {0: Shape(64, 64, 4, 2, 3), 2: Shape(64, 64, 4, 2, 2)}  # of more than 64 coordinates
ENTRIES = Shape(32, 64, 4, 1, 4)


class Pulls:
    """Takes gradients by softmins of one operator's costs, in either direction; tells those by what they were of."""

    def __init__(self, op: triton.Fused, need_cost: bool):
        self.op, self.need_cost = op, need_cost
        rows, columns = op.prepared.rows, op.prepared.columns
        each = 12 * op.batch * (rows.blocks + columns.blocks) * triton.PAD
        self.slots = max(1, min(SLOTS, BYTES // each)) if need_cost else 1
        self.tapes = Tape(op, self.slots), Tape(op.T, self.slots)
        self.found: tuple[Tensor, ...] | None = None

    def pull(self, transposed: bool, log_weight: Tensor, given: Tensor, softmin: Tensor, gradient: Tensor) -> Tensor:
        """Σ_i P_ij gradient_i (B, m), with the plan of the softmin (B, n) of log_weight + given/ε (B, m)."""
        tape = self.tapes[transposed]
        with triton.on(self.op.device):
            slot = tape.set_down(log_weight, given, softmin, gradient)
            found = _pulled(tape.op.T, None, tape.plans(slot, slot + 1).turned)[0]
            if self.need_cost:
                tape.used += 1
                if tape.used == self.slots:
                    self._meet_costs()
        return found

    def cost(self) -> tuple[Tensor, ...]:
        """The gradients by the costs' tensors, of all that was pulled."""
        with triton.on(self.op.device):
            if self.found is None or any(tape.used for tape in self.tapes):
                self._meet_costs()
        assert self.found is not None
        return self.found

    def _meet_costs(self) -> None:
        op = self.op
        here, there = (tape.plans(0, tape.used) for tape in self.tapes)
        for tape in self.tapes:
            tape.used = 0
        if op.cost.matrix is not None:
            self.found = (_entries(op, here, there, self.found),)
            return
        x, y = op.streamed.x.contiguous(), op.streamed.y.contiguous()  # type: ignore[attr-defined]
        found = []
        for own, points, values, plans in ((op, x, y, (here, there.turned)), (op.T, y, x, (there, here.turned))):
            sums, products = _pulled(own, values, *plans)
            assert products is not None
            found.append(2 * (points * sums[:, :, None] - products))
        if self.found is not None:
            found = [one + more for one, more in zip(self.found, found, strict=True)]
        self.found = tuple(found)


class Plans:
    """Some half steps of a direction: r, c (T, B, padded), and weights by row, or by column where they are turned."""

    def __init__(self, rows: Tensor, columns: Tensor, weights: Tensor, by_column: bool = False):
        self.rows, self.columns, self.weights, self.by_column = rows, columns, weights, by_column

    @property
    def turned(self) -> Plans:
        """The same plans, as the operator of the other direction sees them."""
        return Plans(self.columns, self.rows, self.weights, not self.by_column)


class Tape:
    """Half steps of one direction that wait."""

    def __init__(self, op: triton.Fused, slots: int):
        rows, columns = op.prepared.rows, op.prepared.columns
        self.op, self.used = op, 0
        self.rows, self.weights = op.new(2, slots, op.batch, rows.blocks * triton.PAD).unbind()
        self.columns = op.new(slots, op.batch, columns.blocks * triton.PAD)

    def plans(self, first: int, last: int) -> Plans:
        """Those in some slots."""
        return Plans(self.rows[first:last], self.columns[first:last], self.weights[first:last])

    def set_down(self, log_weight: Tensor, given: Tensor, softmin: Tensor, gradient: Tensor) -> int:
        """Note a half step; return its slot."""
        from .triton_pull_kernels import set_down

        op, slot = self.op, self.used
        rows, columns, epsilon = op.prepared.rows, op.prepared.columns, op.exact_epsilon
        vectors = tuple(part.contiguous() for part in (log_weight, given, softmin, gradient))
        programs = rows.blocks + columns.blocks
        args = (
            *vectors, epsilon, rows.half_norm, columns.half_norm, self.rows[slot], self.columns[slot],
            self.weights[slot], programs, rows.length, columns.length, rows.blocks, columns.blocks, epsilon.stride(0),
        )  # fmt: skip
        constants = (op.prepared.kind, triton.BLOCK)
        variant = tuple(part.data_ptr() % 16 for part in (*vectors, epsilon))
        launch(set_down, programs * op.batch, args, constants, (("num_warps", 4),), variant)
        return slot


def _sorted(op: triton.Fused, plans: tuple[Plans, ...]) -> tuple[list[Tensor], tuple[int, int]]:
    """Pointers and numbers of plans with weights by row, then by column; nobody looks at those of no plan."""
    none = Plans(op.prepared.slopes, op.prepared.slopes, op.prepared.slopes)
    by_row, by_column = (next((one for one in plans if one.by_column == which), none) for which in (False, True))
    parts = [part for one in (by_row, by_column) for part in (one.rows, one.columns, one.weights)]
    return parts, tuple(0 if one is none else len(one.rows) for one in (by_row, by_column))  # type: ignore[return-value]


def _pulled(op: triton.Fused, values: Tensor | None, *plans: Plans) -> tuple[Tensor, Tensor | None]:
    """Row sums of W, (B, n), and W V (B, n, k) if there are values (B, m, k)."""
    from .triton_pull_kernels import pull

    prepared = op.prepared
    rows, columns = prepared.rows, prepared.columns
    parts, counts = _sorted(op, plans)
    width = 0 if values is None else values.shape[-1]
    across = width if width <= triton.NARROW else min(triton.WIDEST, max(16, 1 << (width - 1).bit_length()))
    what = 0 if not width else 1 if width <= triton.NARROW else 2
    shape = WIDE[what] if prepared.kind == triton.DOT and prepared.width > 64 else SHAPES[prepared.kind, what]
    blocks_of_rows, slices = -(-rows.length // shape.rows), -(-width // across) if across > triton.NARROW else 1
    splits, tiles = splits_for(shape, blocks_of_rows * slices * op.batch, columns.length, op.device)
    sums, out = op.new(splits, op.batch, rows.length), op.new(splits, op.batch, rows.length, width)
    programs = blocks_of_rows * slices * splits
    given = sums if values is None else values
    args = (
        rows.first, rows.second, columns.first, columns.second, *parts, given, sums, out, prepared.slopes, *counts,
        programs, splits, tiles, op.batch, rows.length, columns.length, width, rows.blocks, columns.blocks,
        prepared.width // 64, columns.length * width, op.batch * rows.blocks * triton.PAD,
        op.batch * columns.blocks * triton.PAD, prepared.batch_stride, *triton.strides(prepared),
    )  # fmt: skip
    constants = (*op.constants, shape.rows, shape.columns, across, shape.stages)
    variant = (prepared.variant, *(part.data_ptr() % 16 for part in (*parts, given, sums, out)))
    options = (("num_warps", shape.warps), ("num_stages", shape.stages))
    launch(pull, programs * op.batch, args, constants, options, variant)
    if splits > 1:
        return sums.sum(0), out.sum(0) if width else None
    return sums[0], out[0] if width else None


def _entries(op: triton.Fused, here: Plans, there: Plans, before: tuple[Tensor, ...] | None) -> Tensor:
    """W (B, n, m) of half steps along rows and along columns, added to what was there before."""
    from .triton_pull_kernels import pull_entries

    prepared = op.prepared
    rows, columns = prepared.rows, prepared.columns
    parts, counts = _sorted(op, (here, there.turned))
    out = op.new(op.batch, rows.length, columns.length) if before is None else before[0]
    programs = -(-rows.length // ENTRIES.rows) * -(-columns.length // ENTRIES.columns)
    args = (
        rows.first, *parts, out, prepared.slopes, *counts, int(before is not None), programs, rows.length,
        columns.length, rows.blocks, columns.blocks, op.batch * rows.blocks * triton.PAD,
        op.batch * columns.blocks * triton.PAD, prepared.batch_stride, *triton.strides(prepared),
    )  # fmt: skip
    constants = (*op.constants, ENTRIES.rows, ENTRIES.columns)
    variant = (prepared.variant, *(part.data_ptr() % 16 for part in (*parts, out)))
    options = (("num_warps", ENTRIES.warps), ("num_stages", ENTRIES.stages))
    launch(pull_entries, programs * op.batch, args, constants, options, variant)
    return out
