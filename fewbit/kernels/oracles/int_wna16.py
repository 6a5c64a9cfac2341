"""Oracle of integer weights, 2 to 8 bits, under 16-bit activations."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.key import LinearKey


class WNA16Backend(StrEnum):
    """Backends of weight-only integer layers."""

    TORCH_INT4PACK = "torch_int4pack"
    TORCH_INT8PACK = "torch_int8pack"
    CPU = "cpu"
    TRITON = "triton"
    HUMMING = "humming"
    MARLIN = "marlin"
    MACHETE = "machete"
    XPU = "xpu"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    return key.weight.element.is_integer and key.activation is None


FAMILY = Family(
    "int_wna16",
    WNA16Backend,
    _covers,
    {
        "cuda": (WNA16Backend.TRITON, WNA16Backend.HUMMING),
        "cpu": (WNA16Backend.CPU, WNA16Backend.TORCH_INT4PACK, WNA16Backend.TORCH_INT8PACK),
    },
)
