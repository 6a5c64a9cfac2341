"""Oracle of NVFP4 weights: E2M1 in groups of 16 under E4M3 scales and one float32 scale."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.element import E2M1
from fewbit.spec.key import LinearKey


class NvFp4Backend(StrEnum):
    """Backends of NVFP4 layers."""

    TORCH_SCALED_MM = "torch_scaled_mm"
    FLASHINFER = "flashinfer"
    CUTLASS = "cutlass"
    B12X = "b12x"
    TRITON = "triton"
    CUDA = "cuda"
    HUMMING = "humming"
    MARLIN = "marlin"
    AITER = "aiter"
    XPU = "xpu"
    CPU = "cpu"
    EMULATION = "emulation"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    return key.weight.element == E2M1 and not key.weight.scale.element.is_exponent_only


FAMILY = Family(
    "nvfp4",
    NvFp4Backend,
    _covers,
    {
        "cuda": (
            NvFp4Backend.TORCH_SCALED_MM,
            NvFp4Backend.FLASHINFER,
            NvFp4Backend.CUTLASS,
            NvFp4Backend.B12X,
            NvFp4Backend.CUDA,
            NvFp4Backend.TRITON,
            NvFp4Backend.HUMMING,
            NvFp4Backend.MARLIN,
            NvFp4Backend.EMULATION,
        ),
        "rocm": (NvFp4Backend.AITER, NvFp4Backend.EMULATION),
        "xpu": (NvFp4Backend.XPU, NvFp4Backend.EMULATION),
        "cpu": (NvFp4Backend.CPU,),
    },
)
