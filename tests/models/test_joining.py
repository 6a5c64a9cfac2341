"""Members of joined matrices: joined while loading, or stored otherwise than the model class has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from fewbit.checkpoints.registry import formats
from fewbit.errors import CheckpointError, ModelError
from fewbit.kernels.select import Preference
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.families import member_rows
from fewbit.models.joining import JoinOutcome
from fewbit.models.joint import ProjectionPart, SeparateMembers
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.numerics import quantize as quantize_tensor
from fewbit.spec import LinearKey
from tests.checkpoints.test_tiny_checkpoints import folder_of
from tests.tiny_models import VOCABULARY, save_tiny_model

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
REFERENCE = Preference("reference")


def loaded(folder: Path, join_members: bool = False, preference: Preference = Preference()) -> PreTrainedModel:
    return load(folder, device="cpu", dtype=torch.float32, join_members=join_members, preference=preference)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def greedy(model: PreTrainedModel) -> list[int]:
    """A continuation, which runs prefill, then single tokens over a cache."""
    return model.generate(IDS[:1], max_new_tokens=12, do_sample=False)[0].tolist()


def outcomes(model: PreTrainedModel) -> dict[str, JoinOutcome]:
    return {one.name: one for one in model.fewbit_report.joined}


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The same folder after `change` of its tensors."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


# --- joined while loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16_ASYM", "W8A8", "FP8_DYNAMIC", "NVFP4", "MXFP4A16"])
def test_members_under_scales_of_rows_are_joined_without_loss(scheme: str, tmp_path: Path) -> None:
    """B35: whatever the key, members whose scales cover single rows only lie under one another."""
    options = {"group_size": 32} if scheme in ("W4A16", "W3A16_ASYM") else {}
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", scheme, effort="fast", **options)
    apart, joined = loaded(tmp_path / "q"), loaded(tmp_path / "q", True)
    assert len(joined.fewbit_report.joined) == 4
    assert all(one.is_exact and one.key and not one.restated for one in joined.fewbit_report.joined)
    layer = joined.model.layers[0].self_attn
    assert isinstance(layer.qkv_proj, QuantizedLinear)
    assert (layer.qkv_proj.in_features, layer.qkv_proj.out_features) == (64, 128)
    assert isinstance(layer.k_proj, ProjectionPart)
    torch.testing.assert_close(logits(joined), logits(apart), rtol=1e-5, atol=1e-5)
    assert greedy(joined) == greedy(apart)
    assert not apart.fewbit_report.joined


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "mixtral"])
def test_every_family_with_a_row(family: str, tmp_path: Path) -> None:
    """Qwen2's projections have biases, which are joined as well."""
    quantize(save_tiny_model(tmp_path / "model", family), tmp_path / "q", "W4A16", group_size=32, effort="fast")

    def with_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.randn_like(one) if name.endswith(".bias") else one for name, one in tensors.items()}

    rewritten(tmp_path / "q", with_biases)
    apart, joined = loaded(tmp_path / "q"), loaded(tmp_path / "q", True)
    assert outcomes(joined)
    assert all(one.is_exact for one in joined.fewbit_report.joined)
    assert isinstance(joined.model.layers[1].self_attn.qkv_proj, QuantizedLinear)
    torch.testing.assert_close(logits(joined), logits(apart), rtol=1e-5, atol=1e-5)
    assert greedy(joined) == greedy(apart)


def test_a_member_is_computed_once(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, effort="fast")
    attention = loaded(tmp_path / "q", True).model.layers[0].self_attn
    calls: list[Tensor] = []
    attention.qkv_proj.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0]))
    x, y = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    parts = [getattr(attention, name)(x) for name in QKV]
    assert len(calls) == 1
    assert torch.equal(torch.cat(parts, -1), attention.qkv_proj(x))
    del calls[:]
    assert not torch.equal(attention.q_proj(x), attention.q_proj(y))
    assert torch.equal(attention.k_proj(x), parts[1])  # another input in between does not get into the way
    assert len(calls) == 3


def nvfp4_with(factors: dict[str, float], folder: Path) -> Path:
    """A checkpoint whose members' second-level scales are that many times what they share."""
    quantize(save_tiny_model(folder / "model"), folder / "q", "NVFP4A16", effort="fast")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # The file has divisors.
        return {
            name: one / factors.get(name.split(".")[-2], 1.0) if name.endswith("weight_global_scale") else one
            for name, one in tensors.items()
        }

    return rewritten(folder / "q", change)


def test_second_level_scales_that_differ_stay_exact_b35(tmp_path: Path) -> None:
    """B35: 1, 1/2 and 1/10 of one another; the tenth has no place in E4M3, so that each row keeps its factor."""
    folder = nvfp4_with({"k_proj": 0.5, "v_proj": 0.1}, tmp_path)
    apart, joined = loaded(folder), loaded(folder, True)
    found = outcomes(joined)
    qkv = found["model.layers.0.self_attn.qkv_proj"]
    assert str(qkv.key) == "e2m1:group16:e4m3/channel:f32"
    assert "became e2m1:group16:e4m3/channel:f32" in str(qkv)
    assert "no weight moved" in str(qkv)
    assert qkv.ratios == pytest.approx((1.0, 0.5, 0.1), rel=1e-6)
    assert not found["model.layers.0.mlp.gate_up_proj"].restated
    torch.testing.assert_close(logits(joined), logits(apart), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits(loaded(folder, True, REFERENCE)), logits(loaded(folder, preference=REFERENCE)), rtol=1e-5, atol=1e-5
    )
    assert greedy(joined) == greedy(apart)


def test_second_level_scales_that_fit_go_into_the_first_level_b35(tmp_path: Path) -> None:
    folder = nvfp4_with({"k_proj": 0.5}, tmp_path)
    apart, joined = loaded(folder), loaded(folder, True)
    qkv = outcomes(joined)["model.layers.0.self_attn.qkv_proj"]
    assert str(qkv.key) == "e2m1:group16:e4m3/tensor:f32"
    assert qkv.restated == "second-level scales folded into the first level"
    assert qkv.is_exact
    torch.testing.assert_close(logits(joined), logits(apart), rtol=1e-5, atol=1e-5)


def test_fp8_members_under_one_scale_each_lose_and_say_so() -> None:
    """One FP8 scale a member: all are rounded anew under the largest, and the report has the cost in decibels."""
    folder = folder_of("modelopt-fp8-kvfp8-llama-e")
    apart, joined = loaded(folder), loaded(folder, True)
    for one in joined.fewbit_report.joined:
        assert str(one.key).startswith("e4m3:tensor:f32 * e4m3:tensor")
        assert one.restated.startswith("rounded anew under the largest scale")
        assert not one.is_exact
        losses = [loss for loss in one.sqnr_db if loss is not None]
        assert len(losses) == len(one.members) - 1  # the largest is its own
        assert min(losses) > 25
        assert f"SQNR {min(losses):.1f} dB at worst" in str(one)
    expected = logits(apart)
    assert (logits(joined) - expected).abs().max() < 0.15 * expected.abs().max()


def test_integers_under_one_scale_each_get_scales_of_rows(tmp_path: Path) -> None:
    """INT8, one scale a member: written out for each row, so that nothing is lost."""
    source, key = save_tiny_model(tmp_path / "model"), LinearKey.parse("int8:tensor:f32")
    target = formats()["compressed-tensors"]
    names = [f"model.layers.{block}.self_attn.{member}" for block in range(2) for member in QKV]

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in names:
            record = quantize_tensor(tensors.pop(f"{name}.weight").float(), key.weight)
            tensors |= {f"{name}.{leaf}": one for leaf, one in target.write(record, key).items()}
        return tensors

    folder = rewritten(shutil.copytree(source, tmp_path / "q"), change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = target.config(dict.fromkeys(names, key), ["lm_head"])
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn\.[qkv]_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    apart, joined = loaded(folder), loaded(folder, True)
    assert len(joined.fewbit_report.joined) == 2  # gate and up are plain, and nothing is said of them
    assert all(one.is_exact and str(one.key) == "int8:channel:f32" for one in joined.fewbit_report.joined)
    torch.testing.assert_close(logits(joined), logits(apart), rtol=1e-5, atol=1e-5)


def test_members_that_cannot_be_one_matrix_run_apart_and_say_why() -> None:
    folder = folder_of("autoround-mixedbits-w4-w8-w2-bf16-llama-b")
    apart, joined = loaded(folder), loaded(folder, True)
    reasons = [str(one) for one in joined.fewbit_report.joined if one.key is None]
    assert any("members run apart, members are int4:group64:f16 and int2:asym:group64:f16" in one for one in reasons)
    assert torch.equal(logits(joined), logits(apart))


def test_a_matrix_with_a_plain_member_is_left_apart(tmp_path: Path) -> None:
    quantize(
        save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, ignore=("v_proj",), effort="fast"
    )
    apart, joined = loaded(tmp_path / "q"), loaded(tmp_path / "q", True)
    found = outcomes(joined)["model.layers.1.self_attn.qkv_proj"]
    assert found.reason == "model.layers.1.self_attn.v_proj is not quantized"
    assert outcomes(joined)["model.layers.1.mlp.gate_up_proj"].is_exact
    torch.testing.assert_close(logits(joined), logits(apart), rtol=1e-5, atol=1e-5)


# --- stored otherwise than the class has them ------------------------------------------------------------------------


def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The members of Phi-3's joined projections, each on its own."""
    apart = {}
    for name, tensor in tensors.items():
        for joined, members, rows in (("qkv_proj", QKV, (64, 32, 32)), ("gate_up_proj", GATE_UP, (128, 128))):
            if f".{joined}." in name:
                parts = zip(members, tensor.split(rows), strict=True)
                apart |= {name.replace(joined, member): part.contiguous() for member, part in parts}
        if "qkv_proj" not in name and "gate_up_proj" not in name:
            apart[name] = tensor
    return apart


def put_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Llama's projections as joined ones; those of a layer without zero points have their rows first."""
    together = dict(tensors)
    for joined, members in (("qkv_proj", QKV), ("gate_up_proj", GATE_UP)):
        for name in tensors:
            if f".{members[0]}." in name and not name.endswith("weight_shape"):
                parts = [together.pop(name.replace(members[0], member)) for member in members]
                together[name.replace(members[0], joined)] = torch.cat(parts)
    return {name: one for name, one in together.items() if not name.endswith("weight_shape") or "down" in name}


def test_members_on_disk_run_in_a_class_with_a_joined_projection(tmp_path: Path) -> None:
    """Plain ones first, then quantized from there, apart and joined."""
    source = save_tiny_model(tmp_path / "model", "phi3")
    apart = rewritten(shutil.copytree(source, tmp_path / "apart"), separated)
    model = loaded(apart)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, SeparateMembers)
    torch.testing.assert_close(logits(model), logits(loaded(source)), rtol=1e-5, atol=1e-5)
    quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    quantize(apart, tmp_path / "q-apart", "W4A16", group_size=32, effort="fast")
    expected = logits(loaded(tmp_path / "q"))
    torch.testing.assert_close(logits(loaded(tmp_path / "q-apart")), expected, rtol=1e-5, atol=1e-5)
    joined = loaded(tmp_path / "q-apart", True)
    assert isinstance(joined.model.layers[0].mlp.gate_up_proj, QuantizedLinear)
    assert len(joined.fewbit_report.joined) == 4
    torch.testing.assert_close(logits(joined), expected, rtol=1e-5, atol=1e-5)
    assert not joined.fewbit_report.carried


def test_members_that_the_configuration_does_not_explain_are_refused() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert member_rows(config, "self_attn.qkv_proj", 128) == (64, 32, 32)
    with pytest.raises(ModelError, match="qkv_proj has 192 output features, 4 and twice 2 heads of 16 make 128"):
        member_rows(config, "self_attn.qkv_proj", 192)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_joined_projection_on_disk_runs_in_a_class_with_members(quantized: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    if quantized:
        quantize(folder, tmp_path / "q", "W4A16", group_size=32, effort="fast")
        folder = tmp_path / "q"
    together = rewritten(shutil.copytree(folder, tmp_path / "together"), put_together)
    model = loaded(together)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.qkv_proj, QuantizedLinear if quantized else nn.Linear)
    assert not model.fewbit_report.carried
    assert not model.fewbit_report.contradictions
    torch.testing.assert_close(logits(model), logits(loaded(folder)), rtol=1e-5, atol=1e-5)
    assert greedy(model) == greedy(loaded(folder))


def test_a_projection_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    rewritten(folder, lambda tensors: put_together(tensors) | tensors)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is stored, and so is gate_up_proj"):
        loaded(folder)
