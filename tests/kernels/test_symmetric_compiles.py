"""Every launch of the annealed loop that a Hopper card would see, compiled for it on any machine."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="no Triton")

from flashot_backends.kernels.sinkhorn import launch, triton_matrices, triton_near, triton_symmetric  # noqa: E402
from flashot_backends.ops.divergence import loop  # noqa: E402
from flashot_backends.ops.divergence.schedule import Settings  # noqa: E402

from .test_sinkhorn_compiles import Launch, check  # noqa: E402

SPILLED = 96  # bytes a thread may spill: a few words outside of the loops


@pytest.fixture
def seen(monkeypatch):
    """The launches that are made, by kernel; of different ones of a kernel the last."""
    found = {}

    def note(kernel, programs, args, constants, options, variant=None, at=-1):
        found[kernel.__name__] = Launch(kernel, args, constants, options)
        return lambda *number: None

    for module in (triton_symmetric, triton_symmetric.triton, triton_matrices):
        monkeypatch.setattr(module, "Launch", note)
    monkeypatch.setattr(triton_symmetric.triton, "launch", note)
    monkeypatch.setattr(launch, "card_class", lambda device: "h200")
    monkeypatch.setattr(triton_symmetric, "_get_ready", lambda clouds, task, nearby: None)
    monkeypatch.setattr(triton_symmetric, "_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


WEIGHTS = torch.full((1, 300), 1 / 300), torch.full((1, 200), 1 / 200)


def run(d, p=2):
    """A divergence of a few points, with gradients by the points; with a diameter where cards do not measure."""
    (a, b), (x, y) = WEIGHTS, (torch.rand(1, n, d) for n in (300, 200))
    settings = Settings(p, 0.5, math.inf, 0.5, [] if d <= 8 else [2.0], False, True, False)
    triton_symmetric.divergence(*loop.task(triton_symmetric, (x, a, y, b), settings, d <= 8, d <= 8, ""))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("d", [3, 8])
def test_small_clouds(seen, tmp_path, d, p):
    """As many programs as the table promises must be resident at once, or the launch of all steps is refused."""
    run(d, p)
    assert set(seen) == {"begin", "descend", "step", "integrate"}
    assert seen["descend"].options["launch_cooperative_grid"]
    waiting = launch.named_shape("waiting-3" if d <= 3 else "waiting-8", torch.device("cpu"))
    for name, one in seen.items():
        check(one, tmp_path, waiting.resident if name == "descend" else 1, SPILLED)


@pytest.mark.parametrize("d", [3, 64])
def test_a_launch_for_each_step(seen, monkeypatch, tmp_path, d):
    monkeypatch.setattr(triton_symmetric, "_small", lambda device: 0)
    run(d)
    assert {"begin", "step", "integrate"} <= set(seen)
    for one in seen.values():
        check(one, tmp_path, 1, SPILLED)


@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("d", [2, 3, 8])
def test_steps_over_tiles(seen, monkeypatch, tmp_path, d, sloped):
    monkeypatch.setattr(triton_near, "Launch", triton_symmetric.Launch)
    monkeypatch.setattr(triton_symmetric, "_small", lambda device: 0)
    clouds = triton_symmetric.Clouds(torch.rand(1, 300, d), WEIGHTS[0], torch.rand(1, 200, d), WEIGHTS[1])
    nearby = triton_near.Nearby(clouds)
    step = ((0.01, 1.0, 0.0),)
    task = triton_symmetric.Task(2, (step, step), math.inf, True, sloped, sloped, "high")
    descent = triton_symmetric.Descent(nearby.clouds, task, nearby)
    nearby.rehearse(descent)
    assert {"tell", "count", "fill", "listed"} <= set(seen)
    tile = triton_near.shape_for(d, torch.device("cpu"))
    for name in ("tell", "count", "fill", "listed"):
        check(seen[name], tmp_path, tile.resident if name == "listed" and not sloped else 1, SPILLED)


def test_matrices(seen, tmp_path):
    a, b = WEIGHTS
    steps = (((1.0, 1.0, 0.5),), ((0.5, 1.0, 0.0),))
    triton_symmetric.anneal_matrices(torch.rand(1, 300, 200), a, b, steps, torch.zeros_like(a), torch.zeros_like(b))
    assert set(seen) == {"update", "halfway"}
    for one in seen.values():
        check(one, tmp_path, 1, 2 * SPILLED)
