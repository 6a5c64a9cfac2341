"""The model card: README.md with the front matter that model hubs read, and nothing in it that was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from fewbit.models.report.facts import text
from fewbit.models.report.page import facts_of, quality_of

CARD_FILE = "README.md"
SOURCE_CARD_FILES = ("README.source.md", *(f"README.source{number}.md" for number in range(2, 10)))
"""What the source model's card is called beside this one, the first name that is free."""
MARK = "<!-- Written by fewbit from quantization_report.json; `fewbit report` writes it again. -->"
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_NEEDS = {"compressed-tensors": "compressed-tensors", "fp8": "accelerate", "gptq": "gptqmodel", "awq": "autoawq"}
"""Package that stock transformers asks for before it reads a format."""

_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#!&"} | {"\n": " ", "\r": " "})


def card_of(report: Mapping[str, Any], recipe: Mapping[str, Any], source_card: tuple[str, str] | None) -> str:
    """The card's text.

    Args:
        report: see `quantization_report.json`.
        recipe: see `fewbit_recipe.json`.
        source_card: name and text of the source model's own card, which lies beside this one; None where it has none.
    """
    source, scheme = text(report.get("source")), text(report.get("scheme"))
    quality = quality_of(report)
    measured = (
        _table("measure", quality)
        if quality
        else "Not measured. `fewbit report FOLDER --against SOURCE` measures it and writes it here."
    )
    name, theirs = source_card or ("", "")
    kept = f"\nThe card of the source model is kept in [{name}]({name}).\n" if name else ""
    return f"""---
{_front_matter(report, theirs)}---
{MARK}

# {_plain(source)}, {_plain(scheme)}

{_plain(source)}, quantized by fewbit. The page `quantization_report.html` beside this card shows every layer;
`fewbit_recipe.json` holds what decided the bytes.
{kept}
## What was done

{_table("", facts_of(report, recipe))}

## Quality

{measured}

## Use

{_use(text(report.get("format")))}
"""


def is_ours(card: str) -> bool:
    """Whether fewbit wrote a card."""
    return MARK in card


def _front_matter(report: Mapping[str, Any], source_card: str) -> str:
    """YAML between the card's dashes: what the source's says of its licence and language, and what is true of this."""
    inherited = _front_matter_of(source_card)
    values: dict[str, Any] = {
        "base_model": text(report.get("base_model")) or text(report.get("source")),
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **{name: inherited[name] for name in _INHERITED if _is_words(inherited.get(name))},
    }
    theirs = inherited["tags"] if isinstance(inherited.get("tags"), list) and _is_words(inherited["tags"]) else []
    ours = ["fewbit", "quantized", text(report.get("format")), text(report.get("scheme")).lower()]
    values["tags"] = list(dict.fromkeys([*theirs, *(word for word in ours if word)]))
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _front_matter_of(card: str) -> dict[Any, Any]:
    """What the front matter of a card says; empty where it has none that can be read."""
    first, _, rest = card.partition("\n")
    written, end, _ = rest.partition("\n---")
    if first.strip() != "---" or not end:
        return {}
    try:
        found = yaml.safe_load(written)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_words(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(word, str) for word in value))


def _table(heading: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        [f"| {heading} | |", "|---|---|", *(f"| {_plain(name)} | {_plain(value)} |" for name, value in rows)]
    )


def _plain(words: str) -> str:
    """Words without meaning to Markdown or HTML."""
    return words.translate(_MARKUP)


def _use(checkpoint_format: str) -> str:
    """How to load a folder of the format; transformers and vLLM read the formats that `_NEEDS` lists."""
    ours = "fewbit run FOLDER 'Hello'       # or in Python: fewbit.load('FOLDER')"
    if checkpoint_format not in _NEEDS:
        return f"```sh\npip install fewbit\n{ours}\n```"
    package = _NEEDS[checkpoint_format]
    return f"""```sh
pip install fewbit
{ours}

pip install vllm
vllm serve FOLDER               # where vLLM has kernels for these keys
```

```python
# pip install transformers {package}
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("FOLDER", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```"""
