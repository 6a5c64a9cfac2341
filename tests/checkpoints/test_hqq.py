"""HQQ: both axes, every width, and detection where no configuration says what the tensors are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fewbit.checkpoints.hqq import Hqq
from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.registry import recognize
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError
from fewbit.packing.registry import dequantize_record, packings
from fewbit.packing.strided import FIELDS
from fewbit.spec import ELEMENTS, Layout, LinearKey
from tests.checkpoints.layers import KEYS, headers, layer, same_bits
from tests.golden import floats, ids

HQQ = Hqq()
SCHEME = HQQ.scheme({"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}})
WORDS = {1: (8, torch.uint8), 2: (4, torch.uint8), 3: (10, torch.int32), 4: (2, torch.uint8), 8: (1, torch.uint8)}


def random_layer(shape: tuple[int, int], bits: int, size: int, axis: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random layer and its numbers, by HQQ's own steps: reshape, pack rows, subtract, scale."""
    codes = torch.randint(0, 1 << bits, shape)
    reshaped = codes.reshape(-1, size) if axis == 1 else codes.reshape(size, -1)
    fields, dtype = WORDS[bits]
    padded = torch.nn.functional.pad(reshaped, (0, 0, 0, -len(reshaped) % fields))
    words = torch.zeros(len(padded) // fields, padded.shape[1], dtype=torch.int64)
    for field, part in enumerate(padded.chunk(fields)):
        words |= part << bits * (fields - 1 - field)
    groups = (len(reshaped), 1) if axis == 1 else (1, reshaped.shape[1])
    scale, zero = torch.rand(groups).half() + 0.1, (torch.rand(groups) * (1 << bits)).half()
    numbers = ((reshaped.float() - zero.float()) * scale.float()).reshape(shape)
    tensors = {
        "W_q": words.to(dtype),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(shape),
        "packing": torch.tensor(list((f"{bits}bit_{'32' if bits == 3 else 'u8'}").encode()), dtype=torch.uint8),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, numbers


def described(tensors: dict[str, Tensor], shape: tuple[int, int]) -> StoredLayer:
    found = HQQ.describe(SCHEME, "x", headers(tensors), "Linear", shape)
    assert found is not None
    return found


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("shape", "size"), [((16, 64), 16), ((64, 32), 64), ((8, 96), 64), ((6, 80), 80), ((4, 24), 8)], ids=str
)
def test_every_width_and_axis(axis: int, bits: int, shape: tuple[int, int], size: int) -> None:
    rows = size if axis == 0 else shape[0] * shape[1] // size
    if bits != 3 and rows % WORDS[bits][0]:
        pytest.skip("HQQ cannot pack so few rows.")
    tensors, numbers = random_layer(shape, bits, size, axis)
    stored = described(tensors, shape)
    assert stored.key.weight.element == ELEMENTS[f"uint{bits}"]
    record = HQQ.read(stored, tensors, shape)
    record.validate()
    assert torch.equal(dequantize_record(record), numbers)


@pytest.mark.parametrize("bits", [3, 4])
def test_words_may_be_viewed_as_floats(bits: int) -> None:
    tensors, numbers = random_layer((16, 64), bits, 16, 1)
    tensors["W_q"] = tensors["W_q"].view(torch.float16)
    tensors["view_as_float"] = torch.tensor(1, dtype=torch.uint8)
    scheme = HQQ.scheme(
        {
            "quant_config": {},
            "layers": {"x": {"shape": [16, 64], "packing": "3bit_32" if bits == 3 else "4bit_u8", "key": ""}},
        }
    )
    stored = HQQ.describe(scheme, "x", headers(tensors))
    assert stored is not None
    assert torch.equal(dequantize_record(HQQ.read(stored, tensors, (16, 64))), numbers)


@pytest.mark.parametrize("name", ids("hqq_pack_"))
def test_golden_words(name: str, golden: dict[str, Any]) -> None:
    bits = int(name.removeprefix("hqq_pack_").removesuffix("bit"))
    word = 32 if bits == 3 else 8
    layout = Layout("strided", bits, "K", word)
    codes = torch.tensor(golden[name]["codes"], dtype=torch.uint8)
    packed = torch.tensor(golden[name]["packed"], dtype=torch.int32 if bits == 3 else torch.uint8)
    strided = packings()["strided"]
    assert torch.equal(strided.unpack(packed.flatten(), layout, ELEMENTS[f"uint{bits}"], tuple(codes.shape)), codes)
    rows = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % FIELDS[bits, word]))
    assert torch.equal(strided.pack(rows, layout), packed.flatten())


@pytest.mark.parametrize("axis", [0, 1])
def test_golden_layers(axis: int, golden: dict[str, Any]) -> None:
    vector = golden[f"hqq_quant_axis{axis}"]
    tensors = {
        "W_q": torch.tensor(vector["W_q"], dtype=torch.uint8),
        "scale": floats(vector["scale"]),
        "zero": floats(vector["zero"]),
    }
    shape = (4, 32)
    stored = described(tensors, shape)
    assert stored.variant == f"axis{axis} group{vector['group_size']}"
    record = HQQ.read(stored, tensors, shape)
    assert torch.equal(dequantize_record(record), floats(vector["dequant"]))
    if axis == 1:
        written = HQQ.write(record, stored.key)
        assert all(same_bits(written[name], tensors[name]) for name in tensors)


@given(rows=st.integers(1, 12), groups=st.integers(1, 3))
def test_three_bit_words_take_whole_rows(rows: int, groups: int) -> None:
    key = LinearKey.parse("uint3:asym:group8:f16")
    record = layer(key, (rows, groups * 8))
    tensors = HQQ.write(record, key)
    assert tuple(tensors["W_q"].shape) == (-(-rows * groups // 10), 8)
    back = HQQ.read(described(tensors, (rows, groups * 8)), tensors, (rows, groups * 8))
    assert torch.equal(dequantize_record(back), dequantize_record(record))


# --- detection -------------------------------------------------------------------------------------------------------


def test_tensors_announce_the_format(tmp_path: Path) -> None:
    tensors, numbers = random_layer((16, 64), 4, 32, 0)
    save_file({f"m.q.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    found = recognize(folder)
    assert found is not None
    checkpoint, config, decided_by = found
    assert isinstance(checkpoint, Hqq)
    assert "tensors" in decided_by
    scheme = checkpoint.scheme(config)
    assert [rule.targets for rule in scheme.rules] == [("m.q",)]
    stored = checkpoint.describe(scheme, "m.q", headers(tensors))  # no model is known
    assert stored is not None
    assert stored.shape == (16, 64)
    assert torch.equal(dequantize_record(checkpoint.read(stored, tensors, stored.shape)), numbers)


def test_plain_tensors_announce_nothing(tmp_path: Path) -> None:
    save_file({"m.weight": torch.zeros(4, 4), "m.scale": torch.ones(4)}, tmp_path / "model.safetensors")
    assert recognize(TensorFolder(tmp_path)) is None


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quant_config": [1]}, "quant_config is"),
        ({"quant_config": {"self_attn.q_proj": 3}}, "weight_quant_params"),
        ({"quant_config": {"weight_quant_params": {"nbits": 7}}}, "nbits is 7"),
        ({"quant_config": {"weight_quant_params": {"group_size": "x"}}}, "group_size 'x'"),
        ({"quant_config": {}, "skip_modules": "lm_head"}, "skip_modules is 'lm_head'"),
    ],
)
def test_malformed_configurations(config: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        HQQ.scheme(config)


def test_configurations_by_layer() -> None:
    keys = {"a.q_proj": KEYS["uint4:asym:group64:bf16"], "a.v_proj": KEYS["uint8:asym:group64:bf16"]}
    scheme = HQQ.scheme(json.loads(json.dumps(HQQ.config(keys, ["lm_head"]))))
    for name, key in keys.items():
        assert scheme.key_for(name, "Linear", HQQ.matcher) == key
    assert scheme.key_for("lm_head", "Linear", HQQ.matcher) is None


# --- contradictions --------------------------------------------------------------------------------------------------


def test_layers_that_are_not_whole() -> None:
    tensors, _ = random_layer((16, 64), 4, 16, 1)
    for missing in ("scale", "zero"):
        rest = {name: tensor for name, tensor in tensors.items() if name != missing}
        with pytest.raises(CheckpointError, match=f"{missing} is missing"):
            described(rest, (16, 64))
    with pytest.raises(CheckpointError, match="W_q has 512 bytes, needed 768"):
        described({**tensors, "scale": tensors["scale"][:48], "zero": tensors["zero"][:48]}, (16, 48))
    with pytest.raises(CheckpointError, match="its shape is missing"):
        HQQ.describe(SCHEME, "x", headers(tensors))
    with pytest.raises(CheckpointError, match="quantized scales"):
        described({**tensors, "scale_q": tensors["W_q"]}, (16, 64))
    stored = described(tensors, (16, 64))
    with pytest.raises(CheckpointError, match="quant_zero is set"):
        HQQ.read(stored, {**tensors, "quant_zero": torch.tensor(1, dtype=torch.uint8)}, (16, 64))


@pytest.mark.parametrize(
    ("key", "shape", "found"),
    [
        ("int4:asym:group64:bf16", (8, 64), "found int4"),
        ("uint4:asym:channel:bf16", (8, 64), "in groups"),
        ("uint5:asym:group64:bf16", (8, 64), "found uint5"),
        ("uint4:asym:group64:e4m3", (8, 64), "found e4m3"),
        ("uint4:asym:group64:bf16", (8, 96), "do not divide K=96"),
        ("uint4:asym:group64:bf16", (3, 64), "3 groups do not fill words of 2 codes"),
    ],
)
def test_refusals(key: str, shape: tuple[int, int], found: str) -> None:
    assert found in str(HQQ.refuse(LinearKey.parse(key), shape))


def test_integer_zero_points_are_written_as_floats() -> None:
    key = KEYS["uint4:asym:group64:bf16"]
    record = layer(key)
    record = record.with_tensors(zero_point=torch.full_like(record["zero_point"], 7, dtype=torch.uint8))
    assert HQQ.write(record, key)["zero"].unique().tolist() == [7.0]


@pytest.mark.parametrize(
    ("note", "value"),
    [
        ("shape", torch.tensor([16.0, 64.0])),
        ("shape", torch.tensor([16, 64, 1])),
        ("shape", torch.tensor([-16, -64])),
        ("shape", torch.tensor(1024)),
        ("scale", torch.zeros(64, 1, dtype=torch.int8)),
    ],
    ids=["floats", "three", "negative", "number", "integer scales"],
)
def test_notes_of_another_kind_are_named(note: str, value: Tensor, tmp_path: Path) -> None:
    tensors = random_layer((16, 64), 4, 16, 1)[0] | {note: value}
    save_file({f"x.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^x"):
        recognize(TensorFolder(tmp_path))


@pytest.mark.parametrize(
    "value", [torch.rand(7), torch.zeros(1000, dtype=torch.uint8), torch.tensor(4)], ids=["floats", "long", "number"]
)
def test_a_packing_that_is_no_text_is_passed_over(value: Tensor, tmp_path: Path) -> None:
    tensors = random_layer((16, 64), 4, 16, 1)[0] | {"packing": value}
    save_file({f"x.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found = recognize(TensorFolder(tmp_path))
    assert found is not None and found[1]["layers"]["x"]["packing"] == ""
