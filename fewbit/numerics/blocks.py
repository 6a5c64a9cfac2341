"""Views of a tensor by the rectangles that share a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbit.lazy import functional as F
from fewbit.spec.granularity import Granularity

if TYPE_CHECKING:
    from torch import Tensor


def to_blocks(tensor: Tensor, granularity: Granularity) -> Tensor:
    """[..., R, C] -> [..., R', r, C', c]: rectangle (R', C') holds r x c numbers; edges are padded with zeros.

    A scale [..., R', C'] meets it as `scale[..., :, None, :, None]` (see `over_blocks`).
    """
    rows, columns = granularity.extents(tuple(tensor.shape))
    pad_rows, pad_columns = -tensor.shape[-2] % rows, -tensor.shape[-1] % columns
    if pad_rows or pad_columns:
        tensor = F.pad(tensor, (0, pad_columns, 0, pad_rows))
    *lead, height, width = granularity.scale_shape(tuple(tensor.shape))
    # A whole axis that is empty still has one (empty) rectangle; one cut into groups has none.
    inside = (tensor.shape[-2] // max(1, height), tensor.shape[-1] // max(1, width))
    return tensor.reshape(*lead, height, inside[0], width, inside[1])


def from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_blocks`: the tensor of `shape`, padding cropped."""
    *lead, height, rows, width, columns = blocks.shape
    return blocks.reshape(*lead, height * rows, width * columns)[..., : shape[-2], : shape[-1]]


def over_blocks(scale: Tensor) -> Tensor:
    """[..., R', C'] -> [..., R', 1, C', 1], which broadcasts over `to_blocks`."""
    return scale[..., :, None, :, None]


def block_extremes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of each rectangle, zero included, each [..., R', C']."""
    if blocks.numel() == 0:
        empty = blocks.sum(dim=(-3, -1))
        return empty, empty
    low, high = blocks.amin(dim=(-3, -1)), blocks.amax(dim=(-3, -1))
    return low.clamp(max=0), high.clamp(min=0)
