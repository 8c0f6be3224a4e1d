"""From what callers give to a Problem: checks, packing of lists, masks, precision."""

from itertools import chain

import torch

from .codes import Coded
from .problem import Problem

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def is_list(value) -> bool:
    """A list or tuple, as opposed to one array."""
    return isinstance(value, (list, tuple))


def is_sets(documents) -> bool:
    """Candidates given per query as lists of lists."""
    return is_list(documents) and len(documents) > 0 and is_list(documents[0])


def build(queries, documents, queries_mask, documents_mask, masked, pairs, floors) -> Problem:
    """Check the arguments and bring them into the canonical form.

    Raises TypeError or ValueError naming the argument.
    """
    plain = queries_mask is None and documents_mask is None and not pairs and floors is None
    if plain and _is_plain(queries, documents) and masked in ("exclude", "zero"):
        return Problem(
            queries, documents, longest_query=queries.shape[1], longest_document=documents.shape[1], masked=masked
        )
    if masked not in ("exclude", "zero"):
        raise ValueError(f'masked is {masked!r}; it may be "exclude" or "zero"')
    sets = is_sets(documents)
    counts = [len(group) for group in documents] if sets else None
    if sets:
        documents = list(chain.from_iterable(documents))
        documents_mask = None if documents_mask is None else list(chain.from_iterable(documents_mask))
    q, q_mask, q_offsets, longest_query = _tokens("queries", queries, queries_mask, (3,), documents)
    d, d_mask, d_offsets, longest_document = _tokens("documents", documents, documents_mask, (3, 4), queries)
    q, d = _agree(q, d)
    size, owners = _ownership(q, q_offsets, d, d_offsets, counts, pairs)
    if d.dim() == 4:
        d = d.flatten(0, 1)
        d_mask = None if d_mask is None else d_mask.flatten(0, 1)
    floors = _floors(floors, d.shape[0] if d_offsets is None else d_offsets.shape[0] - 1, d.device)
    return Problem(
        q, d, q_mask, d_mask, q_offsets, d_offsets, owners, floors, longest_query, longest_document, size, masked
    )


def _is_plain(queries, documents):
    """Two padded tensors that need nothing done to them: the common case, recognised quickly."""
    return (
        type(queries) is type(documents) is torch.Tensor
        and queries.dtype is documents.dtype
        and queries.dtype in FLOATS
        and queries.dim() == documents.dim() == 3
        and queries.shape[2] == documents.shape[2]
        and queries.device == documents.device
        and not (queries.is_nested or documents.is_nested or torch.is_autocast_enabled(queries.device.type))
    )


def _tokens(name, value, mask, dimensions, other):
    if is_list(value):
        return _pack(name, value, mask, other)
    if isinstance(value, Coded) and name == "documents":
        longest = value.shape[1] if value.offsets is None else value.longest
        return value, _mask(name, mask, value.shape[:-1], value.device), value.offsets, longest
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it may be a torch tensor or a list of torch tensors")
    if value.is_nested:
        return _nested(name, value, mask)
    if value.dim() not in dimensions:
        wanted = " or ".join(f"{n}-dimensional" for n in dimensions)
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {wanted}, (..., tokens, d)")
    return value, _mask(name, mask, value.shape[:-1], value.device), None, value.shape[-2]


def _mask(name, mask, shape, device):
    if mask is None:
        return None
    mask = torch.as_tensor(mask, device=device)
    if mask.shape != shape:
        raise ValueError(f"{name}_mask has shape {tuple(mask.shape)}; {name} ask for {tuple(shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def _nested(name, value, mask):
    if value.layout != torch.jagged or value.dim() != 3:
        raise ValueError(f"{name} is nested; only the jagged layout with shape (count, tokens, d) is accepted")
    if value.lengths() is not None:
        return _pack(name, list(value.unbind()), mask, value)
    offsets = value.offsets().to(torch.int64)
    longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
    return value.values(), _packed_mask(name, mask, value.values()), offsets, longest


def _packed_mask(name, mask, tokens):
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.is_nested:
        mask = mask.values()
    elif is_list(mask):
        mask = torch.cat([torch.as_tensor(m).reshape(-1) for m in mask]) if len(mask) else torch.zeros(0)
    return _mask(name, mask, tokens.shape[:1], tokens.device)


def _pack(name, items, mask, other):
    for item in items:
        if not isinstance(item, torch.Tensor) or item.dim() != 2:
            given = tuple(item.shape) if isinstance(item, torch.Tensor) else type(item).__name__
            raise TypeError(f"{name} holds {given}; every item of the list must be a (tokens, d) torch tensor")
        if item.shape[1] != items[0].shape[1]:
            raise ValueError(f"{name} mix embedding sizes {items[0].shape[1]} and {item.shape[1]}")
    if mask is not None and len(mask) != len(items):
        raise ValueError(f"{name}_mask has {len(mask)} items, {name} have {len(items)}")
    tokens = torch.cat(list(items)) if len(items) else _nothing(other)
    lengths = [item.shape[0] for item in items]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(tokens.device, non_blocking=True)
    return tokens, _packed_mask(name, mask, tokens), offsets, max(lengths, default=0)


def _nothing(other):
    """Zero tokens that agree with the other side."""
    while is_list(other) and len(other):
        other = other[0]
    if isinstance(other, torch.Tensor):
        return other.new_zeros(0, other.shape[-1])
    return torch.zeros(0, 1)


def _agree(q, d):
    if q.device != d.device:
        raise ValueError(f"queries are on {q.device} and documents on {d.device}; move one of them")
    if q.shape[-1] != d.shape[-1]:
        raise ValueError(f"queries have embedding size {q.shape[-1]} and documents {d.shape[-1]}")
    for name, x in (("queries", q), ("documents", d)):
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} have dtype {x.dtype}; accepted are float64, float32, float16 and bfloat16")
    kind = q.dtype if isinstance(d, Coded) else torch.promote_types(q.dtype, d.dtype)
    place = q.device.type
    if kind != torch.float64 and torch.is_autocast_enabled(place):
        kind = torch.get_autocast_dtype(place)
    return q.to(kind), d if isinstance(d, Coded) else d.to(kind)


def _ownership(q, q_offsets, d, d_offsets, counts, pairs):
    """How documents meet queries: (set_size, owners)."""
    queries = q.shape[0] if q_offsets is None else len(q_offsets) - 1
    documents = d.shape[0] if d_offsets is None else len(d_offsets) - 1
    if counts is not None or d.dim() == 4:
        found = documents if counts is None else len(counts)
        if pairs:
            raise ValueError("pairs=True takes one document for each query; candidate sets were given")
        if found != queries:
            raise ValueError(f"documents hold {found} candidate sets for {queries} queries")
        if counts is None:
            return d.shape[1] or 1, None
        owners = torch.repeat_interleave(torch.arange(queries), torch.tensor(counts, dtype=torch.int64))
        return -1, owners.to(d.device, non_blocking=True)
    if pairs and queries != documents:
        raise ValueError(f"pairs=True takes as many documents as queries; given {documents} and {queries}")
    return (1 if pairs else 0), None


def _floors(floors, documents, device):
    if floors is None:
        return None
    floors = torch.as_tensor(floors, device=device)
    if floors.shape != (documents,):
        raise ValueError(
            f"floors has shape {tuple(floors.shape)}; one value for each of {documents} documents is needed"
        )
    return floors.bool()
