"""A quantized layer as its format stores it, and as a reader will get it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.algorithms.interface import LayerResult
from fewbit.checkpoints.dtypes import header_of
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.models.quantization.plan import Plan, PlannedLayer, stated_config
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record, unpack_record


@dataclass(frozen=True)
class WrittenLayer:
    """One layer's result.

    Attributes:
        result: what an algorithm made of it.
        stored: its tensors on disk, by their names below the layer, where codes were chosen.
        reread: the plain record that a reader makes of them: a format may hold a scale with fewer digits than the hub.
    """

    result: LayerResult
    stored: Mapping[str, Tensor]
    reread: QuantizedTensor

    def weight(self, device: torch.device) -> Tensor:
        """The numbers that a reader gets, float32 [N, K]."""
        return dequantize_record(self.reread.to(device))


class LayerWriter:
    """Writes and reads layers in the format of a plan.

    Args:
        checkpoint: the format.
        plan: what is quantized and how.
    """

    def __init__(self, checkpoint: CheckpointFormat, plan: Plan) -> None:
        self._checkpoint = checkpoint
        self._scheme = checkpoint.scheme(stated_config(checkpoint, plan.quantized, plan.plain, plan.recipe))

    def write(self, layer: PlannedLayer, result: LayerResult) -> WrittenLayer:
        """The layer's tensors, and what they say."""
        assert layer.key is not None
        stored = self._checkpoint.write(result.record, layer.key)
        return WrittenLayer(result, stored, self.read(layer, stored))

    def read(self, layer: PlannedLayer, stored: Mapping[str, Tensor]) -> QuantizedTensor:
        """The plain record of a layer's tensors."""
        shape = (layer.shape[0], layer.shape[1])
        headers = {name: header_of(tensor) for name, tensor in stored.items()}
        described = self._checkpoint.describe(self._scheme, layer.name, headers, layer.class_name, shape)
        assert described is not None, f"{layer.name} was written as a plain layer"
        return unpack_record(self._checkpoint.read(described, stored, shape))
