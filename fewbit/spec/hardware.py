"""Hardware: what a device can do, as data, so that "what would run on that chip?" is answered anywhere.

Peak rates are dense and from vendors' data sheets; bandwidth is the data sheet's too, except where a comment says that
it was measured. They serve estimates that are printed and never decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fewbit.errors import SchemeError, closest

CPU_EXTENSION = "fewbit-cpu"
"""What the compiled CPU kernels are called among a device's software."""

Platform = Literal["cuda", "rocm", "xpu", "cpu"]


@dataclass(frozen=True)
class Hardware:
    """One device and the software on it.

    Attributes:
        name: `sm90`, `gfx942`, `xpu`, `x86-avx512`, ...
        platform: which family of kernels applies.
        capability: compute capability times ten on CUDA (90 is 9.0), the number in the gfx name on ROCm, 0 elsewhere.
        features: arithmetic the device has: `bf16`, `int8`, `fp8`, `fp8_fnuz`, `fp4`, `mx`, `avx2`, `avx512`, `vnni`,
            `avx512_bf16`, `amx`, `neon`, `i8mm`.
        bandwidth_gbs: memory bandwidth in 10**9 bytes a second, 0 where it varies by machine.
        bf16_tflops: dense bf16 matrix rate in 10**12 operations a second, 0 where it varies.
        software: package -> version of what is installed or assumed.
        model: what the maker calls it, `NVIDIA H200` say: the key of measured costs. Empty where none is meant.
        driver: version of its driver, empty where none is meant.
    """

    name: str
    platform: Platform
    capability: int = 0
    features: frozenset[str] = frozenset()
    bandwidth_gbs: float = 0.0
    bf16_tflops: float = 0.0
    software: Mapping[str, str] = field(default_factory=dict, hash=False)
    model: str = ""
    driver: str = ""

    def has(self, *features: str) -> bool:
        """Whether the device has all of `features`."""
        return self.features.issuperset(features)

    def with_software(self, *packages: str) -> Hardware:
        """The same device with more packages assumed to be installed."""
        return replace(self, software={**self.software, **dict.fromkeys(packages, "assumed")})


def _cuda(
    capability: int, features: str, bandwidth_gbs: float = 0.0, bf16_tflops: float = 0.0, model: str = ""
) -> Hardware:
    return Hardware(
        f"sm{capability}",
        "cuda",
        capability,
        frozenset(features.split()),
        bandwidth_gbs,
        bf16_tflops,
        {"torch": "2.11", "triton": "3.6"},  # torch's CUDA builds bring Triton
        model,
    )


def _rocm(capability: int, name: str, features: str, bandwidth_gbs: float, bf16_tflops: float) -> Hardware:
    return Hardware(
        name, "rocm", capability, frozenset(features.split()), bandwidth_gbs, bf16_tflops, {"torch": "2.11"}
    )


def _cpu(name: str, features: str) -> Hardware:
    compiled = {CPU_EXTENSION: "assumed"} if name.startswith("x86") else {}
    return Hardware(name, "cpu", features=frozenset(features.split()), software={"torch": "2.11", **compiled})


_AVX512 = "avx2 avx512"
_VNNI = f"{_AVX512} vnni avx512_bf16 bf16 int8"

DEVICES: dict[str, Hardware] = {
    device.name: device
    for device in (
        _cuda(75, "int8", 320, 65),  # T4; its 65 TFLOPS are fp16, Turing has no bf16
        _cuda(80, "bf16 int8", 2039, 312),  # A100 80 GB
        _cuda(86, "bf16 int8", 600, 125),  # A10
        _cuda(89, "bf16 int8 fp8", 864, 362),  # L40S
        _cuda(90, "bf16 int8 fp8", 4800, 989, "NVIDIA H200"),
        _cuda(100, "bf16 int8 fp8 mx fp4", 8000, 2250),  # B200
        _cuda(103, "bf16 fp8 mx fp4", 8000, 2500),  # B300; no int8 matrix path
        _cuda(120, "bf16 int8 fp8 mx fp4", 1792, 209),  # RTX 5090
        _cuda(121, "bf16 int8 fp8 mx fp4", 273, 62),  # GB10
        _rocm(90, "gfx90a", "bf16 int8", 3277, 383),  # MI250X
        _rocm(942, "gfx942", "bf16 int8 fp8_fnuz", 5300, 1307),  # MI300X
        _rocm(950, "gfx950", "bf16 int8 fp8 mx fp4", 8000, 2500),  # MI355X
        Hardware("xpu", "xpu", features=frozenset({"bf16", "int8"}), software={"torch": "2.11"}),
        _cpu("x86-avx2", "avx2"),
        _cpu("x86-avx2-vnni", "avx2 vnni int8"),
        _cpu("x86-avx512", _AVX512),
        _cpu("x86-avx512-vnni", _VNNI),
        _cpu("x86-amx", f"{_VNNI} amx"),
        _cpu("arm", "neon"),
        _cpu("arm-i8mm", "neon i8mm bf16 int8"),
    )
}


def device(name: str) -> Hardware:
    """The known device of that name.

    Raises:
        SchemeError: no device has that name; the closest is suggested.
    """
    found = DEVICES.get(name.strip().lower().replace("sm_", "sm"))
    if found is None:
        raise SchemeError(f"Unknown device {name!r}.", closest(name, DEVICES))
    return found
