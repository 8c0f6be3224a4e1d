"""Sinkhorn attention for JAX arrays (arXiv 2605.08123)."""

from flashot_backends.ops.attention.api import sinkhorn_attention, transport_plan
from flashot_backends.ops.attention.certificates import (
    bias_certificate,
    contraction_certificate,
    select_tail_depth,
)
from flashot_backends.ops.attention.dustbin import DustbinScore, DustbinToken

__all__ = [
    "DustbinScore",
    "DustbinToken",
    "bias_certificate",
    "contraction_certificate",
    "select_tail_depth",
    "sinkhorn_attention",
    "transport_plan",
]
