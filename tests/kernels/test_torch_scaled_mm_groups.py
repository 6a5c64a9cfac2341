"""Torch's product of block-scaled floats: the layout by its description, since no device here has the product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.torch_scaled_mm_groups import TorchScaledMmGroups, from_blocks, in_blocks
from fewbit.spec import DEVICES
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer

KERNEL = TorchScaledMmGroups()
TAKEN = ("NVFP4", "MXFP8")


@given(st.integers(1, 300), st.integers(1, 20))
def test_scales_lie_where_the_description_says(rows: int, groups: int) -> None:
    scale = torch.randint(1, 256, (rows, groups), dtype=torch.uint8)
    ordered = in_blocks(scale)
    padded = -(-groups // 4)
    assert ordered.numel() == -(-rows // 128) * 128 * padded * 4
    for row, group in {(0, 0), (rows - 1, groups - 1), (rows // 2, groups // 2), (rows // 3, groups - 1)}:
        block = (row // 128) * padded + group // 4
        place = block * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        assert ordered[place] == scale[row, group]
    assert torch.equal(from_blocks(ordered, rows, groups), scale)
    assert int(ordered.count_nonzero()) == scale.numel(), "padding is zero"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("key", TAKEN)
def test_prepared_tensors_stand_for_the_layer(key: str, dtype: str) -> None:
    record = layer(KEYS[key], 48, 160)
    request = LinearRequest.of(record, KEYS[key], dtype)
    prepared = KERNEL.prepare(record, request)
    assert prepared.tensors["weight"].nbytes + prepared.tensors["scale"].nbytes == KERNEL.prepared_bytes(request)
    for tokens in ((0,), (1,), (3, 7)):
        x = inputs((*tokens, 160), DTYPES[dtype])
        for bias in (None, torch.randn(48).to(DTYPES[dtype])):
            y = KERNEL.run(x, prepared, bias)
            assert (y.shape, y.dtype) == ((*tokens, 48), DTYPES[dtype])
            assert_close(y, expected(x, record, KEYS[key], bias, KERNEL), dtype)


@pytest.mark.parametrize("device", ["sm100", "sm103", "sm120", "sm121"])
@pytest.mark.parametrize("key", TAKEN)
def test_blackwell_takes_them(key: str, device: str) -> None:
    assert KERNEL.refuse(LinearRequest(KEYS[key], 64, 256), DEVICES[device]) is None
    assert KERNEL.untested


@pytest.mark.parametrize(
    ("key", "rows", "columns", "words"),
    [
        ("MXFP4", 64, 256, "NVFP4 or MXFP8"),
        ("NVFP4A16", 64, 256, "no activation key"),
        ("NVFP4", 33, 256, "N must be a multiple of 16, found 33"),
        ("NVFP4", 64, 272, "K must be a multiple of 32, found 272"),
    ],
)
def test_what_it_does_not_take(key: str, rows: int, columns: int, words: str) -> None:
    refusal = KERNEL.refuse(LinearRequest(KEYS[key], rows, columns), DEVICES["sm100"])
    assert refusal is not None
    assert words in refusal.reason
