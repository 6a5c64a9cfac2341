"""NVFP4 and MXFP8 on both sides, on CUDA from compute capability 10.0: torch's product of block-scaled floats.

`torch.nn.functional.scaled_mm` of torch 2.11. K must be a multiple of 32 and N of 16.

**No such device was at hand: the layouts are tested against their description, the product itself has never run.**
MXFP4 is left out: torch's CUDA builds multiply it only where an add-on was compiled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearRequest, Prepared
from fewbit.kernels.linear.block_scaled import (
    MXFP8,
    NVFP4,
    BlockScaledKernel,
    block_scaled_obstacles,
    fake,
    linear,
    operands,
)
from fewbit.kernels.linear.obstacles import cublas_obstacles
from fewbit.kernels.operations import define
from fewbit.spec.hardware import Hardware

QUANTA = {"N": 16, "K": 32}


class TorchScaledMmGroups(BlockScaledKernel):
    """See the head of this file."""

    name: ClassVar[str] = "torch_scaled_mm_groups"
    backend: ClassVar[str] = "torch_scaled_mm"

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        yield from block_scaled_obstacles(request, hardware, (NVFP4, MXFP8), QUANTA)
        yield from cublas_obstacles(request)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return _operation(*operands(x, prepared, bias))


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, input_global_scale: Tensor | None,
    bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    return linear(x, weight, scale, global_scale, input_global_scale, bias, activation, _multiplied)


def _multiplied(
    codes: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, global_scale: Tensor,
    input_global_scale: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    functional = torch.nn.functional
    order = functional.SwizzleType.SWIZZLE_32_4_4
    if input_global_scale is None:
        kind, exponent = functional.ScalingType.BlockWise1x32, torch.float8_e8m0fnu
        return functional.scaled_mm(
            codes, weight.t(), x_scale.view(exponent), kind, scale.view(exponent), kind, order, order,
            output_dtype=dtype,
        )  # fmt: skip
    recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    swizzle = [order, functional.SwizzleType.NO_SWIZZLE]
    pairs, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    return functional.scaled_mm(
        codes.view(pairs), weight.view(pairs).t(), [x_scale.view(e4m3), input_global_scale.float()], recipe,
        [scale.view(e4m3), global_scale], recipe, swizzle, swizzle, output_dtype=dtype,
    )  # fmt: skip


_operation = define(
    "linear_scaled_mm_groups(Tensor x, Tensor weight, Tensor scale, Tensor global_scale, Tensor? input_global_scale, "
    "Tensor? bias, str activation) -> Tensor",
    _linear,
    fake,
)
