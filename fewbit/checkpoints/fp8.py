"""Native FP8 (`fp8`, as DeepSeek-V3, AutoFP8, vLLM and transformers write it) and `fbgemm_fp8`.

Weights are float8_e4m3fn [N, K]. Scales are multipliers under every name, `weight_scale_inv` included:

    per tensor    weight_scale [] or [1], or transformers' weight_scale_inv; static activations in input_scale, or
                  transformers' activation_scale
    per channel   weight_scale [N, 1] (fbgemm_fp8); its activation_scale_ub, a bound on run-time activation scales that
                  only outliers beyond it would notice, is not applied
    block         weight_scale_inv [ceil(N/r), ceil(K/c)], edge blocks partial; F32, BF16, or bytes of E8M0 (ue8m0)

Sources: transformers 5.24 (`integrations/finegrained_fp8.py`, `quantizers/quantizers_utils.py`, `fbgemm_fp8.py`),
vLLM 0.33 (`fp8.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from fewbit.checkpoints.config_values import names_under
from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.layer_tensors import element_dtype, scale_extents
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.errors import CheckpointError, OutputError, SchemeError
from fewbit.spec.element import E4M3, E8M0, F32
from fewbit.spec.granularity import CHANNEL, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import COLUMNS, ONE, ROWS, TensorSpec
from fewbit.spec.pattern import Matcher, Predicate, prepared_by
from fewbit.spec.scheme import Rule, Scheme

_INPUT_SCALES = ("input_scale", "activation_scale")
_E8M0_ON_DISK = "float8_e8m0fnu"
_STATIC = QuantKey(E4M3, ScaleSpec(F32, TENSOR))
_PER_TOKEN = QuantKey(E4M3, ScaleSpec(F32, TOKEN, dynamic=True))


def _prepared(patterns: tuple[str, ...]) -> Predicate:
    """All patterns without groups as one expression: lists of them name every layer's norms and routers."""
    simple = [pattern for pattern in patterns if "(" not in pattern and "\\" not in pattern]
    rest = [pattern for pattern in patterns if pattern not in simple]
    try:
        start = re.compile("|".join(f"(?:{pattern})(?:(?<=\\.)|(?=\\.|$))" for pattern in simple) or r"(?!)")
    except re.error:
        simple, rest, start = [], list(patterns), re.compile(r"(?!)")
    ends = tuple(simple)

    def names(name: str, class_name: str) -> bool:
        if class_name in ends or name.endswith(ends) or start.match(name):
            return True
        return any(matches_transformers(pattern, name, class_name) for pattern in rest)

    return names


@prepared_by(_prepared)
def matches_transformers(pattern: str, name: str, class_name: str = "") -> bool:
    """transformers' rule for modules_to_not_convert, and the class name for targets.

    A pattern is a regular expression that matches from the start of the name up to a module boundary, or an ending of
    the name.
    """
    return pattern == class_name or name.endswith(pattern) or _up_to_a_boundary(pattern).match(name) is not None


@cache
def _up_to_a_boundary(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))")
    except re.error as error:
        raise SchemeError(f"The pattern {pattern!r} is no regular expression: {error}.", "Mend it.") from error


class Fp8(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "fp8"
    quant_methods: ClassVar[tuple[str, ...]] = ("fp8", "fbgemm_fp8")
    matcher: ClassVar[Matcher] = staticmethod(matches_transformers)
    scale_names: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_scale_inv")
    companions: ClassVar[frozenset[str]] = frozenset({"weight_scale", "weight_scale_inv", *_INPUT_SCALES})

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        for name, known in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
            if config.get(name) not in (None, known):
                raise CheckpointError(f"{name} is {config[name]!r}, which is not supported.", f"Needed: {known!r}.")
        if str(config.get("quant_method")).lower() == "fbgemm_fp8":
            key = LinearKey(QuantKey(E4M3, ScaleSpec(F32, CHANNEL)), _PER_TOKEN)
        else:
            key = _key(config)
        ignore = names_under(config, "modules_to_not_convert") or names_under(config, "ignored_layers")
        kv_cache = _STATIC if config.get("kv_cache_scheme") else None
        return Scheme(self.name, (Rule(("Linear",), key),), tuple(ignore), kv_cache)

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        keys = list(dict.fromkeys(layers.values()))
        if len(keys) != 1:
            raise OutputError(
                f"fp8 describes one key for the whole model, found {len(keys)}: {'; '.join(map(str, keys))}.",
                "Write compressed-tensors, or give every layer the same key.",
            )
        weight, activation = keys[0].weight, keys[0].activation
        ignored = {"modules_to_not_convert": list(plain)}
        if weight.granularity == CHANNEL:
            return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, **ignored}
        scheme = "dynamic" if activation and activation.is_dynamic else "static"
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme, **ignored}
        if weight.granularity.kind == "block":
            config["weight_block_size"] = [weight.granularity.rows, weight.granularity.columns]
            config["scale_fmt"] = "ue8m0" if weight.scale.element == E8M0 else "float"
        return config

    def with_kv_cache(self, config: Mapping[str, Any], key: QuantKey) -> dict[str, Any]:
        if key != _STATIC:
            return super().with_kv_cache(config, key)
        return {**config, "kv_cache_scheme": "static"}

    def cache_scale(self, attention: str, side: str) -> str:
        return f"{attention}.{side}_proj.output_scale"

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        """Variants are named by their scales: `weight_scale_inv`, or `weight_scale+input_scale` where one is static."""
        weight = key.weight
        if weight.element != E4M3 or weight.global_scale or not weight.symmetric or weight.is_dynamic:
            return ()
        if weight.granularity.kind not in ("tensor", "channel", "block") or weight.scale.element == E4M3:
            return ()
        is_block = weight.granularity.kind == "block"
        if weight.scale.element == E8M0 and not is_block:
            return ()
        scales = reversed(self.scale_names) if is_block else self.scale_names
        inputs = [f"+{name}" for name in _INPUT_SCALES] if key.activation and not key.activation.is_dynamic else [""]
        return tuple(StoredLayer(key, scale + static) for scale in scales for static in inputs)

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        scale = stored.key.weight.scale
        dtype = _E8M0_ON_DISK if scale.element == E8M0 else element_dtype(scale.element)
        return (
            TensorSpec("codes", "weight", (ROWS, COLUMNS), element_dtype(E4M3)),
            TensorSpec("scale", stored.variant.partition("+")[0], scale_extents(scale.granularity), dtype),
        )

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        name = stored.variant.partition("+")[2]
        return (TensorSpec("input_scale", name, (ONE,), None),) if name else ()

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        weight, activation = key.weight, key.activation
        if not self.storages(key):
            return f"fp8 holds e4m3 weights scaled per tensor, channel or block, found {weight}"
        needed = _activations(weight.granularity)
        if activation not in needed:
            known = " or ".join(map(str, needed))
            return f"fp8 weights of {weight} imply activations of {known}, found {activation}"
        return None


def _activations(weight: Granularity) -> tuple[QuantKey, ...]:
    """The activation keys that the format can say beside a weight granularity."""
    if weight.kind == "block":
        return (_per_group(weight.columns),)
    return (_PER_TOKEN,) if weight == CHANNEL else (_STATIC, _PER_TOKEN)


def _per_group(size: int) -> QuantKey:
    return QuantKey(E4M3, ScaleSpec(F32, group(size), dynamic=True))


def _key(config: Mapping[str, Any]) -> LinearKey:
    activation_scheme = str(config.get("activation_scheme", "dynamic")).lower()
    if activation_scheme not in ("dynamic", "static"):
        raise CheckpointError(f"activation_scheme is {activation_scheme!r}.", "Known: dynamic, static.")
    static = activation_scheme == "static"
    size = config.get("weight_block_size")
    if size is None:
        return LinearKey(QuantKey(E4M3, ScaleSpec(F32, TENSOR)), _STATIC if static else _PER_TOKEN)
    if not (isinstance(size, list) and len(size) == 2 and all(type(extent) is int and extent > 0 for extent in size)):
        raise CheckpointError(f"weight_block_size is {size!r}.", "Needed: [rows, columns].")
    scale_format = config.get("scale_fmt") or "float"
    if scale_format not in ("float", "ue8m0"):
        raise CheckpointError(f"scale_fmt is {scale_format!r}.", "Known: float, ue8m0.")
    scale = ScaleSpec(E8M0 if scale_format == "ue8m0" else F32, block(*size))
    return LinearKey(QuantKey(E4M3, scale), _STATIC if static else _per_group(size[1]))
