"""Perplexity and divergence against their formulas, on models small enough to do by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbit.errors import ModelError
from fewbit.evaluation.divergence import divergence
from fewbit.evaluation.layer_error import layer_sqnr
from fewbit.evaluation.perplexity import perplexity
from fewbit.evaluation.speed import decode_speed, memory_bytes
from fewbit.models.load import load
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.models.quantization.quantize import quantize
from fewbit.models.quantization.texts import builtin_text, read_text
from tests.tiny_models import byte_tokenizer, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("measures") / "model", dtype=torch.float32)


def windows() -> torch.Tensor:
    return torch.arange(3 * 40).reshape(3, 40) * 11 % 256 + 4


def test_perplexity_is_that_of_the_models_own_loss(model: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        losses = [stock(input_ids=window[None], labels=window[None]).loss.double() for window in windows()]
    assert perplexity(load(model, device="cpu"), windows()) == pytest.approx(
        torch.stack(losses).mean().exp().item(), rel=1e-5
    )


def test_a_model_does_not_diverge_from_itself(model: Path) -> None:
    found = divergence(load(model, device="cpu"), load(model, device="cpu"), windows())
    assert found.mean_kl == pytest.approx(0, abs=1e-6) and found.top1_agreement == 1
    assert found.logit_cosine == pytest.approx(1, abs=1e-6) and found.perplexity == found.reference_perplexity


def test_scoring_leaves_gradients_as_they_were(model: Path) -> None:
    with torch.enable_grad():
        divergence(load(model, device="cpu"), load(model, device="cpu"), windows())
        assert torch.is_grad_enabled()


def test_divergence_is_kl_of_reference_to_model(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "q", "W2A16", group_size=32, effort="fast")
    ours, reference = load(tmp_path / "q", device="cpu"), load(model, device="cpu")
    found = divergence(ours, reference, windows())
    with torch.no_grad():
        q = ours(input_ids=windows()).logits.double().log_softmax(-1)
        p = reference(input_ids=windows()).logits.double().log_softmax(-1)
    assert found.mean_kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())


def test_more_bits_diverge_less(model: Path, tmp_path: Path) -> None:
    reference, kl = load(model, device="cpu"), []
    for bits in (2, 3, 4, 6, 8):
        quantize(model, tmp_path / str(bits), f"W{bits}A16", group_size=32, effort="fast")
        kl.append(divergence(load(tmp_path / str(bits), device="cpu"), reference, windows()).mean_kl)
    assert kl == sorted(kl, reverse=True)


def test_layer_sqnr_gains_six_decibels_a_bit(model: Path, tmp_path: Path) -> None:
    means = {}
    for bits in (4, 5, 6):
        quantize(model, tmp_path / str(bits), f"W{bits}A16", group_size=32, effort="fast")
        ratios = layer_sqnr(tmp_path / str(bits), model)
        means[bits] = sum(ratios.values()) / len(ratios)
    assert 5 < means[5] - means[4] < 7.5 and 5 < means[6] - means[5] < 7.5


def test_memory_counts_the_prepared_weights_once(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "q", "FP8_DYNAMIC", effort="fast")
    dense, eight_bit = load(model, device="cpu"), load(tmp_path / "q", device="cpu")
    linear = sum(module.weight.nbytes for module in dense.model.layers.modules() if isinstance(module, torch.nn.Linear))
    saved = memory_bytes(dense) - memory_bytes(eight_bit)
    assert 0.70 * linear < saved < 0.75 * linear  # float32 to one byte, less the scales


def test_decode_speed_answers_every_prompt(model: Path) -> None:
    rate, answers = decode_speed(load(model, device="cpu"), load_tokenizer(model), ["one", "two"], max_new_tokens=4)
    assert rate > 0 and [answer.prompt_tokens for answer in answers] == [3, 3]


def test_windows_are_consecutive_and_without_special_tokens() -> None:
    found = token_windows(byte_tokenizer(), "abcdefgh", length=3, count=5)
    assert found.shape == (2, 3) and byte_tokenizer().decode(found.flatten()) == "abcdef"


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ModelError, match="8 tokens, a window needs 9"):
        token_windows(byte_tokenizer(), "abcdefgh", length=9, count=1)


def test_builtin_text_is_long_english_prose() -> None:
    text = builtin_text()
    assert len(text) > 400_000 and text.lower().count(" the ") > 2_000


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="binary"):
        read_text(tmp_path / "binary")
