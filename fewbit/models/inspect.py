"""What is in a checkpoint, from headers and configuration alone: no weight is read, no model is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from fewbit.checkpoints.dtypes import nbytes
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import largest_shape
from fewbit.models.stored import StoredCheckpoint
from fewbit.spec.key import LinearKey


@dataclass(frozen=True)
class InspectedModule:
    """One module of a checkpoint.

    Attributes:
        name: on disk.
        key: None for a plain module.
        variant: which of the format's variants stores it.
        shape: logical shape of its weight; of its largest tensor for a plain module.
        bytes: of all its tensors.
        dtypes: safetensors dtypes of its tensors.
        roles: roles that its hub record may have; empty for a plain module.
        reason: why it is plain in a quantized checkpoint; empty elsewhere.
    """

    name: str
    key: LinearKey | None
    variant: str
    shape: tuple[int, ...]
    bytes: int
    dtypes: tuple[str, ...]
    roles: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True)
class Inspection:
    """A checkpoint seen from outside.

    Attributes:
        format: its format, `plain` for an unquantized one.
        decided_by: the file and field that said so.
        layers: every module that holds tensors, in natural order.
        oddities: what contradicts the configuration.
        transforms: what weights were multiplied with and activations must be, a sentence each.
    """

    format: str
    decided_by: str
    layers: tuple[InspectedModule, ...]
    oddities: tuple[str, ...]
    transforms: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def quantized_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers if layer.key)


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Looks at a checkpoint's headers.

    Raises:
        CheckpointError: the folder or a header cannot be read, or a scale has no weight to belong to.
    """
    stored = StoredCheckpoint.open(path)
    layers, oddities = [], []
    kinds: dict[Any, tuple[StoredLayer | None, InspectedModule]] = {}
    for module, headers in stored.modules.items():
        described = stored.describe(module)
        kind = (id(described), *headers.items())
        if kind not in kinds:
            kinds[kind] = described, _kind(stored, module, headers, described)  # kept, so that its id stays its own
        says = None
        if stored.scheme is not None and stored.format is not None and "weight" in headers | _as_weight(described):
            says = stored.scheme.key_for(module, "Linear", stored.format.matcher)
            if described is not None and says is None:
                oddities.append(f"{module} is stored as {described.key}, the configuration leaves it plain")
        layer = replace(kinds[kind][1], name=module)
        if stored.format is not None and described is None:
            layer = replace(layer, reason=_why_plain(layer.shape, says))
        layers.append(layer)
    layers.sort(key=lambda layer: natural_order(layer.name))
    name = stored.format.name if stored.format else "plain"
    decided_by, transforms = stored.decided_by or "no quantization configuration", tuple(map(str, stored.transforms))
    return Inspection(name, decided_by, tuple(layers), tuple(oddities), transforms)


def _why_plain(shape: tuple[int, ...], says: LinearKey | None) -> str:
    """Why a module of a quantized checkpoint is plain, as far as headers and configuration tell."""
    if len(shape) < 2:
        return "no matrix"
    return "left out by the configuration" if says is None else "an embedding, or plain against the configuration"


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sorting key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _as_weight(described: StoredLayer | None) -> dict[str, None]:
    return {"weight": None} if described is not None else {}


def _kind(
    stored: StoredCheckpoint, module: str, headers: dict[str, TensorHeader], described: StoredLayer | None
) -> InspectedModule:
    """What modules with these headers are, under the name of the first of them."""
    held = sum(nbytes(header) for header in headers.values())
    dtypes = tuple(sorted({header.dtype for header in headers.values()}))
    if described is None or stored.format is None:
        largest = max(headers.values(), key=lambda header: prod(header.shape))
        return InspectedModule(module, None, "", largest.shape, held, dtypes)
    present = [spec for spec in stored.format.specs(described) if spec.name in headers]
    shape = described.shape or largest_shape(present, headers)
    roles = stored.format.roles(described)
    return InspectedModule(module, described.key, described.variant, shape, held, dtypes, roles)
