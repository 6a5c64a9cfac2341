"""AutoRound (`auto-round`, also `inc`): layers stored in other formats' tensors under one configuration of its own.

    packing_format                               stored as
    auto_round:auto_gptq                         gptq v1: dense words of 2 to 8 bits, zero points minus one, no g_idx
    auto_round, auto_round:gptqmodel             gptq v2: the same with zero points as they are
    auto_round:auto_awq                          awq gemm
    auto_round:fp8, auto_round:fp8_static        fp8
    auto_round:llm_compressor                    compressed-tensors: mx and nv floats

A layer's variant is `<format>/<that format's variant>`. The tensors of each layer decide which format it is, so layers
of several lie in one file; packing_format says what shapes cannot: the rule for zero points. Scales may be negative,
and are right. Activation keys of integer weights (W4A8) live in the configuration alone.

Sources: AutoRound 0.16.1 (`export/export_to_autoround`), vLLM 0.33 (`inc/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.auto_round_config import (
    DEFAULT_PACKING,
    PACKINGS,
    config_of,
    key_of,
    matches_auto_round,
    scheme_of,
    settings_of,
)
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.checkpoints.registry import formats
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.spec.element import E4M3, E8M0
from fewbit.spec.key import LinearKey
from fewbit.spec.layout import TensorSpec
from fewbit.spec.pattern import Matcher
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

_WORDS = ("gptq", "awq")
"""Formats of integer weights, which know nothing of activations."""

_WORD_TENSORS = {"qweight", "qzeros", "scales", "g_idx"}
_COMPRESSED_TENSORS = {"weight_packed", "weight_global_scale", "input_global_scale"}
_TWO_LEVEL_SCALE = "w_bf16_to_fp8_scale"


class AutoRound(CheckpointFormat):
    """See the head of this file."""

    name: ClassVar[str] = "auto-round"
    quant_methods: ClassVar[tuple[str, ...]] = ("auto-round", "inc", "intel/auto-round")
    matcher: ClassVar[Matcher] = staticmethod(matches_auto_round)

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        return scheme_of(config)

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        if _TWO_LEVEL_SCALE in headers:
            raise CheckpointError(
                f"{module} stores {_TWO_LEVEL_SCALE}, integers under an FP8 scale, which is not supported.",
                "Quantize with integer activations, or with none.",
            )
        configured = scheme.key_for(module, class_name, type(self).matcher)
        owner, variant = _owner(headers, scheme.variant, configured)
        kind = (self.name, owner.name, variant, configured)
        if kind not in scheme.derived:
            scheme.derived[kind] = _scheme_of_owner(owner, variant, configured, scheme)
        described = owner.describe(scheme.derived[kind], module, headers, "Linear", shape)
        if described is None:
            return None
        # Words say nothing of activations, so the configuration does.
        activation = configured.activation if configured and owner.name in _WORDS else described.key.activation
        return StoredLayer(replace(described.key, activation=activation), f"{owner.name}/{described.variant}")

    def specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        owner, layer = _delegated(stored)
        return owner.specs(layer)

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        owner, layer = _delegated(stored)
        return owner.read(layer, tensors, shape)

    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        packing = _packing_of(key)
        if packing is None:
            raise OutputError(f"auto-round cannot hold {key}.", "Choose another format.")
        if "order" in record:
            raise OutputError(f"auto-round has no place for the order of {key}.", "Write gptq.")
        owner, layer = _delegated(_written_as(key, packing))
        written = owner.write_as(record, layer)
        return {name: tensor for name, tensor in written.items() if name != "g_idx"}

    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        packing = _packing_of(key)
        if packing is None:
            return (
                "auto-round holds int2 to int8 per channel or group, e4m3 per tensor, channel or block, mx and nv "
                f"floats, with activations of the same kind, found {key}"
            )
        owner, layer = _delegated(_written_as(key, packing))
        return owner.refuse(layer.key, shape) if owner.name != "gptq" else None

    def caution(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        if any(extent % 32 for extent in shape):
            return f"AutoRound's own kernels need N and K that are multiples of 32, found {list(shape)}"
        packing = _packing_of(key)
        if packing is None:
            return None
        owner, layer = _delegated(_written_as(key, packing))
        return owner.caution(layer.key, shape) if owner.name != "gptq" else None

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        packings = sorted({str(_packing_of(key)) for key in layers.values()})
        if len(packings) != 1:
            raise OutputError(
                f"auto-round has one packing_format for a model, and these layers need {' and '.join(packings)}.",
                "Give all layers keys of one kind, symmetric or asymmetric; or write compressed-tensors.",
            )
        return config_of(layers, plain, packings[0])


def _named(name: str) -> LinearFormat:
    found = formats()[name]
    assert isinstance(found, LinearFormat)
    return found


def _owner(
    headers: Mapping[str, TensorHeader], announced: str, configured: LinearKey | None
) -> tuple[LinearFormat, str]:
    """The format whose tensors these are, and the variant of it that the configuration announces."""
    weight, scale = headers.get("weight"), headers.get("weight_scale")
    if _WORD_TENSORS & headers.keys():
        name, _, variant = (
            announced if announced.partition("/")[0] in _WORDS else PACKINGS[DEFAULT_PACKING]
        ).partition("/")
        if configured and not _named(name).storages(LinearKey(configured.weight)):
            return _named("gptq"), "gptq"  # awq has no such width
        return _named(name), variant
    narrow = scale is not None and scale.dtype in ("U8", "F8_E8M0", "F8_E4M3")
    if _COMPRESSED_TENSORS & headers.keys() or narrow or (weight is not None and weight.dtype == "I8"):
        return _named("compressed-tensors"), ""
    return _named("fp8"), ""


def _scheme_of_owner(owner: LinearFormat, variant: str, configured: LinearKey | None, scheme: Scheme) -> Scheme:
    """A scheme under which the owner reads a module's tensors: the module is the only one of its class."""
    rules = [Rule((), _as_owned(owner, key)) for key in scheme.keys]
    if configured:
        rules.insert(0, Rule(("Linear",), _as_owned(owner, configured)))
    return Scheme(owner.name, tuple(rules), (), variant=variant)


def _as_owned(owner: LinearFormat, key: LinearKey) -> LinearKey:
    """The key as the owner knows it."""
    return LinearKey(key.weight) if owner.name in _WORDS else key


def _delegated(stored: StoredLayer) -> tuple[LinearFormat, StoredLayer]:
    """The format that stores a layer, and what the layer is to it."""
    name, _, variant = stored.variant.partition("/")
    owner = _named(name)
    return owner, StoredLayer(_as_owned(owner, stored.key), variant)


def _written_as(key: LinearKey, packing: str) -> StoredLayer:
    name, _, variant = PACKINGS[packing].partition("/")
    return StoredLayer(key, f"{name}/{variant or _named(name).written_as(key).variant}")


def _packing_of(key: LinearKey) -> str | None:
    """The packing_format that a key is written in, or None where there is none or the settings cannot say the key."""
    try:
        said = key_of(settings_of(key), "")
    except CheckpointError:
        return None
    if said is None or replace(said, weight=said.weight.with_scale_element(key.weight.scale.element)) != key:
        return None
    packing = _packing_of_kind(key)
    owner = _named(PACKINGS[packing].partition("/")[0])
    return packing if owner.storages(_as_owned(owner, key)) else None


def _packing_of_kind(key: LinearKey) -> str:
    weight = key.weight
    if weight.element.is_integer and weight.symmetric:
        return "auto_round:auto_gptq"
    if weight.element.is_integer:
        return "auto_round:auto_awq" if weight.element.bits == 4 else "auto_round:gptqmodel"
    if weight.scale.element in (E8M0, E4M3):
        return "auto_round:llm_compressor"
    static = key.activation is not None and not key.activation.is_dynamic
    return "auto_round:fp8_static" if static else "auto_round:fp8"
