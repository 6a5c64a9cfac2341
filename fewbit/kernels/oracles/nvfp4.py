"""Oracle of NVFP4 weights: E2M1 in groups of 16 under E4M3 scales and one float32 scale."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.element import E2M1
from fewbit.spec.key import LinearKey


class NvFp4Backend(StrEnum):
    """Backends of NVFP4 layers."""

    CPU = "cpu"
    TRITON = "triton"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    return key.weight.element == E2M1 and not key.weight.scale.element.is_exponent_only


FAMILY = Family("nvfp4", NvFp4Backend, _covers, {"cuda": (NvFp4Backend.TRITON,), "cpu": (NvFp4Backend.CPU,)})
