"""KV-cache scales: every family's names, sides that are missing, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from fewbit.checkpoints.kv_scales import attention_modules, cache_scale_name, cache_scales
from fewbit.checkpoints.registry import formats
from fewbit.errors import CheckpointError, OutputError, SchemeError
from fewbit.evaluation.verify import verify
from fewbit.models.kv_cache import KvCacheReport, kv_cache_report
from fewbit.models.load import load
from fewbit.models.quantization.calibration import token_windows
from fewbit.models.quantization.pipeline import CALIBRATION_LENGTH, CALIBRATION_WINDOWS
from fewbit.models.quantization.quantize import quantize
from fewbit.models.quantization.texts import builtin_text
from fewbit.spec import HEAD, LinearKey, QuantKey
from tests.checkpoints.test_tiny_checkpoints import folder_of
from tests.tiny_models import save_tiny_model

FP8 = QuantKey.parse("e4m3:tensor:f32")
ATTENTION = "model.layers.0.self_attn"
MODULES = [f"{ATTENTION}.{projection}_proj" for projection in "qkvo"]
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "a server's": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "joined": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
    "one vendor's": ("k_cache.scale", "v_cache.scale"),
}


def report_of(**tensors: float | Tensor) -> KvCacheReport:
    named = {f"{ATTENTION}.{name.replace('__', '.')}": torch.as_tensor(value) for name, value in tensors.items()}
    found = kv_cache_report(FP8, MODULES, named)
    assert found is not None
    return found


@pytest.mark.parametrize("family", NAMES)
def test_the_same_values_under_every_familys_names_b62(family: str) -> None:
    """B62: one table of names for all."""
    key, value = NAMES[family]
    tensors = {f"{ATTENTION}.{key}": torch.tensor([0.25]), f"{ATTENTION}.{value}": torch.tensor(0.5).bfloat16()}
    scales = cache_scales([ATTENTION], tensors)[ATTENTION]
    assert (scales.key.item(), scales.value.item()) == (0.25, 0.5)
    assert scales.sources == {"key": f"{ATTENTION}.{key}", "value": f"{ATTENTION}.{value}"}


def test_one_scale_for_both_sides_b62() -> None:
    scales = report_of(kv_scale=0.5).layers[ATTENTION]
    assert scales.key.item() == scales.value.item() == 0.5
    parsed = cache_scale_name(f"{ATTENTION}.kv_scale")
    assert parsed is not None and parsed.sides == ("k", "v")


@pytest.mark.parametrize("name", ["q_proj.q_scale", "q.scale", "prob_output_scale", "k_zero_point"])
def test_names_that_only_some_readers_use_are_known_b62(name: str) -> None:
    parsed = cache_scale_name(f"{ATTENTION}.{name}")
    assert parsed is not None and parsed.attention == ATTENTION
    assert report_of(**{name.replace(".", "__"): 1.0}).from_file == 0


@pytest.mark.parametrize("name", ["k_proj.weight_scale", "k_proj.input_scale", "o_proj.weight", "k_norm.weight"])
def test_other_scales_are_not_the_caches(name: str) -> None:
    assert cache_scale_name(f"{ATTENTION}.{name}") is None


@pytest.mark.parametrize(
    ("stored", "key", "value", "from_file", "notes"),
    [
        ({}, 1.0, 1.0, 0, ["keys' scale is 1", "values' scale is 1"]),
        ({"k_scale": 0.25}, 0.25, 0.25, 1, ["values' scale is as the other side"]),
        ({"v_scale": 0.5}, 0.5, 0.5, 1, ["keys' scale is as the other side"]),
        ({"k_scale": 0.25, "v_scale": 0.5}, 0.25, 0.5, 1, []),
    ],
    ids=["none", "k only", "v only", "both"],
)
def test_a_side_that_is_missing_b59(
    stored: dict[str, float], key: float, value: float, from_file: int, notes: list[str]
) -> None:
    """B59: either side may be alone; what stands in for the other is said for each layer."""
    report = report_of(**stored)
    scales = report.layers[ATTENTION]
    assert (scales.key.item(), scales.value.item()) == (key, value)
    assert report.from_file == from_file
    assert [note.partition("the ")[2] for note in report.notes] == notes


def test_one_scale_for_each_head() -> None:
    scales = report_of(k_scale=torch.tensor([0.5, 1.5]).reshape(2, 1, 1), v_scale=torch.ones(2)).layers[ATTENTION]
    assert scales.key.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none(bad: float) -> None:
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale is"):
        report_of(k_scale=bad)


def test_scales_of_a_wrong_shape_and_two_that_differ() -> None:
    with pytest.raises(CheckpointError, match=r"shape \[2, 3\], needed one scale"):
        report_of(k_scale=torch.ones(2, 3))
    with pytest.raises(CheckpointError, match="needed one k scale"):
        report_of(k_scale=0.5, k_proj__k_scale=0.25)
    assert report_of(k_scale=0.5, k_proj__k_scale=0.5).from_file == 1


def test_modules_that_cache() -> None:
    assert attention_modules([*MODULES, "model.layers.1.attn.qkv_proj", "model.layers.1.mlp.up_proj"]) == [
        ATTENTION,
        "model.layers.1.attn",
    ]


# --- whole checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stored", "layers"),
    [
        ("llmcompressor-fp8-kvcache-fp8-llama-b", 2, 2),
        ("modelopt-fp8-kvfp8-llama-e", 1, 1),
        ("modelopt-nvfp4-kvfp8-llama-e", 1, 1),
    ],
)
def test_checkpoints_of_other_tools(name: str, stored: int, layers: int) -> None:
    report = load(folder_of(name), device="cpu").fewbit_report
    assert str(report.kv_cache) == f"KV cache of {FP8}: {stored} of {layers} layers have scales from the file"
    assert report.kv_cache.notes == ()


def with_cache(folder: Path, key: QuantKey, scales: dict[str, Tensor], name: str = "compressed-tensors") -> Path:
    """The checkpoint with a quantized KV cache in its configuration, and these tensors."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | scales, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = formats()[name].with_kv_cache(config["quantization_config"], key)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_the_report_counts_what_is_there_b61(stored: int, tmp_path: Path) -> None:
    """B61: from the final state, not from a flag; a cache without scales is no failure."""
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, effort="fast")
    scales = {f"model.layers.{layer}.self_attn.{side}_scale": torch.ones(1) for layer in range(stored) for side in "kv"}
    report = load(with_cache(tmp_path / "q", FP8, scales), device="cpu").fewbit_report
    assert str(report.kv_cache) == f"KV cache of {FP8}: {stored} of 2 layers have scales from the file"
    assert len(report.kv_cache.notes) == 2 * (2 - stored)
    checks = {check.name: check for check in verify(tmp_path / "q").checks if check.name == "KV cache"}
    assert checks["KV cache"].passed


def test_nothing_is_said_of_a_cache_that_is_not_quantized_b61(tmp_path: Path) -> None:
    assert load(save_tiny_model(tmp_path / "model"), device="cpu").fewbit_report.kv_cache is None


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "input_scale", "scales"])
def test_a_scale_that_nothing_uses_is_an_error_b62(leaf: str, tmp_path: Path) -> None:
    """B62, B16: a plain layer with a scale is no plain layer; of modules that the model lacks it is carried along."""
    folder = save_tiny_model(tmp_path / "model")
    file = folder / "model.safetensors"
    plain = load_file(file)
    save_file(plain | {f"mtp.0.{leaf}": torch.ones(1)}, file, {"format": "pt"})
    assert load(folder, device="cpu").fewbit_report.carried == [f"mtp.0.{leaf}"]
    save_file(plain | {f"model.layers.0.mlp.up_proj.{leaf}": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"up_proj\.{leaf} belongs to a layer that is plain"):
        load(folder, device="cpu")


@pytest.mark.parametrize(("family", "cache"), [("llama", "fp8"), ("gemma3_text", "fp8"), ("phi3", "fp8-head")])
def test_scales_are_those_of_what_is_cached(family: str, cache: str, tmp_path: Path) -> None:
    """Calibrated after the rotary embedding, against the cache of a whole forward pass of stock transformers."""
    source = save_tiny_model(tmp_path / "model", family, dtype=torch.float32, max_position_embeddings=1024)
    quantize(source, tmp_path / "q", "W4A16", group_size=32, kv_cache=cache, self_samples=0, effort="fast")
    tokenizer = AutoTokenizer.from_pretrained(source)
    windows = token_windows(tokenizer, builtin_text(), CALIBRATION_LENGTH, CALIBRATION_WINDOWS)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    largest: dict[tuple[int, str], Tensor] = {}
    with torch.no_grad():
        for batch in windows.split(4):
            filled = DynamicCache()  # without the configuration, which would cut windows short
            stock(input_ids=batch, past_key_values=filled, use_cache=True)
            for layer, held in enumerate(filled.layers):
                for side, states in (("k", held.keys), ("v", held.values)):
                    seen = states.abs().amax(dim=(0, 2, 3))
                    largest[layer, side] = torch.maximum(largest.get((layer, side), seen), seen)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for (layer, side), seen in largest.items():
        scale = tensors[f"model.layers.{layer}.self_attn.{side}_scale"]
        wanted = seen.reshape(2, 1, 1) if "head" in cache else seen.amax().reshape(1)
        torch.testing.assert_close(scale, wanted / 448, rtol=1e-4, atol=0)
    report = load(tmp_path / "q", device="cpu", strict=True).fewbit_report
    assert report.kv_cache.from_file == 2
    assert verify(tmp_path / "q", source).passed


def test_modelopt_names_scales_by_projections(tmp_path: Path) -> None:
    quantize(
        save_tiny_model(tmp_path / "model"),
        tmp_path / "q",
        "FP8_DYNAMIC",
        format="modelopt",
        kv_cache="FP8",
        effort="fast",
    )
    report = load(tmp_path / "q", device="cpu").fewbit_report
    assert str(report.kv_cache) == f"KV cache of {FP8}: 2 of 2 layers have scales from the file"
    assert report.kv_cache.layers[ATTENTION].sources["key"] == f"{ATTENTION}.k_proj.k_scale"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_cache": "fp9"}, SchemeError, "Unknown KV cache 'fp9'"),
        ({"kv_cache": "fp8", "format": "gptq"}, OutputError, "gptq cannot describe a KV cache"),
    ],
)
def test_a_cache_that_cannot_be_written_is_refused_first(
    options: dict[str, str], error: type[Exception], words: str, tmp_path: Path
) -> None:
    source = save_tiny_model(tmp_path / "model")
    with pytest.raises(error, match=words):
        quantize(source, tmp_path / "q", "W4A16", group_size=32, **options)
    assert not (tmp_path / "q").exists()


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compressed-tensors", "e4m3:tensor:f32"),
        ("compressed-tensors", "e4m3:head:f32"),
        ("compressed-tensors", "int8:asym:head:f32"),
        ("compressed-tensors", "e4m3:tensor:f32:dynamic"),
        ("modelopt", "e4m3:tensor:f32"),
        ("fp8", "e4m3:tensor:f32"),
        ("quark", "e4m3:tensor:f32"),
        ("quark", "e4m3:tensor:f32:dynamic"),
    ],
)
def test_a_cache_that_is_written_is_read(name: str, text: str) -> None:
    found, key = formats()[name], QuantKey.parse(text)
    layers = {"a": next(iter(found.scheme(WEIGHTS[name]).keys))}
    config = found.with_kv_cache(found.config(layers, ["lm_head"]), key)
    assert found.scheme(json.loads(json.dumps(config))).kv_cache == key
    parsed = [cache_scale_name(found.cache_scale(ATTENTION, side)) for side in "kv"]
    assert [one.sides for one in parsed if one and one.attention == ATTENTION] == [("k",), ("v",)]


WEIGHTS = {
    "compressed-tensors": {"config_groups": {"FP8_DYNAMIC": ["Linear"]}},
    "modelopt": {"quant_algo": "FP8"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "quark": {
        "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
        }
    },
}


def test_quark_says_one_key_of_the_projections_that_are_cached() -> None:
    quark = formats()["quark"]
    key, other = next(iter(quark.scheme(WEIGHTS["quark"]).keys)), LinearKey.parse("e4m3:channel:bf16")
    config = quark.config({"a.k_proj": other, "b.k_proj": key, "c.o_proj": key}, [])
    with pytest.raises(OutputError, match=r"one key for all k_proj and v_proj; a\.k_proj has its own"):
        quark.with_kv_cache(config, FP8)


def test_attention_heads_are_described_as_the_library_does() -> None:
    compressed = formats()["compressed-tensors"]
    written = compressed.with_kv_cache({}, FP8.with_granularity(HEAD))["kv_cache_scheme"]
    arguments = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    assert arguments(**written).strategy == "attn_head"
    assert arguments(**compressed.with_kv_cache({}, FP8)["kv_cache_scheme"]).strategy == "tensor"


@pytest.mark.parametrize("name", [name for name, found in formats().items() if found.in_safetensors])
def test_what_no_configuration_can_say_is_refused(name: str) -> None:
    with pytest.raises(OutputError, match="e2m1:group32:e8m0"):
        formats()[name].with_kv_cache({}, QuantKey.parse("e2m1:group32:e8m0"))
