"""INT8 activations times integer weights of up to 8 bits on INT8 tensor cores: a Triton program, CUDA from 7.5 on.

Sums of codes are exact in 32 bits. Activations have one scale a token, one for all, or one for each group of a row,
with or without zero points, which are taken out of the sum at the end: the sum of a row of the weight times the code
of zero. Weights of up to 4 bits are held in pairs and become int8 in two instructions for four of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.activation.rounding import rounding_obstacles
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.obstacles import int8_obstacles
from fewbit.kernels.linear.products import ProductKernel
from fewbit.spec.hardware import Hardware

MAX_COLUMNS = 1 << 16
"""Where sums of products of 8-bit codes, each sixteen times a 4-bit one, leave 32 bits."""


class TritonInt8(ProductKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_int8"
    codes: ClassVar[str] = "int8"
    weights: ClassVar[str] = "integers of at most 8 bits"

    def device_obstacles(self, hardware: Hardware) -> Iterator[str]:
        if not hardware.has("int8"):
            yield f"INT8 tensor cores are needed, {hardware.name} has none"

    def key_obstacles(self, request: LinearRequest) -> Iterator[str]:
        activation = request.key.activation
        if activation is None:
            yield "no activation key: integer activations are needed"
            return
        if not activation.element.is_integer:
            yield f"activations must be integers, found {activation.element}"
        yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
        yield from int8_obstacles(request.key.weight, "weights")
        if request.columns > MAX_COLUMNS:
            yield f"sums of 32 bits hold {MAX_COLUMNS} input features, found K={request.columns}"
