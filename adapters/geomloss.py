"""GeomLoss: ``SamplesLoss(..., backend="flash")`` and ``geomloss.ot.solve*(..., method="flash")``.

GeomLoss looks its routines up as ``routines[loss][backend]``, so ours are added there. Where GeomLoss is listed in the
setting ``substitute``, ``backend="auto"`` means "flash" too. Costs and kernels of the user's own go back to
GeomLoss's backends.

The numbers are those of ``backend="tensorized"``: one temperature for the whole batch, set by the box around all of its
points, unless ``diameter`` gives one number for each element, or is "each".

``geomloss.ot`` has no registry: its solvers are wrapped, and know the method "flash" beside "auto". Potentials, plans
and values are GeomLoss's; the gradient of ``value`` is that of the problem, which GeomLoss's own is not (it counts the
points twice). Plans and potentials carry no gradient.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

VERSIONS = ">=0.2.6,<0.4"
NAME = "flash"
KERNELS = ("energy", "gaussian", "laplacian")

_log = logging.getLogger("flashot_backends")


def adapt(module: Any, host: Any) -> None:
    """Add the backend "flash" to the losses, or the method "flash" to the solvers, of this leaf module."""
    if hasattr(module, "routines"):
        _adapt_losses(module, host)
    for name, solver in _SOLVERS.items():
        if name in vars(module) and vars(module)[name].__module__ == module.__name__:
            host.wrap(module, name, functools.partial(_solving, solver, module=module, host=host), solver.parameters)


def _adapt_losses(module: Any, host: Any) -> None:
    """Register the backend with the routines of every loss, and let "auto" find it."""
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
        if self.backend != NAME:
            return original(self, *args)
        if len(args) == 2:
            if _plain(self, None, args[0], None, args[1]):
                return _straight(self, None, args[0], None, args[1])
            args = _weighted(*args)
        return _straight(self, *args) if len(args) == 4 and _plain(self, *args) else original(self, *args)

    return forward


def _plain(loss: Any, a: Any, x: Any, b: Any, y: Any) -> bool:
    """Whether GeomLoss would only pass the arguments on: every shape as it should be, all of one dtype.

    None stands for the weights that GeomLoss makes up: those of the operation, in a dtype as wide as its potentials'.
    """
    if loss.loss != "sinkhorn" or loss.cost is not None or loss.potentials:
        return False
    if not (hasattr(x, "dim") and hasattr(y, "dim") and x.dim() == y.dim() and x.dtype == y.dtype):
        return False
    if x.dim() not in (2, 3):
        return False
    shape, other = x.shape, y.shape
    if shape[-1] != other[-1] or shape[:-2] != other[:-2]:
        return False
    if a is None:
        return bool(x.is_floating_point()) and x.element_size() >= 4
    weights = (a, shape), (b, other)
    return all(hasattr(w, "dim") and w.dtype == x.dtype and w.shape == points[:-1] for w, points in weights)


def _straight(loss: Any, a: Any, x: Any, b: Any, y: Any) -> Any:
    """The value, without the way through GeomLoss that takes as long as a small problem on a card."""
    from flashot_backends.ops.divergence import sinkhorn_divergence

    return sinkhorn_divergence(
        x, y, a, b, p=loss.p, blur=loss.blur, reach=loss.reach, diameter=loss.diameter, scaling=loss.scaling,
        debias=loss.debias, verbose=loss.verbose,
    )  # fmt: skip


def _weighted(x: Any, y: Any) -> tuple[Any, ...]:
    """The weights that GeomLoss would make up, made where the points are: its own way waits for the card."""
    if not all(getattr(points, "dim", int)() in (2, 3) and points.shape[-2] for points in (x, y)):
        return x, y
    a, b = (points.new_ones(points.shape[:-1]) / points.shape[-2] for points in (x, y))
    return a, x, b, y


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


# geomloss.ot


@dataclass(frozen=True)
class _Solver:
    """One of GeomLoss's solvers: how its problem is read and its result is built."""

    parameters: tuple[str, ...]
    solve: Callable[..., Any]


def _solving(solver: _Solver, original: Callable[..., Any], module: Any, host: Any) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def solved(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        if options["method"] == NAME or (options["method"] == "auto" and host.substituted and _known(options)):
            return solver.solve(module, **{**options, "method": "auto"})
        return original(*args, **kwargs)

    return solved


def _known(options: dict[str, Any]) -> bool:
    return isinstance(options.get("cost", "sqeuclidean"), str) and options.get("cost", "sqeuclidean") == "sqeuclidean"


def _solve(module: Any, C: Any, *, a: Any, b: Any, **options: Any) -> Any:
    C, a, b = (_array(part) for part in (C, a, b))
    if len(C.shape) != 2:
        raise ValueError(f"C has shape {tuple(C.shape)}; accepted is (N, M)")
    a, b = (None if part is None else part[None] for part in (a, b))
    result = _solve_batch(module, C[None], a=a, b=b, **options)
    result._squeeze_batchdim()
    return result


def _solve_batch(module: Any, C: Any, *, a: Any, b: Any, **options: Any) -> Any:
    C, a, b = (_array(part) for part in (C, a, b))
    if len(C.shape) != 3:
        raise ValueError(f"C has shape {tuple(C.shape)}; accepted is (B, N, M)")
    reg, unbalanced, count = _regularization(module, **options)
    a, b, properties = _marginals(module, a, b, C[:, :, 0], C[:, 0, :], unbalanced, (C,), C.shape[0])
    tensors = [_tensor(part) for part in (C, a, b)]
    from flashot_backends.ops.divergence import transport

    steps = transport.temperatures(float((tensors[0].amax() - tensors[0].amin()).detach()), reg, count)
    found = transport.transport(tensors[0], None, tensors[1], tensors[2], [[step] for step in steps], unbalanced)
    given = {"C": _detached(C), "reg": reg, "unbalanced": unbalanced}
    return _matrix_result(module)(
        **given, a=_detached(a), b=_detached(b), potentials=_potentials(found, C), array_properties=properties,
        reg_type="KL", unbalanced_type="KL",
    )._with(found, C, None)  # fmt: skip


def _solve_sample(module: Any, X_a: Any, X_b: Any, **options: Any) -> Any:
    return _of_samples(module, *(_array(part) for part in (X_a, X_b)), batched=False, **options)


def _solve_sample_batch(module: Any, X_a: Any, X_b: Any, **options: Any) -> Any:
    return _of_samples(module, *(_array(part) for part in (X_a, X_b)), batched=True, **options)


def _of_samples(
    module: Any, X_a: Any, X_b: Any, *, batched: bool, a: Any, b: Any, cost: Any, debias: bool, blur: Any, reach: Any,
    reg: Any, unbalanced: Any, p: Any = None, **options: Any,
) -> Any:
    if cost != "sqeuclidean":
        raise NotImplementedError(f"cost is {cost!r}; accepted with method='flash' is 'sqeuclidean'")
    axes = "(B, N, D)" if batched else "(N, D)"
    for name, points in (("X_a", X_a), ("X_b", X_b)):
        if len(points.shape) != 2 + batched:
            raise ValueError(f"{name} has shape {tuple(points.shape)}; accepted is {axes}")
    reg, unbalanced = _length("reg", reg or None, "blur", blur), _length("unbalanced", unbalanced, "reach", reach)
    reg, unbalanced, count = _regularization(module, reg=reg, unbalanced=unbalanced, **options)
    a, b = _array(a), _array(b)
    a, b, properties = _marginals(
        module, a, b, X_a[..., 0], X_b[..., 0], unbalanced, (X_a, X_b), X_a.shape[0] if batched else 0
    )
    x, y, a_, b_ = (_tensor(part) if batched else _tensor(part)[None] for part in (X_a, X_b, a, b))
    from flashot_backends.ops.divergence import schedule, transport

    with _no_grad():
        diameters = schedule.extents(x, y, each=True)
    lists = [transport.temperatures(diameter**2, reg, count) for diameter in diameters]
    found = transport.transport(x, y, a_, b_, list(zip(*lists, strict=True)), unbalanced, debias)
    result = _sample_result(module, batched)(
        module, X_a=_detached(X_a), X_b=_detached(X_b), a=_detached(a), b=_detached(b), reg=reg, unbalanced=unbalanced,
        debias=debias, potentials=_potentials(found, X_a, unbatched=not batched), properties=properties,
    )  # fmt: skip
    return result._with(found, X_a, (x.detach(), y.detach(), a_.detach(), b_.detach()))


def _length(name: str, given: Any, length_name: str, length: Any) -> Any:
    """GeomLoss lets a strength be given as a length: reg = 2 blur², unbalanced = 2 reach²."""
    if length is None:
        return given
    if given is not None:
        raise ValueError(f"{name} and {length_name} are both given; accepted is one of them")
    return 2 * length**2


def _regularization(module: Any, **options: Any) -> tuple[float, float | None, int]:
    """Have GeomLoss check what steers the solver: reg, unbalanced, and the number of steps."""
    if options.get("reg") is None:
        raise ValueError("reg is None; accepted is a positive number")
    names = ("reg", "unbalanced", "unbalanced_type", "method", "tol", "max_iter")
    _arguments(module).check_regularization(**{name: options[name] for name in names})
    unbalanced = options["unbalanced"]
    if int(options["max_iter"]) < 1:
        raise ValueError(f"max_iter is {options['max_iter']}; accepted is a whole number from 1")
    return float(options["reg"]), None if unbalanced is None else float(unbalanced), int(options["max_iter"])


def _marginals(
    module: Any, a: Any, b: Any, like_a: Any, like_b: Any, unbalanced: Any, others: tuple[Any, ...], batch: int
) -> tuple[Any, Any, Any]:
    """Weights, uniform if left out, checked by GeomLoss, and what it notes of the arrays."""
    checks = _arguments(module)
    a = checks.check_marginal(a, ones_like=like_a, marginal_size=like_a.shape[-1], name="a")
    b = checks.check_marginal(b, ones_like=like_b, marginal_size=like_b.shape[-1], name="b")
    if unbalanced is None:
        checks.check_marginal_masses(a.sum(-1).reshape(-1), b.sum(-1).reshape(-1))
    library, dtype, device = checks.check_library_dtype_device(*others, a, b)
    sizes = {"B": batch, "N": like_a.shape[-1], "M": like_b.shape[-1]}
    return a, b, checks.ArrayProperties(**sizes, dtype=dtype, device=device, library=library)


def _arguments(module: Any) -> Any:
    return sys.modules[module.__name__.partition(".")[0] + "._arguments"]


def _array(given: Any) -> Any:
    """GeomLoss takes lists as float64 arrays."""
    return np.array(given, dtype=np.float64) if isinstance(given, list | tuple) else given


def _tensor(array: Any) -> Any:
    from flashot_backends.ops.arrays import to_torch

    return to_torch(array, "an argument")


def _detached(array: Any) -> Any:
    return array.detach() if hasattr(array, "detach") else array


def _no_grad() -> Any:
    import torch

    return torch.no_grad()


def _as_came(tensor: Any, like: Any) -> Any:
    return tensor.detach().cpu().numpy() if isinstance(like, np.ndarray) else tensor


def _potentials(found: Any, like: Any, unbatched: bool = False) -> Any:
    typing = sys.modules["geomloss._typing"]

    def shaped(potential: Any) -> Any:
        if potential.numel() == 0:
            return None
        return _as_came(potential[0] if unbatched else potential, like)

    f, g, own_f, own_g = map(shaped, found[1:])
    return typing.SinkhornPotentials(f_aa=own_f, g_bb=own_g, g_ab=g, f_ba=f)


class _Streamed:
    """What our results answer in their own way, over one of GeomLoss's: the value, and products without a plan."""

    def _with(self, found: Any, like: Any, points: Any) -> Any:
        self._found, self._like, self._points = found.value, like, points
        return self

    def _value(self) -> Any:
        value = self.cast(_as_came(self._found, self._like), "B")  # type: ignore[attr-defined]
        return value[()] if isinstance(value, np.ndarray) else value  # numpy's scalar for one value, as GeomLoss's

    def _density_operator(self) -> Any:
        return super()._density_operator() if self._points is None else self._operator(False)  # type: ignore[misc]

    def _plan_operator(self) -> Any:
        return super()._plan_operator() if self._points is None else self._operator(True)  # type: ignore[misc]

    def _operator(self, weighted: bool) -> Any:
        """Products with the plan, or with its density by a ⊗ b, made as they are asked for."""
        shapes = self._shapes  # type: ignore[attr-defined]
        operator = sys.modules["geomloss.ot._ot_result"].LinearOperator
        return operator(
            matmat=functools.partial(self._product, weighted, False), input_shape=shapes["b"],
            rmatmat=functools.partial(self._product, weighted, True), output_shape=shapes["a"],
        )  # fmt: skip

    def _product(self, weighted: bool, transposed: bool, values: Any) -> Any:
        from flashot_backends.ops.divergence import transport

        x, y, a, b = self._points
        potentials = self._potentials.f_ba, self._potentials.g_ab  # type: ignore[attr-defined]
        f, g = (_tensor(part).reshape(x.shape[0], -1) for part in potentials)
        weights = (a, b) if weighted else (None, None)
        sides = ((x, f, weights[0]), (y, g, weights[1]))
        flat = _tensor(values).reshape(x.shape[0], -1, values.shape[-1])
        out = transport.product(*(sides[::-1] if transposed else sides), self._reg, flat)  # type: ignore[attr-defined]
        return _as_came(out.reshape(*values.shape[:-2], *out.shape[-2:]), values)


@functools.lru_cache
def _matrix_result(module: Any) -> Any:
    return type("OTResultMatrix", (_Streamed, module.OTResultMatrix), {"__module__": __name__})


@functools.lru_cache
def _sample_result(module: Any, batched: bool) -> Any:
    """A result on samples; GeomLoss has none for batches, so that is built on its result for batches of matrices."""
    matrices = sys.modules["geomloss.ot._implementations.matrix"]
    base: Any = matrices.OTResultMatrix if batched else module.OTResultSample

    class OTResultSample(_Streamed, base):
        _C: Any

        def __init__(self, module: Any, X_a: Any, X_b: Any, properties: Any, debias: bool, **given: Any) -> None:
            given |= {"array_properties": properties, "reg_type": "KL", "unbalanced_type": "KL"}
            if batched:
                super().__init__(C=None, **given)
                self._debias, self._X_a, self._X_b = debias, X_a, X_b
            else:
                costs = sys.modules["geomloss._typing"].CostMatrices(xy=X_a)  # only its kind of array is looked at
                super().__init__(C=costs, X_a=X_a, X_b=X_b, cost="sqeuclidean", debias=debias, **given)
                self._C_dense = None

        def _density(self) -> Any:
            if batched and self._C is None:
                self._C = ((self._X_a[:, :, None] - self._X_b[:, None]) ** 2).sum(-1)
            return super()._density()

    return OTResultSample


_SAMPLES = ("X_a", "X_b", "a", "b", "cost", "debias", "reg", "unbalanced", "unbalanced_type", "method", "max_iter")
_SOLVERS = {
    "solve": _Solver(("C", "reg", "a", "b", "unbalanced", "unbalanced_type", "method", "max_iter"), _solve),
    "solve_batch": _Solver(("C", "reg", "a", "b", "unbalanced", "unbalanced_type", "method", "max_iter"), _solve_batch),
    "solve_sample": _Solver(_SAMPLES, _solve_sample),
    "solve_sample_batch": _Solver(_SAMPLES, _solve_sample_batch),
}


@functools.lru_cache(maxsize=256)
def _say_once(sentence: str) -> None:
    _log.info(sentence)
