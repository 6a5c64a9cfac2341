"""Quantized KV caches: what calibration shows of them, what a checkpoint says of them and which scales it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewbit.checkpoints.kv_scales import LayerCacheScales, attention_modules, cache_scale_name, cache_scales
from fewbit.numerics.activations import static_input_scales
from fewbit.spec.granularity import HEAD
from fewbit.spec.key import QuantKey


class CacheWatch:
    """Stands in for a key-value cache: hands back what it is given, and keeps the largest magnitude of each head.

    What it is given is what a cache would hold, keys after their rotary embedding.

    Args:
        largest: what was seen before.

    Attributes:
        largest: `k` and `v` -> float32 [heads], where they were cached; empty until something is.
    """

    def __init__(self, largest: Mapping[str, Tensor] | None = None) -> None:
        self.largest: dict[str, Tensor] = dict(largest or {})

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """keys and values [B, heads, T, size], as attention modules call it."""
        for side, states in (("k", keys), ("v", values)):
            seen = states.abs().amax(dim=(0, -2, -1)).float()
            self.largest[side] = torch.maximum(self.largest.get(side, seen), seen)
        return keys, values

    def scale(self, side: str, key: QuantKey) -> Tensor | None:
        """Static scale of a side, float32 [1] or [heads, 1, 1]; None where nothing was cached.

        Raises:
            ValueError: what was cached held NaN or infinity.
        """
        largest = self.largest.get(side)
        if largest is None:
            return None
        if not bool(largest.isfinite().all()):
            raise ValueError("calibration produced NaN or infinity")
        largest = largest.reshape(-1, 1, 1) if key.granularity == HEAD else largest.amax().reshape(1)
        return static_input_scales(largest, key)["input_scale"]


@dataclass(frozen=True)
class KvCacheReport:
    """The KV cache of a loaded checkpoint.

    Attributes:
        key: what the configuration says of it; None where it says nothing and only scales are there.
        layers: attention module on disk -> its scales, for every module that caches keys.
    """

    key: QuantKey | None
    layers: Mapping[str, LayerCacheScales] = field(default_factory=dict)

    @property
    def from_file(self) -> int:
        """How many layers have a scale from the file."""
        return sum(scales.from_file for scales in self.layers.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each layer whose scales are not both from the file."""
        return tuple(
            f"{name}: the {side}s' scale is {'1' if source == 'default' else source}"
            for name, scales in self.layers.items()
            for side, source in scales.sources.items()
            if source in ("default", "as the other side")
        )

    def __str__(self) -> str:
        what = f"KV cache of {self.key}" if self.key else "KV cache that the configuration does not mention"
        if self.key is not None and self.key.is_dynamic:
            return f"{what}, its scales computed at run time"
        return f"{what}: {self.from_file} of {len(self.layers)} layers have scales from the file"


def kv_cache_report(
    key: QuantKey | None, modules: Iterable[str], tensors: Mapping[str, Tensor]
) -> KvCacheReport | None:
    """The report; None where nothing speaks of a quantized KV cache.

    Args:
        key: from the checkpoint's scheme.
        modules: every module on disk.
        tensors: the cache's scales by name on disk.

    Raises:
        CheckpointError: see `cache_scales`.
    """
    if key is None and not tensors:
        return None
    parsed = (cache_scale_name(name) for name in tensors)
    attentions = dict.fromkeys([*attention_modules(modules), *(one.attention for one in parsed if one)])
    return KvCacheReport(key, cache_scales(attentions, tensors))
