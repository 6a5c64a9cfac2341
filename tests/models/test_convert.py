"""Conversions: every checkpoint to every format that can hold it and back, and precise refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fewbit.checkpoints.registry import formats, writable
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, FewbitError, OutputError, SchemeError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.evaluation.verify import verify
from fewbit.models.conversion.convert import convert
from fewbit.models.load import load
from fewbit.models.quantization.outcome import weight_hash
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from tests.checkpoints.test_tiny_checkpoints import BESIDE, folder_of
from tests.tiny_models import VOCABULARY, save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what files are warned of is tested where it is read

WRITABLE = writable()
IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY

# One of each kind of thing that a format must have a place for; `make test-grid` takes all there are.
SAMPLE = [
    "autoround-mixedbits-w4-w8-w2-bf16-llama-b",
    "gptqmodel-w4g32asym-v2-llama-e",
    "llmcompressor-fp8-static-llama-b",
    "llmcompressor-mixed-fp8-attn-int4-mlp-llama-b",
    "llmcompressor-mxfp4a16-llama-b",
    "llmcompressor-nvfp4-llama-b",
    "modelopt-int4awq-llama-e",
    "quark-int4g128-llama-e",
]

ONE_WAY = {
    # Each key alone is written in the packing that its other readers want, and AutoRound names one for the model.
    "autoround-mixedbits-w4-w8-w2-bf16-llama-b",
    # compressed-tensors took act-order out of its format after 0.12; old files are read.
    "llmcompressor081-gptq-w4a16-actorder-group-llama-a",
}
"""Checkpoints whose own format does not take them back."""

MULTIPLIED_OUT = {"llama-e-Q4_0.gguf", "llama-e-Q4_1.gguf", "llama-d-Q4_K_M.gguf"}
"""Files with scales of scales, which other formats hold multiplied out, from where no way leads back."""

EVERY = sorted(path.name for path in BESIDE.glob("*") if not path.name.startswith("base"))


def source_of(name: str) -> Path:
    folder = folder_of(name)
    return next(iter(folder.glob("*.gguf")), folder)


def hashes(path: Path) -> dict[str, str]:
    return {layer.name: weight_hash(layer.numbers) for layer in decoded_layers(StoredCheckpoint.open(path))}


def numbers(path: Path) -> dict[str, torch.Tensor]:
    return {layer.name: layer.numbers for layer in decoded_layers(StoredCheckpoint.open(path))}


def check_there_and_back(source: Path, to: str, folder: Path) -> None:
    """Converts and converts back; a refusal must say what cannot be held, an outcome must be the same numbers."""
    stored = StoredCheckpoint.open(source)
    assert stored.format is not None
    try:
        report = convert(source, folder / "there", to)
    except OutputError as refusal:
        assert not (folder / "there").exists()
        assert to in refusal.message.lower() and refusal.hint
        return
    before = numbers(source)
    for layer in decoded_layers(StoredCheckpoint.open(folder / "there")):
        if report["rounded"]:
            assert torch.allclose(layer.numbers, before.pop(layer.name), rtol=2.0**-22, atol=0)
        else:
            assert torch.equal(layer.numbers, before.pop(layer.name))
    assert not before
    widened = formats()[to].widens  # what holds a few widths only need not lead back
    if stored.format.name in WRITABLE and source.name not in ONE_WAY and not widened:
        try:
            back = convert(folder / "there", folder / "back", stored.format.name)
        except OutputError:
            assert source.name in MULTIPLIED_OUT, source.name
            return
        assert back["rounded"] or report["rounded"] or hashes(folder / "back") == hashes(source)


@pytest.mark.parametrize("to", WRITABLE)
@pytest.mark.parametrize("name", SAMPLE)
def test_there_and_back(name: str, to: str, tmp_path: Path) -> None:
    check_there_and_back(source_of(name), to, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("to", WRITABLE)
@pytest.mark.parametrize("name", EVERY)
def test_every_checkpoint_there_and_back(name: str, to: str, tmp_path: Path) -> None:
    source = source_of(name)
    try:
        stored = StoredCheckpoint.open(source)
    except FewbitError as unsupported:
        pytest.skip(f"{name} is not read: {unsupported.message}")
    if stored.format is None:
        pytest.skip(f"{name} is not quantized.")
    check_there_and_back(source, to, tmp_path)


# --- what a converted checkpoint is ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in compressed-tensors, int4 in groups of 32, its layers in several shards."""
    folder = tmp_path_factory.mktemp("convert")
    quantize(save_tiny_model(folder / "model"), folder / "w4", "W4A16", group_size=32, effort="fast")
    return folder / "w4"


def logits(folder: Path) -> torch.Tensor:
    model = load(folder, device="cpu", dtype=torch.float32, strict=True)
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("to", ["gptq", "awq", "auto-round", "modelopt", "quark"])
def test_the_model_is_the_same(quantized: Path, to: str, tmp_path: Path) -> None:
    report = convert(quantized, tmp_path / "out", to, max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert torch.equal(logits(tmp_path / "out"), logits(quantized))
    assert {layer["sqnr_db"] for layer in report["layers"]} == {None}
    assert verify(tmp_path / "out").passed
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text()) == json.loads(json.dumps(report))
    assert json.loads((tmp_path / "out" / "fewbit_recipe.json").read_text())["format"] == to


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dequantized_weights_make_a_plain_checkpoint(quantized: Path, dtype: str, tmp_path: Path) -> None:
    report = convert(quantized, tmp_path / "out", dtype)
    found, before = TensorFolder(tmp_path / "out"), numbers(quantized)
    assert "quantization_config" not in found.config
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    assert found.config["dtype"] == str(kind).removeprefix("torch.")
    for name, weight in before.items():
        assert torch.equal(found.load(f"{name}.weight"), weight.to(kind))
    losses = {layer["sqnr_db"] for layer in report["dequantized"]}
    assert (losses == {None}) == (dtype != "bf16")  # four bits times eight: bf16 has too few, f16 not
    assert verify(tmp_path / "out").passed


def test_smoothing_is_folded_into_dequantized_weights(tmp_path: Path) -> None:
    source = folder_of("modelopt-int4awq-llama-e")
    convert(source, tmp_path / "out", "f32")
    with torch.no_grad():
        ids = torch.arange(16)[None]
        dense, smoothed = (
            load(path, device="cpu", dtype=torch.float32)(input_ids=ids).logits for path in (tmp_path / "out", source)
        )
    assert torch.allclose(dense, smoothed, atol=1e-4)


def test_stacks_of_experts_become_plain_ones_or_are_refused(tmp_path: Path) -> None:
    """gpt-oss: the experts of a block are one tensor, which no other format is written for."""
    source, ids = folder_of("own-mxfp4-gptoss-a"), torch.arange(16)[None]
    convert(source, tmp_path / "out", "f32")
    assert "quantization_config" not in TensorFolder(tmp_path / "out").config
    with torch.no_grad():
        plain, packed = (
            load(path, device="cpu", dtype=torch.float32)(input_ids=ids).logits for path in (tmp_path / "out", source)
        )
    torch.testing.assert_close(plain, packed, rtol=1e-4, atol=1e-4)
    assert verify(tmp_path / "out").passed
    for options in ({}, {"requantize": "MXFP4A16"}):
        with pytest.raises(OutputError, match="quark is written for single layers, found a stack of 4 experts"):
            convert(source, tmp_path / "quark", "quark", **options)


def test_experts_and_their_router(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "m", "qwen3_moe"), tmp_path / "w4", "W4A16_ASYM", group_size=32, effort="fast")
    convert(tmp_path / "w4", tmp_path / "out", "gptq")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "w4"))
    config = TensorFolder(tmp_path / "out").config["quantization_config"]
    assert any("mlp" in name and "gate" in name for name in config["dynamic"]), "the router is not listed"


def test_tensors_that_the_model_does_not_build_are_carried_along(quantized: Path, tmp_path: Path) -> None:
    """Defect B72: draft heads vanish."""
    source = shutil.copytree(quantized, tmp_path / "in")
    tensors = load_file(quantized / "model.safetensors")
    extra = {"mtp.0.norm.weight": torch.ones(4), "mtp.0.proj.weight": torch.randn(8, 8).bfloat16()}
    draft = {
        f"mtp.0.up_proj.{name.rpartition('.')[2]}": tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.mlp.up_proj.")
    }
    save_file(tensors | extra | draft, source / "model.safetensors", {"format": "pt"})
    report = convert(source, tmp_path / "out", "gptq")
    assert {"mtp.0.norm", "mtp.0.proj", "mtp.0.up_proj"} == set(report["not_built"])
    found = TensorFolder(tmp_path / "out")
    assert all(torch.equal(found.load(name), tensor) for name, tensor in extra.items())
    stored = StoredCheckpoint.open(tmp_path / "out")
    described = stored.describe("mtp.0.up_proj")
    assert described is not None and str(described.key) == "int4:group32:bf16"


def test_layers_that_a_format_describes_only_alike_get_zero_points(tmp_path: Path) -> None:
    """GPTQ has one version for the whole model; symmetric layers join asymmetric ones with zero points of zero."""
    source = folder_of("autoround-mixedbits-w4-w8-w2-bf16-llama-b")
    report = convert(source, tmp_path / "out", "gptq")
    assert all(":asym:" in key for key in report["restated"].values())
    assert hashes(tmp_path / "out") == hashes(source)


def test_act_order_goes_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    source = folder_of("llmcompressor081-gptq-w4a16-actorder-group-llama-a")
    convert(source, tmp_path / "gptq", "gptq")
    assert hashes(tmp_path / "gptq") == hashes(source)
    assert TensorFolder(tmp_path / "gptq").config["quantization_config"]["desc_act"] is True
    with pytest.raises(OutputError, match="awq has no place for the order"):
        convert(source, tmp_path / "awq", "awq")


CACHED = "e4m3:tensor:f32"


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "quark", "fp8"])
@pytest.mark.parametrize("name", ["llmcompressor-fp8-kvcache-fp8-llama-b", "modelopt-fp8-kvfp8-llama-e"])
def test_a_quantized_kv_cache_is_stated_in_the_new_format(name: str, to: str, tmp_path: Path) -> None:
    """Its key in the configuration and its scales under the names that the format's readers look for."""
    report = convert(folder_of(name), tmp_path / "out", to)
    assert not any("cache" in note for note in report["notes"])
    before, after = (load(path, device="cpu").fewbit_report for path in (folder_of(name), tmp_path / "out"))
    assert str(after.kv_cache.key) == str(before.kv_cache.key) == CACHED
    assert after.kv_cache.layers.keys() == before.kv_cache.layers.keys()
    form = formats()[to]
    for attention, scales in after.kv_cache.layers.items():
        assert torch.equal(scales.key, before.kv_cache.layers[attention].key)
        assert torch.equal(scales.value, before.kv_cache.layers[attention].value)
        assert scales.sources == {"key": form.cache_scale(attention, "k"), "value": form.cache_scale(attention, "v")}
    assert sorted(after.carried) == sorted(
        form.cache_scale(attention, side) for attention in after.kv_cache.layers for side in "kv"
    )


@pytest.mark.parametrize("to", ["humming", "bf16"])
def test_a_kv_cache_that_the_target_cannot_state_is_noted(to: str, tmp_path: Path) -> None:
    source = folder_of("modelopt-fp8-kvfp8-llama-e")
    report = convert(source, tmp_path / "out", to)
    what = "humming cannot describe a KV cache" if to == "humming" else "A plain checkpoint describes no KV cache"
    assert any(
        note == f"{what} of {CACHED}: the result does not state it, 2 scales are carried along under their names."
        for note in report["notes"]
    ), report["notes"]
    stored, scales = StoredCheckpoint.open(source), load(tmp_path / "out", device="cpu").fewbit_report.kv_cache
    assert scales.key is None
    assert scales.from_file == 1
    assert {name for name in stored.folder.headers if name.endswith(("k_scale", "v_scale"))} <= {
        *StoredCheckpoint.open(tmp_path / "out").folder.headers
    }


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_refusal_names_what_has_no_place_and_what_requantizing_costs(tmp_path: Path) -> None:
    source = folder_of("gptqmodel-w4g32asym-v2-llama-e")
    with pytest.raises(OutputError) as refusal:
        convert(source, tmp_path / "out", "modelopt")
    message, hint = refusal.value.message, refusal.value.hint
    assert "int4:asym:group32:f16 has zero points, modelopt has none for such weights" in message
    assert "6 other layers" in message
    preset, said = hint.split("--requantize ")[1].split()[0], float(hint.split("SQNR of ")[1].split()[0])
    report = convert(source, tmp_path / "out", "modelopt", requantize=preset)
    first = next(layer for layer in report["layers"] if layer["name"] in message)
    assert first["sqnr_db"] == pytest.approx(said, abs=0.5)
    assert sorted(report["requantized"]) == sorted(layer["name"] for layer in report["layers"])
    assert verify(tmp_path / "out").passed


def test_only_what_cannot_be_held_is_requantized(tmp_path: Path) -> None:
    source = folder_of("llmcompressor-mixed-fp8-attn-int4-mlp-llama-b")
    report = convert(source, tmp_path / "out", "awq", requantize="W4A16", group_size=64)
    assert report["requantized"] and all("self_attn" in name for name in report["requantized"])
    kept = {layer["name"] for layer in report["layers"] if layer["sqnr_db"] is None}
    assert kept == {layer["name"] for layer in report["layers"]} - set(report["requantized"])


def test_requantized_members_of_a_joined_matrix_share_their_second_level(quantized: Path, tmp_path: Path) -> None:
    quantize(quantized.parent / "model", tmp_path / "asym", "W4A16_ASYM", group_size=32, effort="fast")
    convert(tmp_path / "asym", tmp_path / "nvfp4", "modelopt", requantize="NVFP4A16")
    stored = StoredCheckpoint.open(tmp_path / "nvfp4")
    scales = {
        layer.name.rpartition(".")[2]: float(layer.record["global_scale"])
        for layer in decoded_layers(stored)
        if layer.name.startswith("model.layers.0.")
    }
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"]
    assert scales["gate_proj"] == scales["up_proj"] != scales["down_proj"]


def test_activations_are_dropped_only_on_demand(tmp_path: Path) -> None:
    source = folder_of("quark-int8chan-llama-e")
    with pytest.raises(OutputError, match=r"activations are quantized to .* for which gptq has no place.*--drop-activ"):
        convert(source, tmp_path / "out", "gptq")
    report = convert(source, tmp_path / "out", "gptq", drop_activations=True)
    assert hashes(tmp_path / "out") == hashes(source)
    assert any("Activations are no longer quantized" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("to", "options", "error", "sentence"),
    [
        ("gtpq", {}, SchemeError, "Did you mean 'gptq'"),
        ("mxfp4", {}, SchemeError, "not written for linear layers"),
        ("fp8", {"requantize": "W4A61"}, SchemeError, "Did you mean 'W4A16'"),
        ("fp8", {"requantize": "FP8"}, OutputError, "calibration"),
        ("fp8", {"requantize": "W4A16"}, OutputError, "fp8 cannot hold"),
        ("gptq", {"dequantize": ["q_porj"]}, SchemeError, "matches no quantized layer"),
        ("bf16", {"requantize": "W4A16"}, SchemeError, "Leave --requantize out"),
    ],
)
def test_mistakes(
    quantized: Path, to: str, options: dict[str, Any], error: type[FewbitError], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as found:
        convert(quantized, tmp_path / "out", to, **options)
    assert sentence in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_plain_checkpoints_have_nothing_to_convert(quantized: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not quantized"):
        convert(quantized.parent / "model", tmp_path / "out", "gptq")


def test_layers_are_left_plain_on_demand(quantized: Path, tmp_path: Path) -> None:
    report = convert(quantized, tmp_path / "out", "gptq", dequantize=["mlp.down_proj"])
    assert [layer["name"] for layer in report["dequantized"]] == [
        f"model.layers.{index}.mlp.down_proj" for index in range(2)
    ]
    assert verify(tmp_path / "out").passed
    assert logits(tmp_path / "out").isfinite().all()
