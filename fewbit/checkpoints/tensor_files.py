"""Reading a checkpoint folder: its configuration, the headers of all its shards, and tensors one at a time.

A checkpoint is a stranger's file. Its shards are checked by safetensors' own parser before anything is read, names in
an index cannot lead out of the folder, and no pickle is ever opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fewbit.checkpoints.dtypes import TORCH_NAMES, torch_dtype
from fewbit.checkpoints.files import CheckpointFiles
from fewbit.checkpoints.interface import TensorHeader, split_at_last_dot
from fewbit.errors import CheckpointError
from fewbit.lazy import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
MAX_JSON_BYTES = 100_000_000
READERS = 4
"""Threads that read a whole checkpoint to know its bytes; hashing one is slower than most disks."""

PIECE_BYTES = 1 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorFolder(CheckpointFiles):
    """A checkpoint folder, or one .safetensors file, opened lazily.

    Attributes:
        path: the folder.
        headers: tensor name -> header, over all shards.
        file_of: tensor name -> file name.
        metadata: the texts beside the tensors in the shards' headers (torchao describes its tensors there).
        unindexed: names of tensors that shards hold and the index does not mention; they are in `headers` too.
        unused_files: .safetensors files in the folder that are no part of the checkpoint.

    Raises:
        CheckpointError: the folder or a shard is missing, damaged or malformed, or leads out of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        given = Path(path)
        if not given.exists():
            raise CheckpointError(
                f"{given} does not exist.", "Give a folder with .safetensors files, or one such file."
            )
        self.path = given.parent if given.is_file() else given
        self.headers: dict[str, TensorHeader] = {}
        self.file_of: dict[str, str] = {}
        self.metadata: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        indexed = None if given.is_file() else self._index()
        files = [given] if given.is_file() else all_inside(self.path, self._shards(indexed))
        for file in files:
            self._add_shard(file)
        self.unindexed = tuple(name for name in self.headers if indexed is not None and name not in indexed)
        self.unused_files = tuple(sorted(found.name for found in {*self.path.glob("*.safetensors")} - {*files}))
        if indexed:
            self._check_index(indexed)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or an empty dict where there is none."""
        return self.json(CONFIG) or {}

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the folder, or None where there is no such file.

        Raises:
            CheckpointError: it is larger than 100 MB, malformed, or no object.
        """
        file = self.path / name
        if not file.is_file():
            return None
        inside(self.path, name)
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{file} has {size} bytes, at most {MAX_JSON_BYTES} are read.", "It is damaged or hostile."
            )
        try:
            value = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is no JSON: {error}.", "Download it again.") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{file} holds a {type(value).__name__}, needed an object.", "Download it again.")
        return value

    def load(self, name: str) -> torch.Tensor:
        """An owned copy of a tensor; no memory map stays behind.

        Raises:
            CheckpointError: there is no such tensor, its dtype has no counterpart in torch, or the file has changed.
        """
        if name not in self.headers:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}.", "See `headers` for the names.")
        file, header, (start, end) = self.path / self.file_of[name], self.headers[name], self._spans[name]
        if header.dtype not in TORCH_NAMES:
            raise CheckpointError(f"{name} in {file} is {header.dtype}, which torch cannot hold.", "Convert the file.")
        if start == end:
            return torch.empty(header.shape, dtype=torch_dtype(header.dtype))
        import numpy as np  # where headers are looked at, nothing is loaded

        try:
            data = torch.from_numpy(np.fromfile(file, np.uint8, count=end - start, offset=start))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read any more: {error}.", "Start again.") from error
        if data.numel() != end - start:
            raise CheckpointError(f"{file} ends within {name}: it was changed while being read.", "Start again.")
        return data.view(torch_dtype(header.dtype)).reshape(header.shape)

    def digests(self) -> dict[str, bytes]:
        """The SHA-256 of every tensor's bytes, by name; files are read once, by several threads."""
        with ThreadPoolExecutor(READERS) as pool:
            return dict(zip(self.headers, pool.map(self._digest, self.headers), strict=True))

    def _digest(self, name: str) -> bytes:
        start, end = self._spans[name]
        digest, piece = hashlib.sha256(), memoryview(bytearray(min(PIECE_BYTES, end - start)))
        with (self.path / self.file_of[name]).open("rb") as stream:
            stream.seek(start)
            while start < end:
                read = stream.readinto(piece[: end - start])
                if not read:
                    break
                digest.update(piece[:read])
                start += read
        return digest.digest()

    def _index(self) -> dict[str, str] | None:
        index = self.json(INDEX)
        if index is None:
            return None
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / INDEX} has no weight_map.", "Download it again.")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise CheckpointError(f"{self.path / INDEX} gives {name} the file {file!r}, needed a name.", "Mend it.")
        return weight_map

    def _shards(self, indexed: Mapping[str, str] | None) -> list[str]:
        if indexed is not None:
            return sorted(set(indexed.values()))
        if (self.path / SINGLE).exists():
            return [SINGLE]
        found = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not found:
            pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
            if pickles:
                raise CheckpointError(
                    f"{self.path} holds only pickled weights ({pickles[0]}), which can run code when opened.",
                    "Convert them to safetensors.",
                )
            raise CheckpointError(f"{self.path} holds no .safetensors file.", "Give the folder of a checkpoint.")
        return found

    def _add_shard(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, and {INDEX} names it.", "Download the missing shard.")
        headers, metadata = _read_headers(file)
        self.metadata |= metadata
        for tensor, (header, span) in headers.items():
            if tensor in self.headers:
                raise CheckpointError(
                    f"{tensor} is in {self.file_of[tensor]} and in {file.name} of {self.path}.",
                    "Keep the shards of one checkpoint only.",
                )
            self.headers[tensor], self.file_of[tensor], self._spans[tensor] = header, file.name, span

    def _check_index(self, indexed: Mapping[str, str]) -> None:
        for name, file in indexed.items():
            found = self.file_of.get(name)
            if found != file:
                where = f"it is in {found}" if found else "no shard holds it"
                raise CheckpointError(
                    f"{self.path / INDEX} says that {name} is in {file}, but {where}.", "Download the checkpoint again."
                )


def by_module(
    headers: Mapping[str, TensorHeader], split: Callable[[str], tuple[str, str]] = split_at_last_dot
) -> dict[str, dict[str, TensorHeader]]:
    """Headers by module name, then by the tensor's name below it: {`model.norm`: {`weight`: ...}}.

    Args:
        headers: by full name.
        split: how the checkpoint's format takes names apart, see `CheckpointFormat.split`.
    """
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, tensor = split(name)
        modules.setdefault(module, {})[tensor] = header
    return modules


def inside(folder: Path, name: str) -> Path:
    """The path of a file that a checkpoint names, links resolved.

    Raises:
        CheckpointError: it lies outside the folder. A hub cache, whose snapshots link into a sibling folder `blobs`, is
            no exception to the user: those blobs belong to the snapshot.
    """
    return all_inside(folder, [name])[0]


def all_inside(folder: Path, names: Sequence[str]) -> list[Path]:
    """`inside` for many names."""
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    starts = tuple(f"{place}{os.sep}" for place in allowed)
    for name in names:
        target = os.path.realpath(folder / name)
        if Path(name).is_absolute() or not f"{target}{os.sep}".startswith(starts):
            raise CheckpointError(
                f"{name!r} in {folder} leads out of the folder, to {target}.", "Put the file itself into the folder."
            )
    return [folder / name for name in names]


def _read_headers(file: Path) -> tuple[dict[str, tuple[TensorHeader, tuple[int, int]]], dict[str, str]]:
    """Tensor name -> header and the span of its bytes in the file; and the file's metadata."""
    try:
        with safe_open(file, "np"):  # "pt" would import torch
            pass  # the parser has now checked the header's size, every dtype, shape and offset, and the file's length
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), sys.byteorder)
            entries = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no intact safetensors file: {error}.", "Download it again.") from error
    start = 8 + length
    metadata = entries.pop("__metadata__", None) or {}
    headers = {
        name: (
            TensorHeader(entry["dtype"], tuple(entry["shape"])),
            (start + entry["data_offsets"][0], start + entry["data_offsets"][1]),
        )
        for name, entry in entries.items()
    }
    return headers, metadata
