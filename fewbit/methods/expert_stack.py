"""Stacks of expert matrices that stay as their checkpoint stores them, one expert dequantized at a time.

The plain way to run a stacked checkpoint on any device: memory holds the packed stack and one expert in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fewbit.methods.base import Placement, QuantizeMethodBase, StoredWeights
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record


class QuantizedStack(nn.Module):
    """y = x @ W[e].T + bias[e] with quantized W [E, N, K].

    Attributes:
        shape: (E, N, K).
        bias: [E, N] on meta until filled, or None.
        record: the stack, once the weights are processed.
    """

    def __init__(self, shape: tuple[int, int, int], method: StackMethod, bias: Tensor | None = None) -> None:
        super().__init__()
        self.shape, self.method = shape, method
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias, device="meta"), requires_grad=False)
        self.record: QuantizedTensor | None = None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        return self.method.apply(self, x, expert)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, key={self.method.stored.stored.key}"


class StackMethod(QuantizeMethodBase):
    """The method of a stack.

    Args:
        placement: where it runs.
        stored: the checkpoint's tensors.
    """

    def __init__(self, placement: Placement, stored: StoredWeights) -> None:
        self.placement, self.stored = placement, stored

    def create_weights(self, layer: QuantizedStack, **extra_weight_attrs: object) -> None:
        self.stored.create(layer)

    def process_weights_after_loading(self, layer: QuantizedStack) -> None:
        if layer.record is not None:
            return
        record = self.stored.checkpoint.read(self.stored.stored, self.stored.take(layer), layer.shape)
        record.validate(self.stored.name)
        layer.record = record.with_tensors(**{role: record[role].to(self.placement.device) for role in record.tensors})

    def apply(self, layer: QuantizedStack, x: Tensor, expert: int) -> Tensor:
        assert layer.record is not None, "process_weights_after_loading has not run on this stack"
        weight = dequantize_record(one_of_stack(layer.record, expert))
        bias = None if layer.bias is None else layer.bias[expert].float()
        return nn.functional.linear(x.float(), weight, bias).to(x.dtype)


def one_of_stack(record: QuantizedTensor, index: int) -> QuantizedTensor:
    """The record [N, K] of one matrix of a stack [E, N, K]; every role has the leading axis."""
    tensors = {role: record[role][index] for role in record.tensors}
    return replace(record, shape=record.shape[1:], tensors=tensors)
