"""E4M3 activations times E4M3 weights on Hopper in CUDA C++, see `cuda_codes`.

The tensor cores sum all of K with some 14 bits, as torch's fast product does: K = 14336 costs 0.3 % of an output's
norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear import triton_fp8
from fewbit.kernels.linear.cuda_codes import code_obstacles
from fewbit.spec.hardware import Hardware


class CudaFp8(triton_fp8.TritonFp8):
    """See the head of this file."""

    name: ClassVar[str] = "cuda_fp8"
    backend: ClassVar[str] = "cuda"
    compiled: ClassVar[bool] = True

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        yield from super()._obstacles(request, hardware)
        yield from code_obstacles(request, hardware, self.codes)
