"""Oracle of integer weights, 2 to 8 bits, under 16-bit activations."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from fewbit.kernels.oracles.family import Family
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey

if TYPE_CHECKING:
    from fewbit.kernels.moe.interface import MoeRequest
    from fewbit.kernels.select import Preference


class WNA16MoeBackend(StrEnum):
    """Backends of weight-only integer experts."""

    CPU = "cpu"
    REFERENCE = "reference"


class WNA16Backend(StrEnum):
    """Backends of weight-only integer layers."""

    TORCH_INT4PACK = "torch_int4pack"
    TORCH_INT8PACK = "torch_int8pack"
    CPU = "cpu"
    CUDA = "cuda"
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
        "cuda": (
            WNA16Backend.TRITON,
            WNA16Backend.CUDA,
            WNA16Backend.MACHETE,
            WNA16Backend.HUMMING,
            WNA16Backend.MARLIN,
        ),
        "xpu": (WNA16Backend.XPU,),
        "cpu": (WNA16Backend.CPU, WNA16Backend.TORCH_INT4PACK, WNA16Backend.TORCH_INT8PACK),
    },
)

MOE_FAMILY = Family("int_wna16_moe", WNA16MoeBackend, _covers, {"cpu": (WNA16MoeBackend.CPU,)})


def select_wna16_moe_backend(
    request: MoeRequest, hardware: Hardware, preference: Preference | None = None
) -> WNA16MoeBackend:
    """The backend that runs weight-only integer experts on a device.

    Raises:
        KernelError: see `select.choose`.
    """
    from fewbit.kernels.registry import moe_kernels
    from fewbit.kernels.select import Preference, choose

    chosen = choose(request, hardware, moe_kernels().values(), MOE_FAMILY, preference or Preference())
    return WNA16MoeBackend(chosen.kernel.backend)
