"""Calibration text that a model writes itself: samples of its own distribution, drawn from the start of a text.

No text of the world is nearer to what a model was trained on than its own. They are short, because sampling takes a
pass for each token whatever the batch, and packed one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import ModelError
from fewbit.models.load import load

SHARE = 4
"""One window of so many is sampled where the user gives no text."""

SAMPLE_LENGTH = 128
LARGEST_BYTES = 2 * 10**9
"""Weights up to which a model is loaded as a whole to sample from it unasked."""


def samples_unasked(source: str | Path, tokenizer: Any, count: int) -> int:
    """How many of `count` calibration windows the model writes where the user gives no text and asks for nothing."""
    small = TensorFolder(Path(source)).nbytes <= LARGEST_BYTES
    return count // SHARE if small and _start(tokenizer) is not None else 0


def self_samples(source: str | Path, tokenizer: Any, length: int, count: int, device: str = "cpu") -> Tensor:
    """Windows of `length` tokens, packed samples of the model in a folder; int64 [count, length].

    Args:
        source: folder of the unquantized model, which is loaded as a whole.
        tokenizer: its tokenizer, which knows the token that texts start with.
        length, count: of the windows.
        device: where the model runs; equal devices give equal samples.

    Raises:
        ModelError: the tokenizer has no token that a text could start with.
    """
    start = _start(tokenizer)
    if start is None:
        raise ModelError(
            f"{source} cannot be sampled from: its tokenizer has neither a BOS nor an EOS token.",
            "Give a calibration text, or --self-samples 0.",
        )
    dtype = torch.float32 if torch.device(device).type == "cpu" else None  # few CPUs multiply 16-bit floats as fast
    model = load(source, device=device, dtype=dtype)
    steps = min(SAMPLE_LENGTH, length)
    starts = torch.full((-(-count * length // steps), 1), start, device=model.device)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=steps - 1,
        max_new_tokens=steps - 1,
        eos_token_id=None,  # a sample goes on behind the end of a text with the next one, as training data do
        pad_token_id=start,
    )
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        drawn = model.generate(starts, generation_config=settings).cpu()
    return drawn.flatten()[: count * length].reshape(count, length)


def _start(tokenizer: Any) -> int | None:
    """The token that a text starts with: BOS, or where there is none the EOS of the text before."""
    return next((one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id) if one is not None), None)
