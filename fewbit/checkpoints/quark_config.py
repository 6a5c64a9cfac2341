"""AMD Quark: `quantization_config` and schemes.

A layer is described by specs of its weight and of its input: {dtype, qscheme, ch_axis, group_size, block_size,
is_dynamic, symmetric, scale_format, ...}. A list of two specs is a tensor and its scales. Names in layer_quant_config
beat classes in layer_type_quant_config, which beat global_quant_config; exclude beats them all.

Sources: amd-quark 0.13 (`quantization/config/config.py`, `export/main_export/quant_config_parser.py`), vLLM 0.33
(`quark/quark.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fewbit.checkpoints.config_values import names_under
from fewbit.checkpoints.interface import StoredLayer
from fewbit.errors import CheckpointError, OutputError, closest
from fewbit.spec.element import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, F32, Element, integer
from fewbit.spec.granularity import CHANNEL, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.pattern import by_segments, literal_of, matches_compressed_tensors
from fewbit.spec.scheme import Rule, Scheme

VERSION = "0.13"
"""Version of Quark whose layout is written."""

PACK_METHODS = ("reorder", "order")
"""Orders of four-bit codes inside a word, the one that is written first."""

_CACHED = ("*k_proj", "*v_proj")
"""Layers whose output is cached, as `export.kv_cache_group` names them."""

UNSIGNED = "unsigned"
"""Word of a variant: codes and zero points are stored as unsigned numbers."""

_FLOATS = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "fp6_e2m3": E2M3, "fp6_e3m2": E3M2, "fp4": E2M1}
_INTEGERS = {
    f"{sign}int{bits}": integer(bits) for sign, bits in (("", 3), ("", 4), ("", 8), ("u", 2), ("u", 4), ("u", 8))
}
_DTYPES: dict[str, Element] = {**_FLOATS, **_INTEGERS}
_NAMES = {element.name: name for name, element in _FLOATS.items()}


@by_segments(literal_of)
def matches_quark(pattern: str, name: str, class_name: str = "") -> bool:
    """Quark's rule: an exact name, `re:` and an expression that matches from the start, a glob; or a class name."""
    if pattern.startswith("re:"):
        return matches_compressed_tensors(pattern, name, class_name)
    return bool(pattern) and (pattern in (name, class_name) or fnmatchcase(name, pattern))


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` describes; scales are bf16 where the model's dtype decides.

    Its variant is the pack method, after the word `unsigned` where weights with zero points are unsigned.

    Raises:
        CheckpointError: something in it is malformed or not supported, which is named.
    """
    export = _object(config.get("export"), "export")
    pack_method = export.get("pack_method", PACK_METHODS[0])
    if pack_method not in PACK_METHODS:
        raise CheckpointError(f"export.pack_method is {pack_method!r}.", f"Known: {', '.join(PACK_METHODS)}.")
    if config.get("softmax_quant_spec"):
        raise CheckpointError("softmax_quant_spec (quantized attention) is not supported.", "Quantize without it.")
    ignore = names_under(config, "exclude")
    cached = names_under(export, "kv_cache_group")
    rules, kv_cache, signs = [], None, set()
    for targets, where, layer in _layers(config):
        of_cache = where.startswith("kv_cache_quant_config") or any(target in cached for target in targets)
        kv_cache = _output(layer, where, of_cache) or kv_cache
        if where.startswith("kv_cache_quant_config"):
            continue
        key = _linear_key(layer, where)
        if key is None:
            ignore += targets
            continue
        rules.append(Rule(tuple(targets), key))
        signs |= _signs(layer["weight"], key)
    if len(signs) > 1:
        raise CheckpointError(
            "int4 and uint4 weights with zero points are mixed, and nothing in the file tells them apart.",
            "Quantize all of them to one of the two.",
        )
    variant = " ".join([*signs - {""}, pack_method])
    return Scheme("quark", tuple(rules), tuple(dict.fromkeys(ignore)), kv_cache, variant)


def config_of(layers: Mapping[str, StoredLayer], plain: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` to write: the most frequent key for all, the others by their layers' names."""
    described = {name: _layer(stored) for name, stored in layers.items()}
    most = Counter(layers.values()).most_common(1)
    usual = _layer(most[0][0]) if most else _EMPTY
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": VERSION,
        "global_quant_config": usual,
        "layer_quant_config": {name: layer for name, layer in described.items() if layer != usual},
        "layer_type_quant_config": {},
        "exclude": list(plain),
        "algo_config": None,
        "softmax_quant_spec": None,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": PACK_METHODS[0],
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def with_cache_of(config: Mapping[str, Any], key: QuantKey) -> dict[str, Any]:
    """`config` with the KV cache that k_proj and v_proj put out, as their layers' output.

    Raises:
        OutputError: the format cannot describe the key, or not beside what k_proj and v_proj are.
    """
    if key.granularity != TENSOR or key.global_scale or key.element.name not in _NAMES or not key.symmetric:
        raise OutputError(
            f"quark describes KV caches with one scale for the tensor of FP8 numbers, found {key}.",
            "Choose another key for the KV cache, or leave it unquantized.",
        )
    named = config.get("layer_quant_config", {})
    apart = [name for name in named if name.rpartition(".")[2] in ("k_proj", "v_proj")]
    if apart:
        raise OutputError(
            f"quark describes a KV cache of {key} beside one key for all k_proj and v_proj; {apart[0]} has its own.",
            "Quantize all of them alike, or leave the KV cache unquantized.",
        )
    usual = config.get("global_quant_config", _EMPTY) | {"output_tensors": _specs(key, False, of_weight=False)}
    export = config.get("export", {}) | {"kv_cache_group": list(_CACHED)}
    return {**config, "layer_quant_config": {**named, **dict.fromkeys(_CACHED, usual)}, "export": export}


# --- reading ---------------------------------------------------------------------------------------------------------


def _layers(config: Mapping[str, Any]) -> Iterator[tuple[list[str], str, dict[str, Any]]]:
    """(targets, where it stands, layer configuration) in order of priority."""
    for place in ("kv_cache_quant_config", "layer_quant_config", "layer_type_quant_config"):
        for name, layer in _object(config.get(place), place).items():
            yield [name], f"{place}.{name}", _object(layer, f"{place}.{name}")
    usual = config.get("global_quant_config")
    if usual is not None:
        yield ["Linear"], "global_quant_config", _object(usual, "global_quant_config")


def _linear_key(layer: Mapping[str, Any], where: str) -> LinearKey | None:
    """The key of a layer configuration, None where its weight is not quantized."""
    if layer.get("bias"):
        raise CheckpointError(f"{where}.bias is quantized, which is not supported.", "Leave biases as they are.")
    if not layer.get("weight"):
        return None
    activation = layer.get("input_tensors")
    return LinearKey(
        _key(layer["weight"], f"{where}.weight", BF16, of_weight=True),
        _key(activation, f"{where}.input_tensors", F32, of_weight=False) if activation else None,
    )


def _output(layer: Mapping[str, Any], where: str, of_cache: bool) -> QuantKey | None:
    """The key of the KV cache that the outputs of its projections show."""
    if not layer.get("output_tensors"):
        return None
    if not of_cache:
        raise CheckpointError(
            f"{where}.output_tensors are quantized, which is supported for the KV cache only.",
            "List the module in export.kv_cache_group, or leave its output as it is.",
        )
    return _key(layer["output_tensors"], f"{where}.output_tensors", F32, of_weight=False)


def _signs(weight: Any, key: LinearKey) -> set[str]:
    """What four-bit codes with zero points say of the signedness that their words do not show."""
    if key.weight.symmetric or key.weight.element.bits != 4:
        return set()
    return {UNSIGNED if _stages(weight)[0]["dtype"] == "uint4" else ""}


def _key(value: Any, where: str, scale_element: Element, of_weight: bool) -> QuantKey:
    """The key that one spec, or a spec and one of its scales, describes."""
    stages = _stages(value)
    if not 1 <= len(stages) <= 2:
        raise CheckpointError(f"{where} has {len(stages)} stages, needed one, or two for scales of scales.", "Mend it.")
    first = _object(stages[0], where)
    element, granularity = _element(first, where, of_weight), _granularity(first, where, of_weight)
    dynamic = bool(first.get("is_dynamic"))
    if len(stages) == 2:
        second = _object(stages[1], f"{where}[1]")
        if second.get("dtype") != "fp8_e4m3" or second.get("qscheme") != "per_tensor" or element != E2M1:
            raise CheckpointError(
                f"{where} is {first.get('dtype')} over {second.get('qscheme')} {second.get('dtype')}, which is not "
                "supported.",
                "Of two stages, fp4 with per_tensor fp8_e4m3 scales (NVFP4) is.",
            )
        outer = ScaleSpec(F32, TENSOR, dynamic and bool(second.get("is_dynamic")))
        return QuantKey(element, ScaleSpec(E4M3, granularity, dynamic), outer)
    scale_format = first.get("scale_format")
    if scale_format not in (None, "float32", "e8m0"):
        raise CheckpointError(f"{where}.scale_format is {scale_format!r}, which is not supported.", "Known: e8m0.")
    stored = E8M0 if scale_format == "e8m0" else scale_element
    symmetric = _is_symmetric(first, element, of_weight)
    if not symmetric and first.get("zero_point_type") == "float32":
        raise CheckpointError(
            f"{where} has float32 zero points, which are not supported.", "Quantize with integer zero points."
        )
    return QuantKey(element, ScaleSpec(stored, granularity, dynamic), symmetric=symmetric)


def _is_symmetric(spec: Mapping[str, Any], element: Element, of_weight: bool) -> bool:
    """Null means no for integers. Unsigned weights have zero points that count even when they are all in the middle."""
    if not element.is_integer:
        return True
    return spec.get("symmetric") is True and not (of_weight and str(spec["dtype"]).startswith("u"))


def _element(spec: Mapping[str, Any], where: str, of_weight: bool) -> Element:
    dtype = spec.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        hint = "Write it again with a current Quark." if dtype == "mx" else closest(str(dtype), _DTYPES)
        raise CheckpointError(f"{where}.dtype is {dtype!r}, which is not supported.", hint)
    if not of_weight and dtype.startswith("u"):
        raise CheckpointError(f"{where}.dtype is {dtype!r}: activations must be signed.", "Quantize them to int8.")
    return _DTYPES[dtype]


def _granularity(spec: Mapping[str, Any], where: str, of_weight: bool) -> Granularity:
    """Of weights [N, K] and activations [tokens, K], whose channels are tokens."""
    axis, size, extents = spec.get("ch_axis", spec.get("axis")), spec.get("group_size"), spec.get("block_size")
    match spec.get("qscheme"):
        case "per_tensor":
            return TENSOR
        case "per_channel" if of_weight and axis in (0, None):
            return CHANNEL
        case "per_channel" | "per_token" if not of_weight and spec.get("is_dynamic"):
            return TOKEN
        case "per_group" if type(size) is int and size > 0 and axis in (1, -1, None):
            return group(size)
        case "per_block" if isinstance(extents, list | tuple) and len(extents) == 2:
            if all(type(extent) is int and extent > 0 for extent in extents):
                return block(*extents) if of_weight or extents[0] != 1 else group(extents[1])
    raise CheckpointError(
        f"{where} is {spec.get('qscheme')!r} with ch_axis {axis!r}, group_size {size!r}, block_size {extents!r}, "
        f"{'dynamic' if spec.get('is_dynamic') else 'static'}; that is not supported.",
        "Known: per_tensor; per_channel over rows; per_group along the input; per_block with a block_size.",
    )


def _stages(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {value!r}, needed an object.", "The configuration is malformed.")
    return value


# --- writing ---------------------------------------------------------------------------------------------------------

_EMPTY: dict[str, Any] = {
    "weight": None,
    "input_tensors": None,
    "output_tensors": None,
    "bias": None,
    "target_device": None,
}


def _layer(stored: StoredLayer) -> dict[str, Any]:
    activation = stored.key.activation
    unsigned = UNSIGNED in stored.variant.split()
    specs = {
        "weight": _specs(stored.key.weight, unsigned, of_weight=True),
        "input_tensors": _specs(activation, unsigned=False, of_weight=False) if activation else None,
    }
    return _EMPTY | specs


def _specs(key: QuantKey, unsigned: bool, of_weight: bool) -> dict[str, Any] | list[dict[str, Any]]:
    integral = key.element.is_integer
    name = f"{'u' if unsigned else ''}{key.element}" if integral else _NAMES[key.element.name]
    spec = _spec(name, key.scale, of_weight) | {"symmetric": key.symmetric if integral else None}
    if key.global_scale is None:
        return spec
    return [spec, _spec("fp8_e4m3", key.global_scale, of_weight) | {"is_scale_quant": True, "symmetric": True}]


def _spec(dtype: str, scale: ScaleSpec, of_weight: bool) -> dict[str, Any]:
    granularity = scale.granularity
    qscheme = {"tensor": "per_tensor", "group": "per_group", "block": "per_block"}.get(granularity.kind, "per_channel")
    axis = {"per_channel": 0 if of_weight else 1, "per_group": -1}.get(qscheme)
    exponents = scale.element == E8M0
    return {
        "dtype": dtype,
        "is_dynamic": scale.dynamic,
        "qscheme": qscheme,
        "ch_axis": axis,
        "group_size": granularity.columns if granularity.kind == "group" else None,
        "block_size": [granularity.rows, granularity.columns] if granularity.kind == "block" else None,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": "e8m0" if exponents else None,
        "scale_calculation_mode": "even" if exponents else None,
        "mx_element_dtype": None,
        "is_scale_quant": False,
        "zero_point_type": "int32",
    }
