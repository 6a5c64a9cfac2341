"""Oracle of integer weights under integer activations: INT8 W8A8, W4A8 under INT8 or FP8 activations."""

from __future__ import annotations

from enum import StrEnum

from fewbit.kernels.oracles.family import Family
from fewbit.spec.key import LinearKey


class Int8Backend(StrEnum):
    """Backends of INT8 layers."""

    ONEDNN = "onednn"
    TORCH_INT8PACK = "torch_int8pack"
    TORCH_INT4PACK = "torch_int4pack"
    CPU = "cpu"
    TRITON = "triton"
    HUMMING = "humming"
    CUTLASS = "cutlass"
    MARLIN = "marlin"
    EMULATION = "emulation"
    AITER = "aiter"
    XPU = "xpu"
    REFERENCE = "reference"


def _covers(key: LinearKey) -> bool:
    return key.weight.element.is_integer and key.activation is not None


# INT4PACK only ever drops the activation key. It goes before INT8PACK, whose weight-only kernel reads twice the bytes.
FAMILY = Family(
    "int8",
    Int8Backend,
    _covers,
    {
        "cuda": (Int8Backend.TRITON, Int8Backend.HUMMING),
        "cpu": (Int8Backend.ONEDNN, Int8Backend.CPU, Int8Backend.TORCH_INT4PACK, Int8Backend.TORCH_INT8PACK),
    },
)
