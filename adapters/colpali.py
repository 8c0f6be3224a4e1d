"""colpali-engine: its in-batch and candidate scores on this package's MaxSim, for its losses and its processors.

``COLPALI_SCORES_BACKEND=flashot`` asks for it; where ``colpali`` is listed in the setting ``substitute``, "auto" means
it too. The host pads with zeros and passes no mask, so a padded token scores 0 there, and here. Scores come back in
float32 (float64 for float64 embeddings), whatever the embeddings. Of equal similarities the first gets the gradient;
the host spreads it over them, which differs for padded tokens only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "COLPALI_SCORES_BACKEND"


def adapt(module: Any, host: Any) -> None:
    """Wrap the two score functions of ``colpali_engine.utils.maxsim``."""
    for name in ("maxsim_inbatch", "maxsim_kd"):
        host.wrap(module, name, functools.partial(_routed, host), ("query", "doc"))


def _routed(host: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    dimensions = 4 if original.__name__ == "maxsim_kd" else 3

    def scores(query: Any, doc: Any) -> Any:
        name = os.environ.get(VARIABLE, "auto").lower()
        named = name == "flashot"
        if not named and not (name == "auto" and host.substituted):
            return original(query, doc)
        if query.dim() != 3 or doc.dim() != dimensions:
            if named:
                raise ValueError(f"doc has {doc.dim()} and query {query.dim()} dimensions, not {dimensions} and 3")
            return original(query, doc)
        from flashot_backends.ops.maxsim import maxsim

        return maxsim(query, doc)

    return scores
