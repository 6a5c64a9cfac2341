"""Text generation through transformers' own `generate`, with its speed measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer, TextStreamer


@dataclass(frozen=True)
class Generated:
    """An answer.

    Attributes:
        text: the new text only.
        tokens: new tokens.
        prompt_tokens: tokens of the prompt, chat template included.
        prefill_seconds: until the first new token.
        decode_seconds: from the first new token to the last.
    """

    text: str
    tokens: int
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode rate over the tokens after the first; 0 where there is only one."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 and self.decode_seconds > 0 else 0.0


def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    chat: bool = True,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Greedy continuation of a prompt.

    Args:
        model: from `fewbit.load`.
        tokenizer: the model's.
        prompt: a question, put into the chat template if there is one and `chat` is set, or a text to continue.
        max_new_tokens: when to stop at the latest.
        chat: whether to use the chat template.
        on_text: called with each piece of text as soon as it is whole.
    """
    inputs = _inputs(tokenizer, prompt, chat).to(model.device)
    clock = _Clock(tokenizer, on_text)
    started = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            streamer=clock,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    prompt_tokens = inputs["input_ids"].shape[1]
    new = output[0, prompt_tokens:]
    return Generated(
        tokenizer.decode(new, skip_special_tokens=True),
        len(new),
        prompt_tokens,
        clock.first - started,
        clock.last - clock.first,
    )


def _inputs(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat or not getattr(tokenizer, "chat_template", None):
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


class _Clock(BaseStreamer):
    """Notes when the first and the last new token came, and hands their text on."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        self.first = self.last = 0.0
        self._seen_prompt = False
        self._text = _TextPieces(tokenizer, on_text) if on_text else None

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        self._seen_prompt = True
        if self._text is not None:
            self._text.put(value)

    def end(self) -> None:
        if self._text is not None:
            self._text.end()


class _TextPieces(TextStreamer):
    """transformers' streamer with its print replaced by a callback."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)
