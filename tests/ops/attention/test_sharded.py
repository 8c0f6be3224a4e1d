"""Sharded batch and heads, on four devices that the CPU pretends to be. In its own process: the count is read once."""

import os
import subprocess
import sys

PROGRAM = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as Spec
from flashot_backends.ops.attention import sinkhorn_attention

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (4, heads, 24, 8)) for key, heads in zip(keys, (4, 2, 2)))
attend = partial(sinkhorn_attention, window=6, base_steps=1, tail_steps=1, backend="chunked")

def gradients(run, spec):
    placed = jax.device_put((q, k, v), NamedSharding(mesh, spec))
    compiled = jax.jit(jax.grad(lambda *t: (run(*t) ** 2).sum(), (0, 1, 2))).lower(*placed).compile()
    return compiled(*placed), compiled.as_text().count("all-gather")

wanted, _ = gradients(attend, Spec())
both = Spec("batch", "heads")
mapped = jax.shard_map(attend, mesh=mesh, in_specs=(both,) * 3, out_specs=both, check_vma=False)
for run, spec in ((mapped, both), (attend, Spec("batch"))):
    got, gathers = gradients(run, spec)
    assert gathers == 0, gathers
    assert all(g.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4) for g in got), got[0].sharding
    for one, other in zip(got, wanted):
        assert np.abs(one - np.asarray(other)).max() < 1e-5 * np.abs(other).max()
print("equal")
"""


def test_shard_map_over_batch_and_heads_and_jit_over_batch():
    """The same gradients, laid out as the inputs, and nothing gathered."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr[-3000:]
