"""GGUF as a checkpoint format: one tensor of blocks for each layer, and the hub record that it stands for.

A layer's weight is the tensor `weight_q4_k` (or any other block type, in lower case), uint8 [N, K / elements, bytes].
Plain floats are `weight`, as everywhere.

The hub record is in the plain layout, since a block's codes do not lie by themselves: they share a run of bytes with
the scales that belong to them, so that reading a layer takes the run apart in any case. Where groups have scales of
their own below the block's (K-quants), `scale` and `minimum` are themselves records, whose scales are the block's.
Unsigned codes stay unsigned: their minimum is a float, so there is no zero point that a shift would have to follow.

Dequantizing gives gguf-py's float32 bit for bit, with one exception: MXFP4's code 8 is the -0.0 of E2M1, where gguf-py
has 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.config_values import strings
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import misfit, require_finite, tensors_by_role
from fewbit.errors import CheckpointError, OutputError, closest
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor, decode
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import F16, Element
from fewbit.spec.granularity import group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import ROWS, Extent, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Rule, Scheme
from fewbit_gguf.blocks import BLOCK_TYPES, BlockType, Field, put_floats

if TYPE_CHECKING:
    from torch import Tensor

QUANT_METHOD = "gguf"
_HELD = (
    "it holds integers of 4, 5 and 8 bits in groups of 32 under float16 scales, MXFP4, and the blocks of llama.cpp's "
    "own quantizers"
)


def tensor_name(block_type: str) -> str:
    """Name, below the layer's, of a weight in blocks of that type."""
    return f"weight_{block_type.lower()}"


def matches_exactly(pattern: str, name: str, class_name: str = "") -> bool:  # noqa: ARG001 - a `Matcher`
    """Patterns are names of modules: a GGUF file says for each tensor what it is."""
    return pattern == name


class Gguf(CheckpointFormat):
    """See the head of this file."""

    name: ClassVar[str] = "gguf"
    quant_methods: ClassVar[tuple[str, ...]] = (QUANT_METHOD,)
    matcher: ClassVar[Matcher] = staticmethod(matches_exactly)
    in_safetensors: ClassVar[bool] = False
    scale_element: ClassVar[Element | None] = F16
    widens: ClassVar[bool] = True
    zero_scales: ClassVar[bool] = True

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        types = config.get("types")
        if not isinstance(types, dict):
            raise CheckpointError(f"quantization_config has types {types!r}, needed lists of modules by block type.")
        for name in types:
            if name not in BLOCK_TYPES:
                raise CheckpointError(f"Unknown block type {name!r}.", closest(name, BLOCK_TYPES))
        rules = tuple(
            Rule(tuple(strings(modules, f"types of {name}")), BLOCK_TYPES[name].key) for name, modules in types.items()
        )
        return Scheme(self.name, rules, ignore=())

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        types: dict[str, list[str]] = {}
        for module, key in layers.items():
            types.setdefault(_types_of(key)[0].name, []).append(module)
        return {"quant_method": QUANT_METHOD, "types": types}

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        found = [one for one in BLOCK_TYPES.values() if tensor_name(one.name) in headers]
        if not found:
            if "weight" not in headers and scheme.key_for(module, class_name, type(self).matcher):
                raise CheckpointError(f"{module} is said to be quantized, but has no weight.", "The file is damaged.")
            return None
        if len(found) > 1 or "weight" in headers:
            raise CheckpointError(f"{module} has several weights: {', '.join(sorted(headers))}.", "Keep one.")
        stored = StoredLayer(found[0].key, found[0].name)
        reason = misfit(self.specs(stored), headers, shape)
        if reason:
            raise CheckpointError(f"{module}: {reason}.", "The file is damaged, or belongs to another model.")
        return stored

    def specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        one = BLOCK_TYPES[stored.variant]
        shape = (ROWS, Extent("K", 1, one.elements), Extent(None, one.nbytes))
        return (TensorSpec("codes", tensor_name(one.name), shape, "uint8"),)

    def roles(self, stored: StoredLayer) -> frozenset[str]:
        return BLOCK_TYPES[stored.variant].roles

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        one = BLOCK_TYPES[stored.variant]
        blocks = tensors_by_role(self.specs(stored), tensors, shape)["codes"]
        scale = one.floats(blocks, one.scale, one.scale_element)
        require_finite(tensor_name(one.name), decode(scale, one.scale_element))
        hub: dict[str, Tensor | QuantizedTensor] = {
            "codes": one.codes.unpack(blocks).flatten(1),
            "scale": _scaled(one.scale_codes, blocks, scale),
        }
        if one.minimum is not None:
            minimum = one.floats(blocks, one.minimum)
            require_finite(tensor_name(one.name), minimum)
            # Minima of groups are subtracted on disk; the hub adds.
            hub["minimum"] = _scaled(one.minimum_codes, blocks, -minimum if one.minimum_codes else minimum)
        if one.codebook:
            hub["codebook"] = torch.tensor(one.codebook, dtype=torch.int8, device=blocks.device)
        return QuantizedTensor(stored.key.weight, shape, hub)

    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        reason = self.refuse(key, (record.shape[0], record.shape[1]))
        if reason:
            raise OutputError(f"{reason}.", "Choose another format.")
        one = _type_for(record, key)
        plain = unpack_record(record)
        blocks = torch.zeros(
            (record.shape[0], record.shape[1] // one.elements, one.nbytes),
            dtype=torch.uint8,
            device=plain["codes"].device,
        )
        one.codes.pack(plain["codes"].reshape(record.shape[0], -1, one.elements), blocks)
        put_floats(blocks, one.scale, _unscaled(one.scale_codes, plain.tensors["scale"], blocks))
        if one.minimum is not None:
            minimum = _unscaled(one.minimum_codes, plain.tensors["minimum"], blocks)
            put_floats(blocks, one.minimum, -minimum if one.minimum_codes else minimum)
        return {tensor_name(one.name): blocks}

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        types = _types_of(key) if key.activation is None else []
        if not types:
            return f"gguf holds no {key}; {_HELD}"
        if shape[1] % types[0].elements:
            return f"blocks of {types[0].elements} numbers do not divide K={shape[1]}"
        return None


def _types_of(key: LinearKey) -> list[BlockType]:
    return [one for one in BLOCK_TYPES.values() if one.key == replace(key, activation=None)]


def _type_for(record: QuantizedTensor, key: LinearKey) -> BlockType:
    """The block type whose roles are the record's."""
    types = _types_of(key)
    for one in types:
        same_table = "codebook" not in record or record["codebook"].tolist() == list(one.codebook)
        nested = isinstance(record.tensors["scale"], QuantizedTensor) == (one.scale_codes is not None)
        if record.tensors.keys() == one.roles and same_table and nested:
            return one
    needed = " or ".join(f"{', '.join(sorted(one.roles))} ({one.name})" for one in types)
    raise OutputError(
        f"gguf holds {key} with {needed}, found {', '.join(sorted(record.tensors))}.", "Choose another format."
    )


def _scaled(field: Field | None, blocks: Tensor, scale: Tensor) -> Tensor | QuantizedTensor:
    """A multiplier for each block [N, B], or the record of one for each group of every block."""
    if field is None:
        return scale
    codes = field.unpack(blocks).flatten(1)
    key = QuantKey(field.element, ScaleSpec(F16, group(field.count)))
    return QuantizedTensor(key, tuple(codes.shape), {"codes": codes, "scale": scale})


def _unscaled(field: Field | None, values: Tensor | QuantizedTensor, blocks: Tensor) -> Tensor:
    """The inverse of `_scaled`: writes the groups' codes, returns the blocks' multipliers."""
    if field is None:
        assert isinstance(values, torch.Tensor)
        return values
    assert isinstance(values, QuantizedTensor)
    field.pack(values["codes"].reshape(blocks.shape[0], -1, field.count), blocks)
    return values["scale"]
