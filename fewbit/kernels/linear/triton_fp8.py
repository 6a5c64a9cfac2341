"""E4M3 activations times weights of E4M3, E2M1 or small integers on FP8 tensor cores, CUDA from 8.9 on.

FP8 W8A8 with scales of rows, of the tensor or of blocks, and W4A8: integers of up to 4 bits and E2M1 are held in pairs
and become E4M3 in registers, exactly. Scales of groups multiply float32 sums over a group, and no sum of the tensor
cores runs over more than 128 input features. Where a plan says so, torch's own product multiplies the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.activation.rounding import rounding_obstacles
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.obstacles import capability_obstacles
from fewbit.kernels.linear.products import ProductKernel
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware

CAPABILITY = 89


class TritonFp8(ProductKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_fp8"
    codes: ClassVar[str] = "e4m3"
    weights: ClassVar[str] = "weights of e4m3, e2m1 or integers of at most 5 bits"

    def device_obstacles(self, hardware: Hardware) -> Iterator[str]:
        yield from capability_obstacles(hardware, CAPABILITY, "FP8 arithmetic")

    def key_obstacles(self, request: LinearRequest) -> Iterator[str]:
        activation = request.key.activation
        if activation is None:
            yield "no activation key: FP8 activations are needed"
            return
        if activation.element != E4M3:
            yield f"activations of e4m3 are needed, found {activation.element}"
        yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
