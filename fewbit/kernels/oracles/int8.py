"""Oracle of integer weights under integer activations: INT8 W8A8, W4A8 under INT8 or FP8 activations."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from fewbit.kernels.oracles.family import Family
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey

if TYPE_CHECKING:
    from fewbit.kernels.moe.interface import MoeRequest
    from fewbit.kernels.select import Preference


class Int8MoeBackend(StrEnum):
    """Backends of INT8 experts."""

    CPU = "cpu"
    REFERENCE = "reference"


class Int8Backend(StrEnum):
    """Backends of INT8 layers."""

    ONEDNN = "onednn"
    TORCH_INT8PACK = "torch_int8pack"
    TORCH_INT4PACK = "torch_int4pack"
    CPU = "cpu"
    CUDA = "cuda"
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


# CPU goes before ONEDNN, because the compiled step cannot call oneDNN. On a Xeon with AMX and two threads it is also
# 1.5 to 2.1 times as fast for one token, while oneDNN is 1.2 to 2.3 times as fast for 16 and 128.
# INT4PACK only ever drops the activation key. It goes before INT8PACK, whose weight-only kernel reads twice the bytes.
FAMILY = Family(
    "int8",
    Int8Backend,
    _covers,
    {
        "cuda": (Int8Backend.CUDA, Int8Backend.TRITON, Int8Backend.CUTLASS, Int8Backend.HUMMING, Int8Backend.MARLIN),
        "rocm": (Int8Backend.AITER,),
        "xpu": (Int8Backend.XPU,),
        "cpu": (Int8Backend.CPU, Int8Backend.ONEDNN, Int8Backend.TORCH_INT4PACK, Int8Backend.TORCH_INT8PACK),
    },
)

MOE_FAMILY = Family("int8_moe", Int8MoeBackend, _covers, {"cpu": (Int8MoeBackend.CPU,)})


def select_int8_moe_backend(
    request: MoeRequest, hardware: Hardware, preference: Preference | None = None
) -> Int8MoeBackend:
    """The backend that runs INT8 experts on a device.

    Raises:
        KernelError: see `select.choose`.
    """
    from fewbit.kernels.registry import moe_kernels
    from fewbit.kernels.select import Preference, choose

    chosen = choose(request, hardware, moe_kernels().values(), MOE_FAMILY, preference or Preference())
    return Int8MoeBackend(chosen.kernel.backend)
