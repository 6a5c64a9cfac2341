"""GPTQ's options on whole models: what needs the format is refused before anything is read, what is written is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fewbit.errors import OutputError
from fewbit.evaluation.verify import verify
from fewbit.models.load import load
from fewbit.models.quantization.quantize import QuantizeOptions, quantize
from tests.tiny_models import save_tiny_model

CALIBRATION = {"calibration_windows": 8, "calibration_length": 32}


def test_groups_in_the_order_of_visits_are_written_and_read(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    settings = {"desc_act": True}
    quantize(source, tmp_path / "out", group_size=16, format="gptq", algorithm="gptq", settings=settings, **CALIBRATION)
    assert verify(tmp_path / "out", source).passed
    records = [module.record for module in load(tmp_path / "out", device="cpu").modules() if hasattr(module, "record")]
    config = (tmp_path / "out" / "config.json").read_text()
    assert '"desc_act": true' in config
    assert all("order" in record for record in records if record is not None)


@pytest.mark.parametrize("written", ["compressed-tensors", "awq"])
def test_formats_without_an_order_refuse_it_by_name(tmp_path: Path, written: str) -> None:
    source = save_tiny_model(tmp_path / "model")
    asked = QuantizeOptions(
        "W4A16_ASYM", 16, format=written, algorithm="gptq", settings={"desc_act": True}, calibration_text="nowhere.txt"
    )
    with pytest.raises(OutputError, match="desc_act"):
        asked.plan(source)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_asymmetric_term_says_where_it_was_kept(tmp_path: Path, family: str) -> None:
    source = save_tiny_model(tmp_path / "model", family)
    reports = [
        quantize(
            source, tmp_path / f"held-{held}", group_size=16, algorithm="gptq", settings={"asymmetric": 0.5},
            calibration_memory=held, **CALIBRATION,
        )
        for held in (10**9, 0)
    ]  # fmt: skip
    layers = [report["layers"] for report in reports]
    inside = [layer for layer in layers[0] if layer["method"] == "gptq"]
    assert inside and all("asymmetric term in" in one["remarks"][0] for one in inside if ".experts." not in one["name"])
    page, card = ((tmp_path / "held-0" / name).read_text() for name in ("quantization_report.html", "README.md"))
    assert all(one["remarks"][0] in page for one in inside if one["remarks"])
    assert page.count("<td>gptq</td>") == len(inside) + 1 + 1  # a row each, one group of all, and the algorithm
    assert f"{sum(bool(one['remarks']) for one in layers[0])} of {len(layers[0])} have some" in card
    hashes = [{layer["name"]: layer.get("sha256") for layer in found} for found in layers]
    assert hashes[0] == hashes[1]
