"""A checkpoint opened for reading: its files, its format, its scheme, and what its modules are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fewbit.checkpoints.files import CheckpointFiles
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader, split_at_last_dot
from fewbit.checkpoints.registry import open_files, recognize
from fewbit.checkpoints.tensor_files import by_module
from fewbit.numerics import QuantizedTensor
from fewbit.spec.scheme import Scheme
from fewbit.spec.transform import Transform


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint opened for reading.

    Attributes:
        folder: its files.
        format: its format, None for a plain checkpoint.
        scheme: the scheme that its configuration states, None for a plain checkpoint.
        decided_by: the file and field that said what it is, empty for a plain checkpoint.
        transforms: what its weights were multiplied with and its activations must be.
    """

    folder: CheckpointFiles
    format: CheckpointFormat | None = None
    scheme: Scheme | None = None
    decided_by: str = ""
    transforms: tuple[Transform, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> StoredCheckpoint:
        """Opens a folder, or a file that a plugin reads; headers and configuration alone say which format it is.

        Raises:
            CheckpointError: the folder or its configuration cannot be read.
        """
        folder = open_files(Path(path))
        found = recognize(folder)
        if found is None:
            return cls(folder)
        checkpoint, config, decided_by = found
        return cls(folder, checkpoint, checkpoint.scheme(config), decided_by, checkpoint.transforms(config))

    @cached_property
    def modules(self) -> dict[str, dict[str, TensorHeader]]:
        """Headers by module: name of the module on disk -> name below it -> header."""
        return by_module(self.folder.headers, self.split)

    def renamed(self, aliases: Mapping[str, tuple[str, ...]]) -> StoredCheckpoint:
        """The same checkpoint, entries of whose configuration may mean modules by these names as well."""
        return self if self.scheme is None else replace(self, scheme=self.scheme.also_called(aliases))

    def split(self, name: str) -> tuple[str, str]:
        """(module, name below it) of a tensor's name on disk."""
        return self.format.split(name) if self.format else split_at_last_dot(name)

    def describe(
        self, module: str, class_name: str = "Linear", shape: tuple[int, int] | None = None
    ) -> StoredLayer | None:
        """What the module's tensors are; None for a plain one. `shape` is the layer's [N, K] where a model is known.

        Raises:
            CheckpointError: they contradict one another, or a scale has no weight to belong to.
        """
        if self.format is None or self.scheme is None:
            return None
        return self.format.describe(self.scheme, module, self.modules[module], class_name, shape)

    def record(self, module: str, stored: StoredLayer, shape: tuple[int, ...]) -> QuantizedTensor:
        """The hub record of a quantized layer of logical `shape`, read from its file."""
        assert self.format is not None
        owned = {spec.name for spec in self.format.specs(stored)} & set(self.modules[module])
        tensors = {tensor: self.folder.load(self.format.join(module, tensor)) for tensor in owned}
        record = self.format.read(stored, tensors, shape)
        record.validate(module)
        return record
