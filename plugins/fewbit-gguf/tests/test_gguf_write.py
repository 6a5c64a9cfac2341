"""Files that fewbit writes: read back bit for bit, by gguf-py too, and what has no place in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedTokenizerFast

from fewbit.checkpoints.registry import formats
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, FewbitError, OutputError, SchemeError
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.evaluation.verify import verify
from fewbit.kernels.select import Preference
from fewbit.models.conversion.convert import convert
from fewbit.models.conversion.holding import hold
from fewbit.models.load import load
from fewbit.models.names import read_config
from fewbit.models.quantization.calibration import load_tokenizer
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from fewbit_gguf.names import halves_apart
from fewbit_gguf.tensors import GgufFiles
from fewbit_gguf.write import RECIPE
from tests.checkpoints.layers import layer
from tests.checkpoints.test_tiny_checkpoints import folder_of
from tests.tiny_models import VOCABULARY, save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
TEXT = "The 12 quick foxes' tails,\n\n  jumped 345 times - naïvely."


def logits(path: Path) -> torch.Tensor:
    model = load(path, device="cpu", dtype=torch.float32, preference=Preference("reference"))
    with torch.no_grad():
        return model(input_ids=IDS).logits


FAMILIES = [
    ("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("llama", {"head_dim": 32}),
    ("mistral", {"sliding_window": None}), ("qwen2", {}), ("qwen3", {"head_dim": 32}),
]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_a_plain_model_is_written_as_it_is(tmp_path: Path, family: str, changes: dict, tied: bool) -> None:
    source = save_tiny_model(tmp_path / "model", family, tie_word_embeddings=tied, **changes)
    file = tmp_path / "model.gguf"
    report = convert(source, file, "gguf")
    assert (report["source_format"], report["layers"]) == ("plain", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]
    before, after = TensorFolder(source), GgufFiles(file)
    assert before.headers.keys() == after.headers.keys()
    for name in before.headers:
        assert torch.equal(before.load(name).float(), after.load(name).float()), name
        assert after.headers[name].dtype == ("BF16" if len(after.headers[name].shape) == 2 else "F32")
    assert torch.equal(logits(file), logits(source))
    theirs, ours = AutoConfig.from_pretrained(source), read_config(file)
    for name in ("vocab_size", "num_key_value_heads", "rope_parameters", "max_position_embeddings", "dtype"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_plain_matrices_keep_their_dtype(tmp_path: Path, kind: torch.dtype) -> None:
    convert(save_tiny_model(tmp_path / "model", dtype=kind), tmp_path / "m.gguf", "gguf")
    assert read_config(tmp_path / "m.gguf").dtype is kind


HELD = {
    "int4:group32:f16": "Q4_0",
    "int4:group128:bf16": "Q4_0",
    "int4:channel:bf16": "Q4_0",
    "int4:asym:group64:f16": "Q5_0",
    "int2:group32:f16": "Q4_0",
    "int3:asym:group64:bf16": "Q4_0",
    "int5:group64:bf16": "Q5_0",
    "int6:group32:bf16": "Q8_0",
    "int8:channel:bf16": "Q8_0",
    "e2m1:group32:e8m0": "MXFP4",
}


@pytest.mark.parametrize("text", HELD)
def test_codes_are_held_by_the_smallest_block_type_that_has_them(text: str) -> None:
    key = LinearKey.parse(text)
    record = layer(key)
    held = hold(formats()["gguf"], record, key)
    (name,) = held.tensors
    assert name == f"weight_{HELD[text].lower()}"
    assert torch.equal(dequantize_record(held.record), dequantize_record(record))


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "MXFP4A16"])
def test_gguf_py_and_fewbit_read_the_same_numbers(tmp_path: Path, scheme: str) -> None:
    source = save_tiny_model(tmp_path / "model")
    size = 32 if scheme.startswith("W4") else None
    quantize(source, tmp_path / "q", scheme, group_size=size, effort="fast")
    report = convert(tmp_path / "q", tmp_path / "q.gguf", "gguf")
    assert {layer["sqnr_db"] for layer in report["layers"]} == {None}
    assert torch.equal(logits(tmp_path / "q.gguf"), logits(tmp_path / "q"))
    assert verify(tmp_path / "q.gguf").passed
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    ours = {one.name: one.numbers for one in decoded_layers(StoredCheckpoint.open(tmp_path / "q"))}
    for module, name, heads in (
        ("self_attn.q_proj", "attn_q", 4), ("self_attn.k_proj", "attn_k", 2), ("mlp.down_proj", "ffn_down", 0),
    ):  # fmt: skip
        tensor = theirs[f"blk.1.{name}.weight"]
        numbers = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        numbers = halves_apart(numbers, heads) if heads else numbers
        assert torch.equal(numbers, ours[f"model.layers.1.{module}"]), module
    assert json.loads(GgufFiles(tmp_path / "q.gguf").header.text(RECIPE))["format"] == "gguf"


def test_a_file_is_converted_to_a_folder_and_back(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "W4A16", group_size=32, effort="fast")
    convert(tmp_path / "q", tmp_path / "q.gguf", "gguf")
    convert(tmp_path / "q.gguf", tmp_path / "awq", "awq")
    convert(tmp_path / "awq", tmp_path / "again.gguf", "gguf")
    convert(tmp_path / "q.gguf", tmp_path / "copy.gguf", "gguf")
    first, second, copy = (GgufFiles(tmp_path / name) for name in ("q.gguf", "again.gguf", "copy.gguf"))
    assert "config.json" in {path.name for path in (tmp_path / "awq").iterdir()}
    assert first.headers == second.headers == copy.headers
    for name in first.headers:
        assert torch.equal(first.load(name), second.load(name)) and torch.equal(first.load(name), copy.load(name))


def test_layers_are_quantized_anew_or_written_plain_on_demand(tmp_path: Path) -> None:
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", "NVFP4A16", effort="fast")
    with pytest.raises(OutputError, match=r"gguf holds no e2m1:group16.*--requantize \w+ .*would cost an SQNR") as said:
        convert(tmp_path / "q", tmp_path / "q.gguf", "gguf")
    assert "MXFP4" in str(said.value)
    report = convert(
        tmp_path / "q", tmp_path / "q.gguf", "gguf", requantize="W5A16", group_size=32, dequantize=["mlp.down_proj"]
    )
    assert {layer["key"] for layer in report["layers"]} == {"int5:group32:f16"}
    assert len(report["dequantized"]) == 2 and len(report["requantized"]) == 12
    assert logits(tmp_path / "q.gguf").isfinite().all()


def test_the_factors_of_llama_3_are_stated(tmp_path: Path) -> None:
    told = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    source = save_tiny_model(tmp_path / "model", rope_parameters=told, max_position_embeddings=131072)
    convert(source, tmp_path / "m.gguf", "gguf")
    assert read_config(tmp_path / "m.gguf").rope_parameters == told


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotary_embeddings_are_stated(tmp_path: Path, kind: str) -> None:
    told: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    told |= {"original_max_position_embeddings": 64} if kind == "yarn" else {}
    convert(save_tiny_model(tmp_path / "model", "qwen2", rope_parameters=told), tmp_path / "m.gguf", "gguf")
    assert read_config(tmp_path / "m.gguf").rope_parameters == told


# --- tokenizers ------------------------------------------------------------------------------------------------------


def merged_tokenizer(pieces: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges and a token of the user's; or, as `pieces`, SentencePiece's kind with bytes."""
    space = "▁" if pieces else "Ġ"
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if pieces else sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*"abcdefghijklmnopqrstuvwxyz", space] if pieces else []
    merges = [("t", "h"), ("th", "e"), (space, "f"), ("o", "x"), ("e", "s")]
    tokens = ["<s>", "</s>", "<unk>", *alphabet, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>" if pieces else None, byte_fallback=pieces))
    if pieces:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.add_tokens(["<tool>"])
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


@pytest.mark.parametrize("pieces", [False, True])
def test_the_tokenizer_comes_along(tmp_path: Path, pieces: bool) -> None:
    source = save_tiny_model(tmp_path / "model", vocab_size=320)
    tokenizer = merged_tokenizer(pieces)
    tokenizer.save_pretrained(source)
    assert not convert(source, tmp_path / "m.gguf", "gguf")["notes"]
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == ("llama" if pieces else "gpt2")
    assert fields["tokenizer.ggml.pre"].contents() == ("default" if pieces else "smollm")
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert len(tokens) == len(types) == 320
    kinds = {token: gguf.TokenType(kind).name for token, kind in zip(tokens, types, strict=True)}
    assert (kinds["<s>"], kinds["<tool>"], kinds["the"], kinds["[PAD319]"]) == (
        "CONTROL", "USER_DEFINED", "NORMAL", "UNUSED",
    )  # fmt: skip
    again = load_tokenizer(tmp_path / "m.gguf")
    for text in (TEXT, "the fox", *(() if pieces else ("the<tool>fox",))):  # transformers' reader forgets these
        assert again(text).input_ids == tokenizer(text).input_ids, text
    assert again.chat_template == tokenizer.chat_template
    assert (again.bos_token_id, again.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_a_tokenizer_without_a_place_is_left_out_and_said_so(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", vocab_size=320)
    odd = merged_tokenizer(pieces=False)
    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    odd.save_pretrained(source)
    (note,) = convert(source, tmp_path / "m.gguf", "gguf")["notes"]
    assert "cuts text by a rule" in note
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.model"].contents() == "no_vocab"


def test_the_tokenizer_of_a_gguf_file_is_copied(tmp_path: Path, checkpoint) -> None:
    source = checkpoint("llamacpp-q40-llama-e")
    convert(source, tmp_path / "copy.gguf", "gguf")
    before, after = (
        {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if "tokenizer." in name}
        for path in (source, tmp_path / "copy.gguf")
    )
    assert before and before == after


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("gemma2", {}, "no GGUF file of a gemma2 model.*llama, mistral, qwen2, qwen3"),
        ("qwen3_moe", {}, "no GGUF file of a qwen3_moe model"),
        ("mistral", {"sliding_window": 32}, "attends to 32 tokens at most"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_models_that_a_file_cannot_state(tmp_path: Path, family: str, changes: dict, sentence: str) -> None:
    source = save_tiny_model(tmp_path / "model", family, **changes)
    with pytest.raises(OutputError, match=sentence):
        convert(source, tmp_path / "m.gguf", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_act_order_has_no_place(tmp_path: Path) -> None:
    source = folder_of("llmcompressor081-gptq-w4a16-actorder-group-llama-a")
    with pytest.raises(OutputError, match="order"):
        convert(source, tmp_path / "m.gguf", "gguf")
    assert not list(tmp_path.iterdir())


def test_scales_of_a_kv_cache_are_left_out_and_said_so(tmp_path: Path) -> None:
    source = folder_of("llmcompressor-fp8-kvcache-fp8-llama-b")
    report = convert(source, tmp_path / "m.gguf", "gguf", requantize="W8A16", group_size=32)
    assert any("scales are left out" in note for note in report["notes"])


def test_mistakes(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    mistakes: list[tuple[type[FewbitError], str, dict]] = [
        (CheckpointError, "not quantized", {"requantize": "W4A16"}),
        (SchemeError, "matches no quantized layer", {"dequantize": ["q_proj"]}),
    ]
    for error, sentence, options in mistakes:
        with pytest.raises(error, match=sentence):
            convert(source, tmp_path / "m.gguf", "gguf", **options)
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        convert(source, tmp_path / "there.gguf", "gguf")
    with pytest.raises(SchemeError, match="then fewbit convert --to gguf"):
        quantize(source, tmp_path / "q", "W4A16", format="gguf", effort="fast")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there.gguf"]
    assert (tmp_path / "there.gguf").read_text() == "mine"
