"""Lists of patterns made ready give the answers of asking each pattern, and thousands of them are no burden."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.checkpoints.registry import formats
from fewbit.errors import SchemeError
from fewbit.spec import LinearKey
from fewbit.spec.pattern import PatternLists, unescaped, unmatched
from fewbit.spec.scheme import Rule, Scheme

MATCHERS = {name: type(found).matcher for name, found in formats().items()}
SEGMENTS = st.sampled_from(["model", "layers", "language_model", "0", "1", "10", "b_proj", "kv_b_proj", "mlp", "gate"])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=5).map(".".join)
LITERALS = NAMES | st.sampled_from(["Linear", "", "b_proj", ".mlp", "layers."])
PATTERNS = (
    LITERALS
    | NAMES.map(lambda name: f"re:{name}.*")
    | NAMES.map(lambda name: f"re:^{re.escape(name)}$")
    | NAMES.map(lambda name: f"+:^{re.escape(name)}$")
    | NAMES.map(lambda name: f"-:{name}")
    | NAMES.map(lambda name: f"{name}.*")
    | NAMES.map(lambda name: f"*{name}")
)
LISTS = st.lists(st.lists(PATTERNS, max_size=6), min_size=1, max_size=4)


@pytest.mark.parametrize("format_name", MATCHERS)
@given(lists=LISTS, name=NAMES, class_name=st.sampled_from(["Linear", "Embedding", ""]))
def test_the_answers_are_those_of_each_pattern(
    format_name: str, lists: list[list[str]], name: str, class_name: str
) -> None:
    matcher = MATCHERS[format_name]
    padding = ["model.never.met"] * 10  # enough for an index to be made

    def first() -> int | None:
        asked = (i for i, patterns in enumerate(lists) if any(matcher(p, name, class_name) for p in patterns))
        return next(asked, None)

    try:
        expected = first()
        every = [pattern for patterns in lists for pattern in patterns]
        alone = [pattern for pattern in every if not matcher(pattern, name, class_name)]
    except SchemeError:
        return
    assert PatternLists([*lists, padding], matcher).first(name, class_name) == expected
    assert PatternLists(lists, matcher).first(name, class_name) == expected
    assert unmatched(every, [(name, class_name)], matcher) == alone


@given(text=st.text(max_size=12))
def test_only_the_text_of_a_whole_expression_is_taken_out_of_it(text: str) -> None:
    assert unescaped(f"^{re.escape(text)}$") == text or "\\" in text
    found = unescaped(text)
    assert found is None or re.fullmatch(text, found)


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq", "modelopt", "fp8", "auto-round", "quark"])
def test_thousands_of_names_are_no_burden(format_name: str) -> None:
    """Mixed-precision configurations name every layer, and every layer asks."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(100)]
    key, other = LinearKey.parse("int4:group64:f16"), LinearKey.parse("int8:channel:f16")
    written = [f"+:^{re.escape(name)}$" for name in names] if format_name == "gptq" else names
    left_out = written[:400] if format_name == "fp8" else written[:2000]
    scheme = Scheme("many", (Rule(tuple(written[2000:]), key), Rule(("Linear",), other)), tuple(left_out))
    started = time.process_time()
    found = [scheme.key_for(name, "Linear", MATCHERS[format_name]) for name in names]
    assert time.process_time() - started < 10  # asking each of them takes minutes
    assert found == [None] * len(left_out) + [other] * (2000 - len(left_out)) + [key] * 2000
