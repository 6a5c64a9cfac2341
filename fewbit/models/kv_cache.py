"""What a checkpoint says of a quantized KV cache, and the scales that it has for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fewbit.checkpoints.kv_scales import LayerCacheScales, attention_modules, cache_scale_name, cache_scales
from fewbit.spec.key import QuantKey


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
