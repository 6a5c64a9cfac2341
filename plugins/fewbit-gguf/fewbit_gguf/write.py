"""Writing a GGUF file: tensors under llama.cpp's names and in its order of rows, with what makes a model of them.

The container is gguf-py's. It has the table of tensors before the data, so that the data wait in a file beside it until
all are known; memory stays near one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from fewbit.checkpoints.files import CheckpointWriter, ModelParts
from fewbit.errors import OutputError
from fewbit.lazy import torch
from fewbit_gguf.blocks import BLOCK_TYPES
from fewbit_gguf.format import tensor_name
from fewbit_gguf.metadata import add_metadata, architecture_for
from fewbit_gguf.names import ROPE_FACTORS, interleaved, interleaved_heads, names_of
from fewbit_gguf.vocabulary import add_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

RECIPE = "fewbit.recipe"
"""Metadata key of the recipe by which fewbit made the file."""

_FLOATS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
_LEAVES = {tensor_name(name): name for name in BLOCK_TYPES}
_COMPUTED = ("rotary_emb.inv_freq",)
"""Tensors of old checkpoints that every model computes by itself."""


class GgufWriter(CheckpointWriter):
    """One file. See `fewbit.checkpoints.files`.

    Args:
        path: to write; a second file, of the tensors' data, grows beside it until `finish`.
        model: what the tensors belong to.

    Raises:
        OutputError: the model is of a family, or has a property, for which llama.cpp's files have no place.
    """

    def __init__(self, path: Path, model: ModelParts) -> None:
        name, architecture = architecture_for(model.config)
        self._config = model.config
        self._names = {module: theirs for theirs, module in names_of(architecture, self._blocks).items()}
        self._heads = interleaved_heads(architecture, self._config.num_attention_heads, self._key_heads)
        self._types: Counter[str] = Counter()
        self._writer = gguf.GGUFWriter(path, name, use_temp_file=True)
        self._data = path.with_name(f"{path.name}.data")
        # The file that gguf-py would open itself would be in memory or on another disk.
        self._writer.temp_file = self._data.open("w+b")  # type: ignore[assignment]
        factors = add_metadata(self._writer, self._config)
        obstacle = add_vocabulary(self._writer, model)
        self.notes = [obstacle] if obstacle else []
        if model.recipe:
            self._writer.add_string(RECIPE, model.recipe)
        if factors is not None:
            self._put(ROPE_FACTORS, factors, "F32", tuple(factors.shape))

    @property
    def _blocks(self) -> int:
        return int(self._config.num_hidden_layers)

    @property
    def _key_heads(self) -> int:
        return int(getattr(self._config, "num_key_value_heads", None) or self._config.num_attention_heads)

    def add(self, name: str, tensor: Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        theirs, kind = self._names.get(module), _LEAVES.get(leaf)
        if name.endswith(_COMPUTED):
            return
        if theirs is None or (kind is None and leaf not in ("weight", "bias")):
            raise OutputError(
                f"A GGUF file of a {self._config.model_type} model has no place for {name}.",
                "Choose another format, or leave the tensor out of the source.",
            )
        rows = tensor.detach().cpu()
        heads = self._heads.get(module.rpartition(".")[2])
        rows = interleaved(rows, heads) if heads else rows
        if kind is not None:
            shape = (rows.shape[0], rows.shape[1] * BLOCK_TYPES[kind].elements)
            self._put(f"{theirs}.weight", rows, kind, shape)
            return
        kind = "F32" if rows.dim() == 1 else _FLOATS.get(str(rows.dtype))
        if kind is None:
            raise OutputError(f"A GGUF file has no place for {name}, which is {rows.dtype}.", "Choose another format.")
        self._put(f"{theirs}.{leaf}", rows.float() if kind == "F32" else rows, kind, tuple(rows.shape))

    def finish(self) -> None:
        self._writer.add_file_type(self._file_type())
        self._writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        self._data.unlink()

    def _put(self, name: str, numbers: Tensor, kind: str, shape: tuple[int, ...]) -> None:
        data = numbers.contiguous().view(torch.uint8).numpy()
        self.nbytes += data.nbytes
        if len(shape) > 1:
            self._types[kind] += data.nbytes
        # gguf-py takes bytes, the last axis of the shape counted in them.
        self._writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])

    def _file_type(self) -> int:
        """llama.cpp's number for the type that most of the matrices' bytes have; it is a label, no more."""
        most = self._types.most_common(1)[0][0] if self._types else "F32"
        names: Mapping[str, Any] = gguf.LlamaFileType.__members__
        return int(names.get(f"MOSTLY_{most}", names["ALL_F32" if most == "F32" else "GUESSED"]))
