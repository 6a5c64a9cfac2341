"""Quark's golden vectors: its bytes read to the numbers they stand for, and written again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbit.numerics import quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import same_bits
from tests.checkpoints.test_quark import MXFP4, QUARK, config, read, spec
from tests.golden import floats, ids, words


@pytest.mark.parametrize("name", [name for name in ids("quark_") if "_per_" in name])
def test_golden_four_bits(name: str, golden: dict[str, Any]) -> None:
    """The codes themselves: scales of one and zero points of zero."""
    vector = golden[name]
    codes = torch.tensor(vector["codes_out_in"])
    (rows, columns), dtype = codes.shape, name.split("_")[1]
    packed = words(vector["weight_int32"])
    grouped = vector["qscheme"] == "per_group"
    weight = spec(dtype, vector["qscheme"], group_size=columns, symmetric=False)
    zeros = torch.zeros((1, rows // 8) if grouped else (rows // 8 or 1,), dtype=torch.int32)
    tensors = {
        "weight": packed,
        "weight_scale": torch.ones((1, rows) if grouped else (rows,)),
        "weight_zero_point": zeros,
    }
    found = config(weight, export={"pack_method": "reorder" if vector["reorder"] else "order"})
    _, record = read(found, tensors, (rows, columns))
    assert torch.equal(dequantize_record(record), codes.float())


def test_golden_three_bits(golden: dict[str, Any]) -> None:
    vector = golden["quark_int3"]
    codes = torch.tensor(vector["codes_out_in"], dtype=torch.int8)
    tensors = {
        "weight": torch.tensor(vector["weight_uint8"], dtype=torch.uint8),
        "weight_scale": torch.ones(len(codes)),
    }
    key, record = read(config(spec("int3", "per_channel")), tensors, tuple(codes.shape))
    assert torch.equal(dequantize_record(record), codes.float())
    written = QUARK.write(record, LinearKey.parse(key))
    assert all(same_bits(written[name], tensors[name]) for name in tensors)


def test_golden_two_bits(golden: dict[str, Any]) -> None:
    vector = golden["quark_uint2"]
    codes = torch.tensor(vector["codes_out_in"])
    tensors = {
        "weight": torch.tensor(vector["weight_uint8_transposed"], dtype=torch.uint8),
        "weight_scale": torch.ones(1, len(codes)),
        "weight_zero_point": torch.zeros(1, len(codes) // 4, dtype=torch.uint8),
    }
    key, record = read(config(spec("uint2", "per_group", group_size=codes.shape[1])), tensors, tuple(codes.shape))
    assert torch.equal(dequantize_record(record), codes.float())
    written = QUARK.write(record, LinearKey.parse(key))
    assert all(same_bits(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", ["quark_fp4", "quark_fp6_e2m3", "quark_fp6_e3m2"])
def test_golden_floats(name: str, golden: dict[str, Any]) -> None:
    vector, values = golden[name], floats(golden[name]["values"])
    tensors = {
        "weight": torch.tensor(vector["weight_uint8"], dtype=torch.uint8),
        "weight_scale": torch.full((len(values), values.shape[1] // 32), 127, dtype=torch.uint8),
    }
    found = config(MXFP4 | {"dtype": name.removeprefix("quark_")})
    key, record = read(found, tensors, tuple(values.shape))
    assert torch.equal(dequantize_record(record), values)
    written = QUARK.write(record, LinearKey.parse(key))
    assert all(same_bits(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", ["fp4", "fp6_e2m3", "fp6_e3m2"])
def test_golden_exponents(dtype: str, golden: dict[str, Any]) -> None:
    """Scales that fewbit writes for blocks of the vector's largest magnitudes; a block of zeros has its own byte."""
    vector = golden["quark_mx_even_round"]
    magnitudes = floats(vector["amax"])
    weight = torch.zeros(len(magnitudes), 32)
    weight[:, 0] = magnitudes
    scheme = QUARK.scheme(config(MXFP4 | {"dtype": dtype}))
    key = scheme.rules[0].key
    scales = QUARK.write(quantize(weight, key.weight), key)["weight_scale"].reshape(-1)
    expected = torch.tensor(vector["e8m0"][dtype], dtype=torch.uint8)
    assert torch.equal(scales[magnitudes > 0], expected[magnitudes > 0])
