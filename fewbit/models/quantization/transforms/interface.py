"""The contract of an equivalent transformation: what it may change, and what it gets to choose by."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fewbit.algorithms.interface import Algorithm, NoSettings, read_settings
from fewbit.algorithms.statistics import InputStatistics
from fewbit.models.quantization.transforms.probe import BlockProbe
from fewbit.models.quantization.transforms.structure import ScaleMapping
from fewbit.models.quantization.transforms.weights import TransformedWeights
from fewbit.spec.key import LinearKey
from fewbit.spec.recipe import ScaleRules


@dataclass
class Observation:
    """What calibration showed of the input [M, K] of a mapping's consumers.

    Attributes:
        statistics: of all its rows, some of which are kept.
        tokens: consumer -> rows that it read: fewer than there were, for experts.
    """

    statistics: InputStatistics
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> Tensor:
        """Largest magnitude of each feature, float32 [K]."""
        assert self.statistics.peaks is not None
        return self.statistics.peaks

    @property
    def sample(self) -> Tensor:
        """Some of the rows, float32 [S, K]."""
        assert self.statistics.sample is not None
        return self.statistics.sample.float()


@dataclass(frozen=True)
class Consumer:
    """A matrix whose input features are scaled.

    Attributes:
        weight: float32 [N, K] before.
        key: how it will be quantized, None where it stays plain.
        share: of the tokens that it reads.
    """

    weight: Tensor
    key: LinearKey | None
    share: float = 1.0


@dataclass(frozen=True)
class ScalingTask:
    """One mapping for which scales are to be chosen.

    Attributes:
        mapping: what is scaled and what undoes it.
        consumers: in the mapping's order, those without tokens left out.
        seen: their input.
        algorithm: what will choose the codes.
        rules: see `ScaleRules`.
    """

    mapping: ScaleMapping
    consumers: Sequence[Consumer]
    seen: Observation
    algorithm: Algorithm
    rules: ScaleRules = ScaleRules()

    @property
    def quantized(self) -> list[Consumer]:
        """The consumers that will be quantized."""
        return [one for one in self.consumers if one.key is not None]

    def tied(self, numbers: Tensor) -> Tensor:
        """The mean of numbers [K] over the input features that carry one output feature, spread over these again."""
        rows = self.mapping.rows.to(numbers.device)
        sums = numbers.new_zeros(self.mapping.features).index_add_(0, rows, numbers)
        counts = numbers.new_zeros(self.mapping.features).index_add_(0, rows, torch.ones_like(numbers))
        return (sums / counts.clamp(min=1))[rows]


@dataclass(frozen=True)
class Scaling:
    """What was chosen for a mapping.

    Attributes:
        columns: float32 [K], what each input feature of the consumers is multiplied by; None where nothing is better.
        choice: in words, for the report.
        loss, loss_before: by the transformation's own measure, with and without.
    """

    columns: Tensor | None
    choice: str
    loss: float
    loss_before: float

    def on_cpu(self) -> Scaling:
        """The same, to be sent to other processes."""
        return self if self.columns is None else replace(self, columns=self.columns.cpu())


class Transform(ABC):
    """Changes weights so that the model computes the same and is easier to quantize.

    Args:
        settings: values by name, as a recipe holds them; what is not given takes its default.

    Raises:
        SchemeError: a setting is unknown or of the wrong kind.
    """

    name: ClassVar[str]
    """What `--transform` and recipes call it."""

    Settings: ClassVar[type] = NoSettings
    """Dataclass of its settings with their defaults."""

    needs_statistics: ClassVar[bool] = False
    """Whether it chooses scales by what calibration shows: `choose` is then called."""

    scales_values: ClassVar[bool] = False
    """Whether it may scale the values of attention, which a KV cache holds, by what calibration shows."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings: Any = read_settings(self.Settings, settings or {}, self.name)

    @property
    def record(self) -> dict[str, Any]:
        """What a recipe keeps: the name and every setting, defaults included."""
        return {"name": self.name, "settings": dict(vars(self.settings))}

    @property
    def unties(self) -> bool:
        """Whether a head that was tied to the embedding is no longer equal to it."""
        return False

    def install(self, probe: BlockProbe, weights: TransformedWeights) -> list[dict[str, Any]]:
        """Adds what it changes whatever the data are; entries for the report.

        Raises:
            ModelError: this architecture cannot be transformed so.
        """
        return []

    def wants(self, mapping: ScaleMapping) -> bool:
        """Whether `choose` is to be called for a mapping."""
        return self.needs_statistics

    def choose(self, task: ScalingTask) -> Scaling:
        """Scales for a mapping; called where `needs_statistics`."""
        raise NotImplementedError(f"{self.name} scales no mappings")
