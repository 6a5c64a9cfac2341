"""Humming: `quantization_config` and schemes.

Every key of the configuration has aliases. `dynamic` maps regular expressions, matched from the start of a module's
name, to overrides (`+:` or no sign) or exclusions (`-:`); the first that matches decides. The head is never quantized.
Source: humming_kernels 0.1.20 (`schema/humming.py`, `layer.py`, `config/config.py`); vLLM 0.33 for `re:` entries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.checkpoints.config_values import names_under
from fewbit.errors import CheckpointError, OutputError, SchemeError, closest
from fewbit.spec.element import BF16, E2M1, E4M3, E8M0, ELEMENTS, F32, Element, integer
from fewbit.spec.granularity import CHANNEL, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.scheme import Rule, Scheme

FLOATS = {
    "float4e2m1": "e2m1",
    "float6e2m3": "e2m3",
    "float6e3m2": "e3m2",
    "float8e4m3": "e4m3",
    "float8e5m2": "e5m2",
}
"""Humming's name of a float element -> the element's name."""

SCALES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "e8m0": "float8_e8m0fnu",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
"""Element of a scale -> torch's name of the dtype that holds it on disk."""

_SCALE_NAMES = {
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float8e8m0": "e8m0",
    "float8e4m3": "e4m3",
    "float8e5m2": "e5m2",
}
_ALIASES = {
    "b_dtype": ("weight_dtype", "dtype"),
    "bs_dtype": ("weight_scale_dtype", "scale_dtype"),
    "weight_scale_group_size": ("group_size",),
    "weight_scale_group_size_n": ("group_size_n",),
    "weight_scale_type": ("scale_type",),
    "weight_scale_2_type": ("scale_2_type",),
    "a_dtype": ("input_dtype",),
    "input_scale_group_size": (),
    "input_scale_dtype": (),
    "input_quant_mode": ("quant_mode", "quantization_mode"),
}
"""The aliases of activation fields that weight fields share (`dtype`, `group_size`, `scale_dtype`) mean the weight."""

_HEAD = "lm_head"


def matches_humming(pattern: str, name: str, class_name: str = "") -> bool:
    """A regular expression after `re:` that matches from the start, a class, or any part of the name."""
    if pattern.startswith("re:"):
        return _compiled(pattern.removeprefix("re:")).match(name) is not None
    return bool(pattern) and (pattern == class_name or pattern in name)


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` describes.

    Raises:
        CheckpointError: something in it is malformed or not supported, which is named.
    """
    ignore = [_HEAD]
    for name in ("ignored_layers", "ignore", "modules_to_not_convert"):
        ignore += names_under(config, name)
    rules = []
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"dynamic is {dynamic!r}, needed an object.", "Mend config.json.")
    for pattern, changes in dynamic.items():
        if pattern.startswith("-:"):
            ignore.append(f"re:{pattern.removeprefix('-:')}")
        else:
            rules.append(Rule((f"re:{pattern.removeprefix('+:')}",), _key({**config, **(changes or {})})))
    return Scheme("humming", (*rules, Rule(("Linear",), _key(config))), tuple(dict.fromkeys(ignore)))


def config_of(layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` to write: the commonest key for all, the others by exact names."""
    common = Counter(layers.values()).most_common(1)[0][0]
    config = {"quant_method": "humming", **_fields(common), "ignored_layers": list(plain)}
    others = {f"+:^{re.escape(name)}$": _fields(key) for name, key in layers.items() if key != common}
    return {**config, "dynamic": others} if others else config


def activation_fields(key: QuantKey) -> dict[str, Any] | None:
    """The configuration of an activation key, or None where it has none."""
    scale, second, kind = key.scale, key.global_scale, key.granularity.kind
    name = "int8" if key.element == integer(8) else "int4" if key.element == integer(4) else _float_name(key.element)
    if name is None or not key.symmetric or scale.element.name not in ("f32", "e8m0", "e4m3"):
        return None
    mode = None
    if second is None:
        if scale.element == F32 and (kind, scale.dynamic) in (("tensor", False), ("token", True)):
            mode = "dynamic_token" if scale.dynamic else "static_tensor"
        elif kind == "group" and scale.dynamic:
            mode = "dynamic_group"
    elif kind == "group" and scale.dynamic and second == ScaleSpec(F32, TENSOR):
        mode = "static_tensor_dynamic_group"
    if mode is None:
        return None
    return {
        "a_dtype": name,
        "input_quant_mode": mode,
        "input_scale_group_size": key.granularity.columns if kind == "group" else 0,
        "input_scale_dtype": _scale_name(scale.element),
    }


def _fields(key: LinearKey) -> dict[str, Any]:
    weight = key.weight
    kind = weight.granularity.kind
    fields: dict[str, Any] = {
        "b_dtype": f"uint{weight.element.bits}" if weight.element.is_integer else _float_name(weight.element),
        "bs_dtype": _scale_name(weight.scale.element),
        "weight_scale_type": kind,
        "weight_scale_group_size": weight.granularity.columns if kind in ("group", "block") else 0,
        "weight_scale_group_size_n": weight.granularity.rows if kind == "block" else 0,
        "weight_scale_2_type": weight.global_scale.granularity.kind if weight.global_scale else "none",
        "has_zero_point": not weight.symmetric,
        "is_fp_zero_point": not weight.symmetric and not weight.element.signed,
    }
    inactive = {"a_dtype": None, "input_quant_mode": "none", "input_scale_group_size": 0, "input_scale_dtype": None}
    activation = activation_fields(key.activation) if key.activation else inactive
    if activation is None:
        raise OutputError(f"Humming cannot describe activations of {key.activation}.", "Choose another format.")
    return fields | activation


def _key(config: Mapping[str, Any]) -> LinearKey:
    fields = {name: _field(config, name) for name in _ALIASES}
    if int(config.get("hadamard_block_size") or 0) > 1:
        raise CheckpointError(
            f"hadamard_block_size is {config['hadamard_block_size']}: rotated weights are not supported.",
            "Use a checkpoint without rotations.",
        )
    granularity = _granularity(fields)
    has_zero, is_float = bool(config.get("has_zero_point")), bool(config.get("is_fp_zero_point"))
    element = _element(fields["b_dtype"], "b_dtype", unsigned=has_zero and is_float)
    scale = _scale(fields["bs_dtype"], "bs_dtype", BF16)
    if granularity.kind in ("tensor", "block"):
        scale = F32  # whatever the field says
    second = str(fields["weight_scale_2_type"] or "none").lower()
    if second not in ("none", "tensor", "channel"):
        raise CheckpointError(f"weight_scale_2_type is {second!r}.", "Known: none, tensor, channel.")
    global_scale = None if second == "none" else ScaleSpec(F32, TENSOR if second == "tensor" else CHANNEL)
    weight = QuantKey(element, ScaleSpec(scale, granularity), global_scale, symmetric=not has_zero)
    return LinearKey(weight, _activation(fields))


def _activation(fields: Mapping[str, Any]) -> QuantKey | None:
    name, size = fields["a_dtype"], int(fields["input_scale_group_size"] or 0)
    mode = fields["input_quant_mode"]
    if name is None or name in ("float16", "bfloat16"):
        return None
    if mode is None:
        mode = "dynamic_group" if size else "dynamic_token"
    element = _element(name, "a_dtype")
    match str(mode).lower():
        case "none":
            return None
        case "static_tensor":
            return QuantKey(element, ScaleSpec(F32, TENSOR))
        case "dynamic_token":
            return QuantKey(element, ScaleSpec(F32, TOKEN, dynamic=True))
        case "dynamic_group" | "static_tensor_dynamic_group" as grouped if size > 0:
            two_levels = grouped.startswith("static")
            scale = _scale(fields["input_scale_dtype"], "input_scale_dtype", _group_scale(element, two_levels))
            second = ScaleSpec(F32, TENSOR) if two_levels else None
            return QuantKey(element, ScaleSpec(scale, group(size), dynamic=True), second)
    raise CheckpointError(
        f"input_quant_mode is {mode!r} with input_scale_group_size {size}, which is not supported.",
        "Known: none, static_tensor, dynamic_token, dynamic_group, static_tensor_dynamic_group.",
    )


def _group_scale(element: Element, two_levels: bool) -> Element:
    """The scale element of activation groups where the configuration leaves it open."""
    if two_levels:
        return E4M3
    return E8M0 if element == E2M1 else F32


def _field(config: Mapping[str, Any], name: str) -> Any:
    return next((config[alias] for alias in (name, *_ALIASES[name]) if config.get(alias) is not None), None)


def _granularity(fields: Mapping[str, Any]) -> Granularity:
    columns, rows = (int(fields[f"weight_scale_group_size{axis}"] or 0) for axis in ("", "_n"))
    kind = fields["weight_scale_type"]
    if kind is None:
        kind = "block" if rows > 1 else "group" if columns > 0 else "channel"
    match str(kind).lower():
        case "tensor":
            return TENSOR
        case "channel":
            return CHANNEL
        case "group" if columns > 0:
            return group(columns)
        case "group":
            return CHANNEL
        case "block" if columns > 0 and rows > 0:
            return block(rows, columns)
    raise CheckpointError(
        f"weight_scale_type is {kind!r} with groups of {columns} columns and {rows} rows.",
        "Known: tensor, channel, group, block.",
    )


def _element(name: Any, where: str, unsigned: bool = False) -> Element:
    text = str(name).lower().replace("_", "")
    if match := re.fullmatch(r"u?int([2-8])", text):
        return ELEMENTS[f"uint{match[1]}"] if unsigned else integer(int(match[1]))
    if text in FLOATS:
        return ELEMENTS[FLOATS[text]]
    known = [*(f"uint{bits}" for bits in range(2, 9)), *FLOATS]
    raise CheckpointError(f"{where} is {name!r}, which is not supported.", closest(str(name), known))


def _scale(name: Any, where: str, default: Element) -> Element:
    if name is None:
        return default
    text = str(name).lower().removeprefix("torch.").replace("_", "")
    if text not in _SCALE_NAMES:
        raise CheckpointError(f"{where} is {name!r}, which is not supported.", closest(str(name), _SCALE_NAMES))
    return ELEMENTS[_SCALE_NAMES[text]]


def _float_name(element: Element) -> str | None:
    return next((name for name, known in FLOATS.items() if known == element.name), None)


def _scale_name(element: Element) -> str:
    return next(name for name, known in _SCALE_NAMES.items() if known == element.name)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SchemeError(f"The pattern {pattern!r} is no regular expression: {error}.", "Mend it.") from error
