"""Our own kernels and adapters, registered like anybody's."""

from . import AdapterSpec, KernelSpec, hookimpl

_KERNELS = "flashot_backends.kernels"


@hookimpl
def flashot_register_kernels() -> list[KernelSpec]:
    """Return the kernels that ship with this package."""
    jax, tpu = frozenset({"jax"}), frozenset({"tpu"})
    torch, cuda, triton = frozenset({"torch"}), frozenset({"cuda"}), ("triton",)
    return [
        KernelSpec("sinkhorn", "triton", f"{_KERNELS}.sinkhorn.triton", torch, cuda, triton, 20),
        KernelSpec("sinkhorn", "torch", f"{_KERNELS}.sinkhorn.blocks", torch, priority=10),
        KernelSpec("sinkhorn", "reference", f"{_KERNELS}.sinkhorn.reference", torch, priority=0),
        KernelSpec("sinkhorn", "pallas_gpu", f"{_KERNELS}.sinkhorn.pallas_gpu", jax, cuda, ("jax",), 20),
        KernelSpec("sinkhorn", "pallas_tpu", f"{_KERNELS}.sinkhorn.pallas_tpu", jax, tpu, ("jax",), 20),
        KernelSpec("sinkhorn", "chunked", f"{_KERNELS}.sinkhorn.jax_blocks", jax, None, ("jax",), 10),
        KernelSpec("sinkhorn", "jax_reference", f"{_KERNELS}.sinkhorn.jax_reference", jax, None, ("jax",), 0),
        KernelSpec("divergence", "triton", f"{_KERNELS}.sinkhorn.triton_symmetric", torch, cuda, triton, 20),
        KernelSpec("divergence", "torch", f"{_KERNELS}.sinkhorn.blocks", torch, priority=10),
        KernelSpec("divergence", "reference", f"{_KERNELS}.sinkhorn.reference", torch, priority=0),
        KernelSpec("maxsim", "triton", f"{_KERNELS}.maxsim.triton", torch, cuda, triton, 20),
        KernelSpec("maxsim", "torch", f"{_KERNELS}.maxsim.blocks", torch, priority=10),
        KernelSpec("maxsim", "pallas_gpu", f"{_KERNELS}.maxsim.pallas_gpu", jax, cuda, ("jax",), 20),
        KernelSpec("maxsim", "pallas_tpu", f"{_KERNELS}.maxsim.pallas_tpu", jax, tpu, ("jax",), 20),
        KernelSpec("maxsim", "chunked", f"{_KERNELS}.maxsim.jax_blocks", jax, None, ("jax",), 10),
        KernelSpec("maxsim", "reference", f"{_KERNELS}.maxsim.reference", torch, priority=0),
        KernelSpec("attention", "pallas_gpu", f"{_KERNELS}.attention.pallas_gpu", jax, cuda, ("jax",), 20),
        KernelSpec("attention", "pallas_tpu", f"{_KERNELS}.attention.pallas_tpu", jax, tpu, ("jax",), 20),
        KernelSpec("attention", "chunked", f"{_KERNELS}.attention.chunked", jax, None, ("jax",), 10),
        KernelSpec("attention", "reference", f"{_KERNELS}.attention.reference", jax, None, ("jax",), 0),
    ]


@hookimpl
def flashot_register_adapters() -> list[AdapterSpec]:
    """Return the adapters that ship with this package."""
    return [
        AdapterSpec(
            name="pot",
            modules=(
                "ot.bregman._sinkhorn",
                "ot.bregman._empirical",
                "ot.bregman._barycenter",
                "ot.bregman",
                "ot.unbalanced._sinkhorn",
                "ot.solvers._linear",
                "ot.solvers",
                "ot.batch._utils",
                "ot.batch._linear",
                "ot.da",
            ),
            target="flashot_backends.adapters.pot:adapt",
            distribution="POT",
            versions=">=0.9,<0.10",
        ),
        AdapterSpec(
            name="pylate",
            modules=(
                "pylate.scores.colbert",
                "pylate.scores.scores",
                "pylate.scores.xtr",
                "pylate.rank.rank",
                "pylate.losses.contrastive",
                "pylate.losses.cached_contrastive",
                "pylate.indexes.stanford_nlp.modeling.colbert",
                "pylate.indexes.stanford_nlp.search.index_storage",
                "pylate.indexes.stanford_nlp.indexing.codecs.residual",
            ),
            target="flashot_backends.adapters.pylate:adapt",
            distribution="pylate",
            versions=">=1.3,<1.7",
        ),
        AdapterSpec(
            name="colpali",
            modules=("colpali_engine.utils.maxsim",),
            target="flashot_backends.adapters.colpali:adapt",
            distribution="colpali-engine",
            versions=">=0.3.13,<0.4",
        ),
        AdapterSpec(
            name="sentence_transformers",
            modules=("sentence_transformers.util.similarity",),
            target="flashot_backends.adapters.sentence_transformers:adapt",
            distribution="sentence-transformers",
            versions=">=3,<7",  # there is something to adapt from 6 on
        ),
        AdapterSpec(
            name="geomloss",
            modules=(
                "geomloss.samples_loss",
                "geomloss._legacy.samples_loss",
                "geomloss.ot._implementations.matrix",
                "geomloss.ot._implementations.sample",
            ),
            target="flashot_backends.adapters.geomloss:adapt",
            distribution="geomloss",
            versions=">=0.2.6,<0.4",
        ),
        AdapterSpec(
            name="ott",
            modules=("ott.geometry.pointcloud",),
            target="flashot_backends.adapters.ott:adapt",
            distribution="ott-jax",
            versions=">=0.5,<0.7",
        ),
    ]
