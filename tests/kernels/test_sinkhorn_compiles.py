"""Every launch that a Hopper card would see, compiled for it on any machine: it compiles, and fits into registers.

The launches are those of the real code, recorded; nothing is repeated here of what arguments the kernels take.
"""

import gc
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="no Triton")

import triton as compiler  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402

from flashot_backends.kernels.sinkhorn import (  # noqa: E402
    launch,
    triton,
    triton_kernels,
    triton_loop,
    triton_pull,
    triton_stages,
)  # fmt: skip
from flashot_backends.kernels.sinkhorn.operator import Cost  # noqa: E402

if launch.INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
SHARED = 227 * 1024  # bytes of a multiprocessor that programs may share out among themselves
REGISTERS = 65536  # of a multiprocessor


class Launch:
    """One recorded launch: kernel, arguments, compile-time constants and options."""

    def __init__(self, kernel, args, constants, options):
        names = kernel.arg_names
        self.kernel, self.options = kernel, dict(options)
        self.constants = dict(zip(names[len(args) :], constants, strict=True))
        self.types, self.aligned = {}, []
        for name, value, parameter in zip(names, args, kernel.params, strict=False):
            tensor = isinstance(value, torch.Tensor)
            self.types[name] = f"*{TYPES[value.dtype]}" if tensor else parameter.annotation_type
            if tensor and value.data_ptr() % 16 == 0:
                self.aligned.append(names.index(name))

    @property
    def key(self):
        return self.kernel.__name__, *(tuple(part.items()) for part in (self.constants, self.types, self.options))

    def compile(self):
        names = self.kernel.arg_names
        source = ASTSource(
            self.kernel,
            signature={name: "constexpr" if name in self.constants else self.types[name] for name in names},
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(index,): [["tt.divisibility", 16]] for index in self.aligned},
        )
        return compiler.compile(source, target=HOPPER, options=self.options)


def record(monkeypatch, card, cost, batch=1, precision="high", work=None):
    """The launches of a solve on that card, resident if the problem is small enough; or of other work."""
    seen = {}

    def note(kernel, programs, args, constants, options, variant=None, at=-1):
        found = Launch(kernel, args, constants, options)
        seen[found.key] = found
        return lambda number=None: None

    for module in (triton, triton_pull):
        monkeypatch.setattr(module, "launch", note)
    for module in (triton, triton_loop, triton_stages):
        monkeypatch.setattr(module, "Launch", note)
    monkeypatch.setattr(launch, "card_class", lambda device: card)
    operator = triton.Fused(cost, torch.ones(batch, dtype=torch.float64), precision)
    n, m = operator.rows, operator.columns
    a, b, f = torch.ones(batch, n), torch.ones(batch, m), torch.zeros(batch, n)
    if work is not None:
        work(operator, f, torch.zeros(batch, m))
        return list(seen.values())
    operator.iterate(a, b, f, 2, 0.0, 1, "l1", 1.0, lambda seen: None)
    return list(seen.values())


def cost_of(kind, rows, columns=300):
    """Costs that ask for one entry of the table."""
    if kind in ("rows", "columns"):
        matrix = torch.zeros(1, rows, columns) if kind == "rows" else torch.zeros(1, columns, rows).mT
        return Cost(None, None, matrix)
    return Cost(torch.zeros(1, rows, kind), torch.zeros(1, columns, kind), None)


def usage(compiled, folder):
    """Registers and bytes of stack of every thread, from the assembler."""
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(compiler.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    text = subprocess.run([str(tool), "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK"))


def check(found, folder, programs=1, stack=0):
    compiled = found.compile()
    registers, spilled = usage(compiled, folder)
    threads = 32 * found.options.get("num_warps", 4)
    what = f"{found.kernel.__name__}{found.constants}: {registers} registers, {spilled} bytes spilled"
    assert spilled <= stack, what
    assert registers * threads * programs <= REGISTERS, what
    assert compiled.metadata.shared * programs <= SHARED, f"{what}, {compiled.metadata.shared} bytes shared"


LARGE = ["rows", 3, 64]
ALL = ["rows", "columns", 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 192]
SPILLED = 64  # bytes a thread of an update may spill: a few words outside of the loop
SPILLED_EIGHT = 80  # of a strip of eight coordinates, which has 27 scalars beside its numbers
SPILLED_RESIDENT = 800  # where scores fill the registers
SPILLED_MANY = 1800  # where only half of the registers may be used, and scores come from up to eight coordinates


def updates(monkeypatch, card, kind, rows):
    monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)
    return [one for one in record(monkeypatch, card, cost_of(kind, rows)) if one.kernel.__name__ == "update"]


@pytest.mark.parametrize("kind", LARGE, ids=str)
def test_updates_on_the_h200(monkeypatch, tmp_path, kind):
    """The two launches that every iteration of a large problem is made of."""
    found = [one for one in updates(monkeypatch, "h200", kind, 6001) if not one.constants["FIRST"]]
    assert found
    for one in found:
        check(one, tmp_path, stack=SPILLED)


@pytest.mark.slow
@pytest.mark.parametrize("card", launch.table())
@pytest.mark.parametrize("rows", [300, 6001, 20_001], ids=["small", "large", "huge"])
@pytest.mark.parametrize("kind", ALL, ids=str)
def test_updates_of_the_table(monkeypatch, tmp_path, card, rows, kind):
    """Every entry, and the first update too, which keeps a running maximum and may spill a little."""
    found = updates(monkeypatch, card, kind, rows)
    assert found
    for one in found:
        check(one, tmp_path, stack=2 * SPILLED if one.constants["FIRST"] else SPILLED)


tiles = pytest.mark.parametrize("tile", triton.TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}")


@tiles
@pytest.mark.parametrize("kind", ["rows", 3, 64])
def test_resident(monkeypatch, tmp_path, kind, tile):
    """As many programs as ``fitting_tile`` promises must fit on a multiprocessor at once, or the launch is refused."""
    monkeypatch.setattr(triton, "fitting_tile", lambda *_: tile)
    found = [one for one in record(monkeypatch, "h200", cost_of(kind, 50, 60)) if one.kernel.__name__ == "resident"]
    assert len(found) == 1
    assert found[0].options["launch_cooperative_grid"]
    many = tile is triton.TILES[-1]
    if many:
        found[0].options["maxnreg"] = triton.REGISTERS
    check(found[0], tmp_path, tile.resident if many else tile.resident // 2, SPILLED_MANY if many else SPILLED_RESIDENT)


@pytest.mark.slow
@tiles
@pytest.mark.parametrize("kind", ALL, ids=str)
def test_resident_of_every_kind(monkeypatch, tmp_path, kind, tile):
    test_resident(monkeypatch, tmp_path, kind, tile)


def check_strips(monkeypatch, folder, kind, columns):
    monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)
    monkeypatch.setattr(triton.Strips, "FEWEST", 0)
    monkeypatch.setattr(triton, "processors", lambda _: 132)
    found = {one.kernel.__name__: one for one in record(monkeypatch, "h200", cost_of(kind, 300, columns))}
    _, warps, together, _ = triton.Strips.SHAPES[triton.MATRIX if kind == "rows" else triton.FMA]
    spilled = SPILLED_EIGHT if kind == 8 else SPILLED
    check(found["strip"], folder, together * warps // found["strip"].options["num_warps"], spilled)
    check(found["gather"], folder, 3)


@pytest.mark.parametrize("kind", ["rows", 3])
def test_strips(monkeypatch, tmp_path, kind):
    """One exponential for both updates: what it holds fits into registers, and nothing of it is spilled to speak of."""
    check_strips(monkeypatch, tmp_path, kind, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [2000, 3000, 5000, 8000, 10_000, 12_000, 16_000])
@pytest.mark.parametrize("kind", [1, 3, 5, 8])
def test_strips_of_every_length(monkeypatch, tmp_path, kind, columns):
    if kind > 4 and columns > triton.Strips.LONG[triton.FMA]:
        pytest.skip("takes two passes")
    check_strips(monkeypatch, tmp_path, kind, columns)


@pytest.mark.parametrize(("kind", "columns", "fits"), [(5, 10_240, True), (5, 10_241, False), (4, 16_384, True)])
def test_which_rows_are_strips(monkeypatch, kind, columns, fits):
    monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)
    monkeypatch.setattr(triton.Strips, "FEWEST", 0)
    monkeypatch.setattr(triton, "processors", lambda _: 132)
    launched = {one.kernel.__name__ for one in record(monkeypatch, "h200", cost_of(kind, 300, columns))}
    assert ("strip" in launched) is fits


def stages(missed):
    """Two stages of annealing, all that they launch."""
    schedule = triton_stages.Schedule(2, 4.0, 10, 0.07)

    def work(operator, f, g):
        reach, offsets = (torch.ones(1, 2), (f, g)) if missed else (None, None)
        triton_stages.Stages(operator, torch.ones_like(f), torch.ones_like(g), f, schedule, reach, offsets).run()

    return work


SOME = [("rows", True, False), (3, True, True), (64, False, True)]
OTHERS = [("columns", False, False), (3, False, False), (3, True, False), (8, True, True), (8, True, False)]
OTHERS = [pytest.param(*way, marks=pytest.mark.slow) for way in OTHERS]


@pytest.mark.parametrize(("kind", "in_strips", "missed"), [*SOME, *OTHERS])
def test_stages(monkeypatch, tmp_path, kind, in_strips, missed):
    """Annealing has launches of its own, as lean as those of an iteration."""
    monkeypatch.setattr(triton, "processors", lambda _: 132)
    monkeypatch.setattr(triton.Strips, "fit", lambda op: in_strips)
    work = stages(missed)
    found = record(monkeypatch, "h200", cost_of(kind, 300 if in_strips else 6001, 10_000), work=work)
    wanted = {"update", "enter", "leave"} | (set() if kind in ("rows", "columns") else {"prepare"})
    wanted |= {"strip", "gather"} if in_strips else set()
    assert {one.kernel.__name__ for one in found} == wanted | ({"translate", "lack"} if missed else set())
    assert all(one.constants.get("STEADY", True) or one.constants.get("FIRST") is True for one in found)
    for one in found:
        name, first = one.kernel.__name__, one.constants.get("FIRST") is True
        _, warps, together, _ = triton.Strips.SHAPES[triton.MATRIX if kind == "rows" else triton.FMA]
        programs = together * warps // one.options["num_warps"] if name == "strip" else 1
        allowed = SPILLED_EIGHT if name == "strip" and kind == 8 else SPILLED
        check(one, tmp_path, programs, 2 * SPILLED if first else allowed)


@pytest.mark.parametrize(
    ("kind", "in_strips"), [(4, True), *(pytest.param(*way, marks=pytest.mark.slow) for way in ((8, True), (3, False)))]
)
def test_offsets_and_looks_at_every_iteration(monkeypatch, tmp_path, kind, in_strips):
    """What a reach launches beside terms of one side, columns that wait for a look among it."""
    monkeypatch.setattr(triton, "processors", lambda _: 132)
    monkeypatch.setattr(triton.Strips, "fit", lambda op: in_strips)
    control = triton_loop.Control(2, 0.0, 1, 0, 0.5)

    def work(operator, f, g):
        offsets = torch.zeros(1, operator.rows), torch.zeros(1, operator.columns)
        weights = [part + 1 for part in offsets]
        loop = triton_loop.Loop(operator, *weights, f, control, torch.zeros(1, 8), offsets)
        loop.run(lambda seen: None)

    found = record(monkeypatch, "h200", cost_of(kind, 300 if in_strips else 6001, 10_000), work=work)
    names = {one.kernel.__name__ for one in found}
    wanted = {"prepare", "start", "lack", "update", "translate", "check", "settle", "finish"}
    assert names == wanted | ({"strip", "gather"} if in_strips else set())
    for one in found:
        strip = one.kernel.__name__ == "strip"
        first = one.constants.get("FIRST") is True
        check(one, tmp_path, 1, 2 * SPILLED if first else SPILLED_EIGHT if strip and kind == 8 else SPILLED)


@pytest.mark.parametrize("in_strips", [False, True], ids=["streamed", "strips"])
@pytest.mark.parametrize("way", ["stages", "reach", "offsets", "every iteration", "gradient"])
def test_what_is_compiled_together_is_all(monkeypatch, way, in_strips):
    """The first annealed solve, and the first with a reach, start nothing that was not compiled side by side."""
    monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)
    monkeypatch.setattr(triton.Strips, "fit", lambda op: in_strips)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton, "_ready", set())
    together, alone, calls = set(), set(), []
    target = [alone]

    def first(self, number):
        target[0].add((self.kernel.__name__, self.constants, self.options))

    def compile_all(work):
        calls.append(work)
        target[0] = together
        work()
        assert operator._prepared is None, "what is prepared while launches are recorded holds nothing"
        target[0] = alone

    monkeypatch.setattr(launch.Launch, "_start_first", first)
    monkeypatch.setattr(launch, "compile_together", compile_all)
    operator = triton.Fused(cost_of(3, 300), torch.ones(1, dtype=torch.float64))
    a, b, f = torch.ones(1, 300), torch.ones(1, 300), torch.zeros(1, 300)
    reach = torch.ones(1, 2)
    if way == "stages":
        operator.anneal(a, b, f, 3, 4.0, 10, 0.07, reach)
    elif way == "gradient":
        pulls = operator.pulls(True)
        pulls.pull(False, b, b, f, a)
        pulls.pull(True, a, a, f, b)
        pulls.cost()
    else:
        every = 1 if way == "every iteration" else 4
        more = (reach, (a, b)) if way == "offsets" else (reach,)
        operator.iterate(a, b, f, 9, 0.0, every, "l1", 0.5, lambda seen: None, *more)
    assert len(calls) == 1
    assert together == alone and len(alone) > (3 if way == "gradient" else 5)


def test_launchers_are_built_from_types():
    """While a kernel is compiled, its launcher is built from what Triton would build it from afterwards."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    runtime = pytest.importorskip("triton.runtime.jit")
    if launch._version() != (3, 6):
        pytest.skip("another Triton builds other launchers")
    kernel, backend = triton_kernels.strip, make_backend(HOPPER)
    numbers = {"i32": 3, "i64": 3, "fp32": 0.5}
    count = sum(not parameter.is_constexpr for parameter in kernel.params)
    args = [numbers.get(parameter.annotation_type, torch.zeros(1)) for parameter in kernel.params[:count]]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "compile_module_from_src", lambda src, **options: found.update(src=src))
        patch.setattr(driver, "library_dirs", list)
        launch._build_launcher(kernel, tuple(args))
    binder = runtime.create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, _ = binder(*args, *[1] * (len(kernel.params) - count))
    types = dict(zip(bound, (kind for kind, _ in kinds), strict=True))
    assert found["src"] == driver.make_launcher({}, types, None)


def test_one_kernel_is_read_at_a_time(monkeypatch):
    """The longest first, whoever comes first; also when one was compiled before, and when one fails."""
    order, reading = [], threading.Lock()

    def read(name):
        assert reading.acquire(blocking=False), "two are read at a time"
        time.sleep(0.01)
        order.append(name)
        reading.release()

    monkeypatch.setattr(ASTSource, "make_ir", read)

    def build(place):
        time.sleep(0.005 * (4 - place))  # the last is the first to be ready
        with turns.at(place):
            if place == 1:
                return
            if place == 2:
                raise ValueError("nothing")
            ASTSource.make_ir(place)

    with pytest.raises(ValueError, match="nothing"), launch._Turns(5) as turns, ThreadPoolExecutor(5) as pool:
        list(pool.map(build, range(5)))
    assert order == [0, 3, 4]
    assert ASTSource.make_ir is read, "Triton is as it was"


def test_nothing_is_collected_meanwhile():
    for wanted in (True, False):
        (gc.enable if wanted else gc.disable)()
        try:
            with pytest.raises(ValueError, match="nothing"), launch._no_collection():
                assert not gc.isenabled()
                raise ValueError("nothing")
            assert gc.isenabled() == wanted
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["rows", 3, 64], ids=str)
def test_products(monkeypatch, tmp_path, kind):
    """Products with the plan, narrow and wide, and what a gradient takes."""

    def work(operator, s, t):
        for width in (1, 3, 64):
            operator.apply(s, t, torch.ones(1, operator.columns, width))
        operator.cost_apply(s, t, power=2)
        operator.moment(s, t, torch.ones(1, operator.columns, 20), 1)
        if kind != "rows":
            operator.weighted(s, t, alpha=s)

    found = record(monkeypatch, "h200", cost_of(kind, 300), work=work)
    assert {"product", "join", "lay", "halve"} <= {one.kernel.__name__ for one in found}
    for one in found:
        check(one, tmp_path, stack=SPILLED)


@pytest.mark.parametrize("precision", ["high", "fast"])
@pytest.mark.parametrize("kind", ["rows", "columns", 1, 3, 4, 5, 8, 16, 64, 128, 200], ids=str)
def test_pulls(monkeypatch, tmp_path, kind, precision):
    """The way back through many softmins."""

    def work(operator, s, t):
        pulls = triton_pull.Pulls(operator, True)
        pulls.pull(False, t, t, s, s)
        pulls.pull(True, s, s, t, t)
        pulls.cost()

    found = record(monkeypatch, "h200", cost_of(kind, 300), precision=precision, work=work)
    last = {"pull_entries"} if isinstance(kind, str) else {"prepare"}
    assert {one.kernel.__name__ for one in found} == {"set_down", "pull"} | last
    for one in found:
        if one.kernel.__name__ != "prepare":
            check(one, tmp_path, stack=16)


@pytest.mark.parametrize("kind", ["rows", 3, 64], ids=str)
def test_setup(monkeypatch, tmp_path, kind):
    """What is started once a solve."""
    monkeypatch.setattr(triton, "fitting_tile", lambda *_: None)
    found = {one.kernel.__name__: one for one in record(monkeypatch, "h200", cost_of(kind, 300))}
    wanted = {"start", "update", "check", "finish"} | (set() if kind == "rows" else {"prepare"})
    assert set(found) == wanted
    for name in wanted - {"update"}:
        check(found[name], tmp_path, stack=SPILLED)


def test_the_table_is_complete():
    """Every card has only shapes that divide the padding, and the default has them all."""
    for entries in launch.table().values():
        for shape in (launch.Shape(*entry) for entry in entries.values()):
            assert triton.PAD % shape.rows == triton.PAD % shape.columns == 0
            assert shape.warps in (1, 2, 4, 8) and shape.stages >= 1 and shape.resident >= 1
    widths = {triton.DOT: (16, 32, 64, 128, 192, 1024), triton.FMA: range(1, 9), triton.MATRIX: (1,)}
    for kind, dimensions in widths.items():
        for d in dimensions:
            for transposed in (False, True):
                launch.launch_shape(kind, d, 1, torch.device("cpu"), transposed)


def test_splits_cover_all_columns_once():
    for columns in (1, 127, 128, 129, 5000, 100_003):
        for blocks in (1, 7, 132, 4000):
            shape = launch.launch_shape(triton.DOT, 64, 10_000, torch.device("cpu"))
            splits, each = launch.splits_for(shape, blocks, columns, torch.device("cpu"))
            tiles = -(-columns // shape.columns)
            assert splits * each >= tiles > (splits - 1) * each
