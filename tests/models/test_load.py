"""Loading: plain checkpoints equal stock transformers, quantized ones equal their own dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fewbit.errors import CheckpointError, ModelError
from fewbit.kernels.select import Preference
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from tests.tiny_models import FAMILIES, VOCABULARY, save_tiny_model

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_checkpoint_equals_stock_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "model", family, tie_word_embeddings=tied)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load(folder, device="cpu", dtype=torch.float32)
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)
    assert not ours.fewbit_report.carried and not ours.fewbit_report.contradictions


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_checkpoint_equals_its_dequantized_weights(tmp_path: Path, family: str) -> None:
    """The whole chain, for every family: names, merges, kernels; against a plain checkpoint of the decoded weights."""
    from fewbit.evaluation.layer_error import decoded_layers
    from fewbit.models.stored import StoredCheckpoint

    source = save_tiny_model(tmp_path / "model", family)
    quantize(source, tmp_path / "quantized", "W4A16", group_size=32, effort="fast")
    decoded = {layer.name: layer.numbers for layer in decoded_layers(StoredCheckpoint.open(tmp_path / "quantized"))}
    assert decoded
    dense = shutil.copytree(source, tmp_path / "dense")
    tensors = load_file(dense / "model.safetensors")
    tensors = {name: decoded.get(name.removesuffix(".weight"), tensor.float()) for name, tensor in tensors.items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    ours = load(tmp_path / "quantized", device="cpu", dtype=torch.float32, preference=Preference("reference"))
    stock = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)


def test_tied_embedding_that_is_quantized_serves_both_ends(tmp_path: Path) -> None:
    """A file that holds one quantized table for embedding and head gives the logits of two plain copies of it."""
    from fewbit.checkpoints.registry import formats
    from fewbit.numerics import dequantize
    from fewbit.numerics import quantize as quantize_tensor
    from fewbit.spec.key import LinearKey

    source = save_tiny_model(tmp_path / "model", "gemma2", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    key = LinearKey.parse("int8:group32:bf16")
    record = quantize_tensor(table, key.weight)
    written = formats()["compressed-tensors"].write(record, key)

    quantized = shutil.copytree(source, tmp_path / "quantized")
    save_file(
        tensors | {f"model.embed_tokens.{name}": tensor for name, tensor in written.items()},
        quantized / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = formats()["compressed-tensors"].config({"model.embed_tokens": key}, [])
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*embed_tokens"]
    (quantized / "config.json").write_text(json.dumps(config))

    dense = shutil.copytree(source, tmp_path / "dense")
    tensors["model.embed_tokens.weight"] = dequantize(record)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, dense / "model.safetensors", {"format": "pt"})
    ours = load(quantized, device="cpu", dtype=torch.float32)
    assert isinstance(ours.lm_head, QuantizedLinear)
    torch.testing.assert_close(
        logits(ours), logits(load(dense, device="cpu", dtype=torch.float32)), rtol=1e-4, atol=1e-4
    )


def test_tensors_that_the_model_does_not_build_are_listed(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {"mtp.0.weight": torch.zeros(4, 4)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load(folder, device="cpu").fewbit_report.carried == ["mtp.0.weight"]


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(torch.zeros(3, 64), r"shape \(3, 64\)"), (torch.zeros(128, 64, dtype=torch.int32), "int32")],
    ids=["shape", "dtype"],
)
def test_tensor_that_does_not_fit_is_named(tmp_path: Path, wrong: torch.Tensor, message: str) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.mlp.up_proj.weight": wrong}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(folder, device="cpu")


def test_quantized_layer_without_its_scale_is_an_error(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, effort="fast")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "q" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="weight_scale"):
        load(tmp_path / "q", device="cpu")


def test_layer_stored_plain_under_a_config_that_quantizes_it_is_reported(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, effort="fast")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
    tensors[f"{name}.weight"] = load_file(source / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, tmp_path / "q" / "model.safetensors", {"format": "pt"})
    report = load(tmp_path / "q", device="cpu").fewbit_report
    assert any(name in line and "stored plain" in line for line in report.contradictions)
    with pytest.raises(CheckpointError, match="stored plain"):
        load(tmp_path / "q", device="cpu", strict=True)


def test_processing_twice_changes_nothing(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, effort="fast")
    model = load(tmp_path / "q", device="cpu", dtype=torch.float32)
    before = logits(model)
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.method.process_weights_after_loading(module)
    assert torch.equal(logits(model), before)


def test_casting_a_model_leaves_scales_and_codes_alone(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "FP8_DYNAMIC", effort="fast")
    model = load(tmp_path / "q", device="cpu", dtype=torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    before = {name: tensor.dtype for name, tensor in layer.prepared.tensors.items()}
    model.to(torch.float64).to(torch.float32)
    assert {name: tensor.dtype for name, tensor in layer.prepared.tensors.items()} == before


def test_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    with pytest.raises(ModelError, match="never_heard_of"):
        load(tmp_path)
