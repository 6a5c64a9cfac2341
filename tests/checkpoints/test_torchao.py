"""torchao: every tensor class that is read, by its definition; layouts and classes that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer
from fewbit.checkpoints.registry import recognize
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.checkpoints.torchao import TorchAo
from fewbit.errors import CheckpointError, OutputError
from fewbit.evaluation.verify import verify
from fewbit.models.conversion.convert import convert
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.numerics import QuantizedTensor, decode
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from fewbit.spec.element import E2M1
from fewbit.spec.scheme import Scheme
from tests.checkpoints.layers import KEYS, SHAPE, layer
from tests.tiny_models import save_tiny_model

ROWS, COLUMNS = 8, 64
DTYPE = {"_type": "torch.dtype", "_data": "bfloat16"}


def write_folder(
    folder: Path, kind: str, attributes: dict[str, Any], parts: dict[str, Tensor], quant_type: Any = None
) -> Path:
    """A checkpoint of one layer `m` as torchao's flattening writes it."""
    description = {"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)}
    metadata = {"format": "pt", "tensor_names": '["m.weight"]', "m.weight": json.dumps(description)}
    save_file({f"m._weight_{name}": part for name, part in parts.items()}, folder / "model.safetensors", metadata)
    config = {"quantization_config": {"quant_method": "torchao", "quant_type": quant_type}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path) -> tuple[CheckpointFormat, Scheme, TensorFolder]:
    files = TensorFolder(folder)
    found = recognize(files)
    assert found is not None
    return found[0], found[0].scheme(found[1]), files


def read(folder: Path) -> tuple[StoredLayer, QuantizedTensor]:
    checkpoint, scheme, files = opened(folder)
    headers = by_module(files.headers)["m"]
    stored = checkpoint.describe(scheme, "m", headers)
    assert stored is not None
    assert scheme.key_for("m") == stored.key
    record = checkpoint.read(stored, {name: files.load(f"m.{name}") for name in headers}, (ROWS, COLUMNS))
    record.validate("m")
    return stored, record


def int8(low: int = -128, high: int = 128, columns: int = COLUMNS) -> Tensor:
    return torch.randint(low, high, (ROWS, columns), dtype=torch.int8)


def grouped(values: Tensor) -> Tensor:
    return values.float().repeat_interleave(COLUMNS // values.shape[1], 1)


@pytest.mark.parametrize(
    ("columns", "key"), [(COLUMNS, "int8:channel:f32"), (16, "int8:group16:f32")], ids=["row", "group"]
)
def test_int8(columns: int, key: str, tmp_path: Path) -> None:
    scale = torch.rand(ROWS, COLUMNS // columns)
    parts = {"qdata": int8(), "scale": scale, "zero_point": torch.zeros_like(scale, dtype=torch.int8)}
    attributes = {"block_size": [1, columns], "dtype": DTYPE, "act_quant_kwargs": None}
    stored, record = read(write_folder(tmp_path, "Int8Tensor", attributes, parts))
    assert str(stored.key) == key
    assert torch.equal(dequantize_record(record), parts["qdata"].float() * grouped(scale))


def test_int8_of_one_scale_and_without_zero_points(tmp_path: Path) -> None:
    parts = {"qdata": int8(), "scale": torch.full((1, 1), 0.5)}
    stored, record = read(write_folder(tmp_path, "Int8Tensor", {"block_size": [ROWS, COLUMNS]}, parts))
    assert str(stored.key) == "int8:tensor:f32"
    assert torch.equal(dequantize_record(record), parts["qdata"].float() * 0.5)


def test_symmetric_layers_with_zero_points_are_refused_b21(tmp_path: Path) -> None:
    """B21: zero points of a symmetric layer say nothing; here one that says something is a contradiction."""
    parts = {"qdata": int8(), "scale": torch.ones(ROWS, 1), "zero_point": torch.ones(ROWS, 1, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match="zero points of a symmetric Int8Tensor are not all zero"):
        read(write_folder(tmp_path, "Int8Tensor", {"block_size": [1, COLUMNS]}, parts))


@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC", None])
@pytest.mark.parametrize("bits", range(2, 9))
def test_intx(bits: int, mapping: str | None, tmp_path: Path) -> None:
    half = 1 << (bits - 1)
    scale = torch.rand(ROWS, 2).bfloat16()
    zero = torch.zeros(ROWS, 2) if mapping == "SYMMETRIC" else torch.randint(-half, half, (ROWS, 2))
    parts = {"qdata": int8(-half, half), "scale": scale, "zero_point": zero.to(torch.int8)}
    target = {"_type": "torch.dtype", "_data": f"int{bits}"}
    attributes = {"target_dtype": target, "block_size": [1, 32], "dtype": DTYPE, "activation_quantization": None}
    config = {"_data": {"mapping_type": {"_type": "MappingType", "_data": mapping}}, "_type": "IntxWeightOnlyConfig"}
    quant_type = {"default": config} if mapping else None
    folder = write_folder(tmp_path, "IntxUnpackedToInt8Tensor", attributes, parts, quant_type)
    stored, record = read(folder)
    assert str(stored.key) == f"int{bits}:{'' if mapping == 'SYMMETRIC' else 'asym:'}group32:bf16"
    expected = (parts["qdata"].float() - grouped(zero)) * grouped(scale)
    assert torch.equal(dequantize_record(record), expected)


def test_configurations_by_name(tmp_path: Path) -> None:
    target = {"_type": "torch.dtype", "_data": "int4"}
    attributes = {"target_dtype": target, "block_size": [1, 32], "activation_quantization": "int8_asym_per_token"}
    parts = {"qdata": int8(-8, 8), "scale": torch.ones(ROWS, 2), "zero_point": torch.zeros(ROWS, 2, dtype=torch.int8)}
    by_name = {"m": {"_data": {"weight_mapping_type": {"_data": "SYMMETRIC"}}}}
    quant_type = {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": by_name}}}
    stored, _ = read(write_folder(tmp_path, "IntxUnpackedToInt8Tensor", attributes, parts, quant_type))
    assert str(stored.key) == "int4:group32:f32 * int8:asym:token:f32:dynamic"


@pytest.mark.parametrize(
    ("arguments", "activation"),
    [
        (None, None),
        ({"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}, "e4m3:token:f32:dynamic"),
        ({"granularity": {"_type": "PerTensor", "_data": {}}}, "e4m3:tensor:f32:dynamic"),
        ({"granularity": {"_type": "PerBlock", "_data": {"block_size": [1, 32]}}}, "e4m3:group32:f32:dynamic"),
    ],
)
def test_float8(arguments: Any, activation: str | None, tmp_path: Path) -> None:
    wrapped = None if arguments is None else {"_type": "QuantizeTensorToFloat8Kwargs", "_data": arguments}
    parts = {"qdata": torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), "scale": torch.rand(ROWS, 1)}
    attributes = {"block_size": [1, COLUMNS], "act_quant_kwargs": wrapped, "dtype": DTYPE}
    stored, record = read(write_folder(tmp_path, "Float8Tensor", attributes, parts))
    assert stored.key == LinearKey.parse("e4m3:channel:f32" + (f" * {activation}" if activation else ""))
    assert torch.equal(dequantize_record(record), parts["qdata"].float() * parts["scale"])


def test_static_activations_and_smoothing(tmp_path: Path) -> None:
    wrapped = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": {"_type": "PerTensor", "_data": {}}}}
    parts = {
        "qdata": int8(),
        "scale": torch.rand(ROWS, 1),
        "act_quant_scale": torch.tensor([[0.25]]),
        "act_pre_scale": torch.rand(COLUMNS),
    }
    attributes = {"block_size": [1, COLUMNS], "act_quant_kwargs": wrapped}
    stored, record = read(write_folder(tmp_path, "Int8Tensor", attributes, parts))
    assert str(stored.key) == "int8:channel:f32 * int8:tensor:f32"
    assert record["input_scale"].item() == 0.25
    assert torch.equal(record["pre_scale"], parts["act_pre_scale"])


def test_int4_with_float_minima(tmp_path: Path) -> None:
    codes = int8(-8, 8)
    scale, minimum = torch.rand(2, ROWS).bfloat16(), torch.randn(2, ROWS).bfloat16()
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    parts = {"qdata": packed, "scale": scale, "zero_point": minimum}
    attributes = {"block_size": [1, 32], "shape": [ROWS, COLUMNS]}
    stored, record = read(write_folder(tmp_path, "Int4Tensor", attributes, parts))
    assert str(stored.key) == "int4:group32:bf16"
    expected = codes.float() * grouped(scale.T) + grouped(minimum.T)
    assert torch.equal(dequantize_record(record), expected)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float4_e2m1fn_x2"])
def test_mx(element: str, tmp_path: Path) -> None:
    exponents = torch.randint(120, 134, (ROWS, 2), dtype=torch.uint8)
    if element == "float8_e4m3fn":
        qdata = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
        numbers = qdata.float()
    else:
        qdata = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
        numbers = decode(torch.stack([qdata & 15, qdata >> 4], -1).flatten(-2), E2M1)
    attributes = {
        "elem_dtype": {"_type": "torch.dtype", "_data": element},
        "block_size": 32,
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
    }
    parts = {"qdata": qdata, "scale": exponents.view(torch.float8_e8m0fnu)}
    stored, record = read(write_folder(tmp_path, "MXTensor", attributes, parts))
    assert str(stored.key).endswith(":group32:e8m0")
    assert torch.equal(dequantize_record(record), numbers * grouped(torch.exp2(exponents.float() - 127)))


@pytest.mark.parametrize("per_tensor", [False, True])
def test_nvfp4(per_tensor: bool, tmp_path: Path) -> None:
    qdata = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scale = (torch.rand(ROWS, 4) * 100 + 1).to(torch.float8_e4m3fn)
    parts = {"qdata": qdata, "scale": scale} | ({"per_tensor_scale": torch.tensor(0.125)} if per_tensor else {})
    stored, record = read(write_folder(tmp_path, "NVFP4Tensor", {"block_size": 16}, parts))
    assert str(stored.key) == "e2m1:group16:e4m3" + ("/tensor:f32" if per_tensor else "")
    numbers = decode(torch.stack([qdata & 15, qdata >> 4], -1).flatten(-2), E2M1)
    assert torch.equal(dequantize_record(record), numbers * grouped(scale) * (0.125 if per_tensor else 1.0))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "attributes", "found"),
    [
        ("Int4TilePackedTo4dTensor", {"block_size": [1, 32]}, "a torchao Int4TilePackedTo4dTensor"),
        ("Int4PlainInt32Tensor", {"block_size": [1, 32]}, "a torchao Int4PlainInt32Tensor"),
        ("Int8Tensor", {"block_size": "x"}, "block_size is 'x'"),
        ("MXTensor", {"is_swizzled_scales": True}, "is_swizzled_scales"),
        ("IntxUnpackedToInt8Tensor", {"target_dtype": "int1"}, "target_dtype is 'int1'"),
        ("Float8Tensor", {"block_size": []}, "the codes' dtype is 'I8'"),
    ],
)
def test_what_is_refused_by_name(kind: str, attributes: dict[str, Any], found: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, kind, attributes, {"qdata": int8(), "scale": torch.ones(ROWS, 1)})
    with pytest.raises(CheckpointError, match=found):
        opened(folder)


def test_layers_that_the_metadata_does_not_describe(tmp_path: Path) -> None:
    write_folder(tmp_path, "Int8Tensor", {"block_size": [1, 64]}, {"qdata": int8(), "scale": torch.ones(ROWS, 1)})
    checkpoint, scheme, files = opened(tmp_path)
    with pytest.raises(CheckpointError, match="n stores torchao tensors, and the metadata"):
        checkpoint.describe(scheme, "n", by_module(files.headers)["m"])
    with pytest.raises(CheckpointError, match="should be a Int8Tensor, but _weight_scale is missing"):
        headers = {"_weight_qdata": by_module(files.headers)["m"]["_weight_qdata"]}
        checkpoint.describe(scheme, "m", headers)


def test_files_without_metadata(tmp_path: Path) -> None:
    save_file({"m._weight_qdata": int8()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(CheckpointError, match="described in the metadata"):
        opened(tmp_path)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(CheckpointError, match="only pickled weights"):
        TensorFolder(tmp_path)


def test_what_is_not_written_is_named() -> None:
    assert "hold no e2m1" in str(TorchAo().refuse(KEYS["NVFP4A16"], SHAPE))
    with pytest.raises(OutputError, match="torchao cannot hold"):
        TorchAo().write(layer(KEYS["NVFP4A16"]), KEYS["NVFP4A16"])
    with pytest.raises(OutputError, match="not written with"):
        TorchAo().config({"m": KEYS["NVFP4A16"]}, [])


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16_ASYM", "W8A8"])
def test_a_model_in_shards_is_read_by_its_metadata(scheme: str, tmp_path: Path) -> None:
    size = 32 if scheme.startswith(("W4", "W3")) else None
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", scheme, group_size=size, effort="fast")
    convert(tmp_path / "q", tmp_path / "ao", "torchao", max_shard_bytes=30_000)
    assert len(list((tmp_path / "ao").glob("*.safetensors"))) > 2
    files = TensorFolder(tmp_path / "ao")
    names = json.loads(files.metadata["tensor_names"])
    assert {name for name in files.metadata if name not in ("format", "tensor_names")} == set(names)
    assert json.loads(files.metadata["model.norm.weight"]) == {"_type": "Tensor"}
    ids = torch.arange(16)[None]
    with torch.no_grad():
        ours, theirs = (load(tmp_path / name, device="cpu")(input_ids=ids).logits for name in ("ao", "q"))
    assert torch.equal(ours, theirs)
    assert verify(tmp_path / "ao").passed


def test_a_model_is_quantized_into_it(tmp_path: Path) -> None:
    quantize(
        save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, format="torchao", effort="fast"
    )
    assert verify(tmp_path / "q").passed
    kinds = {json.loads(text)["_type"] for text in TensorFolder(tmp_path / "q").metadata.values() if "_type" in text}
    assert kinds == {"IntxUnpackedToInt8Tensor", "Tensor"}
