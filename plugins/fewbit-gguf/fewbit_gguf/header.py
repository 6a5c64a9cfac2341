"""The header of a GGUF file: metadata and the table of tensors, every length checked against the file's size.

gguf-py's own reader makes an array of every token of the vocabulary, which takes seconds, and does not say which tensor
is of a type that it does not know; this one passes over arrays and trusts nothing.

Layout (version 2 and 3, little-endian): magic, version u32, tensor count u64, metadata count u64; metadata as key, type
u32, value; tensors as name, dimension count u32, dimensions u64 (the contiguous one first), type u32, offset u64; then,
aligned, the data. Strings are a length u64 and UTF-8.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf

from fewbit.errors import CheckpointError
from fewbit_gguf.files import MAGIC

VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_ALIGNMENT = "general.alignment"
_DAMAGED = "Download it again."


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        type: GGUF's name of its type: `F32`, `Q4_K`, ...
        shape: in torch's order, [N, K] for a weight.
        start, nbytes: where its data lies in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a file says before its data.

    Attributes:
        metadata: key -> number, text or truth; of an array only its length is kept, as an `ArrayOf`.
        metadata_starts: key -> byte at which its value starts.
        tensors: name -> tensor, in the file's order.
        table_start: byte at which the table of tensors starts.
    """

    path: Path
    metadata: Mapping[str, Any]
    metadata_starts: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]
    table_start: int

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def alignment(self) -> int:
        """What tensors' offsets are multiples of."""
        return int(self.metadata.get(_ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT))

    def text(self, key: str) -> str:
        """A text of the metadata.

        Raises:
            CheckpointError: there is none of that key.
        """
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path} has {key} {value!r}, needed a text.", _DAMAGED)
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A positive integer of the metadata, of the file's architecture: `block_count`.

        Raises:
            CheckpointError: it is missing without a default, or no positive integer.
        """
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path} has {full} {value!r}, needed a positive integer.", _DAMAGED)
        return value


@dataclass(frozen=True)
class ArrayOf:
    """An array of the metadata that was passed over."""

    count: int


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a file.

    Raises:
        CheckpointError: the file is no GGUF file, is of another version or byte order, is cut off, is a part of a split
            model, or holds a tensor of an unknown type.
    """
    with path.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path} does not begin with GGUF.", "It is no GGUF file, or damaged.")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()


class _Parser:
    """Reads a header front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, len(MAGIC)

    def header(self) -> GgufHeader:
        (version,) = self.take("I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path} is big-endian, needed little-endian.", "Convert it with gguf-py.")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is of GGUF version {version}, needed 2 or 3.", "Convert it again.")
        tensor_count, metadata_count = self.take("QQ")
        metadata: dict[str, Any] = {}
        starts: dict[str, int] = {}
        for _ in range(metadata_count):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"{self.path} states {key} twice.", _DAMAGED)
            (kind,) = self.take("I")
            starts[key] = self.position
            metadata[key] = self.value(kind)
        self._refuse_part(metadata)
        table_start = self.position
        entries = [self.entry() for _ in range(tensor_count)]
        data_start = _aligned(self.position, self._alignment(metadata))
        tensors = {entry[0]: self.placed(entry, data_start) for entry in entries}
        if len(tensors) != len(entries):
            raise CheckpointError(f"{self.path} holds a tensor twice.", _DAMAGED)
        return GgufHeader(self.path, metadata, starts, tensors, table_start)

    def take(self, form: str) -> tuple[Any, ...]:
        """The next numbers, by `struct`'s letters."""
        size = struct.calcsize("<" + form)
        self.skip(size)
        return struct.unpack_from("<" + form, self.data, self.position - size)

    def skip(self, size: int) -> None:
        if self.position + size > len(self.data):
            raise CheckpointError(
                f"{self.path} ends within its header: {len(self.data)} bytes, needed {self.position + size} at least.",
                _DAMAGED,
            )
        self.position += size

    def string(self) -> str:
        (length,) = self.take("Q")
        self.skip(length)
        try:
            return self.data[self.position - length : self.position].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} has a text that is no UTF-8: {error}.", _DAMAGED) from error

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or nesting == _MAX_NESTING:
            raise CheckpointError(f"{self.path} has metadata of the unknown type {kind}.", _DAMAGED)
        inner, count = self.take("IQ")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                self.skip(self.take("Q")[0])
        else:
            for _ in range(count):
                self.value(inner, nesting + 1)
        return ArrayOf(count)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in torch's order, type id and offset of the next tensor of the table."""
        name = self.string()
        (count,) = self.take("I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{name} in {self.path} has {count} dimensions, needed 1 to 4.", _DAMAGED)
        dimensions = self.take(f"{count}Q")
        kind, offset = self.take("IQ")
        return name, dimensions[::-1], kind, offset

    def placed(self, entry: tuple[str, tuple[int, ...], int, int], data_start: int) -> GgufTensor:
        """The tensor of an entry of the table; `data_start` is what its offset counts from."""
        name, shape, kind, offset = entry
        try:
            known = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise CheckpointError(
                f"{name} in {self.path} has the tensor type {kind}, which is unknown.",
                "Install a newer gguf, or quantize to a common type (Q4_0, Q4_K, Q8_0).",
            ) from error
        elements, size = gguf.GGML_QUANT_SIZES[known]
        if shape[-1] % elements:
            raise CheckpointError(
                f"{name} in {self.path} is {known.name} and has rows of {shape[-1]}, needed multiples of {elements}.",
                _DAMAGED,
            )
        start, nbytes = data_start + offset, prod(shape) // elements * size
        if start + nbytes > len(self.data):
            raise CheckpointError(
                f"{self.path} has {len(self.data)} bytes and ends before {name}, which needs {start + nbytes}.",
                "The file is cut off; download it again.",
            )
        return GgufTensor(name, known.name, shape, start, nbytes)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get(_ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise CheckpointError(f"{self.path} has {_ALIGNMENT} {value!r}, needed a power of two.", _DAMAGED)
        return value

    def _refuse_part(self, metadata: Mapping[str, Any]) -> None:
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            number = metadata.get("split.no")
            raise CheckpointError(
                f"{self.path} is part {number} (from 0) of a model that is split into {parts} files.",
                "Merge them with llama-gguf-split --merge.",
            )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
