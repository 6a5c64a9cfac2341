"""NVIDIA ModelOpt: the tensors of a layer.

All scales are multipliers. What a key stores follows from its element and granularity alone:

    e4m3, int8 [N, K]     weight_scale [] per tensor, [N] per channel, uint8 E8M0 [N, K/32] for MXFP8
    e2m1 uint8 [N, K/2]   low nibble first; weight_scale E4M3 [N, K/16] under weight_scale_2, or uint8 E8M0 [N, K/32]
    activations           input_scale: their only static scale, or NVFP4's second-level one

Three oddities are not of that kind: int4 packs pairs of output rows, two's complement, the even row in the low nibble
(uint8 [N/2, K]); scales of 128x128 blocks have four axes [N/128, 1, K/128, 1]; activations may have to be multiplied by
pre_quant_scale [K] first, whatever the algorithm. k_scale and v_scale belong to the KV cache.

Sources: formats.md section 4; nvidia-modelopt 0.47 (`export/quant_utils.py`, `export/unified_export_hf.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype, global_multiplier, require_finite, scale_extents
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.checkpoints.modelopt_config import ALGORITHMS, FP8_CACHE, config_of, context_of, matches_modelopt, scheme_of
from fewbit.errors import OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.activations import needs_calibration
from fewbit.spec.element import E2M1, E4M3
from fewbit.spec.granularity import CHANNEL, group
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.layout import COLUMNS, ONE, PLAIN, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _FormatScheme:
    """What one oddity changes of an ordinary storage.

    Attributes:
        codes: shape of the codes, None for the ordinary one.
        layout: layout of the codes, None for the ordinary one.
        spreads_scales: whether an axis of length one follows each axis of the scales.
    """

    codes: tuple[Extent, ...] | None = None
    layout: Layout | None = None
    spreads_scales: bool = False


_ORDINARY = ""
_ODDITIES = {
    _ORDINARY: _FormatScheme(),
    "row-pairs": _FormatScheme(codes=(Extent("N", 4, 8), COLUMNS), layout=Layout("dense", 4, "N", 8)),
    "4-d-scales": _FormatScheme(spreads_scales=True),
}
"""By the variant of `StoredLayer` that they make."""

_VARIANTS = {
    ("e4m3", "tensor", "float"): (_ORDINARY,),
    ("e4m3", "channel", "float"): (_ORDINARY,),
    ("e4m3", "block", "float"): ("4-d-scales", _ORDINARY),
    ("e4m3", "group", "e8m0"): (_ORDINARY,),
    ("e2m1", "group", "e8m0"): (_ORDINARY,),
    ("e2m1", "group", "two levels"): (_ORDINARY,),
    ("int4", "group", "float"): ("row-pairs",),
    ("int8", "channel", "float"): (_ORDINARY,),
}
"""How weights are stored, the way they are written first, by element, granularity and kind of scale."""


def _kind_of_scale(weight: QuantKey) -> str:
    element = weight.scale.element
    if weight.global_scale:
        return "two levels" if element == E4M3 else "unknown"
    return "float" if element.name in ("f16", "bf16", "f32") else element.name


class ModelOpt(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "modelopt"
    quant_methods: ClassVar[tuple[str, ...]] = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
    matcher: ClassVar[Matcher] = staticmethod(matches_modelopt)
    unsupported: ClassVar[Mapping[str, tuple[str, str]]] = {
        "svdquant_lora_a": ("a low-rank product to be added", "Use a checkpoint that was quantized without SVDQuant.")
    }
    companions: ClassVar[frozenset[str]] = frozenset(
        {"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"}
    )

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        return scheme_of(config)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        contexts = {}
        for name, key in layers.items():
            context = context_of(key)
            if context is None:
                raise OutputError(f"{name}: modelopt has no algorithm for {key}.", "Choose another format.")
            contexts[name] = context
        return config_of(contexts, plain)

    def with_kv_cache(self, config: Mapping[str, Any], key: QuantKey) -> dict[str, Any]:
        if key != FP8_CACHE:
            return super().with_kv_cache(config, key)
        return {**config, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}

    def cache_scale(self, attention: str, side: str) -> str:
        return f"{attention}.{side}_proj.{side}_scale"

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        weight = key.weight
        if not weight.symmetric or weight.is_dynamic:
            return ()
        variants = _VARIANTS.get((weight.element.name, weight.granularity.kind, _kind_of_scale(weight)), ())
        return tuple(StoredLayer(key, variant) for variant in variants)

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        ordinary = Layout("dense", 4, "K", 8) if stored.key.weight.element == E2M1 else PLAIN
        return _ODDITIES[stored.variant].layout or ordinary, PLAIN

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight, odd = stored.key.weight, _ODDITIES[stored.variant]
        layout = self.layouts(stored)[0]
        codes = odd.codes or ((ROWS, COLUMNS) if layout == PLAIN else (ROWS, Extent("K", layout.bits, 8)))
        dtype = element_dtype(weight.element) if layout == PLAIN else "uint8"
        scale = (ROWS,) if weight.granularity == CHANNEL else scale_extents(weight.granularity)
        if odd.spreads_scales:
            scale = tuple(extent for axis in scale for extent in (axis, ONE))
        specs = [
            TensorSpec("codes", "weight", codes, dtype),
            TensorSpec("scale", "weight_scale", scale, element_dtype(weight.scale.element)),
            TensorSpec("pre_scale", "pre_quant_scale", (COLUMNS,), None, optional=True),
        ]
        if weight.global_scale:
            specs.append(TensorSpec("global_scale", "weight_scale_2", (ONE,), "float32"))
        return tuple(specs)

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        key = stored.key.activation
        if key is None or not needs_calibration(key):
            return ()
        role = "input_global_scale" if key.global_scale else "input_scale"
        return (TensorSpec(role, "input_scale", (ONE,), None),)

    def variations(self, key: LinearKey, headers: Mapping[str, TensorHeader]) -> Iterator[LinearKey]:
        """The group size that scales and codes show: config.json leaves it out for W4A16_AWQ."""
        codes, scale = (headers[name].shape if name in headers else () for name in ("weight", "weight_scale"))
        if key.weight.granularity.kind == "group" and len(codes) == len(scale) == 2 and scale[1]:
            columns = codes[1] * (2 if key.weight.element == E2M1 else 1)
            if columns >= scale[1] and columns % scale[1] == 0:
                yield replace(key, weight=key.weight.with_granularity(group(columns // scale[1])))
        yield from super().variations(key, headers)

    def preferred(
        self, storages: list[StoredLayer], scheme: Scheme, headers: Mapping[str, TensorHeader]
    ) -> list[StoredLayer]:
        def has_rank_of_file(stored: StoredLayer) -> bool:
            return all(
                spec.shape is None or len(spec.shape) == len(headers[spec.name].shape)
                for spec in self.weight_specs(stored)
                if spec.name in headers
            )

        return [stored for stored in storages if has_rank_of_file(stored)] or storages

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        match role:
            case "global_scale":
                return global_multiplier("weight_scale_2", tensor).reshape(1, 1)
            case "input_global_scale":
                return global_multiplier("input_scale", tensor).reshape(())
            case "pre_scale":
                require_finite("pre_quant_scale", tensor)
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        match spec.role:
            case "global_scale" | "input_global_scale" if spec.role in record:
                return record[spec.role].float()
            case "pre_scale" if spec.role in record:
                context = context_of(stored.key)
                if context is None or not context.pre_scale:
                    named = ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.pre_scale)
                    raise OutputError(
                        f"modelopt does not say of {stored.key} that a pre_scale comes before the layer, so readers "
                        f"would leave it out; {named} say so.",
                        "Fold the smoothing into the layer before.",
                    )
        return super().to_disk(stored, spec, record)

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        if not self.storages(key) or context_of(key) is None:
            return f"modelopt has no algorithm for {key}: it has {', '.join(ALGORITHMS)}"
        for what, part in (("weights", key.weight), ("activations", key.activation)):
            if part and part.granularity.kind == "group" and shape[1] % part.granularity.columns:
                return f"groups of {part.granularity.columns} {what} do not divide K={shape[1]}"
        if key.weight.element.name == "int4" and shape[0] % 2:
            return f"pairs of rows do not divide N={shape[0]}"
        return None

    def _with_activations(
        self, module: str, storages: list[StoredLayer], headers: Mapping[str, TensorHeader]
    ) -> StoredLayer:
        """ModelOpt names a layer FP8 or NVFP4 whether or not its input quantizer was on; the file shows which."""
        key = storages[0].key
        if self.activation_specs(storages[0]) and "input_scale" not in headers:
            warnings.warn(
                f"{module} should have activations of {key.activation}, but stores no input_scale; it is read as "
                f"weight-only {key.weight}.",
                UserWarning,
                stacklevel=2,
            )
            return replace(storages[0], key=LinearKey(key.weight))
        return super()._with_activations(module, storages, headers)
