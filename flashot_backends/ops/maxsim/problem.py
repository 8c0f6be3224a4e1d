"""One canonical form for every way of giving queries and documents; ``kernels.maxsim.layout`` says what it means."""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A scoring problem, as kernels receive it."""

    queries: Any
    documents: Any
    queries_mask: Any = None
    documents_mask: Any = None
    queries_offsets: Any = None
    documents_offsets: Any = None
    owners: Any = None
    floors: Any = None
    longest_query: int = 0
    longest_document: int = 0
    set_size: int = 0
    masked: str = "exclude"

    @property
    def array(self):
        """The framework of the arrays, as dispatch asks for it."""
        return "torch"

    @property
    def device(self):
        """The kind of device, as dispatch asks for it."""
        return self.queries.device.type
