"""What the matrix of conversions says is so, and the document says what the matrix does."""

from __future__ import annotations

import pytest
import torch

from fewbit.checkpoints.registry import formats
from fewbit.packing.registry import dequantize_record
from tests.checkpoints.conversion_matrix import DOCUMENT, EXACT, RESTATED, mark, outcomes, sources, targets, with_table


def test_the_document_is_fresh() -> None:
    if "gguf" not in formats():
        pytest.skip("The table has a row for GGUF, and its plugin is not installed.")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "docs/conversion.md is stale: make docs"


@pytest.mark.parametrize("source", sources())
def test_lossless_pairs_give_equal_numbers(source: str) -> None:
    found = outcomes(source).values()
    assert found
    for sample, record, held_by in found:
        numbers = dequantize_record(record)
        for target, held in held_by.items():
            if held is None:
                continue
            after = dequantize_record(held.record)
            if mark(held, sample.key) in (EXACT, RESTATED):
                assert torch.equal(after, numbers), (sample.label, target)
            else:
                assert torch.allclose(after, numbers, rtol=2.0**-22, atol=0), (sample.label, target)


@pytest.mark.parametrize("name", targets())
def test_a_format_takes_its_own_layers(name: str) -> None:
    assert {mark(held[name], sample.key) for sample, _, held in outcomes(name).values()} == {EXACT}
