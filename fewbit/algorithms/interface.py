"""The contract of an algorithm: layers that share an input go in, one hub record each comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from fewbit.algorithms.curvature import output_loss
from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import SchemeError, closest
from fewbit.numerics import QuantizedTensor
from fewbit.spec.key import LinearKey
from fewbit.spec.recipe import ScaleRules


@dataclass(frozen=True)
class LayerTask:
    """What an algorithm gets of one layer.

    Attributes:
        name: the layer's name, for messages.
        weight: [N, K] in the model's dtype, or float32 where a transformation changed it.
        key: weight and activation keys.
        rules: see `ScaleRules`.
        global_scale: float64 [1, 1] second-level multiplier that the layer shares with the members of a joined matrix.
        statistics: of the layer's input, where the algorithm or the key needs them and the layer saw any token.
    """

    name: str
    weight: Tensor
    key: LinearKey
    rules: ScaleRules = ScaleRules()
    global_scale: Tensor | None = None
    statistics: InputStatistics | None = None


@dataclass(frozen=True)
class LayerResult:
    """What an algorithm made of one layer.

    Attributes:
        record: the weight, in the plain layout.
        method: what chose the codes, for the report; names the fallback where one was needed.
        loss: mean squared error of the layer's output over that of an output of zeros, on the calibration tokens; None
            where no statistics were at hand.
        remarks: what else is to be told of this layer, no fallback: layers of one method may differ in them.
    """

    record: QuantizedTensor
    method: str
    loss: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockTask:
    """What an algorithm that refines whole blocks gets of one, all of whose layers are quantized.

    Attributes:
        tasks, results: of its layers, by name.
        batches: batches of calibration windows.
        output: (layer name -> weight [N, K], index of a batch) -> the block's output for these weights, on what the
            quantized blocks before it put out; differentiable in the weights.
        target: index of a batch -> what the block puts out in the unquantized model.
        dtype: of the weights, as the block runs.
        total: makes of a tensor its sum over all processes, each of which has other batches.
    """

    tasks: Mapping[str, LayerTask]
    results: Mapping[str, LayerResult]
    batches: int
    output: Callable[[Mapping[str, Tensor], int], Tensor]
    target: Callable[[int], Tensor]
    dtype: torch.dtype = torch.float32
    total: Callable[[Tensor], object] = lambda _: None


@dataclass(frozen=True)
class NoSettings:
    """The settings of an algorithm that has none."""


class Algorithm(ABC):
    """Chooses the codes and scales of weights.

    Args:
        settings: values by name, as a recipe holds them; what is not given takes its default.

    Raises:
        SchemeError: a setting is unknown or of the wrong kind.
    """

    name: ClassVar[str]
    """What `--algorithm` and recipes call it."""

    Settings: ClassVar[type] = NoSettings
    """Dataclass of the algorithm's settings with their defaults."""

    needs_gram: ClassVar[bool] = False
    """Whether it works on Gram matrices, gathered from the outputs of the layers that are quantized already."""

    refines_blocks: ClassVar[bool] = False
    """Whether `refine` is to be called for each block, with the unquantized model's outputs at hand."""

    @property
    def compares_inputs(self) -> bool:
        """Whether statistics are to say how inputs differ from those of the unquantized model."""
        return False

    @property
    def orders_groups(self) -> bool:
        """Whether records may say of each input feature which group it belongs to."""
        return False

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings: Any = read_settings(self.Settings, settings or {}, self.name)

    @property
    def settings_by_name(self) -> dict[str, Any]:
        """Every setting, defaults included: what a recipe keeps."""
        return dict(vars(self.settings))

    def for_trials(self) -> Algorithm:
        """A cheaper algorithm, by whose losses it can be told what this one will do with weights that were scaled."""
        return self

    @abstractmethod
    def quantize_layers(self, tasks: Sequence[LayerTask]) -> list[LayerResult]:
        """One result per task, in order.

        Args:
            tasks: layers that read the same input and share its statistics.

        Raises:
            ValueError: a weight is not finite.
        """

    def refine(self, block: BlockTask) -> dict[str, LayerResult]:
        """Better results for the layers of a block; called where `refines_blocks`."""
        return dict(block.results)


def read_settings(kind: type, values: Mapping[str, Any], owner: str) -> Any:
    """An instance of the dataclass `kind` with `values`; text is read as the type of the default.

    Raises:
        SchemeError: a name is unknown or a value does not fit the type of the default.
    """
    defaults = {entry.name: getattr(kind(), entry.name) for entry in fields(kind)}
    read = {}
    for name, value in values.items():
        if name not in defaults:
            raise SchemeError(f"{owner} has no setting {name!r}.", closest(name, defaults) or "It takes none.")
        read[name] = _as_type_of(defaults[name], value, f"{owner}: {name}")
    return kind(**read)


def _as_type_of(default: Any, value: Any, what: str) -> Any:
    kind = type(default)
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        found = words.get(str(value).lower())
        if found is None:
            raise SchemeError(f"{what} is {value!r}.", "Use true or false.")
        return found
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise SchemeError(f"{what} is {value!r}, no {kind.__name__}.", f"The default is {default!r}.") from error


def relative_loss(weight: Tensor, approximation: Tensor, gram: Tensor | None) -> float | None:
    """Mean squared error of a layer's output over that of an output of zeros; None without a Gram matrix.

    Args:
        weight, approximation: float32 [N, K].
        gram: float32 [K, K].
    """
    return None if gram is None else relative_losses([weight], [approximation], gram)[0]


def relative_losses(weights: Sequence[Tensor], approximations: Sequence[Tensor], gram: Tensor) -> list[float | None]:
    """The same for layers that read one input, read from the device at once."""
    whole = torch.stack([output_loss(weight, gram).sum() for weight in weights])
    errors = [output_loss(near - weight, gram).sum() for weight, near in zip(weights, approximations, strict=True)]
    found: list[float | None] = torch.where(whole > 0, torch.stack(errors) / whole, 0.0).tolist()
    return found
