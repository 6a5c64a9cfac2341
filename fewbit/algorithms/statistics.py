"""Statistics of a layer's input, gathered while calibration windows pass through a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class InputStatistics:
    """What is known of one layer's input [M, K].

    Attributes:
        largest: largest magnitude seen, float32 [].
        tokens: rows seen.
    """

    largest: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls) -> InputStatistics:
        return cls(torch.zeros(()))

    @classmethod
    def of_siblings(cls, others: Iterable[InputStatistics]) -> InputStatistics:
        """What stands in for an input that was never seen: the largest of others like it, no tokens."""
        seen = [other.largest for other in others if other.tokens]
        return cls(torch.stack(seen).amax()) if seen else cls.empty()

    def add(self, x: Tensor) -> None:
        """Takes in x [..., K].

        Raises:
            ValueError: x holds NaN or infinity.
        """
        if x.numel() == 0:
            return
        largest = x.abs().amax().float().cpu()
        if not largest.isfinite():
            raise ValueError("calibration produced NaN or infinity")
        self.largest = torch.maximum(self.largest, largest)
        self.tokens += x.numel() // x.shape[-1]
