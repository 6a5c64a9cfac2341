"""compressed-tensors (llm-compressor): the tensors of a layer.

Codes lie plainly in `weight` or packed in `weight_packed`, by the format's names:

    pack-quantized          int32 [N, ceil(K*b/32)] along K, code + 2**(b-1); zero points likewise along N; weight_shape
    int-quantized           int8 [N, K], one byte a code whatever the width
    float-quantized         float8_e4m3fn [N, K] with quantized activations; naive-quantized without
    nvfp4-pack-quantized    uint8 [N, K/2], low nibble first; E4M3 scales under weight_global_scale, a divisor on disk
    mxfp4-, mxfp6-pack-     uint8 [N, K/2] and [N, 3K/4]; mxfp8-quantized float8_e4m3fn [N, K]; E8M0 scales as uint8

Sources: compressed-tensors 0.20.1 (`compressors/`, `quantization/`); weight_g_idx as llm-compressor 0.8.1 wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.act_order import stated_order
from fewbit.checkpoints.compressed_tensors_config import config_of, kv_cache_scheme_of, scheme_of
from fewbit.checkpoints.compressed_tensors_transforms import matrix_name, permutation_name, transforms_of
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype, scale_extents
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.errors import CheckpointError, OutputError
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor
from fewbit.spec.element import E4M3
from fewbit.spec.granularity import HEAD, TOKEN
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.layout import COLUMNS, ONE, PLAIN, ROWS, Axis, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher, matches_compressed_tensors
from fewbit.spec.scheme import Scheme
from fewbit.spec.transform import Transform

if TYPE_CHECKING:
    from torch import Tensor

_FIXED = {
    QuantKey.parse("e2m1:group16:e4m3/tensor:f32"): "nvfp4-pack-quantized",
    QuantKey.parse("e2m1:group32:e8m0"): "mxfp4-pack-quantized",
    QuantKey.parse("e2m3:group32:e8m0"): "mxfp6-pack-quantized",
    QuantKey.parse("e4m3:group32:e8m0"): "mxfp8-quantized",
}
"""Formats that hold one weight key and no other."""

_INTEGERS = {"int2", "int3", "int4", "int5", "int6", "int7", "int8"}
_FLOAT_SCALES = {"f16", "bf16", "f32"}


class CompressedTensors(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "compressed-tensors"
    quant_methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)
    matcher: ClassVar[Matcher] = staticmethod(matches_compressed_tensors)
    describes_embeddings: ClassVar[bool] = True
    codes_names: ClassVar[tuple[str, ...]] = ("weight_packed", "weight")
    companions: ClassVar[frozenset[str]] = frozenset(
        [
            "weight_scale",
            "weight_zero_point",
            "weight_global_scale",
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
            "input_global_scale",
        ]
    )

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        return scheme_of(config)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        return config_of({name: self.written_as(key) for name, key in layers.items()}, plain)

    def transforms(self, config: Mapping[str, Any]) -> tuple[Transform, ...]:
        return transforms_of(config)

    def transform_tensors(self, module: str, transform: Transform) -> tuple[str, str]:
        return matrix_name(module, transform), permutation_name(module, transform)

    def with_embeddings(self, config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """A group that names its layers one by one names them already; `Linear` means no embedding."""
        groups = {
            name: {**one, "targets": [*one["targets"], *names]} if one["targets"] == ["Linear"] else one
            for name, one in config["config_groups"].items()
        }
        return {**config, "config_groups": groups}

    def with_kv_cache(self, config: Mapping[str, Any], key: QuantKey) -> dict[str, Any]:
        return {**config, "kv_cache_scheme": kv_cache_scheme_of(key)}

    def cache_scale(self, attention: str, side: str) -> str:
        return f"{attention}.{side}_scale"

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        weight = key.weight
        if weight in _FIXED:
            return (StoredLayer(key, _FIXED[weight]),)
        if weight.global_scale or weight.is_dynamic or weight.scale.element.name not in _FLOAT_SCALES:
            return ()
        if weight.element.name in _INTEGERS and weight.granularity.kind in ("tensor", "channel", "group"):
            formats = ("pack-quantized", "int-quantized")
            return tuple(StoredLayer(key, variant) for variant in (reversed(formats) if key.activation else formats))
        if weight.element == E4M3 and weight.symmetric and weight.granularity not in (TOKEN, HEAD):
            return (StoredLayer(key, "float-quantized" if key.activation else "naive-quantized"),)
        return ()

    def refuse_obsolete(self, module: str, key: LinearKey, headers: Mapping[str, TensorHeader]) -> None:
        """Early versions put floor(32 / b) codes of 3, 5, 6 or 7 bits into a word."""
        packed, scale = headers.get("weight_packed"), headers.get("weight_scale")
        bits, granularity = key.weight.element.bits, key.weight.granularity
        if packed is None or scale is None or packed.dtype != "I32" or granularity.kind != "group" or 32 % bits == 0:
            return
        columns = scale.shape[-1] * granularity.columns
        if packed.shape[-1] == -(-columns // (32 // bits)):
            raise CheckpointError(
                f"{module}: {packed.shape[-1]} words a row hold {32 // bits} codes of {bits} bits each, needed "
                f"{-(-columns * bits // 32)} words without gaps.",
                "A compressed-tensors version before dense packing wrote it; quantize again.",
            )

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        bits, half = stored.key.weight.element.bits, 1 << (stored.key.weight.element.bits - 1)
        if stored.variant == "pack-quantized":
            codes, zero_points = (Layout("dense", bits, axis, 32, half) for axis in _AXES)
            # One zero point for the whole tensor is stored as it is.
            return codes, PLAIN if stored.key.weight.granularity.kind == "tensor" else zero_points
        if stored.variant.endswith("pack-quantized"):
            return Layout("dense", bits, "K", 8), PLAIN
        return PLAIN, PLAIN

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight = stored.key.weight
        codes, zero_points = self.layouts(stored)
        scale_shape = scale_extents(weight.granularity)
        if codes == PLAIN:
            specs = [TensorSpec("codes", "weight", (ROWS, COLUMNS), element_dtype(weight.element))]
        else:
            words = Extent("K", codes.bits, codes.word_bits)
            specs = [TensorSpec("codes", "weight_packed", (ROWS, words), _WORDS[codes.word_bits])]
        specs.append(TensorSpec("scale", "weight_scale", scale_shape, element_dtype(weight.scale.element)))
        if weight.element.is_integer:
            # A symmetric layer's zero points, which old versions stored, are all zero and not read.
            packed = zero_points != PLAIN
            shape = (Extent("N", zero_points.bits, 32), scale_shape[1]) if packed else scale_shape
            dtype = "int32" if packed else "int8"
            specs.append(TensorSpec("zero_point", "weight_zero_point", shape, dtype, weight.symmetric))
        if weight.global_scale:
            specs.append(TensorSpec("global_scale", "weight_global_scale", (ONE,), "float32"))
        if stored.variant == "pack-quantized":
            specs.append(TensorSpec("shape", "weight_shape", (Extent(None, 2),), "int64", optional=True))
            specs.append(TensorSpec("order", "weight_g_idx", (COLUMNS,), "int32", optional=True))
        return tuple(specs)

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        key = stored.key.activation
        if key is None:
            return ()
        if key.global_scale and not key.global_scale.dynamic:
            return (TensorSpec("input_global_scale", "input_global_scale", (ONE,), "float32"),)
        if key.is_dynamic:
            return ()
        scale = TensorSpec("input_scale", "input_scale", (ONE,), None)
        zero_point = TensorSpec("input_zero_point", "input_zero_point", (ONE,), "int8")
        return (scale,) if key.symmetric else (scale, zero_point)

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        match role:
            case "zero_point" if stored.key.weight.symmetric:
                return None
            case "shape":
                _check_shape(tensor, shape)
                return None
            case "order":
                return stated_order("weight_g_idx", tensor, stored.key.weight)
            case "global_scale":
                return _reciprocal("weight_global_scale", tensor).reshape(1, 1)
            case "input_global_scale":
                return _reciprocal("input_global_scale", tensor).reshape(())
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        match spec.role:
            case "shape":
                return torch.tensor(record.shape)
            case "order" if "order" in record:
                raise OutputError(
                    "compressed-tensors no longer holds act-order (weight_g_idx was removed after 0.12).",
                    "Convert to gptq, or quantize again without act-order.",
                )
            case "global_scale" | "input_global_scale" if spec.role in record:
                return (1.0 / record[spec.role]).float()
        return super().to_disk(stored, spec, record)

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        if not self.storages(key):
            return (
                f"compressed-tensors has no format for weights of {key.weight}: it holds int2 to int8 per tensor, "
                f"channel or group, e4m3 per block too, and {', '.join(map(str, _FIXED))}"
            )
        if key.activation and not _holds_activation(key.activation):
            return f"compressed-tensors cannot describe activations of {key.activation}"
        if key.weight in _FIXED and shape[1] % key.weight.granularity.columns:
            return f"groups of {key.weight.granularity.columns} weights do not divide K={shape[1]}"
        return None

    def caution(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        for what, part in (("weights", key.weight), ("activations", key.activation)):
            if part and part.granularity.kind == "group" and shape[1] % part.granularity.columns:
                return (
                    f"{part.granularity} {what} do not divide K={shape[1]}: fewbit reads a short last group, the "
                    "compressed-tensors library and so stock transformers do not"
                )
        return None


_AXES: tuple[Axis, Axis] = ("K", "N")
_WORDS = {8: "uint8", 32: "int32"}


def _holds_activation(key: QuantKey) -> bool:
    """Whether QuantizationArgs can say it: per tensor, per token at run time, or in groups at run time."""
    if key.element.name not in {*_INTEGERS, "e4m3", "e2m1"} or not (key.symmetric or key.element.is_integer):
        return False
    return key.granularity.kind == "tensor" or (key.is_dynamic and key.granularity.kind in ("token", "group"))


def _check_shape(stored: Tensor, shape: tuple[int, ...]) -> None:
    """weight_shape names the whole layer; `shape` may be one rank's share of it."""
    whole = [int(extent) for extent in stored]
    if any(extent < 1 or extent % share for extent, share in zip(whole, shape, strict=True)):
        raise CheckpointError(
            f"weight_shape says {whole}, but the layer is {list(shape)}.",
            "The model's config.json belongs to another checkpoint, or the file is damaged.",
        )


def _reciprocal(name: str, divisor: Tensor) -> Tensor:
    """float64 multiplier of a divisor; float64 because its own reciprocal then gives the divisor back exactly."""
    if not (divisor.isfinite().all() and (divisor > 0).all()):
        raise CheckpointError(
            f"{name} is {divisor.flatten().tolist()}, needed a positive divisor.",
            "The file is damaged, or its writer met a weight of zeros; quantize again.",
        )
    return 1.0 / divisor.double()
