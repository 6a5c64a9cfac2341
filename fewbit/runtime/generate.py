"""Text generation, with its speed measured: by the compiled decode step, or through transformers' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer, TextStreamer

from fewbit.runtime.decode_step import DecodeStep, obstacles

COMPILED_STEP = "compiled step"
_GREEDY_SETTINGS = {
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
    ),
    *("max_length", "max_new_tokens", "use_cache", "transformers_version", "_from_model_config"),
}
"""Settings of a generation that change nothing where tokens are chosen greedily until one of them ends the text."""
_NEUTRAL = {"repetition_penalty": 1.0, "length_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1}
"""Settings that change nothing at these values."""


@dataclass(frozen=True)
class Generated:
    """An answer.

    Attributes:
        text: the new text only.
        tokens: new tokens.
        prompt_tokens: tokens of the prompt, chat template included.
        prefill_seconds: until the first new token.
        decode_seconds: from the first new token to the last.
        decoded_by: what made the tokens after the first: `COMPILED_STEP`, or `transformers`, with the reason.
    """

    text: str
    tokens: int
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decoded_by: str

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
    compiled_step: bool = True,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Greedy continuation of a prompt.

    Args:
        model: from `fewbit.load`.
        tokenizer: the model's.
        prompt: a question, put into the chat template if there is one and `chat` is set, or a text to continue.
        max_new_tokens: when to stop at the latest.
        chat: whether to use the chat template.
        compiled_step: whether to decode by the compiled step where it runs the model.
        on_text: called with each piece of text as soon as it is whole.
    """
    inputs = _inputs(tokenizer, prompt, chat).to(model.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    length = prompt_tokens + max_new_tokens
    reason = next(_reasons(model, length), None) if compiled_step else "the compiled step is switched off"
    clock = _Clock(tokenizer, on_text)
    started = time.perf_counter()
    with torch.no_grad():
        if reason is None:
            new = _by_compiled_step(model, inputs, length, clock)
        else:
            new = _by_transformers(model, inputs, max_new_tokens, _padding(tokenizer), clock)[0, prompt_tokens:]
    return Generated(
        tokenizer.decode(new, skip_special_tokens=True),
        len(new),
        prompt_tokens,
        clock.first - started,
        clock.last - clock.first,
        COMPILED_STEP if reason is None else f"transformers: {reason}",
    )


def _reasons(model: PreTrainedModel, length: int) -> Iterator[str]:
    """Why transformers must generate: what its configuration asks beside greedy choice, or the model."""
    settings = model.generation_config.to_diff_dict().items()
    asked = [name for name, value in settings if value and name not in _GREEDY_SETTINGS and value != _NEUTRAL.get(name)]
    if asked:
        yield f"the generation's settings ask for {', '.join(sorted(asked))}"
    yield from obstacles(model, length)


def _by_compiled_step(model: PreTrainedModel, inputs: Any, length: int, clock: _Clock) -> Tensor:
    """New tokens, int64, of a prompt that nothing masks."""
    step = DecodeStep(model, length)
    clock.put(inputs["input_ids"])
    logits, ends, new = step(inputs["input_ids"][0]), _end_tokens(model), []
    while True:
        new.append(logits.float().argmax(-1, keepdim=True))
        clock.put(new[-1])
        if inputs["input_ids"].shape[1] + len(new) == length or int(new[-1]) in ends:
            break
        logits = step(new[-1])
    clock.end()
    return torch.cat(new)


def _by_transformers(model: PreTrainedModel, inputs: Any, most: int, padding: int, clock: _Clock) -> Tensor:
    """Prompt and new tokens, int64 [1, T]."""
    return model.generate(
        **inputs,
        max_new_tokens=most,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        streamer=clock,
        pad_token_id=padding,
    )


def _padding(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def _end_tokens(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


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
