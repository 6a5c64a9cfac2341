"""What quantizing cost on held-out text, as reports keep it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbit.evaluation.divergence import divergence
from fewbit.models.load import load
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.models.quantization.texts import read_text


def measure_quality(
    quantized: str | Path,
    source: str | Path,
    *,
    text: str | Path | None = None,
    windows: int = 16,
    window_length: int = 1024,
    device: str = "cpu",
    on_window: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Perplexity, KL divergence and agreement of a checkpoint with the model it was made from, both in float32.

    Args:
        quantized, source: folders.
        text: file of the text; None for the built-in prose.
        windows, window_length: how many windows of how many tokens are read from it.
        device: where both models run.
        on_window: called after each window.

    Raises:
        ModelError: the text or the tokenizer cannot be read, or the text is too short for one window.
    """
    tokenizer = load_tokenizer(source)
    content, name = read_text(text, tokenizer)
    ids = token_windows(tokenizer, content, window_length, windows)
    return score(quantized, source, ids, name, device=device, on_window=on_window)


def score(
    quantized: str | Path,
    source: str | Path,
    windows: Tensor,
    text: str,
    *,
    device: str = "cpu",
    on_window: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """`measure_quality` on windows of tokens, int64 [count, length], of a text of that name."""
    loaded, reference = (load(folder, device=device, dtype=torch.float32) for folder in (quantized, source))
    found = divergence(loaded, reference, windows, on_window)
    count, length = windows.shape
    return {**vars(found), "text": text, "windows": count, "window_length": length, "dtype": "float32"}
