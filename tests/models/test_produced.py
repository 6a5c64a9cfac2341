"""Norms and gated activations inside the operations that round them: the same model, by fewer passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewbit.kernels.interface import LinearKernel
from fewbit.models.load import load
from fewbit.models.produced import DeferredNorm, GatedMlp
from fewbit.models.quantization.quantize import quantize
from tests.tiny_models import VOCABULARY, save_tiny_model

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


@pytest.mark.parametrize("join_members", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_model_gives_the_same_logits(
    family: str, join_members: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(save_tiny_model(tmp_path / "model", family), tmp_path / "q", "W8A8", effort="fast")
    how = {"device": "cpu", "dtype": torch.float32, "join_members": join_members}
    plain = load(tmp_path / "q", **how)
    monkeypatch.setattr(LinearKernel, "rounds_produced", True)
    model = load(tmp_path / "q", **how)
    found = [type(module) for module in model.modules()]
    if family == "gemma3_text":  # its blocks are not plain gated ones
        assert GatedMlp not in found
        assert DeferredNorm not in found
        return
    assert found.count(GatedMlp) == len(model.model.layers)
    assert found.count(DeferredNorm) == (2 * len(model.model.layers) if join_members else 0)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_kernels_that_do_not_round_leave_the_model_as_it_is(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", effort="fast", group_size=32)
    model = load(tmp_path / "q", device="cpu", join_members=True)
    assert not any(isinstance(module, GatedMlp | DeferredNorm) for module in model.modules())
