"""Tiny checkpoints written by the original tools, as whole models: their logits are those of the tools' weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fewbit.kernels.select import Preference
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import decode
from fewbit.packing.registry import dequantize_record, unpack_record
from tests.checkpoints.layers import sha256
from tests.checkpoints.test_tiny_checkpoints import NAMES, expected_hash, expected_layers, folder_of

WORDS = [name for name in NAMES if name.startswith(("gptqmodel", "autoawq", "autoround-w", "autoround-mixed"))]
TOLERANCE = 2e-3  # relative to the largest logit; sums in another order give about 1e-6


def last_logits(entry: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(entry.get("last_position_first16") or entry["last_logits_first16"])


def assert_logits(name: str, *entries: str, preference: Preference = Preference()) -> None:
    path = folder_of(name)
    expected = json.loads((path / "expected.json").read_text())
    model = load(path, device="cpu", dtype=torch.float32, strict=True, preference=preference)
    assert not model.fewbit_report.carried
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(expected["input_ids"])).logits[0]
    entry = next(expected[found] for found in entries if expected.get(found))
    wanted = last_logits(entry)
    assert ((logits[-1, :16] - wanted).abs().max() / wanted.abs().max()) < TOLERANCE
    assert logits.argmax(-1).tolist() == entry["argmax"]


@pytest.mark.parametrize("name", WORDS)
def test_weight_only_models_have_the_logits_of_their_weights(name: str) -> None:
    assert_logits(name, "logits_weight_only_f32", "logits_dense")


def test_nvfp4_of_auto_round_has_the_logits_of_its_own_runtime() -> None:
    """Activations are quantized in both: by the reference, since no CPU kernel keeps them."""
    assert_logits("autoround-nvfp4-llama-b", "logits", preference=Preference("reference"))


def test_nvfp4_of_auto_round_has_the_numbers_of_its_tool_in_its_order_of_multiplication() -> None:
    """AutoRound multiplies codes by the global scale first, fewbit by the product of both scales: a last bit apart."""
    path = folder_of("autoround-nvfp4-llama-b")
    stored, expected = StoredCheckpoint.open(path), expected_layers(path)
    for module, layer in expected.items():
        described = stored.describe(module)
        assert described is not None
        record = unpack_record(stored.record(module, described, tuple(layer["shape"])))
        scales = decode(record["scale"], record.key.scale.element).repeat_interleave(16, 1)
        theirs = decode(record["codes"], record.key.element) * record["global_scale"].float() * scales
        assert sha256(theirs) == expected_hash(layer)
        torch.testing.assert_close(dequantize_record(record), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", WORDS)
def test_what_inspect_says(name: str) -> None:
    found = inspect_checkpoint(folder_of(name))
    expected = expected_layers(folder_of(name))
    shapes = {layer.name: list(layer.shape) for layer in found.layers if layer.key}
    assert shapes == {module: layer["shape"] for module, layer in expected.items()}
    assert not found.oddities
