"""Texts from files of every kind that people have."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import ModelError
from fewbit.models.quantization.texts import builtin_text, read_text
from tests.tiny_models import byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_no_file_means_the_prose_of_every_python() -> None:
    text, name = read_text(None)
    assert text == builtin_text() and len(text) > 300_000 and name == "pydoc_data.topics"


def test_rows_of_text_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one", "other": 1}\n\n{"text": "two\\nlines"}\n', encoding="utf-8")
    assert read_text(path) == ("one\n\ntwo\nlines", "rows.jsonl")


def test_messages_are_written_out_by_the_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}), encoding="utf-8")
    tokenizer = byte_tokenizer()
    with pytest.raises(ModelError, match="no chat template"):
        read_text(path, tokenizer)
    tokenizer.chat_template = TEMPLATE
    assert read_text(path, tokenizer)[0] == "<user>Hi</user><assistant>Hello</assistant>"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "Line 1 of .* is no JSON"),
        ('{"text": "fine"}\nnot json', "Line 2"),
        ('{"body": "x"}', "Row 1 .* neither a `text` nor `messages`"),
        ('{"text": 5}', "neither"),
        ('{"messages": [{"role": "user"}]}', "neither"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_rows_that_hold_no_text_are_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=says):
        read_text(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_text_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for suffix in (".txt", ".jsonl", ".parquet"):
        path = tmp_path_factory.getbasetemp() / f"any{suffix}"
        path.write_bytes(content)
        try:
            assert isinstance(read_text(path)[0], str)
        except ModelError as error:
            assert path.name in str(error)


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(ModelError, match="pip install pyarrow"):
            read_text(tmp_path / "rows.parquet")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "rows.parquet")
    assert read_text(tmp_path / "rows.parquet")[0] == "one\n\ntwo"
