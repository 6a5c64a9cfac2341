"""What each module of a checkpoint is, seen through the model that its configuration builds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.layer_tensors import largest_shape
from fewbit.errors import CheckpointError
from fewbit.models.destinations import Destinations
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.replace import matrix_shape, submodule
from fewbit.models.stacked_experts import stack_shape
from fewbit.models.stored import StoredCheckpoint


@dataclass(frozen=True)
class CheckpointLayer:
    """One module of a checkpoint.

    Attributes:
        name: on disk.
        class_name: class of the module in the model, `Parameter` for a stack of experts; empty where the model class
            does not build it.
        stored: what its tensors are, None for a plain module.
        shape: [N, K] of a quantized layer, by the model or, where the model has no such layer, by the headers;
            [E, N, K] of a stack of experts; empty for a plain module.
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

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of experts' matrices, [E, N, K]."""
        return len(self.shape) == 3

    @property
    def plain_name(self) -> str:
        """Name of the tensor that holds the weight in a plain checkpoint; stacks are parameters of their own there."""
        return self.name if self.is_stack else f"{self.name}.weight"

    def as_plain(self, numbers: Tensor) -> Tensor:
        """[..., N, K] as a plain checkpoint holds it, and back: stacks are input-major there."""
        return numbers.transpose(-1, -2).contiguous() if self.is_stack else numbers


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
    destinations = Destinations(model, stored.modules, stored.split)
    embedding = model.get_input_embeddings()
    for module, headers in stored.modules.items():
        path = destinations.module(module)
        built, stack = submodule(model, path), stack_shape(model, path)
        class_name = type(built).__name__ if built is not None else "Parameter" if stack is not None else ""
        shape: tuple[int, ...] | None = stack or matrix_shape(built)
        described = stored.describe(module, class_name or "Linear", (shape[-2], shape[-1]) if shape else None)
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
