"""Layouts (where the bits of a code lie) and tensor specs (which tensors a format stores for a layer).

Element and storage are separate: `int4` says which numbers exist, a `Layout` says that eight of them share an int32
word along K, lowest bits first, each stored plus 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from fewbit.errors import ShapeError

Axis = Literal["N", "K"]


@dataclass(frozen=True)
class Layout:
    """Where the codes of a tensor [..., N, K] lie.

    Attributes:
        packing: name of the packing in `fewbit.packing` that turns codes into this layout and back.
        bits: bits of a stored code.
        axis: the logical axis along which codes share words; N is the second to last axis, K the last.
        word_bits: width of a storage word: 8, 16 or 32.
        offset: added to a code before it is stored, so that a signed code becomes a plain field.
        transposed: whether the words lie with their last two axes exchanged: [K, N/8] where they would be [N/8, K].
    """

    packing: str = "plain"
    bits: int = 8
    axis: Axis = "K"
    word_bits: int = 8
    offset: int = 0
    transposed: bool = False

    def __str__(self) -> str:
        if self == PLAIN:
            return "plain"
        plus = f"+{self.offset}" if self.offset else ""
        swapped = ":transposed" if self.transposed else ""
        return f"{self.packing}{self.bits}{plus}:{self.axis}:w{self.word_bits}{swapped}"


PLAIN = Layout()
"""One code per element of the tensor, in the dtype that torch has for the element (uint8 where it has none)."""


@dataclass(frozen=True)
class Extent:
    """One axis of a stored tensor: ceil(axis * factor / divisor), or the constant `factor` where `axis` is None.

    Attributes:
        multiple: the extent is rounded up to a multiple of this, and is not cut inside one: padding, or a tile.
        divisible: whether the axis may be split at all.
    """

    axis: Axis | None = None
    factor: int = 1
    divisor: int = 1
    multiple: int = 1
    divisible: bool = True

    def size(self, rows: int, columns: int) -> int:
        """The extent for a layer of `rows` output and `columns` input features."""
        if self.axis is None:
            return self.factor
        whole = rows if self.axis == "N" else columns
        return -(-whole * self.factor // (self.divisor * self.multiple)) * self.multiple

    @property
    def quantum(self) -> int:
        """How many features of `axis` the smallest separable piece holds."""
        period = self.divisor * self.multiple
        return period // gcd(self.factor, period)


ONE = Extent()
ROWS = Extent("N")
COLUMNS = Extent("K")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a format stores for a layer.

    Attributes:
        role: what it is in the hub (`codes`, `scale`, `zero_point`, `global_scale`, `order`, `input_scale`, ...).
        name: its name on disk below the layer's, say `weight_packed`.
        shape: one `Extent` per axis; None where any shape will do (texts, notes).
        dtype: torch's name of the stored dtype; None accepts any float dtype.
        optional: whether a checkpoint may leave it out.
        uncut: axes along which it cannot be split, because its order mixes them (flattened or folded weights).
    """

    role: str
    name: str
    shape: tuple[Extent, ...] | None
    dtype: str | None
    optional: bool = False
    uncut: tuple[Axis, ...] = ()

    def shape_of(self, rows: int, columns: int) -> tuple[int, ...]:
        """The tensor's shape for a layer of `rows` output and `columns` input features."""
        return tuple(extent.size(rows, columns) for extent in self.shape or ())

    def shard(self, axis: Axis, extent: int, rank: int, world: int) -> tuple[int, int, int] | None:
        """Which slice of this tensor rank `rank` of `world` holds when the layer is split along `axis`.

        Args:
            axis: N (column parallel) or K (row parallel).
            extent: the layer's whole extent along it.

        Returns:
            (tensor axis, start, length), or None where every rank holds the whole tensor.

        Raises:
            ShapeError: the split would cut a word, a group or a block.
        """
        if axis in self.uncut and world > 1:
            raise ShapeError(
                f"{self.name} cannot be split along {axis}: it is stored in an order that mixes the axes.",
                "Use one rank, or convert to a format that stores rows.",
            )
        for position, stored in enumerate(self.shape or ()):
            if stored.axis != axis:
                continue
            share, rest = divmod(extent, world)
            if world == 1:  # nothing is cut, so a short last group or word is no obstacle
                return position, 0, stored.size(extent, extent)
            if not stored.divisible:
                raise ShapeError(
                    f"{self.name} cannot be split along {axis}: its values refer to the whole layer.",
                    f"Split along {'N' if axis == 'K' else 'K'}, or use one rank.",
                )
            if rest or share % stored.quantum:
                raise ShapeError(
                    f"{self.name} cannot be split {world} ways along {axis}: {extent} features are no multiple of "
                    f"{world} x {stored.quantum}.",
                    "Use fewer ranks, or a group size that divides each rank's share.",
                )
            length = share * stored.factor // stored.divisor
            return position, rank * length, length
        return None
