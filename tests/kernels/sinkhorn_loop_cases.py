"""A kernel's own loop beside the loop that the host steers, for tests interpreted and on a card."""

import torch

from flashot_backends.ops.sinkhorn import solve, solver


def no_host(monkeypatch):
    """From now on nothing may be steered by the host."""

    def refuse(*args):
        raise AssertionError("steered by the host")

    monkeypatch.setattr(solver, "iterate", refuse)


def numbers(solution, unit, missed):
    """Potentials over ε, up to the constant that a balanced problem leaves open, and errors, in float64."""
    f, g = solution.f.double() / unit, solution.g.double() / unit
    shift = 0.0 if missed else f.mean(-1, keepdim=True)
    return {"f": f - shift, "g": g + shift, "errors": solution.errors.double()}


def as_the_host(monkeypatch, backend, costs, a, b, slack=2e-5, **options):
    """The solution by the kernel's own loop, no further from the host's in float64 than that one's in float32.

    ``costs`` in float32 and in float64. Counts of stages and iterations, when there was a look, and gaps agree too.
    """
    cost, wide = costs
    wanted = solve(wide, a.double(), b.double(), backend="reference", **options)
    usual = solve(cost, a, b, backend="reference", **options)
    with monkeypatch.context() as patch:
        no_host(patch)
        found = solve(cost, a, b, backend=backend, **options)
    for name in ("stages", "iterations", "converged"):
        assert torch.equal(getattr(found._state, name), getattr(wanted._state, name)), name
    assert torch.equal(found.errors.isnan(), wanted.errors.isnan())
    unit = torch.as_tensor(options["epsilon"], device=found.f.device)[..., None]
    exact, ours, theirs = (numbers(one, unit, "reach" in options) for one in (wanted, found, usual))
    for name, right in exact.items():
        away, allowed = ((one[name] - right).nan_to_num().abs().max() for one in (ours, theirs))
        assert away < 3 * allowed + slack, f"{name}: {away:.3g}, the host's {allowed:.3g}"
    going_on = wanted._state.gaps < 1
    gaps = (one._state.gaps[going_on].double() for one in (found, wanted))
    torch.testing.assert_close(*gaps, rtol=1e-3, atol=slack)
    return found
