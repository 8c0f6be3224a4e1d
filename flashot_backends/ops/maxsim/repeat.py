"""A call like an earlier one: what its layout decides was decided then, and the kernel starts at once.

A small problem takes a card less time than the host needs to check the arguments and to choose a kernel. Both depend on
shapes, strides, dtypes, devices, options and settings alone, for kernels that can be prepared for a layout.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashot_backends import dispatch
from flashot_backends.config import settings

from .derivatives import Unprepared, scored, transformed

MOST = 4096  # layouts that are remembered


class Known(NamedTuple):
    """What followed from a layout."""

    call: Any  # prepared by the kernel
    kind: Any  # what tokens are cast to first, or None
    rest: tuple[Any, ...]  # a problem's fields behind its masks
    others: tuple[Any, ...]  # the same without masks


_known: dict[Any, Known] = {}


def again(queries, documents, queries_mask, documents_mask, *options) -> tuple[Any, Any]:
    """The scores, or None where there was no call like this; and its layout, or None where calls are not repeated."""
    key = layout(queries, documents, queries_mask, documents_mask, options)
    known = None if key is None else _known.get(key)
    if known is None:
        return None, key
    if known.kind is not None:
        queries, documents = queries.to(known.kind), documents.to(known.kind)
    masked = queries_mask is not None or documents_mask is not None
    others = (queries_mask, documents_mask, *known.rest) if masked else known.others
    return scored(queries, documents, others, known.call), key


def layout(queries, documents, queries_mask, documents_mask, options) -> Any:
    """All that the way of a call follows from, or None.

    Repeated are calls with padded tensors in plain eager torch.
    """
    if type(queries) is not Tensor or type(documents) is not Tensor:
        return None
    if transformed() or dispatch.logger.isEnabledFor(logging.INFO):
        return None
    place, current = queries.device, settings()
    try:
        hash(options)
        return (
            queries.shape, queries.stride(), queries.dtype, place,
            documents.shape, documents.stride(), documents.dtype, documents.device,
            None if queries_mask is None else _of_mask(queries_mask),
            None if documents_mask is None else _of_mask(documents_mask),
            options, current.backend, current.fallback, dispatch.version(),
            _autocast(place.type) if torch._C._is_any_autocast_enabled() else None,
        )  # fmt: skip
    except (RuntimeError, TypeError):  # nested or sparse tensors, other kinds of masks, a list of backends
        return None


def _autocast(place):
    return torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None


def _of_mask(mask):
    if type(mask) is not Tensor or mask.dtype is not torch.bool:
        raise TypeError
    return mask.shape, mask.stride(), mask.device


def keep(key, call, problem, *given) -> None:
    """Remember what serves calls of a layout, if kernels see what was given (tokens and masks), or casts of it."""
    if isinstance(call, Unprepared) or not all(map(_is_as_given, given, problem)):
        return
    if len(_known) >= MOST:
        _known.clear()
    kind = problem.queries.dtype
    cast = None if given[0].dtype == given[1].dtype == kind else kind
    _known[key] = Known(call, cast, problem[4:], (None, None, *problem[4:]))


def _is_as_given(given, taken):
    """Whether nothing was moved or copied; axes may have been joined, and floats cast."""
    if given is None or given is taken:
        return taken is given
    joined = given.dim() == taken.dim() or (given.is_contiguous() and taken.is_contiguous())
    return joined and given.device == taken.device
