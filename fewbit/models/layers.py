"""What each module of a checkpoint is, seen through the model that its configuration builds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.layer_tensors import largest_shape
from fewbit.errors import CheckpointError
from fewbit.models.destinations import Destinations
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.replace import matrix_shape, submodule
from fewbit.models.stored import StoredCheckpoint


@dataclass(frozen=True)
class CheckpointLayer:
    """One module of a checkpoint.

    Attributes:
        name: on disk.
        class_name: class of the module in the model; empty where the model class does not build it.
        stored: what its tensors are, None for a plain module.
        shape: [N, K] of a quantized layer, by the model or, where the model has no such layer, by the headers; empty
            for a plain module.
        embedding: whether the model looks tokens up in it.
    """

    name: str
    class_name: str
    stored: StoredLayer | None
    shape: tuple[int, ...] = ()
    embedding: bool = False

    @property
    def is_built(self) -> bool:
        """Whether the model class builds the module."""
        return bool(self.class_name)


def model_of(stored: StoredCheckpoint) -> PreTrainedModel:
    """The model of a checkpoint's configuration, on meta.

    Raises:
        ModelError: transformers has no model for it.
    """
    config = read_config(stored.folder.path)
    return build_on_meta(config, config_dtype(config))


def checkpoint_layers(stored: StoredCheckpoint, model: PreTrainedModel) -> Iterator[CheckpointLayer]:
    """Every module of a checkpoint, in its order.

    Args:
        stored: the checkpoint.
        model: from `model_of`; experts that the checkpoint stores apart are taken apart in it.

    Raises:
        CheckpointError: a layer's tensors contradict one another.
    """
    destinations = Destinations(model, stored.modules)
    embedding = model.get_input_embeddings()
    for module, headers in stored.modules.items():
        built = submodule(model, destinations.module(module))
        class_name = type(built).__name__ if built is not None else ""
        shape: tuple[int, ...] | None = matrix_shape(built)
        described = stored.describe(module, class_name or "Linear", shape)
        if described is None or stored.format is None:
            yield CheckpointLayer(module, class_name, None, embedding=built is embedding)
            continue
        present = [spec for spec in stored.format.specs(described) if spec.name in headers]
        shape = shape or largest_shape(present, headers)
        if 0 in shape:
            raise CheckpointError(f"The shape of {module} cannot be told from its tensors.", "Check config.json.")
        yield CheckpointLayer(module, class_name, described, shape, built is embedding)


def head_name(model: nn.Module) -> str | None:
    """Path of the module that turns the last hidden state into logits, tied or not; None where there is none."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None
