"""What a quantized folder holds beside its layers: routers and experts, tied heads, kept files and tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbit.errors import OutputError, SchemeError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.evaluation.verify import verify
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.load import load
from fewbit.models.quantization.pipeline import quantize_checkpoint
from fewbit.models.quantization.plan import make_plan
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.spec import LinearKey, Recipe, Rule, Scheme
from tests.tiny_models import save_tiny_model

IDS = torch.arange(16)[None]


def configuration(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edited(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The folder with tensors added, replaced or, where None, removed; `__` stands for a dot."""
    file = folder / "model.safetensors"
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in (load_file(file) | changes).items() if tensor is not None}
    save_file(kept, file, {"format": "pt"})
    return folder


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "suffix"), [("FP8", "input_scale"), ("NVFP4", "input_global_scale")])
def test_experts_that_no_token_reached_b49_b51(scheme: str, suffix: str, tmp_path: Path) -> None:
    """B49: their static scale is that of a sibling, never NaN. B51: all are quantized, and the report says how."""
    source = save_tiny_model(tmp_path / "model", "qwen3_moe", num_experts=8)
    edited(source, model__layers__0__mlp__gate__weight=torch.zeros(8, 64).bfloat16())  # the same two experts for all
    report = quantize(source, tmp_path / "q", scheme, effort="fast")
    experts = [layer for layer in report["layers"] if "layers.0.mlp.experts" in layer["name"]]
    assert len(experts) == 3 * 8
    reached = [layer for layer in experts if layer["tokens"]]
    missed = [layer for layer in experts if layer["tokens"] == 0]
    assert len(reached) == 3 * 2 and len(missed) == 3 * 6
    assert all(layer["remarks"] == [] for layer in reached)
    assert all("no calibration token" in layer["remarks"][0] and "siblings" in layer["remarks"][0] for layer in missed)
    assert len({layer["method"] for layer in experts}) == 1
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        scales = {
            layer["name"]: tensors[f"{layer['name']}.{suffix}"].float().item()
            for layer in experts
            if layer["name"].endswith(projection)
        }
        stand_in = min if suffix == "input_global_scale" else max  # a divisor, or a multiplier
        largest = stand_in(scales[layer["name"]] for layer in reached if layer["name"] in scales)
        assert {scales[layer["name"]] for layer in missed if layer["name"] in scales} == {largest}
    with torch.no_grad():
        assert bool(load(tmp_path / "q", device="cpu")(input_ids=IDS).logits.isfinite().all())


def test_without_calibration_no_tokens_are_claimed_b51(tmp_path: Path) -> None:
    report = quantize(
        save_tiny_model(tmp_path / "model", "qwen3_moe"), tmp_path / "q", "W4A16", group_size=32, effort="fast"
    )
    assert {(layer["tokens"], *layer["remarks"]) for layer in report["layers"]} == {(None,)}
    assert len([layer for layer in report["layers"] if ".experts." in layer["name"]]) == 2 * 3 * 4


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq", "quark", "modelopt"])
@pytest.mark.parametrize(("family", "router"), [("mixtral", "block_sparse_moe.gate"), ("qwen3_moe", "mlp.gate")])
def test_routers_are_on_the_list_of_what_stays_plain_b53(
    format_name: str, family: str, router: str, tmp_path: Path
) -> None:
    """B53: a router is no Linear of the model, and readers that build one would look for its codes."""
    source = save_tiny_model(tmp_path / "model", family)
    scheme = "W4A16" if format_name != "modelopt" else "FP8_DYNAMIC"
    quantize(
        source, tmp_path / "q", scheme, format=format_name, group_size=32 if scheme == "W4A16" else None, effort="fast"
    )
    written = StoredCheckpoint.open(tmp_path / "q")
    assert written.format is not None and written.scheme is not None
    for layer in range(2):
        name = f"model.layers.{layer}.{router}"
        assert name in written.modules
        assert written.scheme.key_for(name, "Linear", written.format.matcher) is None


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_tied_head_needs_no_tensor_b56(family: str, tmp_path: Path) -> None:
    """B56: the file has the embedding only, and the logits are those of a twin that has both."""
    source = save_tiny_model(tmp_path / "model", family, tie_word_embeddings=True)
    report = quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    names = load_file(tmp_path / "q" / "model.safetensors").keys()
    assert not [name for name in names if name.startswith("lm_head")]
    assert configuration(tmp_path / "q")["tie_word_embeddings"] is True
    assert report["tie_word_embeddings"] == "as in the source"
    tied = load(tmp_path / "q", device="cpu", dtype=torch.float32)
    table = load_file(tmp_path / "q" / "model.safetensors")["model.embed_tokens.weight"]
    twin = edited(tmp_path / "q", lm_head__weight=table.clone())
    config = configuration(twin) | {"tie_word_embeddings": False}
    (twin / "config.json").write_text(json.dumps(config))
    untied = load(twin, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(tied(input_ids=IDS).logits, untied(input_ids=IDS).logits)


def test_a_head_that_is_quantized_apart_is_untied_b57(tmp_path: Path) -> None:
    """B57: ends that differ are stored twice, and the configuration stops tying them."""
    source = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    edited(source, lm_head__weight=table.clone())
    key = LinearKey.parse("int8:channel:bf16")
    plan = make_plan(source, Recipe(Scheme("HEAD TOO", (Rule(("Linear",), key),), ignore=())))
    assert plan.unties
    report = quantize_checkpoint(source, tmp_path / "q", plan)
    assert configuration(tmp_path / "q")["tie_word_embeddings"] is False
    assert "untied" in report["tie_word_embeddings"]
    model = load(tmp_path / "q", device="cpu", dtype=torch.float32)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert torch.equal(model.model.embed_tokens.weight, table.float())
    assert verify(tmp_path / "q", source).passed


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_quantized_embedding_is_stored_once_b57(tied: bool, family: str, tmp_path: Path) -> None:
    """B57: a head that is tied to it is the same record, and stays tied; one that is not stays as it is."""
    source = save_tiny_model(tmp_path / "model", family, tie_word_embeddings=tied)
    quantize(source, tmp_path / "q", "W4A16", group_size=32, embeddings="W8A16", effort="fast")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    assert "model.embed_tokens.weight_packed" in tensors
    assert "model.embed_tokens.weight" not in tensors
    assert ("lm_head.weight" in tensors) != tied
    assert configuration(tmp_path / "q")["tie_word_embeddings"] is tied
    decoded = {layer.name: layer.numbers for layer in decoded_layers(StoredCheckpoint.open(tmp_path / "q"))}
    plain = load_file(source / "model.safetensors")
    twin = shutil.copytree(source, tmp_path / "twin")
    plain |= {f"{name}.weight": numbers for name, numbers in decoded.items()}
    save_file({name: one.float() for name, one in plain.items()}, twin / "model.safetensors", {"format": "pt"})
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours, theirs = (
            load(path, device="cpu", dtype=torch.float32, strict=True)(input_ids=ids).logits
            for path in (tmp_path / "q", twin)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert verify(tmp_path / "q", source).passed


def test_one_key_for_layers_and_embedding_is_said_of_both_b57(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", "W8A16", group_size=32, embeddings="W8A16", effort="fast")
    load(tmp_path / "q", device="cpu", strict=True)
    with pytest.raises(OutputError, match=r"gptq cannot say that model\.embed_tokens is quantized"):
        quantize(source, tmp_path / "g", "W8A16", group_size=32, embeddings="W8A16", format="gptq", effort="fast")
    with pytest.raises(SchemeError, match="looked up row by row"):
        quantize(source, tmp_path / "g", "W8A16", group_size=32, embeddings="FP8_BLOCK", effort="fast")


# --- files and tensors -----------------------------------------------------------------------------------------------


def test_a_layer_that_was_not_packed_fails_verification_b74(tmp_path: Path) -> None:
    """B74: a folder as large as its source is no success, whatever its configuration says."""
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    name = "model.layers.0.mlp.up_proj"
    packed = {tensor for tensor in load_file(tmp_path / "q" / "model.safetensors") if tensor.startswith(f"{name}.")}
    weight = load_file(source / "model.safetensors")[f"{name}.weight"]
    edited(tmp_path / "q", **(dict.fromkeys(packed) | {f"{name}.weight": weight}))
    checks = {check.name: check for check in verify(tmp_path / "q").checks}
    assert not checks["bytes"].passed
    assert not checks["decoded weights"].passed and name in checks["decoded weights"].detail
    assert not checks["configuration"].passed and "stored plain" in checks["configuration"].detail
