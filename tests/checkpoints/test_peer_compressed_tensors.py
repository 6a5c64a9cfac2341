"""compressed-tensors' own code as a peer: it reads what fewbit writes, and fewbit reads what it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbit.checkpoints.compressed_tensors import CompressedTensors
from fewbit.numerics import QuantizedTensor, decode, dequantize
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, headers, layer

pytestmark = pytest.mark.peer
compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")

CT = CompressedTensors()
SHAPE = (128, 256)
HELD = [key for key in KEYS if CT.refuse(KEYS[key], SHAPE) is None]


def library_scheme(key: LinearKey) -> tuple[Any, Any]:
    """The library's compressor and scheme for what fewbit's configuration says of the key, validated by the library."""
    config = quantization.QuantizationConfig.model_validate(CT.config({"layer": key}, ["lm_head"]))
    (scheme,) = config.config_groups.values()
    return compressors.BaseCompressor.get_value_from_registry(scheme.format), scheme


def library_qparams(record: QuantizedTensor, weight: Tensor) -> dict[str, Tensor]:
    """The record's scales as the library holds them before it compresses: real numbers, global scales as divisors."""
    plain = unpack_record(record)
    kind = record.key.granularity.kind
    scale = decode(plain["scale"], record.key.scale.element).to(weight.dtype)
    qparams = {"weight": weight, "weight_scale": scale.reshape(1) if kind == "tensor" else scale}
    if "zero_point" in plain:
        zero_point = plain["zero_point"]
        qparams["weight_zero_point"] = zero_point.reshape(1) if kind == "tensor" else zero_point
    if "global_scale" in plain:
        qparams["weight_global_scale"] = (1.0 / plain["global_scale"]).float().reshape(1)
    return qparams


@pytest.mark.parametrize("key", HELD)
def test_the_library_decodes_what_fewbit_writes(key: str) -> None:
    record = layer(KEYS[key], SHAPE)
    compressor, scheme = library_scheme(KEYS[key])
    tensors = CT.write(record, KEYS[key])
    assert set(compressor.compression_param_names(scheme)) <= tensors.keys()
    theirs = compressor.decompress(dict(tensors), scheme)["weight"]
    ours = dequantize(record)
    # Scales in f16 or bf16 make the library multiply in that dtype.
    assert torch.equal(theirs.float() + 0.0, ours.to(theirs.dtype).float() + 0.0)


@pytest.mark.parametrize("key", [key for key in HELD if "f16" not in key])
def test_fewbit_reads_what_the_library_writes(key: str) -> None:
    wanted = KEYS[key]
    record = layer(wanted, SHAPE)
    compressor, scheme = library_scheme(wanted)
    compressed = compressor.compress(library_qparams(record, torch.randn(SHAPE)), scheme)
    inputs = {name: tensor for name, tensor in CT.write(record, wanted).items() if name.startswith("input_")}
    tensors = {**compressed, **inputs}
    described = CT.describe(CT.scheme(CT.config({"layer": wanted}, [])), "layer", headers(tensors))
    assert described is not None
    assert described.key.weight.element == wanted.weight.element
    ours = dequantize_record(CT.read(described, tensors, SHAPE))
    theirs = compressor.decompress(dict(compressed), scheme)["weight"]
    assert torch.equal(ours.to(theirs.dtype).float() + 0.0, theirs.float() + 0.0)


@pytest.mark.parametrize("key", ["int4:group64:bf16", "int4:group64:bf16 * int8:token:f32:dynamic"])
def test_the_library_refuses_what_fewbit_cautions_about(key: str) -> None:
    wanted, shape = LinearKey.parse(key), (16, 96)
    compressor, scheme = library_scheme(wanted)
    assert CT.caution(wanted, shape) is not None
    with pytest.raises(ValueError, match="group_size 64 but got 96"):
        compressor.decompress(CT.write(layer(wanted, shape), wanted), scheme)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=False)
        self.gate = nn.Linear(128, 256, bias=False)
        self.down = nn.Linear(256, 128, bias=False)


@pytest.mark.parametrize(
    "keys",
    [
        {"up": "W4A16", "gate": "W4A16", "down": "W4A16"},
        {"up": "FP8", "gate": "FP8_DYNAMIC", "down": "W8A8"},
        {"up": "NVFP4", "gate": "MXFP4", "down": "W4A16_ASYM"},
    ],
    ids=lambda keys: "-".join(keys.values()),
)
def test_a_whole_model_loads_in_the_library(keys: dict[str, str]) -> None:
    """Configuration, names, shapes and dtypes together, as the library's own loader applies them."""
    model = nn.ModuleDict({"block": Block(), "lm_head": nn.Linear(128, 64, bias=False)}).bfloat16()
    layers = {f"block.{name}": KEYS[key] for name, key in keys.items()}
    config = quantization.QuantizationConfig.model_validate(CT.config(layers, ["lm_head"]))
    quantization.apply_quantization_config(model, config, show_progress=False)
    for name, key in layers.items():
        module = model.get_submodule(name)
        compressors.compress_module(module)
        record = layer(key, (module.out_features, module.in_features))
        tensors = CT.write(record, key)
        state = module.state_dict()
        assert tensors.keys() == state.keys()
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in state.items()
        }
        module.load_state_dict(tensors)
        compressors.decompress_module(module)
        assert torch.equal(module.weight.float() + 0.0, dequantize(record).bfloat16().float() + 0.0)
    assert not hasattr(model["lm_head"], "quantization_scheme")
