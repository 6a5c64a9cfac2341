"""Round to nearest: scales from extremes, each code the nearest. No data needed.

The arithmetic is `fewbit.numerics.quantize`, which quantizing while loading uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fewbit.algorithms.interface import Algorithm, LayerResult, LayerTask
from fewbit.numerics import quantize


class RoundToNearest(Algorithm):
    """See the head of this file."""

    name: ClassVar[str] = "round_to_nearest"

    def quantize_layers(self, tasks: Sequence[LayerTask]) -> list[LayerResult]:
        return [
            LayerResult(quantize(task.weight, task.key.weight, task.rules, task.global_scale), self.name)
            for task in tasks
        ]
