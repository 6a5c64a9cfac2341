"""GPTQ (AutoGPTQ, GPTQModel, optimum, and AutoRound's export under the same name).

    qweight    int32 [ceil(K*b/32), N] along K
    qzeros     int32 [ceil(K/g), ceil(N*b/32)] along N
    scales     float [ceil(K/g), N]
    g_idx      int32 [K], the group of each input feature; nothing but k // g without act-order

Variants are versions, `checkpoint_format` on disk:

    gptq       (v1) dense words, zero points minus one modulo 2**b: a zero point of 0 is stored as all ones
    gptq_v2    dense words, zero points as they are
    gptq_p     planar words, zero points as they are; GPTQModel's 5, 6 and 7 bits are always of this version

and may end in `+desc_act` where the configuration announces act-order, since such a layer cannot be split along K.
Written are v1 for symmetric layers, which every reader knows, v2 for asymmetric ones, whose zero points v1 would wrap
and some readers of v1 then borrow from their neighbours, and planar words for 5, 6 and 7 bits.

Sources: GPTQModel 7.7.0 (`quantization/config.py`, `nn_modules/qlinear`), vLLM 0.33 (`auto_gptq.py`, `gptq_utils.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.act_order import stated_order, trivial_order
from fewbit.checkpoints.config_values import first_given, granularity_of, integer_of, typed
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import element_dtype
from fewbit.checkpoints.word_format import (
    WordFormat,
    group_extent,
    group_size_of,
    holds_words,
    warn_of_partial_segments,
)
from fewbit.errors import CheckpointError, OutputError, SchemeError
from fewbit.numerics import QuantizedTensor
from fewbit.spec.element import F16
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import COLUMNS, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.pattern import Matcher, by_segments, unescaped
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

V1, V2, PLANAR = "gptq", "gptq_v2", "gptq_p"
VERSIONS = (V1, V2, PLANAR)
ACT_ORDER = "+desc_act"

_PLANAR_RUN = 32
_AMBIGUOUS_BITS = (5, 6, 7)
"""Widths whose words are planar or dense, at the same shapes, depending on who wrote them."""

_LAYER_SETTINGS = ("bits", "group_size", "sym", "desc_act")


@by_segments(lambda pattern: unescaped(pattern[2:]) if pattern[:2] in ("+:", "-:") else None)
def matches_gptq(pattern: str, name: str, class_name: str = "") -> bool:
    """GPTQ's rules: `+:` or `-:` and a regular expression that matches from the start of the name (an entry of
    `dynamic`), a part of the name (an entry of `modules_in_block_to_quantize`), or the module's class.
    """
    if pattern[:2] in ("+:", "-:"):
        return _expression(pattern).match(name) is not None
    return pattern == class_name or pattern in name


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """What stands after the sign."""
    try:
        return re.compile(pattern[2:])
    except re.error as error:
        raise SchemeError(f"The pattern {pattern!r} is no regular expression: {error}.", "Mend it.") from error


class Gptq(WordFormat):
    """See the head of this file."""

    name: ClassVar[str] = "gptq"
    quant_methods: ClassVar[tuple[str, ...]] = ("gptq",)
    matcher: ClassVar[Matcher] = staticmethod(matches_gptq)
    writes_order: ClassVar[bool] = True

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        base = _layer_settings(config)
        dynamic = _dynamic(config.get("dynamic"))
        settings = [base, *(base | changes for changes in dynamic.values() if changes is not None)]
        version = _version(config, {found["bits"] for found in settings})
        ordered = any(found["desc_act"] for found in settings)
        key = _key(base, "the configuration")
        rules = [
            Rule((pattern,), None if changes is None else _key(base | changes, f"dynamic[{pattern!r}]"))
            for pattern, changes in dynamic.items()
        ]
        parts = _flat(config.get("modules_in_block_to_quantize") or [])
        head = typed(config.get("lm_head") or False, bool, "lm_head")
        if not head and not parts:
            rules.append(Rule(("lm_head",), None))
        rules.append(Rule((*parts, *(["lm_head"] if head else [])) if parts else ("Linear",), key))
        return Scheme(self.name, tuple(rules), (), variant=version + (ACT_ORDER if ordered else ""))

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        return self.config_of_roles(layers, plain, frozenset())

    def config_of_roles(
        self, layers: Mapping[str, LinearKey], plain: Sequence[str], roles: frozenset[str]
    ) -> dict[str, Any]:
        versions = sorted({self.written_as(key).variant for key in layers.values()})
        if len(versions) != 1:
            raise OutputError(
                f"gptq has one checkpoint_format for the whole model, and these layers need {' and '.join(versions)}.",
                "Make all layers symmetric or all asymmetric, with 5 to 7 bits everywhere or nowhere; or write "
                "compressed-tensors.",
            )
        base = Counter(layers.values()).most_common(1)[0][0]
        changes = {f"+:{_exactly(name)}": _settings_of(key) for name, key in layers.items() if key != base}
        kept = {f"-:{_exactly(name)}": dict[str, Any]() for name in plain if not _is_head(name)}
        return {
            "quant_method": "gptq",
            "checkpoint_format": versions[0],
            **_settings_of(base),
            "desc_act": "order" in roles,
            "lm_head": any(_is_head(name) for name in layers),
            "pack_dtype": "int32",
            "dynamic": {**changes, **kept},
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
            parts = (target for rule in scheme.rules for target in rule.targets if rule.key and target != "Linear")
            named = (part for part in parts if part[:2] not in ("+:", "-:"))
            warn_of_partial_segments("modules_in_block_to_quantize", named, module)
        return super().describe(scheme, module, headers, class_name, shape)

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        if not holds_words(key):
            return ()
        if key.weight.element.bits in _AMBIGUOUS_BITS:
            versions: tuple[str, ...] = (PLANAR, V1, V2)
        else:
            versions = (V1, V2, PLANAR) if key.weight.symmetric else (V2, V1, PLANAR)
        return tuple(StoredLayer(key, version + order) for order in ("", ACT_ORDER) for version in versions)

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        bits, half = stored.key.weight.element.bits, 1 << (stored.key.weight.element.bits - 1)
        packing = "planar" if _is_planar(stored) else "dense"
        zero = half - 1 if _version_of(stored) == V1 else half
        return Layout(packing, bits, "K", 32, half, True), Layout(packing, bits, "N", 32, zero, True)

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        weight = stored.key.weight
        bits, whole = weight.element.bits, weight.element.bits if _is_planar(stored) else 1
        groups = group_extent(weight, divisible=not stored.variant.endswith(ACT_ORDER))
        zeros = (groups, Extent("N", bits, 32, whole))
        return (
            TensorSpec("codes", "qweight", (Extent("K", bits, 32, whole), ROWS), "int32"),
            TensorSpec("scale", "scales", (groups, ROWS), element_dtype(weight.scale.element)),
            TensorSpec("zero_point", "qzeros", zeros, "int32", optional=weight.symmetric),
            TensorSpec("order", "g_idx", (COLUMNS,), "int32", optional=True),
        )

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        if role == "order":
            return stated_order("g_idx", tensor, stored.key.weight)
        return super().to_hub(stored, role, tensor, shape)

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        if spec.role == "order" and "order" not in record:
            return trivial_order(record.shape[-1], record.key)  # AutoGPTQ's own loader wants it always
        return super().to_disk(stored, spec, record)

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        storages = self.storages(key)
        if not storages:
            return (
                f"gptq holds int2 to int8 weights per channel or group with float scales and nothing else, found {key}"
            )
        if _is_planar(storages[0]) and (shape[0] % _PLANAR_RUN or shape[1] % _PLANAR_RUN):
            bits = key.weight.element.bits
            return f"gptq's {bits}-bit words need N and K that are multiples of {_PLANAR_RUN}, found {list(shape)}"
        return None

    def caution(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        size = key.weight.granularity.columns
        if size and shape[1] % size:
            return f"groups of {size} do not divide K={shape[1]}: fewbit reads a short last group, vLLM does not"
        if not key.weight.symmetric or key.weight.element.bits not in (4, 8):
            return f"vLLM 0.33 reads GPTQ layers of 4 or 8 bits, symmetric, and no {key.weight.element} like this"
        return None


def _is_planar(stored: StoredLayer) -> bool:
    """Whether planar words differ from dense ones for the layer."""
    return _version_of(stored) == PLANAR and stored.key.weight.element.bits in (3, *_AMBIGUOUS_BITS)


def _version_of(stored: StoredLayer) -> str:
    return stored.variant.removesuffix(ACT_ORDER)


def _version(config: Mapping[str, Any], widths: set[int]) -> str:
    version = str(first_given(config, "checkpoint_format", "format", "version") or V1).lower()
    version = "marlin" if config.get("is_marlin_format") else version
    if version not in VERSIONS:
        raise CheckpointError(
            f"checkpoint_format is {version!r}, which is not supported.",
            f"Known: {', '.join(VERSIONS)}; convert it with the tool that wrote it.",
        )
    if config.get("pack_dtype") not in (None, "int32"):
        raise CheckpointError(f"pack_dtype is {config['pack_dtype']!r}, which is not supported.", "Needed: 'int32'.")
    unclear = sorted(widths & {*_AMBIGUOUS_BITS})
    if not unclear or version == PLANAR:
        return version
    writer = _writer(config)
    if writer == "gptqmodel":
        return PLANAR
    if writer == "auto-round":
        return version
    raise CheckpointError(
        f"Words of {unclear[0]} bits are planar when GPTQModel wrote them and dense when AutoRound did, and nothing "
        "says who wrote these.",
        "Add checkpoint_format 'gptq_p' or provider 'auto-round' to the configuration.",
    )


def _writer(config: Mapping[str, Any]) -> str:
    """Who wrote the file: `gptqmodel`, `auto-round`, or empty where it does not say."""
    if config.get("provider") == "auto-round" or "autoround_version" in config:
        return "auto-round"
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return "gptqmodel" if any(str(name).lower().startswith("gptqmodel") for name in names) else ""


def _layer_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """bits, group_size, sym and desc_act of the model, under whatever names the file has for them."""
    symmetric = config.get("sym")
    if symmetric is None:
        symmetric = not config["zero_point"] if config.get("zero_point") is not None else True
    bits = first_given(config, "bits", "wbits", "w_bit")
    if bits is None:
        raise CheckpointError("The GPTQ configuration has no bits.", "The configuration is malformed.")
    return {
        "bits": typed(bits, int, "bits"),
        "group_size": first_given(config, "group_size", "q_group_size"),
        "sym": typed(symmetric, bool, "sym"),
        "desc_act": typed(config.get("desc_act") or False, bool, "desc_act"),
    }


def _dynamic(value: Any) -> dict[str, dict[str, Any] | None]:
    """`dynamic` as patterns with a prefix -> what they change, or None for modules that stay as they are."""
    rules: dict[str, dict[str, Any] | None] = {}
    for written, changes in typed(value or {}, dict, "dynamic").items():
        pattern = written if written[:2] in ("+:", "-:") else f"+:{written}"
        given = typed(changes or {}, dict, f"dynamic[{written!r}]")
        known = {name: given[name] for name in _LAYER_SETTINGS if given.get(name) is not None}
        rules[pattern] = None if pattern[0] == "-" else known
    return rules


def _key(settings: Mapping[str, Any], where: str) -> LinearKey:
    """The key of a layer's settings; the file alone says whether scales are f16, bf16 or f32."""
    granularity = granularity_of(settings["group_size"], f"group_size of {where}")
    symmetric = typed(settings["sym"], bool, f"sym of {where}")
    element = integer_of(settings["bits"], f"bits of {where}")
    return LinearKey(QuantKey(element, ScaleSpec(F16, granularity), symmetric=symmetric))


def _settings_of(key: LinearKey) -> dict[str, Any]:
    """The inverse of `_key`."""
    return {"bits": key.weight.element.bits, "group_size": group_size_of(key.weight), "sym": key.weight.symmetric}


def _flat(value: Any) -> list[str]:
    """modules_in_block_to_quantize: a list of names, or of lists of names."""
    items = typed(value, list, "modules_in_block_to_quantize")
    nested = [_flat(item) if isinstance(item, list) else [item] for item in items]
    return [typed(name, str, "modules_in_block_to_quantize") for names in nested for name in names]


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"
