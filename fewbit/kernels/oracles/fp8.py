"""Oracle of FP8 weights with float scales: per tensor, per channel, in groups or in blocks."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.key import LinearKey


class Fp8Backend(StrEnum):
    """Backends of FP8 layers."""

    TORCH_SCALED_MM = "torch_scaled_mm"
    CPU = "cpu"
    TRITON = "triton"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    element = key.weight.element
    return not element.is_integer and element.bits == 8 and not key.weight.scale.element.is_exponent_only


FAMILY = Family(
    "fp8", Fp8Backend, _covers, {"cuda": (Fp8Backend.TORCH_SCALED_MM, Fp8Backend.TRITON), "cpu": (Fp8Backend.CPU,)}
)
