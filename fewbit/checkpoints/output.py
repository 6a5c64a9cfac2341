"""Writing a checkpoint folder: shards of bounded size, the files beside them, and a folder that appears only whole."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fewbit.checkpoints.dtypes import header_of
from fewbit.checkpoints.interface import TensorHeader
from fewbit.checkpoints.tensor_files import CONFIG, INDEX, SINGLE, inside
from fewbit.errors import OutputError
from fewbit.lazy import torch

_UNITS = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(["", "K", "M", "G", "T"])},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate(["K", "M", "G", "T"], start=1)},
}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}

_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.index.json",
)
_QUANTIZATION_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quantization_config.json",
    "fewbit_recipe.json",
    "quantization_report.json",
    "quantization_report.html",
)
_MAX_NESTED_BYTES = 100_000_000
"""Files of sub-folders beyond this are data (other exports of the model), not company of the tokenizer."""


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500 MiB` or `1000`; KB, MB, GB, TB count in thousands, KiB and so on in 1024s.

    Raises:
        OutputError: it is no size, or none above zero.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise OutputError(f"{text!r} is no size.", "Write a number and KB, MB, GB, KiB, MiB or GiB, say 5GB.")
    return size


class TensorBuffer:
    """Tensors by name that will be one file.

    Attributes:
        tensors: name -> tensor, each alone in its storage.
        nbytes: of all of them.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.nbytes = 0
        self._addresses: set[int] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, which must not change until it is written."""
        self.tensors[name] = self._owned(tensor)
        self.nbytes += tensor.nbytes

    def save(self, file: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Writes them all to a new file, `metadata` into its header.

        Raises:
            OutputError: safetensors refuses them.
            OSError: the file cannot be written.
        """
        from safetensors.torch import save_file  # imports torch

        try:
            save_file(self.tensors, file, metadata={**(metadata or {}), "format": "pt"})
        except SafetensorError as error:  # the library reports a full disk as text
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise OutputError(f"{file} cannot be written: {error}.", "See the message.") from error
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        file.chmod(file.parent.stat().st_mode & 0o666)  # the library creates files for their owner alone

    def _owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it alone fills its storage, in order; else a copy, because safetensors refuses views."""
        tensor = tensor.detach().cpu()
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if not whole or tensor.data_ptr() in self._addresses:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._addresses.add(tensor.data_ptr())
        return tensor


class ShardWriter:
    """Collects tensors and writes them in shards of at most `max_shard_bytes`; memory stays at one shard.

    Args:
        folder: where the shards go.
        max_shard_bytes: largest size of a shard.
        metadata: texts for a shard's header, given the headers of all tensors up to its last one.

    Attributes:
        folder: where the shards go.
        nbytes: bytes of all tensors added.
        file_of: tensor name -> file name, final after `finish`.
    """

    def __init__(
        self,
        folder: Path,
        max_shard_bytes: int,
        metadata: Callable[[Mapping[str, TensorHeader]], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.folder, self._metadata = folder, metadata
        self._headers: dict[str, TensorHeader] = {}
        self.max_shard_bytes = max_shard_bytes
        self.nbytes = 0
        self.file_of: dict[str, str] = {}
        self._shards: list[list[str]] = []
        self._buffer = TensorBuffer()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, which must not change until it is written; one larger than a shard gets its own.

        Raises:
            OutputError: the name was added before, or a shard cannot be written.
        """
        if name in self._buffer.tensors or name in self.file_of:
            raise OutputError(f"Tensor {name!r} is written twice.", "Two modules of the model have one name on disk.")
        if self._buffer.tensors and self._buffer.nbytes + tensor.nbytes > self.max_shard_bytes:
            self._flush()
        self._buffer.add(name, tensor)
        self._headers[name] = header_of(tensor)
        self.nbytes += tensor.nbytes

    def finish(self) -> list[str]:
        """Writes what is left, gives the shards their final names and writes the index; returns the files' names."""
        if self._buffer.tensors or not self._shards:
            self._flush()
        count = len(self._shards)
        names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        for number, (name, tensors) in enumerate(zip(names, self._shards, strict=True)):
            (self.folder / _temporary(number)).rename(self.folder / name)
            self.file_of.update(dict.fromkeys(tensors, name))
        if count == 1:
            return names
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(self.file_of.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [*names, INDEX]

    def _flush(self) -> None:
        file = self.folder / _temporary(len(self._shards))
        self._buffer.save(file, self._metadata(self._headers))
        self.file_of.update(dict.fromkeys(self._buffer.tensors, file.name))
        self._shards.append(list(self._buffer.tensors))
        self._buffer = TensorBuffer()


@contextmanager
def staged_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill that becomes `out` when the block ends well, and leaves no trace when it does not.

    Raises:
        OutputError: `out` exists, its parent cannot be written, or the disk is full.
    """
    with _staging(Path(out).absolute()) as staging:
        yield staging
        publish(staging, Path(out).absolute())


@contextmanager
def staged_file(out: str | Path) -> Iterator[Path]:
    """A path to write a file at that becomes `out` when the block ends well, and leaves no trace when it does not.

    Whatever else is written beside it is gone afterwards.

    Raises:
        OutputError: `out` exists, its parent cannot be written, or the disk is full.
    """
    out = Path(out).absolute()
    with _staging(out) as staging:
        yield staging / out.name
        publish(staging / out.name, out)


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is gone afterwards; parents of `out` that were missing too, where it is not there."""
    require_free(out)
    made: list[Path] = []
    staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        with disk_errors(out, staging):
            made = make_parents(out.parent)
            staging.mkdir()
            yield staging
            made = []
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in reversed(made):
            folder.rmdir()


def publish(staging: Path, out: Path) -> None:
    """Gives a complete folder or file its name, its bytes being on disk before.

    Raises:
        OutputError: `out` exists by now.
    """
    for path in (*(staging.rglob("*") if staging.is_dir() else ()), staging):
        sync(path)
    require_free(out)
    staging.rename(out)
    sync(out.parent)


def copy_side_files(source: Path, destination: Path) -> list[str]:
    """Copies what makes a model folder complete besides weights: configurations, tokenizer, templates, code, texts.

    Left out: weights in any format and their indices, files that describe a quantization, config.json (its writer
    changes it), hidden files and folders, and large files of sub-folders.

    Returns:
        Names relative to `source`, sorted.

    Raises:
        CheckpointError: a link leads out of `source`.
    """
    copied = []
    for file in _visible_files(source):
        name = file.relative_to(source)
        weights = any(name.match(pattern) for pattern in _WEIGHTS)
        if weights or name.name in _QUANTIZATION_FILES or str(name) == CONFIG:
            continue
        if len(name.parts) > 1 and file.stat().st_size > _MAX_NESTED_BYTES:
            continue
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(inside(source, str(name)), target)
        copied.append(str(name))
    return sorted(copied)


def _visible_files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or (entry.is_dir() and entry.is_symlink()):
            continue
        if entry.is_dir():
            yield from _visible_files(entry)
        elif entry.is_file():
            yield entry


def _temporary(number: int) -> str:
    return f"shard-{number:05}.safetensors"


def require_free(out: Path) -> None:
    """Raises OutputError where something of that name exists."""
    if out.exists() or out.is_symlink():
        raise OutputError(f"{out} exists already.", "Choose another folder, or remove it.")


def make_parents(folder: Path) -> list[Path]:
    """Creates `folder`; returns the folders that were not there, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def sync(path: Path) -> None:
    """Forces a file or a directory to disk, so that a crash after a rename cannot leave an empty one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(out: Path, staging: Path) -> Iterator[None]:
    """Turns errors of the output's own place into OutputError; errors of other files, sources say, pass."""
    try:
        yield
    except OSError as error:
        place = Path(str(error.filename)) if error.filename else None
        ours = place is not None and (place.is_relative_to(staging) or staging.is_relative_to(place))
        if not ours and error.errno not in _NO_ROOM:
            raise
        free = shutil.disk_usage(next(path for path in out.parents if path.exists())).free
        raise OutputError(
            f"{out} cannot be written: {os.strerror(error.errno) if error.errno else error} ({free} bytes are free).",
            "Make room or choose another folder.",
        ) from error
