"""Quantizing into formats that have keys of their own: HQQ's unsigned codes, bitsandbytes' tables and row maxima."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import FewbitError, SchemeError, ShapeError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.evaluation.verify import verify
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import dequantize
from fewbit.numerics import quantize as quantize_numbers
from fewbit.numerics.codebooks import CODEBOOKS
from fewbit.spec import QuantKey
from tests.tiny_models import save_tiny_model

IDS = torch.arange(16)[None]

HELD = [
    ("hqq", "W2A16_ASYM", 32, "uint2:asym:group32:bf16"),
    ("hqq", "W3A16_ASYM", 64, "uint3:asym:group64:bf16"),
    ("hqq", "W4A16_ASYM", 64, "uint4:asym:group64:bf16"),
    ("hqq", "W8A16_ASYM", 64, "uint8:asym:group64:bf16"),
    ("bitsandbytes", "NF4", None, "uint4:group64:f32"),
    ("bitsandbytes", "NF4", 32, "uint4:group32:f32"),
    ("bitsandbytes", "W8A16", None, "int8:channel:f32"),
]


@pytest.mark.parametrize(("name", "scheme", "size", "key"), HELD)
def test_layers_have_the_numbers_of_their_key(
    name: str, scheme: str, size: int | None, key: str, tmp_path: Path
) -> None:
    source = save_tiny_model(tmp_path / "model")
    report = quantize(source, tmp_path / "q", scheme, group_size=size, format=name, effort="fast")
    stored = StoredCheckpoint.open(tmp_path / "q")
    assert stored.format is not None and stored.format.name == report["format"] == name
    weights, layers = TensorFolder(source), list(decoded_layers(stored))
    assert len(layers) == len(report["layers"]) == 14
    for one in layers:
        record = quantize_numbers(weights.load(f"{one.name}.weight"), QuantKey.parse(key))
        if scheme == "W8A16":  # 127 times a scale is rounded, and numbers between two codes may go to the other one
            assert bool(((one.numbers - dequantize(record)).abs() <= record["scale"] * 1.001).all())
            assert (one.numbers == dequantize(record)).float().mean() > 0.5
        else:
            assert torch.equal(one.numbers, dequantize(record))
    assert verify(tmp_path / "q").passed
    with torch.no_grad():
        assert load(tmp_path / "q", device="cpu")(input_ids=IDS).logits.isfinite().all()


def test_algorithms_choose_hqq_codes_too(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    options = {"format": "hqq", "group_size": 64, "calibration_windows": 2, "calibration_length": 64}
    report = quantize(source, tmp_path / "q", "W4A16_ASYM", algorithm="gptq", **options)
    assert {layer["method"] for layer in report["layers"]} == {"gptq"}
    assert verify(tmp_path / "q").passed


def test_numbers_go_to_the_nearest_entry_of_the_table() -> None:
    table = torch.tensor(CODEBOOKS["nf4"])
    weight = torch.randn(4, 128)
    record = quantize_numbers(weight, QuantKey.parse("uint4:group64:f32"))
    scaled = weight.reshape(4, 2, 64) / record["scale"][..., None]
    nearest = (scaled[..., None] - table).abs().argmin(-1).reshape(4, 128)
    assert torch.equal(record["codes"].long(), nearest)
    zeros = quantize_numbers(torch.zeros(1, 64), QuantKey.parse("uint4:group64:f32"))
    assert not dequantize(zeros).any()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"scheme": "NF4"}, ShapeError, "compressed-tensors cannot hold .* as uint4:group64"),
        ({"scheme": "NF4", "format": "bitsandbytes", "algorithm": "gptq"}, SchemeError, "indices into a table"),
        ({"scheme": "NF4", "format": "bitsandbytes", "transforms": ("rotation",)}, SchemeError, "indices into a table"),
        (
            {"scheme": "W4A16", "format": "bitsandbytes", "group_size": 32},
            ShapeError,
            "bitsandbytes holds int8:channel",
        ),
        ({"scheme": "W4A16", "format": "hqq", "group_size": 64}, ShapeError, "hqq holds uint1"),
        ({"scheme": "MXFP4A16", "format": "mxfp4"}, ShapeError, "stacks of experts .* and no single layer"),
    ],
)
def test_what_a_format_has_no_key_for(options: dict, error: type[FewbitError], sentence: str, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    with pytest.raises(error, match=sentence):
        quantize(source, tmp_path / "q", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
