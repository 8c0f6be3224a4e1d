"""Late-interaction scores: for each query token its best document token, summed (Khattab and Zaharia, 2020, eq. 3)."""

from .scores import maxsim, topk
from .xtr import xtr

__all__ = ["maxsim", "topk", "xtr"]
