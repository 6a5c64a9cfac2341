"""Humming (`humming`): its own configuration, every width of 2 to 8 bits, float codes too.

    weight          int32 [N, K*b/32], dense along K; integers as code + 2**(b-1), floats as their bits
    weight_scale    [1] f32, [N, 1], [N, K/g], or [N/r, K/c] f32; multipliers, which may be negative
    zero_point      int32 [N*b/32, G], dense along N, the plain code; or a float [N, G] (`is_fp_zero_point`)
    weight_scale_2  second-level multiplier: [1] f32, or [N]
    input_scale, input_scale_2   [1] f32, static activation multipliers

Float zero points lie between two codes. Their keys have unsigned elements here, because no signed code would keep
`code - zero point` exact.

Source: humming_kernels 0.1.20 (`schema/humming.py`, `utils/weight.py`, `layer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.humming_config import FLOATS, SCALES, activation_fields, config_of, matches_humming, scheme_of
from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.layer_tensors import scale_extents
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.errors import OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.spec.element import F32
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.layout import ONE, PLAIN, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

_WORD = 32


class Humming(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "humming"
    quant_methods: ClassVar[tuple[str, ...]] = ("humming",)
    matcher: ClassVar[Matcher] = staticmethod(matches_humming)
    zero_scales: ClassVar[bool] = True  # its quantizer divides the largest magnitude of a group by the largest code
    companions: ClassVar[frozenset[str]] = frozenset(
        ["weight_scale", "zero_point", "weight_scale_2", "input_scale", "input_scale_2"]
    )

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        return scheme_of(config)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        return config_of(layers, plain)

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        return () if _obstacle(key.weight) else (StoredLayer(key),)

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        element = stored.key.weight.element
        offset = 1 << (element.bits - 1) if element.is_integer and element.signed else 0
        zero_points = PLAIN if not offset or stored.key.weight.symmetric else _dense(element.bits, "N", offset)
        return _dense(element.bits, "K", offset), zero_points

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight = stored.key.weight
        bits, scale_shape = weight.element.bits, scale_extents(weight.granularity)
        specs = [
            TensorSpec("codes", "weight", (ROWS, Extent("K", bits, _WORD)), "int32"),
            TensorSpec("scale", "weight_scale", scale_shape, SCALES[weight.scale.element.name]),
        ]
        if not weight.symmetric and weight.element.signed:
            specs.append(TensorSpec("zero_point", "zero_point", (Extent("N", bits, _WORD), scale_shape[1]), "int32"))
        elif not weight.symmetric:
            specs.append(TensorSpec("zero_point", "zero_point", scale_shape, None))
        if weight.global_scale:
            per_tensor = weight.global_scale.granularity.kind == "tensor"
            shape, dtype = ((ONE,), "float32") if per_tensor else ((ROWS,), None)
            specs.append(TensorSpec("global_scale", "weight_scale_2", shape, dtype))
        return tuple(specs)

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        key = stored.key.activation
        if key is None:
            return ()
        if key.global_scale and not key.global_scale.dynamic:
            return (TensorSpec("input_global_scale", "input_scale_2", (ONE,), "float32"),)
        return () if key.is_dynamic else (TensorSpec("input_scale", "input_scale", (ONE,), "float32"),)

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        match role:
            case "global_scale":
                return tensor.double().reshape(-1, 1)
            case "input_global_scale":
                return tensor.double().reshape(())
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        if spec.role in ("global_scale", "input_global_scale") and spec.role in record:
            return record[spec.role].float()
        if spec.role == "zero_point" and not stored.key.weight.element.signed:
            _require_float(record, stored.key)
        return super().to_disk(stored, spec, record)

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        weight, (rows, columns) = key.weight, shape
        if obstacle := _obstacle(weight):
            return f"Humming cannot store weights of {weight}: {obstacle}"
        if key.activation and activation_fields(key.activation) is None:
            return f"Humming cannot describe activations of {key.activation}"
        for what, extent in (
            ("K", columns),
            *((("N", rows),) if not weight.symmetric and weight.element.signed else ()),
        ):
            if extent * weight.element.bits % _WORD:
                return f"{weight.element.bits}-bit codes along {what}={extent} do not fill whole words of {_WORD} bits"
        for what, extent, size in (("N", rows, weight.granularity.rows), ("K", columns, weight.granularity.columns)):
            if size and extent % size:
                return f"{weight.granularity} does not divide {what}={extent}"
        return None


def _dense(bits: int, axis: Any, offset: int) -> Layout:
    return Layout("dense", bits, axis, _WORD, offset)


def _require_float(record: QuantizedTensor, key: LinearKey) -> None:
    if "zero_point" in record and not record["zero_point"].is_floating_point():
        raise OutputError(
            f"Humming stores the zero points of {key} as floats, found {record['zero_point'].dtype}.",
            "Use a key with a signed element for integer zero points.",
        )


def _obstacle(weight: QuantKey) -> str | None:
    """Why no tensors of the format hold such a weight."""
    return next(_obstacles(weight), None)


def _obstacles(weight: QuantKey) -> Iterator[str]:
    element, scale, kind = weight.element, weight.scale, weight.granularity.kind
    second = weight.global_scale.granularity.kind if weight.global_scale else ""
    if not (element.name in FLOATS.values() or (element.is_integer and not element.bias and element.bits > 1)):
        yield f"its elements are int2 to int8, {', '.join(FLOATS.values())}"
    if element.is_integer and not element.signed and weight.symmetric:
        yield "unsigned elements have (float) zero points here"
    if weight.is_dynamic or kind not in ("tensor", "channel", "group", "block") or scale.element.name not in SCALES:
        yield f"its scales are per tensor, channel, group or block, of {', '.join(SCALES)}"
    if kind in ("tensor", "block") and scale.element != F32:
        yield f"scales per {kind} are f32"
    if not weight.symmetric and (not element.is_integer or kind not in ("group", "channel")):
        yield "zero points belong to integers in groups or channels"
    if second and not (kind == "group" and second in ("tensor", "channel")) and (kind, second) != ("channel", "tensor"):
        yield "a second scale stands over groups, or one for the tensor over channels"
    if weight.global_scale and weight.global_scale.element != F32:
        yield "the second scale is f32"
