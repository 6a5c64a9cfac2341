"""torchao: the tensors of its subclasses in safetensors files, described by JSON in the files' metadata.

The weight of module m becomes `m._weight_<part>`; a text `m.weight` of the metadata names its class and attributes.

    Int8Tensor, IntxUnpackedToInt8Tensor   qdata int8 [N, K], one byte a code whatever the width; scale, zero_point
    Float8Tensor                           qdata float8 [N, K]; scale
    Int4Tensor                             qdata int8 [N, K/2], low nibble first, two's complement; scale and zero_point
                                           [K/g, N], the latter a float that is added after scaling
    MXTensor, NVFP4Tensor                  qdata float8 [N, K], or uint8 [N, K/2], low nibble first; scale;
                                           per_tensor_scale, a multiplier

Scales are multipliers. The first two lines are written, with one scale a row or in groups, as `torchao_config` says.
Layouts made for one device (swizzled scales, tile-packed int4) are refused, and pickles are not opened, which is what
.bin files of torchao are. Source: torchao 0.18 (`prototype/safetensors`, `quantize_/workflows`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.config_values import names_under
from fewbit.checkpoints.files import CheckpointFiles
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype, misfit, scale_extents
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.checkpoints.torchao_classes import CLASSES, layer_key
from fewbit.checkpoints.torchao_config import class_of, configured_keys, descriptions, quantization_config
from fewbit.errors import CheckpointError
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor
from fewbit.spec.key import LinearKey
from fewbit.spec.layout import COLUMNS, ONE, PLAIN, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "_weight_"
_PARTS = (
    "qdata",
    "scale",
    "zero_point",
    "per_tensor_scale",
    "act_quant_scale",
    "act_per_tensor_scale",
    "act_pre_scale",
)


@dataclass(frozen=True)
class _LayerScheme(Scheme):
    """A scheme with what the metadata says of each layer."""

    layers: Mapping[str, StoredLayer] = field(default_factory=dict)


class TorchAo(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "torchao"
    quant_methods: ClassVar[tuple[str, ...]] = ("torchao",)
    codes_names: ClassVar[tuple[str, ...]] = (f"{_PREFIX}qdata",)
    scale_names: ClassVar[tuple[str, ...]] = (f"{_PREFIX}scale",)
    companions: ClassVar[frozenset[str]] = frozenset(f"{_PREFIX}{part}" for part in _PARTS[1:])

    def completed(self, config: Mapping[str, Any] | None, files: CheckpointFiles) -> Mapping[str, Any] | None:
        if config is None:
            return None
        layers = {}
        for name, text in files.metadata.items():
            described = _parsed(name, text)
            if described is not None:
                module = name.removesuffix(".weight")
                below = {part: files.headers.get(f"{module}.{_PREFIX}{part}") for part in _PARTS}
                headers = {part: [header.dtype, *header.shape] for part, header in below.items() if header}
                layers[module] = {**described, "headers": headers}
        return {**config, "layers": layers}

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        described, ignore = config.get("layers"), names_under(config, "modules_to_not_convert")
        if described is None:  # a configuration by itself
            keys = configured_keys(config.get("quant_type"))
            return Scheme(self.name, tuple(Rule((name,), key) for name, key in keys.items()), tuple(ignore))
        if not described:
            raise CheckpointError(
                "torchao's layers are described in the metadata of safetensors files, and these files have none.",
                "Save the model with safetensors (torchao 0.15 or later), not as a pickle.",
            )
        layers = {
            module: StoredLayer(layer_key(module, layer, config.get("quant_type")), layer["_type"])
            for module, layer in described.items()
        }
        rules = tuple(Rule((module,), stored.key) for module, stored in layers.items())
        return _LayerScheme(self.name, rules, tuple(ignore), layers=layers)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        return quantization_config(layers, plain)

    def file_metadata(
        self, headers: Mapping[str, TensorHeader], layers: Mapping[str, LinearKey], dtype: str
    ) -> dict[str, str]:
        return descriptions(headers, layers, dtype, self.codes_names[0])

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        if not isinstance(scheme, _LayerScheme):
            return super().describe(scheme, module, headers, class_name, shape)
        if not self._is_quantized(module, headers):
            return None
        stored = scheme.layers.get(module)
        if stored is None:
            raise CheckpointError(
                f"{module} stores torchao tensors, and the metadata of the files does not describe it.",
                "Save the model again with torchao.",
            )
        reason = misfit(self.specs(stored), headers, shape)
        if reason:
            raise CheckpointError(f"{module} should be a {stored.variant}, but {reason}.", "The file is damaged.")
        return stored

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        """Those that are written."""
        kind = class_of(key)
        return (StoredLayer(key, kind),) if kind else ()

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        packed = stored.key.weight.element.bits == 4 and stored.variant != "IntxUnpackedToInt8Tensor"
        return Layout("dense", 4, "K", 8) if packed else PLAIN, PLAIN

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight = stored.key.weight
        packed = self.layouts(stored)[0] != PLAIN
        columns = Extent("K", 4, 8) if packed else COLUMNS
        # Two four-bit integers in a byte have that byte's dtype, which is int8.
        dtype = "uint8" if packed and not weight.element.is_integer else element_dtype(weight.element)
        scales = scale_extents(weight.granularity)
        scales = scales[::-1] if stored.variant == "Int4Tensor" else scales
        scale_dtype = "float8_e8m0fnu" if weight.scale.element.is_exponent_only else element_dtype(weight.scale.element)
        specs = [_spec("codes", "qdata", (ROWS, columns), dtype), _spec("scale", "scale", scales, scale_dtype)]
        if stored.variant == "Int4Tensor":
            specs.append(_spec("minimum", "zero_point", scales, None))
        elif weight.element.is_integer:
            specs.append(_spec("zero_point", "zero_point", scales, "int8", optional=weight.symmetric))
        if weight.global_scale:
            specs.append(_spec("global_scale", "per_tensor_scale", (ONE,), "float32"))
        return (*specs, _spec("pre_scale", "act_pre_scale", (COLUMNS,), None, optional=True))

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        key = stored.key.activation
        if key is None:
            return ()
        if key.global_scale and not key.global_scale.dynamic:
            return (_spec("input_global_scale", "act_per_tensor_scale", (ONE,), "float32"),)
        return () if key.is_dynamic else (_spec("input_scale", "act_quant_scale", (ONE,), None),)

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        weight = stored.key.weight
        match role:
            case "codes" if self.layouts(stored)[0] != PLAIN:
                return tensor.view(torch.uint8)
            case "scale" | "minimum" if stored.variant == "Int4Tensor":
                return tensor.transpose(0, 1).contiguous()
            case "zero_point" if weight.symmetric:
                if tensor.any():
                    raise CheckpointError(
                        f"The zero points of a symmetric {stored.variant} are not all zero.", "The file is damaged."
                    )
                return None
            case "global_scale":
                return tensor.double().reshape(1, 1)
            case "input_global_scale":
                return tensor.double().reshape(())
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        if spec.role == "zero_point" and stored.key.weight.symmetric:
            return torch.zeros_like(record["scale"], dtype=torch.int8)
        return super().to_disk(stored, spec, record)

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        size = key.weight.granularity.columns
        if class_of(key) is None:
            return (
                f"torchao's files hold no {key} as fewbit writes them; they hold int2 to int8 in groups or channels, "
                "e4m3 in channels of f32 scales, and int8 with activations by token"
            )
        return f"groups of {size} weights do not divide K={shape[1]}" if size and shape[1] % size else None


def _spec(role: str, part: str, shape: tuple[Extent, ...], dtype: str | None, optional: bool = False) -> TensorSpec:
    return TensorSpec(role, f"{_PREFIX}{part}", shape, dtype, optional)


def _parsed(name: str, text: str) -> dict[str, Any] | None:
    """The description of a quantized weight; None for a text that is none, or for a plain tensor's."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("_data"), dict) or "_type" not in value:
        return None
    if value["_type"] not in CLASSES or not name.endswith(".weight"):
        raise CheckpointError(
            f"{name} is a torchao {value['_type']}, which fewbit does not read.", f"Known: {', '.join(CLASSES)}."
        )
    return value
