"""INT8 activations times integer weights of 5 to 8 bits on Hopper in CUDA C++, see `cuda_codes`.

Sums are exact in 32 bits; zero points of activations are taken out of them at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear import triton_int8
from fewbit.kernels.linear.cuda_codes import code_obstacles
from fewbit.spec.hardware import Hardware


class CudaInt8(triton_int8.TritonInt8):
    """See the head of this file."""

    name: ClassVar[str] = "cuda_int8"
    backend: ClassVar[str] = "cuda"
    compiled: ClassVar[bool] = True

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        yield from super()._obstacles(request, hardware)
        yield from code_obstacles(request, hardware, self.codes)
