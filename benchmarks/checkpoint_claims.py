"""Whether a quantized checkpoint is what somebody says it is: its layers, their bits, what calibrated it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fewbit.methods.linear import QuantizedLinear
from fewbit.models.inspect import inspect_checkpoint

LOOKED_AT = 64
"""Rows of each layer whose distinct values are counted."""


@dataclass(frozen=True)
class Claim:
    """Integers of `bits` in groups of `group_size` in every linear layer but the head."""

    bits: int
    group_size: int
    symmetric: bool


def contradictions(claim: Claim, model: nn.Module, plain: nn.Module) -> list[str]:
    """How a loaded checkpoint differs from a claim: layers, key, distinct values in a group.

    The values are counted apart from what the files say of themselves: a group of b bits has at most 2**b of them.

    Args:
        claim: what is claimed.
        model: the checkpoint as `load` gives it, with kernels that dequantize exactly.
        plain: the unquantized model.
    """
    wanted = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    wrong = [f"{name} is not quantized" for name in sorted(wanted - set(found))]
    wrong += [f"{name} is quantized" for name in sorted(set(found) - wanted)]
    device = next(model.parameters()).device
    for name, layer in found.items():
        weight = layer.key.weight
        if Claim(weight.element.bits, weight.granularity.columns, weight.symmetric) != claim:
            wrong.append(f"{name} is {weight}")
        weights = layer(torch.eye(layer.in_features, device=device)).T[:LOOKED_AT]
        ordered = weights.unflatten(1, (-1, claim.group_size)).sort(-1).values
        values = 1 + int((ordered.diff(dim=-1) != 0).sum(-1).max())
        if values > 2**claim.bits:
            wrong.append(f"{name} has {values} values in a group")
    return wrong


def bits_of(folder: Path) -> dict[str, float]:
    """Bits per weight of the quantized layers: by their keys (scales and zero points counted), and by their bytes."""
    layers = [layer for layer in inspect_checkpoint(folder).layers if layer.key]
    numbers = [layer.shape[0] * layer.shape[1] for layer in layers]
    by_key = [layer.key.weight.bits_per_weight(layer.shape) for layer in layers if layer.key]
    total = sum(numbers)
    return {
        "bits_per_weight": sum(count * bits for count, bits in zip(numbers, by_key, strict=True)) / total,
        "stored_bits_per_weight": 8 * sum(layer.bytes for layer in layers) / total,
    }


def calibrated_alike(folder: Path, windows: torch.Tensor) -> bool:
    """Whether a checkpoint of fewbit's, which reads the text by itself, was calibrated on these windows."""
    recipe = json.loads((folder / "fewbit_recipe.json").read_text(encoding="utf-8"))
    return bool(recipe["calibration"]["sha256"] == hashlib.sha256(windows.numpy().tobytes()).hexdigest())
