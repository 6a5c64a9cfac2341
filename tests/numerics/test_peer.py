"""Scales and codes against compressed-tensors' own functions, on many more numbers than the golden vectors hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbit.numerics import decode, quantize
from fewbit.spec import QuantKey

pytestmark = pytest.mark.peer

INTEGER = {"type": "int", "strategy": "group", "group_size": 16}
FLOAT = {"type": "float", "strategy": "group", "group_size": 16}
SCHEMES = {
    **{f"int{bits}:group16:f32": {**INTEGER, "num_bits": bits, "symmetric": True} for bits in (2, 3, 4, 8)},
    **{f"int{bits}:asym:group16:f32": {**INTEGER, "num_bits": bits, "symmetric": False} for bits in (2, 3, 4, 8)},
    "e4m3:group16:f32": {**FLOAT, "num_bits": 8},
    "e2m1:group16:e4m3/tensor:f32": {
        **FLOAT,
        "num_bits": 4,
        "strategy": "tensor_group",
        "scale_dtype": torch.float8_e4m3fn,
    },
    "e2m1:group32:e8m0": {**FLOAT, "num_bits": 4, "group_size": 32, "scale_dtype": torch.uint8},
    "e2m3:group32:e8m0": {**FLOAT, "num_bits": 6, "group_size": 32, "scale_dtype": torch.uint8},
}


@pytest.mark.parametrize(("text", "scheme"), SCHEMES.items())
def test_scales_and_codes_equal_compressed_tensors(text: str, scheme: dict[str, Any]) -> None:
    peer = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    key, arguments = QuantKey.parse(text), peer.QuantizationArgs(**scheme)
    weight = torch.randn(256, 2048) * torch.exp2(torch.empty(256, 1).uniform_(-4, 4))
    groups = weight.unflatten(-1, (-1, key.granularity.columns))
    low, high = groups.amin(-1), groups.amax(-1)
    shared = helpers.generate_gparam(weight.amin(), weight.amax()) if key.global_scale else None
    scale, zero = helpers.calculate_qparams(low, high, arguments, global_scale=shared)
    record = quantize(weight, key)
    assert torch.equal(decode(record["scale"], key.scale.element), scale.float())
    if shared is not None:
        assert torch.equal((1 / record["global_scale"]).float().flatten(), shared)
    if not key.symmetric:
        assert torch.equal(record["zero_point"], zero.to(torch.int8))
    theirs = forward.quantize(weight, scale, zero, arguments, global_scale=shared).float()
    ours = decode(record["codes"], key.element)
    assert torch.equal(ours, theirs)
