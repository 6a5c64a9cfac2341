"""The seam between checkpoints, kernels and models: `QuantizeMethodBase`.

A method registers the parameters that a checkpoint stores, turns them into what a kernel wants once they are filled,
and runs the layer. The same object serves fewbit's own loader and, later, transformers and vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fewbit.checkpoints.dtypes import torch_dtype
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.errors import CheckpointError
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.registry import choose_kernel
from fewbit.kernels.select import Choice, Preference
from fewbit.spec.hardware import Hardware


@dataclass(frozen=True)
class Placement:
    """Where and how layers run.

    Attributes:
        hardware: what to choose kernels for.
        device: where prepared tensors live.
        dtype: dtype of inputs and outputs.
        preference: what the user asked of the kernel choice.
    """

    hardware: Hardware
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    preference: Preference = field(default_factory=Preference)

    def choose(self, request: LinearRequest) -> Choice:
        """The kernel for a linear layer, by the family's oracle."""
        return choose_kernel(request, self.hardware, self.preference)


class QuantizeMethodBase(ABC):
    """Creates, fills, prepares and runs the weights of one layer."""

    @abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Registers the parameters of the layer in the checkpoint's own layout, on the meta device until filled."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The quantized forward pass."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Chooses the kernel, prepares its layout and frees the rest. A second call does nothing."""


class StoredWeights:
    """The parameters of one layer as its checkpoint stores them: created on meta, filled, read once, dropped.

    Args:
        name: the layer's name, for messages.
        checkpoint: the format that owns the tensors.
        stored: what the layer is.
        headers: the tensors that the file holds for the layer, by their name below the layer's.
    """

    def __init__(
        self, name: str, checkpoint: CheckpointFormat, stored: StoredLayer, headers: Mapping[str, TensorHeader]
    ) -> None:
        self.name, self.checkpoint, self.stored = name, checkpoint, stored
        specs = {spec.name: spec for spec in checkpoint.specs(stored)}
        missing = [spec.name for spec in specs.values() if spec.name not in headers and not spec.optional]
        if missing:
            raise CheckpointError(
                f"{name}: the checkpoint lacks {', '.join(missing)}, which {stored.key} needs.", "Get the whole folder."
            )
        self.headers = {tensor: header for tensor, header in headers.items() if tensor in specs}

    def parameter(self, tensor: str) -> str:
        """Name of the layer's parameter that holds a stored tensor; a parameter's name cannot have dots."""
        return tensor.replace(".", "__")

    def create(self, layer: nn.Module) -> None:
        """Registers one meta parameter per stored tensor."""
        for tensor, header in self.headers.items():
            empty = torch.empty(header.shape, dtype=torch_dtype(header.dtype), device="meta")
            layer.register_parameter(self.parameter(tensor), nn.Parameter(empty, requires_grad=False))

    def take(self, layer: nn.Module) -> dict[str, Tensor]:
        """The filled tensors by name; the layer's parameters of these names are removed."""
        taken = {}
        for tensor in self.headers:
            parameter = layer.get_parameter(self.parameter(tensor))
            if parameter.is_meta:
                raise CheckpointError(f"{self.name}.{tensor} was never loaded.", "Get the whole folder.")
            taken[tensor] = parameter.data
            delattr(layer, self.parameter(tensor))
        return taken
