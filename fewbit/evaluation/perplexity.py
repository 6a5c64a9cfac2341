"""Perplexity over a text in windows, each scored alone."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from torch import Tensor
from transformers import PreTrainedModel

from fewbit.evaluation.windows import negative_log_likelihood, window_logits


def perplexity(model: PreTrainedModel, windows: Tensor, on_window: Callable[[], None] | None = None) -> float:
    """exp of the mean negative log-likelihood of every token but each window's first.

    Args:
        model: any causal language model.
        windows: int64 [count, length] token ids, see `fewbit.models.quantization.calibration.token_windows`.
        on_window: called after each window.
    """
    total = 0.0
    for ids, logits in zip(windows, window_logits(model, windows), strict=True):
        total += negative_log_likelihood(logits, ids)
        if on_window is not None:
            on_window()
    return exp(total / (windows.shape[0] * (windows.shape[1] - 1)))
