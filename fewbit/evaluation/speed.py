"""Sizes and speeds of a loaded model, measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fewbit.methods.embedding import QuantizedEmbedding
from fewbit.runtime.generate import Generated, generate


def memory_bytes(model: nn.Module) -> int:
    """Bytes of every parameter, buffer and quantized record of a model, shared storage counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, QuantizedEmbedding) and module.record is not None:
            tensors += [module.record[role] for role in module.record.tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def decode_speed(
    model: PreTrainedModel, tokenizer: Any, prompts: Iterable[str], max_new_tokens: int = 32
) -> tuple[float, list[Generated]]:
    """Median decode rate over prompts, tokens a second, after one warm-up; and the answers."""
    with torch.no_grad():
        generate(model, tokenizer, "Hello", max_new_tokens=4)
        answers = [generate(model, tokenizer, prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
    return statistics.median(answer.tokens_per_second for answer in answers), answers
