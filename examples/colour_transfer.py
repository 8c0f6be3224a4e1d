"""Give each of two photographs the colours of the other: optimal transport between their pixels, with POT.

A plain POT script. Whose solver computes is decided by the method it is given:

    python colour_transfer.py --reduce 10                                    # POT's own, with a matrix
    python -m flashot_backends colour_transfer.py --reduce 10 --method flash    # the same call, another engine
    python -m flashot_backends colour_transfer.py --reduce 3 --method flash --lazy    # 30 000 pixels, no matrix
"""

import argparse
import time

import numpy as np
import ot
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name, reduce):
    """A photograph, each block of reduce × reduce pixels averaged, as colours in [0, 1]³: one row a pixel."""
    photo = np.asarray(Image.fromarray(load_sample_image(name)).reduce(reduce))
    return photo.shape, torch.tensor(photo.reshape(-1, 3) / 255, dtype=torch.float32, device=DEVICE)


def dense(X, Y, reg, method, iterations):
    """The plan as a matrix."""
    return ot.sinkhorn(
        [], [], ot.dist(X, Y), reg, method=method, numItermax=iterations, stopThr=0, warn=False, verbose=True
    )


def lazy(X, Y, reg, method, iterations):
    """The plan as a LazyTensor, ten iterations at a time to show how far they are."""
    potentials = None
    for done in range(10, iterations + 1, 10):
        f, g, log = ot.bregman.empirical_sinkhorn(
            X, Y, reg, isLazy=True, method=method, numIterMax=10, stopThr=0, warn=False, log=True, warmstart=potentials
        )
        potentials = f, g
        print(f"{done:5d}|{float(log['err'][-1]):8e}|", flush=True)
    return log["lazy_plan"]


def project(plan, X, Y, pairs=50_000_000 if DEVICE == "cuda" else 1_000_000):
    """Where each pixel of X and of Y goes, the mean of the colours it is sent to; and how wrong the marginals are."""
    X_moved, Y_moved, columns = torch.empty_like(X), torch.zeros_like(Y), torch.zeros_like(Y[:, :1])
    error, rows = 0.0, max(1, pairs // len(Y))
    for i in range(0, len(X), rows):
        block = plan[i : i + rows]
        mass = block.sum(1, keepdim=True)
        X_moved[i : i + rows] = block @ Y / mass
        Y_moved += block.T @ X[i : i + rows]
        columns += block.sum(0)[:, None]
        error += float((mass - 1 / len(X)).abs().sum())
    return X_moved, Y_moved / columns, max(error, float((columns - 1 / len(Y)).abs().sum()))


def peak_memory():
    """The most memory that this process, or its card, has held so far: bytes."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def finish():
    """Wait for the card."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--method", default="sinkhorn_log", help="what ot.sinkhorn takes (default: %(default)s)")
parser.add_argument("--lazy", action="store_true", help="never hold a matrix of all pairs")
parser.add_argument("--reduce", type=int, default=10, help="average blocks of this many pixels squared")
parser.add_argument("--reg", type=float, default=0.04, help="of squared distances of colours in [0, 1]³")
parser.add_argument("--iterations", type=int, default=60, help="a multiple of ten")
parser.add_argument("--picture", default="colour_transfer.png", help="the picture to write (default: %(default)s)")
parser.add_argument("--numbers", help="an .npz file for the images and the measurements")
options = parser.parse_args()

X_shape, X = load("china.jpg", options.reduce)
Y_shape, Y = load("flower.jpg", options.reduce)
print(f"{len(X)} × {len(Y)} pixels on {DEVICE}, method {options.method}", flush=True)

finish()
inputs, start = peak_memory(), time.perf_counter()
solver = lazy if options.lazy else dense
plan = solver(X, Y, options.reg, options.method, options.iterations)
finish()
solved = time.perf_counter()
X_moved, Y_moved, error = project(plan, X, Y)
finish()
seconds, memory = time.perf_counter() - start, peak_memory() - inputs
print(f"{seconds:.1f} s, of which the plan {solved - start:.1f} s")
print(f"{memory / 2**20:.0f} MB above the inputs, marginals right to {error:.1e}")

photographs = {"source": (X, X_shape), "target": (Y, Y_shape)}
photographs |= {"source_moved": (X_moved, X_shape), "target_moved": (Y_moved, Y_shape)}
images = {name: colours.clamp(0, 1).cpu().numpy().reshape(shape) for name, (colours, shape) in photographs.items()}
Image.fromarray((np.concatenate(list(images.values()), 1) * 255).round().astype(np.uint8)).save(options.picture)
if options.numbers:
    np.savez(options.numbers, seconds=seconds, memory=memory, error=error, device=DEVICE, **images)
