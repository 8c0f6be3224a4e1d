"""Late-interaction scores: for each query token its best document token, summed (Khattab and Zaharia, 2020, eq. 3)."""

from .codes import Int8, Residuals
from .loss import contrastive
from .retrieval import xtr
from .scores import maxsim, topk

__all__ = ["Int8", "Residuals", "contrastive", "maxsim", "topk", "xtr"]
