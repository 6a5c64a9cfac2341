"""Runs that are killed: the same call goes on, and what it writes is what an undisturbed run writes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fewbit.checkpoints.work_folder import WorkFolder
from fewbit.errors import CheckpointError, OutputError
from fewbit.models.quantization.block_stream import BlockStream
from fewbit.models.quantization.pipeline import quantize_checkpoint
from fewbit.models.quantization.quantize import QuantizeOptions, prepare, quantize
from tests.hashes import hashes
from tests.tiny_models import save_tiny_model

SIZES = {"calibration_windows": 6, "calibration_length": 32, "self_samples": 0}
RUNS: dict[str, dict[str, Any]] = {
    "data-free": {"scheme": "W4A16", "group_size": 32, "effort": "fast"},
    "gptq": {"scheme": "W4A16", "group_size": 32, "algorithm": "gptq", "max_shard_bytes": 60_000} | SIZES,
    "sign_round": {"scheme": "NVFP4", "algorithm": "sign_round", "settings": {"iterations": 2}} | SIZES,
    "transformed": {
        "scheme": "W4A16",
        "group_size": 32,
        "algorithm": "gptq",
        "transforms": ("rotation", "awq:points=2"),
    }
    | SIZES,
    "static scales": {"scheme": "FP8", "kv_cache": "fp8_head"} | SIZES,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("source") / "model", num_hidden_layers=3)


ON_DISK = ((os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree"))


def killed(run: Callable[[], Any], at: int, calls: tuple[tuple[Any, str], ...] = ON_DISK) -> bool:
    """Whether a process that `run`s died: it is killed before it makes one of `calls` for the `at`th time."""
    child = os.fork()
    if child == 0:
        left = at

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*given: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*given, **named)

            return count

        for owner, name in calls:
            setattr(owner, name, dying(getattr(owner, name)))
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), "the run failed by itself"
    return status != 0


@pytest.mark.parametrize("name", RUNS)
def test_killed_anywhere_the_same_call_gives_the_same_bytes(source: Path, tmp_path: Path, name: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quantize(source, whole, **RUNS[name])
    settings = dict(RUNS[name])
    sizes = {"max_shard_bytes": settings.pop("max_shard_bytes")} if "max_shard_bytes" in settings else {}
    plan, calibration = prepare(source, QuantizeOptions(**settings))  # which touches no disk, and is the same each time
    deaths = 0
    while killed(lambda: quantize_checkpoint(source, broken, plan, calibration=calibration, **sizes), 4 + 7 * deaths):
        deaths += 1
    assert deaths >= 3
    assert hashes(broken) == hashes(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "whole"]


@pytest.mark.parametrize("last", [(WorkFolder, "clear"), (Path, "rmdir")], ids=str)
def test_killed_while_clearing_up_the_output_stands(source: Path, tmp_path: Path, last: tuple[Any, str]) -> None:
    assert killed(lambda: quantize(source, tmp_path / "q", **RUNS["data-free"]), at=1, calls=(last,))
    assert (tmp_path / "q.partial").is_dir()
    written = hashes(tmp_path / "q")
    report = quantize(source, tmp_path / "q", **RUNS["data-free"])
    assert len(report["layers"]) > 10
    assert hashes(tmp_path / "q") == written
    assert not (tmp_path / "q.partial").exists()
    with pytest.raises(OutputError, match="exists already"):
        quantize(source, tmp_path / "q", **RUNS["data-free"])


@pytest.fixture
def begun(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output whose first block is finished and whose second could not be."""
    solve, calls = BlockStream.solve, []

    def broken(self: BlockStream, *given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise CheckpointError("A shard ends early.", "Download it again.")
        solve(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(BlockStream, "solve", broken)
        with pytest.raises(
            CheckpointError, match=r"Download it again.*kept in .*q.partial, and the same command goes on"
        ):
            quantize(source, tmp_path / "q", **RUNS["gptq"])
    assert WorkFolder(tmp_path / "q").finished() == 2
    assert not (tmp_path / "q").exists()
    return tmp_path / "q"


def test_after_an_error_only_the_rest_is_done(source: Path, begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[str] = []
    solve = BlockStream.solve

    def counted(self: BlockStream, path: str, *given: Any) -> None:
        solved.append(path)
        solve(self, path, *given)

    monkeypatch.setattr(BlockStream, "solve", counted)
    quantize(source, begun, **RUNS["gptq"])
    assert solved == ["model.layers.1", "model.layers.2"]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"group_size": 16}, r"recipe\.scheme\.\S+ was"),
        ({"settings": {"damping": 0.02}}, r"recipe\.settings\.damping was 0\.01 and is 0\.02"),
        ({"calibration_windows": 5}, r"calibration\.windows was 6 and is 5"),
    ],
)
def test_what_was_begun_with_something_else_is_refused_by_name(
    source: Path, begun: Path, changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(OutputError, match=field) as caught:
        quantize(source, begun, **(RUNS["gptq"] | changed))
    assert "--restart" in caught.value.hint
    assert WorkFolder(begun).finished() == 2
    quantize(source, begun, restart=True, **(RUNS["gptq"] | changed))
    assert begun.is_dir() and not WorkFolder(begun).path.exists()


def test_another_model_is_refused(source: Path, begun: Path, tmp_path: Path) -> None:
    other = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(other / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    table[len(table) // 2, 7] += 1  # a single number, in the middle
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(OutputError, match=r"source\.weights was"):
        quantize(other, begun, **RUNS["gptq"])


def test_the_export_alone_is_tried_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        copying = "fewbit.models.quantization.export.copy_side_files"
        patched.setattr(copying, lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OutputError, match="kept in"):
            quantize(source, tmp_path / "q", **RUNS["gptq"])
    monkeypatch.setattr(BlockStream, "__init__", None)  # calibration is not even begun
    quantize(source, tmp_path / "q", **RUNS["gptq"])
    assert (tmp_path / "q" / "tokenizer.json").is_file()


def test_two_runs_do_not_share_a_work_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(*_: Any) -> None:
        with pytest.raises(OutputError, match="Another run is writing"):
            quantize(source, tmp_path / "q", **RUNS["data-free"])

    monkeypatch.setattr("fewbit.models.quantization.pipeline.write_config", another)
    quantize(source, tmp_path / "q", **RUNS["data-free"])
    assert (tmp_path / "q").is_dir()


def test_a_folder_that_is_no_work_folder_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "q.partial").mkdir()
    (tmp_path / "q.partial" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds notes"):
        quantize(source, tmp_path / "q", restart=True, **RUNS["data-free"])
    assert (tmp_path / "q.partial" / "notes.txt").read_text() == "mine"
