"""Bit budgets: what they choose holds, is predicted rightly, and is refused where it cannot be."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbit.errors import FewbitError, OutputError, SchemeError
from fewbit.evaluation.verify import verify
from fewbit.models.load import load
from fewbit.models.names import read_config
from fewbit.models.quantization.budget import cache_numbers
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.models.quantization.quantize import QuantizeOptions, quantize
from fewbit.models.quantization.sensitivity import measure_sensitivity
from fewbit.models.quantization.texts import builtin_text
from fewbit.numerics import dequantize
from fewbit.numerics import quantize as round_to_nearest
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import KV_CACHES
from fewbit.spec.recipe import Recipe
from tests.models.test_transforms import transformed
from tests.tiny_models import save_tiny_model

SHORT = {"calibration_windows": 4, "calibration_length": 64}
FEW = ("int4:group32:bf16", "int3:asym:group32:bf16", "e2m1:group16:e4m3/tensor:f32", "int8:channel:bf16")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("budget") / "model", hidden_size=128)


@pytest.mark.parametrize(("family", "algorithm"), [("llama", "gptq"), ("qwen3_moe", "round_to_nearest")])
def test_a_budget_is_kept_and_members_of_a_joined_matrix_are_alike(tmp_path: Path, family: str, algorithm: str) -> None:
    source = save_tiny_model(tmp_path / "model", family, hidden_size=128)
    report = quantize(source, tmp_path / "q", bits_per_weight=5.25, candidates=FEW, algorithm=algorithm, **SHORT)
    assert 4.5 < report["bits_per_weight"] <= 5.25
    assert report["whole_bits_per_weight"] > report["bits_per_weight"]  # embeddings are plain
    frontier = report["budget"]["frontier"]
    assert len(frontier) > 5 and frontier[0]["predicted_kl"] > report["budget"]["predicted_kl"] > 0
    assert sum(report["budget"]["keys"].values()) == pytest.approx(1) and set(report["budget"]["keys"]) <= {
        *FEW,
        "plain",
    }
    recipe = Recipe.from_json((tmp_path / "q" / "fewbit_recipe.json").read_text())
    assert recipe.scheme.name == "mixed-5.25-bit" and len(recipe.scheme.keys) > 1
    assert recipe.calibration is not None  # it decided, even where the algorithm itself read none of it
    keys = {layer["name"]: layer["key"] for layer in report["layers"]}
    keys |= {name: "plain" for name, reason in report["plain"].items() if "budget" in reason}
    for block in ("model.layers.0", "model.layers.1"):
        joined = {keys[f"{block}.self_attn.{name}_proj"] for name in "qkv"}
        experts = {key for name, key in keys.items() if name.startswith(f"{block}.") and ".experts." in name}
        assert len(joined) == 1 and len(experts) <= 1
    assert all(check.passed for check in verify(tmp_path / "q", source).checks if "against" not in check.name)


def test_sensitivity_predicts_the_divergence_of_each_layer(source: Path) -> None:
    key = LinearKey.parse("int4:group32:bf16")
    plan = QuantizeOptions("W8A16", algorithm="round_to_nearest").plan(source)
    windows = token_windows(load_tokenizer(source), builtin_text(), 64, 32)
    found = measure_sensitivity(
        source, plan.recipe, plan.quantized, {one.name: [key] for one in plan.quantized}, windows
    )
    model = load(source, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=windows, use_cache=False).logits.log_softmax(-1)
    ratios = []
    for layer in plan.quantized:
        weight = model.get_submodule(layer.name).weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(dequantize(round_to_nearest(kept.bfloat16(), key.weight)))
            got = model(input_ids=windows, use_cache=False).logits.log_softmax(-1)
            weight.copy_(kept)
        true = float((expected.exp() * (expected - got)).sum(-1).mean())
        ratios.append(found.layers[layer.name][key] / true)
    assert len(ratios) == 14 and all(0.4 < ratio < 2.5 for ratio in ratios), ratios


@pytest.mark.parametrize(
    ("family", "chain"),
    [
        ("llama", ("awq:points=4",)),
        ("llama", ("rotation", "awq:points=4")),
        ("qwen3_moe", ("smoothquant:alpha=0.6",)),
        ("qwen3_moe", ("rotation", "smoothquant:alpha=0.6")),
    ],
)
def test_sensitivity_is_that_of_the_transformed_weights(tmp_path: Path, family: str, chain: tuple[str, ...]) -> None:
    """As if the transformed model had been written down and measured by itself."""
    source = save_tiny_model(
        tmp_path / "model", family, dtype=torch.float32, tie_word_embeddings=chain[0] == "rotation"
    )
    windows = torch.arange(128).reshape(4, 32) * 7 % 250
    key = LinearKey.parse("int8:channel:f32")  # of which few numbers lie where rounding may go either way

    def measured(folder: Path, *transforms: str) -> dict[str, float]:
        asked = QuantizeOptions("W4A16", 32, algorithm="round_to_nearest", transforms=transforms)
        plan = asked.plan(folder)
        layers = plan.quantized
        found = measure_sensitivity(folder, plan.recipe, layers, {one.name: [key] for one in layers}, windows)
        return {name: losses[key] for name, losses in found.layers.items()}

    transformed(source, list(chain), tmp_path / "transformed")
    found, wanted, plain = measured(source, *chain), measured(tmp_path / "transformed"), measured(source)
    assert found.keys() == wanted.keys()
    assert all(found[name] == pytest.approx(loss, rel=0.05, abs=1e-9) for name, loss in wanted.items())
    assert any(abs(found[name] / loss - 1) > 0.05 for name, loss in plain.items() if loss)


def test_a_size_to_fit_into_holds_weights_and_cache(source: Path, tmp_path: Path) -> None:
    plan = QuantizeOptions("W8A16").plan(source)
    linear = sum(2 * prod(layer.shape) for layer in plan.quantized)
    context = 4096
    cache = cache_numbers(read_config(source)) * context
    assert cache == 2 * 2 * 2 * 16 * context  # sides, layers, heads, head size
    limit = plan.bytes_before - linear // 2 + 2 * cache
    report = quantize(source, tmp_path / "q", fit=str(limit), context=context, algorithm="round_to_nearest", **SHORT)
    recipe = Recipe.from_json((tmp_path / "q" / "fewbit_recipe.json").read_text())
    assert 0 < len(report["layers"]) <= 14
    width = 1 if recipe.scheme.kv_cache else 2
    assert report["bytes_after"] + width * cache <= limit
    assert recipe.scheme.kv_cache in (None, KV_CACHES["FP8"])


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"bits_per_weight": 1.5}, SchemeError, "narrowest candidates need"),
        ({"fit": "10KB", "context": 16}, SchemeError, "10,000 bytes cannot hold this model and 16 tokens"),
        ({"fit": "1GB"}, SchemeError, "--context"),
        ({"fit": "1GB", "context": 16}, SchemeError, "as it is"),
        ({"fit": "1GB", "bits_per_weight": 4.0}, SchemeError, "either"),
        ({"fit": "nothing", "context": 1}, OutputError, "no size"),
        ({"bits_per_weight": -1.0}, SchemeError, "no budget"),
        ({"bits_per_weight": float("nan")}, SchemeError, "no budget"),
        ({"bits_per_weight": 4.0, "group_size": 32}, SchemeError, "chooses groups itself"),
        ({"bits_per_weight": 4.0, "format": "awq"}, OutputError, "awq holds one key for the whole model"),
        ({"bits_per_weight": 4.0, "candidates": ("int4",)}, SchemeError, "int4"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(
    source: Path, tmp_path: Path, options: dict[str, Any], kind: type[FewbitError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        quantize(source, tmp_path / "q", algorithm="round_to_nearest", **SHORT, **options)
    assert not (tmp_path / "q").exists()
