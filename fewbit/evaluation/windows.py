"""Scoring a text window by window: what perplexity and divergence share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

ROWS_AT_ONCE = 256
"""Positions whose logits are turned into float32 log-probabilities together; a vocabulary of 50,000 makes 50 MB."""


def window_logits(model: PreTrainedModel, windows: Tensor) -> Iterator[Tensor]:
    """Logits [length, vocabulary] of each window of token ids [count, length], each scored alone."""
    for window in windows:
        with torch.no_grad():
            logits = model(input_ids=window[None].to(model.device), use_cache=False).logits[0]
        yield logits  # outside: of two generators, each would switch gradients back to what the other had left


def negative_log_likelihood(logits: Tensor, ids: Tensor) -> float:
    """Sum over positions 1.. of -log p(token | tokens before it), by float32 log-softmax summed in float64.

    Args:
        logits: [length, vocabulary].
        ids: int64 [length].
    """
    total = 0.0
    for rows, wanted in zip(logits[:-1].split(ROWS_AT_ONCE), ids[1:].split(ROWS_AT_ONCE), strict=True):
        losses = torch.nn.functional.cross_entropy(rows.float(), wanted.to(rows.device), reduction="none")
        total += losses.double().sum().item()
    return total
