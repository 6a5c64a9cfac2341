"""Clipping: round to nearest, with the range of each group shrunk as far as its output error falls.

The second step of AWQ, which `--transform awq --algorithm clip` is as it was published. A group's range is multiplied
by 1 down to 1 - `reach`, the extremes beyond it saturating; the error of a candidate is d^T H d, d being what rounding
does to the group's weights and H its block of the Gram matrix, so that all calibration tokens count and no output is
computed.

Sources: Lin et al., AWQ (arXiv 2306.00978); AutoAWQ 0.2.9 for the grid, 10 steps down to 0.55.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fewbit.algorithms.interface import Algorithm, LayerResult, LayerTask, relative_loss
from fewbit.algorithms.scale_search import search_scales
from fewbit.errors import SchemeError


@dataclass(frozen=True)
class ClipSettings:
    """Settings of clipping.

    Attributes:
        steps: ranges that are tried, the whole one included.
        reach: the smallest is beyond this share of the whole one, by one step.
    """

    steps: int = 10
    reach: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SchemeError(f"clip: steps is {self.steps}.", "Use at least 1.")
        if not 0 <= self.reach < 1:
            raise SchemeError(f"clip: reach is {self.reach}.", "Use 0 to less than 1.")


class Clip(Algorithm):
    """See the head of this file."""

    name: ClassVar[str] = "clip"
    Settings: ClassVar[type] = ClipSettings
    needs_gram: ClassVar[bool] = True

    @property
    def ratios(self) -> tuple[float, ...]:
        """What ranges are multiplied by."""
        return tuple(1 - self.settings.reach * step / self.settings.steps for step in range(self.settings.steps))

    def quantize_layers(self, tasks: Sequence[LayerTask]) -> list[LayerResult]:
        results = []
        for task in tasks:
            weight, seen = task.weight.float(), task.statistics
            known = seen is not None and seen.products is not None and seen.tokens > 0
            gram = seen.gram.to(weight.device) if known and seen is not None else None
            scales = search_scales(task, gram, self.ratios)
            grid = scales.grid(tuple(weight.shape))
            values, meaning = grid.rounded(weight)
            method = self.name if known else f"{self.name}: no calibration token reached it"
            results.append(LayerResult(scales.record(values), method, relative_loss(weight, meaning, gram)))
        return results
