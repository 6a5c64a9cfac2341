"""Equivalent transformations: which there are, that they alone change nothing, and what they are worth."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fewbit.algorithms.registry import algorithm
from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, ModelError, SchemeError
from fewbit.evaluation.verify import verify
from fewbit.models.conversion.convert import convert
from fewbit.models.families import blocks_of
from fewbit.models.fill import PartialModel
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.block_stream import BlockStream
from fewbit.models.quantization.quantize import QuantizeOptions, quantize
from fewbit.models.quantization.transforms.evidence import StreamEvidence
from fewbit.models.quantization.transforms.interface import Consumer, Observation, ScalingTask
from fewbit.models.quantization.transforms.probe import BlockProbe
from fewbit.models.quantization.transforms.registry import parse_transform, transforms
from fewbit.models.quantization.transforms.structure import ScaleMapping, scale_mappings
from fewbit.models.quantization.transforms.transformed import Transformations
from fewbit.numerics import dequantize
from fewbit.numerics import quantize as round_to_nearest
from fewbit.numerics.activations import fake_quantize
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import preset
from fewbit.spec.recipe import Recipe
from tests.algorithms.layers import FEATURES, inputs, keys, weight
from tests.tiny_models import FAMILIES, save_tiny_model

IDS = torch.arange(40)[None] % 250
CPU = torch.device("cpu")

_DENSE = {
    "input_layernorm": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "post_attention_layernorm": {"mlp.gate_proj", "mlp.up_proj"},
    "self_attn.v_proj": {"self_attn.o_proj"},
    "mlp.up_proj": {"mlp.down_proj"},
}
_SANDWICH = {key.replace("post_attention", "pre_feedforward"): found for key, found in _DENSE.items()}
_SPARSE = {key: found for key, found in _DENSE.items() if not key.startswith(("mlp", "post"))} | {
    "post_attention_layernorm": {"mlp.gate", *(f"mlp.experts.{kind}.{e}" for kind in ("gate", "up") for e in range(4))},
    **{f"mlp.experts.up.{e}": {f"mlp.experts.down.{e}"} for e in range(4)},
}
MAPPINGS: dict[str, dict[str, set[str]]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "phi3": {
        "input_layernorm": {"self_attn.qkv_proj"},
        "post_attention_layernorm": {"mlp.gate_up_proj"},
        "self_attn.qkv_proj": {"self_attn.o_proj"},
        "mlp.gate_up_proj": {"mlp.down_proj"},
    },
    "qwen3_moe": _SPARSE,
    "mixtral": _SPARSE,
    # No linear layer of it feeds another without something that is not linear, or in another order, between.
    "gpt_neox": {"input_layernorm": {"attention.query_key_value"}, "post_attention_layernorm": {"mlp.dense_h_to_4h"}},
    # Its norms stand behind attention and MLP, not before them.
    "olmo2": {"self_attn.v_proj": {"self_attn.o_proj"}, "mlp.up_proj": {"mlp.down_proj"}},
}
UNROTATED = {"gemma2", "gemma3_text", "gpt_neox", "olmo2"}


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny float32 model of a family whose norms and biases are not what they begin with."""
    made: dict[tuple[str, bool], Path] = {}

    def source(family: str, tied: bool = False) -> Path:
        if (family, tied) not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            save_tiny_model(folder, family, dtype=torch.float32, tie_word_embeddings=tied)
            tensors = load_file(folder / "model.safetensors")
            generator = torch.Generator().manual_seed(3)
            for name in sorted(tensors):
                if tensors[name].dim() == 1:
                    tensors[name] += torch.randn(tensors[name].shape, generator=generator) * 0.3
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            made[family, tied] = folder
        return made[family, tied]

    return source


def transformed(folder: Path, texts: list[str], output: Path) -> list[dict[str, Any]]:
    """Writes the folder's model as transformations leave it, nothing quantized; two batches of calibration."""
    config = read_config(folder)
    chain = tuple(parse_transform(text).record for text in texts)
    layers = make_keys(folder)
    done = Transformations(Recipe(preset("W4A16"), transforms=chain), layers, TensorFolder(folder), config, CPU)
    model = build_on_meta(config, torch.float32)
    partial = PartialModel(model, done.weights)
    stream = BlockStream(model, partial.filled, torch.arange(128).reshape(4, 32) * 7 % 250, batch=2)
    tensors = {}
    names = {name: partial.destinations.tensor(name) for name in done.weights.headers}
    entries = done.enter(StreamEvidence(stream), "")
    for block in blocks_of(model):
        entries = entries + done.enter(StreamEvidence(stream), block)
        tensors |= {name: done.weights.plain(name) for name, to in names.items() if to.startswith(f"{block}.")}
        stream.gather(block, {})
    tensors |= {name: done.weights.plain(name) for name in done.weights.headers if name not in tensors}
    shutil.copytree(folder, output)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, output / "model.safetensors", {"format": "pt"}
    )
    values = json.loads((output / "config.json").read_text()) | {"tie_word_embeddings": False}
    (output / "config.json").write_text(json.dumps(values))
    return entries


def make_keys(folder: Path) -> dict[str, LinearKey]:
    plan = QuantizeOptions("W4A16", 32).plan(folder)
    return {layer.name: layer.key for layer in plan.quantized if layer.key}


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_mappings_are_found_by_trying(source_of: Callable[..., Path], family: str) -> None:
    folder = TensorFolder(source_of(family))
    probe = BlockProbe(folder, read_config(source_of(family)), CPU)
    path = next(iter(blocks_of(probe.model)))
    found = scale_mappings(probe, path, probe.parameters(path, folder.load))
    assert {one.producer: set(one.consumers) for one in found} == MAPPINGS[family]
    assert {one.offset for one in found if one.norm} <= {1.0 if family.startswith("gemma") else 0.0}
    for one in found:
        if one.norm and "experts" in str(one):
            assert one.consumers[0] == "mlp.gate"  # the router sees every token


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chain", ["awq", "smoothquant:alpha=0.6", "rotation", "rotation+awq+smoothquant"])
def test_the_transformed_model_computes_what_it_did(
    source_of: Callable[..., Path], tmp_path: Path, family: str, chain: str
) -> None:
    if "rotation" in chain and family in UNROTATED:
        with pytest.raises(ModelError, match="norm"):
            transformed(source_of(family), chain.split("+"), tmp_path / "t")
        return
    entries = transformed(source_of(family), chain.split("+"), tmp_path / "t")
    if family == "olmo2" and chain.startswith("smoothquant"):
        assert {entry["what"] for entry in entries} == {"no mapping found"}
        return
    assert any(entry["choice"] != "none" for entry in entries if "choice" in entry)
    before, after = load_file(source_of(family) / "model.safetensors"), load_file(tmp_path / "t" / "model.safetensors")
    assert any(not torch.equal(after[name], before[name]) for name in before)
    expected = logits(source_of(family))
    torch.testing.assert_close(logits(tmp_path / "t"), expected, rtol=0, atol=5e-5 * float(expected.std()))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tied_head_gets_its_own_rotated_weight(source_of: Callable[..., Path], tmp_path: Path, family: str) -> None:
    source = source_of(family, tied=True)
    transformed(source, ["rotation"], tmp_path / "t")
    tensors = load_file(tmp_path / "t" / "model.safetensors")
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape
    expected = logits(source)
    torch.testing.assert_close(logits(tmp_path / "t"), expected, rtol=0, atol=5e-5 * float(expected.std()))
    plan = QuantizeOptions("W4A16", 32, transforms=("rotation",)).plan(source)
    plain = QuantizeOptions("W4A16", 32).plan(source)
    assert plan.unties and not plain.unties
    assert "no longer tied" in plan.cautions[-1] and not plain.cautions
    assert plan.bytes_after - plain.bytes_after == tensors["lm_head.weight"].nbytes
    assert not QuantizeOptions("W4A16", 32, transforms=("rotation:stream=false",)).plan(source).unties


@pytest.mark.parametrize("chain", [(name,) for name in transforms()] + [("rotation", "awq")])
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "NVFP4"])
def test_checkpoints_are_written_verified_and_read_by_stock_transformers(
    tmp_path: Path, chain: tuple[str, ...], scheme: str
) -> None:
    source = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    size = 32 if scheme == "W4A16" else None
    report = quantize(
        source, tmp_path / "q", scheme, group_size=size, transforms=chain, calibration_windows=4, effort="fast"
    )
    assert {entry["transform"] for entry in report["transforms"]} == set(chain)
    recipe = Recipe.from_json((tmp_path / "q" / "fewbit_recipe.json").read_text())
    assert recipe.transforms == tuple(parse_transform(text).record for text in chain)
    result = verify(tmp_path / "q", source)
    assert result.passed, result.checks
    assert "weights against transformed source" in {check.name for check in result.checks}
    untied = json.loads((tmp_path / "q" / "config.json").read_text())["tie_word_embeddings"] is False
    assert untied == ("rotation" in chain) == ("untied" in report["tie_word_embeddings"])
    if scheme == "W4A16":
        convert(tmp_path / "q", tmp_path / "c", "gptq")
        assert verify(tmp_path / "c", source).passed  # conversion carries the recipe's transformations along
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
        with torch.no_grad():
            found, wanted = stock(input_ids=IDS).logits, logits(source).float()
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).mean() > 0.9


def test_two_runs_write_equal_bytes(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    for name in ("a", "b"):
        options = {"transforms": ("rotation", "awq:points=4"), "calibration_windows": 4, "calibration_length": 64}
        quantize(source, tmp_path / name, "W4A16", group_size=32, effort="fast", **options)
    for file in ("model.safetensors", "config.json", "fewbit_recipe.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("text", transforms())
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, text: str) -> None:
    source = save_tiny_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        quantize(
            source, tmp_path / "q", "W4A16", group_size=32, transforms=(text,), calibration_windows=2, effort="fast"
        )
    assert not (tmp_path / "q").exists()


def scaling_task(scheme: str, chooses: str) -> ScalingTask:
    """One norm whose output two matrices read, on correlated inputs."""
    seen = Observation(InputStatistics.empty(FEATURES))
    for part in inputs().split(256):
        seen.statistics.add(part, 64)
    mapping = ScaleMapping("norm", ("a", "b"), torch.arange(FEATURES), FEATURES, norm=True)
    key = keys()[scheme]
    consumers = [Consumer(weight()[:24].float(), key), Consumer(weight()[24:].float(), key, 0.5)]
    return ScalingTask(mapping, consumers, seen, algorithm(chooses))


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC"])
def test_awq_chooses_what_a_slow_transcription_in_float64_chooses(scheme: str) -> None:
    task = scaling_task(scheme, "round_to_nearest")
    x = inputs().double()
    magnitudes = x.abs().mean(dim=0)
    losses: dict[str, float] = {}

    def loss(scale: torch.Tensor) -> float:
        total = 0.0
        for one in task.quantized:
            exact = one.weight.double()
            rounded = dequantize(round_to_nearest((exact * scale).float(), one.key.weight)).double() / scale
            total += one.share * float((x @ (rounded - exact).T).square().sum() / (x @ exact.T).square().sum())
        return total

    losses["none"] = loss(torch.ones(FEATURES, dtype=torch.float64))
    width = task.quantized[0].key.weight.granularity.columns or FEATURES
    stacked = torch.cat([one.weight.double() for one in task.quantized])
    grouped = stacked.abs().view(len(stacked), -1, min(width, FEATURES))
    relative = (grouped / grouped.amax(dim=-1, keepdim=True)).view(len(stacked), -1).mean(dim=0)
    for index in range(10):
        ratio = index / 10
        for name, raw in (
            (f"activations^{ratio + 0.1:.3g}", magnitudes ** (ratio + 0.1)),
            (
                f"activations^{ratio:.3g} / weights^{1 - ratio:.3g}",
                magnitudes**ratio / (relative ** (1 - ratio) + 1e-4),
            ),
        ):
            scale = raw.clamp(min=1e-4)
            losses[name] = loss(scale / (scale.max() * scale.min()).sqrt())
    found = parse_transform("awq:patience=0").choose(task)
    assert losses[found.choice] == pytest.approx(min(losses.values()), rel=1e-3)
    assert found.loss == pytest.approx(losses[found.choice], rel=1e-3)
    assert found.loss_before == pytest.approx(losses["none"], rel=1e-3)
    assert found.loss <= found.loss_before
    hasty = parse_transform("awq").choose(task)
    assert found.loss <= hasty.loss <= found.loss_before


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4"])
def test_smoothquant_chooses_what_a_slow_transcription_in_float64_chooses(scheme: str) -> None:
    task = scaling_task(scheme, "round_to_nearest")
    x, largest = task.seen.sample.double(), inputs().abs().amax(dim=0).double()
    tops = torch.cat([one.weight for one in task.quantized]).abs().amax(dim=0).double()
    losses: dict[str, float] = {}
    for alpha in [None, *(0.3 + 0.05 * step for step in range(14))]:
        scale = torch.ones(FEATURES) if alpha is None else largest**alpha / tops ** (1 - alpha)
        scale = scale / (scale.max() * scale.min()).sqrt()
        total = 0.0
        for one in task.quantized:
            record = round_to_nearest((one.weight * scale).float(), one.key.weight)
            seen, key = (x / scale).float(), one.key.activation
            if scheme == "FP8":
                record = record.with_tensors(input_scale=(inputs().double() / scale).abs().amax().float() / 448)
            elif scheme == "NVFP4":
                top = (inputs().double() / scale).abs().amax()
                record = record.with_tensors(input_global_scale=top / (6 * 448))
            read = seen if key is None else fake_quantize(seen, key, record)
            exact = x @ one.weight.double().T
            error = read.double() @ dequantize(record).double().T - exact
            total += one.share * float(error.square().sum() / exact.square().sum())
        losses["none" if alpha is None else f"alpha {alpha:.3g}"] = total
    found = parse_transform("smoothquant").choose(task)
    assert found.loss == pytest.approx(losses[found.choice], rel=0.02)
    assert found.loss <= min(losses.values()) * 1.02
    assert found.loss_before == pytest.approx(losses["none"], rel=0.02)


@pytest.mark.parametrize("chooses", ["round_to_nearest", "gptq"])
@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16", "MXFP4A16"])
def test_awq_lowers_the_error_of_what_chooses_the_codes(scheme: str, chooses: str) -> None:
    found = parse_transform("awq").choose(scaling_task(scheme, chooses))
    assert found.loss <= found.loss_before
    if chooses == "round_to_nearest":  # one feature is twenty times larger than the others
        assert found.loss < 0.8 * found.loss_before


def test_texts_are_read_and_refused() -> None:
    assert parse_transform("awq:points=4,duo=no").record == {
        "name": "awq",
        "settings": {"points": 4, "duo": "no", "rows": 512, "patience": 2},
    }
    for text, names in (
        ("awqq", "awq"),
        ("awq:nothing=1", "nothing"),
        ("awq:points", "points"),
        ("awq:points=0", "points"),
        ("awq:duo=maybe", "duo"),
        ("awq:patience=-1", "patience"),
        ("smoothquant:alpha=2", "alpha"),
        ("rotation:stream=false,values=false", "rotation"),
    ):
        with pytest.raises(SchemeError, match=names):
            parse_transform(text)
