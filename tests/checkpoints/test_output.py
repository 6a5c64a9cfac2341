"""Writing checkpoint folders: shards, side files, and that a failure leaves nothing behind."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from fewbit.checkpoints.output import ShardWriter, copy_side_files, parse_size, staged_folder
from fewbit.checkpoints.tensor_files import INDEX, TensorFolder
from fewbit.errors import CheckpointError, OutputError
from tests.checkpoints.layers import same_bits

# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("5 GiB", 5 * 2**30), ("1.5mb", 1_500_000), ("7KiB", 7168), ("123", 123), (" 2kb ", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "-5GB", "0", "0.1", "5 GB more", "nan", "1e9", "\N{ARABIC-INDIC DIGIT FIVE}GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OutputError, match="no size"):
        parse_size(text)


# --- shards ----------------------------------------------------------------------------------------------------------


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 1000)
    writer.add("a", torch.ones(3))
    assert writer.finish() == ["model.safetensors"]
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_and_index(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 100)
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)} | {"big": torch.arange(100.0)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    names = writer.finish()
    assert names[:-1] == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert list(index["weight_map"]) == sorted(tensors)
    assert index["weight_map"] == writer.file_of
    folder = TensorFolder(tmp_path)
    assert folder.nbytes == writer.nbytes
    assert all(same_bits(folder.load(name), tensor) for name, tensor in tensors.items())
    assert all(file.stat().st_size < 100 + 400 for file in tmp_path.iterdir() if file.name != writer.file_of["big"])


@given(sizes=st.lists(st.integers(0, 60), max_size=12), limit=st.integers(1, 200))
def test_any_sizes(sizes: list[int], limit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, limit)
    tensors = {str(i): torch.rand(size) for i, size in enumerate(sizes)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    read = TensorFolder(folder)
    assert read.headers.keys() == tensors.keys()
    assert all(same_bits(read.load(name), tensor) for name, tensor in tensors.items())


def test_views_and_shared_storage_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "t": base.t(),
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "base": base,
        "tied": base,
        "expanded": base[:1].expand(3, 6),
    }
    writer = ShardWriter(tmp_path, 10**6)
    for name, tensor in views.items():
        writer.add(name, tensor)
    writer.finish()
    folder = TensorFolder(tmp_path)
    assert all(same_bits(folder.load(name), tensor.contiguous()) for name, tensor in views.items())
    assert folder.nbytes == writer.nbytes


@pytest.mark.parametrize("limit", [1, 10**6])
def test_a_name_is_written_once(limit: int, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, limit)
    writer.add("a", torch.ones(3))
    writer.add("b", torch.ones(3))
    with pytest.raises(OutputError, match="'a' is written twice"):
        writer.add("a", torch.ones(3))


def test_shards_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    writer = ShardWriter(tmp_path, 10**6)
    writer.add("a", torch.ones(3))
    writer.finish()
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o644


# --- the folder ------------------------------------------------------------------------------------------------------


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_the_folder_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with staged_folder(out) as folder:
        assert not out.exists()
        assert folder.name.startswith(".")
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
    assert tree(tmp_path) == {"new", "new/out", "new/out/sub", "new/out/sub/file"}


def test_errors_of_a_source_beside_the_output_are_not_the_outputs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged_folder(tmp_path / "out"):
        (tmp_path / "source").read_text()


def test_errors_within_the_output_are_the_outputs(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"), staged_folder(tmp_path / "out") as folder:
        (folder / "missing" / "file").write_text("x")


@pytest.mark.parametrize("error", [ValueError("inside"), KeyboardInterrupt()])
def test_an_exception_leaves_no_trace(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), staged_folder(tmp_path / "new" / "out") as folder:
        (folder / "file").write_text("x")
        raise error
    assert tree(tmp_path) == set()


def test_an_existing_output_is_refused_early_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(OutputError, match=r"exists already.*Choose another folder"), staged_folder(out):
        pytest.fail("must not start")
    assert tree(tmp_path) == {"out", "out/precious"}


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="exists already"), staged_folder(out) as folder:
        (folder / "file").write_text("x")
        out.mkdir()  # empty: a plain rename would silently replace it
    assert tree(tmp_path) == {"out"}


def test_a_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"), staged_folder(tmp_path / "out"):
        pytest.fail("must not start")


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"), staged_folder(tmp_path / "file" / "out"):
        pytest.fail("must not start")
    assert tree(tmp_path) == {"file"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with (
        pytest.raises(OutputError, match=r"No space left on device \(\d+ bytes are free\)"),
        staged_folder(tmp_path / "out") as folder,
    ):
        writer = ShardWriter(folder, 10)
        writer.add("a", torch.ones(3))
        writer.finish()
    assert tree(tmp_path) == set()


def test_other_errors_of_the_library_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise SafetensorError("something else")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    writer = ShardWriter(tmp_path, 10)
    with pytest.raises(OutputError, match="something else"):
        writer.finish()


# --- side files ------------------------------------------------------------------------------------------------------

KEPT = [
    "LICENSE",
    "README.md",
    "chat_template.jinja",
    "generation_config.json",
    "modeling_custom.py",
    "special/vocab.txt",
    "tokenizer.json",
    "tokenizer.model",
]
LEFT = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quantization_config.json",
    "fewbit_recipe.json",
    "quantization_report.json",
    ".gitattributes",
    ".cache/huggingface/download.json",
]


def test_side_files(tmp_path: Path) -> None:
    """B71: everything but weights and what describes them."""
    source, destination = tmp_path / "source", tmp_path / "destination"
    for name in [*KEPT, *LEFT]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    destination.mkdir()
    assert copy_side_files(source, destination) == KEPT
    assert tree(destination) == {*KEPT, "special"}
    assert all((destination / name).read_text() == name for name in KEPT)


def test_side_files_that_link_out(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    destination.mkdir()
    (tmp_path / "secret").write_text("key")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*leads out"):
        copy_side_files(source, destination)


def test_large_files_of_sub_folders_stay(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    (source / "sub").mkdir(parents=True)
    destination.mkdir()
    with (source / "sub" / "data").open("wb") as stream:
        stream.truncate(100_000_001)
    assert copy_side_files(source, destination) == []
