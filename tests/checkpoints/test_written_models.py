"""Models that fewbit writes in each format of integer words: loaded, they are the same model in every format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from tests.tiny_models import VOCABULARY, save_tiny_model

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
FORMATS = ["gptq", "awq", "auto-round"]


def logits(folder: Path) -> torch.Tensor:
    model = load(folder, device="cpu", dtype=torch.float32, strict=True)
    assert not model.fewbit_report.carried
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", "W4A16"), ("llama", "W4A16_ASYM"), ("qwen3_moe", "W4A16_ASYM"), ("mixtral", "W4A16")],
)
def test_every_format_holds_the_same_model(tmp_path: Path, family: str, scheme: str) -> None:
    source = save_tiny_model(tmp_path / "model", family)
    found = []
    for name in ["compressed-tensors", *FORMATS]:
        quantize(source, tmp_path / name, scheme, group_size=32, format=name, effort="fast")
        found.append(logits(tmp_path / name))
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_a_mixed_model_in_one_gptq_file(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", "llama")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, format="gptq", ignore=["mlp.down_proj"], effort="fast")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert list(config["dynamic"]) == [rf"-:^model\.layers\.{index}\.mlp\.down_proj$" for index in range(2)]
    assert logits(tmp_path / "q").isfinite().all()
