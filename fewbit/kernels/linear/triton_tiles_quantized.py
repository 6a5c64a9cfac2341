"""FP8 and INT8 activations over weight tiles: the numbers that codes stand for, multiplied on 16-bit tensor cores.

That is the arithmetic of an FP8 or INT8 product at half its peak rate, on devices without FP8 arithmetic too, and for
weights that 8-bit products do not take: zero points, groups of 16 and 32. See `quantized_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.activation.rounding import covers_rows, rounding_obstacles
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.quantized_tiles import QuantizedTilesKernel
from fewbit.kernels.linear.triton_tiles import tile_obstacles
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware


class TritonTilesQuantized(QuantizedTilesKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_tiles_quantized"
    backend: ClassVar[str] = "triton"

    def obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        activation = request.key.activation
        if activation is None:
            yield "no activation key: FP8 or integer activations are needed"
            return
        yield from tile_obstacles(request, hardware)
        if activation.element != E4M3 and not activation.element.is_integer:
            yield f"activations of e4m3 or integers are needed, found {activation.element}"
        if not covers_rows(activation):
            yield f"one activation scale for each token or for all is needed, found {activation.granularity}"
        yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
