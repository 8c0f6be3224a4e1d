"""Problems that the MaxSim tests share: every layout, with odd sizes, holes and emptiness."""

import torch


def tokens(*shape, dtype=torch.float32, seed=0, device="cpu"):
    """Standard normal embeddings."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def mask(*shape, seed=1, share=0.6):
    """A random pattern with holes."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def ragged(lengths, d, seed=0, **options):
    """A list of (tokens, d) tensors."""
    return [tokens(n, d, seed=seed + i, **options) for i, n in enumerate(lengths)]


def plain(queries, documents, queries_mask=None, documents_mask=None, masked="exclude"):
    """All pairs in dense torch, differentiable: the definition."""
    similar = torch.einsum("ash,bth->abst", queries, documents)
    if documents_mask is not None:
        fill = 0.0 if masked == "zero" else -torch.inf
        similar = similar.masked_fill(~documents_mask.bool()[None, :, None], fill)
    best = similar.max(-1).values
    if queries_mask is not None:
        best = best.masked_fill(~queries_mask.bool()[:, None], 0.0)
    return best.sum(-1)


def negative(*shape, **options):
    """Embeddings for which every similarity with positive ones is negative."""
    return -tokens(*shape, **options).abs()
