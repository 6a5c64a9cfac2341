"""The benchmark of kernels: what it says of a run's numbers, and what becomes of columns that fail."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbit.kernels.probe import this_machine
from fewbit.kernels.tuned.table import Table, with_costs
from fewbit.spec import DEVICES

REPOSITORY = Path(__file__).parents[1]
H200 = DEVICES["sm90"]
W4AF8 = "int4:group128:bf16 * e4m3:token:f32:dynamic"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of `benchmarks/`, found last, since their names may be other packages' too."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(REPOSITORY / "benchmarks")])
    return importlib.import_module


def line(scheme: str, rows: int, **us: float) -> dict[str, Any]:
    return {"scheme": scheme, "K": 4096, "N": 4096, "M": rows} | {f"{name}_us": value for name, value in us.items()}


@pytest.fixture
def results() -> dict[str, Any]:
    """Two schemes at two numbers of rows; Humming is ahead at 4096 rows, and chosen where it may be."""
    software = {**H200.software, "humming-kernels": "0"}
    lines = [
        line("W4A16", 1, bf16=14, triton_tiles=7, triton_tiles_other_ways=6, humming=8, marlin=14),
        line("W4A16", 4096, bf16=180, triton_tiles=4000, triton_tiles_other_ways=3900, humming=100, marlin=8000),
        line(W4AF8, 1, bf16=14, triton_fp8=9, triton_fp8_product=8, triton_tiles_quantized=6, triton_tiles=1),
        line(W4AF8, 4096, bf16=150, triton_fp8=150, triton_fp8_product=140, triton_tiles_quantized=151, triton_tiles=1),
    ]
    machine = {"device": H200.model, "hardware": "sm90", "software": software}
    return {"machine": machine, "failed": ["machete of W4A16: no answer"], "not_run": ["FP8 K=1 N=2"], "lines": lines}


def test_costs_of_a_run_are_those_of_kernels_and_go_into_a_table(module, results) -> None:
    costs = module("kernel_summary").costs_of(results)
    assert costs[0]["us"] == {"triton_tiles": 7, "humming": 8}
    assert (costs[2]["key"], costs[2]["N"], costs[2]["M"]) == (W4AF8, 4096, 1)
    old = {**costs[0], "us": {"cuda_wgmma": 1.0}}
    other = {**costs[0], "M": 2}
    table = with_costs(Table("x", "", {}, (old, other)), costs)
    assert len(table.costs) == 5
    assert table.costs[0] == costs[0]
    assert table.costs[1] == other


def test_choices_are_those_of_the_costs_with_and_without_humming(module, results) -> None:
    summary = module("kernel_summary")
    alone, joint = (summary.cells_of(results, with_humming) for with_humming in (False, True))
    assert [cell.kernel for cell in alone] == ["triton_tiles"] * 2 + ["triton_tiles_quantized"] * 2
    assert [cell.kernel for cell in joint[:2]] == ["humming"] * 2
    assert [(cell.own, cell.free) for cell in alone] == [(7, 7), (4000, 4000), (6, 6), (151, 150)]
    assert [(cell.own, cell.free) for cell in joint[:2]] == [(8, 7), (100, 100)]
    assert summary.rivals_of(alone) == ["bf16", "humming", "marlin"]


def test_the_summary_tells_sums_what_one_layout_costs_and_each_library(module, results) -> None:
    said = list(module("kernel_summary").summary(results))
    assert "  bf16 over fewbit, sum of layers: 1: 2.00, 4096: 0.04" in said
    assert "  one layout over a free choice: 1: 1.00, 4096: 1.01" in said
    marlin = (
        "marlin over fewbit alone, 2 products: geometric mean 2.00, total 2.00, fewbit no slower in 2, at worst 2.00"
    )
    assert marlin in said
    assert any(text.startswith("humming over fewbit with humming, 2 products: geometric mean 1.00") for text in said)
    assert any("reads the layout: 3 of 4 products, 1 of the 2 that" in text for text in said)
    assert "  W4A16 K=4096 N=4096 M=1: triton_tiles 7.0, another way 6.0" in said
    assert said[-2:] == ["failed: machete of W4A16: no answer", "not run: FP8 K=1 N=2"]


def test_products_alone_stand_beside_the_best_library(module, results) -> None:
    lines = [line("FP8_DYNAMIC", 1, bf16=14, triton_fp8=9, triton_fp8_product=8, torch_product=9, cutlass_product=7)]
    said = list(module("kernel_summary").summary({**results, "lines": lines}))
    assert "product alone, FP8_DYNAMIC: no slower than the best library in 0 of 1" in said
    assert "  slower: FP8_DYNAMIC K=4096 N=4096 M=1 8.0 for 7.0" in said
    assert not any(text.startswith(("torch_product", "triton_fp8 over")) for text in said)


def test_tables_have_a_column_for_each_number_of_rows(module, results) -> None:
    said = list(module("kernel_tables").tables(results))
    assert "| K x N |  | 1 | 4096 |" in said
    assert "| 4096x4096 | bf16 | 14.0 | 180.0 |" in said
    assert "|  | fewbit: triton_tiles | 7.0 | 4000 |" in said
    assert "|  | fewbit with Humming | 8.0 | 100.0 |" in said
    assert "|  | best rival / fewbit | 1.14 | 0.03 |" in said
    assert f"| {W4AF8} | bf16 / fewbit | 2.33 | 0.99 |" in said


def test_aims_are_met_or_missed_by_what_was_found(module, results) -> None:
    summary, wide = module("kernel_summary"), {"K": 4096, "N": 28672}
    lines = [
        line("W4A16", 1, bf16=60, triton_tiles=18.5, humming=23, marlin=32) | wide,
        line("W4A16", 64, bf16=60, triton_tiles=30, triton_tiles_other_ways=28, humming=29) | wide,
        line("W8A8", 4096, bf16=100, triton_int8=50) | wide,
    ]
    alone, joint = (summary.cells_of({**results, "lines": lines}, humming) for humming in (False, True))
    said = [str(aim) for aim in module("kernel_aims").aims(alone, joint)]
    assert said[0] == "| W4A16 4096x28672, M = 1: at most 18 us | 18.5 us | missed |"
    assert "| W4A16, M up to 16, every shape: 1.2 times the best rival | 1 of 1 products, 1.24 to 1.24 | met |" in said
    assert "| W4A16 4096x28672, M = 64: 1.8 times bf16 | 2.00 | met |" in said
    assert any(text.startswith("| W4A16, M = 17 to 256, with Humming: never slower") for text in said)
    assert "| W8A8 over the layer, M = 4096: 1.7 times bf16 | 2.00 | met |" in said
    assert "| Each choice within 5 % of the fastest way that reads its layout | 2 of 3 products | missed |" in said


def test_what_fails_or_hangs_is_told_and_the_next_call_runs(module) -> None:
    worker_module = module("kernel_worker")
    worker, failed = worker_module.Worker(), worker_module.Failed
    try:
        assert worker(60, abs, -3) == 3
        assert worker(60, int, "x").reason.startswith("ValueError: invalid literal")
        assert worker(60, abs, -4) == 4
        assert worker(60, exec, "import os; os._exit(1)").reason.startswith("BrokenProcessPool")
        assert worker(0.2, time.sleep, 60) == failed("no answer within 0 s")
        assert worker(60, abs, -5) == 5
    finally:
        worker.stop()


def test_jobs_that_run_ahead_are_told_where_they_fail(module) -> None:
    ahead, failed = module("kernel_worker").ahead, module("kernel_worker").Failed
    assert ahead(abs, [], 1) == {}
    found = ahead(int, [("1",), ("x",), ("1",)], 60)
    assert list(found) == [("x",)]
    assert found["x",].reason.startswith("ValueError")
    assert ahead(time.sleep, [(60,)], 0.2) == {(60,): failed("not in time")}


def test_a_run_on_this_machine_writes_lines_and_costs(module, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if not torch.cuda.is_available() and not this_machine("cpu").has("avx2"):
        pytest.skip("This machine has no GPU and its CPU no AVX2, so no kernel would be measured.")
    output, table = tmp_path / "run.json", tmp_path / "table.json"
    Table("some device", "", {}).write(table)
    module("kernels").main(["W4A16"], ["128x64"], [2, 1], None, 120, 2, None, output, table, False)
    said, results = capsys.readouterr().out, json.loads(output.read_text(encoding="utf-8"))
    assert [(line["K"], line["N"], line["M"]) for line in results["lines"]] == [(128, 64, 1), (128, 64, 2)]
    assert (results["failed"], results["not_run"], results["whole_rounds"]) == ([], [], 2)
    assert all(line["bf16_us"] > 0 and line[f"{line['chosen']}_us"] > 0 for line in results["lines"])
    assert [entry["M"] for entry in Table.read(table).costs] == [1, 2]
    assert "bf16 over fewbit, sum of layers: 1: " in said
    module("kernels").main(read=output, markdown=True)
    assert "| K x N |  | 1 | 2 |" in capsys.readouterr().out
    module("kernels").main(["W4A16"], ["128x64"], [1], seconds=0)
    assert "not run: W4A16 K=128 N=64 M=1 to 1" in capsys.readouterr().out
