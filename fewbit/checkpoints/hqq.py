"""HQQ: codes with float zero points, groups along either axis of a reshaped weight.

The weight is flattened and reshaped to [R, g] (axis 1) or [g, C] (axis 0); every row, or every column, is a group.
`W_q` packs its rows (see `fewbit.packing.strided`), `scale` and `zero` are [R, 1] or [1, C], and a weight is
`(code - zero) * scale`. About fifteen small tensors beside them describe the layer; numbers are 0-D, texts are bytes.

    axis 1   groups of a row, or repeated where g does not divide K (`flat_blocks`)
    axis 0   the N/g rows that are N/g apart share the scales of a column; no rectangle of the weight does unless g = N,
             so that each weight gets its own scale here: right, and larger than the file

HQQ's own saver leaves no configuration, so the tensors announce the format; transformers writes one. Quantized scales
and zero points (which HQQ has given up) are refused. Sources: hqq 0.2.8.post1 (`core/quantize.py`, `core/bitpack.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.config_values import names_under
from fewbit.checkpoints.dtypes import FLOATS, SCALE_ELEMENTS, header_of, nbytes
from fewbit.checkpoints.files import CheckpointFiles
from fewbit.checkpoints.flat_blocks import collect_blocks, group_of_blocks, spread_blocks
from fewbit.checkpoints.fp8 import matches_transformers
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype, misfit, require_finite
from fewbit.errors import CheckpointError, OutputError
from fewbit.lazy import torch
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor
from fewbit.packing.registry import packings, unpack_record
from fewbit.packing.strided import FIELDS
from fewbit.spec.element import BF16, ELEMENTS, Element
from fewbit.spec.granularity import Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import Axis, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

_WIDTHS = {1: 8, 2: 8, 3: 32, 4: 8, 8: 8}
"""Stored bits of a code -> bits of a word; HQQ's 5- and 6-bit codes take a byte each."""

_PACKINGS = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 8: "8bit_u8"}
_NOTES = (
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)
_LONGEST_NOTE = 64
_QUANTIZED_SCALES = ("scale_q", "zero_q", "meta_scale", "meta_zero", "zero_scale")


@dataclass(frozen=True)
class _LayerScheme(Scheme):
    """A scheme with what the layers' own notes tell: [N, K] and how W_q is packed."""

    layers: Mapping[str, tuple[tuple[int, int], str]] = field(default_factory=dict)


class Hqq(CheckpointFormat):
    """See the head of this file."""

    name: ClassVar[str] = "hqq"
    quant_methods: ClassVar[tuple[str, ...]] = ("hqq",)
    matcher: ClassVar[Matcher] = staticmethod(matches_transformers)

    def completed(self, config: Mapping[str, Any] | None, files: CheckpointFiles) -> Mapping[str, Any] | None:
        modules = [name.removesuffix(".W_q") for name in files.headers if name.endswith(".W_q")]
        if config is None and not modules:
            return None
        layers = {module: _announced(module, files) for module in modules if f"{module}.shape" in files.headers}
        return {**(config or {"quant_method": self.name}), "layers": layers}

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        layers = config.get("layers", {})
        notes = {module: ((note["shape"][0], note["shape"][1]), note["packing"]) for module, note in layers.items()}
        if "quant_config" not in config:
            found = (Rule((module,), LinearKey.parse(note["key"])) for module, note in layers.items())
            return _LayerScheme(self.name, tuple(found), (), layers=notes)
        # HQQ leaves the head out by itself.
        ignore = names_under(config, "skip_modules", default=["lm_head"])
        params = config.get("quant_config") or {}
        if not isinstance(params, dict):
            raise CheckpointError(f"quant_config is {params!r}, needed an object.", "Mend config.json.")
        by_layer = {"": params} if "weight_quant_params" in params or not params else params
        rules = [Rule((name or "Linear",), _configured(value)) for name, value in by_layer.items()]
        return _LayerScheme(self.name, tuple(rules), tuple(ignore), layers=notes)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        keys = list(dict.fromkeys(layers.values()))
        params = {name: {"weight_quant_params": _params(key)} for name, key in layers.items()}
        return {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": _params(keys[0])} if len(keys) == 1 else params,
            "skip_modules": list(plain),
        }

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        if "W_q" not in headers:
            orphans = sorted({"scale", "zero", *_QUANTIZED_SCALES} & headers.keys())
            if len(orphans) > 1:
                raise CheckpointError(
                    f"{module} stores {', '.join(orphans)}, but W_q is missing.", "Get the whole file."
                )
            return None
        nested = sorted(name for name in headers if name.split(".")[0] in _QUANTIZED_SCALES)
        if nested:
            raise CheckpointError(
                f"{module} has quantized scales or zero points ({', '.join(nested)}), which HQQ no longer writes.",
                "Quantize again.",
            )
        for needed in ("scale", "zero"):
            if needed not in headers or headers[needed].dtype not in FLOATS:
                raise CheckpointError(f"{module}: {needed} is missing or no float.", "Get the whole file.")
        known, packing = scheme.layers.get(module, (None, "")) if isinstance(scheme, _LayerScheme) else (None, "")
        if shape and known and shape != known:
            raise CheckpointError(
                f"{module} was saved as {list(known)}, but the model's layer is {list(shape)}.",
                "The model's config.json belongs to another checkpoint.",
            )
        if shape is None and known is None:
            raise CheckpointError(f"{module}: its shape is missing, so that W_q cannot be understood.", "Get it again.")
        return _described(module, headers, shape or known or (0, 0), packing)

    def roles(self, stored: StoredLayer) -> frozenset[str]:
        return super().roles(stored) | {FLOAT_ZERO_POINT}

    def specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        form = _Form.of(stored)
        words, scales = form.words, form.scales
        both: tuple[Axis, ...] = ("N", "K")
        scale = stored.key.weight.scale.element
        dtype = "int32" if form.bits == 3 else "uint8"
        notes = (TensorSpec(f"note {name}", name, None, None, optional=True) for name in _NOTES)
        return (
            TensorSpec("codes", "W_q", tuple(Extent(None, size) for size in words), dtype, uncut=both),
            TensorSpec(
                "scale", "scale", tuple(Extent(None, size) for size in scales), element_dtype(scale), uncut=both
            ),
            TensorSpec("zero_point", "zero", tuple(Extent(None, size) for size in scales), None, uncut=both),
            *notes,
        )

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        rows, columns = shape
        form = _Form.of(replace(stored, shape=shape))
        needed = self.specs(replace(stored, shape=shape))[:3]
        word = torch.int32 if form.bits == 3 else torch.uint8
        codes = tensors.get("W_q")
        viewed = "view_as_float" in tensors and bool(tensors["view_as_float"].any())
        if codes is not None and viewed and codes.is_floating_point():
            tensors = {**tensors, "W_q": codes.contiguous().view(word)}
        reason = misfit(needed, {name: header_of(tensor) for name, tensor in tensors.items()}, (rows, columns))
        if reason:
            raise CheckpointError(f"In a layer of shape {list(shape)}, {reason}.", "The file is damaged.")
        for name in ("quant_scale", "quant_zero"):
            if name in tensors and tensors[name].any():
                raise CheckpointError(f"{name} is set: the layer's scales are quantized.", "Quantize it again.")
        require_finite("scale", tensors["scale"])
        require_finite("zero", tensors["zero"])
        roles = {
            "codes": tensors["W_q"].reshape(-1),
            "scale": form.spread(tensors["scale"].reshape(-1)),
            "zero_point": form.spread(tensors["zero"].reshape(-1)),
        }
        return QuantizedTensor(stored.key.weight, shape, roles, _layout(form.bits))

    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        rows, columns = record.shape
        reason = self.refuse(key, (rows, columns))
        if reason:
            raise OutputError(f"{reason}.", "Choose another format.")
        for role in record.tensors.keys() - {"codes", "scale", "zero_point"}:
            raise OutputError(f"{self.name} has no place for the {role} of {key}.", "Choose another format.")
        zero, dtype = record["zero_point"], record["scale"].dtype
        zero = zero if zero.is_floating_point() else zero.to(dtype)  # integers of 8 bits are exact in any of the floats
        size, bits = key.weight.granularity.columns, key.weight.element.bits
        form = _Form(bits, 1, size, (rows, columns))
        codes = unpack_record(record)["codes"].reshape(-1, size)
        # Three-bit words take whole rows of [R, g], which may be more than the flattened codes need.
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[0] % FIELDS[bits, _WIDTHS[bits]]))
        return {
            "W_q": packings()["strided"].pack(codes, _layout(bits)).reshape(form.words),
            "scale": collect_blocks(record["scale"], (rows, columns), size).reshape(form.scales),
            "zero": collect_blocks(zero, (rows, columns), size).reshape(form.scales),
            **_notes(form, dtype),
        }

    def own_key(self, key: LinearKey) -> LinearKey:
        """Unsigned codes for signed ones, whose zero points move along."""
        weight = key.weight
        moves = not (key.activation or weight.symmetric) and weight.element.is_integer
        return LinearKey(replace(weight, element=_element(weight.element.bits))) if moves else key

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        weight, size = key.weight, key.weight.granularity.columns
        if key.activation or weight.symmetric or weight.global_scale or weight.granularity.kind != "group":
            return f"hqq holds uint1, 2, 3, 4 and 8 with float zero points in groups, found {key}"
        if weight.element.signed or not weight.element.is_integer or weight.element.bits not in _WIDTHS:
            return f"hqq holds uint1, 2, 3, 4 and 8 with float zero points, found {weight.element}"
        if weight.scale.element.name not in ("f16", "bf16", "f32"):
            return f"hqq's scales are floats of 16 or 32 bits, found {weight.scale.element}"
        if shape[1] % size:
            return f"groups of {size} weights do not divide K={shape[1]}"
        fields = FIELDS[weight.element.bits, _WIDTHS[weight.element.bits]]
        if weight.element.bits != 3 and (prod(shape) // size) % fields:
            return f"{prod(shape) // size} groups do not fill words of {fields} codes each"
        return None


@dataclass(frozen=True)
class _Form:
    """How a layer's weight was reshaped and packed.

    Attributes:
        bits: stored bits of a code.
        axis: along which a group runs in the reshaped weight.
        size: weights in a group.
        shape: [N, K].
    """

    bits: int
    axis: int
    size: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, stored: StoredLayer) -> _Form:
        axis, size = (
            int(part.removeprefix(name))
            for part, name in zip(stored.variant.split(" "), ("axis", "group"), strict=True)
        )
        return cls(stored.key.weight.element.bits, axis, size, stored.shape)

    @property
    def groups(self) -> int:
        return -(-prod(self.shape) // self.size)

    @property
    def words(self) -> tuple[int, int]:
        """Shape of W_q."""
        fields = FIELDS[self.bits, _WIDTHS[self.bits]]
        if self.axis == 1:
            return -(-self.groups // fields), self.size
        return -(-self.size // fields), self.groups

    @property
    def scales(self) -> tuple[int, int]:
        """Shape of scale and zero."""
        return (self.groups, 1) if self.axis == 1 else (1, self.groups)

    @property
    def granularity(self) -> Granularity:
        """The rectangles of the weight under one scale in the hub."""
        if self.axis == 1:
            return group(group_of_blocks(self.shape[1], self.size))
        return block(self.shape[0], 1) if self.groups == self.shape[1] else group(1)

    def spread(self, values: Tensor) -> Tensor:
        """One value for each group -> the hub's [R', C']."""
        rows, columns = self.shape
        if self.axis == 1:
            return spread_blocks(values, (rows, columns), self.size)
        if self.groups == columns:
            return values.reshape(1, columns)
        return values[torch.arange(rows * columns, device=values.device) % self.groups].reshape(rows, columns)


def _layout(bits: int) -> Layout:
    return Layout("strided", bits, "K", _WIDTHS[bits])


def _element(bits: int) -> Element:
    return ELEMENTS[f"uint{bits}"]


def _announced(module: str, files: CheckpointFiles) -> dict[str, Any]:
    """Shape, packing and key of a layer by its own tensors."""
    names = ("W_q", "scale", "zero", "packing")
    headers = {name: files.headers[f"{module}.{name}"] for name in names if f"{module}.{name}" in files.headers}
    noted = files.headers[f"{module}.shape"]
    shape = files.load(f"{module}.shape").tolist() if noted == TensorHeader("I64", (2,)) else []
    packing = _text(files, f"{module}.packing") if "packing" in headers else ""
    floats = "scale" in headers and headers["scale"].dtype in SCALE_ELEMENTS
    if len(shape) != 2 or min(shape) < 1 or "W_q" not in headers or not floats:
        raise CheckpointError(f"{module} has shape {shape} and {', '.join(headers)}, needed a matrix.", "Get it again.")
    key = _described(module, headers, (shape[0], shape[1]), packing).key
    return {"shape": shape, "packing": packing, "key": str(key)}


def _text(files: CheckpointFiles, name: str) -> str:
    """A note that is a text; empty where the tensor is none."""
    header = files.headers[name]
    if header.dtype != "U8" or len(header.shape) != 1 or header.shape[0] > _LONGEST_NOTE:
        return ""
    return bytes(files.load(name).tolist()).decode("ascii", "replace")


def _described(module: str, headers: Mapping[str, TensorHeader], shape: tuple[int, int], packing: str) -> StoredLayer:
    scale, codes, weights = headers["scale"], headers["W_q"], prod(shape)
    groups = prod(scale.shape)
    axis = 0 if len(scale.shape) == 2 and scale.shape[0] == 1 and groups > 1 else 1
    if groups == 0 or weights % groups:
        raise CheckpointError(f"{module}: scale has {groups} numbers for {weights} weights.", "The file is damaged.")
    # Ten three-bit codes take 32 bits; everything else fills bytes, so that the ratio of the sizes is the width.
    three = codes.dtype == "I32" or packing == _PACKINGS[3]  # floats may hide words of either kind
    per_byte = weights // max(1, nbytes(codes))
    bits = 3 if three else next((bits for bits in (1, 2, 4, 8) if 8 // bits == per_byte), 0)
    if not bits:
        raise CheckpointError(
            f"{module}: W_q has {nbytes(codes)} bytes for {weights} weights, needed 1, 2, 4 or 8 weights a byte.",
            "The file is damaged, or config.json belongs to another checkpoint.",
        )
    form = _Form(bits, axis, weights // groups, shape)
    key = QuantKey(_element(bits), ScaleSpec(SCALE_ELEMENTS[scale.dtype], form.granularity), symmetric=False)
    stored = StoredLayer(LinearKey(key), f"axis{axis} group{form.size}", shape)
    held = prod(form.words) * _WIDTHS[bits] // 8
    if held != nbytes(codes):
        raise CheckpointError(
            f"{module}: W_q has {nbytes(codes)} bytes, needed {held} for {list(shape)} in {stored.variant}.",
            "The file is damaged, or config.json belongs to another checkpoint.",
        )
    return stored


def _configured(params: Any) -> LinearKey:
    """The key that a configuration asks for, as far as it can be told without a shape."""
    weight = params.get("weight_quant_params", params) if isinstance(params, dict) else None
    if not isinstance(weight, dict):
        raise CheckpointError(f"quant_config holds {params!r}, needed weight_quant_params.", "Mend config.json.")
    nbits, size = weight.get("nbits", 4), weight.get("group_size") or 64
    if nbits not in (1, 1.58, 2, 3, 4, 5, 6, 8) or type(size) is not int or size < 1:
        raise CheckpointError(
            f"nbits is {nbits!r} and group_size {size!r}, which HQQ does not have.", "Known: 1, 1.58, 2, 3, 4, 5, 6, 8."
        )
    bits = 8 if nbits in (5, 6) else 2 if nbits == 1.58 else int(nbits)
    return LinearKey(QuantKey(_element(bits), ScaleSpec(BF16, group(size)), symmetric=False))


def _params(key: LinearKey) -> dict[str, Any]:
    return {
        "nbits": key.weight.element.bits,
        "channel_wise": True,
        "group_size": key.weight.granularity.columns,
        "optimize": True,
        "round_zero": False,
        "axis": 1,
        "view_as_float": False,
    }


def _notes(form: _Form, dtype: torch.dtype) -> dict[str, Tensor]:
    """The small tensors that HQQ's loader asks for."""
    values: dict[str, Any] = {
        "nbits": form.bits,
        "group_size": form.size,
        "axis": form.axis,
        "packing": _PACKINGS[form.bits],
        "unpack_view_dtype": str(torch.int32 if form.bits == 3 else torch.uint8),
        "compute_dtype": str(dtype),
        "encoded_state_dict": True,
        "stores_quant_config": True,
        "channel_wise": True,
        "optimize": True,
        **dict.fromkeys(("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero"), False),
    }
    return {"shape": torch.tensor(form.shape)} | {name: _encoded(value) for name, value in values.items()}


def _encoded(value: bool | int | str) -> Tensor:
    if isinstance(value, str):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)
    return torch.tensor(int(value), dtype=torch.uint8 if isinstance(value, bool) else torch.int32)
