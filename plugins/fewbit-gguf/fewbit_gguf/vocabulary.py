"""transformers' tokenizer as GGUF metadata: tokens, merges, what text is cut by before they apply, the chat template.

llama.cpp has its own code for cutting text, which it picks by a name; a tokenizer whose rule has no name here is left
out, for another rule would give other tokens. A model without a tokenizer runs on numbers of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import gguf

from fewbit.checkpoints.files import ModelParts
from fewbit_gguf.tensors import GgufFiles

_NONE = "no_vocab"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTES, _BYTES_OF_WORDS = ("ByteLevel", False), ("ByteLevel", True)
_CUTS: dict[tuple[tuple[str, Any], ...], str] = {
    (_BYTES_OF_WORDS,): "gpt-2",
    (("Digits", True), _BYTES_OF_WORDS): "smollm",
    (("Split", _LLAMA_3), _BYTES): "llama-bpe",
    (("Split", _QWEN_2), _BYTES): "qwen2",
}
"""llama.cpp's names of rules for cutting text, by the steps of the tokenizers library; see `_steps`."""


def add_vocabulary(writer: gguf.GGUFWriter, model: ModelParts) -> str:
    """States the model's tokenizer.

    Returns:
        Why the file has none; empty where it has.
    """
    if isinstance(model.source, GgufFiles):
        _copy(writer, model.source)
        return ""
    obstacle = _add(writer, model.tokenizer, model.config.vocab_size)
    if obstacle:
        writer.add_tokenizer_model(_NONE)
    return obstacle


def _copy(writer: gguf.GGUFWriter, source: GgufFiles) -> None:
    """What another GGUF file says."""
    for name, field in gguf.GGUFReader(source.path).fields.items():
        if name.startswith("tokenizer."):
            value, inner = field.contents(), field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, value, field.types[0], inner)


def _add(writer: gguf.GGUFWriter, tokenizer: Any, size: int) -> str:
    if tokenizer is None:
        return "The source has no tokenizer that transformers reads, and so the file has none."
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    kind = rules.get("model", {}).get("type", type(tokenizer).__name__)
    if kind != "BPE":
        return f"The tokenizer is a {kind}, not BPE, and was left out of the file."
    if len(tokenizer) > size:
        return f"The tokenizer has {len(tokenizer)} tokens and the model {size}; it was left out of the file."
    pieces = rules["model"]["byte_fallback"]
    cut = None if pieces else _CUTS.get(_steps(rules["pre_tokenizer"]))
    if not pieces and cut is None:
        return "The tokenizer cuts text by a rule of which llama.cpp's name is not known; it was left out of the file."
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in rules["model"]["merges"]]
    if not merges:
        return "The tokenizer merges nothing, which llama.cpp takes for a mistake; it was left out of the file."
    tokens = _tokens(rules, size)
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre(cut or "default")
    writer.add_token_list(tokens)
    writer.add_token_types(_types(rules, tokens))
    if pieces:
        writer.add_token_scores(_scores(merges, tokens))
    else:
        writer.add_token_merges(merges)
    _add_specials(writer, tokenizer)
    return ""


def _steps(rule: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """The steps of a pre-tokenizer, each with what matters of it; a step that is unlike those known has all of it."""
    if rule is None:
        return ()
    if rule["type"] == "Sequence":
        return tuple(step for inner in rule["pretokenizers"] for step in _steps(inner))
    kind = rule["type"]
    if kind == "ByteLevel":
        return ((kind, rule["use_regex"]),)
    if kind == "Digits":
        return ((kind, rule["individual_digits"]),)
    if kind == "Split" and rule["behavior"] == "Isolated" and not rule["invert"]:
        return ((kind, rule["pattern"].get("Regex")),)
    return ((kind, json.dumps(rule, sort_keys=True)),)


def _tokens(rules: Mapping[str, Any], size: int) -> list[str]:
    """Every token by its number; numbers that the tokenizer does not use have names of their own."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    for token, number in rules["model"]["vocab"].items():
        tokens[number] = token
    for added in rules["added_tokens"]:
        tokens[added["id"]] = added["content"]
    return tokens


def _types(rules: Mapping[str, Any], tokens: list[str]) -> list[int]:
    known = rules["model"]["vocab"]
    added = {one["id"]: one["special"] for one in rules["added_tokens"]}
    unknown = rules["model"]["unk_token"] if rules["model"]["byte_fallback"] else None
    types: list[int] = []
    for number, token in enumerate(tokens):
        kind = gguf.TokenType.NORMAL if token in known else gguf.TokenType.UNUSED
        if rules["model"]["byte_fallback"] and _BYTE.fullmatch(token):
            kind = gguf.TokenType.BYTE
        if number in added:
            kind = gguf.TokenType.CONTROL if added[number] else gguf.TokenType.USER_DEFINED
        types.append(gguf.TokenType.UNKNOWN if token == unknown else kind)
    return types


def _scores(merges: list[str], tokens: list[str]) -> list[float]:
    """What orders merges in llama.cpp's way of it: the earlier a pair is merged, the higher its token's score."""
    order: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        order.setdefault("".join(pair.split(" ", 1)), rank)
    return [-float(order.get(token, len(merges))) for token in tokens]


def _add_specials(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    adders = {
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "unk_token_id": writer.add_unk_token_id,
        "pad_token_id": writer.add_pad_token_id,
    }
    for name, add in adders.items():
        number = getattr(tokenizer, name, None)
        if number is not None:
            add(number)
    numbers = tokenizer("a", verbose=False).input_ids
    writer.add_add_bos_token(bool(numbers) and numbers[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(numbers) > 1 and numbers[-1] == tokenizer.eos_token_id)
    bare = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False, verbose=False).input_ids)
    writer.add_add_space_prefix(bool(bare) and bare[0][:1] in ("▁", "Ġ"))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)
