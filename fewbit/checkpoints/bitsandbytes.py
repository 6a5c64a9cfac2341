"""bitsandbytes: NF4 and FP4 with absolute maxima that may be quantized again, and LLM.int8()'s weights.

    4 bits   weight [ceil(N*K/2), 1], any dtype whose bytes these are; row-major pairs, the even code in the high bits
             weight.quant_map f32 [16], the codebook; weight.absmax f32 [blocks], or its codes, uint8, where nested:
             weight.nested_absmax f32 [blocks / 256], weight.nested_quant_map f32 [256]
             weight.quant_state.bitsandbytes__nf4 (or __fp4): uint8 JSON with block size, shape and nested_offset
    8 bits   weight int8 [N, K]; SCB f32 [N], the rows' absolute maxima; weight_format 0 (by rows)

NF4 and FP4 are codes into a codebook, so that their element is uint4 under either name; FP4 is not E2M1. Blocks of 64
run across row ends where K asks for it, see `flat_blocks`. Eight-bit scales are SCB under a common 1/127, which keeps
SCB exact; int8 activations with their outlier rule are a choice of the run time and no part of the key.

Sources: bitsandbytes 0.50.2 (`functional.py`, `nn/modules.py`), transformers 5.24 (`integrations/bitsandbytes.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.bitsandbytes_state import STATE, QuantState, book_of, read_nested, write_nested
from fewbit.checkpoints.config_values import names_under
from fewbit.checkpoints.dtypes import FLOATS, nbytes
from fewbit.checkpoints.files import CheckpointFiles
from fewbit.checkpoints.flat_blocks import collect_blocks, group_of_blocks, spread_blocks
from fewbit.checkpoints.fp8 import matches_transformers
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import misfit, require_finite, tensors_by_role
from fewbit.errors import CheckpointError, OutputError
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import pack_record
from fewbit.spec.element import ELEMENTS, F32, Element
from fewbit.spec.granularity import group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import COLUMNS, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

_INT8, _ROWS = LinearKey.parse("int8:channel:f32/tensor:f32"), LinearKey.parse("int8:channel:f32")
_INT8_FACTOR = 1.0 / 127.0
_LAYOUT = Layout("big-endian", 4, "K", 8)
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DEFAULT_BLOCK = 64
_BELOW_WEIGHT = re.compile(
    rf"(.*)\.(weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|{re.escape(STATE)}\w+))"
)
_COMPANIONS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB")


@dataclass(frozen=True)
class _LayerScheme(Scheme):
    """A scheme with the shapes that the layers' states tell."""

    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class BitsAndBytes(CheckpointFormat):
    """See the head of this file."""

    name: ClassVar[str] = "bitsandbytes"
    quant_methods: ClassVar[tuple[str, ...]] = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
    matcher: ClassVar[Matcher] = staticmethod(matches_transformers)
    scale_element: ClassVar[Element | None] = F32
    zero_scales: ClassVar[bool] = True  # what is stored is the largest magnitude of a block

    def split(self, name: str) -> tuple[str, str]:
        below = _BELOW_WEIGHT.fullmatch(name)
        return (below[1], below[2]) if below else super().split(name)

    def completed(self, config: Mapping[str, Any] | None, files: CheckpointFiles) -> Mapping[str, Any] | None:
        if config is None:
            return None
        states = (name for name in files.headers if f".weight.{STATE}" in name)
        shapes = {self.split(name)[0]: list(QuantState.of(files.load(name), name).shape) for name in states}
        return {**config, "shapes": shapes}

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        eight = config.get("load_in_8bit") or config.get("_load_in_8bit")
        four = config.get("load_in_4bit") or config.get("_load_in_4bit")
        if bool(eight) == bool(four):
            raise CheckpointError(
                f"load_in_8bit is {eight!r} and load_in_4bit is {four!r}, needed one of the two.", "Mend config.json."
            )
        # The library leaves the head out by itself.
        ignore = names_under(config, "llm_int8_skip_modules", default=["lm_head"])
        shapes = {module: (shape[0], shape[1]) for module, shape in config.get("shapes", {}).items()}
        key = _INT8 if eight else _key(_DEFAULT_BLOCK)
        return _LayerScheme(self.name, (Rule(("Linear",), key),), tuple(ignore), shapes=shapes)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        eight = {key == _INT8 for key in layers.values()}
        if len(eight) != 1:
            raise OutputError("bitsandbytes stores a model in 4 or in 8 bits, not both.", "Choose another format.")
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": eight == {True},
            "load_in_4bit": eight == {False},
            "bnb_4bit_quant_type": "nf4",  # a wish for quantizing; readers take a stored layer's type from its state
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": list(plain) or None,
        }

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        weight = headers.get("weight")
        held = [name for name in _COMPANIONS if name in headers]
        if weight is None or (not held and weight.dtype in FLOATS):
            if held:
                raise CheckpointError(
                    f"{module} stores {', '.join(held)}, but it has no weight.", "Get the whole file."
                )
            return None
        if "SCB" in headers or (weight.dtype == "I8" and not held):
            stored = StoredLayer(_INT8, "int8")
        elif "weight.absmax" in headers:
            known = scheme.shapes.get(module) if isinstance(scheme, _LayerScheme) else None
            stored = _described(module, headers, shape or known)
            headers = {**headers, "weight": TensorHeader("U8", (nbytes(weight), 1))}  # whatever dtype holds the bytes
        else:
            raise CheckpointError(
                f"{module} stores {weight.dtype} codes, but weight.absmax is missing.", "Get it again."
            )
        reason = misfit(self.specs(stored), headers, shape) if stored.shape or stored.key == _INT8 else None
        if reason:
            raise CheckpointError(f"{module} should be {stored.variant}, but {reason}.", "The file is damaged.")
        return stored

    def specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        if stored.key == _INT8:
            return (
                TensorSpec("codes", "weight", (ROWS, COLUMNS), "int8"),
                TensorSpec("scale", "SCB", (ROWS,), "float32"),
                TensorSpec("format", "weight_format", (), "uint8", optional=True),
            )
        kind, block, nested = _parts(stored)
        # A piece of whole rows has whole blocks where the rows it keeps have; pieces of rows are scattered.
        columns = stored.shape[-1] if stored.shape else block

        def along(*name: str, divisor: int, dtype: str | None) -> TensorSpec:
            extents = (Extent("N", columns, divisor), *((Extent(),) if name[0] == "codes" else ()))
            return TensorSpec(name[0], name[1], extents, dtype, uncut=("K",))

        specs = [
            along("codes", "weight", divisor=2, dtype="uint8"),
            along("scale", "weight.absmax", divisor=block, dtype="uint8" if nested else "float32"),
            TensorSpec("codebook", "weight.quant_map", (Extent(None, 16),), "float32"),
            TensorSpec("state", f"weight.{STATE}{kind}", None, "uint8"),
        ]
        if nested:
            specs.append(along("nested scale", "weight.nested_absmax", divisor=block * 256, dtype="float32"))
            specs.append(TensorSpec("nested codebook", "weight.nested_quant_map", (Extent(None, 256),), "float32"))
        return tuple(specs)

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        rows, columns = shape
        if stored.key == _INT8:
            return _read_int8(self.specs(stored), tensors, shape)
        stored = replace(stored, shape=shape)
        weight = tensors.get("weight")
        if weight is not None and weight.dtype is not torch.uint8:  # quant_storage: the same bytes, another dtype
            tensors = {**tensors, "weight": weight.contiguous().view(torch.uint8).reshape(-1, 1)}
        found = tensors_by_role(self.specs(stored), tensors, shape)
        kind, block, nested = _parts(stored)
        state = QuantState.of(found["state"], "the layer's quantization state")
        state.require(kind, block, nested, (rows, columns))
        scale: Tensor | QuantizedTensor
        if nested:
            require_finite("weight.nested_absmax", found["nested scale"])
            scale = read_nested(found, (rows, columns), block, state)
        else:
            require_finite("weight.absmax", found["scale"])
            scale = spread_blocks(found["scale"], (rows, columns), block)
        roles = {"codes": found["codes"].reshape(-1), "scale": scale, "codebook": found["codebook"]}
        return QuantizedTensor(_key(group_of_blocks(columns, block)).weight, shape, roles, _LAYOUT)

    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        rows, columns = record.shape
        reason = self.refuse(key, (rows, columns))
        if reason:
            raise OutputError(f"{reason}.", "Choose another format.")
        allowed = {"codes", "scale", "global_scale" if key == _INT8 else "codebook"}
        for role in record.tensors.keys() - allowed:
            raise OutputError(f"{self.name} has no place for the {role} of {key}.", "Choose another format.")
        if key == _INT8:
            return _write_int8(record)
        kind, block = book_of(record), key.weight.granularity.columns
        scale = record.tensors["scale"]
        codes = pack_record(record, _LAYOUT)["codes"] if record.layout != _LAYOUT else record["codes"]
        written = {"weight": codes.reshape(-1, 1), "weight.quant_map": record["codebook"]}
        state = QuantState(kind, block, (rows, columns))
        if isinstance(scale, QuantizedTensor):
            tensors, offset = write_nested(scale, (rows, columns), block)
            written |= tensors
            state = replace(state, nested_offset=offset)
        else:
            written["weight.absmax"] = collect_blocks(scale, (rows, columns), block)
        return {**written, f"weight.{STATE}{kind}": state.tensor()}

    def own_key(self, key: LinearKey) -> LinearKey:
        """One scale a row is stored as a maximum, a 127th of which is the scale."""
        return _INT8 if key == _ROWS else key

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        if key == _INT8:
            return None
        weight = key.weight
        block = weight.granularity.columns
        if key != _key(max(block, 1)) or block not in _BLOCK_SIZES:
            sizes = ", ".join(map(str, _BLOCK_SIZES))
            return f"bitsandbytes holds {_INT8}, and uint4 codes into a codebook in groups of {sizes}, found {key}"
        if shape[1] % block:
            return f"blocks of {block} weights do not divide K={shape[1]}"
        return None


def _key(size: int) -> LinearKey:
    return LinearKey(QuantKey(ELEMENTS["uint4"], ScaleSpec(F32, group(size))))


def _described(module: str, headers: Mapping[str, TensorHeader], shape: tuple[int, int] | None) -> StoredLayer:
    """A 4-bit layer: everything but the shape follows from the sizes of its tensors."""
    kinds = [name.removeprefix(f"weight.{STATE}") for name in headers if name.startswith(f"weight.{STATE}")]
    if len(kinds) != 1:
        raise CheckpointError(
            f"{module} has {len(kinds)} quantization states, needed one (weight.{STATE}nf4 or fp4 is missing).",
            "Save the model again with bitsandbytes 0.41 or later.",
        )
    codes, absmax = 2 * nbytes(headers["weight"]), headers["weight.absmax"]
    if shape is not None and -(-prod(shape) // 2) * 2 != codes:
        raise CheckpointError(
            f"{module}: weight has {codes} codes, needed {prod(shape)} for {list(shape)}.",
            "The model's config.json belongs to another checkpoint, or the file is damaged.",
        )
    least = -(-(prod(shape) if shape else codes) // max(1, prod(absmax.shape)))
    block = 1 << (least - 1).bit_length()  # block sizes are powers of two
    size = group_of_blocks(shape[1], block) if shape else block
    nested = " nested" if absmax.dtype == "U8" else ""
    return StoredLayer(_key(size), f"{kinds[0]} block{block}{nested}", shape or ())


def _parts(stored: StoredLayer) -> tuple[str, int, bool]:
    """(nf4 or fp4, block size, whether the scales are quantized) of a 4-bit variant."""
    kind, block, *nested = stored.variant.split(" ")
    return kind, int(block.removeprefix("block")), bool(nested)


def _read_int8(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
    found = tensors_by_role(specs, tensors, shape)
    if "format" in found and int(found["format"]) != 0:
        raise CheckpointError(
            f"weight_format is {int(found['format'])}, needed 0 (rows).", "Save the model again with bitsandbytes 0.45."
        )
    require_finite("SCB", found["scale"])
    factor = torch.full((1, 1), _INT8_FACTOR, dtype=torch.float64)
    roles = {"codes": found["codes"], "scale": found["scale"].reshape(-1, 1), "global_scale": factor}
    return QuantizedTensor(_INT8.weight, shape, roles)


def _write_int8(record: QuantizedTensor) -> dict[str, Tensor]:
    """Row maxima are 127 times a scale; those of another common factor are rounded to it."""
    factor, maxima = record["global_scale"].item(), record["scale"]
    # A format that stores the factor as float32 has rounded it once.
    if abs(factor - _INT8_FACTOR) > 2.0**-24 * _INT8_FACTOR:
        maxima = (maxima.double() * (factor / _INT8_FACTOR)).float()
    return {
        "weight": record["codes"],
        "SCB": maxima.reshape(-1),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
