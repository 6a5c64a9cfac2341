"""AMD Quark: the tensors of a layer.

The weight lies in `weight`, scales (multipliers) in `weight_scale`, in the model's dtype unless they are E8M0 or E4M3:

    fp8, int8, uint8      [N, K]; scales [], [N], [N/r, K/c]; int8 in groups is transposed: [K, N], scales [K/g, N]
    int4, uint4           int32 [K, N/8], scales [K/g, N] in groups; [N, K/8], scales [N] per channel; nibbles in the
                          order 0 2 4 6 1 3 5 7 (pack_method reorder) or as they come (order)
    int3                  uint8 [N, 3K/8], a dense bit string; scales [N], or [K/g, N]
    uint2                 uint8 [K, N/4], first code in the high bits; scales [K/g, N]
    fp4, fp6              uint8 [N, K/2], [N, 3K/4], dense; scales uint8 E8M0 [N, K/32]; or E4M3 [N, K/16] under
                          weight_scale_2 (NVFP4), whose activations have input_scale_2

Signed codes are two's complement. Every integer weight has a weight_zero_point packed as its codes are, a symmetric one
too, where it is zero; so has a static integer activation. That of int3, which is always zero, is neither read nor
written: Quark's writer and reader differ on its shape. output_scale belongs to the KV cache.

Sources: formats.md section 5; amd-quark 0.13 (`utils/pack.py`, `export/nn/modules/realquantizer.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype, global_multiplier, scale_extents
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.checkpoints.quark_config import PACK_METHODS, UNSIGNED, config_of, matches_quark, scheme_of, with_cache_of
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.activations import needs_calibration
from fewbit.packing.registry import packings
from fewbit.spec.element import E4M3, E8M0
from fewbit.spec.granularity import CHANNEL
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.layout import COLUMNS, ONE, PLAIN, ROWS, Axis, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT_SCALES = ("f16", "bf16", "f32")
_EIGHT_BITS = ("e4m3", "e5m2")
_MINIFLOATS = ("e2m1", "e2m3", "e3m2")


class Quark(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "quark"
    quant_methods: ClassVar[tuple[str, ...]] = ("quark",)
    matcher: ClassVar[Matcher] = staticmethod(matches_quark)
    unsupported: ClassVar[Mapping[str, tuple[str, str]]] = {
        "input_rotation": (
            "a rotation of its input at run time",
            "Use a checkpoint whose rotations were folded into the weights.",
        )
    }
    companions: ClassVar[frozenset[str]] = frozenset(
        {
            "weight_scale",
            "weight_scale_2",
            "weight_zero_point",
            "input_scale",
            "input_scale_2",
            "input_zero_point",
        }
    )

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        return scheme_of(config)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        return config_of({name: self.written_as(key) for name, key in layers.items()}, plain)

    def with_kv_cache(self, config: Mapping[str, Any], key: QuantKey) -> dict[str, Any]:
        return with_cache_of(config, key)

    def cache_scale(self, attention: str, side: str) -> str:
        return f"{attention}.{side}_proj.output_scale"

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        weight = key.weight
        if weight.is_dynamic:
            return ()
        variants = _integer_variants(weight) if weight.element.is_integer else _float_variants(weight)
        return tuple(StoredLayer(key, variant) for variant in variants)

    def preferred(
        self, storages: list[StoredLayer], scheme: Scheme, headers: Mapping[str, TensorHeader]
    ) -> list[StoredLayer]:
        """Those that share most words with what the configuration announces and have fewest of their own."""
        announced = set(scheme.variant.split())

        def agreement(stored: StoredLayer) -> int:
            words = set(stored.variant.split())
            return len(words & announced) - len(words - announced)

        best = max(agreement(stored) for stored in storages)
        return [stored for stored in storages if agreement(stored) == best]

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        found = _storage(stored)
        return found.codes_layout, found.zero_point_layout

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight, found = stored.key.weight, _storage(stored)
        specs = [
            TensorSpec("codes", "weight", found.codes, found.dtype),
            TensorSpec("scale", "weight_scale", found.scale, element_dtype(weight.scale.element)),
        ]
        if weight.element.is_integer:
            specs.append(TensorSpec("zero_point", "weight_zero_point", found.zero_point, found.dtype, weight.symmetric))
        if weight.global_scale:
            specs.append(TensorSpec("global_scale", "weight_scale_2", (ONE,), None))
        return tuple(specs)

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        key = stored.key.activation
        if key is None or not needs_calibration(key):
            return ()
        if key.global_scale:
            return (TensorSpec("input_global_scale", "input_scale_2", (ONE,), None),)
        scale = TensorSpec("input_scale", "input_scale", (ONE,), None)
        if not key.element.is_integer:
            return (scale,)
        return (scale, TensorSpec("input_zero_point", "input_zero_point", (ONE,), "int8", key.symmetric))

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        if self._ignores(stored, role):
            if tensor.any():
                warnings.warn(
                    f"A symmetric layer has a {role} that is not zero; it is not read.", UserWarning, stacklevel=2
                )
            return None
        found = _storage(stored)
        match role:
            case "codes":
                tensor = _as_packed(tensor, found.codes_layout, shape)
            case "zero_point":
                scale_shape = stored.key.weight.granularity.scale_shape(shape)
                tensor = _as_packed(tensor, found.zero_point_layout, scale_shape)
            case "scale" if found.transposed_scale:
                tensor = tensor.t().contiguous()
            case "global_scale":
                tensor = global_multiplier("weight_scale_2", tensor).reshape(1, 1)
            case "input_global_scale":
                tensor = global_multiplier("input_scale_2", tensor).reshape(())
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        match spec.role:
            case role if self._ignores(stored, role):
                return torch.zeros(spec.shape_of(*record.shape), dtype=getattr(torch, str(spec.dtype)))
            case "codes" | "zero_point" if spec.dtype == "int8":
                return record[spec.role].view(torch.int8)
            case "scale" if _storage(stored).transposed_scale:
                return record["scale"].t()
            case "global_scale" | "input_global_scale" if spec.role in record:
                return record[spec.role].float()
        return super().to_disk(stored, spec, record)

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        weight, activation = key.weight, key.activation
        if not self.storages(key):
            return (
                f"quark has no storage for weights of {weight}: it holds fp8 per tensor, channel, block or e8m0 group, "
                "int8 per tensor, channel or group, int4 per channel or group, symmetric int3, int2 in groups with "
                "zero points, fp4 and fp6 in groups"
            )
        if activation and not _holds_activation(activation):
            return f"quark cannot describe activations of {activation}"
        granularity, bits = weight.granularity, weight.element.bits
        if granularity.kind == "group" and shape[1] % granularity.columns:
            return f"groups of {granularity.columns} weights do not divide K={shape[1]}"
        if weight.element.is_integer and bits == 3 and shape[1] % 8:
            return f"runs of 8 codes of 3 bits do not divide K={shape[1]}"
        if weight.element.is_integer and bits == 2 and shape[0] % 4:
            return f"runs of 4 codes of 2 bits do not divide N={shape[0]}"
        return None

    def caution(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        granularity = key.weight.granularity
        if key.weight.element.is_integer and key.weight.element.bits == 4:
            packed = "N" if granularity.kind == "group" else "K"
            extent = shape[0] if packed == "N" else shape[1]
            if extent % 8 or shape[0] % 8:
                return (
                    f"words of 8 codes do not divide {packed}={extent}: fewbit reads a short last word, Quark does not"
                )
        if granularity.kind == "block" and (shape[0] % granularity.rows or shape[1] % granularity.columns):
            return (
                f"{granularity} weights do not divide {shape[0]}x{shape[1]}: fewbit reads edge blocks, Quark does not"
            )
        return None

    @staticmethod
    def _ignores(stored: StoredLayer, role: str) -> bool:
        """Symmetric means that zero points are not read, whatever the file holds."""
        key = {"zero_point": stored.key.weight, "input_zero_point": stored.key.activation}.get(role)
        return key is not None and key.symmetric


@dataclass(frozen=True)
class _Storage:
    """How the tensors of a weight lie in the file; `dtype` is the one of codes and of zero points."""

    codes: tuple[Extent, ...]
    dtype: str
    scale: tuple[Extent, ...]
    zero_point: tuple[Extent, ...] = ()
    codes_layout: Layout = PLAIN
    zero_point_layout: Layout = PLAIN
    transposed_scale: bool = False


def _float_variants(weight: QuantKey) -> tuple[str, ...]:
    element, scale, kind = weight.element.name, weight.scale.element, weight.granularity.kind
    if not weight.symmetric:
        return ()
    if weight.global_scale:
        return ("",) if element == "e2m1" and scale == E4M3 and kind == "group" else ()
    if kind == "group" and (element in _MINIFLOATS or (element in _EIGHT_BITS and scale == E8M0)):
        return ("",) if scale == E8M0 or scale.name in _FLOAT_SCALES else ()
    floating = scale.name in _FLOAT_SCALES or (kind == "block" and scale == E8M0)
    return ("",) if element in _EIGHT_BITS and kind in ("tensor", "channel", "block") and floating else ()


def _integer_variants(weight: QuantKey) -> tuple[str, ...]:
    """Words: `unsigned`, and for four bits the order of codes in a word. Signed and unsigned mean one key."""
    kind, bits = weight.granularity.kind, weight.element.bits
    if (
        weight.global_scale
        or not weight.element.name.startswith("int")
        or weight.scale.element.name not in _FLOAT_SCALES
    ):
        return ()
    match bits:
        case 8 if kind in ("tensor", "channel", "group"):
            return ("",) if weight.symmetric else ("", UNSIGNED)
        case 4 if kind in ("channel", "group"):
            unsigned = () if weight.symmetric else tuple(f"{UNSIGNED} {method}" for method in PACK_METHODS)
            return (*unsigned, *PACK_METHODS)
        case 3 if kind in ("channel", "group") and weight.symmetric:
            return ("",)
        case 2 if kind == "group" and not weight.symmetric:
            return (UNSIGNED,)
    return ()


def _storage(stored: StoredLayer) -> _Storage:
    weight = stored.key.weight
    if weight.element.is_integer:
        return _integer_storage(weight, stored.variant.split())
    scale = (ROWS,) if weight.granularity == CHANNEL else scale_extents(weight.granularity)
    bits = weight.element.bits
    if bits == 8:
        return _Storage((ROWS, COLUMNS), element_dtype(weight.element), scale)
    layout = Layout("dense", bits, "K", 8)
    return _Storage((ROWS, Extent("K", bits, 8)), "uint8", scale, codes_layout=layout)


def _integer_storage(weight: QuantKey, words: Sequence[str]) -> _Storage:
    bits, granularity = weight.element.bits, weight.granularity
    offset = 1 << (bits - 1) if UNSIGNED in words else 0
    grouped = granularity.kind == "group"
    groups = Extent("K", 1, granularity.columns) if grouped else ONE
    scale: tuple[Extent, ...] = (groups, ROWS) if grouped else (ROWS,) if granularity == CHANNEL else (ONE,)
    if bits == 3:
        dense = Layout("dense", 3, "K", 8)
        return _Storage((ROWS, Extent("K", 3, 8)), "uint8", scale, codes_layout=dense, transposed_scale=grouped)
    word_bits, dtype = (32, "int32") if bits == 4 else (8, "uint8" if offset or bits == 2 else "int8")
    packing = {"reorder": "interleaved", "order": "dense"}.get(words[-1] if words else "", "dense")
    if grouped and bits == 2:
        packing = "reversed"

    def layout(axis: Axis) -> Layout:
        return Layout(packing, bits, axis, word_bits, offset, transposed=grouped)

    rows = Extent("N", bits, word_bits)
    if grouped:
        return _Storage((COLUMNS, rows), dtype, scale, (groups, rows), layout("N"), layout("N"), True)
    if bits == 8 and not offset:
        return _Storage((ROWS, COLUMNS), dtype, scale, scale)
    of_rows = (rows,) if granularity == CHANNEL else (ONE,)
    return _Storage((ROWS, Extent("K", bits, word_bits)), dtype, scale, of_rows, layout("K"), layout("N"))


def _as_packed(tensor: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the file as its packing gives it for a matrix of `shape`; one-dimensional in the file, say."""
    packed = tensor.reshape(packings()[layout.packing].packed_shape(shape, layout))
    return packed if layout == PLAIN or packed.dtype is not torch.int8 else packed.view(torch.uint8)


def _holds_activation(key: QuantKey) -> bool:
    """Whether a spec can say it: per tensor, or per token or in groups at run time."""
    if key.element.name not in ("int8", *_EIGHT_BITS, *_MINIFLOATS):
        return False
    if key.global_scale:
        return key.element.name == "e2m1" and key.scale.element == E4M3 and key.is_dynamic
    return key.granularity.kind == "tensor" or (key.is_dynamic and key.granularity.kind in ("token", "group"))
