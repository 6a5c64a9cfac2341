"""Transforms of compressed-tensors: its own library rotates a model, fewbit reads what it saved and runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewbit.checkpoints.registry import formats
from fewbit.errors import CheckpointError, OutputError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.models.conversion.convert import convert
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics.hadamard import times_hadamard
from tests.golden import golden_vectors
from tests.tiny_models import VOCABULARY, save_tiny_model

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


def pair(kind: str, target: str, side: str, **options: Any) -> dict[str, Any]:
    """A group that transforms a layer's activations, and its weight by the inverse."""
    places = [
        {"targets": [target], "location": side},
        {"targets": [target], "location": f"weight_{side}", "inverse": True},
    ]
    return {"type": kind, "apply": places, **options}


def of_attention(*locations: str) -> dict[str, Any]:
    return {
        "type": "hadamard",
        "head_dim": 16,
        "apply": [{"targets": ["re:.*self_attn$"], "location": location} for location in locations],
    }


GROUPS: dict[str, dict[str, Any]] = {
    "known": {"R4": pair("hadamard", "re:.*down_proj$", "input")},
    "blocks": {"R4": pair("hadamard", "re:.*down_proj$", "input", head_dim=32)},
    "random": {"U": pair("random-hadamard", "re:.*o_proj$", "input")},
    "permuted": {"P": pair("hadamard", "re:.*gate_proj$", "input", head_dim=16, randomize=True)},
    "matrix": {"V": pair("random-matrix", "re:.*down_proj$", "input", head_dim=16)},
    "output": {"O": pair("random-hadamard", "re:.*up_proj$", "output", head_dim=32)},
    "attention": {"R3": of_attention("q_attn", "k_cache"), "R4": pair("hadamard", "re:.*down_proj$", "input")},
    "offline": {
        "R2": {
            "type": "hadamard",
            "head_dim": 16,
            "apply": [
                {"targets": ["re:.*v_proj$"], "location": "weight_output"},
                {"targets": ["re:.*o_proj$"], "location": "weight_input", "inverse": True},
            ],
        }
    },
}


def with_transforms(folder: Path, groups: dict[str, Any]) -> Path:
    """The checkpoint with a transform_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, nn.Module]]:
    """(fewbit's checkpoint, the library's own model with hooks and the same weights) of groups of transforms."""
    library = pytest.importorskip("compressed_tensors.transform")
    from transformers import AutoModelForCausalLM

    made: dict[str, tuple[Path, nn.Module]] = {}

    def make(name: str) -> tuple[Path, nn.Module]:
        if name in made:
            return made[name]
        folder = tmp_path_factory.mktemp(name)
        source = save_tiny_model(folder / "model", dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        # transformers 5.24 never calls its hook on cached keys; without queries and keys the numbers are the same.
        groups = {group: value for group, value in GROUPS[name].items() if group != "R3"}
        library.apply_transform_config(model, library.TransformConfig(config_groups=groups))
        model.save_pretrained(source)
        quantize(source, folder / "q", "W8A16", group_size=32, effort="fast")
        with_transforms(folder / "q", GROUPS[name])
        with torch.no_grad():
            for layer in decoded_layers(StoredCheckpoint.open(folder / "q")):
                model.get_submodule(layer.name).weight.copy_(layer.numbers)
        made[name] = folder / "q", model
        return made[name]

    return make


@pytest.mark.parametrize("name", GROUPS)
def test_a_rotated_model_runs_as_the_library_runs_it(name: str, rotated: Callable[[str], Any]) -> None:
    folder, theirs = rotated(name)
    ours = load(folder, device="cpu", dtype=torch.float32, strict=True)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=2e-4, atol=2e-4)
    assert not ours.fewbit_report.carried
    assert len(ours.fewbit_report.transforms) == sum(len(group["apply"]) for group in GROUPS[name].values())
    joined = load(folder, device="cpu", dtype=torch.float32, join_members=True)
    torch.testing.assert_close(logits(joined), logits(theirs), rtol=2e-4, atol=2e-4)


def test_they_change_what_comes_out(rotated: Callable[[str], Any]) -> None:
    """What the test above compares would differ without them."""
    folder, theirs = rotated("blocks")
    bare = load(with_transforms(folder, {}), device="cpu", dtype=torch.float32)
    with_transforms(folder, GROUPS["blocks"])
    assert (logits(bare) - logits(theirs)).abs().max() > 0.1


def test_inspect_and_the_report_name_them(rotated: Callable[[str], Any]) -> None:
    folder, _ = rotated("attention")
    assert inspect_checkpoint(folder).transforms == (
        "R3: hadamard of order 16 at q_attn of re:.*self_attn$, at run time",
        "R3: hadamard of order 16 at k_cache of re:.*self_attn$, at run time",
        "R4: hadamard at input of re:.*down_proj$, at run time",
        "R4: inverse hadamard at weight_input of re:.*down_proj$, in the stored weights already",
    )
    lines = load(folder, device="cpu").fewbit_report.transforms
    assert lines[0].endswith("which cancels: queries and keys are rotated alike")
    assert lines[2].endswith("at run time: 2 layers")


def test_conversion_refuses_what_would_be_lost(rotated: Callable[[str], Any], tmp_path: Path) -> None:
    for to in ("gptq", "bf16"):
        with pytest.raises(OutputError, match=r"R4: hadamard at input of .* would be read without it"):
            convert(rotated("known")[0], tmp_path / "out", to)
    convert(rotated("offline")[0], tmp_path / "out", "gptq")
    found, theirs = load(tmp_path / "out", device="cpu", dtype=torch.float32), rotated("offline")[1]
    torch.testing.assert_close(logits(found), logits(theirs), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"R3": of_attention("q_attn")}, "R3: hadamard of order 16 at q_attn .* does not cancel"),
        ({"R3": of_attention("k_cache")}, "R3: hadamard of order 16 at k_cache .* does not cancel"),
        ({"R4": pair("hadamard", "re:.*down_proj$", "input", head_dim=48)}, "order 48 over the 128 features"),
        ({"R4": pair("hadamard", "re:.*down_porj$", "input")}, "matches no linear layer"),
        ({"U": pair("random-hadamard", "re:.*o_proj$", "input")}, "needs its matrix of order 64 for model.layers.0"),
        ({"U": pair("hadamrad", "re:.*o_proj$", "input")}, "Did you mean 'hadamard'"),
        ({"U": {"type": "hadamard", "apply": [{"location": "inputs"}]}}, "'inputs'.*Did you mean 'input'"),
        ({"U": {"type": "hadamard", "aply": []}}, "unknown argument 'aply'"),
        ({"U": {"type": "hadamard", "head_dim": 0}}, "head_dim is 0"),
        ({"U": {"type": "hadamard", "precision": "torch.int8"}}, "precision is 'int8'"),
        ({"U": 3}, "needed a dict"),
        (["hadamard"], "config_groups is"),
    ],
)
def test_what_cannot_run_is_refused_by_name(groups: dict[str, Any], words: str, tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W8A16", group_size=32, effort="fast")
    with pytest.raises(CheckpointError, match=words):
        load(with_transforms(tmp_path / "q", groups), device="cpu")


@pytest.mark.parametrize("order", [1, 2, 16, 128, 512])
def test_hadamard_is_sylvesters(order: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(3, 2 * order, dtype=torch.float64)
    expected = (x.unflatten(-1, (2, order)) @ matrix / order**0.5).flatten(-2)
    torch.testing.assert_close(times_hadamard(x, order), expected)
    torch.testing.assert_close(times_hadamard(times_hadamard(x, order), order), x)


def test_golden_hadamard() -> None:
    vector = golden_vectors()["ct_hadamard4"]
    found = times_hadamard(torch.eye(vector["size"]), vector["size"]) * vector["size"] ** 0.5
    assert torch.equal(found, torch.tensor(vector["matrix"]))


def test_only_formats_that_have_transforms_name_tensors_of_them() -> None:
    assert formats()["gptq"].transforms({"transform_config": {}}) == ()
