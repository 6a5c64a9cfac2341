"""Tiny checkpoints written by the original tools: every quantized layer dequantizes to the numbers the tool gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fewbit.checkpoints.registry import find_format, quantization_config
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.packing.registry import dequantize_record
from tests.checkpoints.layers import same_bits, sha256

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
    "transformers-fp8-block64-llama-b",
]


ZERO_FREE_HASHES = ("sha256_f32le_poszero", "sha256_f32le_positive_zeros")  # as the two sets call it


def expected_layers(path: Path) -> dict[str, dict[str, Any]]:
    """What the tool made of each quantized layer; the two sets of checkpoints call it differently."""
    expected = json.loads((path / "expected.json").read_text())
    return expected["linears"] if "linears" in expected else expected["dequantized"]


def expected_hash(layer: dict[str, Any]) -> str:
    return next(layer[name] for name in ZERO_FREE_HASHES if name in layer)


def folder_of(name: str) -> Path:
    found = next((parent / name for parent in (HERE, BESIDE) if (parent / name).is_dir()), None)
    if found is None:
        pytest.skip(f"{name} is not in this checkout; it lies in ../shared/checkpoints of development checkouts.")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_has_the_numbers_of_its_tool(name: str) -> None:
    path = folder_of(name)
    folder = TensorFolder(path)
    expected = expected_layers(path)
    found = quantization_config(folder)
    assert found is not None
    checkpoint = find_format(found[0])
    assert checkpoint is not None
    scheme = checkpoint.scheme(found[0])
    quantized = set()
    for module, headers in by_module(folder.headers).items():
        stored = checkpoint.describe(scheme, module, headers)
        if stored is None:
            continue
        assert stored.key.weight.element == scheme.key_for(module, "Linear", checkpoint.matcher).weight.element
        tensors = {name: folder.load(f"{module}.{name}") for name in headers}
        record = checkpoint.read(stored, tensors, tuple(expected[module]["shape"]))
        record.validate(module)
        assert sha256(dequantize_record(record)) == expected_hash(expected[module]), module
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


# GPTQ and AWQ have several versions of which fewbit writes one, whichever a tool chose.
ONE_VERSION = [name for name in NAMES if not name.startswith(("gptqmodel", "autoawq", "autoround"))]


@pytest.mark.parametrize("name", ONE_VERSION)
def test_every_layer_is_written_as_its_tool_wrote_it(name: str) -> None:
    folder = TensorFolder(folder_of(name))
    found = quantization_config(folder)
    assert found is not None
    checkpoint = find_format(found[0])
    assert checkpoint is not None
    scheme, modules = checkpoint.scheme(found[0]), by_module(folder.headers)
    for module, expected in expected_layers(folder.path).items():
        stored, shape = checkpoint.describe(scheme, module, modules[module]), tuple(expected["shape"])
        assert stored is not None
        tensors = {tensor: folder.load(f"{module}.{tensor}") for tensor in modules[module]}
        if checkpoint.refuse(stored.key, shape) or "weight_g_idx" in tensors:  # read for old files' sake
            continue
        written = checkpoint.write(checkpoint.read(stored, tensors, shape), stored.key)
        for tensor in written.keys() & tensors.keys():
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
