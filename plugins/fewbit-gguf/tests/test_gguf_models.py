"""Whole models: every layer has the numbers of llama.cpp, and logits are those of a dense model of these numbers."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fewbit.errors import CheckpointError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.evaluation.verify import verify
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.select import Preference
from fewbit.methods.embedding import QuantizedEmbedding
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.names import read_config
from fewbit.models.quantization.plan import make_plan
from fewbit.models.stored import StoredCheckpoint
from fewbit.spec import Recipe, preset
from fewbit_gguf.names import halves_apart, interleaved
from fewbit_gguf.tensors import GgufFiles
from tests.golden import golden_vectors
from tests.tiny_models import VOCABULARY, save_tiny_model

CHECKPOINTS = [
    "llamacpp-f16-llama-e",
    "llamacpp-q40-llama-e",
    "llamacpp-q41-llama-e",
    "llamacpp-q80-llama-e",
    "llamacpp-q4km-llama-d",
]
IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


def logits(model: torch.nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_layer_has_the_numbers_of_llama_cpp(checkpoint, name: str) -> None:
    file = checkpoint(name)
    expected = json.loads((file.parent / "expected.json").read_text())["dequantized"]
    stored = StoredCheckpoint.open(file)
    decoded = {layer.name: layer.numbers for layer in decoded_layers(stored)}
    for module in stored.modules.keys() - decoded.keys():
        decoded[module] = stored.folder.load(f"{module}.weight").float()
    for module, entry in expected.items():
        numbers = decoded.pop(module)
        assert list(numbers.shape) == entry["shape"]
        same_zeros = entry.get("sha256_f32le_positive_zeros")
        numbers = numbers + 0.0 if same_zeros else numbers
        digest = hashlib.sha256(numbers.numpy().astype("<f4").tobytes()).hexdigest()
        assert digest == (same_zeros or entry["sha256_f32le"]), module
    assert all(name.endswith("norm") for name in decoded)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_the_dequantized_weights(checkpoint, name: str) -> None:
    file = checkpoint(name)
    expected = json.loads((file.parent / "expected.json").read_text())
    model = load(file, device="cpu", dtype=torch.float32, preference=Preference("reference"))
    found = logits(model, torch.tensor(expected["input_ids"]))[0]
    dense = expected["logits_dense"] or expected["logits"]  # of the F16 file, which is dense itself
    wanted = torch.tensor(dense["last_logits_first16"])
    assert (found[-1, :16] - wanted).norm() / wanted.norm() < (2e-3 if expected["logits_dense"] else 2e-2)
    assert (found.argmax(-1) == torch.tensor(dense["argmax"])).float().mean() >= (
        1 if expected["logits_dense"] else 0.9
    )
    assert not model.fewbit_report.contradictions and not model.fewbit_report.carried


def _decoded_folder(file: Path, source: Path, folder: Path) -> Path:
    """The model that `file` was made from, with the numbers that `file` stands for."""
    dense = shutil.copytree(source, folder)
    stored = StoredCheckpoint.open(file)
    decoded = {f"{layer.name}.weight": layer.numbers for layer in decoded_layers(stored)}
    tensors = load_file(dense / "model.safetensors")
    save_file(
        {name: decoded.get(name, tensor) for name, tensor in tensors.items()},
        dense / "model.safetensors",
        {"format": "pt"},
    )
    return dense


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {}), ("qwen3", {"head_dim": 32}),
])  # fmt: skip
def test_every_architecture(tmp_path: Path, family: str, changes: dict, tied: bool) -> None:
    source = save_tiny_model(tmp_path / "model", family, dtype=torch.float32, tie_word_embeddings=tied, **changes)
    _random_biases(source)
    plain = write_model(source, tmp_path / "plain.gguf")
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ours = load(plain, device="cpu")
    assert ours.dtype is torch.float32 and not ours.fewbit_report.layers
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)

    types = {"attn_q": "Q4_0", "attn_k": "Q5_1", "ffn_down": "MXFP4", "token_embd": "Q8_0", "output": "Q4_1"}
    mixed = write_model(source, tmp_path / "mixed.gguf", kinds=types)
    ours = load(mixed, device="cpu", dtype=torch.float32, preference=Preference("reference"))
    assert {layer.variant for layer in ours.fewbit_report.layers.values()} == {*types.values()} - (
        {"Q4_1"} if tied else set()
    )
    assert isinstance(ours.model.embed_tokens, QuantizedEmbedding) and isinstance(ours.lm_head, QuantizedLinear)
    dense = _decoded_folder(mixed, source, tmp_path / "dense")
    stock = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)


def _random_biases(folder: Path) -> None:
    """transformers starts biases at zero, which no order of rows would show."""
    tensors = load_file(folder / "model.safetensors")
    biases = {name: torch.randn_like(tensor) for name, tensor in tensors.items() if name.endswith(".bias")}
    save_file(tensors | biases, folder / "model.safetensors", {"format": "pt"})


def test_rows_of_queries_and_keys_change_their_order() -> None:
    vector = golden_vectors()["gguf_llama_qk_permute"]
    key = vector["k_example"]
    for entry, heads in ((vector, vector["n_head"]), (key, key["n_head_kv"])):
        rows, theirs = torch.tensor(entry["hf_rows"]), torch.tensor(entry["gguf_rows_from_hf"])
        assert torch.equal(interleaved(rows, heads), theirs) and torch.equal(halves_apart(theirs, heads), rows)


def test_a_file_is_inspected_by_its_header(checkpoint) -> None:
    found = inspect_checkpoint(checkpoint("llamacpp-q40-llama-e"))
    assert (found.format, found.oddities) == ("gguf", ())
    assert found.decided_by == "llama-e-Q4_0.gguf (types of its tensors, MOSTLY_Q4_0)"
    layers = {layer.name: layer for layer in found.layers}
    down = layers["model.layers.0.mlp.down_proj"]
    assert (str(down.key), down.variant, down.shape, down.bytes) == ("int4:group32:f16", "Q4_0", (256, 512), 256 * 288)
    table = layers["model.embed_tokens"]
    assert (str(table.key), table.variant, table.shape) == ("int6:group16:int8", "Q6_K", (256, 256))


def test_a_file_is_verified(checkpoint) -> None:
    result = verify(checkpoint("llamacpp-q40-llama-e"))
    assert result.passed, result.checks
    assert not any("scale of zero" in check.detail for check in result.checks)


def test_a_block_of_zeros_is_sound(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", dtype=torch.float32)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0  # its scale becomes zero, as the format has it
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    result = verify(write_model(source, tmp_path / "zero.gguf", "Q8_0"))
    assert result.passed, result.checks


def test_kernels_are_told_of_minima(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", dtype=torch.float32)
    model = load(write_model(source, tmp_path / "q41.gguf", "Q4_1"), device="cpu")
    key = model.model.layers[0].mlp.up_proj.key
    records = [decoded.record for decoded in decoded_layers(StoredCheckpoint.open(tmp_path / "q41.gguf"))]
    assert {LinearRequest.of(record, key).extras for record in records} == {frozenset({"minimum"})}
    found = inspect_checkpoint(tmp_path / "q41.gguf")
    assert all("minimum" in layer.roles for layer in found.layers if layer.key)


def test_tensors_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny_model(tmp_path / "model", dtype=torch.float32)
    file = write_model(source, tmp_path / "model.gguf", "Q8_0")
    reads: list[int] = []
    fromfile = np.fromfile

    def counted(*arguments, count: int, **options) -> np.ndarray:
        reads.append(count)
        return fromfile(*arguments, count=count, **options)

    monkeypatch.setattr(np, "fromfile", counted)
    files = GgufFiles(file)
    assert not reads
    load(file, device="cpu")
    assert sorted(reads) == sorted(tensor.nbytes for tensor in files.header.tensors.values())


def test_quantizing_a_file_says_what_it_needs(tmp_path: Path, checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"quantized already \(gguf"):
        make_plan(checkpoint("llamacpp-q40-llama-e"), Recipe(preset("W4A16")))
    plain = write_model(save_tiny_model(tmp_path / "model"), tmp_path / "plain.gguf")
    with pytest.raises(CheckpointError, match="no folder of safetensors"):
        make_plan(plain, Recipe(preset("W4A16")))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)]
)
def test_the_dtype_is_that_of_the_plain_matrices(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    file = write_model(save_tiny_model(tmp_path / "model"), tmp_path / "model.gguf", kind)
    assert read_config(file).dtype is dtype


def test_gguf_py_reads_what_the_tests_write(tmp_path: Path) -> None:
    file = write_model(save_tiny_model(tmp_path / "model"), tmp_path / "model.gguf", "Q4_0")
    header = GgufFiles(file).header
    for tensor in gguf.GGUFReader(file).tensors:
        ours = header.tensors[tensor.name]
        assert (ours.type, ours.start, ours.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
