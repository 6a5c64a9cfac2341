"""compressed-tensors (llm-compressor): `quantization_config` and schemes.

Reading knows every argument of the library's QuantizationArgs and names what it does not support; writing gives what
the library (0.20.1) validates, which forbids unknown arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.checkpoints.config_values import integer_of, strings, typed
from fewbit.checkpoints.interface import StoredLayer
from fewbit.errors import CheckpointError, OutputError, closest
from fewbit.spec.element import BF16, E2M1, E2M3, E4M3, E8M0, F16, F32, Element
from fewbit.spec.granularity import CHANNEL, HEAD, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.scheme import Rule, Scheme

VERSION = "0.20.1"
"""Version of compressed-tensors whose layout is written."""

FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")

_ARGUMENTS = (
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
)
_FLOATS = {4: E2M1, 6: E2M3, 8: E4M3}
_SCALE_DTYPES = {
    "uint8": E8M0,
    "float8_e8m0fnu": E8M0,
    "float8_e4m3fn": E4M3,
    "float16": F16,
    "bfloat16": BF16,
    "float32": F32,
}

_WEIGHT_ONLY = {
    **{f"W{bits}A16": f"int{bits}:group128:bf16" for bits in range(2, 9)},
    "W4A16_ASYM": "int4:asym:group128:bf16",
    "NVFP4A16": "e2m1:group16:e4m3/tensor:f32",
    "MXFP4A16": "e2m1:group32:e8m0",
    "MXFP6A16": "e2m3:group32:e8m0",
    "MXFP8A16": "e4m3:group32:e8m0",
}
_MXFP8_ACTIVATION = "e4m3:group32:e8m0:dynamic"
_PRESETS = {
    **_WEIGHT_ONLY,
    **{
        f"W{bits}A{narrow}": f"int{bits}:group128:bf16 * int{narrow}:token:f32:dynamic"
        for narrow in (4, 8)
        for bits in range(2, narrow + 1)
    },
    "W8A8": "int8:channel:bf16 * int8:token:f32:dynamic",
    "INT8": "int8:channel:bf16 * int8:token:f32:dynamic",
    "W4AFP8": "int4:group128:bf16 * e4m3:token:f32:dynamic",
    "FP8": "e4m3:tensor:bf16 * e4m3:tensor:f32",
    "FP8_DYNAMIC": "e4m3:channel:bf16 * e4m3:token:f32:dynamic",
    "FP8_BLOCK": "e4m3:block128x128:bf16 * e4m3:group128:f32:dynamic",
    "NVFP4": f"{_WEIGHT_ONLY['NVFP4A16']} * e2m1:group16:e4m3:dynamic/tensor:f32",
    "MXFP4": f"{_WEIGHT_ONLY['MXFP4A16']} * e2m1:group32:e8m0:dynamic",
    "MXFP4XFP8": f"{_WEIGHT_ONLY['MXFP4A16']} * e4m3:group128:f32:dynamic",
    "MXFP6A8": f"{_WEIGHT_ONLY['MXFP6A16']} * {_MXFP8_ACTIVATION}",
    "MXFP8": f"{_WEIGHT_ONLY['MXFP8A16']} * {_MXFP8_ACTIVATION}",
}
"""The library's own presets, which a group may name instead of describing; W8A16 has groups there."""


_PER_HEAD = "attn_head"


class SparsityRemovedError(CheckpointError, DeprecationWarning):
    """Sparse checkpoints: compressed-tensors removed the format, and nothing runs it any more."""


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` describes; scales are bf16 where the model's dtype decides.

    Raises:
        CheckpointError: something in it is malformed or not supported, which is named.
    """
    _refuse_sparsity(config)
    _format(config.get("format"), "format")
    if config.get("moe_sparsity_config"):
        raise CheckpointError("moe_sparsity_config (pruned experts) is not supported.", "Use the unpruned checkpoint.")
    groups = typed(config.get("config_groups", {}), dict, "config_groups")
    keyed = [
        (strings(targets, f"config_groups.{name}"), key)
        for name, value in groups.items()
        for targets, key in _group(name, value)
    ]
    return Scheme(
        str(config.get("format") or "compressed-tensors"),
        _most_specific_first(keyed),
        tuple(strings(config.get("ignore") or [], "ignore")),
        _kv_cache(config.get("kv_cache_scheme")),
    )


def config_of(layers: Mapping[str, StoredLayer], plain: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` to write: one group for each key, by class where there is one key, else by names."""
    names: dict[StoredLayer, list[str]] = {}
    for name, stored in layers.items():
        names.setdefault(stored, []).append(name)
    groups = {
        f"group_{index}": {
            "targets": ["Linear"] if len(names) == 1 else targets,
            "weights": _arguments(stored.key.weight),
            "input_activations": _arguments(stored.key.activation) if stored.key.activation else None,
            "output_activations": None,
            "format": stored.variant,
        }
        for index, (stored, targets) in enumerate(names.items())
    }
    variants = sorted({stored.variant for stored in names})
    return {
        "quant_method": "compressed-tensors",
        "format": variants[0] if len(variants) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plain),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def kv_cache_scheme_of(key: QuantKey) -> dict[str, Any]:
    """The `kv_cache_scheme` to write.

    Raises:
        OutputError: the format cannot describe it.
    """
    if not _is_of_cache(key):
        raise OutputError(
            f"compressed-tensors describes KV caches with one scale for the tensor or each head, found {key}.",
            "Choose another key for the KV cache, or leave it unquantized.",
        )
    return _arguments(key) | ({"strategy": _PER_HEAD} if key.granularity == HEAD else {})


def _kv_cache(value: Any) -> QuantKey | None:
    """The key of cached keys and values, [heads, tokens, head size]."""
    if not value:
        return None
    args = typed(value, dict, "kv_cache_scheme")
    per_head = args.get("strategy") == _PER_HEAD
    key = _key(args | ({"strategy": "tensor"} if per_head else {}), "kv_cache_scheme", F32)
    key = key.with_granularity(HEAD) if per_head else key
    if not _is_of_cache(key):
        raise CheckpointError(
            f"kv_cache_scheme has strategy {args.get('strategy')!r}, which is not supported.",
            f"Known: tensor, {_PER_HEAD}.",
        )
    return key


def _is_of_cache(key: QuantKey) -> bool:
    return key.granularity in (TENSOR, HEAD) and key.global_scale is None


def _group(name: str, value: Any) -> list[tuple[Any, LinearKey]]:
    """(targets, key) of a config group; empty for groups that quantize no linear layer's weight."""
    where = f"config_groups.{name}"
    if isinstance(value, list):
        return [] if name.upper() == "UNQUANTIZED" else [(value, _preset(name))]
    value = typed(value, dict, where)
    targets = strings(value.get("targets", []), f"{where}.targets")
    if targets and all(target.endswith("Attention") for target in targets):
        return []
    _format(value.get("format"), f"{where}.format")
    if value.get("output_activations"):
        raise CheckpointError(
            f"{where}.output_activations is not supported: only weights and input activations are.",
            "Describe a quantized KV cache by kv_cache_scheme.",
        )
    if value.get("weights") is None:
        raise CheckpointError(f"{where} quantizes no weights.", "Describe them, or remove the group.")
    activation = value.get("input_activations")
    return [
        (
            targets,
            LinearKey(
                _key(value["weights"], f"{where}.weights", BF16),
                _key(activation, f"{where}.input_activations", F32) if activation is not None else None,
            ),
        )
    ]


def _preset(name: str) -> LinearKey:
    if name.upper() not in _PRESETS:
        raise CheckpointError(f"config_groups names an unknown preset {name!r}.", closest(name, _PRESETS))
    return LinearKey.parse(_PRESETS[name.upper()])


def _key(value: Any, where: str, scale_element: Element) -> QuantKey:
    """The key that QuantizationArgs describe; `scale_element` is used where the model's dtype decides."""
    args = typed(value, dict, where)
    for name in args:
        if name not in _ARGUMENTS:
            raise CheckpointError(f"{where} has an unknown argument {name!r}.", closest(name, _ARGUMENTS))
    granularity, two_levels = _granularity(args, where)
    element = _element(args, where)
    dynamic = args.get("dynamic", False)
    if dynamic not in (True, False, "local"):
        raise CheckpointError(f"{where}.dynamic is {dynamic!r}.", 'Known: true, false, "local".')
    symmetric = typed(args.get("symmetric", True), bool, f"{where}.symmetric")
    if two_levels:
        first = ScaleSpec(_scale_element(args, where) or E4M3, granularity, bool(dynamic))
        return QuantKey(element, first, ScaleSpec(F32, TENSOR, dynamic is True), symmetric)
    microscaled = element in (E2M1, E2M3)
    stored = _scale_element(args, where) or (E8M0 if microscaled else scale_element)
    return QuantKey(element, ScaleSpec(stored, granularity, bool(dynamic)), symmetric=symmetric)


def _element(args: Mapping[str, Any], where: str) -> Element:
    bits, kind = typed(args.get("num_bits", 8), int, f"{where}.num_bits"), str(args.get("type", "int")).lower()
    if kind == "int":
        return integer_of(bits, where)
    if kind != "float" or bits not in _FLOATS:
        raise CheckpointError(f"{where} has {bits}-bit {kind!r} numbers.", "Known: int of 2 to 8, float of 4, 6 or 8.")
    return _FLOATS[bits]


def _granularity(args: Mapping[str, Any], where: str) -> tuple[Granularity, bool]:
    """Granularity of the first-level scales, and whether there is a second level (strategy tensor_group)."""
    size = args.get("group_size")
    size = None if size in (None, -1) else typed(size, int, f"{where}.group_size")
    strategy = args.get("strategy")
    if strategy is None:
        unset = "channel" if args.get("group_size") == -1 else "tensor"
        strategy = "group" if size else unset
    match str(strategy).lower():
        case "tensor":
            return TENSOR, False
        case "channel":
            return CHANNEL, False
        case "token":
            return TOKEN, False
        case "group" | "tensor_group" as name if size and size > 0:
            return group(size), name == "tensor_group"
        case "group" if not size:  # group_size -1 or null beside it: one group is the whole row
            return CHANNEL, False
        case "block":
            return block(*_block_structure(args.get("block_structure"), where)), False
    raise CheckpointError(
        f"{where} has strategy {strategy!r} with group_size {args.get('group_size')!r}, which is not supported.",
        "Known: tensor, channel, token, group, tensor_group, block.",
    )


def _block_structure(value: Any, where: str) -> tuple[int, int]:
    parts = value.split("x") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(parts) == 2 and all(str(part).isdecimal() for part in parts):
        rows, columns = (int(part) for part in parts)
        if rows and columns:
            return rows, columns
    raise CheckpointError(f"{where}.block_structure is {value!r}.", "Needed: [rows, columns].")


def _scale_element(args: Mapping[str, Any], where: str) -> Element | None:
    dtype = args.get("scale_dtype")
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _SCALE_DTYPES:
        raise CheckpointError(f"{where}.scale_dtype is {dtype!r}.", closest(name, _SCALE_DTYPES))
    return _SCALE_DTYPES[name]


def _arguments(key: QuantKey) -> dict[str, Any]:
    """QuantizationArgs of a key; the inverse of `_key`, but the file alone says whether scales are f16, bf16 or f32."""
    granularity = key.granularity
    args: dict[str, Any] = {
        "num_bits": key.element.bits,
        "type": "int" if key.element.is_integer else "float",
        "symmetric": key.symmetric,
        "strategy": "tensor_group" if key.global_scale else granularity.kind,
        "group_size": granularity.columns if granularity.kind == "group" else None,
        "dynamic": key.is_dynamic,
    }
    if key.is_dynamic and key.global_scale and not key.global_scale.dynamic:
        args["dynamic"] = "local"
    if granularity.kind == "block":
        args["block_structure"] = [granularity.rows, granularity.columns]
    if key.scale.element.bits == 8:
        args["scale_dtype"] = "torch.uint8" if key.scale.element == E8M0 else "torch.float8_e4m3fn"
    if not key.symmetric:
        args["zp_dtype"] = "torch.int8"
    return args


def _most_specific_first(groups: Sequence[tuple[Sequence[str], LinearKey]]) -> tuple[Rule, ...]:
    """Rules in the library's order: exact names, then regular expressions by their text, then classes."""
    names = [Rule(found, key) for targets, key in groups if (found := _of_kind(targets, "name"))]
    classes = [Rule(found, key) for targets, key in groups if (found := _of_kind(targets, "class"))]
    expressions = sorted(
        (target, index) for index, (targets, _) in enumerate(groups) for target in _of_kind(targets, "re")
    )
    return (*names, *(Rule((target,), groups[index][1]) for target, index in expressions), *classes)


def _of_kind(targets: Sequence[str], kind: str) -> tuple[str, ...]:
    def kind_of(target: str) -> str:
        if target.startswith("re:"):
            return "re"
        return "class" if target[:1].isupper() and "." not in target else "name"

    return tuple(target for target in targets if kind_of(target) == kind)


def _refuse_sparsity(config: Mapping[str, Any]) -> None:
    sparsity = typed(config.get("sparsity_config") or {}, dict, "sparsity_config")
    formats = [config.get("format"), *_group_formats(config), sparsity.get("format")]
    found = next((name for name in formats if name in _SPARSE_FORMATS), None)
    if found is None and (sparsity.get("format", "dense") != "dense" or sparsity.get("targets")):
        found = sparsity.get("format", "sparse targets")
    if found:
        raise SparsityRemovedError(
            f"The checkpoint is sparse ({found}), and compressed-tensors has removed sparsity.",
            "Use a checkpoint without a sparsity configuration.",
        )


def _group_formats(config: Mapping[str, Any]) -> list[Any]:
    groups = config.get("config_groups") or {}
    values = groups.values() if isinstance(groups, dict) else []
    return [value.get("format") for value in values if isinstance(value, dict)]


def _format(name: Any, where: str) -> None:
    if name is not None and name not in FORMATS:
        raise CheckpointError(f"{where} is {name!r}, which is not supported.", closest(str(name), FORMATS))
