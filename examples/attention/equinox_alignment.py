"""Learn to carry labels across an alignment with gaps, in Equinox.

python examples/attention/equinox_alignment.py [--steps 400] [--bfloat16] [--out equinox_alignment.png]

Needs flashot-backends[equinox], optax and matplotlib. A minute or two on a CPU.
"""

import argparse

import alignments
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flashot_backends.adapters.equinox import SinkhornAttention

WIDTH, HEADS = 32, 2


class Encoder(eqx.Module):
    """Letters with their neighbours, and where they stand."""

    letters: eqx.nn.Embedding
    layers: list[eqx.nn.Conv1d]
    places: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.letters = eqx.nn.Embedding(alignments.LETTERS, WIDTH, key=keys[0])
        self.layers = [eqx.nn.Conv1d(WIDTH, WIDTH, 5, padding=2, key=k) for k in keys[1:3]]
        self.places = 0.1 * jax.random.normal(keys[3], (alignments.LENGTH, WIDTH))

    def __call__(self, letters, mask):
        x = jax.vmap(self.letters)(letters).T * mask
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x)) * mask
        return x.T + self.places


class Model(eqx.Module):
    encoder: Encoder
    labels: eqx.nn.Embedding
    attention: SinkhornAttention
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.encoder, self.labels = Encoder(keys[0]), eqx.nn.Embedding(alignments.LABELS, WIDTH, key=keys[1])
        self.attention = SinkhornAttention(
            HEADS, WIDTH, epsilon=0.5, window=16, dustbin="token", capacity=(12.0, 12.0), key=keys[2]
        )
        self.out = eqx.nn.Linear(WIDTH, alignments.LABELS + 1, key=keys[3])

    def __call__(self, item):
        query, key = self.encode(item)
        value = jax.vmap(self.labels)(item.labels)
        masks = {"query_mask": item.relative_mask, "key_mask": item.reference_mask}
        return jax.vmap(self.out)(self.attention(query, key, value, **masks))

    def encode(self, item):
        relative = self.encoder(item.relative, item.relative_mask)
        return relative, self.encoder(item.reference, item.reference_mask)

    def plan(self, item):
        masks = {"query_mask": item.relative_mask, "key_mask": item.reference_mask}
        return self.attention.plan(*self.encode(item), **masks).mean(0)


def loss_of(model, batch):
    logits = jax.vmap(model)(batch).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    right = (logits.argmax(-1) == batch.targets) & batch.relative_mask
    total = batch.relative_mask.sum()
    return (each * batch.relative_mask).sum() / total, right.sum() / total


def train(steps, bfloat16):
    model, optimiser = Model(jax.random.key(0)), optax.adam(3e-3)
    state, losses = optimiser.init(eqx.filter(model, eqx.is_inexact_array)), []

    @eqx.filter_jit
    def step(model, state, batch):
        def loss(model):
            cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
            return loss_of(cast if bfloat16 else model, batch)

        (value, right), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        updates, state = optimiser.update(gradient, state)
        return eqx.apply_updates(model, updates), state, value, right

    for number in range(steps):
        model, state, value, right = step(model, state, alignments.batch(number))
        losses.append(float(value))
        if number % 50 == 0 or number == steps - 1:
            print(f"step {number:4d}  loss {losses[-1]:.3f}  right {float(right):.2f}", flush=True)
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--out", default="equinox_alignment.png")
    options = parser.parse_args()
    model, losses = train(options.steps, options.bfloat16)
    held_out = alignments.batch(10**6, 64)
    value, right = eqx.filter_jit(loss_of)(model, held_out)
    print(f"unseen sequences: loss {float(value):.3f}, right {float(right):.2f}")
    item = jax.tree.map(lambda x: x[0], held_out)
    alignments.picture(
        options.out, losses, np.asarray(model.plan(item), np.float32), item, "Equinox, token dustbin, band 16"
    )


if __name__ == "__main__":
    main()
