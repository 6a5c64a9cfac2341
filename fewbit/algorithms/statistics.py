"""Statistics of a layer's input, gathered while calibration windows pass through a block.

Layers that read the same tensor (q, k and v; gate and up) share one object, so each Gram matrix is made once. Nothing
waits for the device while rows are taken in: whether they were finite is asked when all have been.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

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
        peaks: largest magnitude of each feature, float32 [K]; None where it is not gathered.
        sample: some of the rows as they were, [S, K]; None where none were kept.
        shift: sum of the outer products of what each row lacks of the unquantized model's and the row, float32 [K, K];
            None where they were not compared.
        shifted: rows that were compared.
        histogram: how many magnitudes of every eighth row have which leading bits, int64 [8192]; None where it is not
            gathered.
    """

    largest: Tensor
    tokens: int = 0
    products: Tensor | None = None
    magnitudes: Tensor | None = None
    histogram: Tensor | None = None
    shift: Tensor | None = None
    shifted: int = 0
    peaks: Tensor | None = None
    sample: Tensor | None = None

    @classmethod
    def empty(
        cls, features: int | None = None, device: str | torch.device = "cpu", histogram: bool = True
    ) -> InputStatistics:
        """Nothing seen yet.

        Args:
            features: K, for the Gram matrix, and the mean and the largest magnitudes of features, to be gathered too.
            device: of the rows to come.
            histogram: whether percentiles will be asked for.
        """
        bins = torch.zeros(1 << 31 - HISTOGRAM_SHIFT, dtype=torch.int64, device=device) if histogram else None
        if features is None:
            return cls(torch.zeros((), device=device), histogram=bins)
        return cls(
            torch.zeros((), device=device),
            products=torch.zeros(features, features, device=device),
            magnitudes=torch.zeros(features, device=device),
            peaks=torch.zeros(features, device=device),
            histogram=bins,
        )

    @classmethod
    def of_siblings(cls, others: Iterable[InputStatistics]) -> InputStatistics:
        """What stands in for an input that was never seen: the largest of others like it, no tokens."""
        seen = [other.largest for other in others if other.tokens]
        return cls(torch.stack(seen).amax()) if seen else cls.empty()

    def add(self, x: Tensor, sample: int = 0) -> None:
        """Takes in x [..., K], of which `sample` rows, evenly spread, are kept as they are."""
        if x.numel() == 0:
            return
        rows = x.reshape(-1, x.shape[-1])
        sizes = rows.abs()
        peaks = sizes.amax(dim=0).float()
        self.largest = torch.maximum(self.largest, peaks.amax())
        if self.histogram is not None:
            # Counted from the row after the last one, so that it does not matter how rows come in batches.
            self.histogram += _histogram(sizes[-self.tokens % SAMPLE_EVERY :: SAMPLE_EVERY])
        self.tokens += rows.shape[0]
        if sample:
            step = max(1, len(rows) // sample)
            kept = rows[step - 1 :: step][:sample]
            self.sample = kept.clone() if self.sample is None else torch.cat([self.sample, kept])
        if self.products is None or self.magnitudes is None or self.peaks is None:
            return
        self.peaks = torch.maximum(self.peaks, peaks)
        self.magnitudes += sizes.sum(dim=0, dtype=torch.float32)
        if _multiplied_as_they_are(rows):
            self.products += _outer_products(rows, rows)
            return
        rows = rows.float()
        width = GRAM_PANEL if rows.is_cpu else max(1, rows.shape[1])  # a GPU has it done before it is told all panels
        for start in range(0, rows.shape[1], width):
            panel = self.products[start : start + width, start:]
            panel.addmm_(rows[:, start : start + width].T, rows[:, start:])

    def compare(self, x: Tensor, unquantized: Tensor) -> None:
        """Takes in what a batch x [..., K], which was added, is in the unquantized model."""
        rows = x.reshape(-1, x.shape[-1])
        unquantized = unquantized.reshape(rows.shape)
        if self.shift is None:
            self.shift = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        if _multiplied_as_they_are(rows) and unquantized.dtype == rows.dtype:
            self.shift += _outer_products(unquantized, rows) - _outer_products(rows, rows)
        else:
            rows = rows.float()
            self.shift.addmm_((unquantized.float() - rows).T, rows)
        self.shifted += len(rows)

    def require_finite(self) -> None:
        """Refuses rows that were not finite.

        Raises:
            ValueError: one held NaN or infinity.
        """
        if not bool(self.largest.isfinite()):
            raise ValueError("calibration produced NaN or infinity")

    def divided(self, columns: Tensor) -> InputStatistics:
        """What they would be, had every row been divided by `columns`, float32 [K].

        Exactly so, but for the histogram, which is taken from the sample; it is none where there is no sample.
        """
        assert self.products is not None and self.magnitudes is not None and self.peaks is not None
        sample = None if self.sample is None else self.sample.float() / columns
        peaks = self.peaks / columns.abs()
        return replace(
            self,
            products=self.products / torch.outer(columns, columns),
            magnitudes=self.magnitudes / columns.abs(),
            peaks=peaks,
            largest=peaks.amax(),
            sample=sample,
            histogram=None if self.histogram is None or sample is None else _histogram(sample.abs()),
        )

    def percentile(self, percent: float) -> Tensor:
        """The magnitude below which `percent` of all entries of the sampled rows are, float32 []; 100 is the largest.

        It is the upper end of the histogram's bin, so it is up to 3 % above; it is never above the largest.

        Raises:
            ValueError: no row was seen, or their magnitudes were not counted.
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


def _multiplied_as_they_are(rows: Tensor) -> bool:
    """Whether 16-bit rows go through a multiplication that accumulates in float32 and does not round its result.

    Products of 16-bit numbers are exact in float32, so it differs from one of widened rows in the order of sums alone.
    """
    return rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16)


def _outer_products(left: Tensor, right: Tensor) -> Tensor:
    """The sum of the outer products of 16-bit rows, float32 [K, K]."""
    return torch.mm(left.T, right, out_dtype=torch.float32)


def _histogram(sizes: Tensor) -> Tensor:
    """How many magnitudes have which leading bits, int64 [8192]."""
    bins = (sizes.float().view(torch.int32) >> HISTOGRAM_SHIFT).flatten()
    return torch.bincount(bins, minlength=1 << 31 - HISTOGRAM_SHIFT)
