"""Windows of calibration text: how they start, what the model writes itself, what comes from a hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from fewbit.errors import ModelError
from fewbit.models.quantization.calibration import calibration_windows, starting_token
from fewbit.models.quantization.quantize import QuantizeOptions, read_calibration
from fewbit.models.quantization.self_samples import SAMPLE_LENGTH, self_samples
from fewbit.models.quantization.texts import read_text
from tests.tiny_models import byte_tokenizer, save_tiny_model

TEXT = "".join(chr(97 + i % 26) for i in range(200))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("calibration") / "model")


def starting_tokenizer() -> Any:
    """Puts `<s>` before every text, as Llama's do."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def test_windows_start_as_the_tokenizer_starts_a_text() -> None:
    assert starting_token(byte_tokenizer()) is None and starting_token(starting_tokenizer()) == 0
    plain = calibration_windows(byte_tokenizer(), TEXT, 20, 100)
    started = calibration_windows(starting_tokenizer(), TEXT, 20, 100)
    assert plain.shape == (10, 20) and started.shape == (10, 20)
    assert bool((started[:, 0] == 0).all()) and not bool((plain == 0).any())
    assert torch.equal(started[:, 1:].flatten(), plain.flatten()[: 10 * 19])  # no token of the text is lost


def test_the_model_writes_the_same_samples_again(source: Path) -> None:
    before = torch.random.get_rng_state()
    first = self_samples(source, byte_tokenizer(), 200, 3)
    assert first.shape == (3, 200) and first.dtype == torch.int64
    assert torch.equal(first, self_samples(source, byte_tokenizer(), 200, 3))
    starts = first.flatten()[::SAMPLE_LENGTH]
    assert bool((starts == 0).all())  # packed, each from BOS
    assert len({tuple(row.tolist()) for row in first}) == 3
    assert torch.equal(before, torch.random.get_rng_state())  # nobody else's random numbers are touched


@pytest.mark.parametrize(
    ("options", "source_name", "own"),
    [
        ({}, "pydoc_data.topics and 2 windows of the model's own", 2),
        ({"self_samples": 0}, "pydoc_data.topics", 0),
        ({"self_samples": 99}, "8 windows of the model's own", 8),
        ({"calibration_text": "text.txt"}, "text.txt", 0),
        ({"calibration_text": "text.txt", "self_samples": 1}, "text.txt and 1 windows of the model's own", 1),
    ],
)
def test_own_samples_are_mixed_in(
    source: Path, tmp_path: Path, options: dict[str, Any], source_name: str, own: int
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 4)
    if "calibration_text" in options:
        options = options | {"calibration_text": str(tmp_path / "text.txt")}
    asked = QuantizeOptions(calibration_windows=8, calibration_length=32, **options)
    found = read_calibration(source, asked)
    assert found.source == source_name and found.windows.shape == (8, 32)
    assert int((found.windows[:, 0] == 0).sum()) == own
    assert len(found.record()["sha256"]) == 64


def test_a_tokenizer_without_a_start_gives_prose_alone_unless_asked(source: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ModelError, match="neither a BOS nor an EOS"):
        self_samples(source, tokenizer, 16, 1)


def a_hub(rows: Any) -> ModuleType:
    """A stand-in for the package `datasets`."""

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Iterator[Any]:
        assert streaming and (name, config, split) in (("org/set", None, "train"), ("org/set", "en", "test"))
        return rows()

    made = ModuleType("datasets")
    made.load_dataset = load_dataset  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("name", ["hub:org/set", "hub:org/set:en:test"])
def test_a_data_set_is_read_as_far_as_it_is_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def rows() -> Iterator[Any]:
        for number in range(10**9):
            yield {"text": f"{number} {'x' * 10_000_000}"}

    monkeypatch.setitem(sys.modules, "datasets", a_hub(rows))
    text, called = read_text(name)
    assert called == name and text.startswith("0 x") and text.count("\n\n") == 1


@pytest.mark.parametrize("error", [ConnectionError("offline"), FileNotFoundError("no such set"), ValueError("split")])
def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def rows() -> Iterator[Any]:
        raise error

    monkeypatch.setitem(sys.modules, "datasets", a_hub(rows))
    with pytest.raises(ModelError, match=f"org/set cannot be read from the hub: {error}"):
        read_text("hub:org/set")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModelError, match="pip install datasets"):
        read_text("hub:org/set")
