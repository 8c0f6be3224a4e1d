"""sentence-transformers 6 and newer: ``util.maxsim``, ``maxsim_pairwise`` and their means on this package's MaxSim.

There is no argument to ask with: it is used where ``sentence_transformers`` is listed in the setting ``substitute``.
The host's contract stays its own: masked document tokens are left out, a document without any token gets its sentinel,
and scores are float32. Padding, chunks and devices stay the host's too; what is replaced is the scoring of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

LEAVES = {"_maxsim_score_documents": False, "_maxsim_score_pairs": True}


def adapt(module: Any, host: Any) -> None:
    """Wrap what scores one chunk in ``sentence_transformers.util.similarity``; before version 6 there is nothing."""
    for name, pairs in LEAVES.items():
        if hasattr(module, name):
            replacement = functools.partial(_routed, module, host, pairs)
            host.wrap(module, name, replacement, ("a", "b", "a_mask", "b_mask"))


def _routed(module: Any, host: Any, pairs: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    def scores(a: Any, b: Any, a_mask: Any, b_mask: Any) -> Any:
        if not host.substituted or not b.shape[1] or not _plain(a, b, a_mask):
            return original(a, b, a_mask, b_mask)
        from flashot_backends.ops.maxsim import maxsim

        found = maxsim(a, b, a_mask, b_mask, pairs=pairs).float()
        if b_mask is not None:
            found = module._fill_empty_document_scores(found, ~b_mask.bool().any(dim=-1))
        return found

    return scores


def _plain(a: Any, b: Any, a_mask: Any) -> bool:
    """Floats of one kind, and a query mask of zeros and ones: other numbers are weights, which only the host has."""
    import torch

    if a.dtype != b.dtype or a.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return False
    return a_mask is None or a_mask.dtype == torch.bool or bool(((a_mask == 0) | (a_mask == 1)).all())
