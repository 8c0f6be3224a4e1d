"""GeomLoss: ``SamplesLoss(..., backend="flash")`` on the divergences of this package.

GeomLoss looks its routines up as ``routines[loss][backend]``, so ours are added there. Where GeomLoss is listed in the
setting ``substitute``, ``backend="auto"`` means "flash" too. Costs and kernels of the user's own go back to
GeomLoss's backends.

The numbers are those of ``backend="tensorized"``: one temperature for the whole batch, set by the box around all of its
points, unless ``diameter`` gives one number for each element, or is "each".
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

VERSIONS = ">=0.2.6,<0.4"
NAME = "flash"
KERNELS = ("energy", "gaussian", "laplacian")

_log = logging.getLogger("flashot_backends")


def adapt(module: Any, host: Any) -> None:
    """Add the backend "flash" to the routines of every loss in this leaf module, and let "auto" find it."""
    routines = module.routines
    host.register(routines["sinkhorn"], NAME, functools.partial(_sinkhorn, routines["sinkhorn"]))
    host.register(routines["hausdorff"], NAME, functools.partial(_hausdorff, routines["hausdorff"]))
    for name in KERNELS:
        host.register(routines[name], NAME, functools.partial(_kernel, routines[name], name))
    host.wrap(module, "SamplesLoss.forward", functools.partial(_routed, host=host), ("self",))


def _routed(original: Callable[..., Any], host: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any) -> Any:
        if self.backend == "auto" and host.substituted:
            reason = _stays(self, args)
            if reason is None:
                self = copy.copy(self)
                self.backend = NAME
            else:
                _say_once(f"GeomLoss: backend='auto' stays with GeomLoss: {reason}")
        return original(self, *args)

    return forward


def _stays(loss: Any, args: tuple[Any, ...]) -> str | None:
    """Why a loss with the backend "auto" is none of ours."""
    if len(args) == 6 and (args[0] is not None or args[3] is not None):
        return "clusters are given by labels"
    if loss.cost is not None or loss.kernel is not None:
        return "a cost or kernel of the user's own is evaluated by GeomLoss"
    if loss.loss != "sinkhorn" and loss.loss not in KERNELS:
        return f"there are no kernels for the loss {loss.loss!r}"
    if loss.loss == "sinkhorn" and loss.p not in (1, 2):
        return f"p is {loss.p}, and we know 1 and 2"
    return None


# The routines, as GeomLoss calls them: weights (N,) or (B, N), points (N, D) or (B, N, D)


def _sinkhorn(
    routines: Any, a: Any, x: Any, b: Any, y: Any, *, cost: Any = None, potentials: bool = False, p: int = 2,
    blur: float = 0.05, reach: float | None = None, diameter: Any = None, scaling: float = 0.5, debias: bool = True,
    verbose: bool = False, **rest: Any,
) -> Any:
    options = {
        "p": p, "blur": blur, "reach": reach, "diameter": diameter, "scaling": scaling, "debias": debias,
        "verbose": verbose,
    }  # fmt: skip
    if cost is not None:
        given = {**options, "cost": cost, "potentials": potentials, **rest}
        return _handed_back(routines, "cost", cost, (a, x, b, y), given)
    from flashot_backends.ops.divergence import sinkhorn_divergence, sinkhorn_potentials

    a, x, b, y = _one_dtype(a, x, b, y)
    if potentials:
        return sinkhorn_potentials(x, y, a, b, **options)
    return _vector(sinkhorn_divergence(x, y, a, b, **options), x)


def _kernel(
    routines: Any, name: str, a: Any, x: Any, b: Any, y: Any, *, kernel: Any = None, potentials: bool = False,
    blur: float = 0.05, **rest: Any,
) -> Any:
    if kernel is not None:
        given = {**rest, "kernel": kernel, "potentials": potentials, "blur": blur}
        return _handed_back(routines, "kernel", kernel, (a, x, b, y), given)
    from flashot_backends.ops.divergence import kernel_norm, kernel_potentials

    a, x, b, y = _one_dtype(a, x, b, y)
    if potentials:
        return kernel_potentials(name, x, y, a, b, blur=blur)
    return _vector(kernel_norm(name, x, y, a, b, blur=blur), x)


def _hausdorff(routines: Any, a: Any, x: Any, b: Any, y: Any, *, kernel: Any = None, **rest: Any) -> Any:
    """GeomLoss has no formula of its own for this loss: without ``kernel`` its other backends fail."""
    if kernel is None:
        raise ValueError("kernel is None; loss='hausdorff' accepts a function kernel(x, y, blur=...) in GeomLoss")
    return _handed_back(routines, "kernel", kernel, (a, x, b, y), {"kernel": kernel, **rest})


def _handed_back(routines: Any, name: str, given: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Let GeomLoss evaluate a cost or kernel of the user's own: a function on matrices, a formula with KeOps."""
    backend = "online" if isinstance(given, str) else "tensorized"
    kind = "a formula" if isinstance(given, str) else "a function"
    _say_once(f"GeomLoss: backend='flash' leaves it to backend={backend!r}: the {name} is {kind} of the user's own")
    if tensors[1].dim() == 2:
        tensors = tuple(tensor.unsqueeze(0) for tensor in tensors)
    import torch

    enabled = torch.is_grad_enabled()
    try:
        return routines[backend](*tensors, **options)
    finally:  # GeomLoss leaves gradients switched on, or off when something is raised
        torch.set_grad_enabled(enabled)


def _one_dtype(*tensors: Any) -> tuple[Any, ...]:
    """All in the widest dtype, as arithmetic between them would have it."""
    if all(tensor.dtype == tensors[0].dtype for tensor in tensors):
        return tensors
    import torch

    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return tuple(tensor.to(dtype) for tensor in tensors)


def _vector(values: Any, x: Any) -> Any:
    """GeomLoss expects values (B,), and takes the only one for itself where there is no batch."""
    return values if x.dim() == 3 else values.reshape(1)


@functools.lru_cache(maxsize=256)
def _say_once(sentence: str) -> None:
    _log.info(sentence)
