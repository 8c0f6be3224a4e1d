"""Pairs of related sequences from a seeded generator: made up, protein-like only in having 20 letters.

A reference of random letters carries a hidden label (0 … 3) at each position, constant over short stretches. A relative
is copied from it with substitutions, deletions and insertions. A model sees both sequences of letters and the labels of
the reference, and must label the relative: inherited labels where it is aligned, INSERTED where it is not.
"""

from typing import NamedTuple

import numpy as np

LETTERS, LABELS, INSERTED, LENGTH = 20, 4, 4, 48


class Batch(NamedTuple):
    """All (batch, LENGTH). source: the reference position each relative position was copied from, −1 for insertions."""

    reference: np.ndarray
    labels: np.ndarray
    relative: np.ndarray
    targets: np.ndarray
    source: np.ndarray
    reference_mask: np.ndarray
    relative_mask: np.ndarray


def batch(seed: int, size: int = 16) -> Batch:
    """The same seed gives the same batch."""
    rng = np.random.default_rng(seed)
    return Batch(*(np.stack(part) for part in zip(*(_pair(rng) for _ in range(size)), strict=True)))


def _pair(rng):
    length = rng.integers(32, 41)
    reference = rng.integers(0, LETTERS, length)
    labels: np.ndarray = np.repeat(rng.integers(0, LABELS, length), rng.integers(2, 7, length))[:length]
    source = _edit(rng, length)
    copied = source >= 0
    kept = copied & (rng.random(len(source)) < 0.85)
    letters = np.where(kept, reference[source], rng.integers(0, LETTERS, len(source)))
    targets = np.where(copied, labels[source], INSERTED)
    masks = (_pad(np.ones(size, bool), False) for size in (length, len(source)))
    return _pad(reference), _pad(labels), _pad(letters), _pad(targets), _pad(source, -1), *masks


def _edit(rng, length):
    """Copied positions in order, with runs deleted and runs of −1 inserted, at most LENGTH in all."""
    parts, position = [], 0
    while position < length:
        step = rng.integers(5, 12)
        parts.append(np.arange(position, min(position + step, length)))
        position += step
        if rng.random() < 0.5:
            parts.append(np.full(rng.integers(1, 5), -1))
        else:
            position += rng.integers(0, 4)
    return np.concatenate(parts)[:LENGTH]


def _pad(array, value=0):
    return np.pad(array, (0, LENGTH - len(array)), constant_values=value)


def picture(path, losses, plan, example: Batch, title):
    """Loss of training beside one plan; circles mark where each position was really copied from."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    left.plot(losses, color="0.75", lw=0.8)
    width = max(1, len(losses) // 30)
    left.plot(np.convolve(losses, np.ones(width) / width, "valid"), color="tab:blue")
    left.set(xlabel="step", ylabel="cross-entropy", title=title, ylim=(0, None))
    shown = right.imshow(plan, cmap="magma_r", vmin=0, vmax=max(0.5, float(plan.max())), interpolation="nearest")
    rows = np.flatnonzero(example.source >= 0)
    right.plot(example.source[rows], rows, "o", ms=5, mfc="none", mec="tab:green", mew=0.8)
    size = int(example.relative_mask.sum()), int(example.reference_mask.sum())
    right.set(xlim=(-0.5, size[1] - 0.5), ylim=(size[0] - 0.5, -0.5), xlabel="reference", ylabel="relative")
    right.set_title("plan, mean of the heads (circles: the truth)")
    figure.colorbar(shown, ax=right, shrink=0.85)
    figure.savefig(path, dpi=120)
