"""Scales of a quantized KV cache: one table of the names that they have, whoever wrote the checkpoint.

    <attention>.k_scale              compressed-tensors; <attention>.attn.k_scale in files saved by a server
    <attention>.k_proj.k_scale       ModelOpt; also below a joined qkv_proj
    <attention>.k_proj.output_scale  Quark, and old compressed-tensors and FP8 files
    <attention>.k_cache.scale, <attention>.q.scale   one vendor's
    <attention>.kv_scale             one for both sides, deprecated

and alike for v, for q, and for zero points. Scales are multipliers, one for the layer or one for each head.

Sources: formats.md section 0 of the house's references; vLLM 0.33 (`base_config.py`, `kv_cache.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbit.errors import CheckpointError
from fewbit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_FORMS = tuple(
    re.compile(form)
    for form in (
        r"(?P<attention>.+)\.(?:[qkv]|qkv)_proj\.(?P<side>[qkv])_(?P<what>scale|zero_point)",
        r"(?P<attention>.+)\.(?P<side>[qkv])_proj\.output_(?P<what>scale|zero_point)",
        r"(?P<attention>.+)\.(?P<side>[qkv])_cache\.(?P<what>scale)",
        r"(?P<attention>.+)\.(?P<side>[qkv])\.(?P<what>scale)",
        r"(?P<attention>.+?)(?:\.attn)?\.(?P<side>kv|[qkv])_(?P<what>scale|zero_point)",
        r"(?P<attention>.+?)(?:\.attn)?\.(?P<side>prob)_output_(?P<what>scale)",
    )
)
_KEY_PROJECTIONS = ("k_proj", "qkv_proj")
_DEFAULT = "default"
_AS_THE_OTHER = "as the other side"


@dataclass(frozen=True)
class CacheScaleName:
    """What the name of a cache's scale says.

    Attributes:
        attention: name of the attention module.
        sides: `k`, `v`, both, `q` or `prob`.
        what: `scale` or `zero_point`.
    """

    attention: str
    sides: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class LayerCacheScales:
    """The scales of one layer's cache and where each is from.

    Attributes:
        key, value: float32 multipliers, [] or [heads].
        sources: `key` and `value` -> the tensor's name, `as the other side`, or `default`.
    """

    key: Tensor
    value: Tensor
    sources: Mapping[str, str]

    @property
    def from_file(self) -> bool:
        """Whether at least one side is stored."""
        return any(source != _DEFAULT for source in self.sources.values())


def cache_scale_name(name: str) -> CacheScaleName | None:
    """What a tensor's name says if it is that of a KV cache's scale or zero point; None if it is not."""
    for form in _FORMS:
        found = form.fullmatch(name)
        if found:
            sides = ("k", "v") if found["side"] == "kv" else (found["side"],)
            return CacheScaleName(found["attention"], sides, found["what"])
    return None


def attention_modules(modules: Iterable[str]) -> list[str]:
    """Names of the modules that cache keys, by the projections that they hold."""
    owners = (module.rpartition(".") for module in modules)
    return list(dict.fromkeys(owner for owner, _, leaf in owners if leaf in _KEY_PROJECTIONS))


def cache_scales(attentions: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, LayerCacheScales]:
    """The cache's scales of every attention module.

    A side that is not stored takes the other one's scale, and 1 where neither is.

    Args:
        attentions: names of attention modules on disk.
        tensors: name on disk -> tensor; those that `cache_scale_name` does not know are passed over.

    Raises:
        CheckpointError: a scale is not positive and finite, is none for a layer or its heads, or is stored twice and
            differs.
    """
    stored: dict[tuple[str, str], tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parsed = cache_scale_name(name)
        if parsed is None or parsed.what != "scale":
            continue
        for side in parsed.sides:
            before = stored.setdefault((parsed.attention, side), (name, _checked(name, tensor)))
            if not torch.equal(before[1], _checked(name, tensor)):
                raise CheckpointError(
                    f"{before[0]} is {before[1].tolist()} and {name} is {tensor.tolist()}, needed one {side} scale.",
                    "Remove the one that is left over.",
                )
    return {attention: _layer(stored.get((attention, "k")), stored.get((attention, "v"))) for attention in attentions}


def _layer(key: tuple[str, Tensor] | None, value: tuple[str, Tensor] | None) -> LayerCacheScales:
    found = {"key": key, "value": value}
    given = key or value
    missing = (_DEFAULT, torch.ones(())) if given is None else (_AS_THE_OTHER, given[1])
    sides = {side: one or missing for side, one in found.items()}
    return LayerCacheScales(sides["key"][1], sides["value"][1], {side: one[0] for side, one in sides.items()})


def _checked(name: str, tensor: Tensor) -> Tensor:
    scale = tensor.float().squeeze()
    if scale.dim() > 1:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}, needed one scale for the layer or one for each head.",
            "The file is damaged.",
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(
            f"{name} is {scale.tolist()}, needed positive multipliers.", "Calibrate the KV cache again."
        )
    return scale
