"""Bad input to the method "flash": a plain error in the host's words, before any kernel runs."""

import numpy as np
import pytest


class FakeTensor:
    """Something that says it is of TensorFlow."""

    __module__ = "tensorflow.python.framework.ops"
    shape = (17, 23)

    def __len__(self):
        return 17


def spoilt(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


BAD = {
    "negative a": (lambda p: {"a": spoilt(p.a, 0, -p.a[0])}, ValueError, r"\ba\b.*negative"),
    "nan a": (lambda p: {"a": spoilt(p.a, 0, np.nan)}, ValueError, r"\ba\b"),
    "nan b": (lambda p: {"b": spoilt(p.b, 0, np.nan)}, ValueError, r"\bb\b"),
    "length a": (lambda p: {"a": p.a[:-1]}, ValueError, r"a has shape \(16,\).*\(17,"),
    "length b": (lambda p: {"b": p.b[:-1]}, ValueError, r"b has shape \(22,\).*\(23,"),
    "rank a": (lambda p: {"a": p.a[:, None]}, ValueError, r"a has shape \(17, 1\)"),
    "rank b": (lambda p: {"b": p.b[:, None, None]}, ValueError, r"b has shape \(23, 1, 1\)"),
    "rank M": (lambda p: {"M": p.M[None]}, ValueError, r"M has shape \(1, 17, 23\)"),
    "masses": (lambda p: {"b": p.b * 1.5}, ValueError, r"a.*b|mass"),
    "reg 0": (lambda p: {"reg": 0}, ValueError, r"reg is 0"),
    "reg < 0": (lambda p: {"reg": -1.0}, ValueError, r"reg is -1"),
    "reg nan": (lambda p: {"reg": float("nan")}, ValueError, r"reg is nan"),
    "reg text": (lambda p: {"reg": "small"}, TypeError, r"reg is 'small'"),
    "reg vector": (lambda p: {"reg": np.ones(3)}, TypeError, r"reg"),
    "nan M": (lambda p: {"M": spoilt(p.M, (0, 0), np.nan)}, ValueError, r"M.*(nan|NaN)"),
    "dtype": (lambda p: {"M": p.M.astype(np.float32)}, TypeError, r"float64.*float32|float32.*float64"),
    "complex M": (lambda p: {"M": p.M.astype(complex)}, TypeError, r"M has dtype complex"),
    "text M": (lambda p: {"M": "cost"}, TypeError, r"M is a .*str"),
    "tensorflow": (lambda p: {"M": FakeTensor()}, TypeError, r"M is a tensorflow.*accepted.*jax"),
    "unknown argument": (lambda p: {"tau": 1e3}, TypeError, r"'tau'.*numItermax"),
    "unknown kernel": (lambda p: {"backend": "tritno"}, ValueError, r"tritno"),
    "numItermax 0": (lambda p: {"numItermax": 0}, ValueError, r"numItermax is 0"),
    "numItermax 1e3": (lambda p: {"numItermax": 1e3}, ValueError, r"numItermax is 1000.0.*whole"),
    "stopThr": (lambda p: {"stopThr": float("nan")}, ValueError, r"stopThr"),
    "warm start shape": (lambda p: {"warmstart": (np.zeros(3), np.zeros(23))}, ValueError, r"warmstart"),
    "warm start form": (lambda p: {"warmstart": np.zeros(17)}, (TypeError, ValueError), r"warmstart"),
}


@pytest.mark.parametrize("entry", ["sinkhorn", "sinkhorn2"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(pot, problem, entry, case):
    change, error, words = BAD[case]
    arguments = {"a": problem.a, "b": problem.b, "M": problem.M, "reg": problem.reg, **change(problem)}
    with pytest.raises(error, match=words):
        getattr(pot, entry)(**arguments, method="flash")


def test_kinds_do_not_mix(pot, problem):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"a is a numpy.*M is a torch"):
        pot.sinkhorn(problem.a, problem.b, torch.as_tensor(problem.M), 0.1, method="flash")


def test_missing_arguments_are_the_hosts_error(pot, problem):
    with pytest.raises(TypeError, match="reg"):
        pot.sinkhorn(problem.a, problem.b, problem.M, method="flash")


def test_an_unknown_method_is_the_hosts_error(pot, problem):
    with pytest.raises(ValueError, match="Unknown method 'flahs'"):
        pot.sinkhorn(problem.a, problem.b, problem.M, 0.1, method="flahs")
