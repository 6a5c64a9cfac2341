"""What fewbit asks about every path: whether it is a GGUF file. The rest is imported when one is opened or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from fewbit.checkpoints.files import CheckpointFiles, CheckpointOpener, CheckpointWriter, ModelParts

MAGIC = b"GGUF"


class GgufOpener(CheckpointOpener):
    """Opens and writes .gguf files; see `fewbit.checkpoints.files`."""

    name: ClassVar[str] = ".gguf"
    writes: ClassVar[str] = "gguf"

    def recognizes(self, path: Path) -> bool:
        if not path.is_file():
            return False
        if path.suffix.lower() == ".gguf":
            return True
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC

    def open(self, path: Path) -> CheckpointFiles:
        from fewbit_gguf.tensors import GgufFiles

        return GgufFiles(path)

    def model_config(self, path: Path) -> Any:
        from fewbit_gguf.config import read_model_config
        from fewbit_gguf.tensors import GgufFiles

        return read_model_config(GgufFiles(path))

    def tokenizer(self, path: Path) -> Any:
        from fewbit_gguf.config import read_tokenizer

        return read_tokenizer(path)

    def create(self, path: Path, model: ModelParts) -> CheckpointWriter:
        from fewbit_gguf.write import GgufWriter

        return GgufWriter(path, model)
