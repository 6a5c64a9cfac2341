"""NVIDIA ModelOpt: `quantization_config`, `hf_quant_config.json` and schemes.

One path leads from an algorithm's name to keys: `resolve`. The nested file {"quantization": {...}} and the flat form in
config.json hold the same under other names (exclude_modules and ignore, kv_cache_quant_algo and kv_cache_scheme).

Sources: nvidia-modelopt 0.47 (`export/convert_hf_config.py`, `export/quant_utils.py`), vLLM 0.33 (`modelopt.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fewbit.checkpoints.config_values import names_under
from fewbit.errors import CheckpointError, closest
from fewbit.spec.element import F32
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.pattern import matches
from fewbit.spec.scheme import Rule, Scheme

VERSION = "0.47.0"
"""Version of ModelOpt whose layout is written."""

MIXED = "MIXED_PRECISION"


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm's name stands for.

    Attributes:
        key: text of its key, `{size}` where the group size of the configuration goes.
        size: group size where the configuration names none; 0 for an algorithm without groups.
        pre_scale: whether its name says that activations may have to be scaled before the layer.
    """

    key: str
    size: int = 0
    pre_scale: bool = False


_NVFP4 = "e2m1:group{size}:e4m3/tensor:f32"
_NVFP4_ACTIVATION = "e2m1:group{size}:e4m3:dynamic/tensor:f32"
_FP8 = "e4m3:tensor:f32"

ALGORITHMS: dict[str, Algorithm] = {
    "FP8": Algorithm(f"{_FP8} * {_FP8}"),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm("e4m3:channel:f32 * e4m3:token:f32:dynamic"),
    "FP8_PB_WO": Algorithm("e4m3:block128x128:f32"),
    "FP8_BLOCK_SCALES": Algorithm("e4m3:block128x128:f32 * e4m3:group128:f32:dynamic"),
    "NVFP4": Algorithm(f"{_NVFP4} * {_NVFP4_ACTIVATION}", 16),
    "NVFP4_AWQ": Algorithm(f"{_NVFP4} * {_NVFP4_ACTIVATION}", 16, pre_scale=True),
    "W4A16_NVFP4": Algorithm(_NVFP4, 16),
    "W4A8_NVFP4_FP8": Algorithm(f"{_NVFP4} * {_FP8}", 16),
    "MXFP8": Algorithm("e4m3:group{size}:e8m0 * e4m3:group{size}:e8m0:dynamic", 32),
    "MXFP4": Algorithm("e2m1:group{size}:e8m0", 32),  # its name leaves open whether activations were quantized too
    "W4A8_MXFP4_FP8": Algorithm("e2m1:group{size}:e8m0 * e4m3:tensor:f32:dynamic", 32),
    "W4A16_AWQ": Algorithm("int4:group{size}:f32", 128, pre_scale=True),
    "W8A16": Algorithm("int8:channel:f32"),
    "W8A8_SQ_PER_CHANNEL": Algorithm("int8:channel:f32 * int8:tensor:f32", pre_scale=True),
}
"""Every algorithm by its name in upper case. Of two with one key, the first is written."""

_UNSUPPORTED = {
    "NVFP4_SVD": "adds a low-rank product to every layer",
    "W4A8_AWQ": "rounds its dequantized int4 weights to FP8 once more",
}
FP8_CACHE = QuantKey.parse(_FP8)
_KV_CACHES = {"FP8": FP8_CACHE, "NVFP4": QuantKey.parse(_NVFP4.format(size=16))}

_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""What the names of a language model's layers start with, alone or inside a multimodal one."""


@dataclass(frozen=True)
class CheckpointContext:
    """What a checkpoint says of a layer beside its keys.

    Attributes:
        algorithm: canonical name.
        group_size: numbers under one scale, 0 for an algorithm without groups.
        pre_scale: see `Algorithm`.
    """

    algorithm: str
    group_size: int
    pre_scale: bool


@dataclass(frozen=True)
class Resolved:
    """A layer's keys and the context in which its tensors are to be read."""

    weight: QuantKey
    activation: QuantKey | None
    context: CheckpointContext

    @property
    def key(self) -> LinearKey:
        return LinearKey(self.weight, self.activation)


def resolve(algorithm: Any, subconfig: Mapping[str, Any], prefix: str) -> Resolved:
    """What an algorithm's name means.

    Args:
        algorithm: the name as written; ModelOpt writes some in lower case.
        subconfig: the object that names it, for its group size and config groups.
        prefix: the module or configuration that asks, for messages.

    Raises:
        CheckpointError: the name or the group size is unknown, or the algorithm is not supported.
    """
    name = str(algorithm).upper()
    if name in _UNSUPPORTED:
        raise CheckpointError(
            f"{prefix} has quant_algo {algorithm!r}, which {_UNSUPPORTED[name]}; that is not supported.",
            f"Supported: {', '.join(ALGORITHMS)}.",
        )
    if not isinstance(algorithm, str) or name not in ALGORITHMS:
        raise CheckpointError(
            f"{prefix} has quant_algo {algorithm!r}; known are {', '.join(ALGORITHMS)} and {MIXED}.",
            closest(name, [*ALGORITHMS, MIXED]),
        )
    found = ALGORITHMS[name]
    size = subconfig.get("group_size") or found.size
    if type(size) is not int or size < 0:
        raise CheckpointError(f"{prefix} has group_size {size!r}, needed a positive number.", "Mend the configuration.")
    key = LinearKey.parse(found.key.format(size=size))
    activation = None if _leaves_activations(subconfig.get("config_groups")) else key.activation
    return Resolved(key.weight, activation, CheckpointContext(name, size if found.size else 0, found.pre_scale))


def context_of(key: LinearKey) -> CheckpointContext | None:
    """The algorithm that is written for a key, whatever float its scales are stored in; None where there is none."""
    weight = key.weight
    wanted = LinearKey(weight.with_scale_element(F32) if weight.scale.element.bits > 8 else weight, key.activation)
    size = weight.granularity.columns if weight.granularity.kind == "group" else 0
    for name, algorithm in ALGORITHMS.items():
        if bool(size) == bool(algorithm.size) and LinearKey.parse(algorithm.key.format(size=size or 1)) == wanted:
            return CheckpointContext(name, size, algorithm.pre_scale)
    return None


def matches_modelopt(pattern: str, name: str, class_name: str = "") -> bool:
    """Whether an entry of exclude_modules, or a name in quantized_layers, means the module.

    fewbit's own rule holds: exact names, parents, globs. Besides, ModelOpt shortens the pair `X`, `X.*` to `X.*`, and
    the names of a multimodal model's language part may be written in either order (`model.language_model`,
    `language_model.model`).
    """
    if matches(pattern, name, class_name) or (pattern.endswith(".*") and name == pattern[:-2]):
        return True
    inner = _unwrapped(pattern)
    if inner == pattern or inner[:1] in "*?[":
        return False
    layer = _unwrapped(name)
    return f"{layer}.".startswith(f"{inner.removesuffix('.*')}.") or fnmatchcase(layer, inner)


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme that either form of the configuration describes.

    Raises:
        CheckpointError: something in it is malformed or not supported, which is named.
    """
    inner = config.get("quantization", config)
    if not isinstance(inner, dict) or "quant_algo" not in inner:
        raise CheckpointError(f"The ModelOpt configuration {inner!r} names no quant_algo.", "The file is malformed.")
    algorithm = inner["quant_algo"]
    if algorithm is None:  # only the KV cache is quantized
        rules: tuple[Rule, ...] = ()
    elif str(algorithm).upper() == MIXED:
        rules = _rules(inner.get("quantized_layers"))
    else:
        rules = (Rule(("Linear",), resolve(algorithm, inner, "The ModelOpt configuration").key),)
    excluded = names_under(inner, "exclude_modules", default=names_under(inner, "ignore"))
    return Scheme(str(algorithm), rules, tuple(excluded), _kv_cache(inner))


def config_of(layers: Mapping[str, CheckpointContext], plain: Sequence[str]) -> dict[str, Any]:
    """The flat `quantization_config` to write: one algorithm, or one for each layer."""
    config = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": VERSION}, "ignore": list(plain)}
    contexts = set(layers.values())
    if len(contexts) == 1:
        return config | _named(contexts.pop())
    return config | {"quant_algo": MIXED, "quantized_layers": {name: _named(found) for name, found in layers.items()}}


def _named(context: CheckpointContext) -> dict[str, Any]:
    named: dict[str, Any] = {"quant_algo": context.algorithm}
    return named | {"group_size": context.group_size} if context.group_size else named


def _rules(layers: Any) -> tuple[Rule, ...]:
    """Rules of a MIXED_PRECISION configuration, names of many segments first: a layer's own beats its parent's."""
    if not isinstance(layers, dict) or not layers:
        raise CheckpointError(f"{MIXED} has quantized_layers {layers!r}, needed an object.", "The file is malformed.")
    found: dict[tuple[int, LinearKey], list[str]] = {}
    for name, subconfig in layers.items():
        if not isinstance(subconfig, dict):
            raise CheckpointError(f"quantized_layers.{name} is {subconfig!r}, needed an object.", "Mend it.")
        key = resolve(subconfig.get("quant_algo"), subconfig, f"quantized_layers.{name}").key
        found.setdefault((-name.count("."), key), []).append(name)
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return tuple(Rule(tuple(names), key) for (_, key), names in ordered)


def _leaves_activations(groups: Any) -> bool:
    """Whether config groups are there and none of them quantizes activations."""
    if not isinstance(groups, dict) or not groups:
        return False
    return not any(isinstance(group, dict) and group.get("input_activations") for group in groups.values())


def _kv_cache(config: Mapping[str, Any]) -> QuantKey | None:
    value = config.get("kv_cache_quant_algo", config.get("kv_cache_scheme"))
    if isinstance(value, dict):
        eight_bit_float = value.get("num_bits") == 8 and value.get("type") == "float"
        value = "FP8" if eight_bit_float else str(value)
    if not isinstance(value, str | None):
        raise CheckpointError(f"kv_cache_quant_algo is {value!r}, needed a name.", "Mend the configuration.")
    if not value:
        return None
    if value.upper() not in _KV_CACHES:
        warnings.warn(f"The KV cache's {value!r} is unknown; it stays in the model's dtype.", UserWarning, stacklevel=2)
    return _KV_CACHES.get(value.upper())


def _unwrapped(name: str) -> str:
    return next((name.removeprefix(wrapper) for wrapper in _WRAPPERS if name.startswith(wrapper)), name)
