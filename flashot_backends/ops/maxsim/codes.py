"""Documents kept in few bits: 8-bit integers with a scale for each token, or residuals against centroids.

Kernels read them as they are, or decode a block at a time; nothing is expanded as a whole. No gradients.
"""

from typing import Any

import torch


class Coded:
    """Documents that can be indexed as a tensor of floats, ``(count, tokens, d)`` or ``(tokens, d)``, but are none."""

    shape: Any
    device: Any
    offsets: Any = None
    residuals: Any = None
    requires_grad = False
    is_nested = False
    dtype = torch.float32

    def dim(self):
        """Number of dimensions of the decoded documents."""
        return len(self.shape)

    def _set_lengths(self, lengths, tokens, device):
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device=device)
        if lengths.dim() != 1 or int(lengths.sum()) != tokens:
            raise ValueError(f"lengths add up to {int(lengths.sum())}; there are {tokens} tokens")
        self.offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.longest = int(lengths.max()) if len(lengths) else 0


class Int8(Coded):
    """Tokens ``values * scales``.

    Parameters
    ----------
    values
        int8 ``(D, tokens, d)``, or ``(tokens, d)`` with ``lengths``.
    scales
        Floats ``(D, tokens)`` or ``(tokens,)``.
    lengths
        Number of tokens of each document, for packed values.
    """

    def __init__(self, values, scales, lengths=None):
        if values.dtype != torch.int8:
            raise TypeError(f"values have dtype {values.dtype}; int8 is needed")
        if scales.shape != values.shape[:-1] or values.dim() != (3 if lengths is None else 2):
            raise ValueError(f"values {tuple(values.shape)} and scales {tuple(scales.shape)} do not fit")
        self.values, self.scales = values.contiguous(), scales.float().contiguous()
        self.shape, self.device = values.shape, values.device
        if lengths is not None:
            self._set_lengths(lengths, len(values), values.device)

    def __getitem__(self, index):
        return self.values[index].float() * self.scales[index][..., None]


class Residuals(Coded):
    """ColBERTv2's tokens: a centroid plus one of 2**bits weights in each dimension, scaled to length 1.

    Santhanam et al., "ColBERTv2", 2022, section 3.3; the bits are packed as PyLate's Stanford index packs them.

    Parameters
    ----------
    codes
        Integers ``(tokens,)``: the centroid of each token.
    residuals
        uint8 ``(tokens, d * bits / 8)``.
    lengths
        Number of tokens of each document.
    centroids
        Floats ``(centroids, d)``.
    weights
        Floats ``(2**bits,)``: what the buckets stand for.
    unit
        Whether decoded tokens are scaled to length 1.
    """

    def __init__(self, codes, residuals, lengths, centroids, weights, unit=True):
        size = centroids.shape[1]
        self.bits = residuals.shape[1] * 8 // size
        if self.bits not in (1, 2, 4, 8) or residuals.shape != (len(codes), size * self.bits // 8):
            raise ValueError(f"residuals {tuple(residuals.shape)} do not fit {len(codes)} codes of {size} dimensions")
        if residuals.dtype != torch.uint8 or weights.shape != (1 << self.bits,):
            raise ValueError(f"residuals must be uint8, and weights ({1 << self.bits},), not {tuple(weights.shape)}")
        self.codes, self.residuals = codes.int().contiguous(), residuals.contiguous()
        self.centroids, self.weights = centroids.contiguous(), weights.float().contiguous()
        self.unit, self.shape, self.device = unit, (len(codes), size), residuals.device
        self._set_lengths(lengths, len(codes), residuals.device)

    def __getitem__(self, index):
        decoded = self.centroids[self.codes[index].long()].float() + self.weights[self._buckets(self.residuals[index])]
        return torch.nn.functional.normalize(decoded, dim=-1) if self.unit else decoded

    def _buckets(self, packed):
        """The bucket of each dimension: its bits lie in the stream lowest first, bytes are filled from the top."""
        at = torch.arange(8, device=packed.device)
        stream = (packed.long()[..., None] >> (7 - at)) & 1
        stream = stream.flatten(-2).unflatten(-1, (-1, self.bits))
        return (stream << at[: self.bits]).sum(-1)
