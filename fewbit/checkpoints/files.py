"""The contract of a checkpoint's files, and of a plugin for files which are no folder of safetensors.

Formats translate tensors and open no file; this is the other half. `TensorFolder` opens safetensors. A package outside
fewbit adds another container by announcing a `CheckpointOpener` in the entry point group `fewbit.checkpoint_openers`;
where it also writes such files, `fewbit convert` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.dtypes import nbytes
from fewbit.checkpoints.interface import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointFiles(ABC):
    """A checkpoint's tensors, opened lazily.

    Attributes:
        path: the folder or the file.
        headers: tensor name -> header. Names are those of transformers' modules, as `save_pretrained` writes them.
        file_of: tensor name -> name of the file that holds it.
        metadata: the texts that the files' headers carry beside the tensors; none unless a container has them.
    """

    path: Path
    headers: Mapping[str, TensorHeader]
    file_of: Mapping[str, str]
    metadata: Mapping[str, str] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(nbytes(header) for header in self.headers.values())

    @property
    def quantization(self) -> tuple[dict[str, Any], str] | None:
        """A `quantization_config` that the files themselves imply and what implied it; None where JSON files say it."""
        return None

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object that lies beside the tensors, or None where there is none of that name."""
        return None

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """An owned copy of a tensor; no memory map stays behind.

        Raises:
            CheckpointError: there is no such tensor, or the file cannot be read.
        """


@dataclass(frozen=True)
class ModelParts:
    """What makes a model of tensors.

    Attributes:
        config: transformers' configuration (a `PretrainedConfig`).
        tokenizer: transformers' tokenizer; None where the model has none.
        source: the files that the tensors come from.
        recipe: how they were made, JSON; empty where nothing was done to them.
    """

    config: Any
    tokenizer: Any
    source: CheckpointFiles
    recipe: str = ""


class CheckpointWriter(ABC):
    """Writes one file, tensor by tensor; memory stays near one tensor.

    Attributes:
        nbytes: of all tensors added.
        notes: what of the model the file cannot state, a sentence each.
    """

    nbytes: int = 0
    notes: Sequence[str] = ()

    @abstractmethod
    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor under the name that `CheckpointFiles` gives it.

        Raises:
            OutputError: the file has no place for it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Completes the file."""


class CheckpointOpener(ABC):
    """Opens one kind of file, and has transformers read the model's configuration and tokenizer from it."""

    name: ClassVar[str]
    """What messages call the kind of file."""

    writes: ClassVar[str] = ""
    """Name of the format whose layers `create` writes; empty where this kind of file is read only."""

    @abstractmethod
    def recognizes(self, path: Path) -> bool:
        """Whether `path`, which exists, is of this kind. Must be quick and must not raise for damaged files."""

    @abstractmethod
    def open(self, path: Path) -> CheckpointFiles:
        """The tensors of the file.

        Raises:
            CheckpointError: it is damaged, or holds what is not supported.
        """

    @abstractmethod
    def model_config(self, path: Path) -> Any:
        """transformers' configuration of the model (a `PretrainedConfig`).

        Raises:
            CheckpointError: the file is damaged.
            ModelError: there is none that transformers knows.
        """

    @abstractmethod
    def tokenizer(self, path: Path) -> Any:
        """transformers' tokenizer of the model.

        Raises:
            ModelError: the file has none that transformers can read.
        """

    def create(self, path: Path, model: ModelParts) -> CheckpointWriter:
        """A new file at `path`, for the tensors of a model.

        Raises:
            OutputError: the file cannot say what the model is.
        """
        raise NotImplementedError(f"{self.name} is read only")
