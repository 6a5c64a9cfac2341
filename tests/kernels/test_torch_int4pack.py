"""Torch's int4 product: every weight as it really is, and what must never reach the operation."""

from __future__ import annotations

import pytest
import torch

from fewbit.errors import CheckpointError
from fewbit.kernels.interface import LinearRequest, Prepared
from fewbit.kernels.linear.torch_int4pack import TorchInt4Pack
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.packing.registry import pack_record
from fewbit.spec import CHANNEL, DEVICES, TENSOR, Granularity, Layout, LinearKey, block, group
from fewbit.spec.element import F16, F32
from tests.kernels.layers import KEYS, assert_close, expected, inputs, layer, weight_only

KERNEL = TorchInt4Pack()
SYMMETRIC = ["int4", "uint4b8", "int3", "int2", "uint4", "uint3"]
ASYMMETRIC = ["uint4", "int4", "uint4b8", "uint3", "uint2"]


def prepare(record: QuantizedTensor) -> Prepared:
    request = LinearRequest.of(record, LinearKey(record.key))
    assert KERNEL.refuse(request, DEVICES["x86-avx2"]) is None
    return KERNEL.prepare(record, request)


def weights(prepared: Prepared, columns: int) -> torch.Tensor:
    """Every weight, rounded to bf16, [N, K]: the layer's answer to each unit vector."""
    return KERNEL.run(torch.eye(columns).bfloat16(), prepared, None).T


@pytest.mark.parametrize("element", SYMMETRIC)
@pytest.mark.parametrize("granularity", [group(32), group(128), CHANNEL, TENSOR, block(16, 64), block(7, 32)], ids=str)
def test_symmetric_weights_are_exact(element: str, granularity: Granularity) -> None:
    record = layer(weight_only(element, granularity), 48, 256)
    assert torch.equal(weights(prepare(record), 256), dequantize(record).bfloat16())


@pytest.mark.parametrize("element", ASYMMETRIC)
@pytest.mark.parametrize("columns", [64, 576])
def test_asymmetric_weights_are_as_exact_as_their_zeros(element: str, columns: int) -> None:
    record = layer(weight_only(element, group(64), symmetric=False), 48, columns)
    exact = dequantize(record)
    error = (weights(prepare(record), columns).float() - exact).abs()
    # The docstring's bound, for the zero, and the rounding of the answer itself.
    step = record["scale"].float().repeat_interleave(64, 1)
    assert (error <= 0.032 * step + exact.abs() * 2**-8).all()
    assert error.mean() < 0.01 * step.mean() + 2**-9 * exact.abs().mean()


@pytest.mark.parametrize("distance", [0, 1, 2, 4, 8])
def test_zero_points_at_these_distances_from_the_middle_are_exact(distance: int) -> None:
    record = layer(weight_only("uint4", group(32), symmetric=False), 16, 64)
    record = record.with_tensors(zero_point=torch.full_like(record["zero_point"], 8 - distance))
    assert torch.equal(weights(prepare(record), 64), dequantize(record).bfloat16())


@pytest.mark.parametrize("scale", [F16, F32], ids=str)
def test_wide_scales_are_rounded_to_bf16(scale: object) -> None:
    record = layer(weight_only("int4", group(32), scale=scale), 16, 64)
    exact = dequantize(record)
    assert ((weights(prepare(record), 64).float() - exact).abs() <= exact.abs() * 2**-7).all()


def test_group_minima_go_into_the_zero() -> None:
    record = layer(weight_only("uint4", group(32)), 32, 128)
    record = record.with_tensors(minimum=-torch.rand_like(record["scale"].float()))
    x = inputs((5, 128), torch.bfloat16)
    y = KERNEL.run(x, prepare(record), None)
    assert_close(y, expected(x, record, LinearKey(record.key), None, KERNEL), "bf16")


def test_packed_codes_are_unpacked_first() -> None:
    record = layer(KEYS["W4A16 g32"], 16, 64)
    packed = pack_record(record, Layout("dense", 4, "K", 32, 8))
    request = LinearRequest.of(packed, KEYS["W4A16 g32"])
    for name, tensor in KERNEL.prepare(packed, request).tensors.items():
        assert torch.equal(tensor, prepare(record).tensors[name])


@pytest.mark.parametrize(
    ("columns", "granularity", "size"),
    [
        (256, CHANNEL, 256),
        (576, CHANNEL, 64),
        (160, CHANNEL, 32),
        (512, group(512), 256),
        (512, group(64), 64),
        (576, group(128), 64),
        (96, group(4096), 32),
    ],
)
def test_the_largest_group_that_fits_is_taken(columns: int, granularity: Granularity, size: int) -> None:
    record = layer(weight_only("int4", granularity), 16, columns)
    prepared = prepare(record)
    assert prepared.constants["group"] == size
    assert prepared.tensors["scales"].shape == (columns // size, 16, 2)


@pytest.mark.parametrize("code", [8, -9, 127])
def test_codes_outside_the_element_are_found_before_they_spoil_their_neighbours(code: int) -> None:
    record = layer(weight_only("int4", group(32)), 16, 64)
    record["codes"][3, 5] = code
    with pytest.raises(CheckpointError, match=f"{code} .*int4"):
        prepare(record)


def test_inputs_of_another_width_are_an_error() -> None:
    prepared = prepare(layer(weight_only("int4", group(32)), 16, 64))
    for columns in (32, 60, 128):
        with pytest.raises(RuntimeError):
            KERNEL.run(torch.randn(3, columns).bfloat16(), prepared, None)
