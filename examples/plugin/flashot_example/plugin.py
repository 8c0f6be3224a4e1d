"""What the entry point names. It registers and imports nothing heavy."""

from flashot_backends.plugins import AdapterSpec, KernelSpec, hookimpl


@hookimpl
def flashot_register_kernels():
    return [
        KernelSpec(
            operation="sinkhorn",
            name="double",
            target="flashot_example.kernel",
            arrays=frozenset({"torch"}),
            requires=("torch",),
            priority=-1,  # never before our own: a user asks for it by name
        )
    ]


@hookimpl
def flashot_register_adapters():
    return [
        AdapterSpec(
            name="toyhost",
            modules=("toyhost.matching",),
            target="flashot_example.adapter:adapt",
            distribution="flashot-example",  # your host has a distribution of its own
            versions=">=1,<2",
        )
    ]
