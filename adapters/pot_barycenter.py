"""POT's barycenters on fixed supports with ``method="flash"``: ``ot.bregman.barycenter`` and ``barycenter_debiased``.

The iterates, errors and stopping rule of the host's "sinkhorn_log". M may be a lazy cost.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from flashot_backends.adapters.pot_arrays import (
    NOT_CONVERGED,
    by_method,
    check_control,
    check_kinds,
    cost_of,
    defines,
    filled,
    floating,
    in_dtype,
    is_lazy,
    regularisation,
    utils,
    way_there_and_back,
    wide,
    words_of_the_host,
)
from flashot_backends.adapters.pot_arrays import backend as backends
from flashot_backends.ops.arrays import framework, to_torch

PARAMETERS = ("A", "M", "reg", "weights", "method", "numItermax", "stopThr", "verbose", "log", "warn")
LEAST_ITERATIONS = 21  # before the host's debiased loop may stop


def adapt(module: Any, host: Any) -> None:
    """Add the method "flash" to the functions of POT that this leaf module defines."""
    for name in ("barycenter", "barycenter_debiased"):
        if defines(module, name):
            answer = functools.partial(_answer, debias=name != "barycenter")
            host.wrap(module, name, functools.partial(by_method, answer=answer), PARAMETERS)


def _answer(given: dict[str, Any], options: dict[str, Any], debias: bool) -> Any:
    from flashot_backends.ops.sinkhorn.barycenter import barycenter

    if set(options) - {"backend"}:
        accepted = ", ".join((*PARAMETERS, "backend"))
        unknown = sorted(set(options) - {"backend"})[0]
        raise TypeError(f"method='flash' got the unknown argument {unknown!r}; accepted are {accepted}")
    check_control(numItermax=given["numItermax"], stopThr=given["stopThr"])
    A, M, weights, (enter, leave), nx = _arrays(given["A"], given["M"], given["weights"])
    with words_of_the_host(histograms="A", mixture="weights"):
        found = barycenter(
            cost_of(M, enter), enter(wide(A)).T, enter(wide(weights)), epsilon=regularisation(given["reg"]),
            max_iterations=int(given["numItermax"]), tolerance=float(given["stopThr"]), debias=debias,
            least_iterations=LEAST_ITERATIONS if debias else 0,
            correction=int(framework(A) == "torch"),  # as the deviation of a torch tensor, and of no other array
            **options,
        )  # fmt: skip
    if given["warn"] and not found.converged:
        warnings.warn(NOT_CONVERGED, stacklevel=4)
    errors = [leave(error) for error in found.errors]
    if given["verbose"]:
        for k, error in enumerate(errors):
            if k % 20 == 0:
                print(f"{'It.':5s}|{'Err':12s}\n" + "-" * 19)
            print(f"{10 * k + 1:5d}|{float(error):8e}|")
    result = in_dtype(nx.exp(leave(found.log_weights)), A.dtype)
    return (result, {"err": errors, "niter": found.iterations - 1}) if given["log"] else result


def _arrays(A: Any, M: Any, weights: Any) -> tuple[Any, Any, Any, tuple[Callable[..., Any], Callable[..., Any]], Any]:
    like = M.X if is_lazy(M) else M
    check_kinds(M=like, A=A, **({} if weights is None else {"weights": weights}))
    like, A = floating(*utils().list_to_array(like, A))
    shape, nx = tuple(M.shape if is_lazy(M) else like.shape), backends().get_backend(like)
    if len(shape) != 2 or len(A.shape) != 2 or A.shape[0] != shape[0] or A.shape[1] == 0:
        raise ValueError(f"A has shape {tuple(A.shape)} and M {shape}; accepted are (n, histograms) and (n, m)")
    k = A.shape[1]
    weights = filled(nx, (k,), 1 / k, A) if weights is None else in_dtype(utils().list_to_array(weights), A.dtype)
    if tuple(weights.shape) != (k,):
        raise ValueError(f"weights has shape {tuple(weights.shape)}; accepted is ({k},)")
    enter, leave = way_there_and_back(like)
    if framework(like) in ("numpy", "cupy"):  # the loop is one of torch tensors, or of jax arrays
        from flashot_backends.ops.arrays import restorer

        there, back = enter, restorer(like)
        enter, leave = (lambda array: to_torch(there(array), "A")), back
    return A, M if is_lazy(M) else like, weights, (enter, leave), nx
