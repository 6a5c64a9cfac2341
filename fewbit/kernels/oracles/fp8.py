"""Oracle of FP8 weights with float scales: per tensor, per channel, in groups or in blocks."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.key import LinearKey


class Fp8Backend(StrEnum):
    """Backends of FP8 layers."""

    CUDA = "cuda"
    TRITON = "triton"
    TORCH_SCALED_MM = "torch_scaled_mm"
    CUTLASS = "cutlass"
    DEEP_GEMM = "deep_gemm"
    B12X = "b12x"
    FLASHINFER = "flashinfer"
    HUMMING = "humming"
    MARLIN = "marlin"
    EMULATION = "emulation"
    AITER = "aiter"
    XPU = "xpu"
    CPU = "cpu"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    element = key.weight.element
    return not element.is_integer and element.bits == 8 and not key.weight.scale.element.is_exponent_only


# CUDA reads what TRITON prepares and was faster where it was measured. TRITON goes before torch: its FP8 kernel reads
# torch's layout and calls torch's product where there are many rows.
FAMILY = Family(
    "fp8",
    Fp8Backend,
    _covers,
    {
        "cuda": (
            Fp8Backend.CUDA,
            Fp8Backend.TRITON,
            Fp8Backend.TORCH_SCALED_MM,
            Fp8Backend.FLASHINFER,
            Fp8Backend.DEEP_GEMM,
            Fp8Backend.CUTLASS,
            Fp8Backend.B12X,
            Fp8Backend.HUMMING,
            Fp8Backend.MARLIN,
            Fp8Backend.EMULATION,
        ),
        "rocm": (Fp8Backend.AITER,),
        "xpu": (Fp8Backend.XPU,),
        "cpu": (Fp8Backend.CPU,),
    },
)
