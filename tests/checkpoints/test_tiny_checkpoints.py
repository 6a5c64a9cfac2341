"""Tiny checkpoints written by the original tools: every quantized layer dequantizes to the numbers the tool gave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbit.checkpoints.registry import find_format, recognize
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record

REPOSITORY = Path(__file__).parents[2]
HERE = REPOSITORY / "tests" / "data" / "checkpoints"
BESIDE = REPOSITORY.parent / "shared" / "checkpoints"  # development checkouts have all of them there

NAMES = [
    "autoround-mxfp4-llmcompressor-llama-b",
    "bitsandbytes-int8-llama-e",
    "bitsandbytes-nf4-llama-e",
    "hqq-w4g64-llama-e",
    "llmcompressor-awq-w4a16-asym-llama-b",
    "llmcompressor-fp8-block-llama-b",
    "llmcompressor-fp8-dynamic-moe-a",
    "llmcompressor-fp8-kvcache-fp8-llama-b",
    "llmcompressor-fp8-static-llama-b",
    "llmcompressor-gptq-w3a16-g64-llama-b",
    "llmcompressor-gptq-w4a16-actorder-weight-llama-b",
    "llmcompressor-mixed-fp8-attn-int4-mlp-llama-b",
    "llmcompressor-mxfp4a16-llama-b",
    "llmcompressor-mxfp8-llama-b",
    "llmcompressor-nvfp4-llama-b",
    "llmcompressor-w2a16-g64-llama-b",
    "llmcompressor-w4a16-g128-moe-a",
    "llmcompressor-w4a16-g64-asym-llama-b",
    "llmcompressor-w4a16-g64-sym-llama-b",
    "llmcompressor-w4a16-ignore-names-regex-llama-b",
    "llmcompressor-w4a8-g64-llama-b",
    "llmcompressor-w8a16-channel-llama-b",
    "llmcompressor-w8a8-dynamic-llama-b",
    "llmcompressor081-gptq-w4a16-actorder-group-llama-a",
    "own-mxfp4-gptoss-a",
    "torchao-int8wo-llama-e",
    "torchao-intx4g32-llama-e",
    "transformers-fp8-block64-llama-b",
]


def folder_of(name: str) -> Path:
    found = next((parent / name for parent in (HERE, BESIDE) if (parent / name).is_dir()), None)
    if found is None:
        pytest.skip(f"{name} is not in this checkout; it lies in ../shared/checkpoints of development checkouts.")
    return found


def expected_layers(path: Path) -> dict[str, Any]:
    """Layer name -> shape and hash, under the names of either set of checkpoints."""
    expected = json.loads((path / "expected.json").read_text())
    layers = expected.get("linears") or expected["dequantized"]
    hashes = ("sha256_f32le_poszero", "sha256_f32le_positive_zeros")
    return {
        module: {"shape": layer["shape"], "sha256": next(layer[name] for name in hashes if name in layer)}
        for module, layer in layers.items()
    }


def _rounded_to_bf16(record: QuantizedTensor) -> Tensor:
    return dequantize_record(record).bfloat16().float()


def _multiplied_one_by_one(record: QuantizedTensor) -> Tensor:
    """bitsandbytes multiplies by the row's maximum and then by 1/127, and rounds twice."""
    numbers = record["codes"].float() * record["scale"] * record["global_scale"].float()
    torch.testing.assert_close(dequantize_record(record), numbers, rtol=2**-22, atol=0)
    return numbers


def _input_major(record: QuantizedTensor) -> Tensor:
    return dequantize_record(record).transpose(-1, -2)


AS_ITS_TOOL: dict[str, Callable[[QuantizedTensor], Tensor]] = {
    "bitsandbytes-int8-llama-e": _multiplied_one_by_one,
    "own-mxfp4-gptoss-a": _input_major,
    "torchao-intx4g32-llama-e": _rounded_to_bf16,
}
"""Checkpoints whose expectation is not the plain float32 product: what the tool makes of the same record."""


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_has_the_numbers_of_its_tool(name: str) -> None:
    path = folder_of(name)
    folder = TensorFolder(path)
    expected = expected_layers(path)
    found = recognize(folder)
    assert found is not None
    checkpoint, config, _ = found
    scheme = checkpoint.scheme(config)
    quantized = set()
    for module, headers in by_module(folder.headers, checkpoint.split).items():
        stored = checkpoint.describe(scheme, module, headers)
        if stored is None:
            continue
        assert stored.key.weight.element == scheme.key_for(module, "Linear", checkpoint.matcher).weight.element
        tensors = {tensor: folder.load(checkpoint.join(module, tensor)) for tensor in headers}
        shape = tuple(expected[module]["shape"])
        record = checkpoint.read(stored, tensors, (shape[0], shape[2], shape[1]) if len(shape) == 3 else shape)
        record.validate(module)
        numbers = AS_ITS_TOOL.get(name, dequantize_record)(record) + 0.0  # -0.0 becomes 0.0
        digest = hashlib.sha256(numbers.contiguous().numpy().astype("<f4").tobytes()).hexdigest()
        assert digest == expected[module]["sha256"], module
        quantized.add(module)
    assert quantized == expected.keys()


def test_act_order_is_kept() -> None:
    folder = TensorFolder(folder_of("llmcompressor081-gptq-w4a16-actorder-group-llama-a"))
    checkpoint = find_format({"quant_method": "compressed-tensors"})
    assert checkpoint is not None
    scheme = checkpoint.scheme(folder.config["quantization_config"])
    module = "model.layers.0.mlp.down_proj"
    headers = by_module(folder.headers)[module]
    stored = checkpoint.describe(scheme, module, headers)
    assert stored is not None
    record = checkpoint.read(stored, {name: folder.load(f"{module}.{name}") for name in headers}, (256, 512))
    assert record["order"].shape == (512,)


def test_the_key_of_a_kv_cache_is_read() -> None:
    folder = TensorFolder(folder_of("llmcompressor-fp8-kvcache-fp8-llama-b"))
    checkpoint = find_format(folder.config["quantization_config"])
    assert checkpoint is not None
    assert str(checkpoint.scheme(folder.config["quantization_config"]).kv_cache) == "e4m3:tensor:f32"
    attention = by_module(folder.headers)["model.layers.0.self_attn"]
    assert checkpoint.describe(checkpoint.scheme(folder.config["quantization_config"]), "self_attn", attention) is None
