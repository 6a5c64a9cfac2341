"""bitsandbytes: 4-bit codebooks with blocks that cross rows, scales of scales, and eight bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fewbit.checkpoints.bitsandbytes import BitsAndBytes
from fewbit.checkpoints.bitsandbytes_state import QuantState
from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.registry import recognize
from fewbit.checkpoints.tensor_files import INDEX, TensorFolder, by_module
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.codebooks import CODEBOOKS
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, headers, layer, same_bits
from tests.golden import floats, ids

BNB = BitsAndBytes()
SCHEME = BNB.scheme({"load_in_4bit": True})
INT8 = LinearKey.parse("int8:channel:f32/tensor:f32")


def described(tensors: dict[str, Tensor], shape: tuple[int, int] | None) -> StoredLayer:
    found = BNB.describe(SCHEME, "x", headers(tensors), "Linear", shape)
    assert found is not None
    return found


def random_layer(kind: str, shape: tuple[int, int], block: int = 64, nested: bool = False) -> dict[str, Tensor]:
    """The tensors of a random 4-bit layer, by bitsandbytes' rules and not by fewbit's code."""
    count = shape[0] * shape[1]
    blocks = -(-count // block)
    tensors = {
        "weight": torch.randint(0, 256, (-(-count // 2), 1), dtype=torch.uint8),
        "weight.quant_map": torch.tensor(CODEBOOKS[kind]),
        "weight.absmax": torch.rand(blocks) + 0.1,
    }
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.75}
        tensors["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        tensors["weight.nested_absmax"] = torch.rand(-(-blocks // 256))
        tensors["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    name = f"weight.quant_state.bitsandbytes__{kind}"
    return {**tensors, name: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def decoded(tensors: dict[str, Tensor], shape: tuple[int, int], block: int) -> Tensor:
    """The definition, one number at a time over the flattened weight."""
    raw, count = tensors["weight"].flatten(), shape[0] * shape[1]
    codes = torch.stack([raw >> 4, raw & 15], -1).flatten()[:count].long()
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        outer = tensors["weight.nested_absmax"].repeat_interleave(256)[: len(absmax)]
        absmax = tensors["weight.nested_quant_map"][absmax.long()] * outer + 0.75
    numbers = tensors["weight.quant_map"][codes] * absmax.repeat_interleave(block)[:count]
    return numbers.reshape(shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@given(rows=st.integers(1, 20), columns=st.integers(1, 300), block=st.sampled_from([32, 64, 128]))
def test_blocks_run_across_rows(kind: str, nested: bool, rows: int, columns: int, block: int) -> None:
    shape = (rows, columns)
    tensors = random_layer(kind, shape, block, nested)
    stored = described(tensors, shape)
    record = BNB.read(stored, tensors, shape)
    record.validate()
    assert torch.equal(dequantize_record(record), decoded(tensors, shape, block))


@pytest.mark.parametrize("name", ids("bnb_"))
def test_golden_bytes_are_read_and_written(name: str, golden: dict[str, Any]) -> None:
    vector, kind = golden[name], name.split("_")[1]
    shape = (4, 64)
    (state_name, text), *_ = vector["quant_state_json"].items()
    tensors = {
        "weight": torch.tensor(vector["packed_uint8"], dtype=torch.uint8).reshape(vector["packed_shape"]),
        "weight.absmax": torch.tensor(vector["absmax"], dtype=getattr(torch, vector["absmax_dtype"].split(".")[1])),
        "weight.quant_map": floats(vector["quant_map"]),
        f"weight.{state_name}": torch.tensor(list(text.encode()), dtype=torch.uint8),
    }
    if "nested" in name:
        # The vector leaves the table out; of its own, four entries are used, which its numbers determine.
        codes, table = tensors["weight.absmax"].long(), torch.zeros(256)
        plain = floats(golden[f"bnb_{kind}"]["absmax"])
        table[codes] = (plain - vector["offset"]) / vector["nested_absmax"][0]
        tensors |= {"weight.nested_absmax": floats(vector["nested_absmax"]), "weight.nested_quant_map": table}
    record = BNB.read(described(tensors, shape), tensors, shape)
    record.validate(name)
    numbers = dequantize_record(record)
    if "nested" not in name:
        assert torch.equal(numbers.bfloat16().float(), floats(vector["dequant"]))
    else:
        torch.testing.assert_close(numbers, floats(vector["dequant"]), rtol=2e-2, atol=0)
    written = BNB.write(record, record_key(record))
    assert written.keys() == tensors.keys()
    assert all(same_bits(written[part], tensors[part]) for part in tensors)


def record_key(record: QuantizedTensor) -> LinearKey:
    return LinearKey(record.key)


@pytest.mark.parametrize("shape", [(16, 128), (7, 256), (300, 64)], ids=str)
def test_nested_scales_round_trip(shape: tuple[int, int]) -> None:
    tensors = random_layer("nf4", shape, nested=True)
    record = BNB.read(described(tensors, shape), tensors, shape)
    assert isinstance(record.tensors["scale"], QuantizedTensor)
    written = BNB.write(record, record_key(record))
    assert all(same_bits(written[part], tensors[part]) for part in tensors)
    flat = record.with_tensors(scale=record["scale"])  # the scales decoded: another file, the same numbers
    again = BNB.write(flat, record_key(record))
    back = BNB.read(described(again, shape), again, shape)
    assert torch.equal(dequantize_record(back), dequantize_record(record))


def test_other_storage_dtypes_are_the_same_bytes() -> None:
    tensors = random_layer("nf4", (8, 64))
    numbers = dequantize_record(BNB.read(described(tensors, (8, 64)), tensors, (8, 64)))
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        other = {**tensors, "weight": tensors["weight"].flatten().view(dtype).reshape(-1, 1)}
        assert torch.equal(dequantize_record(BNB.read(described(other, (8, 64)), other, (8, 64))), numbers)


def test_shapes_come_from_the_states_where_no_model_is_known(tmp_path: Path) -> None:
    tensors = {f"m.{name}": tensor for name, tensor in random_layer("fp4", (6, 96)).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    found = recognize(TensorFolder(tmp_path))
    assert found is not None
    scheme = BNB.scheme(found[1])
    modules = by_module(TensorFolder(tmp_path).headers, BNB.split)
    assert BNB.describe(scheme, "m", modules["m"]) == StoredLayer(
        LinearKey.parse("uint4:group32:f32"), "fp4 block64", (6, 96)
    )


def test_a_weight_and_its_scales_in_different_shards_b82(tmp_path: Path) -> None:
    """B82: companions are collected across shards."""
    tensors = {f"m.{name}": tensor for name, tensor in random_layer("nf4", (8, 64)).items()}
    files = {name: f"model-{1 + ('absmax' in name)}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    folder = TensorFolder(tmp_path)
    modules = by_module(folder.headers, BNB.split)
    loaded = {name: folder.load(BNB.join("m", name)) for name in modules["m"]}
    stored = described(loaded, (8, 64))
    plain = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    assert torch.equal(dequantize_record(BNB.read(stored, loaded, (8, 64))), decoded(plain, (8, 64), 64))


def test_rows_can_be_split_where_blocks_end() -> None:
    tensors = random_layer("nf4", (8, 128))
    stored = described(tensors, (8, 128))
    whole = decoded(tensors, (8, 128), 64)
    for rank in range(2):
        half = {}
        for spec in BNB.specs(stored):
            cut = spec.shard("N", 8, rank, 2)
            half[spec.name] = tensors[spec.name].narrow(*cut) if cut else tensors[spec.name]
        record = BNB.read(stored, half, (4, 128))
        assert torch.equal(dequantize_record(record), whole[4 * rank : 4 * rank + 4])


# --- eight bits ------------------------------------------------------------------------------------------------------


def int8_tensors() -> dict[str, Tensor]:
    return {
        "weight": torch.randint(-127, 128, (8, 24), dtype=torch.int8),
        "SCB": torch.rand(8) + 0.1,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def test_eight_bits() -> None:
    tensors = int8_tensors()
    stored = BNB.describe(BNB.scheme({"load_in_8bit": True}), "x", headers(tensors), "Linear", (8, 24))
    assert stored == StoredLayer(INT8, "int8")
    record = BNB.read(stored, tensors, (8, 24))
    record.validate()
    exact = tensors["weight"].double() * tensors["SCB"].double()[:, None] / 127
    torch.testing.assert_close(dequantize_record(record).double(), exact, rtol=2**-22, atol=0)
    written = BNB.write(record, INT8)
    assert all(same_bits(written[name], tensors[name]) for name in tensors)


def test_eight_bits_of_another_factor_and_what_is_not_read() -> None:
    record = BNB.read(StoredLayer(INT8, "int8"), int8_tensors(), (8, 24))
    other = record.with_tensors(global_scale=torch.full((1, 1), 0.5, dtype=torch.float64))
    reread = BNB.read(StoredLayer(INT8, "int8"), BNB.write(other, INT8), (8, 24))
    torch.testing.assert_close(dequantize_record(reread), dequantize_record(other), rtol=2.0**-22, atol=0)
    with pytest.raises(CheckpointError, match="weight_format is 2, needed 0"):
        wrong = int8_tensors() | {"weight_format": torch.tensor(2, dtype=torch.uint8)}
        BNB.read(StoredLayer(INT8, "int8"), wrong, (8, 24))
    with pytest.raises(CheckpointError, match="SCB is missing"):
        BNB.describe(SCHEME, "x", headers({"weight": int8_tensors()["weight"]}), "Linear", (8, 24))


# --- contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, "load_in_8bit is None and load_in_4bit is None"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "needed one of the two"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules is 'lm_head'"),
    ],
)
def test_malformed_configurations(config: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        BNB.scheme(config)


def test_states_that_contradict_the_tensors() -> None:
    tensors = random_layer("nf4", (8, 64))
    stored = described(tensors, (8, 64))
    name = "weight.quant_state.bitsandbytes__nf4"
    state = QuantState.of(tensors[name], name)
    for wrong in (replace(state, kind="fp4"), replace(state, block=32), replace(state, shape=(8, 65))):
        with pytest.raises(CheckpointError, match="The quantization state says"):
            BNB.read(stored, {**tensors, name: wrong.tensor()}, (8, 64))
    for text in (b"{", b"[]", b'{"shape": 3}'):
        with pytest.raises(CheckpointError, match="no quantization state"):
            BNB.read(stored, {**tensors, name: torch.tensor(list(text), dtype=torch.uint8)}, (8, 64))


def test_layers_that_are_not_whole() -> None:
    tensors = random_layer("nf4", (8, 64))
    without = {name: tensor for name, tensor in tensors.items() if "quant_state" not in name}
    with pytest.raises(CheckpointError, match="0 quantization states"):
        described(without, (8, 64))
    with pytest.raises(CheckpointError, match="512 codes, needed 1024"):
        described(tensors, (16, 64))


def test_codebooks_of_others_are_not_written() -> None:
    record = layer(KEYS["uint4:group64:f32"])
    with pytest.raises(OutputError, match="another codebook"):
        BNB.write(record.with_tensors(codebook=torch.arange(16.0)), KEYS["uint4:group64:f32"])
    bare = {role: record[role] for role in ("codes", "scale")}
    with pytest.raises(OutputError, match="found none"):
        BNB.write(QuantizedTensor(record.key, record.shape, bare), KEYS["uint4:group64:f32"])
    assert "blocks of 64 weights do not divide K=96" in str(BNB.refuse(KEYS["uint4:group64:f32"], (8, 96)))
    with pytest.raises(OutputError, match="not both"):
        BNB.config({"a": INT8, "b": KEYS["uint4:group64:f32"]}, [])


def test_codes_stay_packed() -> None:
    tensors = random_layer("nf4", (8, 64))
    record = BNB.read(described(tensors, (8, 64)), tensors, (8, 64))
    assert record["codes"].numel() == 8 * 64 // 2
    assert unpack_record(record)["codes"].shape == (8, 64)
