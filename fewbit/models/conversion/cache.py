"""A quantized KV cache in a conversion: its key in the new configuration, its scales under new names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.kv_scales import cache_scale_name
from fewbit.errors import OutputError
from fewbit.spec.key import QuantKey


@dataclass(frozen=True)
class CacheConversion:
    """The KV cache of a checkpoint as another format states it.

    Attributes:
        key: what the source's configuration says, None where it says nothing.
        target: the format to write, or the dtype of a plain checkpoint.
        scales: names on disk of what belongs to the cache in the source.
        carries: whether the result has room for tensors that its format does not know.
    """

    key: QuantKey | None
    target: CheckpointFormat | torch.dtype
    scales: tuple[str, ...]
    carries: bool = True

    @classmethod
    def of(
        cls, key: QuantKey | None, target: CheckpointFormat | torch.dtype, tensors: Iterable[str], carries: bool = True
    ) -> CacheConversion:
        """The cache of a checkpoint that has `tensors`, names on disk."""
        return cls(key, target, tuple(name for name in tensors if cache_scale_name(name)), carries)

    def configured(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration with the cache's key, where the format has a place for it."""
        return config if self._obstacle(config) is not None or self.key is None else self._said(config, self.key)

    def named(self, name: str, scale: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensor of the cache that was called `name`, by the names that it has now.

        Args:
            name: one of `scales`.
            scale: what it holds.
            config: that the layers of the result have.
        """
        parsed = cache_scale_name(name)
        known = parsed is not None and parsed.what == "scale" and {*parsed.sides} <= {"k", "v"}
        if parsed is None or not known or self.key is None or self._obstacle(config) is not None:
            if self.carries:
                yield name, scale
            return
        assert isinstance(self.target, CheckpointFormat)
        for side in parsed.sides:
            yield self.target.cache_scale(parsed.attention, side), scale.clone()

    def note(self, config: dict[str, Any]) -> str:
        """What the result does not say of the cache; empty where it says all."""
        fate = "carried along under their names" if self.carries else "left out"
        carried = f", {len(self.scales)} scales are {fate}" if self.scales else ""
        if self.key is None:
            return f"The configuration does not mention a quantized KV cache{carried}." if self.scales else ""
        obstacle = self._obstacle(config)
        return "" if obstacle is None else f"{obstacle.rstrip('.')}: the result does not state it{carried}."

    def _said(self, config: dict[str, Any], key: QuantKey) -> dict[str, Any]:
        assert isinstance(self.target, CheckpointFormat)
        return self.target.with_kv_cache(config, key)

    def _obstacle(self, config: dict[str, Any]) -> str | None:
        """Why the result cannot state the cache's key, None where it can or where there is none."""
        if self.key is None:
            return None
        if isinstance(self.target, torch.dtype):
            return f"A plain checkpoint describes no KV cache of {self.key}"
        try:
            self._said(config, self.key)
            if self.scales:
                self.target.cache_scale("", "k")
        except OutputError as refusal:
            return refusal.message
        return None
