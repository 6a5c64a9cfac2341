"""What a result depends on, in few words: a run that goes on, or reads what another kept, needs the same."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fewbit
from fewbit.algorithms import native
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.models.quantization.products import has_matrix_units

_DECIDING = ("spec", "numerics", "packing", "checkpoints", "algorithms", "models")
"""Folders whose code decides which numbers come out."""


def fingerprint_of(folder: TensorFolder, device: torch.device) -> dict[str, Any]:
    """Fields of the model, the code and the machine, nested.

    Every byte of the weights is read for it, which takes less than quantizing the first block does.
    """
    digests = folder.digests()
    return {
        "source": {
            "config.json": _sha256((folder.path / "config.json").read_bytes()),
            "tensors": _sha256(*(f"{name} {header}".encode() for name, header in sorted(folder.headers.items()))),
            "weights": _sha256(*(digests[name] for name in sorted(digests))),
        },
        "fewbit": {"version": fewbit.__version__, "code": _code()},
        "torch": torch.__version__,
        "device": _machine(device),
    }


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@cache
def _code() -> str:
    root = Path(__file__).parents[2]
    files = sorted(file for part in _DECIDING for file in (root / part).rglob("*.py"))
    return _sha256(*(file.read_bytes() for file in files))


def _machine(device: torch.device) -> str:
    """What decides the order of sums: the kind of device; on CPUs the instruction set, threads, and compiled loops."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        loops = "compiled loops" if native.takes() else "loops in torch"
        loops += ", bf16 products" if has_matrix_units(device) else ""
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {loops}"
    return device.type
