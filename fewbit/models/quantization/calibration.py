"""Calibration text: from a file or the built-in prose to windows of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from fewbit.checkpoints.registry import opener_of
from fewbit.errors import ModelError

CHARACTERS = (5, 8)
"""Of a text that is read for each token that is wanted, before all of it is; English has 4 to 5 a token."""

MARGIN = 64
"""Tokens before a cut of the text that the cut might have changed."""


@dataclass(frozen=True)
class Calibration:
    """Token windows and where they came from.

    Attributes:
        windows: int64 [count, length].
        source: name of the text.
    """

    windows: Tensor
    source: str

    def record(self) -> dict[str, Any]:
        """What a recipe keeps of it: source, sizes, and a hash of the tokens."""
        digest = hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()
        count, length = self.windows.shape
        return {"source": self.source, "windows": count, "length": length, "sha256": digest}


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder, or of a file that a plugin reads.

    Raises:
        ModelError: the folder has none that transformers can read.
    """
    opener = opener_of(Path(folder))
    if opener is not None:
        return opener.tokenizer(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{folder} has no usable tokenizer: {reason}", "Copy the tokenizer's files there.") from error


def starting_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before every text, as the model expects it; None where it puts none."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a", verbose=False).input_ids[:1] == [bos] else None


def calibration_windows(tokenizer: Any, text: str, length: int, count: int) -> Tensor:
    """Like `token_windows`, each window starting as the tokenizer starts a text; int64 [count, length].

    Every window is full, so that there is no padding that statistics would have to leave out.

    Raises:
        ModelError: the text is too short for a single window.
    """
    start = starting_token(tokenizer)
    if start is None:
        return token_windows(tokenizer, text, length, count)
    found = token_windows(tokenizer, text, length - 1, count)
    return torch.cat([torch.full((len(found), 1), start), found], dim=1)


def token_windows(tokenizer: Any, text: str, length: int, count: int) -> Tensor:
    """The first `count` consecutive windows of `length` tokens of a text, no special tokens added, int64.

    Raises:
        ModelError: the text is too short for a single window.
    """
    ids = _first_ids(tokenizer, text, length * count)
    available = min(count, len(ids) // length)
    if available == 0:
        raise ModelError(f"The text has {len(ids)} tokens, a window needs {length}.", "Give a longer text.")
    return ids[: available * length].reshape(available, length)


def _first_ids(tokenizer: Any, text: str, count: int) -> Tensor:
    """The first `count` token ids of a text and maybe more, int64; of a long text no more is read than that takes."""
    cuts = (text.rfind("\n", 0, characters * (count + MARGIN)) for characters in CHARACTERS)
    for part in (*(text[: max(cut, 0)] for cut in cuts), text):
        ids: Tensor = tokenizer(part, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
        if len(ids) >= count + MARGIN:
            break
    return ids.long()
