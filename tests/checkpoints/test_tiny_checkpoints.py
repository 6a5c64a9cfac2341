"""Tiny checkpoints written by the original tools: every quantized layer dequantizes to the numbers the tool gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.checkpoints.registry import find_format, recognize
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record
from tests.checkpoints.layers import headers, same_bits, sha256

REPOSITORY = Path(__file__).parents[2]
HERE = REPOSITORY / "tests" / "data" / "checkpoints"
BESIDE = REPOSITORY.parent / "shared" / "checkpoints"  # development checkouts have all of them there

NAMES = [
    "autoawq-gemm-g128-llama-e",
    "autoawq-gemm-g64-skip-llama-e",
    "autoawq-gemv-g128-llama-e",
    "autoround-mixedbits-w4-w8-w2-bf16-llama-b",
    "autoround-mxfp4-llmcompressor-llama-b",
    "autoround-w2a16-g64-llama-b",
    "autoround-w3a16-g64-autogptq-llama-b",
    "autoround-w4a16-asym-g64-autogptq-llama-b",
    "autoround-w4a16-asym-llama-b",
    "autoround-w4a16-moe-a",
    "autoround-w4a16-sym-g64-autoawq-llama-b",
    "autoround-w4a16-sym-llama-b",
    "gptqmodel-w2g32asym-llama-e",
    "gptqmodel-w3g32sym-llama-e",
    "gptqmodel-w4chan-llama-e",
    "gptqmodel-w4g128sym-llama-c",
    "gptqmodel-w4g32asym-llama-e",
    "gptqmodel-w4g32asym-v2-llama-e",
    "gptqmodel-w4g64sym-moe-c",
    "gptqmodel-w8g128sym-llama-e",
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
    "modelopt-fp8-kvfp8-llama-e",
    "modelopt-fp8pbwo-llama-e",
    "modelopt-fp8pcpt-llama-e",
    "modelopt-int4awq-llama-e",
    "modelopt-mxfp8-llama-e",
    "modelopt-nvfp4-kvfp8-llama-e",
    "quark-fp8-llama-e",
    "quark-int4g128-llama-e",
    "quark-int8chan-llama-e",
    "quark-mxfp4-llama-e",
    "own-mxfp4-gptoss-a",
    "torchao-int8wo-llama-e",
    "torchao-intx4g32-llama-e",
    "transformers-fp8-block64-llama-b",
]


ZERO_FREE_HASHES = ("sha256_f32le_poszero", "sha256_f32le_positive_zeros")  # as the two sets call it


def expected_layers(path: Path) -> dict[str, dict[str, Any]]:
    """What the tool made of each quantized layer; the two sets of checkpoints call it differently."""
    expected = json.loads((path / "expected.json").read_text())
    return expected["linears"] if "linears" in expected else expected["dequantized"]


def expected_hash(layer: dict[str, Any]) -> str:
    return next(layer[name] for name in ZERO_FREE_HASHES if name in layer)


def output_major(shape: list[int]) -> tuple[int, ...]:
    """The hub's shape [N, K] or [E, N, K]: stacks of experts are stated input-major, [E, K, N]."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else tuple(shape)


def written_again(
    checkpoint: CheckpointFormat, module: str, stored: StoredLayer, record: QuantizedTensor
) -> dict[str, Tensor]:
    """The layer in the variant that its tool chose; nothing where fewbit writes only another variant."""
    if isinstance(checkpoint, LinearFormat):
        return checkpoint.write_as(record, stored)
    written = checkpoint.write(record, stored.key)
    scheme = checkpoint.scheme(checkpoint.config({module: stored.key}, []))
    again = checkpoint.describe(scheme, module, headers(written), shape=record.shape[-2:])
    assert again is not None
    return written if again.variant == stored.variant else {}


def folder_of(name: str) -> Path:
    found = next((parent / name for parent in (HERE, BESIDE) if (parent / name).is_dir()), None)
    if found is None:
        pytest.skip(f"{name} is not in this checkout; it lies in ../shared/checkpoints of development checkouts.")
    return found


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
    for module, held in by_module(folder.headers, checkpoint.split).items():
        stored = checkpoint.describe(scheme, module, held)
        if stored is None:
            continue
        assert stored.key.weight.element == scheme.key_for(module, "Linear", checkpoint.matcher).weight.element
        tensors = {tensor: folder.load(checkpoint.join(module, tensor)) for tensor in held}
        record = checkpoint.read(stored, tensors, output_major(expected[module]["shape"]))
        record.validate(module)
        numbers = AS_ITS_TOOL.get(name, dequantize_record)(record)
        assert sha256(numbers) == expected_hash(expected[module]), module
        quantized.add(module)
    assert quantized == expected.keys()


def test_act_order_is_kept() -> None:
    folder = TensorFolder(folder_of("llmcompressor081-gptq-w4a16-actorder-group-llama-a"))
    checkpoint = find_format({"quant_method": "compressed-tensors"})
    assert checkpoint is not None
    scheme = checkpoint.scheme(folder.config["quantization_config"])
    module = "model.layers.0.mlp.down_proj"
    held = by_module(folder.headers)[module]
    stored = checkpoint.describe(scheme, module, held)
    assert stored is not None
    record = checkpoint.read(stored, {name: folder.load(f"{module}.{name}") for name in held}, (256, 512))
    assert record["order"].shape == (512,)


# GPTQ and AWQ have several versions of which fewbit writes one, whichever a tool chose.
ONE_VERSION = [name for name in NAMES if not name.startswith(("gptqmodel", "autoawq", "autoround"))]


@pytest.mark.parametrize("name", ONE_VERSION)
def test_every_layer_is_written_as_its_tool_wrote_it(name: str) -> None:
    folder = TensorFolder(folder_of(name))
    found = recognize(folder)
    assert found is not None
    checkpoint, config, _ = found
    scheme, modules = checkpoint.scheme(config), by_module(folder.headers, checkpoint.split)
    for module, expected in expected_layers(folder.path).items():
        stored, shape = checkpoint.describe(scheme, module, modules[module]), output_major(expected["shape"])
        assert stored is not None
        tensors = {tensor: folder.load(checkpoint.join(module, tensor)) for tensor in modules[module]}
        old = "weight_g_idx" in tensors  # read for old files' sake
        if old or checkpoint.refuse(stored.key, (shape[-2], shape[-1])):
            continue
        written = written_again(checkpoint, module, stored, checkpoint.read(stored, tensors, shape))
        notes = {spec.name for spec in checkpoint.specs(stored) if spec.role.startswith("note ")}  # of the quantizer
        for tensor in (written.keys() & tensors.keys()) - notes:
            ours, theirs = written[tensor].flatten(), tensors[tensor].flatten()
            static = tensor.startswith("input_")  # float32 in the hub, in the model's dtype in some files
            assert same_bits(ours, theirs.to(ours.dtype) if static else theirs), (module, tensor)


def test_the_key_of_a_kv_cache_is_read() -> None:
    folder = TensorFolder(folder_of("llmcompressor-fp8-kvcache-fp8-llama-b"))
    checkpoint = find_format(folder.config["quantization_config"])
    assert checkpoint is not None
    assert str(checkpoint.scheme(folder.config["quantization_config"]).kv_cache) == "e4m3:tensor:f32"
    attention = by_module(folder.headers)["model.layers.0.self_attn"]
    assert checkpoint.describe(checkpoint.scheme(folder.config["quantization_config"]), "self_attn", attention) is None
