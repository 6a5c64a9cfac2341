"""What becomes of a quantized layer in a conversion: carried over, quantized anew, or dequantized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.models.conversion.holding import CannotHoldError, Held, equivalents, hold_as, without_activations
from fewbit.models.layers import CheckpointLayer
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.numerics.restate import restate
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec.key import LinearKey
from fewbit.spec.scheme import Scheme


@dataclass(frozen=True)
class Written:
    """What a treatment made of a layer.

    Attributes:
        tensors: what is stored, by name below the layer's, or by `CheckpointLayer.plain_name` for a plain weight.
        key: the layer's key now, or its dtype.
        before, after: float32 [N, K], the numbers as they were and as a reader gets them.
        roles: of the record that was written, none for a plain weight.
        rounded: roles that were rounded to float32.
    """

    tensors: Mapping[str, Tensor]
    key: str
    before: Tensor
    after: Tensor
    roles: frozenset[str] = frozenset()
    rounded: tuple[str, ...] = ()


class Treatment(ABC):
    """What becomes of all layers of one kind."""

    method: ClassVar[str]
    """What chooses the codes, as the report says it."""

    @abstractmethod
    def write(self, layer: CheckpointLayer, record: QuantizedTensor, scheme: Scheme | None) -> Written:
        """The layer as it is stored now.

        Args:
            layer: where it is.
            record: what it was.
            scheme: of the checkpoint that is being written, None for a plain one.

        Raises:
            OutputError: the format does not hold it.
        """


@dataclass(frozen=True)
class CarriedOver(Treatment):
    """The same codes under `key`, which is the layer's own or an equivalent of it."""

    method: ClassVar[str] = "carried over"

    target: CheckpointFormat
    key: LinearKey

    def holds(self, record: QuantizedTensor) -> bool:
        """Whether a plain record stands for the same numbers under the key."""
        return self.key.weight in equivalents(self.target, record)

    def write(self, layer: CheckpointLayer, record: QuantizedTensor, scheme: Scheme | None) -> Written:
        if self.key.activation is None:
            record = without_activations(record)
        plain = unpack_record(record)
        if not self.holds(plain):
            raise CannotHoldError(f"{layer.name} does not stand for the same numbers under {self.key}")
        restated = restate(plain, self.key.weight)
        held = hold_as(self.target, restated, self.key, layer.name, layer.class_name or "Linear", scheme)
        return _written(held, dequantize_record(plain))


@dataclass
class QuantizedAnew(Treatment):
    """Codes by round to nearest of the dequantized weight.

    Attributes:
        global_scales: layer name -> float64 [1, 1] that it shares with those it is joined with, filled by the plan.
    """

    method: ClassVar[str] = "round_to_nearest"

    target: CheckpointFormat
    key: LinearKey
    global_scales: Mapping[str, Tensor]

    def write(self, layer: CheckpointLayer, record: QuantizedTensor, scheme: Scheme | None) -> Written:
        numbers = dense(record)
        made = quantize(numbers, self.key.weight, global_scale=self.global_scales.get(layer.name))
        return _written(hold_as(self.target, made, self.key, layer.name, layer.class_name or "Linear", scheme), numbers)


@dataclass(frozen=True)
class Dequantized(Treatment):
    """A plain weight of `dtype`."""

    method: ClassVar[str] = "dequantized"

    dtype: torch.dtype

    def write(self, layer: CheckpointLayer, record: QuantizedTensor, scheme: Scheme | None) -> Written:
        numbers = dense(record)
        weight = numbers.to(self.dtype)
        return Written(
            {layer.plain_name: layer.as_plain(weight)}, str(self.dtype).removeprefix("torch."), numbers, weight.float()
        )


def dense(record: QuantizedTensor) -> Tensor:
    """The matrix that a layer multiplies its input with, float32: smoothing folded in."""
    numbers = dequantize_record(record)
    return numbers * record["pre_scale"].float() if "pre_scale" in record else numbers


def _written(held: Held, before: Tensor) -> Written:
    after, roles = dequantize_record(held.record), frozenset(held.record.tensors)
    return Written(held.tensors, str(held.key), before, after, roles, held.rounded)
