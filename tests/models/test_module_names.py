"""Entries of a configuration and the modules that they mean: joined, renamed, wrapped and ignored ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fewbit.checkpoints.registry import formats
from fewbit.errors import CheckpointError, SchemeError
from fewbit.evaluation.verify import verify
from fewbit.kernels.select import Preference
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.destinations import Destinations
from fewbit.models.load import load
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.spec import LinearKey, Rule, Scheme
from tests.tiny_models import save_tiny_model

QKV = ("q_proj", "k_proj", "v_proj")


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The same checkpoint after `change` of its quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def configuration(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def kinds(model: nn.Module, part: str) -> set[bool]:
    """Whether the layers with `part` in their name are quantized."""
    return {
        isinstance(module, QuantizedLinear)
        for name, module in model.named_modules()
        if part in name and isinstance(module, nn.Linear | QuantizedLinear)
    }


def test_members_that_are_all_ignored_leave_the_joined_layer_plain_b01(tmp_path: Path) -> None:
    """B01: the model has one qkv_proj, the entries name q, k and v."""
    source = save_tiny_model(tmp_path / "model", "phi3")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, ignore=QKV, effort="fast")
    model = load(tmp_path / "q", device="cpu")
    assert kinds(model, "qkv_proj") == {False}
    assert kinds(model, "o_proj") == kinds(model, "gate_up_proj") == {True}
    assert not model.fewbit_report.contradictions


@pytest.mark.parametrize("ignored", [QKV[:2], QKV[2:], ("up_proj",)])
def test_members_that_are_ignored_in_part_are_an_error_that_names_them_all_b01(
    ignored: tuple[str, ...], tmp_path: Path
) -> None:
    source = save_tiny_model(tmp_path / "model", "phi3")
    with pytest.raises(SchemeError, match="one matrix") as caught:
        quantize(source, tmp_path / "q", "W4A16", group_size=32, ignore=ignored, effort="fast")
    members = ("gate_proj", "up_proj") if "up_proj" in ignored else QKV
    assert all(f".{member} is " in str(caught.value) for member in members)


def test_a_configuration_that_names_members_is_read_b01(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", "phi3")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, ignore=("qkv_proj",), effort="fast")
    layers = [f"model.layers.{index}.self_attn" for index in range(2)]

    def by_members(config: dict[str, Any]) -> None:
        config["ignore"] = ["lm_head", *(f"{layer}.{member}" for layer in layers for member in QKV)]

    report = load(rewritten(tmp_path / "q", by_members), device="cpu", strict=True).fewbit_report
    assert not report.contradictions
    rewritten(tmp_path / "q", lambda config: config["ignore"].pop())
    with pytest.raises(SchemeError, match=r"layers\.1\.self_attn\.v_proj is int4"):
        load(tmp_path / "q", device="cpu")


@pytest.mark.parametrize("entry", ["qkv_proj", "re:.*self_attn.qkv_proj$", "*.qkv_proj"])
def test_a_joined_name_means_its_members_b01(entry: str, tmp_path: Path) -> None:
    """The other way round: the model has three projections and the entry names the joined one."""
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, ignore=(entry,), effort="fast")
    model = load(tmp_path / "q", device="cpu")
    assert all(kinds(model, member) == {False} for member in QKV)
    assert kinds(model, "o_proj") == {True}


def test_ignored_blocks_of_experts_stay_dense_b07(tmp_path: Path) -> None:
    """B07: experts ask the same question as dense layers."""
    source = save_tiny_model(tmp_path / "model", "qwen3_moe")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, ignore=("layers.0.mlp.experts",), effort="fast")
    apart = Preference(disabled=frozenset({"cpu_experts"}))
    model = load(tmp_path / "q", device="cpu", dtype=torch.float32, strict=True, preference=apart)
    assert kinds(model.model.layers[0].mlp, "gate") == {False}
    assert kinds(model.model.layers[1].mlp, "gate.") == {True}
    assert verify(tmp_path / "q", source).passed


def test_tensors_below_one_module_have_places_of_their_own_b08(tmp_path: Path) -> None:
    """B08: `weight_scale_inv` is no `weight`, not of an expert either, whose weights are merged by name."""
    source = save_tiny_model(tmp_path / "model", "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    quantize(source, tmp_path / "q", "FP8_BLOCK", format="fp8", effort="fast")
    stored = StoredCheckpoint.open(tmp_path / "q")
    model = build_on_meta(read_config(tmp_path / "q"), torch.float32)
    destinations = Destinations(model, stored.modules, stored.split)
    places = {name: destinations.tensor(name) for name in stored.folder.headers}
    assert len(set(places.values())) == len(places)
    assert all(place.rpartition(".")[2] == name.rpartition(".")[2] for name, place in places.items())
    assert verify(tmp_path / "q", source).passed


@pytest.mark.parametrize("entry", ["model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate"])
def test_an_entry_may_use_the_name_on_disk_or_the_models_b03(entry: str, tmp_path: Path) -> None:
    """B03: transformers renames Mixtral's modules, and configurations of either age are met."""
    source = save_tiny_model(tmp_path / "model", "mixtral")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    rewritten(tmp_path / "q", lambda config: config.update(ignore=["lm_head", entry]))
    report = load(tmp_path / "q", device="cpu").fewbit_report
    assert not [line for line in report.contradictions if entry in line]
    rewritten(tmp_path / "q", lambda config: config.update(ignore=["lm_head", entry.replace("gate", "gaet")]))
    report = load(tmp_path / "q", device="cpu").fewbit_report
    assert [line for line in report.contradictions if "gaet" in line and "matches no module" in line]


@pytest.mark.parametrize("name", [name for name, found in formats().items() if found.in_safetensors])
def test_every_format_reports_entries_that_match_nothing(name: str) -> None:
    matcher = formats()[name].matcher
    key = LinearKey.parse("int4:group32:bf16")
    scheme = Scheme("X", (Rule(("Linear",), key), Rule(("nowhere_at_all",), None)), ("lm_head", "typo_proj"))
    modules = [("model.layers.0.self_attn.q_proj", "Linear"), ("lm_head", "Linear")]
    assert scheme.unmatched(modules, matcher) == ["nowhere_at_all", "typo_proj"]


@pytest.mark.parametrize(
    ("name", "entry"), [("awq", "modules_to_not_convert"), ("gptq", "modules_in_block_to_quantize")]
)
def test_rules_that_take_parts_of_segments_are_followed_and_told_b05(name: str, entry: str, tmp_path: Path) -> None:
    """B05: b_proj is a part of kv_b_proj to these formats; the reader follows, says so, and lets tensors decide."""
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, format=name, effort="fast")
    rewritten(tmp_path / "q", lambda config: config.update({entry: ["p_proj"]}))
    with pytest.warns(UserWarning, match=f"{entry} names model.layers.[01].mlp.up_proj by 'p_proj', a part of") as told:
        report = load(tmp_path / "q", device="cpu").fewbit_report
    assert len(report.layers) == 14
    assert {str(one.message).split()[2].rpartition(".")[2] for one in told} == {"up_proj"}
    rewritten(tmp_path / "q", lambda config: config.update({entry: ["mlp.up_proj"]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(tmp_path / "q", device="cpu")


def test_a_hybrid_checkpoint_is_read_by_its_tensors_b16(tmp_path: Path) -> None:
    """B16: int4 and FP8 layers under a configuration that tells of int4 only; no scale is skipped."""
    source = save_tiny_model(tmp_path / "model")
    for scheme, size in (("W4A16", 32), ("FP8_DYNAMIC", None)):
        quantize(source, tmp_path / scheme, scheme, group_size=size, effort="fast")
    tensors = load_file(tmp_path / "W4A16" / "model.safetensors")
    other = load_file(tmp_path / "FP8_DYNAMIC" / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    mixed = {tensor: value for tensor, value in tensors.items() if not tensor.startswith(f"{name}.")}
    mixed |= {tensor: value for tensor, value in other.items() if tensor.startswith(f"{name}.")}
    save_file(mixed, tmp_path / "W4A16" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} should be int4"):
        load(tmp_path / "W4A16", device="cpu")  # no group of the configuration holds such a layer
    group = configuration(tmp_path / "FP8_DYNAMIC")["config_groups"]["group_0"] | {"targets": ["re:nothing$"]}
    rewritten(tmp_path / "W4A16", lambda config: config["config_groups"].update(group_1=group))
    model = load(tmp_path / "W4A16", device="cpu", dtype=torch.float32)
    assert str(model.fewbit_report.layers[name].key.weight) == "e4m3:channel:bf16"
    assert {str(layer.key.weight.element) for layer in model.fewbit_report.layers.values()} == {"int4", "e4m3"}
    with torch.no_grad():
        assert bool(model(input_ids=torch.arange(8)[None]).logits.isfinite().all())
