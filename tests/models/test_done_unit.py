"""Finishing blocks behind the loop: in order, all of them, errors included."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from fewbit.models.quantization import block_loop
from fewbit.models.quantization.done_unit import OneBehind
from fewbit.models.quantization.quantize import quantize
from tests.hashes import hashes
from tests.tiny_models import save_tiny_model


@pytest.mark.parametrize("apart", [False, True])
def test_jobs_are_done_in_order_and_all_before_the_end(apart: bool) -> None:
    done: list[tuple[int, bool]] = []

    def job(number: int) -> None:
        time.sleep(0.01)
        done.append((number, threading.current_thread() is threading.main_thread()))

    with OneBehind(apart) as finishing:
        for number in range(4):
            finishing.do(lambda number=number: job(number))
    assert done == [(number, not apart) for number in range(4)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_what_a_job_raises_reaches_the_caller(apart: bool, more: int) -> None:
    def fail() -> None:
        raise OSError(28, "full")

    def run() -> None:
        with OneBehind(apart) as finishing:
            finishing.do(fail)
            for _ in range(more):
                finishing.do(lambda: None)

    with pytest.raises(OSError, match="full"):
        run()


def test_a_run_that_finishes_behind_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny_model(tmp_path / "model", dtype=torch.float32)
    settings = {"algorithm": "gptq", "group_size": 16, "transforms": ("awq",), "calibration_windows": 4}
    quantize(source, tmp_path / "at-once", calibration_length=32, **settings)
    monkeypatch.setattr(block_loop, "OneBehind", lambda apart: OneBehind(not apart))
    quantize(source, tmp_path / "behind", calibration_length=32, **settings)
    assert hashes(tmp_path / "behind") == hashes(tmp_path / "at-once")
