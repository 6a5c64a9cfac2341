"""What makes the activations of a quantized layer: computed by the program that rounds them, not by one before it.

A producer is data, so that an operation can take it: two tensors, a number and a name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Producer:
    """How a row of activations comes from a row of x.

    Attributes:
        kind: `gated`, silu(x) * other with `other` [M, K] of x's dtype; or `normed`, x over the root of its mean
            square, times `other` [K].
        other: see above.
        epsilon: what is added to the mean square.
    """

    kind: str
    other: Tensor
    epsilon: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """The activations [..., K] in x's dtype, each step rounded to it as model classes do."""
        if self.kind == "gated":
            return torch.nn.functional.silu(x) * self.other
        numbers = x.float()
        numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + self.epsilon)
        return self.other * numbers.to(x.dtype)

    def over_rows(self, start: int, end: int) -> Producer:
        """The same for some of the rows of x."""
        return Producer(self.kind, self.other[start:end], self.epsilon) if self.kind == "gated" else self


def gated(up: Tensor) -> Producer:
    """silu(gate) * up, where x is the gate."""
    return Producer("gated", up)


def normed(weight: Tensor, epsilon: float) -> Producer:
    """The RMS norm of x with a weight [K]."""
    return Producer("normed", weight, epsilon)


def producer_of(other: Tensor | None, kind: str, epsilon: float) -> Producer | None:
    """The producer from the arguments of an operation, its tensor as rows; None where there is none."""
    if other is None:
        return None
    return Producer(kind, other if other.dim() == 1 else rows_of(other, other.shape[-1]), epsilon)


def rows_of(x: Tensor, columns: int) -> Tensor:
    """x [..., K] as [M, K], copied only where a row is not contiguous or rows are not evenly apart."""
    flat = x.reshape(-1, columns)
    return flat if flat.stride(1) == 1 else flat.contiguous()
