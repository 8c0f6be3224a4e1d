"""Bad input: a plain error that names the argument, before anything is computed."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashot_backends.dispatch import BackendError  # noqa: E402
from flashot_backends.ops.sinkhorn import DenseCost, PointCloud, softmin, solve  # noqa: E402

nan, inf = math.nan, math.inf
M = torch.ones(3, 4, dtype=torch.float64)
x, y = torch.ones(3, 2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)


def vector(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def matrix(value, dtype=torch.float64):
    out = torch.ones(3, 4, dtype=dtype)
    out[1, 2] = value
    return out


COSTS = [
    (lambda: PointCloud(x, y, metric="manhattan"), ValueError, "metric is 'manhattan'"),
    (lambda: PointCloud(x.float(), y), TypeError, r"x has dtype torch.float32 and y torch.float64"),
    (lambda: PointCloud(x, torch.zeros(4, 3).double()), ValueError, r"x has shape \(3, 2\) and y \(4, 3\)"),
    (lambda: PointCloud(x[0], y), ValueError, "x has shape"),
    (lambda: PointCloud(x.expand(2, 3, 2), y.expand(3, 4, 2)), ValueError, "leading axes of x"),
    (lambda: PointCloud(x.long(), y), TypeError, "x has dtype int64; accepted are float16"),
    (lambda: PointCloud(x.to(torch.complex64), y), TypeError, "x has dtype complex64"),
    (lambda: PointCloud([[1.0]], y), TypeError, "x is a builtins.list; accepted is a numpy, torch"),
    (lambda: PointCloud(x, None), TypeError, "y is a builtins.NoneType"),
    (lambda: PointCloud(x, y.to("meta")), ValueError, "x is on cpu and y on meta"),
    (lambda: DenseCost(M[0]), ValueError, r"M has shape \(4,\)"),
    (lambda: DenseCost(M.bool()), TypeError, "M has dtype bool"),
    (lambda: DenseCost(np.ones((3, 4), dtype=int)), TypeError, "M has dtype int64"),
    (lambda: DenseCost(np.ones((3, 4), dtype=np.longdouble)), TypeError, "M has dtype"),
    (lambda: DenseCost("M"), TypeError, "M is a builtins.str"),
]


@pytest.mark.parametrize(("make", "kind", "message"), COSTS)
def test_costs(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


ARGUMENTS = [
    ({"a": vector(1, 1)}, ValueError, r"a has shape \(2,\); accepted is \(..., 3\)"),
    ({"b": vector(1, 1, 1)}, ValueError, r"b has shape \(3,\)"),
    ({"a": torch.tensor(1.0).double()}, ValueError, r"a has shape \(\)"),
    ({"a": vector(1, 1, 1, dtype=torch.float32)}, TypeError, "a has dtype torch.float32 and the cost torch.float64"),
    ({"a": [1, 1, 1]}, TypeError, "a is a builtins.list"),
    ({"a": vector(1, 1, 1).to("meta")}, ValueError, "a is on meta and the cost on cpu"),
    ({"a": vector(1, 1, 1).expand(2, 3), "b": vector(1, 1, 1, 0).expand(3, 4)}, ValueError, "leading axes"),
    ({"epsilon": 0}, ValueError, "epsilon is 0"),
    ({"epsilon": -0.1}, ValueError, "epsilon is -0.1"),
    ({"epsilon": nan}, ValueError, "epsilon is nan"),
    ({"epsilon": inf}, ValueError, "epsilon is inf"),
    ({"epsilon": None}, TypeError, "epsilon is None"),
    ({"epsilon": "0.1"}, TypeError, "epsilon is '0.1'"),
    ({"epsilon": True}, TypeError, "epsilon is True"),
    ({"epsilon": [0.1]}, TypeError, "epsilon is a builtins.list"),
    ({"max_iterations": 0}, ValueError, "max_iterations is 0"),
    ({"max_iterations": 2.5}, ValueError, "max_iterations is 2.5"),
    ({"max_iterations": True}, ValueError, "max_iterations is True"),
    ({"check_every": 0}, ValueError, "check_every is 0"),
    ({"tolerance": -1}, ValueError, "tolerance is -1"),
    ({"tolerance": nan}, ValueError, "tolerance is nan"),
    ({"tolerance": "small"}, ValueError, "tolerance is 'small'"),
    ({"norm": "max"}, ValueError, "norm is 'max'"),
    ({"acceleration": "anderson"}, ValueError, "acceleration is 'anderson'"),
    ({"precision": "low"}, ValueError, "precision is 'low'"),
    ({"init": vector(1, 1, 1)}, TypeError, "init is a Tensor; accepted is a pair"),
    ({"init": (vector(1, 1), None)}, ValueError, r"init's f has shape \(2,\)"),
    ({"init": (vector(1, 1, 1), vector(1, 1))}, ValueError, r"init's g has shape \(2,\)"),
    ({"init": (None, None)}, TypeError, "init's f is a builtins.NoneType"),
    ({"init": (vector(1, 1, 1).expand(5, 3), None)}, ValueError, "init's f"),
    ({"init": (vector(1, 1, 1).to("meta"), None)}, ValueError, "init's f is on meta"),
    ({"backend": "tritn"}, BackendError, "tritn.*triton"),
    ({"backend": "triton"}, BackendError, "triton"),
    ({"backend": ""}, TypeError, "backend is ''"),
    ({"backend": ()}, TypeError, r"backend is \(\)"),
    ({"backend": [1]}, TypeError, r"backend is \[1\]"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS)
def test_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        solve(DenseCost(M), **{"epsilon": 1.0} | arguments)


VALUES = [
    ({"M": matrix(nan)}, "M holds nan"),
    ({"M": matrix(-inf)}, "M holds -inf"),
    ({"M": matrix(nan, torch.bfloat16)}, "M holds nan"),
    ({"x": vector(1, 2, nan)[:, None], "y": y[:, :1]}, "x holds NaN or infinite"),
    ({"x": x, "y": -inf * torch.ones(4, 2).double()}, "y holds NaN or infinite"),
    ({"a": vector(-1, 1, 1)}, "a holds -1"),
    ({"a": vector(nan, 1, 1)}, "a holds nan"),
    ({"b": vector(inf, 1, 1, 1)}, "b holds inf|mass of b is inf"),
    ({"a": vector(0, 0, 0)}, "mass of a is 0"),
    ({"a": vector(1, 1, 1)}, "masses of a and b differ by"),
    ({"a": torch.stack([vector(1, 1, 1) / 3, vector(1, 1, 1)])}, "masses of a and b differ"),
    ({"a": torch.stack([vector(1, 1, 1) / 3, vector(0, 0, 0)])}, "mass of a is 0"),
    ({"epsilon": vector(0.1, 0.0)}, "epsilon holds 0"),
    ({"epsilon": vector(0.1, -1)}, "epsilon holds -1"),
    ({"epsilon": vector(0.1, nan)}, "epsilon holds nan"),
    ({"epsilon": vector(nan, 0.1)}, "epsilon holds nan"),
    ({"epsilon": vector(0.1, inf)}, "epsilon holds"),
]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("arguments", "message"), VALUES)
def test_values(arguments, message, backend):
    given = {"M": M, "epsilon": 1.0} | arguments
    cost = PointCloud(given["x"], given["y"]) if "x" in given else DenseCost(given["M"])
    rest = {name: value for name, value in given.items() if name not in ("x", "y", "M")}
    with pytest.raises(ValueError, match=message):
        solve(cost, **rest, backend=backend)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3)], ids=str)
def test_no_rows_or_columns(shape):
    with pytest.raises(ValueError, match="at least one row and one column"):
        solve(DenseCost(torch.ones(shape)), epsilon=1.0)


def test_no_cost():
    with pytest.raises(TypeError, match="cost is a Tensor; accepted are PointCloud and DenseCost"):
        solve(M, epsilon=1.0)


def test_masses_may_differ_by_rounding():
    a = torch.full((3,), 1 / 3)
    solve(DenseCost(M.float()), a, torch.full((4,), 0.25) * (1 + 1e-6), epsilon=1.0)
    with pytest.raises(ValueError, match="masses"):
        solve(DenseCost(M.float()), a, torch.full((4,), 0.25) * (1 + 1e-3), epsilon=1.0)


SOFTMIN = [
    ({"h": torch.ones(3)}, ValueError, r"h has shape \(3,\)"),
    ({"h": None}, TypeError, "h is a"),
    ({"h": torch.ones(4, dtype=torch.int64)}, TypeError, "h has dtype int64"),
    ({"h": torch.ones(4, device="meta")}, ValueError, "h is on meta"),
    ({"epsilon": 0.0}, ValueError, "epsilon is 0"),
    ({"backend": "none"}, BackendError, "none"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), SOFTMIN)
def test_softmin(arguments, kind, message):
    with pytest.raises(kind, match=message):
        softmin(DenseCost(M), **{"h": torch.ones(4), "epsilon": 1.0} | arguments)
