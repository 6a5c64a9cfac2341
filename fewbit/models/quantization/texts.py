"""Texts for calibration and evaluation: plain files, JSON lines, Parquet, chats, and prose that needs no file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fewbit.errors import ModelError

HUB = "hub:"
"""Before the name of a data set on the Hugging Face hub, which may go on with `:CONFIG` and `:SPLIT`."""

MOST_CHARACTERS = 20_000_000
"""How much of a data set on the hub is read: some five million tokens, more than calibration wants."""

SEPARATOR = "\n\n"
"""Between the documents of one text."""


def builtin_text() -> str:
    """English prose that every CPython carries: the topics of its own help, about half a megabyte."""
    from pydoc_data.topics import topics

    return SEPARATOR.join(topics.values())


def read_text(path: str | Path | None, tokenizer: Any = None) -> tuple[str, str]:
    """A text and its name: a file's, or the built-in prose where no file is given.

    Args:
        path: a text in UTF-8; or `.jsonl` or `.parquet` with a document a row, under `text`, or under `messages` as a
            list of `{"role": ..., "content": ...}`; or `hub:NAME[:CONFIG[:SPLIT]]`, a data set with such rows.
        tokenizer: whose chat template writes messages out.

    Raises:
        ModelError: the file cannot be read, is not UTF-8, or a row has neither a text nor messages; or the hub cannot
            be reached, or has no such data set.
    """
    if path is None:
        return builtin_text(), "pydoc_data.topics"
    if str(path).startswith(HUB):
        rows = _hub_rows(str(path).removeprefix(HUB))
        return SEPARATOR.join(_up_to(MOST_CHARACTERS, _documents(rows, path, tokenizer))), str(path)
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            return SEPARATOR.join(_documents(_parquet_rows(path), path, tokenizer)), path.name
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"Cannot read the text {path}: {error}.", "Give a UTF-8 text, a .jsonl or a .parquet file."
        ) from error
    if path.suffix == ".jsonl":
        content = SEPARATOR.join(_documents(_json_rows(content, path), path, tokenizer))
    return content, path.name


def _json_rows(content: str, path: Path) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ModelError(f"Line {number} of {path} is no JSON: {error}.", "Write one object a line.") from error


def _parquet_rows(path: Path) -> Iterable[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ModelError(f"Reading {path} needs pyarrow.", "Run `pip install pyarrow`, or give a .jsonl.") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ModelError(f"Cannot read {path}: {error}.", "Give a Parquet file.") from error
    return enumerate(table.to_pylist(), 1)


def _hub_rows(name: str) -> Iterable[tuple[int, Any]]:
    """Rows of a data set on the hub, read as they are needed."""
    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise ModelError(
            f"Reading {name} from the hub needs the package `datasets`.", "Run `pip install datasets`, or give a file."
        ) from error
    try:
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
        yield from enumerate(rows, 1)
    except (OSError, ValueError) as error:  # no connection and no such data set are both kinds of OSError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The data set {name} cannot be read from the hub: {reason}", "Give a file with --calibration-text."
        ) from error


def _up_to(characters: int, documents: Iterable[str]) -> Iterable[str]:
    """The first documents, until so many characters are together."""
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


def _documents(rows: Iterable[tuple[int, Any]], path: str | Path, tokenizer: Any) -> Iterable[str]:
    for number, row in rows:
        if isinstance(row, Mapping) and isinstance(row.get("text"), str):
            yield row["text"]
        elif isinstance(row, Mapping) and _is_chat(row.get("messages")):
            yield _written_out(row["messages"], tokenizer, path)
        else:
            raise ModelError(
                f"Row {number} of {path} has neither a `text` nor `messages` with role and content.",
                "Name the column `text`, or give messages.",
            )


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )


def _written_out(messages: list[Any], tokenizer: Any, path: str | Path) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            f"{path} holds messages, and this model's tokenizer has no chat template.", "Give rows with `text`."
        )
    written: str = tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False)
    return written
