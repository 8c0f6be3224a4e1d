"""Late-interaction scores: for each query token its best document token, summed (Khattab and Zaharia, 2020, eq. 3).

Names are imported when they are first asked for: where torch is not installed, `maxsim` and `topk` are those of JAX.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codes import Int8, Residuals
    from .loss import contrastive
    from .retrieval import xtr
    from .scores import maxsim, topk

__all__ = ["Int8", "Residuals", "contrastive", "maxsim", "topk", "xtr"]

_HOMES = {
    "Int8": "codes", "Residuals": "codes", "contrastive": "loss", "maxsim": "scores", "topk": "scores",
    "xtr": "retrieval",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "jax_ops" if name in ("maxsim", "topk") and find_spec("torch") is None else _HOMES[name]
    globals()[name] = value = getattr(import_module(f".{home}", __name__), name)
    return value
