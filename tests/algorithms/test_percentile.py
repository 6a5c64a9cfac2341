"""Percentiles of magnitudes, from the histogram that calibration keeps."""

from __future__ import annotations

import pytest
import torch

from fewbit.algorithms.statistics import SAMPLE_EVERY, InputStatistics

ROWS = torch.randn(4000, 24, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 24)


def seen(rows: torch.Tensor, batch: int) -> InputStatistics:
    statistics = InputStatistics.empty()
    for part in rows.split(batch):
        statistics.add(part)
    return statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0, 99.9])
def test_a_percentile_is_the_sorted_magnitudes_own_within_a_bin(dtype: torch.dtype, percent: float) -> None:
    rows = ROWS.to(dtype)
    sizes = rows[::SAMPLE_EVERY].abs().float().flatten().sort().values
    exact = sizes[max(0, int(len(sizes) * percent / 100 + 0.999999) - 1)]
    found = seen(rows, 512).percentile(percent)
    assert exact <= found <= exact * (1 + 2.0**-5)


def test_the_whole_is_the_largest_and_batches_do_not_matter() -> None:
    whole = seen(ROWS, 4000)
    assert whole.percentile(100) == ROWS.abs().max()
    for batch in (1, 7, 512):
        assert torch.equal(seen(ROWS[:500], batch).histogram, seen(ROWS[:500], 500).histogram)
    assert whole.percentile(99.99999) <= whole.largest


def test_zeros_and_nothing() -> None:
    assert seen(torch.zeros(16, 4), 16).percentile(99) == 0
    with pytest.raises(ValueError, match="no calibration token"):
        InputStatistics.empty().percentile(99)
