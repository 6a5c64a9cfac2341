"""Whole models from other tools' checkpoints: their logits, and every activation quantized as its key says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbit.checkpoints.registry import formats
from fewbit.kernels.select import Preference
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.replace import replace_submodule
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.activations import fake_quantize
from fewbit.packing.registry import dequantize_record
from tests.checkpoints.test_tiny_checkpoints import folder_of

CARRIED = ["model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"]
NAMES = {
    "modelopt-fp8-kvfp8-llama-e": CARRIED,
    "modelopt-fp8pbwo-llama-e": [],
    "modelopt-fp8pcpt-llama-e": [],
    "modelopt-int4awq-llama-e": [],
    "modelopt-mxfp8-llama-e": [],
    "modelopt-nvfp4-kvfp8-llama-e": CARRIED,
    "quark-fp8-llama-e": [],
    "quark-int4g128-llama-e": [],
    "quark-int8chan-llama-e": [],
    "quark-mxfp4-llama-e": [],
}
TOLERANCE = 2e-3


def logits(model: nn.Module, path: Path) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(expected(path)["input_ids"])).logits[0]


def expected(path: Path) -> dict[str, Any]:
    return json.loads((path / "expected.json").read_text())


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


class Definition(nn.Module):
    """A layer by the definition: activations scaled, quantized and dequantized, times dequantized weights."""

    def __init__(self, record: QuantizedTensor, layer: QuantizedLinear, quantizes: bool) -> None:
        super().__init__()
        self.record, self.activation = record, layer.key.activation if quantizes else None
        self.weight = dequantize_record(record)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.record["pre_scale"].to(x.dtype) if "pre_scale" in self.record else x
        x = fake_quantize(x, self.activation, self.record) if self.activation else x
        return nn.functional.linear(x, self.weight)


def by_definition(model: nn.Module, path: Path, quantizes: bool) -> nn.Module:
    """A copy of a loaded model whose quantized layers are read again from the file."""
    stored, defined = StoredCheckpoint.open(path), copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            shape = (layer.out_features, layer.in_features)
            described = stored.describe(name, "Linear", shape)
            assert described is not None
            assert described.key == layer.key
            replace_submodule(defined, name, Definition(stored.record(name, described, shape), layer, quantizes))
    return defined


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str) -> None:
    path = folder_of(name)
    model = load(path, device="cpu", dtype=torch.float32, preference=Preference("reference"))
    report = model.fewbit_report
    assert report.carried == NAMES[name]
    assert not report.contradictions
    dense, found = expected(path)["logits_dense"], logits(by_definition(model, path, quantizes=False), path)
    assert relative(found[-1, :16], torch.tensor(dense["last_logits_first16"])) < TOLERANCE
    assert found.argmax(-1).tolist() == dense["argmax"]
    assert relative(logits(model, path), logits(by_definition(model, path, quantizes=True), path)) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_inspection(name: str) -> None:
    path = folder_of(name)
    found = inspect_checkpoint(path)
    assert found.format == name.split("-", maxsplit=1)[0]
    assert not found.oddities
    shapes = {layer.name: list(layer.shape) for layer in found.layers if layer.key}
    assert shapes == {module: layer["shape"] for module, layer in expected(path)["dequantized"].items()}


def test_a_kernel_that_leaves_a_pre_scale_out_is_not_chosen() -> None:
    model = load(folder_of("modelopt-int4awq-llama-e"), device="cpu", dtype=torch.bfloat16)
    scaled, unscaled = model.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.up_proj
    assert scaled.choice.kernel.name == "reference"
    refusals = [str(verdict.refusal) for verdict in scaled.choice.verdicts]
    assert any("carries a pre_scale" in refusal for refusal in refusals)
    assert not any("pre_scale" in str(verdict.refusal) for verdict in unscaled.choice.verdicts)


def test_a_layer_moves_from_one_format_to_the_other() -> None:
    stored = StoredCheckpoint.open(folder_of("quark-int4g128-llama-e"))
    name = "model.layers.0.mlp.up_proj"
    described = stored.describe(name)
    assert described is not None
    record = stored.record(name, described, (512, 256))
    modelopt = formats()["modelopt"]
    tensors = modelopt.write(record, described.key)
    again = modelopt.read(modelopt.storages(described.key)[0], tensors, (512, 256))
    assert torch.equal(dequantize_record(again), dequantize_record(record))
