"""Quantized linear layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewbit.kernels.activation.producer import Producer
from fewbit.kernels.interface import LinearRequest, Prepared
from fewbit.kernels.select import Choice
from fewbit.methods.base import Placement, QuantizeMethodBase, StoredWeights
from fewbit.numerics import QuantizedTensor, float_element
from fewbit.spec.key import LinearKey


class QuantizedLinear(nn.Module):
    """y = x @ W.T + bias with a quantized W [N, K]. Its method holds the logic, it holds the tensors.

    Attributes:
        in_features, out_features: K and N.
        method: what creates, prepares and runs the weight.
        key: weight and activation keys.
        choice: the kernel that was chosen, once the weights are processed.
    """

    def __init__(self, in_features: int, out_features: int, method: LinearMethod, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.method = in_features, out_features, method
        self.key: LinearKey = method.key
        self.choice: Choice | None = None
        self.prepared: Prepared | None = None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)

    def hold(self, prepared: Prepared, choice: Choice) -> None:
        """Registers the prepared tensors as buffers, so that moving the model moves them."""
        for name, tensor in prepared.tensors.items():
            self.register_buffer(f"prepared_{name}", tensor, persistent=False)
        self.prepared, self.choice = prepared, choice

    def _apply(self, fn, recurse: bool = True) -> QuantizedLinear:
        """Moves the buffers and keeps the prepared record in step with them; codes and scales never change dtype."""
        if self.prepared is not None:
            kept = {name: getattr(self, f"prepared_{name}") for name in self.prepared.tensors}
            super()._apply(fn, recurse)
            for name, before in kept.items():
                after = getattr(self, f"prepared_{name}")
                self.register_buffer(f"prepared_{name}", before.to(after.device), persistent=False)
            tensors = {name: getattr(self, f"prepared_{name}") for name in kept}
            self.prepared = Prepared(tensors, self.prepared.constants)
            return self
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        kernel = self.choice.kernel.name if self.choice else "not processed"
        return f"in_features={self.in_features}, out_features={self.out_features}, key={self.key}, kernel={kernel}"


class LinearMethod(QuantizeMethodBase):
    """The method of a quantized linear layer.

    Args:
        key: weight and activation keys.
        placement: where it runs and what the user asked of the kernel choice.
        stored: the checkpoint's tensors, or None where the record is given directly (quantizing while loading).
    """

    def __init__(self, key: LinearKey, placement: Placement, stored: StoredWeights | None = None) -> None:
        self.key, self.placement, self.stored = key, placement, stored

    def create_weights(self, layer: QuantizedLinear, **extra_weight_attrs: object) -> None:
        assert self.stored is not None, "a layer whose record is given has no weights to create"
        self.stored.create(layer)

    def process_weights_after_loading(self, layer: QuantizedLinear) -> None:
        if layer.prepared is None and self.stored is not None:
            self.use_record(layer, self.take_record(layer))

    def take_record(self, layer: QuantizedLinear) -> QuantizedTensor:
        """The hub record of the filled parameters, which the layer no longer has then."""
        assert self.stored is not None, "a layer whose record is given has none of its own"
        shape = (layer.out_features, layer.in_features)
        record = self.stored.checkpoint.read(self.stored.stored, self.stored.take(layer), shape)
        record.validate(self.stored.name)
        return record

    def request(self, record: QuantizedTensor) -> LinearRequest:
        """What the layer asks of a kernel."""
        return LinearRequest.of(
            record, self.key, float_element(self.placement.dtype).name, self.placement.preference.batch_invariant
        )

    def use_record(self, layer: QuantizedLinear, record: QuantizedTensor) -> None:
        """Chooses the kernel for a hub record, prepares it and keeps nothing else."""
        request = self.request(record)
        choice = self.placement.choose(request)
        prepared = choice.kernel.prepare(record, request)
        device = self.placement.device
        tensors = {name: tensor.to(device) for name, tensor in prepared.tensors.items()}
        layer.hold(Prepared(tensors, prepared.constants), choice)

    def apply(self, layer: QuantizedLinear, x: Tensor) -> Tensor:
        if layer.prepared is None or layer.choice is None:
            raise RuntimeError("process_weights_after_loading has not run on this layer")
        bias = layer.bias
        return layer.choice.kernel.run(x, layer.prepared, None if bias is None else bias.to(x.dtype))

    def apply_produced(self, layer: QuantizedLinear, x: Tensor, producer: Producer) -> Tensor:
        """`apply` of what the producer makes of x, in one operation where the kernel has it."""
        if layer.prepared is None or layer.choice is None:
            raise RuntimeError("process_weights_after_loading has not run on this layer")
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return layer.choice.kernel.run_produced(x, producer, layer.prepared, bias)


class HeldMethod(LinearMethod):
    """The method of a layer whose record others wait for: it hands the record on instead of preparing it.

    Args:
        hand_on: called with the layer and its record; `prepare_alone` is for those that nobody takes.
    """

    def __init__(
        self,
        key: LinearKey,
        placement: Placement,
        stored: StoredWeights,
        hand_on: Callable[[QuantizedLinear, QuantizedTensor], None],
    ) -> None:
        super().__init__(key, placement, stored)
        self._hand_on = hand_on

    def use_record(self, layer: QuantizedLinear, record: QuantizedTensor) -> None:
        self._hand_on(layer, record)

    def prepare_alone(self, layer: QuantizedLinear, record: QuantizedTensor) -> None:
        """As a layer of its own."""
        super().use_record(layer, record)


def linear_of(module: nn.Linear, method: LinearMethod) -> QuantizedLinear:
    """A quantized layer with the sizes of a plain one; its bias, if there is one, is on meta until filled."""
    bias = None if module.bias is None else torch.empty_like(module.bias, device="meta")
    return QuantizedLinear(module.in_features, module.out_features, method, bias)
