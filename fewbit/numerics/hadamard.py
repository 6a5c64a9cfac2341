"""Sylvester's Hadamard matrices: H of order 2n is [[H, H], [H, -H]]; over the square root of the order, orthogonal."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LARGEST_FACTOR = 64
"""Order of the largest matrix that is multiplied out; larger ones are Kronecker products of several."""


def times_hadamard(x: Tensor, order: int) -> Tensor:
    """x H / sqrt(order), H on the diagonal as often as it fits. It is its own inverse.

    Args:
        x: float [..., K], K a multiple of `order`.
        order: a power of two.

    Returns:
        In x's dtype.
    """
    assert order > 0 and order & (order - 1) == 0, f"{order} is no power of two"
    parts, done = x.reshape(-1, order), 1
    while done < order:
        factor = min(LARGEST_FACTOR, order // done)
        matrix = sylvester(factor).to(x.device, x.dtype)
        parts = torch.einsum("rdfl,fg->rdgl", parts.reshape(len(parts), done, factor, -1), matrix)
        done *= factor
    return (parts.reshape(x.shape) / order**0.5).to(x.dtype)


@cache
def sylvester(order: int) -> Tensor:
    """The matrix of an order that is a power of two: float32 entries of plus and minus one."""
    if order == 1:
        return torch.ones(1, 1)
    half = sylvester(order // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])
