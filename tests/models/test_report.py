"""The report's page and the model card: complete, self-contained, and deaf to what hostile names would have them do."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import CheckpointError
from fewbit.models.quantization.quantize import quantize
from fewbit.models.report.files import render_again, write_report
from fewbit.models.report.model_card import card_of
from fewbit.models.report.page import NOT_MEASURED, page_of
from tests.tiny_models import save_tiny_model

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "pre", "span"),
    *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "line", "text", "circle", "rect"),
}
SOURCE_CARD = "---\nlicense: apache-2.0\ntags: [code]\nbase_model: somebody/else\n---\n# The source\n"
HOSTILE = "</td></style></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\ud800"


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def assert_harmless(page: str) -> Page:
    """Nothing is fetched, nothing runs, and only the tags that the report is made of are there."""
    seen = Page(page)
    assert seen.tags <= TAGS
    assert not {name for name, _ in seen.attributes} & {"src", "href", "onerror", "onload", "xlink:href"}
    style = page.partition("</style>")[0]
    assert "url(" not in style and "@import" not in style
    return seen


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_tiny_model(tmp_path_factory.mktemp("report") / "source", "qwen3_moe")
    (source / "README.md").write_text(SOURCE_CARD)
    options: dict[str, Any] = {"group_size": 32, "algorithm": "gptq", "settings": {"sweeps": 0}}
    quantize(source, source.parent / "q", "W4A16", calibration_length=32, calibration_windows=2, **options)
    return source.parent / "q"


def test_the_page_tells_of_every_layer_and_of_what_stayed_plain(quantized: Path) -> None:
    report = json.loads((quantized / "quantization_report.json").read_text())
    seen = assert_harmless((quantized / "quantization_report.html").read_text())
    names = [*(layer["name"] for layer in report["layers"]), *report["plain"]]
    assert len(names) > 30 and all(name in seen.words for name in names)
    recipe = json.loads((quantized / "fewbit_recipe.json").read_text())
    for told in (recipe["calibration"]["sha256"], "gptq", "lm_head", "ignored by the scheme", "block 1, expert 3"):
        assert told in seen.words
    assert NOT_MEASURED in seen.words


def test_the_card_keeps_the_source_s_own(quantized: Path) -> None:
    assert (quantized / "README.source.md").read_text() == SOURCE_CARD
    card = (quantized / "README.md").read_text()
    facts = yaml.safe_load(card.split("---")[1])
    assert facts["base_model"] == "source" and facts["license"] == "apache-2.0"
    assert facts["tags"] == ["code", "fewbit", "quantized", "compressed-tensors", "w4a16"]
    assert "README.source.md" in card and "Not measured" in card and "perplexity" not in card


def test_what_was_measured_is_added_and_nothing_else_changes(quantized: Path) -> None:
    before = json.loads((quantized / "quantization_report.json").read_text())
    quality = {"mean_kl": 0.125, "top1_agreement": 0.5, "text": "words.txt", "windows": 2, "window_length": 8}
    render_again(quantized, quality=quality, base_model="someone/model")
    after = json.loads((quantized / "quantization_report.json").read_text())
    assert after == before | {"quality": quality, "base_model": "someone/model"}
    page, card = ((quantized / name).read_text() for name in ("quantization_report.html", "README.md"))
    for told in ("0.1250", "50.00%", "words.txt, 2 windows of 8 tokens"):
        assert told in page and told in card
    assert "base_model: someone/model" in card and (quantized / "README.source.md").read_text() == SOURCE_CARD


def test_a_card_that_somebody_wrote_since_is_kept_too(quantized: Path) -> None:
    (quantized / "README.md").write_text("my own words")
    render_again(quantized)
    assert (quantized / "README.source2.md").read_text() == "my own words"
    assert (quantized / "README.source.md").read_text() == SOURCE_CARD


def test_hostile_names_stay_words(quantized: Path) -> None:
    report = json.loads((quantized / "quantization_report.json").read_text())
    report |= {
        "base_model": HOSTILE,
        "source": HOSTILE,
        "scheme": HOSTILE,
        "plain": {HOSTILE: HOSTILE},
        "kept": [HOSTILE],
    }
    report["layers"][0] |= {"name": HOSTILE, "method": HOSTILE, "remarks": [HOSTILE]}
    write_report(quantized, report)
    seen = assert_harmless((quantized / "quantization_report.html").read_text())
    assert "<script>alert(1)</script>" in seen.words
    card = (quantized / "README.md").read_text()
    assert yaml.safe_load(card.split("\n---\n")[0])["base_model"].startswith("</td>")
    assert "<script>" not in card.split("\n---\n", 1)[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LAYER = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["a.0.b", "a.0.experts.3.b", f"a.{'9' * 5000}.b"]) | JSON,
        **{name: st.floats() | st.integers() | JSON for name in ("sqnr_db", "loss", "clipped", "bytes", "tokens")},
        "shape": st.lists(st.integers(), max_size=3) | JSON,
    },
)
FIELDS = ("source", "plain", "kept", "quality", "budget", "gate", "versions", "bytes_before", "bytes_after")


@given(
    report=st.fixed_dictionaries({"layers": st.lists(LAYER, max_size=4)}, optional=dict.fromkeys(FIELDS, JSON)),
    recipe=st.dictionaries(st.sampled_from(["calibration", "scheme"]), JSON),
    source_card=st.none() | st.tuples(st.just("README.source.md"), st.text().map("---\n{}\n---".format)),
)
def test_any_json_makes_a_page_and_a_card(report: Any, recipe: Any, source_card: Any) -> None:
    assert_harmless(page_of(report, recipe, {"a": 1}))
    assert card_of(report, recipe, source_card).startswith("---\nbase_model:")


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_report_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "quantization_report.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"quantization_report\.json"):
        render_again(tmp_path)
