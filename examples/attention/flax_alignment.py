"""Learn to carry labels across an alignment with gaps, in Flax nnx.

python examples/attention/flax_alignment.py [--steps 400] [--bfloat16] [--out flax_alignment.png]

Needs flashot-backends[flax], optax and matplotlib. A minute or two on a CPU.
"""

import argparse

import alignments
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flashot_backends.adapters.flax import SinkhornAttention
from flashot_backends.ops.attention import DustbinScore, transport_plan

WIDTH, HEADS, EPSILON, WINDOW = 32, 2, 0.5, 16


class Model(nnx.Module):
    def __init__(self, rngs, dtype):
        self.letters = nnx.Embed(alignments.LETTERS, WIDTH, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(alignments.LENGTH, WIDTH, dtype=dtype, rngs=rngs)
        self.labels = nnx.Embed(alignments.LABELS, WIDTH, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([nnx.Conv(WIDTH, WIDTH, 5, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.attention = SinkhornAttention(
            HEADS, WIDTH, epsilon=EPSILON, window=WINDOW, dustbin="score", dtype=dtype, rngs=rngs
        )
        self.out = nnx.Linear(WIDTH, alignments.LABELS + 1, dtype=dtype, rngs=rngs)

    def encode(self, letters, mask):
        x = self.letters(letters) * mask[..., None]
        for layer in self.layers:
            x = x + nnx.gelu(layer(x)) * mask[..., None]
        return x + self.places(jnp.arange(letters.shape[-1]))

    def __call__(self, batch):
        query = self.encode(batch.relative, batch.relative_mask)
        key = self.encode(batch.reference, batch.reference_mask)
        mask = nnx.make_attention_mask(batch.relative_mask, batch.reference_mask, dtype=bool)
        return self.out(self.attention(query, key, self.labels(batch.labels), mask=mask))

    def plan(self, item):
        heads = (
            part(self.encode(letters, mask)).swapaxes(0, 1)
            for part, letters, mask in (
                (self.attention.query, item.relative, item.relative_mask),
                (self.attention.key, item.reference, item.reference_mask),
            )
        )
        dustbin = DustbinScore(self.attention.dustbin_score[...])
        masks = {"query_mask": item.relative_mask, "key_mask": item.reference_mask}
        return transport_plan(*heads, epsilon=EPSILON, window=WINDOW, dustbin=dustbin, **masks).mean(0)


def loss_of(model, batch):
    logits = model(batch).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    right = (logits.argmax(-1) == batch.targets) & batch.relative_mask
    total = batch.relative_mask.sum()
    return (each * batch.relative_mask).sum() / total, right.sum() / total


@nnx.jit
def step(model, optimiser, batch):
    (value, right), gradient = nnx.value_and_grad(loss_of, has_aux=True)(model, batch)
    optimiser.update(model, gradient)
    return value, right


def train(steps, bfloat16):
    model = Model(nnx.Rngs(0), jnp.bfloat16 if bfloat16 else jnp.float32)
    optimiser, losses = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param), []
    for number in range(steps):
        value, right = step(model, optimiser, alignments.batch(number))
        losses.append(float(value))
        if number % 50 == 0 or number == steps - 1:
            print(f"step {number:4d}  loss {losses[-1]:.3f}  right {float(right):.2f}", flush=True)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--out", default="flax_alignment.png")
    options = parser.parse_args()
    model, losses = train(options.steps, options.bfloat16)
    held_out = alignments.batch(10**6, 64)
    value, right = nnx.jit(loss_of)(model, held_out)
    print(f"unseen sequences: loss {float(value):.3f}, right {float(right):.2f}")
    item = jax.tree.map(lambda x: x[0], held_out)
    plan = np.asarray(model.plan(item), np.float32)
    alignments.picture(options.out, losses, plan, item, "Flax nnx, score dustbin, band 16")


if __name__ == "__main__":
    main()
