"""Block types: every bit pattern reads as gguf-py reads it and is written back byte for byte."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.registry import find_format, formats
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey, QuantKey
from fewbit.spec.element import E8M0
from fewbit_gguf.blocks import BLOCK_TYPES, BlockType
from fewbit_gguf.format import Gguf, tensor_name
from tests.golden import floats, golden_vectors, ids

FORMAT = Gguf()
EVERY_TYPE = pytest.mark.parametrize("name", BLOCK_TYPES)


def stored(one: BlockType) -> StoredLayer:
    return StoredLayer(one.key, one.name)


def random_blocks(one: BlockType, rows: int, count: int, seed: int) -> Tensor:
    """Blocks of random bits, but for the floats, which are finite."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, count, one.nbytes), dtype=np.uint8)
    if one.scale_element == E8M0:
        raw[..., one.scale] = random.integers(0, 255, raw.shape[:2])
    for start in () if one.scale_element == E8M0 else (one.scale, one.minimum):
        if start is not None:
            numbers = random.normal(size=(rows, count, 1)).astype(np.float16)
            numbers[random.random(numbers.shape) < 0.1] = 0  # how GGUF writes a block of zeros
            raw[..., start : start + 2] = numbers.view(np.uint8)
    return torch.from_numpy(raw)


def read(one: BlockType, blocks: Tensor) -> QuantizedTensor:
    shape = (blocks.shape[0], blocks.shape[1] * one.elements)
    record = FORMAT.read(stored(one), {tensor_name(one.name): blocks}, shape)
    record.validate(one.name)
    return record


def gguf_py(one: BlockType, blocks: Tensor) -> Tensor:
    kind = gguf.GGMLQuantizationType[one.name]
    return torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), kind))


@EVERY_TYPE
def test_sizes_are_those_of_the_gguf_package(name: str) -> None:
    one = BLOCK_TYPES[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (one.elements, one.nbytes)


@EVERY_TYPE
def test_no_bit_of_a_block_is_left_out_or_used_twice(name: str) -> None:
    one = BLOCK_TYPES[name]
    used = np.zeros(8 * one.nbytes, int)
    for start, width in ((one.scale, one.scale_element.bits), (one.minimum, 16)):
        if start is not None:
            used[8 * start : 8 * start + width] += 1
    for field in (one.codes, one.scale_codes, one.minimum_codes):
        for part in field.parts if field else ():
            for byte, shift in zip(part.byte, part.shift, strict=True):
                used[8 * byte + shift : 8 * byte + shift + part.width] += 1
    assert (used == 1).all()


@EVERY_TYPE
@given(rows=st.integers(1, 5), count=st.integers(1, 4), seed=st.integers(0, 1 << 30))
def test_random_bits_are_read_as_by_gguf_py_and_written_back(name: str, rows: int, count: int, seed: int) -> None:
    one = BLOCK_TYPES[name]
    blocks = random_blocks(one, rows, count, seed)
    record = read(one, blocks)
    ours, theirs = dequantize_record(record), gguf_py(one, blocks)
    if name == "MXFP4":  # whose code 8 is -0.0 here, as E2M1 has it, and 0.0 there
        ours = ours + 0.0
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert torch.equal(FORMAT.write(record, one.key)[tensor_name(name)], blocks)


@pytest.mark.parametrize("vector", [name for name in ids("gguf_") if name.removeprefix("gguf_") in BLOCK_TYPES])
def test_golden_blocks(vector: str) -> None:
    entry, one = golden_vectors()[vector], BLOCK_TYPES[vector.removeprefix("gguf_")]
    blocks = torch.tensor(list(bytes.fromhex(entry["block_hex"])), dtype=torch.uint8).reshape(1, 1, one.nbytes)
    record = read(one, blocks)
    assert torch.equal(dequantize_record(record)[0], floats(entry["dequant"]))
    expected = entry.get("codes", entry.get("signed_codes"))
    if expected is not None:
        assert record["codes"][0].tolist() == expected
    for role, key in (("scale", "sub_scales"), ("minimum", "sub_mins")):
        for field in (field for field in entry if field.startswith(key)):
            nested = record.tensors[role]
            assert isinstance(nested, QuantizedTensor) and nested["codes"][0].tolist() == entry[field]


def test_every_golden_vector_of_the_format_is_used() -> None:
    assert {name.removeprefix("gguf_") for name in ids("gguf_")} == {*BLOCK_TYPES, "llama_qk_permute"}


@EVERY_TYPE
def test_a_layer_says_itself_what_it_is(name: str) -> None:
    one = BLOCK_TYPES[name]
    config = FORMAT.config({"a": one.key}, ["lm_head"])
    found = find_format(config)
    assert found is formats()["gguf"]
    scheme = found.scheme(config)
    assert scheme.key_for("a", matcher=found.matcher) == one.key
    header = {tensor_name(name): TensorHeader("U8", (3, 2, one.nbytes))}
    for module in ("a", "another"):
        assert found.describe(scheme, module, header, shape=(3, 2 * one.elements)) == stored(one)
    assert LinearKey.parse(str(one.key)) == one.key
    with pytest.raises(CheckpointError, match=rf"{tensor_name(name)} has shape"):
        found.describe(scheme, "a", header, shape=(3, one.elements))
    with pytest.raises(CheckpointError, match="several weights"):
        found.describe(scheme, "a", header | {"weight": TensorHeader("F16", (3, 64))})


@pytest.mark.parametrize("axis", ["N", "K"])
@EVERY_TYPE
def test_sharding_the_file_is_sharding_the_layer(name: str, axis: str) -> None:
    one = BLOCK_TYPES[name]
    blocks = random_blocks(one, 4, 4, 0)
    whole = dequantize_record(read(one, blocks))
    (spec,) = FORMAT.specs(stored(one))
    position = "NK".index(axis)
    for rank in range(2):
        cut = spec.shard(axis, whole.shape[position], rank, 2)
        assert cut is not None
        half = whole.shape[position] // 2
        shard = dequantize_record(read(one, blocks.narrow(*cut)))
        assert torch.equal(shard, whole.narrow(position, rank * half, half))


def test_a_scale_that_is_not_finite_is_refused() -> None:
    for name, byte in (("Q4_0", 1), ("Q4_K", 3), ("MXFP4", 0)):
        blocks = random_blocks(BLOCK_TYPES[name], 1, 1, 0)
        blocks[0, 0, byte] = 0xFF if name == "MXFP4" else 0x7E
        with pytest.raises(CheckpointError, match=rf"weight_{name.lower()} holds 1 of 1 scales that are not finite"):
            read(BLOCK_TYPES[name], blocks)


def _written(text: str, shape: tuple[int, int], **changes: Any) -> None:
    key = LinearKey.parse(text)
    FORMAT.write(quantize(torch.rand(shape), key.weight).with_tensors(**changes), key)


def test_what_it_cannot_hold_is_refused() -> None:
    _written("int4:group32:f16", (2, 64))
    with pytest.raises(OutputError, match=r"no int4:group64:f16; it holds .*groups of 32"):
        _written("int4:group64:f16", (2, 64))
    with pytest.raises(OutputError, match="no int4:group32:f16 \\* int8"):
        _written("int4:group32:f16 * int8:token:f32:dynamic", (2, 64))
    with pytest.raises(OutputError, match=r"blocks of 32 .* K=48"):
        _written("int4:group32:f16", (2, 48))
    with pytest.raises(OutputError, match=r"minimum.*\(Q4_1\) or .*codebook.*\(IQ4_NL\), found codes, scale"):
        _written("uint4:group32:f16", (2, 64))
    with pytest.raises(OutputError, match="codebook"):
        _written("uint4:group32:f16", (2, 64), codebook=torch.arange(16))
    with pytest.raises(OutputError, match="uint4:group32:uint6 with"):  # its scales are no scales of scales
        key = QuantKey.parse("uint4:group32:uint6")
        plain = {
            "codes": torch.zeros(1, 256, dtype=torch.uint8),
            "scale": torch.ones(1, 8),
            "minimum": torch.ones(1, 8),
        }
        FORMAT.write(QuantizedTensor(key, (1, 256), plain), LinearKey(key))


@pytest.mark.parametrize("types", [None, ["Q4_0"], {"Q4_0": "a"}, {"Q4_9": ["a"]}])
def test_a_malformed_configuration(types: Any) -> None:
    with pytest.raises(CheckpointError, match="Q4_9" if isinstance(types, dict) and "Q4_9" in types else "types"):
        FORMAT.scheme({"quant_method": "gguf", "types": types})
