"""The rule of over-relaxation that runs inside of the kernels, against the one that the host has."""

import os

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1 (see test_interpreted.py)", allow_module_level=True)
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

import triton.language as tl  # noqa: E402

from flashot_backends.kernels.sinkhorn.triton_kernels import next_gap  # noqa: E402
from flashot_backends.ops.sinkhorn import acceleration  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@triton.jit
def _next(gap, cycle, before, error, iteration, check_every, floor, out_gap, out_cycle):
    k = tl.program_id(0)
    found, other = next_gap(
        tl.load(gap + k), tl.load(cycle + k), tl.load(before + k), tl.load(error + k), iteration, check_every, floor
    )
    tl.store(out_gap + k, found)
    tl.store(out_cycle + k, other)


@pytest.mark.parametrize(("check_every", "iteration"), [(10, 21), (10, 400), (1, 64), (7, 70)])
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_a_look_teaches_the_same(check_every, iteration, floor):
    """Errors that fall as hoped, more slowly, hardly, not at all, and rise; gaps from next to none to wide ones."""
    falls = torch.tensor([1e-7, 1e-3, 0.1, 0.4, 0.7, 0.99, 1.0, 1.5, 40.0])
    gaps = torch.tensor([0.01, 0.03, 0.08, 0.2, 0.5, 0.9])
    cycles = check_every * torch.tensor([1.0, 2.0, 4.0])
    fall, gap, cycle = (part.flatten() for part in torch.meshgrid(falls, gaps, cycles, indexing="ij"))
    cycle = cycle.int()
    before = torch.full_like(fall, 0.02)
    pace = acceleration.Pace(gap.double(), gap.double(), cycle.long(), iteration - cycle.long(), before.double())
    error = before * fall
    wanted = acceleration.learn(pace, error.double(), iteration, check_every, torch.tensor(floor).double())
    out_gap, out_cycle = torch.empty_like(gap, device=DEVICE), torch.empty_like(cycle, device=DEVICE)
    given = (part.to(DEVICE).contiguous() for part in (gap, cycle, before, error))
    _next[(len(gap),)](*given, iteration, check_every, floor, out_gap, out_cycle)
    torch.testing.assert_close(out_gap.cpu().double(), wanted.gap, rtol=2e-3, atol=1e-4)
    assert torch.equal(out_cycle.cpu().long(), wanted.cycle)


def test_the_first_look_teaches_nothing():
    given = [torch.tensor([value], device=DEVICE) for value in (0.4, 10, 0.0, 0.1)]
    given[1] = given[1].int()
    out_gap, out_cycle = torch.empty(1, device=DEVICE), torch.empty(1, dtype=torch.int32, device=DEVICE)
    _next[(1,)](*given, 1, 10, 0.0, out_gap, out_cycle)
    assert out_gap.item() == pytest.approx(0.4) and out_cycle.item() == 10
