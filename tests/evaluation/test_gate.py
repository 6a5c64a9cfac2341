"""The gate on quality: promotes until it holds, and writes nothing where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fewbit.errors import OutputError, SchemeError
from fewbit.evaluation.gate import HELD_OUT_WINDOWS, quantize_within
from fewbit.evaluation.verify import verify
from fewbit.models.quantization.quantize import QuantizeOptions
from fewbit.spec.recipe import Recipe
from tests.tiny_models import save_tiny_model

START: dict[str, Any] = {"algorithm": "round_to_nearest", "calibration_windows": 4, "calibration_length": 64}
W4 = QuantizeOptions("W4A16", group_size=32, **START)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("gate") / "model")


@pytest.fixture(scope="module")
def wide_open(source: Path) -> dict[str, Any]:
    """The report of a run whose gate holds at once."""
    return quantize_within(source, source.parent / "open", 10.0, W4)


def test_a_gate_that_holds_at_once_changes_nothing(wide_open: dict[str, Any]) -> None:
    assert len(wide_open["gate"]["rounds"]) == 1 and wide_open["bits_per_weight"] == 4.5
    assert wide_open["quality"]["mean_kl"] == wide_open["gate"]["rounds"][0]["mean_kl"] > 0
    assert wide_open["quality"]["windows"] == HELD_OUT_WINDOWS
    assert "after its first 4 windows" in wide_open["quality"]["text"]


def test_the_worst_layers_get_more_bits_until_it_holds(source: Path, tmp_path: Path, wide_open: dict[str, Any]) -> None:
    limit = wide_open["quality"]["mean_kl"] / 3
    report = quantize_within(source, tmp_path / "q", limit, W4)
    rounds = report["gate"]["rounds"]
    assert len(rounds) > 1 and rounds[-1]["mean_kl"] <= limit < rounds[0]["mean_kl"]
    assert 4.5 < report["bits_per_weight"] == rounds[-1]["bits_per_weight"] < 10
    recipe = Recipe.from_json((tmp_path / "q" / "fewbit_recipe.json").read_text())
    assert len(recipe.scheme.keys) > 1 and recipe.scheme.name.startswith("W4A16-max-kl-")
    assert verify(tmp_path / "q", source).passed
    written = json.loads((tmp_path / "q" / "quantization_report.json").read_text())
    assert written["gate"] == report["gate"] and written["quality"] == report["quality"]
    page = (tmp_path / "q" / "quantization_report.html").read_text()
    assert "Gate" in page and f"{rounds[-1]['mean_kl']:.4f}" in page
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (W4, "needed at most 1e-09; . rounds were tried. Nothing was written"),
        (QuantizeOptions(bits_per_weight=4.5, **START), "the budget allows no more bits"),
    ],
)
def test_a_gate_that_cannot_hold_writes_nothing(
    source: Path, tmp_path: Path, asked: QuantizeOptions, says: str
) -> None:
    with pytest.raises(SchemeError, match=says):
        quantize_within(source, tmp_path / "q", 1e-9, asked)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_left_alone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        quantize_within(source, tmp_path, 1.0, W4)
    with pytest.raises(SchemeError, match="cannot be asked for"):
        quantize_within(source, tmp_path / "q", float("nan"), W4)
