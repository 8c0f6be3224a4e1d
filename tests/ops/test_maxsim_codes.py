"""Documents in few bits score as their decoded tokens do."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashot_backends.ops.maxsim import Int8, Residuals, maxsim, topk  # noqa: E402

from .maxsim_cases import mask, tokens  # noqa: E402

LENGTHS = [3, 7, 1, 0, 5]


@pytest.fixture(params=["reference", "torch"])
def kernel(request):
    return request.param


def int8(*shape, lengths=None):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    return Int8(values, torch.rand(shape[:-1], generator=generator), lengths)


def residuals(bits, size=16, count=4):
    """Random buckets, packed bit by bit as the Stanford index does, and the tokens that they stand for."""
    generator = torch.Generator().manual_seed(5)
    buckets = torch.randint(0, 1 << bits, (sum(LENGTHS), size), generator=generator)
    stream = (buckets[..., None] >> torch.arange(bits)) & 1
    packed = torch.from_numpy(np.packbits(stream.numpy().astype(np.uint8).reshape(len(buckets), -1), axis=1))
    codes = torch.randint(0, count, (len(buckets),), generator=generator)
    centroids, weights = tokens(count, size, seed=6), tokens(1 << bits, seed=7) / 4
    decoded = torch.nn.functional.normalize(centroids[codes] + weights[buckets], dim=-1)
    return Residuals(codes, packed, LENGTHS, centroids, weights), list(decoded.split(LENGTHS))


def test_int8(kernel):
    q, coded, dm = tokens(2, 4, 16), int8(3, 6, 16), mask(3, 6, share=0.9)
    plain = coded.values.float() * coded.scales[..., None]
    for options in ({}, {"documents_mask": dm}, {"documents_mask": dm, "masked": "zero"}):
        expected = maxsim(q, plain, backend=kernel, **options)
        torch.testing.assert_close(maxsim(q, coded, backend=kernel, **options), expected)


def test_packed_int8(kernel):
    q, coded = tokens(2, 4, 16), int8(sum(LENGTHS), 16, lengths=LENGTHS)
    plain = (coded.values.float() * coded.scales[..., None]).split(LENGTHS)
    torch.testing.assert_close(maxsim(q, coded, backend=kernel), maxsim(q, list(plain), backend=kernel))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_residuals(bits, kernel):
    q, (coded, plain) = tokens(2, 4, 16), residuals(bits)
    torch.testing.assert_close(maxsim(q, coded, backend=kernel), maxsim(q, plain, backend=kernel))
    torch.testing.assert_close(topk(q, coded, 2, backend=kernel), topk(q, plain, 2, backend=kernel))


def test_no_gradient_in_silence():
    with pytest.raises(NotImplementedError, match="without gradients"):
        maxsim(tokens(2, 4, 16).requires_grad_(), int8(3, 6, 16))


def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="values have dtype"):
        Int8(torch.zeros(1, 2, 3), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="lengths add up to 3"):
        Int8(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2), [1, 2])
    with pytest.raises(ValueError, match="residuals"):
        Residuals(torch.zeros(2), torch.zeros(2, 3, dtype=torch.uint8), [2], torch.zeros(4, 16), torch.zeros(4))
    with pytest.raises(ValueError, match="embedding size"):
        maxsim(tokens(1, 2, 8), int8(3, 6, 16))
