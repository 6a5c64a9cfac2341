"""Filling parts of a model on meta from a checkpoint, and emptying them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import ModelError
from fewbit.models.names import Names
from fewbit.models.replace import set_tensor, tensor_slot, to_meta


class PartialModel:
    """A model on meta of which one submodule at a time has its weights.

    Args:
        model: on meta.
        folder: the unquantized checkpoint.
    """

    def __init__(self, model: PreTrainedModel, folder: TensorFolder) -> None:
        self.model, self.folder = model, folder
        names = Names(model)
        self._sources: dict[str, str] = {}
        self._merged: set[str] = set()
        for stored in folder.headers:
            target = names.target(stored)
            self._sources[target.name] = stored
            if target.merge is not None:
                self._merged.add(target.name)

    @contextmanager
    def filled(self, path: str) -> Iterator[None]:
        """The submodule at `path` has its parameters meanwhile.

        Raises:
            ModelError: a parameter is merged from several stored tensors, or missing.
        """
        module = self.model.get_submodule(path)
        for leaf, _ in list(module.named_parameters()):
            name = f"{path}.{leaf}"
            if name in self._merged:
                raise ModelError(
                    f"{name} is merged from several tensors; calibration does not run such layers yet.",
                    "Use a scheme with dynamic activation scales.",
                )
            if name not in self._sources:
                raise ModelError(f"The checkpoint lacks {name}.", "Get the whole folder.")
            slot = tensor_slot(self.model, name)
            assert slot is not None
            set_tensor(self.model, name, self.folder.load(self._sources[name]).to(slot.dtype))
        try:
            yield
        finally:
            to_meta(module)
