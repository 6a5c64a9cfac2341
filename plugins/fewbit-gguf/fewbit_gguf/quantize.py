"""llama.cpp's own rules for rounding to its simple block types, and a file quantized by them, bit for bit.

They differ from fewbit's rules: codes follow from the scale before it is rounded to float16, and a number halfway
between two of MXFP4 goes to the smaller one. Source: formats.md section 10, checked against gguf-py 0.19.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import torch
from torch import Tensor

from fewbit.errors import CheckpointError, OutputError, closest
from fewbit.numerics import QuantizedTensor, code_dtype
from fewbit_gguf.blocks import BLOCK_TYPES
from fewbit_gguf.files import MAGIC
from fewbit_gguf.format import Gguf, tensor_name
from fewbit_gguf.header import VERSIONS, GgufHeader, GgufTensor, read_header

_FLOATS = {"F32": np.float32, "F16": np.float16}
_TABLES = ("token_embd.weight", "output.weight")
_METADATA_COUNT = 16
"""Byte of the count of metadata entries."""

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize(numbers: Tensor, block_type: str) -> QuantizedTensor:
    """A weight rounded to a block type as llama.cpp rounds it without an importance matrix.

    Args:
        numbers: [N, K], finite; the type's block divides K.
        block_type: one of `RULES`.

    Raises:
        OutputError: there is no rule for the type (K-quants search for their scales).
        CheckpointError: the numbers are not finite.
    """
    if block_type not in RULES:
        raise OutputError(f"fewbit does not quantize to {block_type!r}.", closest(block_type, RULES))
    if not bool(numbers.isfinite().all()):
        raise CheckpointError("A weight holds NaN or infinity.", "Repair the source model.")
    one = BLOCK_TYPES[block_type]
    blocks = numbers.float().reshape(numbers.shape[0], -1, one.elements)
    fields, floats = RULES[block_type](blocks)
    codes = fields.flatten(1).to(code_dtype(one.key.weight.element))
    return QuantizedTensor(one.key.weight, (numbers.shape[0], numbers.shape[1]), {"codes": codes, **floats})


def requantize(source: Path, output: Path, block_type: str, tables: str = "Q8_0") -> None:
    """Writes an F16 or F32 GGUF file again with its matrices in a block type; everything else is copied.

    Args:
        source: the file.
        output: must not exist; it appears complete or not at all.
        block_type: of the matrices inside the decoder's blocks; one of `RULES`.
        tables: of the embedding and the head.

    Raises:
        CheckpointError: the source is damaged or quantized already.
        OutputError: the output exists, or there is no rule for a type.
    """
    if output.exists():
        raise OutputError(f"{output} exists already.", "Choose another name, or remove it.")
    header = read_header(source)
    wanted = {name: tables if name in _TABLES else block_type for name in header.tensors}
    types = {name: _new_type(tensor, wanted[name]) for name, tensor in header.tensors.items()}
    unfinished = output.with_name(f"{output.name}.part")
    try:
        with unfinished.open("wb") as stream, source.open("rb") as original:
            _write_head(stream, original, header, types, block_type)
            for name, tensor in header.tensors.items():
                stream.write(_converted(tensor, types[name], source))
                stream.write(bytes(-stream.tell() % header.alignment))
        unfinished.rename(output)
    finally:
        unfinished.unlink(missing_ok=True)


def _new_type(tensor: GgufTensor, wanted: str) -> str:
    if wanted not in RULES:
        raise OutputError(f"fewbit does not quantize to {wanted!r}.", closest(wanted, RULES))
    if tensor.type not in _FLOATS:
        raise CheckpointError(f"{tensor.name} is {tensor.type} already.", "Give a file of F16 or F32.")
    return tensor.type if len(tensor.shape) != 2 or tensor.shape[1] % BLOCK_TYPES[wanted].elements else wanted


def _converted(tensor: GgufTensor, new_type: str, source: Path) -> bytes:
    data = np.fromfile(source, np.uint8, count=tensor.nbytes, offset=tensor.start)
    if new_type == tensor.type:
        return data.tobytes()
    numbers = torch.from_numpy(data.view(_FLOATS[tensor.type])).reshape(tensor.shape)
    one = BLOCK_TYPES[new_type]
    return Gguf().write(quantize(numbers, new_type), one.key)[tensor_name(new_type)].numpy().tobytes()


def _write_head(
    stream: BinaryIO, original: BinaryIO, header: GgufHeader, types: dict[str, str], block_type: str
) -> None:
    """Metadata as it was but for the file type, and the new table of tensors."""
    metadata = bytearray(original.read(header.table_start))
    struct.pack_into("<I", metadata, len(MAGIC), VERSIONS[-1])
    file_type = getattr(gguf.LlamaFileType, f"MOSTLY_{block_type}", gguf.LlamaFileType.GUESSED)
    stated = {"general.quantization_version": gguf.GGML_QUANT_VERSION, "general.file_type": int(file_type)}
    for key, value in stated.items():
        if key in header.metadata_starts:
            if struct.unpack_from("<I", metadata, header.metadata_starts[key] - 4)[0] != gguf.GGUFValueType.UINT32:
                raise CheckpointError(f"{key} in {header.path} is no unsigned 32-bit integer.", "The file is damaged.")
            struct.pack_into("<I", metadata, header.metadata_starts[key], value)
        else:
            metadata += _string(key) + struct.pack("<II", gguf.GGUFValueType.UINT32, value)
    added = len(stated.keys() - header.metadata_starts.keys())
    struct.pack_into("<Q", metadata, _METADATA_COUNT, len(header.metadata) + added)
    stream.write(metadata)
    offset = 0
    for name, tensor in header.tensors.items():
        kind = gguf.GGMLQuantizationType[types[name]]
        dimensions = tensor.shape[::-1]
        stream.write(_string(name))
        stream.write(struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, int(kind), offset))
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = tensor.shape[-1] // elements * size * int(np.prod(tensor.shape[:-1]))
        offset += nbytes + -nbytes % header.alignment
    stream.write(bytes(-stream.tell() % header.alignment))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


Rule = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


def _signed(half: int) -> Rule:
    """The number of largest magnitude, with its sign, becomes the code -half."""

    def rule(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = extreme / -half
        fields = torch.trunc(blocks * _reciprocal(scale) + (half + 0.5)).clamp(0, 2 * half - 1)
        return fields - half, {"scale": scale.squeeze(-1).half()}

    return rule


def _from_minimum(top: int) -> Rule:
    """Codes 0 to `top` span the block's range."""

    def rule(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        scale = (high - low) / top
        fields = torch.trunc((blocks - low) * _reciprocal(scale) + 0.5).clamp(0, top)
        return fields, {"scale": scale.squeeze(-1).half(), "minimum": low.squeeze(-1).half()}

    return rule


def _eight_bits(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The largest magnitude becomes 127; halves are rounded away from zero."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * _reciprocal(scale)
    whole = scaled.abs().floor()
    rounded = whole + torch.floor(2 * (scaled.abs() - whole))
    return scaled.sign() * rounded, {"scale": scale.squeeze(-1).half()}


def _powers_of_two(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The scale is floor(log2(largest)) - 2, OCP's own rule; no code stands for a minus zero."""
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - 2, -127).clamp(min=-127)
    magnitudes = torch.ldexp(blocks.abs(), -exponent)
    fields = torch.bucketize(magnitudes, torch.tensor(_MIDPOINTS))
    fields = fields + 8 * ((blocks < 0) & (fields > 0))
    return fields, {"scale": (exponent + 127).squeeze(-1).to(torch.uint8)}


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


RULES: dict[str, Rule] = {
    "Q4_0": _signed(8),
    "Q4_1": _from_minimum(15),
    "Q5_0": _signed(16),
    "Q5_1": _from_minimum(31),
    "Q8_0": _eight_bits,
    "MXFP4": _powers_of_two,
}
"""By block type: from blocks [N, B, elements] to codes of that shape and the block's floats [N, B] by role."""
