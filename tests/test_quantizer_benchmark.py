"""The benchmark of quantizers: what it asserts of a checkpoint, and tools that are not there or fail."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from fewbit.kernels.select import Preference
from fewbit.models.load import load
from fewbit.models.names import build_on_meta, read_config

REPOSITORY = Path(__file__).parents[1]
CHECKPOINT = REPOSITORY / "tests/data/checkpoints/llmcompressor-gptq-w3a16-g64-llama-b"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of `benchmarks/`, found last, since their names may be other packages' too."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(REPOSITORY / "benchmarks")])
    return importlib.import_module


@pytest.fixture(scope="module")
def loaded() -> nn.Module:
    return load(CHECKPOINT, device="cpu", dtype=torch.float32, preference=Preference("reference"))


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return build_on_meta(read_config(CHECKPOINT), torch.float32)


def test_a_checkpoint_keeps_its_claim(benchmark_module, loaded, plain) -> None:
    claims = benchmark_module("checkpoint_claims")
    assert claims.contradictions(claims.Claim(3, 64, True), loaded, plain) == []
    found = claims.bits_of(CHECKPOINT)
    assert found["bits_per_weight"] == 3.25
    assert found["stored_bits_per_weight"] >= 3.25


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ((2, 64, True), "values in a group"),
        ((4, 64, True), "is int3:group64"),
        ((3, 32, True), "is int3:group64"),
        ((3, 64, False), "is int3:group64"),
    ],
)
def test_a_false_claim_is_found_in_every_layer(benchmark_module, loaded, plain, claim, said) -> None:
    claims = benchmark_module("checkpoint_claims")
    wrong = claims.contradictions(claims.Claim(*claim), loaded, plain)
    assert sum(said in line for line in wrong) == 14


def test_a_layer_that_one_side_lacks_is_found(benchmark_module, loaded) -> None:
    claims = benchmark_module("checkpoint_claims")
    more = build_on_meta(read_config(CHECKPOINT), torch.float32)
    more.model.layers[0].extra = nn.Linear(2, 2, device="meta")
    del more.model.layers[1].mlp.up_proj
    assert claims.contradictions(claims.Claim(3, 64, True), loaded, more) == [
        "model.layers.0.extra is not quantized",
        "model.layers.1.mlp.up_proj is quantized",
    ]


def outcome_of(quantizers: ModuleType, folder: Path, tool: str, module: str, source: str):
    """A row of `tool`, whose package is a module with this source."""
    packages = folder / "packages"
    packages.mkdir()
    (packages / f"{module}.py").write_text(source)
    tools = quantizers.Tools(folder / "text", "cpu", None, {}, {tool: str(packages)})
    workshop = quantizers.Workshop(folder / "rows", folder, torch.zeros(1, 8, dtype=torch.int64), tools)
    outcome = quantizers.Outcome(quantizers.Row(tool, 4, 64))
    workshop.call(outcome)
    return outcome


@pytest.mark.parametrize(
    ("source", "absent", "said"),
    [
        ("import no_such_module", True, "not installed: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def GPTQModel(): ...\ndef QuantizeConfig(**_): raise SystemExit('out of luck')", False, "out of luck"),
    ],
)
def test_a_tool_that_is_absent_or_fails_is_a_row_that_says_so(benchmark_module, tmp_path, source, absent, said) -> None:
    outcome = outcome_of(benchmark_module("quantizers"), tmp_path, "GPTQModel", "gptqmodel", source)
    assert said in outcome.problem
    assert outcome.absent == absent
    assert outcome.record()["calls"] == []
