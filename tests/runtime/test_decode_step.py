"""The compiled decode step: the logits of transformers' own modules, token by token, and why it steps aside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fewbit.kernels import native
from fewbit.kernels.select import Preference
from fewbit.models.families import FAMILIES as ROWS
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.runtime.decode_step import DecodeStep, obstacles
from fewbit.runtime.generate import COMPILED_STEP, Generated, generate
from tests.kernels.layers import KEYS, needs_extension
from tests.tiny_models import FAMILIES, VOCABULARY, byte_tokenizer, save_tiny_model

FOUND = native.extension()
SETS = [] if isinstance(FOUND, native.Absent) else list(FOUND.instruction_sets)
GATED = [family for family in FAMILIES if family in ROWS and ROWS[family].gated]
TOKENS = torch.arange(20) * 7 % VOCABULARY
PROMPT = 6
UNEVEN = {"hidden_size": 72, "intermediate_size": 136, "head_dim": 48}
"""Sizes that no block, vector or tile divides."""
PLAIN = "plain"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative error of logits."""
ROUNDED = 3e-2
"""The same where activations are rounded to integers: one more unit in the last place can turn a code."""

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a tiny model of a family under a scheme, written once."""
    written: dict[tuple[str, str], Path] = {}

    def of(family: str = "llama", scheme: str = PLAIN, **changes: Any) -> Path:
        key = family, scheme + repr(sorted(changes.items()))
        if key not in written:
            source = save_tiny_model(tmp_path_factory.mktemp(family) / "model", family, **changes)
            written[key] = source
            if scheme != PLAIN:
                written[key] = source.parent / "quantized"
                quantize(
                    source, written[key], scheme, group_size=32 if scheme.startswith("W4A16") else None, effort="fast"
                )
        return written[key]

    return of


def loaded(folder: Path, dtype: torch.dtype = torch.float32, preference: Preference = Preference()) -> PreTrainedModel:
    """The model, its norms and biases random too, so that a forgotten one shows."""
    model = load(folder, device="cpu", dtype=dtype, preference=preference)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model


def stepped(model: PreTrainedModel, tokens: Tensor, prompt: int = PROMPT) -> Tensor:
    """Logits after the prompt and after each token of the text beyond it, by the compiled step."""
    step = DecodeStep(model, len(tokens))
    return torch.stack([step(tokens[:prompt]), *(step(token[None]) for token in tokens[prompt:])])


def assert_same_logits(
    model: PreTrainedModel, tokens: Tensor = TOKENS, prompt: int = PROMPT, tolerance: float | None = None
) -> None:
    assert not list(obstacles(model, len(tokens)))
    found, wanted = stepped(model, tokens, prompt), model(tokens[None]).logits[0, prompt - 1 :]
    assert found.dtype == wanted.dtype
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < (tolerance or TOLERANCE[wanted.dtype]), f"logits are off by {error:.2e}"


@pytest.mark.parametrize("scheme", [PLAIN, "W4A16_ASYM", "W8A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("family", GATED)
def test_logits_are_those_of_transformers(folder: Any, family: str, scheme: str) -> None:
    assert_same_logits(loaded(folder(family, scheme)), tolerance=ROUNDED if scheme == "W8A8" else None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_dtype_and_thread_count(folder: Any, name: str, dtype: torch.dtype) -> None:
    plain, model = loaded(folder("qwen3", **UNEVEN), dtype), loaded(folder("qwen3", "W4A16"), dtype)
    try:
        with native.forced(name):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                for prompt in (PROMPT, 17):
                    assert_same_logits(model, prompt=prompt)
                    assert_same_logits(plain, prompt=prompt)
                assert torch.equal(stepped(model, TOKENS), stepped(model, TOKENS))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"num_attention_heads": 8, "num_key_value_heads": 1}])
@pytest.mark.parametrize("sizes", [{}, UNEVEN])
def test_any_number_of_heads_and_features(folder: Any, changes: dict[str, int], sizes: dict[str, int]) -> None:
    assert_same_logits(loaded(folder("llama", **changes, **sizes)))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("scheme", [PLAIN, "W4A16", "W8A8"])
def test_a_long_text_is_attended_to_whole(folder: Any, name: str, scheme: str) -> None:
    """More tokens than are read, attended to, or multiplied at a time."""
    tokens = torch.randint(0, VOCABULARY, (600,))
    with native.forced(name):
        assert_same_logits(loaded(folder("llama", scheme)), tokens, 595, ROUNDED if scheme == "W8A8" else None)


@pytest.mark.parametrize("scheme", [PLAIN, "W4A16", "W8A8"])
def test_threads_change_no_bit_of_a_prompt(folder: Any, scheme: str) -> None:
    """Two and three threads divide layers by tokens, seven by features, as one does what is left at the end."""
    model, tokens, found = loaded(folder("qwen3", scheme)), torch.randint(0, VOCABULARY, (256 + 34,)), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            step = DecodeStep(model, len(tokens))
            found.append((step(tokens), step.cache.keys, step.cache.values))
    finally:
        torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_prompt_may_come_in_pieces(folder: Any, threads: int) -> None:
    """Each token's keys, values and logits are what they are whichever tokens are beside it."""
    model, tokens = loaded(folder("qwen3")), torch.randint(0, VOCABULARY, (400,))
    try:
        torch.set_num_threads(threads)
        whole, pieces = DecodeStep(model, len(tokens)), DecodeStep(model, len(tokens))
        logits = whole(tokens)
        for piece in tokens.split([1, 7, 30, 1, 261, 100]):
            last = pieces(piece)
    finally:
        torch.set_num_threads(1)
    for name in ("keys", "values"):
        assert torch.allclose(getattr(whole.cache, name), getattr(pieces.cache, name), rtol=1e-4, atol=1e-5)
    assert torch.allclose(logits, last, rtol=1e-4, atol=1e-5)


def answer(model: PreTrainedModel, **options: Any) -> Generated:
    return generate(model, byte_tokenizer(), "Once upon", chat=False, **options)


def test_generation_takes_the_step_and_gives_the_same_text(folder: Any) -> None:
    model = loaded(folder("llama", "W4A16"))
    ours, stock = answer(model, max_new_tokens=24), answer(model, max_new_tokens=24, compiled_step=False)
    assert ours.decoded_by == COMPILED_STEP and stock.decoded_by == "transformers: the compiled step is switched off"
    assert (ours.text, ours.tokens, ours.prompt_tokens) == (stock.text, stock.tokens, stock.prompt_tokens)
    assert answer(model, max_new_tokens=1).tokens == 1


def test_generation_ends_where_a_token_says_so(folder: Any) -> None:
    model = loaded(folder())
    pieces: list[str] = []
    whole = answer(model, max_new_tokens=12)
    third = byte_tokenizer()(whole.text)["input_ids"][2] if len(whole.text.encode()) == 12 else None
    model.generation_config.eos_token_id = [1, int(TOKENS[0]) if third is None else third]
    ours = answer(model, max_new_tokens=12, on_text=pieces.append)
    stock = answer(model, max_new_tokens=12, compiled_step=False)
    assert ours.decoded_by == COMPILED_STEP
    assert (ours.text, ours.tokens) == (stock.text, stock.tokens) and "".join(pieces) == ours.text


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "silu is needed between gate and down, found gelu"),
    ("llama", {"head_dim": 8}, "heads of a multiple of 16 features are needed, found 8"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "found dynamic"),
    ("mistral", {}, "40 positions are more than the sliding window of 32"),
    ("gemma2", {}, "the blocks of gemma2 are not known to be gated ones"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED)
def test_other_arithmetic_is_left_to_transformers(folder: Any, family: str, changes: Any, reason: str) -> None:
    model = loaded(folder(family, **changes))
    assert any(reason in found for found in obstacles(model, 40))
    assert answer(model, max_new_tokens=40).decoded_by.startswith("transformers: ")


def test_other_kernels_and_settings_are_left_to_transformers(folder: Any) -> None:
    model = loaded(folder("llama", "W4A16"), preference=Preference("reference"))
    assert answer(model, max_new_tokens=2).decoded_by == (
        "transformers: model.layers.0.self_attn.q_proj runs on reference, which the compiled step cannot call"
    )
    model = loaded(folder("llama", "W8A8"))
    model.get_submodule("model.layers.0.mlp.up_proj").key = KEYS["W8A8 dynamic tensor"]
    assert list(obstacles(model)) == [
        "model.layers.0.mlp.up_proj rounds activations under one scale for all tokens, and the compiled step reads a "
        "prompt in parts"
    ]
    model = loaded(folder())
    model.generation_config.repetition_penalty = 1.2
    assert answer(model, max_new_tokens=2).decoded_by.endswith("the generation's settings ask for repetition_penalty")


def test_wrong_operands_are_errors(folder: Any) -> None:
    step = DecodeStep(loaded(folder()), 2)
    for tokens in (3, 0):
        with pytest.raises(RuntimeError):
            step(torch.zeros(tokens, dtype=torch.int64))
    step(torch.tensor([3, 4]))
    with pytest.raises(RuntimeError, match="the cache has room for 2 positions, 2 are taken and 1 more asked for"):
        step(torch.tensor([3]))
