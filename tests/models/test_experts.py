"""Experts that a checkpoint stores one by one: fused where they are alike, linear layers of their own where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fewbit.kernels.select import Preference
from fewbit.methods.experts import FusedExperts
from fewbit.models.experts import UnfusedExperts
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.runtime.generate import generate
from tests.kernels.layers import needs_extension
from tests.tiny_models import VOCABULARY, byte_tokenizer, save_tiny_model

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
APART = Preference(disabled=frozenset({"cpu_experts"}))
pytestmark = needs_extension


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()} & {FusedExperts, UnfusedExperts}


@pytest.mark.parametrize(("scheme", "group_size", "tolerance"), [("W4A16", 32, 1e-5), ("W8A8", None, 2e-2)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_alike_experts_are_fused(
    tmp_path: Path, family: str, scheme: str, group_size: int | None, tolerance: float
) -> None:
    source = save_tiny_model(tmp_path / "model", family)
    quantize(source, tmp_path / "quantized", scheme, group_size=group_size, effort="fast")
    fused, apart = (
        load(tmp_path / "quantized", device="cpu", dtype=torch.float32, preference=preference)
        for preference in (Preference(), APART)
    )
    assert kinds(fused) == {FusedExperts} and kinds(apart) == {UnfusedExperts}
    found, wanted = logits(fused), logits(apart)
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    moved = logits(fused.to(torch.float32).to("cpu"))
    assert torch.equal(moved, found)
    answer = generate(fused, byte_tokenizer(), "Once", max_new_tokens=3, chat=False)
    assert answer.decoded_by.startswith("transformers: ")


def test_experts_of_several_kinds_stay_apart(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", "qwen3_moe", hidden_act="gelu")
    quantize(source, tmp_path / "gelu", "W4A16", group_size=32, effort="fast")
    assert kinds(load(tmp_path / "gelu", device="cpu")) == {UnfusedExperts}
    source = save_tiny_model(tmp_path / "plain", "qwen3_moe")
    quantize(
        source,
        tmp_path / "mixed",
        "W4A16",
        group_size=32,
        ignore=["re:.*experts.3.down_proj", "lm_head"],
        effort="fast",
    )
    mixed = load(tmp_path / "mixed", device="cpu", dtype=torch.float32)
    assert kinds(mixed) == {UnfusedExperts} and logits(mixed).isfinite().all()


@pytest.mark.parametrize(
    "name", ["autoround-w4a16-moe-a", "llmcompressor-w4a16-g128-moe-a", "gptqmodel-w4g64sym-moe-c"]
)
def test_experts_of_other_tools(shared_folder: Path, name: str) -> None:
    folder = shared_folder / "checkpoints" / name
    expected = json.loads((folder / "expected.json").read_text())
    fused, apart = (load(folder, device="cpu", dtype=torch.float32, preference=p) for p in (Preference(), APART))
    assert kinds(apart) == {UnfusedExperts} and expected
    found, wanted = logits(fused), logits(apart)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
