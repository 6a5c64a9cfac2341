"""FP8 and INT8 activations over weight tiles: the numbers that codes stand for, multiplied on 16-bit tensor cores.

That is the arithmetic of an FP8 or INT8 product at half its peak rate, on devices without FP8 arithmetic too, and for
weights that 8-bit products do not take: zero points, groups of 16 and 32. See `quantized_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.activation.rounding import covers_rows
from fewbit.kernels.linear.quantized_tiles import QuantizedTilesKernel
from fewbit.spec.element import E4M3
from fewbit.spec.key import QuantKey


class TritonTilesQuantized(QuantizedTilesKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_tiles_quantized"
    backend: ClassVar[str] = "triton"
    without_activations: ClassVar[str] = "FP8 or integer activations are needed"

    def activation_obstacles(self, activation: QuantKey) -> Iterator[str]:
        if activation.element != E4M3 and not activation.element.is_integer:
            yield f"activations of e4m3 or integers are needed, found {activation.element}"
        if not covers_rows(activation):
            yield f"one activation scale for each token or for all is needed, found {activation.granularity}"
