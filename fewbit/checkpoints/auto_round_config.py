"""AutoRound / Intel INC: what the settings of a layer mean, and `quantization_config`.

A layer's settings are AutoRound's own `QuantizationScheme` (0.16.1): bits, group_size, sym, data_type and the same with
`act_` for activations. `extra_config` changes them for the modules it names: a whole name before the end of one, and
both before a regular expression, which may match anywhere; 16 bits or more mean that a module stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fewbit.checkpoints.config_values import first_given, granularity_of, integer_of, typed
from fewbit.errors import CheckpointError, SchemeError, closest
from fewbit.spec.element import E2M1, E2M3, E4M3, E8M0, F16, F32
from fewbit.spec.granularity import CHANNEL, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.pattern import by_segments
from fewbit.spec.scheme import Rule, Scheme

PACKINGS = {
    "auto_round:auto_gptq": "gptq/gptq",
    "auto_round:gptq": "gptq/gptq",
    "auto_round:auto_awq": "awq/gemm",
    "auto_round:awq": "awq/gemm",
    "auto_round": "gptq/gptq_v2",
    "auto_round:gptqmodel": "gptq/gptq_v2",
    "auto_round:fp8": "fp8/",
    "auto_round:fp8_static": "fp8/",
    "auto_round:llm_compressor": "compressed-tensors/",
}
"""packing_format -> the format that stores the layers, and which of its variants; the first of each is written."""

DEFAULT_PACKING = "auto_round:auto_gptq"

_NVFP4 = QuantKey(E2M1, ScaleSpec(E4M3, group(16)), ScaleSpec(F32, TENSOR))
_MX_ELEMENTS = {4: E2M1, 6: E2M3, 8: E4M3}
_REGEX_SIGNS = set("*+?^$()[]{}|\\")
_LAYER_SETTINGS = (
    "bits",
    "group_size",
    "sym",
    "data_type",
    "act_bits",
    "act_group_size",
    "act_sym",
    "act_data_type",
    "act_dynamic",
    "super_bits",
    "super_group_size",
)
_PLAIN_BITS = 16


@by_segments(lambda pattern: None if _REGEX_SIGNS & {*pattern} else pattern)
def matches_auto_round(pattern: str, name: str, class_name: str = "") -> bool:
    """AutoRound's rule: a whole name, its last segments, a regular expression found anywhere in it, or the class."""
    if not _REGEX_SIGNS & {*pattern}:
        return pattern == class_name or f".{name}".endswith(f".{pattern}")
    return _expression(pattern).search(name) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SchemeError(f"The pattern {pattern!r} is no regular expression: {error}.", "Mend it.") from error


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` describes; scales are f16 where the file decides.

    Raises:
        CheckpointError: something in it is malformed or not supported, which is named.
    """
    packing = _packing(config)
    if config.get("rotation_config"):
        raise CheckpointError("rotation_config asks for rotations, which fewbit does not run yet.", "Do without them.")
    if str(config.get("fmt") or "e4m3").lower() != "e4m3":
        raise CheckpointError(f"fmt is {config['fmt']!r}, which is not supported.", "Needed: 'e4m3'.")
    base = {name: config[name] for name in _LAYER_SETTINGS if config.get(name) is not None}
    rules = []
    extra = typed(config.get("extra_config") or {}, dict, "extra_config")
    for pattern in sorted(extra, key=_precedence):
        changes = typed(extra[pattern], dict, f"extra_config[{pattern!r}]")
        given = {name: changes[name] for name in _LAYER_SETTINGS if changes.get(name) is not None}
        rules.append(Rule((pattern,), key_of(base | given, f"extra_config[{pattern!r}]")))
    key = key_of(base, "the configuration")
    blocks = _blocks(first_given(config, "block_name_to_quantize", "to_quant_block_names"))
    if blocks:
        rules.append(Rule(tuple(rf"^{re.escape(name)}(?:\.|$)" for name in blocks), key))
    else:
        rules += [Rule(("lm_head",), None), Rule(("Linear",), key)]
    return Scheme("auto-round", tuple(rules), (), variant=PACKINGS[packing])


def config_of(layers: Mapping[str, LinearKey], plain: Sequence[str], packing: str) -> dict[str, Any]:
    """The `quantization_config` to write: the settings of most layers, and what the others change by their names."""
    base = Counter(layers.values()).most_common(1)[0][0]
    extra: dict[str, dict[str, Any]] = {
        name: settings_of(key) for name, key in layers.items() if key != base or name.endswith("lm_head")
    }
    extra |= {name: {"bits": _PLAIN_BITS, "data_type": "float"} for name in plain if name != "lm_head"}
    config = {"quant_method": "auto-round", "packing_format": packing, **settings_of(base)}
    return {**config, "extra_config": extra} if extra else config


def key_of(settings: Mapping[str, Any], where: str) -> LinearKey | None:
    """The key of a layer's settings, or None for a layer that stays as it is.

    Raises:
        CheckpointError: they are malformed or not supported.
    """
    bits = typed(settings.get("bits", 4), int, f"bits of {where}")
    if bits >= _PLAIN_BITS:
        return None
    if settings.get("super_bits") is not None:
        raise CheckpointError(
            f"{where} has scales of scales (super_bits), which this format cannot store.", "Use GGUF."
        )
    data_type = str(settings.get("data_type", "int")).lower()
    symmetric = typed(settings.get("sym", True), bool, f"sym of {where}")
    size = settings.get("group_size", 128)
    weight = _key(data_type, bits, symmetric, size, f"{where}", weight=True)
    return LinearKey(weight, _activation(settings, data_type, symmetric, where))


def settings_of(key: LinearKey) -> dict[str, Any]:
    """The inverse of `key_of`, as far as a key can be said; callers compare."""
    weight, activation = key.weight, key.activation
    settings = {
        "bits": weight.element.bits,
        "group_size": _group_size(weight.granularity),
        "sym": weight.symmetric,
        "data_type": _data_type(weight),
    }
    if activation is None:
        return settings
    static = "_with_static_gs" if activation.global_scale and not activation.global_scale.dynamic else ""
    return settings | {
        "act_bits": activation.element.bits,
        "act_group_size": _group_size(activation.granularity),
        "act_sym": activation.symmetric,
        "act_data_type": f"nv_fp4{static}" if activation.global_scale else _data_type(activation),
        "act_dynamic": activation.is_dynamic,
    }


def _activation(settings: Mapping[str, Any], data_type: str, symmetric: bool, where: str) -> QuantKey | None:
    bits = settings.get("act_bits")
    if bits is None or typed(bits, int, f"act_bits of {where}") >= _PLAIN_BITS:
        return None
    kind = str(settings.get("act_data_type", data_type)).lower()
    symmetric = typed(settings.get("act_sym", symmetric), bool, f"act_sym of {where}")
    dynamic = typed(settings.get("act_dynamic", True), bool, f"act_dynamic of {where}")
    size = settings.get("act_group_size", -1)
    key = _key(kind, bits, symmetric, size, f"the activations of {where}", weight=False)
    if key.global_scale is not None:
        first = replace(key.scale, dynamic=dynamic)
        return replace(key, scale=first, global_scale=ScaleSpec(F32, TENSOR, dynamic and "static_gs" not in kind))
    if not dynamic and ("int" in data_type or key.granularity != TENSOR):
        raise CheckpointError(
            f"The activations of {where} have static scales ({kind}, group {size}), which AutoRound has no place for.",
            "Quantize again with act_dynamic.",
        )
    return replace(key, scale=replace(key.scale, dynamic=dynamic))


def _key(data_type: str, bits: int, symmetric: bool, size: Any, where: str, *, weight: bool) -> QuantKey:
    """The static key of numbers of a data type; its names are composed, so parts of them decide."""
    if "e5m3" in data_type or "e5m2" in data_type or "e3m2" in data_type or "mx_int" in data_type:
        raise CheckpointError(
            f"{where} has data_type {data_type!r}, which is not supported.", "Known: int, fp (e4m3), mx_fp, nv_fp."
        )
    if "mx_fp" in data_type and bits in _MX_ELEMENTS:
        _require_group(size, 32, data_type, where)
        return QuantKey(_MX_ELEMENTS[bits], ScaleSpec(E8M0, group(32)))
    if ("nv_fp" in data_type or "nvfp" in data_type) and bits == 4:
        _require_group(size, 16, data_type, where)
        return _NVFP4
    scale = F16 if weight and "int" in data_type else F32
    granularity = _granularity(size, where) if weight else _activation_granularity(size, where)
    if "fp" in data_type and bits == 8:
        return QuantKey(E4M3, ScaleSpec(scale, granularity))
    if "int" in data_type:
        return QuantKey(integer_of(bits, f"bits of {where}"), ScaleSpec(scale, granularity), symmetric=symmetric)
    raise CheckpointError(
        f"{where} has {bits}-bit numbers of data_type {data_type!r}, which is not supported.",
        "Known: int of 2 to 8 bits, fp of 8, mx_fp of 4, 6 or 8, nv_fp of 4.",
    )


def _granularity(size: Any, where: str) -> Granularity:
    if isinstance(size, list):
        if len(size) == 2 and all(type(extent) is int and extent > 0 for extent in size):
            return block(*size)
        raise CheckpointError(f"group_size of {where} is {size!r}.", "Needed: a number, or [rows, columns].")
    return TENSOR if size == 0 else granularity_of(size, f"group_size of {where}")


def _activation_granularity(size: Any, where: str) -> Granularity:
    found = _granularity(size, where)
    return TOKEN if found == CHANNEL else found


def _group_size(granularity: Granularity) -> int | list[int]:
    if granularity.kind == "block":
        return [granularity.rows, granularity.columns]
    return 0 if granularity == TENSOR else granularity.columns or -1


def _data_type(key: QuantKey) -> str:
    if key.global_scale:
        return "nv_fp"
    if key.scale.element == E8M0:
        return "mx_fp"
    return "int" if key.element.is_integer else "fp"


def _require_group(size: Any, needed: int, data_type: str, where: str) -> None:
    if size != needed:
        raise CheckpointError(f"{where} has {data_type} in groups of {size!r}, needed {needed}.", "It is malformed.")


def _packing(config: Mapping[str, Any]) -> str:
    """packing_format, or what stood for it before: `backend` named a kernel behind the layout."""
    named = config.get("packing_format")
    if named is None and str(config.get("backend")).startswith("auto_round"):
        named = next((name for name in PACKINGS if name != "auto_round" and name in config["backend"]), "auto_round")
    packing = str(named or DEFAULT_PACKING).lower()
    if packing not in PACKINGS:
        raise CheckpointError(f"packing_format is {packing!r}, which is not supported.", closest(packing, PACKINGS))
    return packing


def _precedence(pattern: str) -> tuple[bool, int]:
    """Names before regular expressions, the longest name first: a whole name is longer than any end of it."""
    is_regex = bool(_REGEX_SIGNS & {*pattern})
    return is_regex, 0 if is_regex else -pattern.count(".")


def _blocks(value: Any) -> list[str]:
    """block_name_to_quantize: names with commas between them, or a list of names or of lists of names."""
    if isinstance(value, list):
        return [name for item in value for name in _blocks(item)]
    return [name.strip() for name in typed(value or "", str, "block_name_to_quantize").split(",") if name.strip()]
