"""The commands on the packaged SmolLM2-135M-Instruct.Q4_1.gguf, unconverted."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from typer.testing import CliRunner

from fewbit.cli.main import app
from fewbit.models.stored import StoredCheckpoint
from fewbit.packing.registry import dequantize_record

pytestmark = pytest.mark.model


def invoke(*arguments: str | Path) -> dict:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_inspect(packaged: Path) -> None:
    found = invoke("inspect", packaged)
    assert found["format"] == "gguf" and not found["oddities"]
    kinds = {(group["variant"], group["count"]) for group in found["groups"] if group["key"]}
    assert kinds == {("Q8_0", 1), ("Q4_1", 30)}
    assert sum(group["count"] for group in found["groups"] if group["variant"] == "Q4_1") == 210


def test_layers_have_the_numbers_of_gguf_py(packaged: Path) -> None:
    stored = StoredCheckpoint.open(packaged)
    assert stored.format is not None
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(packaged).tensors}
    for module, name, shape in (
        ("model.layers.7.mlp.down_proj", "blk.7.ffn_down.weight", (576, 1536)),
        ("model.embed_tokens", "token_embd.weight", (49152, 576)),
    ):
        described = stored.describe(module, shape=shape)
        assert described is not None
        numbers = dequantize_record(stored.record(module, described, shape))
        expected = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert torch.equal(numbers, torch.from_numpy(expected))


def test_run(packaged: Path) -> None:
    answer = invoke("run", packaged, "What is the capital of France?", "--max-new-tokens", "12")
    assert "Paris" in answer["text"]


def test_verify(packaged: Path) -> None:
    found = invoke("verify", packaged)
    assert found["passed"]
    assert any("211 quantized layers finite" in check["detail"] for check in found["checks"])


def test_eval(packaged: Path) -> None:
    found = invoke("eval", packaged, "--windows", "1", "--window-length", "128")
    assert 1 < found["perplexity"] < 60


def test_explain(packaged: Path) -> None:
    layers = invoke("explain", packaged, "--device", "x86-avx2")["layers"]
    by_key = {layer["key"]: layer for layer in layers}
    assert by_key["uint4:group32:f16"]["kernel"] in ("cpu_weight_only", "torch_int4pack")  # both take minima
    assert by_key["int8:group32:f16"]["kernel"] in ("cpu_weight_only", "reference")
