"""The contract of a checkpoint's files, and of a plugin that opens files which are no folder of safetensors.

Formats translate tensors and open no file; this is the other half. `TensorFolder` opens safetensors. A package outside
fewbit adds another container by announcing a `CheckpointOpener` in the entry point group `fewbit.checkpoint_openers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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


class CheckpointOpener(ABC):
    """Opens one kind of file, and has transformers read the model's configuration and tokenizer from it."""

    name: ClassVar[str]
    """What messages call the kind of file."""

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
