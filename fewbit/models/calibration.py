"""Calibration: text into token windows, and hidden states carried from block to block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.registry import opener_of
from fewbit.errors import ModelError
from fewbit.models.families import blocks_of, family_of_model


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


def builtin_text() -> str:
    """English prose that every CPython carries: the topics of its own help, about 700 KB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_text(path: str | Path | None) -> tuple[str, str]:
    """A text and its name: a file's, or the built-in prose where no file is given.

    Raises:
        ModelError: the file does not exist or is not UTF-8.
    """
    if path is None:
        return builtin_text(), "pydoc_data.topics"
    try:
        return Path(path).read_text(encoding="utf-8"), Path(path).name
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Cannot read the text {path}: {error}.", "Give a UTF-8 text file.") from error


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


def token_windows(tokenizer: Any, text: str, length: int, count: int) -> Tensor:
    """The first `count` consecutive windows of `length` tokens of a text, no special tokens added, int64.

    Raises:
        ModelError: the text is too short for a single window.
    """
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    available = min(count, len(ids) // length)
    if available == 0:
        raise ModelError(f"The text has {len(ids)} tokens, a window needs {length}.", "Give a longer text.")
    return ids[: available * length].reshape(available, length)


class CacheWatch:
    """Stands in for a key-value cache: hands back what it is given, and keeps the largest magnitude of each head.

    What it is given is what a cache would hold, keys after their rotary embedding.

    Attributes:
        largest: `k` and `v` -> float32 [heads]; empty until something is cached.
    """

    def __init__(self) -> None:
        self.largest: dict[str, Tensor] = {}

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """keys and values [B, heads, T, size], as attention modules call it.

        Raises:
            ValueError: they hold NaN or infinity.
        """
        for side, states in (("k", keys), ("v", values)):
            seen = states.abs().amax(dim=(0, -2, -1)).float().cpu()
            if not bool(seen.isfinite().all()):
                raise ValueError("calibration produced NaN or infinity")
            self.largest[side] = torch.maximum(self.largest.get(side, seen), seen)
        return keys, values


_CACHE_ARGUMENTS = ("cache", "past_key_values")  # since transformers 5.24, and before


class BlockStream:
    """Hidden states of calibration windows, carried through the blocks one at a time.

    Only the block at hand has its weights; the states of all windows are kept in the model's dtype.

    Args:
        model: on meta, with real buffers.
        filled: context manager that fills a submodule's parameters from the checkpoint and sends them back to meta.
        windows: int64 [count, length].
        batch: windows that pass together.
    """

    def __init__(self, model: PreTrainedModel, filled: Callable[[str], Any], windows: Tensor, batch: int = 4) -> None:
        self.model, self.filled = model, filled
        self.states: list[Tensor] = []
        self.arguments: dict[str, list[dict[str, Any]]] = {path: [] for path in blocks_of(model)}
        with filled(_embedding_path(model)), torch.no_grad(), _recording(model, self._record) as run:
            for window in windows.split(batch):
                run(window)

    def _record(self, path: str, state: Tensor, arguments: dict[str, Any]) -> None:
        if path == next(iter(self.arguments)):
            self.states.append(state)
        self.arguments[path].append(arguments)

    def through(
        self, path: str, layers: Mapping[str, str], cache: CacheWatch | None = None
    ) -> dict[str, InputStatistics]:
        """Carries the states through the block at `path` and gathers the inputs of its linear layers.

        Args:
            path: the block's, in the model.
            layers: name of a layer, whatever the caller calls it -> its path in the model.
            cache: what to watch the block's keys and values with.

        Returns:
            Layer name -> statistics of its input.
        """
        statistics = {name: InputStatistics.empty() for name in layers}
        with self.filled(path), torch.no_grad():
            block = self.model.get_submodule(path)
            handles = [
                self.model.get_submodule(location).register_forward_pre_hook(
                    lambda _module, inputs, gathered=statistics[name]: gathered.add(inputs[0])
                )
                for name, location in layers.items()
            ]
            for index, state in enumerate(self.states):
                arguments = self.arguments[path][index]
                if cache is not None:
                    arguments = arguments | {name: cache for name in _CACHE_ARGUMENTS if name in arguments}
                output = block(state, **arguments)
                self.states[index] = output[0] if isinstance(output, tuple) else output
            for handle in handles:
                handle.remove()
        return statistics


class _LastBlockReached(Exception):  # noqa: N818 - not an error, it ends a forward pass early
    pass


class _Recorder(nn.Module):
    """Stands in for a block: hands on the states it gets and tells what else it was given."""

    def __init__(self, block: nn.Module, path: str, last: bool, record: Callable[..., None]) -> None:
        super().__init__()
        # In a list, so that the block is no submodule of its stand-in.
        self._block, self._path, self._last, self._record = [block], path, last, record

    def forward(self, state: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        if positional:
            raise ModelError(f"{self._path} is called with positional arguments.", "Calibrate a listed architecture.")
        self._record(self._path, state, arguments)
        if self._last:
            raise _LastBlockReached
        return state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)


@contextmanager
def _recording(model: PreTrainedModel, record: Callable[..., None]) -> Iterator[Callable[[Tensor], None]]:
    """Replaces every block by its recorder meanwhile; yields a function that runs the model on token ids."""
    blocks = blocks_of(model)
    container = model.get_submodule(family_of_model(model).blocks)
    last = next(reversed(blocks))
    for index, (path, block) in enumerate(blocks.items()):
        container[index] = _Recorder(block, path, path == last, record)

    def run(ids: Tensor) -> None:
        try:
            model(input_ids=ids, use_cache=False)
        except _LastBlockReached:
            return

    try:
        yield run
    finally:
        for index, block in enumerate(blocks.values()):
            container[index] = block


def _embedding_path(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embedding)
