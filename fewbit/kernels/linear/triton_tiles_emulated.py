"""Activations of NVFP4, MXFP4 and MXFP8 emulated: rounded to what codes stand for, then multiplied exactly.

Devices without arithmetic of block-scaled floats get the numbers that those with it would multiply: E2M1 or E4M3 times
a block scale has at most eight significant bits, so bf16 holds it exactly (f16 but for the smallest ones), and weights
are decoded in registers on the way into 16-bit tensor cores. No dequantized weight is ever stored for few rows, and the
activations cost one pass. See `quantized_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.activation.rounding import covers_rows
from fewbit.kernels.linear.quantized_tiles import QuantizedTilesKernel
from fewbit.spec.element import F32
from fewbit.spec.key import QuantKey


class TritonTilesEmulated(QuantizedTilesKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_tiles_emulated"
    backend: ClassVar[str] = "emulation"
    emulates: ClassVar[bool] = True
    without_activations: ClassVar[str] = "there is nothing to emulate"

    def activation_obstacles(self, activation: QuantKey) -> Iterator[str]:
        if covers_rows(activation) or activation.scale.element == F32:
            yield f"activations in groups under scales of e8m0 or e4m3 are emulated, found {activation}"
