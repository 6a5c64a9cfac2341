"""Tiny checkpoints of the original tools as whole models: their logits, and those of their dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from fewbit.errors import ShapeError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.evaluation.verify import verify
from fewbit.methods.expert_stack import QuantizedStack
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stacked_experts import InterleavedExperts
from fewbit.models.stored import StoredCheckpoint
from tests.checkpoints.test_tiny_checkpoints import folder_of
from tests.tiny_models import save_tiny_model

TOLERANCE = {
    "bitsandbytes-int8-llama-e": 2e-3,
    "bitsandbytes-nf4-llama-e": 2e-3,
    "hqq-w4g64-llama-e": 2e-3,
    "torchao-int8wo-llama-e": 2e-3,
    "torchao-intx4g32-llama-e": 1e-2,  # expected of weights rounded to bf16
    "own-mxfp4-gptoss-a": 1e-2,  # expected of experts that multiply in bf16
}


def expectation(path: Path) -> tuple[Tensor, dict[str, Any]]:
    """Token ids, and the logits of the dequantized weights."""
    expected = json.loads((path / "expected.json").read_text())
    return torch.tensor(expected["input_ids"]), expected.get("logits_weight_only_f32") or expected["logits_dense"]


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits[0]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def dense(path: Path) -> PreTrainedModel:
    """The unquantized architecture with the checkpoint's own tensors and its dequantized weights."""
    stored = StoredCheckpoint.open(path)
    state = {}
    for layer in decoded_layers(stored):
        stack = layer.numbers.dim() == 3
        state[layer.name if stack else f"{layer.name}.weight"] = (
            layer.numbers.transpose(-1, -2) if stack else layer.numbers
        )
    model = build_on_meta(read_config(path), torch.float32)
    for name in model.state_dict():
        if name not in state and name in stored.folder.headers:
            state[name] = stored.folder.load(name).float()
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    return model


@pytest.mark.parametrize("name", TOLERANCE)
def test_whole_models(name: str) -> None:
    path = folder_of(name)
    ids, expected = expectation(path)
    model = load(path, device="cpu", dtype=torch.float32)
    assert model.fewbit_report.contradictions == []
    assert model.fewbit_report.carried == []
    assert any(isinstance(module, QuantizedLinear | QuantizedStack) for module in model.modules())
    found = logits(model, ids)
    last = torch.tensor(expected.get("last_position_first16") or expected["last_logits_first16"])
    assert relative(found[-1, :16], last) < TOLERANCE[name]
    assert found.argmax(-1).tolist() == expected["argmax"]
    assert relative(found, logits(dense(path), ids)) < 1e-5


@pytest.mark.parametrize("name", TOLERANCE)
def test_what_is_in_them(name: str) -> None:
    path = folder_of(name)
    found = inspect_checkpoint(path)
    tool = name.partition("-")[0]
    assert found.format == {"own": "mxfp4"}.get(tool, tool)
    assert found.oddities == ()
    quantized = [layer for layer in found.layers if layer.key]
    assert {layer.name for layer in quantized} == {layer.name for layer in decoded_layers(StoredCheckpoint.open(path))}
    for layer in quantized:
        assert len(layer.shape) in (2, 3)
        assert min(layer.shape) > 0


def test_stacks_stay_packed() -> None:
    model = load(folder_of("own-mxfp4-gptoss-a"), device="cpu", dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, InterleavedExperts)
    stack = experts.gate_up_proj
    assert stack.shape == (4, 256, 128)
    assert stack.record.nbytes == 4 * 256 * (128 // 2 + 128 // 32)
    stack.method.process_weights_after_loading(stack)  # a second call changes nothing
    assert stack.record.nbytes == 4 * 256 * (128 // 2 + 128 // 32)


def test_a_token_for_no_expert_adds_nothing() -> None:
    model = load(folder_of("own-mxfp4-gptoss-a"), device="cpu", dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(3, 128)
    nobody, weights = torch.full((3, 2), 4), torch.ones(3, 2)
    assert not experts(hidden, nobody, weights).any()
    some = torch.tensor([[0, 4], [1, 4], [2, 3]])
    alone = experts(hidden[:1], torch.tensor([[0]]), torch.ones(1, 1))
    torch.testing.assert_close(experts(hidden, some, weights)[:1], alone)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("W4A16", {"group_size": 32}),
        ("W3A16_ASYM", {"group_size": 32}),
        ("W8A8", {}),
        ("FP8_DYNAMIC", {}),
        ("MXFP4", {}),
    ],
)
def test_humming_is_quantized_and_verified(scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", scheme, format="humming", effort="fast", **options)
    checks = {check.name: check for check in verify(tmp_path / "q", source).checks}
    assert all(check.passed for check in checks.values()), checks
    assert inspect_checkpoint(tmp_path / "q").format == "humming"


@pytest.mark.parametrize(
    ("name", "scale", "sound"),
    [
        ("bitsandbytes-int8-llama-e", "SCB", True),
        ("bitsandbytes-nf4-llama-e", "weight.absmax", True),
        ("hqq-w4g64-llama-e", "scale", False),
    ],
)
def test_a_scale_of_zero_is_a_fault_where_the_format_has_none(
    name: str, scale: str, sound: bool, tmp_path: Path
) -> None:
    """bitsandbytes stores the largest magnitude of a block, and a block may be zero."""
    path = shutil.copytree(folder_of(name), tmp_path / "q")
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{scale}"].view(-1)[3] = 0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    checks = {check.name: check for check in verify(path).checks}
    assert checks["scales and codes"].passed == sound
    assert sound or "up_proj: has a scale of zero" in checks["scales and codes"].detail


@pytest.mark.parametrize("name", ["bitsandbytes", "hqq", "mxfp4"])
def test_formats_that_no_preset_fits_refuse_before_any_work(name: str, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    with pytest.raises(ShapeError, match=rf"{name} cannot hold model\.layers"):
        quantize(source, tmp_path / "q", "W4A16", group_size=32, format=name, effort="fast")
    assert not (tmp_path / "q").exists()
