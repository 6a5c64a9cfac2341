"""The contract of an algorithm: one layer in, one hub record out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fewbit.algorithms.statistics import InputStatistics
from fewbit.numerics import QuantizedTensor
from fewbit.spec.key import LinearKey
from fewbit.spec.recipe import ScaleRules


@dataclass(frozen=True)
class LayerTask:
    """What an algorithm gets.

    Attributes:
        name: the layer's name, for messages.
        weight: [N, K] in the model's dtype.
        key: weight and activation keys.
        rules: see `ScaleRules`.
        global_scale: float64 [1, 1] second-level multiplier that the layer shares with the members of a joined matrix.
        statistics: of the layer's input, where the algorithm or the key needs them.
        settings: the algorithm's own, from the recipe.
    """

    name: str
    weight: Tensor
    key: LinearKey
    rules: ScaleRules = ScaleRules()
    global_scale: Tensor | None = None
    statistics: InputStatistics | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class Algorithm(ABC):
    """Chooses the codes and scales of a layer's weight."""

    name: ClassVar[str]
    """What `--algorithm` and recipes call it."""

    needs_statistics: ClassVar[bool] = False
    """Whether it needs statistics of the layer's input even where the key has no static activation scale."""

    @abstractmethod
    def quantize_layer(self, task: LayerTask) -> QuantizedTensor:
        """The hub record of the layer's weight, in the plain layout.

        Raises:
            ValueError: the weight is not finite.
        """
