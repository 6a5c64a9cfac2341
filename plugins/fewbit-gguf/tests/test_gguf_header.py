"""Strangers' files: every damage is named, and nothing but a named error comes of any damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import write_model
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import CheckpointError, FewbitError, ModelError
from fewbit.models.load import load
from fewbit_gguf.files import GgufOpener
from fewbit_gguf.header import ArrayOf, read_header
from fewbit_gguf.tensors import GgufFiles
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("header") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def intact(folder: Path) -> Path:
    return write_model(folder, folder.parent / "intact.gguf", "Q4_0")


def changed(intact: Path, tmp_path: Path, *changes: tuple[int, bytes]) -> Path:
    data = bytearray(intact.read_bytes())
    for position, value in changes:
        data[position : position + len(value)] = value
    (tmp_path / "changed.gguf").write_bytes(data)
    return tmp_path / "changed.gguf"


def entry_of(intact: Path, name: str) -> int:
    """Byte after a tensor's name in the table."""
    data = intact.read_bytes()
    return data.index(struct.pack("<Q", len(name)) + name.encode(), read_header(intact).table_start) + 8 + len(name)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack(">I", 3), "big-endian, needed little-endian"),
        (4, struct.pack("<I", 1), "version 1, needed 2 or 3"),
        (4, struct.pack("<I", 4), "version 4, needed 2 or 3"),
        (8, struct.pack("<Q", 1 << 40), "ends within its header|dimensions|no UTF-8"),
        (16, struct.pack("<Q", 1 << 40), "ends within its header|unknown type"),
        (24, struct.pack("<Q", 1 << 63), "ends within its header"),
    ],
)
def test_the_first_bytes(intact: Path, tmp_path: Path, position: int, value: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"changed\.gguf.* (?:{message})|{message}"):
        read_header(changed(intact, tmp_path, (position, value)))


def test_an_unknown_tensor_type_is_named_b84(intact: Path, tmp_path: Path) -> None:
    name = "blk.0.ffn_up.weight"
    position = entry_of(intact, name) + 4 + 2 * 8
    assert intact.read_bytes()[position] == gguf.GGMLQuantizationType.Q4_0
    with pytest.raises(CheckpointError, match=rf"{name} in .*changed\.gguf has the tensor type 199"):
        read_header(changed(intact, tmp_path, (position, struct.pack("<I", 199))))
    with pytest.raises(CheckpointError, match=rf"{name} in .* is of type IQ2_XXS, .*Supported: F32.*Q6_K"):
        wide = struct.pack("<QQI", 256, 16, gguf.GGMLQuantizationType.IQ2_XXS)
        GgufFiles(changed(intact, tmp_path, (position - 16, wide)))


def test_dimensions_that_make_no_sense(intact: Path, tmp_path: Path) -> None:
    position = entry_of(intact, "blk.0.ffn_up.weight")
    for value, message in (
        (struct.pack("<I", 5), "has 5 dimensions"),
        (struct.pack("<IQ", 2, 33), "is Q4_0 and has rows of 33, needed multiples of 32"),
        (struct.pack("<IQQ", 2, 1 << 40, 1 << 20), "ends before blk.0.ffn_up.weight"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_header(changed(intact, tmp_path, (position, value)))


def test_a_file_that_is_cut_off_anywhere(intact: Path, tmp_path: Path) -> None:
    data = intact.read_bytes()
    head = read_header(intact).table_start + 400
    short = tmp_path / "short.gguf"
    for size in [*range(4, head, 7), len(data) - 1]:
        short.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"short\.gguf .*(ends within its header|ends before)"):
            read_header(short)
    for size in (0, 3):
        short.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="does not begin with GGUF"):
            read_header(short)


@given(position=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_header_gives_a_named_error_or_a_file(intact: Path, position: int, value: int) -> None:
    data = bytearray(intact.read_bytes())
    data[position] = value
    file = intact.parent / "damaged.gguf"
    file.write_bytes(data)
    try:
        GgufFiles(file)
    except FewbitError as error:
        assert error.message and error.hint


def test_metadata_is_read_and_arrays_are_passed_over(checkpoint) -> None:
    file = checkpoint("llamacpp-q40-llama-e")
    header, theirs = read_header(file), gguf.GGUFReader(file).fields
    for key, value in header.metadata.items():
        expected = theirs[key].contents()
        assert value == (ArrayOf(len(expected)) if isinstance(expected, list) else expected)
    assert header.architecture == "llama" and header.alignment == 32


def test_a_part_of_a_split_model_is_named(folder: Path, tmp_path: Path) -> None:
    file = write_model(folder, tmp_path / "a.gguf", metadata={"split.count": 5, "split.no": 1})
    with pytest.raises(CheckpointError, match=r"part 1 \(from 0\) of a model that is split into 5 files.*--merge"):
        read_header(file)


def test_a_key_or_a_tensor_twice(intact: Path, tmp_path: Path) -> None:
    data = intact.read_bytes()
    position = data.index(b"llama.context_length")
    with pytest.raises(CheckpointError, match=r"states general\.architecture twice"):
        read_header(changed(intact, tmp_path, (position, b"general.architecture")))
    position = data.index(b"blk.0.attn_k.weight")
    with pytest.raises(CheckpointError, match="holds a tensor twice"):
        read_header(changed(intact, tmp_path, (position, b"blk.0.attn_q.weight")))


def test_architectures_that_are_not_supported_are_named(folder: Path, tmp_path: Path, intact: Path) -> None:
    position = intact.read_bytes().index(b"general.architecture") + 20 + 4 + 8
    assert intact.read_bytes()[position : position + 5] == b"llama"
    with pytest.raises(ModelError, match=r"architecture 'bloom'.*Supported: llama, qwen2, qwen3"):
        GgufFiles(changed(intact, tmp_path, (position, b"bloom")))
    experts = write_model(folder, tmp_path / "experts.gguf", metadata={"llama.expert_count": 8})
    with pytest.raises(ModelError, match="llama model with experts"):
        GgufFiles(experts)


def test_a_tensor_without_a_place_is_an_error_and_a_known_extra_is_carried_b84(folder: Path, tmp_path: Path) -> None:
    stray = write_model(folder, tmp_path / "stray.gguf", tensors={"blk.0.stray.weight": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"holds blk\.0\.stray\.weight, for which a llama model has no place"):
        GgufFiles(stray)
    extra = {"rope_freqs.weight": np.ones(8, np.float32), "blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    model = load(write_model(folder, tmp_path / "extra.gguf", tensors=extra), device="cpu", dtype=torch.float32)
    assert sorted(model.fewbit_report.carried) == sorted(extra)


def test_a_quantized_vector_is_refused(intact: Path, tmp_path: Path) -> None:
    position = entry_of(intact, "output_norm.weight") + 4 + 8
    with pytest.raises(CheckpointError, match=r"output_norm\.weight .* is Q8_0 of shape \[64\], needed a matrix"):
        GgufFiles(changed(intact, tmp_path, (position, struct.pack("<I", gguf.GGMLQuantizationType.Q8_0))))


@pytest.mark.parametrize("key", ["block_count", "attention.head_count"])
def test_missing_numbers_are_named(intact: Path, tmp_path: Path, key: str) -> None:
    position = intact.read_bytes().index(f"llama.{key}".encode())
    with pytest.raises(CheckpointError, match=rf"llama\.{key} None, needed a positive integer"):
        GgufFiles(changed(intact, tmp_path, (position, b"other")))


def test_numbers_that_do_not_fit_the_tensors_are_named(intact: Path, tmp_path: Path) -> None:
    data = intact.read_bytes()
    for key, value, message in (
        ("block_count", (1 << 32) - 1, r"4294967295 blocks, but holds \d+ tensors"),
        ("attention.head_count", 5, r"blk\.0\.attn_q\.weight .* has 64 rows, .* 5 heads"),
    ):
        full = f"llama.{key}".encode()
        position = data.index(struct.pack("<Q", len(full)) + full) + 8 + len(full) + 4
        with pytest.raises(CheckpointError, match=message):
            GgufFiles(changed(intact, tmp_path, (position, struct.pack("<I", value))))


def test_a_file_that_changes_while_it_is_read(intact: Path, tmp_path: Path) -> None:
    file = changed(intact, tmp_path)
    files = GgufFiles(file)
    last = max(files.header.tensors.values(), key=lambda tensor: tensor.start)
    name = next(name for name in files.headers if files._tensors[name] is last)
    file.write_bytes(file.read_bytes()[: last.start + 1])
    with pytest.raises(CheckpointError, match=rf"ends within {name}"):
        files.load(name)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read any more"):
        files.load(name)
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        files.load("other")


def test_files_are_recognized_by_name_or_by_their_first_bytes(intact: Path, tmp_path: Path) -> None:
    opener = GgufOpener()
    assert opener.recognizes(intact)
    blob = tmp_path / "0123abcd"  # as a hub's cache names it
    blob.write_bytes(intact.read_bytes())
    assert opener.recognizes(blob)
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    assert not opener.recognizes(other) and not opener.recognizes(tmp_path)
