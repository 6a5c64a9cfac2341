"""A GGUF file as the tensors of a checkpoint, under transformers' names and in transformers' order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from fewbit.checkpoints.dtypes import torch_dtype
from fewbit.checkpoints.files import CheckpointFiles
from fewbit.checkpoints.interface import TensorHeader
from fewbit.errors import CheckpointError
from fewbit.lazy import torch
from fewbit_gguf.blocks import BLOCK_TYPES
from fewbit_gguf.format import QUANT_METHOD, tensor_name
from fewbit_gguf.header import GgufTensor, read_header
from fewbit_gguf.names import halves_apart, head_counts, is_known_extra, module_names

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = ("F32", "F16", "BF16")


class GgufFiles(CheckpointFiles):
    """One GGUF file, its tensors read one at a time.

    Attributes:
        header: what it says before its data.

    Raises:
        CheckpointError: it is damaged, or holds a tensor of a type that is not supported or that no module has.
        ModelError: its architecture is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, read_header(path)
        self.headers: dict[str, TensorHeader] = {}
        self._tensors: dict[str, GgufTensor] = {}
        self._types: dict[str, list[str]] = {}
        self._heads = head_counts(self.header)
        modules = module_names(self.header)
        for tensor in self.header.tensors.values():
            self._add(tensor, modules)
        self.file_of = dict.fromkeys(self.headers, path.name)

    @property
    def quantization(self) -> tuple[dict[str, Any], str] | None:
        if not self._types:
            return None
        number = self.header.metadata.get("general.file_type")
        known = {int(one): one.name for one in gguf.LlamaFileType}
        called = f", {known[number]}" if number in known else ""
        return {"quant_method": QUANT_METHOD, "types": self._types}, f"{self.path.name} (types of its tensors{called})"

    def load(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}.", "See `headers` for the names.")
        tensor, header = self._tensors[name], self.headers[name]
        try:
            data = np.fromfile(self.path, np.uint8, count=tensor.nbytes, offset=tensor.start)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read any more: {error}.", "Start again.") from error
        if data.size != tensor.nbytes:
            raise CheckpointError(f"{self.path} ends within {name}: it was changed while being read.", "Start again.")
        value = torch.from_numpy(data).view(torch_dtype(header.dtype)).reshape(header.shape)
        heads = self._heads_of(name)
        return halves_apart(value, heads) if heads else value

    def _heads_of(self, name: str) -> int | None:
        """How many heads a tensor's rows belong to, if llama.cpp orders them in its own way."""
        module = name.rpartition(".")[0]
        return self._heads.get(module.rpartition(".")[2])

    def _add(self, tensor: GgufTensor, modules: dict[str, str]) -> None:
        theirs, _, leaf = tensor.name.rpartition(".")
        module = modules.get(theirs)
        heads = self._heads_of(f"{module}.{leaf}")
        if heads and tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{tensor.name} in {self.path} has {tensor.shape[0]} rows, needed a multiple of 2 for {heads} heads.",
                "The file is damaged.",
            )
        if module is None and not is_known_extra(tensor.name, self.header):
            raise CheckpointError(
                f"{self.path} holds {tensor.name}, for which a {self.header.architecture} model has no place.",
                "The file is of a variant of the architecture that is not supported.",
            )
        name = f"{module or theirs}.{leaf}"
        if tensor.type in _PLAIN:
            self.headers[name] = TensorHeader(tensor.type, tensor.shape)
        else:
            name = f"{module or theirs}.{self._in_blocks(tensor, leaf)}"
            one = BLOCK_TYPES[tensor.type]
            rows, columns = tensor.shape
            self.headers[name] = TensorHeader("U8", (rows, columns // one.elements, one.nbytes))
            self._types.setdefault(tensor.type, []).append(module or theirs)
        self._tensors[name] = tensor

    def _in_blocks(self, tensor: GgufTensor, leaf: str) -> str:
        if tensor.type not in BLOCK_TYPES:
            raise CheckpointError(
                f"{tensor.name} in {self.path} is of type {tensor.type}, which is not supported.",
                f"Supported: {', '.join((*_PLAIN, *BLOCK_TYPES))}.",
            )
        if leaf != "weight" or len(tensor.shape) != 2:
            raise CheckpointError(
                f"{tensor.name} in {self.path} is {tensor.type} of shape {list(tensor.shape)}, needed a matrix.",
                "Only matrices of weights are quantized; the file is damaged.",
            )
        return tensor_name(tensor.type)
