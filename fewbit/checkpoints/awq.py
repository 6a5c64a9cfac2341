"""AWQ (AutoAWQ, and what AutoRound, GPTQModel and llm-awq write under the same name): 4-bit weights.

Variants are AutoAWQ's versions of the layout:

    gemm         qweight int32 [K, N/8] and qzeros int32 [ceil(K/g), N/8], interleaved along N; scales [ceil(K/g), N]
    gemv         qweight int32 [N, K/8], dense along K; scales [N, 8W], qzeros int32 [N, W], padded with zeros
    gemv_fast    qweight int16 [N/4, K]; scales [8W, N]; qzeros float [8W, N], minus scale times zero point
    marlin       qweight int32 [K/16, 2N], scales [ceil(K/g), N], both permuted; symmetric, no qzeros

W is ceil(K/g / 8), rounded up to a multiple of 2 where g is 64 and of 4 where it is 32. Zero points are as they are,
none is subtracted. Shapes tell the variants apart where the configuration is silent or wrong. Written is gemm.

Sources: AutoAWQ 0.2.9 (`models/_config.py`, `modules/linear`), vLLM 0.33 (`auto_awq.py`), transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.config_values import first_given, granularity_of, integer_of, strings, typed
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype
from fewbit.checkpoints.word_format import (
    WordFormat,
    group_extent,
    group_size_of,
    holds_words,
    warn_of_partial_segments,
)
from fewbit.errors import CheckpointError, OutputError, closest
from fewbit.lazy import functional as F
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor
from fewbit.packing.marlin import scale_order
from fewbit.spec.element import F16
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import COLUMNS, PLAIN, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("gemm", "gemv", "gemv_fast", "marlin")

_BITS, _HALF, _PER_WORD = 4, 8, 8
_ROW_QUANTUM = 32
"""AutoAWQ computes the width of its words from N // 32."""

_ZERO_POINT_TOLERANCE = 0.125
"""How far a scaled zero point over its scale may lie from an integer: f16 puts 15 at most 0.01 off."""


def matches_awq(pattern: str, name: str, class_name: str = "") -> bool:
    """AWQ's rule: a pattern names every module whose name it is a part of; or it is the module's class."""
    return pattern == class_name or pattern in name


class Awq(WordFormat):
    """See the head of this file."""

    name: ClassVar[str] = "awq"
    quant_methods: ClassVar[tuple[str, ...]] = ("awq",)
    matcher: ClassVar[Matcher] = staticmethod(matches_awq)

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        element = integer_of(first_given(config, "bits", "w_bit", "wbits"), "bits")
        if element.bits != _BITS:
            raise CheckpointError(f"AWQ weights have {_BITS} bits, the configuration says {element.bits}.", "Mend it.")
        zero_point = config.get("zero_point")
        symmetric = bool(config.get("sym", False)) if zero_point is None else not typed(zero_point, bool, "zero_point")
        granularity = granularity_of(first_given(config, "group_size", "q_group_size"), "group_size")
        key = LinearKey(QuantKey(element, ScaleSpec(F16, granularity), symmetric=symmetric))
        ignore = strings(config.get("modules_to_not_convert") or [], "modules_to_not_convert")
        head = () if config.get("lm_head") else (Rule(("lm_head",), None),)
        return Scheme(self.name, (*head, Rule(("Linear",), key)), tuple(ignore), variant=_variant(config))

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        keys = list(dict.fromkeys(layers.values()))
        if len(keys) != 1:
            raise OutputError(
                f"awq describes one key for the whole model, found {len(keys)}: {'; '.join(map(str, keys))}.",
                "Write gptq or compressed-tensors, or give every layer the same key.",
            )
        for left_out in plain:
            hit = next((name for name in layers if matches_awq(left_out, name)), None)
            if hit is not None:
                raise OutputError(
                    f"awq leaves out every module whose name contains {left_out!r}, so also {hit}, which is quantized.",
                    "Write gptq or compressed-tensors.",
                )
        return {
            "quant_method": "awq",
            "bits": _BITS,
            "group_size": group_size_of(keys[0].weight),
            "zero_point": not keys[0].weight.symmetric,
            "version": self.written_as(keys[0]).variant,
            "lm_head": any(name.rpartition(".")[2] == "lm_head" for name in layers),
            "modules_to_not_convert": list(plain) or None,
        }

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        if "qweight" in headers or len(headers.get("weight", TensorHeader("", ())).shape) == 2:
            warn_of_partial_segments("modules_to_not_convert", scheme.ignore, module)
        return super().describe(scheme, module, headers, class_name, shape)

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        if not holds_words(key) or key.weight.element.bits != _BITS:
            return ()
        variants = ["gemm"]
        if _padding(key.weight):
            variants += ["gemv"] if key.weight.symmetric else ["gemv", "gemv_fast"]
        if key.weight.symmetric:
            variants.append("marlin")
        return tuple(StoredLayer(key, variant) for variant in variants)

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        match stored.variant:
            case "gemm":
                interleaved = Layout("interleaved", _BITS, "N", 32, _HALF, True)
                return interleaved, interleaved
            case "gemv":
                dense = Layout("dense", _BITS, "K", 32, _HALF)
                return dense, dense
            case "gemv_fast":
                return Layout("gemv_fast", _BITS, "K", 16, _HALF), PLAIN
        return Layout("marlin", _BITS, "K", 32, _HALF, True), PLAIN

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight = stored.key.weight
        dtype, pad = element_dtype(weight.scale.element), _padding(weight)
        match stored.variant:
            case "gemm":
                codes, word = (COLUMNS, Extent("N", _BITS, 32)), "int32"
                scales: tuple[Extent, ...] = (group_extent(weight), ROWS)
                zeros: tuple[Extent, ...] = (group_extent(weight), Extent("N", _BITS, 32))
            case "gemv":
                codes, word = (ROWS, Extent("K", _BITS, 32)), "int32"
                scales = (ROWS, group_extent(weight, pad))
                zeros = (ROWS, _zero_words(weight))
            case "gemv_fast":
                codes, word = (Extent("N", 1, 4), Extent("K", multiple=64)), "int16"
                scales = zeros = (group_extent(weight, pad), ROWS)
            case _:
                codes, word = (Extent("K", 1, 16), Extent("N", 2, 1, 128)), "int32"
                scales, zeros = (group_extent(weight), Extent("N", multiple=_scale_order(weight).numel())), ()
        specs = [TensorSpec("codes", "qweight", codes, word), TensorSpec("scale", "scales", scales, dtype)]
        if zeros:
            zero_dtype = dtype if stored.variant == "gemv_fast" else "int32"
            specs.append(TensorSpec("zero_point", "qzeros", zeros, zero_dtype, optional=weight.symmetric))
        return tuple(specs)

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        record = super().read(stored, tensors, shape)
        if stored.variant == "gemv_fast":
            return record.with_tensors(zero_point=_zero_points(record["zero_point"], record["scale"]))
        return record

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        groups = stored.key.weight.granularity.scale_shape(shape)[1]
        match stored.variant, role:
            case "gemv", "scale":
                return tensor[:, :groups].contiguous()
            case "gemv", "zero_point":
                tensor = tensor[:, : -(-groups // _PER_WORD)].contiguous()
            case "gemv_fast", "scale" | "zero_point":
                return tensor[:groups].T.contiguous()
            case "marlin", "scale":
                return _in_runs(tensor, _scale_order(stored.key.weight).argsort()).T.contiguous()
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        match stored.variant, spec.role:
            case "gemv", "scale":
                tensor: Tensor | None = record["scale"]
            case "gemv_fast", "zero_point":
                scaled = record["scale"].float() * (record["zero_point"].float() + _HALF)
                tensor = -scaled.to(record["scale"].dtype).T
            case "marlin", "scale":
                return _in_runs(record["scale"].T, _scale_order(stored.key.weight))
            case _:
                tensor = super().to_disk(stored, spec, record)
        return tensor if tensor is None or spec.role == "codes" else _padded(tensor, spec.shape_of(*record.shape))

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        if not self.storages(key):
            return f"awq holds int4 weights per channel or group with float scales and nothing else, found {key}"
        if shape[0] % _ROW_QUANTUM:
            return f"awq needs an N that is a multiple of {_ROW_QUANTUM}, found {shape[0]}"
        return None

    def caution(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        size = key.weight.granularity.columns
        if size and shape[1] % size:
            return (
                f"groups of {size} do not divide K={shape[1]}: fewbit reads a short last group, AutoAWQ and vLLM do not"
            )
        return None


def _variant(config: Mapping[str, Any]) -> str:
    """The version of the layout; gemm where nothing is said."""
    if str(config.get("backend")).lower() == "llm-awq":
        return "gemv_fast"
    version = str(first_given(config, "version", "checkpoint_format", "format") or "gemm").lower()
    if version not in VARIANTS:
        raise CheckpointError(f"version is {version!r}, which is not supported.", closest(version, VARIANTS))
    return version


def _padding(weight: QuantKey) -> int:
    """To a multiple of how many groups gemv and gemv_fast pad; 0 where they have no such group size."""
    size = weight.granularity.columns
    if size == 0 or size >= 128:
        return _PER_WORD
    return {64: 2, 32: 4}.get(size, 0) * _PER_WORD


def _zero_words(weight: QuantKey) -> Extent:
    size = weight.granularity.columns
    return Extent("K", 1, size * _PER_WORD, _padding(weight) // _PER_WORD) if size else Extent(None, 1)


def _scale_order(weight: QuantKey) -> Tensor:
    return scale_order(grouped=weight.granularity.columns > 0)


def _in_runs(scales: Tensor, order: Tensor) -> Tensor:
    """Scales [G, N] with each run of output features in that order."""
    return scales.reshape(scales.shape[0], -1, order.numel())[..., order.to(scales.device)].flatten(1)


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return F.pad(tensor, (0, shape[1] - tensor.shape[1], 0, shape[0] - tensor.shape[0]))


def _zero_points(scaled: Tensor, scale: Tensor) -> Tensor:
    """Integer zero points from minus scale times zero point; signed, as the hub has them.

    Raises:
        CheckpointError: the quotient is no integer of 4 bits.
    """
    scale = scale.float()
    exact = torch.where(scale == 0, torch.zeros_like(scale), -scaled.float() / scale)
    zeros = exact.round()
    off = (exact - zeros).abs()
    if (off > _ZERO_POINT_TOLERANCE).any() or zeros.min() < 0 or zeros.max() >= 1 << _BITS:
        raise CheckpointError(
            f"qzeros divided by scales lie between {exact.min():.3f} and {exact.max():.3f}, up to {off.max():.3f} from "
            f"an integer; needed integers of 0 to {(1 << _BITS) - 1}.",
            "The file is damaged, or its zero points are no integers.",
        )
    return (zeros - _HALF).to(torch.int8)
