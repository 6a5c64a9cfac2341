"""Statistics of a layer's input, gathered while calibration windows pass through a block.

Layers that read the same tensor (q, k and v; gate and up) share one object, so each Gram matrix is made once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE_EVERY = 8
"""One row in so many is counted in the histogram of magnitudes."""

HISTOGRAM_SHIFT = 18
"""Bits of a float32 magnitude that the histogram drops: 5 bits of its fraction are left, bins 2 to 3 % wide."""

GRAM_PANEL = 96
"""Columns per panel of a Gram matrix: only panels on and above the diagonal are multiplied, nearly half of the work."""


@dataclass
class InputStatistics:
    """What is known of one input [M, K].

    Attributes:
        largest: largest magnitude seen, float32 [].
        tokens: rows seen.
        products: sum of the outer products of the rows, float32 [K, K], right on and above the diagonal; None where it
            is not gathered.
        magnitudes: sum of the magnitudes of each feature, float32 [K]; None where it is not gathered.
        shift: sum of the outer products of what each row lacks of the unquantized model's and the row, float32 [K, K];
            None where they were not compared.
        shifted: rows that were compared.
        histogram: how many magnitudes of the sampled rows have which leading bits, int64 [8192]; None where no row was
            seen.
    """

    largest: Tensor
    tokens: int = 0
    products: Tensor | None = None
    magnitudes: Tensor | None = None
    histogram: Tensor | None = None
    shift: Tensor | None = None
    shifted: int = 0

    @classmethod
    def empty(cls, features: int | None = None, device: str | torch.device = "cpu") -> InputStatistics:
        """Nothing seen yet; with the number of features, Gram matrix and mean magnitudes are gathered too."""
        if features is None:
            return cls(torch.zeros(()))
        return cls(
            torch.zeros(()),
            products=torch.zeros(features, features, device=device),
            magnitudes=torch.zeros(features, device=device),
        )

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
        rows = x.reshape(-1, x.shape[-1])
        sizes = rows.abs()
        largest = sizes.amax().float().cpu()
        if not largest.isfinite():
            raise ValueError("calibration produced NaN or infinity")
        self.largest = torch.maximum(self.largest, largest)
        # Counted from the row after the last one, so that it does not matter how rows come in batches.
        sampled = sizes[-self.tokens % SAMPLE_EVERY :: SAMPLE_EVERY].float()
        self.tokens += rows.shape[0]
        bins = (sampled.view(torch.int32) >> HISTOGRAM_SHIFT).flatten()
        counts = torch.bincount(bins, minlength=1 << 31 - HISTOGRAM_SHIFT).cpu()
        self.histogram = counts if self.histogram is None else self.histogram + counts
        if self.products is None or self.magnitudes is None:
            return
        self.magnitudes += sizes.sum(dim=0, dtype=torch.float32)
        # Products of 16-bit numbers are exact in float32, so a 16-bit multiplication that accumulates in float32 would
        # differ in the order of the sums alone; torch rounds its result to 16 bits, so the rows are widened.
        rows = rows.float()
        width = GRAM_PANEL if rows.is_cpu else max(1, rows.shape[1])  # a GPU has it done before it is told all panels
        for start in range(0, rows.shape[1], width):
            panel = self.products[start : start + width, start:]
            panel.addmm_(rows[:, start : start + width].T, rows[:, start:])

    def compare(self, x: Tensor, unquantized: Tensor) -> None:
        """Takes in what a batch x [..., K], which was added, is in the unquantized model."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.shift is None:
            self.shift = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        self.shift.addmm_((unquantized.reshape(rows.shape).float() - rows).T, rows)
        self.shifted += len(rows)

    def percentile(self, percent: float) -> Tensor:
        """The magnitude below which `percent` of all entries of the sampled rows are, float32 []; 100 is the largest.

        It is the upper end of the histogram's bin, so it is up to 3 % above; it is never above the largest.

        Raises:
            ValueError: no row was seen.
        """
        if percent >= 100:
            return self.largest
        if self.histogram is None or not int(self.histogram.sum()):
            raise ValueError("no calibration token reached this layer")
        reached = self.histogram.cumsum(0).double() >= percent / 100 * float(self.histogram.sum())
        upper = ((reached.to(torch.int8).argmax() + 1).to(torch.int32) << HISTOGRAM_SHIFT).view(torch.float32)
        return torch.minimum(upper, self.largest)

    @property
    def gram(self) -> Tensor:
        """Mean outer product of the rows, float32 [K, K], symmetric.

        Raises:
            ValueError: it was not gathered, or no row was seen.
        """
        if self.products is None or self.tokens == 0:
            raise ValueError("no calibration token reached this layer")
        upper = self.products.triu() / self.tokens
        return upper + upper.triu(diagonal=1).T

    @property
    def mean_shift(self) -> Tensor | None:
        """Mean outer product of what rows lack of the unquantized model's and the rows, float32 [K, K]."""
        return None if self.shift is None or not self.shifted else self.shift / self.shifted

    @property
    def mean_magnitude(self) -> Tensor:
        """Mean magnitude of each feature, float32 [K].

        Raises:
            ValueError: it was not gathered, or no row was seen.
        """
        if self.magnitudes is None or self.tokens == 0:
            raise ValueError("no calibration token reached this layer")
        return self.magnitudes / self.tokens
