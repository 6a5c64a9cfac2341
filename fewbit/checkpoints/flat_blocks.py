"""Blocks of a flattened matrix as groups of its rows.

Some formats (bitsandbytes, HQQ) scale every `size` consecutive numbers of the row-major matrix. Where the size divides
K these are the groups of the rows; where it does not, blocks run across row ends. Every gcd(K, size) numbers of a row
then still lie in one block, so that groups of that many, scales repeated, say the same.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from fewbit.errors import OutputError
from fewbit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def group_of_blocks(columns: int, size: int) -> int:
    """The largest group size for which every group of a row of `columns` numbers lies in one block."""
    return gcd(columns, size)


def block_count(shape: tuple[int, int], size: int) -> int:
    """How many blocks the matrix has; the last may be shorter."""
    return -(-shape[0] * shape[1] // size)


def spread_blocks(values: Tensor, shape: tuple[int, int], size: int) -> Tensor:
    """One value for each block -> one for each group of a row, [N, K / group].

    Args:
        values: [blocks].
        shape: [N, K] of the matrix.
        size: numbers in a block.
    """
    rows, columns = shape
    if columns % size == 0:
        return values.reshape(rows, columns // size)
    return values[_block_of_group(shape, size, values.device)].reshape(rows, -1)


def collect_blocks(groups: Tensor, shape: tuple[int, int], size: int) -> Tensor:
    """The inverse of `spread_blocks`.

    Raises:
        OutputError: groups of one block have different values.
    """
    if shape[1] % size == 0:
        return groups.reshape(-1)
    values = groups.new_empty(block_count(shape, size))
    values[_block_of_group(shape, size, groups.device)] = groups.reshape(-1)
    if not torch.equal(spread_blocks(values, shape, size), groups):
        raise OutputError(
            f"Scales differ within a block of {size} weights of a layer {list(shape)}.", "Choose another format."
        )
    return values


def _block_of_group(shape: tuple[int, int], size: int, device: torch.device) -> Tensor:
    group = group_of_blocks(shape[1], size)
    return torch.arange(shape[0] * shape[1] // group, device=device) * group // size
