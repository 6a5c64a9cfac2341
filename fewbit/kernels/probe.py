"""What this machine is: the one file that asks, for hardware and for optional packages.

Everything else takes a `Hardware` and never looks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fewbit.errors import KernelError
from fewbit.kernels import native
from fewbit.kernels.cuda import compiler
from fewbit.kernels.linear.torch_onednn_int8 import ZERO, multiply, pack
from fewbit.spec.hardware import CPU_EXTENSION, DEVICES, Hardware

OPTIONAL_PACKAGES = (
    "triton",
    "compressed-tensors",
    "gguf",
    "humming-kernels",
    "flashinfer-python",
    "cuda-core",
    "vllm",
)


@cache
def installed() -> dict[str, str]:
    """Package -> version of torch, of the optional packages that are installed and of the compiled CPU kernels.

    cuda-core is left out where it finds no NVRTC: kernels that it compiles are refused then, not begun.
    """
    found = {"torch": str(torch.__version__)}
    for package in OPTIONAL_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if compiler.PACKAGE in found and not _finds_nvrtc():
        del found[compiler.PACKAGE]  # what it is for here
    if not missing():
        found[CPU_EXTENSION] = str(native.VERSION)
    return found


def _finds_nvrtc() -> bool:
    try:
        compiler.nvrtc_version()
    except (ImportError, KernelError):
        return False
    return True


def missing() -> dict[str, str]:
    """What a complete installation would have here and this one lacks -> why."""
    found = native.extension()
    return {CPU_EXTENSION: found.reason} if isinstance(found, native.Absent) else {}


@cache
def this_machine(device: str = "auto") -> Hardware:
    """The hardware of a torch device.

    Args:
        device: `auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, `xpu`.
    """
    kind = torch.device(default_device() if device == "auto" else device).type
    if kind == "cuda":
        return replace(_gpu(device), software=installed())
    if kind == "xpu":
        return replace(DEVICES["xpu"], software=installed())
    return replace(_cpu(), software=installed())


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; it comes with GPU builds of torch."""
    return importlib.util.find_spec("triton") is not None


@cache
def interprets_triton() -> bool:
    """Whether Triton runs its programs in Python on the CPU, as its users ask of it to debug or test them."""
    if not has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def device_name(device: torch.device) -> str:
    """What the maker calls a device, `NVIDIA H200` say: the key of measured tables."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def default_device() -> str:
    """`cuda` or `xpu` where there is one, else `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else "cpu"


def _gpu(device: str) -> Hardware:
    index = torch.device("cuda" if device == "auto" else device).index or 0
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return DEVICES.get(name, Hardware(name, "rocm", features=frozenset({"bf16"})))
    name = f"sm{properties.major}{properties.minor}"
    capability = properties.major * 10 + properties.minor
    known = DEVICES.get(name) or _like(name, capability)
    return replace(known, model=device_name(torch.device("cuda", index)), driver=_driver())


def _driver() -> str:
    """Version of the NVIDIA driver as its kernel module reports it, or an empty text."""
    reported = Path("/sys/module/nvidia/version")
    return reported.read_text(encoding="ascii").strip() if reported.is_file() else ""


def _like(name: str, capability: int) -> Hardware:
    """An unlisted CUDA device has what the closest listed one below it has."""
    below = [device for device in DEVICES.values() if device.platform == "cuda" and device.capability <= capability]
    nearest = max(below, key=lambda device: device.capability, default=DEVICES["sm75"])
    return replace(nearest, name=name, capability=capability, bandwidth_gbs=0.0, bf16_tflops=0.0)


def _cpu() -> Hardware:
    aten = torch.backends.cpu.get_cpu_capability()
    reported = cpu_capabilities(aten)
    # Only a CPU that claims dot products of bytes is asked to prove it, which takes some milliseconds.
    claims = any(reported.get(name) for name in _BYTE_DOT_PRODUCTS)
    features = cpu_features(reported, aten, claims and onednn_is_exact())
    name = cpu_name(features)
    known = DEVICES.get(name, Hardware(name, "cpu"))
    return replace(known, features=features)


_BYTE_DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
_VECTOR_512 = ("AVX512", "AMX")  # names that start the ATen capabilities from AVX-512 on
_ARM = ("NEON", "ASIMD", "SVE")


def cpu_capabilities(aten: str) -> Mapping[str, Any]:
    """Instruction sets of this CPU by torch's names; where torch does not list them, what its own choice implies.

    Args:
        aten: the instruction set that torch's kernels use, `AVX2` say.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    wide = aten.startswith(_VECTOR_512)
    # The claim to byte dot products is tried out by whoever reads it.
    return {"avx2": wide or aten == "AVX2", "avx512_f": wide, "avx_vnni": wide or aten == "AVX2"}


def cpu_features(reported: Mapping[str, Any], aten: str, exact: bool) -> frozenset[str]:
    """Features in the words of `Hardware.features`.

    Args:
        reported: instruction sets of the CPU, by torch's names.
        aten: the instruction set that torch's kernels use, which a user may have lowered below the CPU's own.
        exact: whether oneDNN multiplies bytes without saturating.
    """
    wide = aten.startswith(_VECTOR_512)
    found = {
        "avx2": bool(reported.get("avx2")) and (wide or aten == "AVX2"),
        "avx512": bool(reported.get("avx512_f")) and wide,
        "vnni": exact and bool(reported.get("avx512_vnni") or reported.get("avx_vnni")),
        "avx512_bf16": bool(reported.get("avx512_bf16")) and wide,
        "amx": exact and bool(reported.get("amx_tile") and reported.get("amx_int8")),
        "neon": aten.startswith(_ARM) or bool(reported.get("neon")),
        "i8mm": bool(reported.get("i8mm")),
    }
    found["bf16"] = found["avx512_bf16"] or (found["neon"] and bool(reported.get("bf16")))
    found["int8"] = found["vnni"] or found["amx"] or found["i8mm"]
    return frozenset(name for name, present in found.items() if present)


def cpu_name(features: frozenset[str]) -> str:
    """The name in `DEVICES` of the CPU closest to one of these features, or `cpu`."""
    if "amx" in features:
        return "x86-amx"
    if "avx512" in features:
        return "x86-avx512-vnni" if "vnni" in features else "x86-avx512"
    if "avx2" in features:
        return "x86-avx2-vnni" if "vnni" in features else "x86-avx2"
    if "neon" in features:
        return "arm-i8mm" if "i8mm" in features else "arm"
    return "cpu"


def onednn_is_exact() -> bool:
    """Whether oneDNN multiplies uint8 by int8 without saturating.

    Tried out rather than read from a flag, because oneDNN can be told to use less than the CPU has.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    rows, columns, outputs = 2, 8, 16
    codes = torch.full((rows, columns), 255, dtype=torch.uint8)
    weight = pack(torch.full((outputs, columns), 127, dtype=torch.int8))
    return bool((multiply(codes, weight, torch.ones(outputs)) == (255 - ZERO) * 127 * columns).all())
