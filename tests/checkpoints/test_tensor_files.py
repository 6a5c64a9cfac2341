"""Opening checkpoint folders: what is found, and what a damaged or hostile folder is told."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fewbit.checkpoints.dtypes import TORCH_NAMES, nbytes, torch_dtype
from fewbit.checkpoints.interface import TensorHeader
from fewbit.checkpoints.tensor_files import INDEX, MAX_JSON_BYTES, TensorFolder, by_module
from fewbit.errors import CheckpointError
from tests.checkpoints.layers import same_bits

FIRST = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.scale": torch.ones(1, dtype=torch.bfloat16)}
SECOND = {"b.weight": torch.arange(4, dtype=torch.int32)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    for tensors, shard in zip((FIRST, SECOND), SHARDS, strict=True):
        save_file(tensors, tmp_path / shard)
    write_index(tmp_path, dict.fromkeys(FIRST, SHARDS[0]) | dict.fromkeys(SECOND, SHARDS[1]))
    return tmp_path


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header, honest or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


# --- what is found ---------------------------------------------------------------------------------------------------


def test_headers_over_all_shards(sharded: Path) -> None:
    folder = TensorFolder(sharded)
    assert folder.headers == {
        "a.weight": TensorHeader("F32", (2, 3)),
        "a.scale": TensorHeader("BF16", (1,)),
        "b.weight": TensorHeader("I32", (4,)),
    }
    assert folder.file_of == weight_map(sharded)
    assert folder.nbytes == 24 + 2 + 16
    assert by_module(folder.headers)["a"].keys() == {"weight", "scale"}
    assert folder.config == {}


def test_loaded_tensors_are_those_saved(sharded: Path) -> None:
    folder = TensorFolder(sharded)
    for name, tensor in (FIRST | SECOND).items():
        assert same_bits(folder.load(name), tensor)
    with pytest.raises(CheckpointError, match=r"no tensor 'c\.weight'"):
        folder.load("c.weight")


@pytest.mark.parametrize("dtype", map(torch_dtype, TORCH_NAMES), ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randint(0, 2, (3, 16), dtype=torch.uint8).view(dtype)
    save_file({"t": tensor, "empty": tensor[:0]}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert same_bits(folder.load("t"), tensor)
    assert same_bits(folder.load("empty"), tensor[:0])
    assert nbytes(folder.headers["t"]) == tensor.nbytes


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_one_file_as_a_folder_or_by_its_path(name: str, tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / name)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    for path in (tmp_path, tmp_path / name, str(tmp_path)):
        folder = TensorFolder(path)
        assert folder.headers.keys() == FIRST.keys()
        assert folder.config == {"hidden_size": 3}


def test_files_beside_the_checkpoint_are_listed_and_not_read(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"not read")
    assert TensorFolder(sharded).unused_files == ("consolidated.safetensors",)


def test_tensors_that_the_index_forgets_are_reported(sharded: Path) -> None:
    write_index(sharded, {name: file for name, file in weight_map(sharded).items() if name != "a.scale"})
    folder = TensorFolder(sharded)
    assert folder.unindexed == ("a.scale",)
    assert same_bits(folder.load("a.scale"), FIRST["a.scale"])


def test_a_hub_cache_links_its_shards(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("models--maker--model")
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        (cache / "blobs" / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert same_bits(TensorFolder(snapshot).load("b.weight"), SECOND["b.weight"])


def test_memory_stays_at_one_tensor(tmp_path: Path) -> None:
    save_file({f"t{i}": torch.randn(1000, 1000) for i in range(50)}, tmp_path / "model.safetensors")
    folder, process = TensorFolder(tmp_path), psutil.Process()
    gc.collect()
    before, most = process.memory_info().rss, 0
    for name in folder.headers:
        tensor = folder.load(name)
        assert tensor.sum().isfinite()
        most = max(most, process.memory_info().rss)
    del tensor
    gc.collect()
    assert folder.nbytes == 200_000_000
    assert most - before < 60_000_000
    assert process.memory_info().rss - before < 30_000_000


def test_a_link_that_the_user_names(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("elsewhere") / "weights.safetensors"
    link.symlink_to(sharded / SHARDS[1])
    assert same_bits(TensorFolder(link).load("b.weight"), SECOND["b.weight"])


# --- folders that are not whole --------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        TensorFolder(tmp_path / "nowhere")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        TensorFolder(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*Convert them to safetensors"):
        TensorFolder(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} is missing"):
        TensorFolder(sharded)


def test_a_tensor_that_no_shard_holds(sharded: Path) -> None:
    write_index(sharded, weight_map(sharded) | {"c.weight": SHARDS[0]})
    with pytest.raises(CheckpointError, match=r"c\.weight is in .*no shard holds it"):
        TensorFolder(sharded)


def test_a_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    write_index(sharded, weight_map(sharded) | {"a.scale": SHARDS[1]})
    with pytest.raises(CheckpointError, match=rf"a\.scale is in {SHARDS[1]}, but it is in {SHARDS[0]}"):
        TensorFolder(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file(SECOND | {"a.scale": FIRST["a.scale"]}, sharded / SHARDS[1])
    with pytest.raises(CheckpointError, match=r"a\.scale is in .*00001.* and in .*00002"):
        TensorFolder(sharded)


# --- folders of an enemy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "climb", ["../secret.safetensors", "sub/../../secret.safetensors", "{root}/secret.safetensors"]
)
def test_an_index_that_climbs_out(climb: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(FIRST, tmp_path / "secret.safetensors")
    write_index(folder, dict.fromkeys(FIRST, climb.format(root=tmp_path)))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        TensorFolder(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX])
def test_a_link_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(FIRST, tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    if name == "config.json":
        save_file(FIRST, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        _ = TensorFolder(folder).config


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"a": ' * 100_000,
        b'{"weight_map": {"a": ' + b"9" * 10_000 + b"}}",
    ],
    ids=["empty", "cut", "list", "not utf-8", "list map", "number for a file", "too deep", "huge number"],
)
def test_a_malformed_index(text: bytes, sharded: Path) -> None:
    (sharded / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=INDEX.replace(".", r"\.")):
        TensorFolder(sharded)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_json_of_absurd_size_is_not_read(name: str, sharded: Path) -> None:
    with (sharded / name).open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"{MAX_JSON_BYTES + 1} bytes"):
        _ = TensorFolder(sharded).config


def test_a_malformed_config(sharded: Path) -> None:
    (sharded / "config.json").write_text("{'hidden_size': 3}")
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON"):
        _ = TensorFolder(sharded).config


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES: dict[str, tuple[Any, bytes]] = {
    "offsets beyond the file": ({"t": ENTRY | {"shape": [200], "data_offsets": [0, 800]}}, bytes(8)),
    "data that nobody owns": ({"t": ENTRY}, bytes(80)),
    "overlap": ({"t": ENTRY, "u": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)),
    "hole": ({"t": ENTRY, "u": ENTRY | {"data_offsets": [16, 24]}}, bytes(24)),
    "backwards": ({"t": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)),
    "shape and span differ": ({"t": ENTRY | {"shape": [3]}}, bytes(8)),
    "shape overflows": ({"t": ENTRY | {"shape": [2**33, 2**33]}}, bytes(8)),
    "shape overflows to fit": ({"t": ENTRY | {"shape": [2**62, 2, 2], "data_offsets": [0, 0]}}, b""),
    "negative shape": ({"t": ENTRY | {"shape": [-2]}}, bytes(8)),
    "unknown dtype": ({"t": ENTRY | {"dtype": "F7"}}, bytes(8)),
    "no offsets": ({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "list": ([], b""),
    "no JSON": (b"{" * 10, b""),
    "nested": (b'{"a":' * 50_000, b""),
    "empty": (b"", b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(lie: str, tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", *LIES[lie])
    with pytest.raises(CheckpointError, match="no intact safetensors file"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 200_000_000, 10_000])
def test_a_header_longer_than_the_file(length: int, tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"t": ENTRY}, bytes(8), length)
    with pytest.raises(CheckpointError, match="no intact safetensors file"):
        TensorFolder(tmp_path)


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors is no intact"):
            TensorFolder(cut)


@given(data=st.data())
def test_damaged_bytes_never_crash(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file(FIRST, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        folder = TensorFolder(file)
        for name in folder.headers:
            folder.load(name)
    except CheckpointError as error:
        assert error.hint


def test_a_file_that_shrinks_while_open(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"ends within a\.weight"):
        folder.load("a.weight")


# --- metadata --------------------------------------------------------------------------------------------------------


def test_texts_of_all_shards(tmp_path: Path) -> None:
    for file, tensors in zip(("a.safetensors", "b.safetensors"), (FIRST, SECOND), strict=True):
        save_file(tensors, tmp_path / file, {"format": "pt", file: "text"})
    assert TensorFolder(tmp_path).metadata == {"format": "pt", "a.safetensors": "text", "b.safetensors": "text"}
    save_file(FIRST, tmp_path / "alone.safetensors")
    assert TensorFolder(tmp_path / "alone.safetensors").metadata == {}
