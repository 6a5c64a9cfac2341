"""Transforms: matrices that weights of a checkpoint were multiplied with, and those that its activations must be.

A rotation R before a layer leaves its product as it is when the weight has the inverse on that side: (x R)(R^-1 W^T).
What was done to weights is in the file; what has to be done to activations, at run time, is said here.
"""

from __future__ import annotations

from dataclasses import dataclass

ONLINE = ("input", "output", "q_attn", "k_cache")
"""Where activations are transformed: what a layer reads, what it puts out, queries, and keys before they are cached."""

OFFLINE = ("weight_input", "weight_output")
"""Where weights are, along K and along N; it is done already in what is stored."""

HADAMARD = "hadamard"
"""Sylvester's matrix of a power of two over the square root of its order; every other kind is stored in the file."""


@dataclass(frozen=True)
class Transform:
    """One matrix in one place.

    Attributes:
        name: of the group that the configuration puts it into; its places share one matrix of an order.
        kind: `hadamard`, `random-hadamard` or `random-matrix`.
        location: one of `ONLINE` and `OFFLINE`.
        targets, ignore: patterns of modules, by the format's own rule.
        inverse: whether it is the inverse that is multiplied.
        order: of the matrix, which stands on the diagonal as often as it fits; None for the whole axis.
        permuted: whether the matrix's rows and columns are permuted by a stored permutation.
        dtype: torch's name of the dtype in which it is multiplied.
    """

    name: str
    kind: str
    location: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...] = ()
    inverse: bool = False
    order: int | None = None
    permuted: bool = False
    dtype: str = "float32"

    @property
    def is_online(self) -> bool:
        """Whether it has to be applied at run time."""
        return self.location in ONLINE

    @property
    def is_stored(self) -> bool:
        """Whether the matrix has to be in the file."""
        return self.kind != HADAMARD or self.permuted

    def __str__(self) -> str:
        matrix = f"inverse {self.kind}" if self.inverse else self.kind
        blocks = f" of order {self.order}" if self.order else ""
        when = "at run time" if self.is_online else "in the stored weights already"
        return f"{self.name}: {matrix}{blocks} at {self.location} of {', '.join(self.targets)}, {when}"
