"""Oracle of OCP microscaling weights below 8 bits: MXFP4 and MXFP6, groups of 32 under E8M0 scales."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.key import LinearKey


class MxBackend(StrEnum):
    """Backends of MXFP4 and MXFP6 layers."""

    TORCH_SCALED_MM = "torch_scaled_mm"
    FLASHINFER = "flashinfer"
    TRITON = "triton"
    CUDA = "cuda"
    HUMMING = "humming"
    MARLIN = "marlin"
    B12X = "b12x"
    CUTLASS = "cutlass"
    AITER = "aiter"
    XPU = "xpu"
    CPU = "cpu"
    EMULATION = "emulation"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    weight = key.weight
    return weight.element.bits < 8 and not weight.element.is_integer and not _is_nvfp4(key)


def _is_nvfp4(key: LinearKey) -> bool:
    return key.weight.element.bits == 4 and not key.weight.scale.element.is_exponent_only


FAMILY = Family(
    "mx",
    MxBackend,
    _covers,
    {
        "cuda": (
            MxBackend.TORCH_SCALED_MM,
            MxBackend.FLASHINFER,
            MxBackend.CUTLASS,
            MxBackend.B12X,
            MxBackend.CUDA,
            MxBackend.TRITON,
            MxBackend.HUMMING,
            MxBackend.MARLIN,
            MxBackend.EMULATION,
        ),
        "rocm": (MxBackend.AITER, MxBackend.EMULATION),
        "xpu": (MxBackend.XPU, MxBackend.EMULATION),
        "cpu": (MxBackend.CPU,),
    },
)
