"""What this machine is: the one file that asks, for hardware and for optional packages.

Everything else takes a `Hardware` and never looks.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from functools import cache

import torch

from fewbit.spec.hardware import DEVICES, Hardware

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
    """Package -> version of torch and of the optional packages that are installed."""
    found = {"torch": torch.__version__}
    for package in OPTIONAL_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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
    return DEVICES.get(name) or _like(name, capability)


def _like(name: str, capability: int) -> Hardware:
    """An unlisted CUDA device has what the closest listed one below it has."""
    below = [device for device in DEVICES.values() if device.platform == "cuda" and device.capability <= capability]
    nearest = max(below, key=lambda device: device.capability, default=DEVICES["sm75"])
    return replace(nearest, name=name, capability=capability, bandwidth_gbs=0.0, bf16_tflops=0.0)


def _cpu() -> Hardware:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512") or capability == "AMX":
        if torch.cpu._is_amx_tile_supported():
            return DEVICES["x86-amx"]
        return DEVICES["x86-avx512-vnni" if torch.cpu._is_vnni_supported() else "x86-avx512"]
    if capability == "AVX2":
        return DEVICES["x86-avx2"]
    if capability in ("NEON", "SVE", "SVE256", "SVE128"):
        return DEVICES["arm"]
    return Hardware("cpu", "cpu")
