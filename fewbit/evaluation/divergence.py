"""Divergence of a model from a reference: KL, top-1 agreement and logit cosine over the same windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fewbit.evaluation.windows import ROWS_AT_ONCE, negative_log_likelihood, window_logits


@dataclass(frozen=True)
class Divergence:
    """How far a model is from its reference over some windows.

    Attributes:
        perplexity, reference_perplexity: of each model on the windows.
        mean_kl: mean over positions of KL(reference || model), nats.
        top1_agreement: share of positions whose likeliest token is the same.
        logit_cosine: mean over positions of the cosine between the logits.
    """

    perplexity: float
    reference_perplexity: float
    mean_kl: float
    top1_agreement: float
    logit_cosine: float


def divergence(
    model: PreTrainedModel, reference: PreTrainedModel, windows: Tensor, on_window: Callable[[], None] | None = None
) -> Divergence:
    """Compares two models of one vocabulary, a window of each at a time.

    Args:
        model, reference: causal language models.
        windows: int64 [count, length] token ids.
        on_window: called after each window.
    """
    count, length = windows.shape
    sums = torch.zeros(3, dtype=torch.float64)
    losses = torch.zeros(2, dtype=torch.float64)
    pairs = zip(windows, window_logits(model, windows), window_logits(reference, windows), strict=True)
    for ids, logits, reference_logits in pairs:
        expected = reference_logits.to(logits.device)
        losses += torch.tensor([negative_log_likelihood(logits, ids), negative_log_likelihood(expected, ids)])
        for rows, wanted in zip(logits.split(ROWS_AT_ONCE), expected.split(ROWS_AT_ONCE), strict=True):
            sums += _compare(rows.float(), wanted.float())
        if on_window is not None:
            on_window()
    predicted = count * (length - 1)
    kl, agreement, cosine = (sums / (count * length)).tolist()
    own, other = (losses / predicted).tolist()
    return Divergence(exp(own), exp(other), kl, agreement, cosine)


def _compare(logits: Tensor, expected: Tensor) -> Tensor:
    """Sums over rows of KL(expected || logits), top-1 agreement and cosine, float64 [3]."""
    log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    agreement = logits.argmax(-1) == expected.argmax(-1)
    cosine = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)
    return torch.stack([kl.double().sum(), agreement.double().sum(), cosine.double().sum()]).cpu()
