"""Oracle of MXFP8 weights: FP8 in groups of 32 under E8M0 scales, and FP8 blocks under E8M0 scales."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.key import LinearKey


class MxFp8Backend(StrEnum):
    """Backends of MXFP8 layers."""

    TORCH_SCALED_MM = "torch_scaled_mm"
    FLASHINFER = "flashinfer"
    TRITON = "triton"
    HUMMING = "humming"
    MARLIN = "marlin"
    B12X = "b12x"
    CUTLASS = "cutlass"
    DEEP_GEMM = "deep_gemm"
    AITER = "aiter"
    XPU = "xpu"
    CPU = "cpu"
    EMULATION = "emulation"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    element = key.weight.element
    return not element.is_integer and element.bits == 8 and key.weight.scale.element.is_exponent_only


FAMILY = Family(
    "mxfp8",
    MxFp8Backend,
    _covers,
    {
        "cuda": (
            MxFp8Backend.TORCH_SCALED_MM,
            MxFp8Backend.FLASHINFER,
            MxFp8Backend.DEEP_GEMM,
            MxFp8Backend.B12X,
            MxFp8Backend.CUTLASS,
            MxFp8Backend.TRITON,
            MxFp8Backend.HUMMING,
            MxFp8Backend.MARLIN,
            MxFp8Backend.EMULATION,
        ),
        "rocm": (MxFp8Backend.AITER, MxFp8Backend.EMULATION),
        "xpu": (MxFp8Backend.XPU, MxFp8Backend.EMULATION),
        "cpu": (MxFp8Backend.CPU,),
    },
)
