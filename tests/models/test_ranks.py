"""Runs of several processes: they agree with one process, among themselves, and about errors."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.work_folder import WorkFolder
from fewbit.errors import ModelError, OutputError, SchemeError
from fewbit.evaluation.divergence import divergence
from fewbit.evaluation.verify import verify
from fewbit.models.load import load
from fewbit.models.quantization.quantize import QuantizeOptions, prepare, quantize
from fewbit.models.quantization.ranks import Ranks
from tests.hashes import hashes
from tests.models.rank_process import quantize_as
from tests.tiny_models import save_tiny_model

ASKED = [
    "--algorithm", "gptq", "-g", "32", "--calibration-windows", "9", "--calibration-length", "32",
    "--kv-cache", "fp8_head",
]  # fmt: skip
SIZES: dict[str, Any] = {"calibration_windows": 9, "calibration_length": 32}


def together(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`fewbit quantize` by two processes that torchrun starts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "fewbit", "quantize", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def start() -> Callable[..., list[multiprocessing.process.BaseProcess]]:
    """Starts `fewbit quantize` by two processes as torchrun does, from one that has imported everything before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.rank_process"])

    def begin(*arguments: str | Path) -> list[multiprocessing.process.BaseProcess]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        asked = ("quantize", *map(str, arguments))
        found = [context.Process(target=quantize_as, args=(rank, 2, port, asked)) for rank in range(2)]
        for process in found:
            process.start()
        return list(found)

    return begin


def finished(processes: list[multiprocessing.process.BaseProcess]) -> bool:
    """Whether all of them did what they were asked."""
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes] == [0, 0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return save_tiny_model(folder, "qwen3_moe", num_hidden_layers=3, dtype=torch.float32)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dense") / "model", "llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def by_two(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two") / "q"
    done = together(source, *ASKED, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("layers quantized by gptq") == 1
    return out


def test_two_processes_do_what_one_does(source: Path, by_two: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "one", "W4A16", group_size=32, algorithm="gptq", kv_cache="fp8_head", **SIZES)
    assert verify(by_two, source).passed
    one, two = (load_file(folder / "model.safetensors") for folder in (tmp_path / "one", by_two))
    assert one.keys() == two.keys()
    # A number near the middle between two codes may fall to either, a token near two experts to either: later layers
    # then see other inputs, and may get other codes that do as well.
    packed = [name for name in one if name.startswith("model.layers.0") and name.endswith("weight_packed")]
    differing = sum(int((one[name] != two[name]).sum()) for name in packed)
    assert len(packed) == 16 and differing < 0.01 * sum(one[name].numel() for name in packed)
    for name in (name for name in one if name.endswith(("k_scale", "v_scale"))):
        assert torch.allclose(one[name].float(), two[name].float(), rtol=0.02), name
    quantized = [load(folder, device="cpu", dtype=torch.float32) for folder in (tmp_path / "one", by_two)]
    base = load(source, device="cpu", dtype=torch.float32)
    ids = torch.arange(64).reshape(2, 32)
    assert divergence(quantized[0], quantized[1], ids).mean_kl < 0.2 * divergence(quantized[0], base, ids).mean_kl
    reports = [json.loads((f / "quantization_report.json").read_text())["layers"] for f in (tmp_path / "one", by_two)]
    for mine, theirs in zip(*reports, strict=True):
        assert mine["tokens"] == pytest.approx(theirs["tokens"], rel=0.05), mine["name"]
    losses = [sum(layer["loss"] for layer in report) for report in reports]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


def test_two_processes_that_were_stopped_go_on(source: Path, by_two: Path, start: Any, tmp_path: Path) -> None:
    work, out = WorkFolder(tmp_path / "q"), tmp_path / "q"
    processes = start(source, *ASKED, "-o", out)
    while work.finished() < 2:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.005)
    for process in processes:
        process.kill()
        process.join()
    assert work.finished() >= 2 and not out.exists()
    with pytest.raises(OutputError, match="processes was 2 and is 1"):
        quantize(source, out, "W4A16", group_size=32, algorithm="gptq", kv_cache="fp8_head", **SIZES)
    assert finished(start(source, *ASKED, "-o", out))
    assert hashes(out) == hashes(by_two)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_two_processes_transform_and_tune_blocks(dense: Path, start: Any, tmp_path: Path) -> None:
    settings = {"iterations": 5}
    sizes = {"calibration_windows": 8, "calibration_length": 32}
    quantize(
        dense, tmp_path / "one", "W4A16", group_size=32, algorithm="sign_round", settings=settings, transforms=("awq",),
        **sizes,
    )  # fmt: skip
    asked = ["--algorithm", "sign_round", "--set", "iterations=5", "--transform", "awq", "-g", "32"]
    asked += ["--calibration-windows", "8", "--calibration-length", "32"]
    assert finished(start(dense, *asked, "-o", tmp_path / "two"))
    reports = [json.loads((tmp_path / name / "quantization_report.json").read_text()) for name in ("one", "two")]
    mine, theirs = ([entry for entry in report["transforms"] if "loss_before" in entry] for report in reports)
    assert len(mine) == len(theirs) == 8
    for own, other in zip(mine[:4], theirs[:4], strict=True):  # the second block follows what was tuned in the first
        assert own["choice"] == other["choice"], own["what"]
        assert own["loss"] == pytest.approx(other["loss"], rel=0.02), own["what"]
    base = load(dense, device="cpu", dtype=torch.float32)
    ids = torch.arange(64).reshape(2, 32)
    found = [divergence(load(tmp_path / name, device="cpu", dtype=torch.float32), base, ids) for name in ("one", "two")]
    assert found[1].mean_kl < 1.5 * found[0].mean_kl


def test_two_processes_keep_to_a_budget_and_a_gate(dense: Path, start: Any, tmp_path: Path) -> None:
    sizes = {"calibration_windows": 8, "calibration_length": 32}
    asked = QuantizeOptions("W4A16", algorithm="gptq", bits_per_weight=4.5, **sizes)  # type: ignore[arg-type]
    alone, _ = prepare(dense, asked)
    arguments = ["--algorithm", "gptq", "--bits-per-weight", "4.5", "--max-kl", "9"]
    arguments += ["--calibration-windows", "8", "--calibration-length", "32"]
    assert finished(start(dense, *arguments, "-o", tmp_path / "two"))
    report = json.loads((tmp_path / "two" / "quantization_report.json").read_text())
    assert alone.budget is not None and report["gate"]["max_kl"] == 9
    mine, theirs = alone.budget["predicted_kl"], report["budget"]["predicted_kl"]
    assert theirs == pytest.approx(mine, rel=0.5)  # labels are drawn anew
    assert report["budget"]["bits_per_weight"] <= 4.5
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_the_error_of_one_process_stops_all_and_is_told_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()  # which the process that writes finds
    done = together(source, *ASKED, "-o", tmp_path / "q")
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert told.count("exists already") == 1 and "Another process" not in told and "pipeline.py" not in told, told
    assert list((tmp_path / "q").iterdir()) == []


def test_shares_cover_all_windows_and_all_work() -> None:
    windows = torch.arange(7)[:, None]
    assert torch.equal(torch.cat([Ranks(rank, 3).share(windows) for rank in range(3)]), windows)
    with pytest.raises(ModelError, match="8 processes cannot share 7"):
        Ranks(0, 8).share(windows)
    sizes = [5, 1, 1, 3, 9]
    shares = [Ranks(rank, 3).own(sizes) for rank in range(3)]
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3, 4]
    assert max(sum(sizes[index] for index in share) for share in shares) == 9


def test_what_needs_one_process_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="gathered by one process"):
        quantize(source, tmp_path / "q", algorithm="gptq", group_size=32, keep_statistics=tmp_path, ranks=Ranks(0, 2))
    assert list(tmp_path.iterdir()) == []


def test_what_processes_saw_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(96, 8)
    parts = [InputStatistics.empty() for _ in range(3)]
    for part, own in zip(parts, rows.split(32), strict=True):
        part.add(own)
    whole = InputStatistics.empty()
    whole.add(rows)
    monkeypatch.setattr(Ranks, "everyones", lambda *_: [{"a": part} for part in parts])
    joined = Ranks(0, 3).totals({"a": parts[0]})["a"]
    assert joined.tokens == 96 and torch.equal(joined.largest, whole.largest)
    assert joined.histogram is not None and whole.histogram is not None
    assert torch.equal(joined.histogram, whole.histogram)
