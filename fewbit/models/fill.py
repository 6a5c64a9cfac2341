"""Filling parts of a model on meta from a checkpoint, and emptying them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.errors import ModelError
from fewbit.models.destinations import Destinations
from fewbit.models.quantization.transforms.weights import TransformedWeights
from fewbit.models.replace import set_tensor, tensor_slot, to_meta


class PartialModel:
    """A model on meta of which one submodule at a time has its weights.

    Args:
        model: on meta.
        folder: the unquantized checkpoint, or what transformations make of it.
        device: where the filled submodule is; the model's buffers are sent there.
    """

    def __init__(
        self, model: PreTrainedModel, folder: TensorFolder | TransformedWeights, device: str | torch.device = "cpu"
    ) -> None:
        self.model, self.folder, self.device = model, folder, torch.device(device)
        for name, buffer in list(model.named_buffers()):
            set_tensor(model, name, buffer.to(self.device))
        self.destinations = Destinations(model, by_module(folder.headers))
        self._sources = {self.destinations.tensor(stored): stored for stored in folder.headers}

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a tensor for one of the model's parameters."""
        return name in self._sources

    def source(self, name: str) -> str:
        """The stored name of one of the model's parameters.

        Raises:
            ModelError: the checkpoint lacks it.
        """
        if not self.holds(name):
            raise ModelError(f"The checkpoint lacks {name}.", "Get the whole folder.")
        return self._sources[name]

    @contextmanager
    def filled(self, path: str) -> Iterator[None]:
        """The submodule at `path` has its parameters meanwhile.

        Raises:
            ModelError: a parameter is missing.
        """
        module = self.model.get_submodule(path)
        for leaf, _ in list(module.named_parameters()):
            name = f"{path}.{leaf}"
            stored = self.source(name)
            slot = tensor_slot(self.model, name)
            assert slot is not None
            set_tensor(self.model, name, self.folder.load(stored).to(self.device, slot.dtype))
        try:
            yield
        finally:
            to_meta(module)
