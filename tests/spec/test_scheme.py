"""Schemes: which module gets which key, and their JSON form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import SchemeError
from fewbit.spec import ELEMENTS, PRESETS, LinearKey, QuantKey, Rule, Scheme, group, preset
from fewbit.spec.pattern import Matcher, matches, matches_compressed_tensors
from tests.spec.keys import LINEAR_KEYS, QUANT_KEYS

INT4 = LinearKey.parse("int4:group128:bf16")
INT8 = LinearKey.parse("int8:channel:bf16")
FP8 = LinearKey.parse("e4m3:channel:bf16 * e4m3:token:f32:dynamic")

WORDS = st.lists(st.text(min_size=1, max_size=12), max_size=3).map(tuple)
SCHEMES = st.builds(
    Scheme,
    st.text(max_size=12),
    st.lists(st.builds(Rule, WORDS, st.none() | LINEAR_KEYS), max_size=3).map(tuple),
    WORDS,
    st.none() | QUANT_KEYS,
)


def _mixed() -> Scheme:
    rules = (Rule(("re:.*down_proj", "layers.0"), INT8), Rule(("layers.1.down_proj",), FP8), Rule(("Linear",), INT4))
    return Scheme("MIXED", rules, ignore=("lm_head", "*.gate"))


@pytest.mark.parametrize(
    ("name", "class_name", "key"),
    [
        ("model.layers.2.mlp.up_proj", "Linear", INT4),
        ("model.layers.2.mlp.down_proj", "Linear", INT8),
        ("model.layers.0.mlp.up_proj", "Linear", INT8),
        ("layers.1.down_proj", "Linear", INT8),  # the first rule that names it, although a later one is more exact
        ("model.layers.2.norm", "RMSNorm", None),
        ("lm_head", "Linear", None),
        ("model.layers.0.mlp.gate", "Linear", None),  # ignored, although two rules name it
    ],
)
def test_ignore_beats_rules_and_the_first_rule_wins(name: str, class_name: str, key: LinearKey | None) -> None:
    assert _mixed().key_for(name, class_name) == key


def test_another_matcher_decides_by_its_own_rule() -> None:
    scheme = Scheme("X", (Rule(("layers.0",), INT8), Rule(("Linear",), INT4)), ignore=("b_proj",))
    assert scheme.key_for("layers.0.q", matcher=matches_compressed_tensors) == INT4
    assert scheme.key_for("x.b_proj", matcher=matches_compressed_tensors) == INT4
    assert scheme.key_for("x.b_proj") is None


def test_unmatched_patterns_of_rules_and_exclusions() -> None:
    modules = [("layers.1.up_proj", "Linear"), ("lm_head", "Linear")]
    assert _mixed().unmatched(modules) == ["re:.*down_proj", "layers.0", "layers.1.down_proj", "*.gate"]


def test_ignoring_adds_once() -> None:
    assert _mixed().ignoring(["lm_head", "embed"]).ignore == ("lm_head", "*.gate", "embed")


def test_with_granularity_changes_every_rule_but_no_activation() -> None:
    scheme = Scheme("X", (Rule(("a",), FP8), Rule(("b",), INT4))).with_granularity(group(32))
    assert [str(rule.key) for rule in scheme.rules] == [
        "e4m3:group32:bf16 * e4m3:token:f32:dynamic",
        "int4:group32:bf16",
    ]


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "FP8_BLOCK"])
def test_formats_that_fix_their_group_refuse_another(name: str) -> None:
    with pytest.raises(SchemeError, match=name):
        preset(name).with_granularity(group(64))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_with_scale_element_keeps_scales_that_are_part_of_the_format(name: str) -> None:
    before = preset(name).rules[0].key
    after = preset(name).with_scale_element(ELEMENTS["f16"]).rules[0].key
    narrow = before.weight.scale.element.bits == 8
    assert after.weight.scale.element is (before.weight.scale.element if narrow else ELEMENTS["f16"])
    assert after.activation == before.activation


@given(SCHEMES)
def test_json_round_trip(scheme: Scheme) -> None:
    assert Scheme.from_json(json.loads(json.dumps(scheme.to_json()))) == scheme


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_json_round_trip_of_presets(name: str) -> None:
    assert Scheme.from_json(json.loads(json.dumps(preset(name).to_json()))) == preset(name)


def _without(field: str) -> dict[str, Any]:
    data = _mixed().to_json()
    del data[field]
    return data


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        *(_without(field) for field in ("name", "rules", "ignore")),
        _mixed().to_json() | {"ignore": "lm_head"},  # a string is a list of letters to `tuple`
        _mixed().to_json() | {"ignore": None},
        _mixed().to_json() | {"ignore": [1]},
        _mixed().to_json() | {"rules": [{"targets": "Linear", "key": str(INT4)}]},
        _mixed().to_json() | {"rules": [{"key": str(INT4)}]},
        _mixed().to_json() | {"rules": [{"targets": ["Linear"], "key": 4}]},
        _mixed().to_json() | {"rules": [{"targets": ["Linear"], "key": "int44:group128:bf16"}]},
        _mixed().to_json() | {"rules": ["Linear"]},
        _mixed().to_json() | {"kv_cache": 8},
        _mixed().to_json() | {"kv_cache": "fp8"},
    ],
)
def test_json_that_is_no_scheme_is_refused(data: Any) -> None:
    with pytest.raises(SchemeError):
        Scheme.from_json(data)


def test_a_kv_cache_key_survives() -> None:
    key = QuantKey.parse("e4m3:tensor:f32")
    assert Scheme.from_json(Scheme("X", (), kv_cache=key).to_json()).kv_cache == key


def test_a_rule_may_leave_modules_as_they_are() -> None:
    """For formats whose first matching rule decides; `ignore` would beat the rules before it."""
    rules = (Rule(("layers.0.mlp.gate",), INT8), Rule(("gate",), None), Rule(("Linear",), INT4))
    scheme = Scheme("FIRST HIT", rules, ignore=())
    assert scheme.key_for("layers.0.mlp.gate") == INT8
    assert scheme.key_for("layers.1.mlp.gate") is None
    assert scheme.key_for("layers.1.mlp.up_proj") == INT4
    assert scheme.keys == (INT8, INT4)
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert scheme.with_scale_element(ELEMENTS["f32"]).rules[1].key is None
    assert scheme.with_granularity(group(16)).keys == tuple(
        replace(key, weight=key.weight.with_granularity(group(16))) for key in (INT8, INT4)
    )


SPLIT = ("q_proj", "k_proj", "v_proj")


def _ignoring(*entries: str) -> Scheme:
    return Scheme("X", (Rule(("Linear",), INT4),), ignore=entries)


@pytest.mark.parametrize("matcher", [matches, matches_compressed_tensors])
def test_joined_projections_and_their_members(matcher: Matcher) -> None:
    """B01: entries that name all members mean the joined matrix, entries that name it mean all members."""
    members = [f"x.{member}" for member in SPLIT]
    assert _ignoring(*members).key_for("x.qkv_proj", matcher=matcher) is None
    assert _ignoring("x.qkv_proj").key_for("x.qkv_proj", matcher=matcher) is None
    assert [_ignoring("x.qkv_proj").key_for(member, matcher=matcher) for member in members] == [None] * 3
    assert _ignoring("y.qkv_proj").key_for("x.q_proj", matcher=matcher) == INT4
    assert _ignoring("x.my_qkv_proj").key_for("x.q_proj", matcher=matcher) == INT4  # whole words
    with pytest.raises(SchemeError, match=r"x\.q_proj is left plain, x\.k_proj is left plain, x\.v_proj is int4"):
        _ignoring(*members[:2]).key_for("x.qkv_proj", matcher=matcher)
    assert _ignoring(*members[:2], "x.qkv_proj").key_for("x.qkv_proj", matcher=matcher) is None
    assert _ignoring(*members, "x.q", "x.qkv_proj").unmatched([("x.qkv_proj", "Linear")], matcher) == ["x.q"]


def test_members_with_keys_of_their_own() -> None:
    """B01: rules are asked as `ignore` is, and an entry for the joined matrix itself beats later ones."""
    rules = (Rule(("x.q_proj",), INT8), Rule(("Linear",), INT4))
    with pytest.raises(
        SchemeError, match=r"x\.qkv_proj is one matrix.*x\.q_proj is int8:channel:bf16, x\.k_proj is int4"
    ):
        Scheme("X", rules).key_for("x.qkv_proj")
    assert Scheme("X", (Rule(("re:x.qk.*",), FP8), *rules)).key_for("x.qkv_proj") == FP8


@pytest.mark.parametrize("entry", ["re:vision_tower.*", "vision_tower*", "vision_tower.0.fc"])
def test_renamed_modules(entry: str) -> None:
    """B03: expressions and globs too are asked under both names."""
    scheme = _ignoring(entry)
    assert scheme.key_for("vision.0.fc") == INT4
    renamed = scheme.also_called({"vision.0.fc": ("vision_tower.0.fc",)})
    assert renamed.key_for("vision.0.fc") is None
    assert renamed.key_for("text.0.fc") == INT4
    assert scheme.unmatched([("vision.0.fc", "Linear")]) == [entry]
    assert renamed.unmatched([("vision.0.fc", "Linear")]) == []
    assert renamed == scheme  # names are no part of what a scheme says


@pytest.mark.parametrize("matcher", [matches, matches_compressed_tensors])
def test_wrappers_in_either_order(matcher: Matcher) -> None:
    """B10: model.language_model and language_model.model; exact names, expressions and globs."""
    names = [f"{wrapper}.layers.0.mlp.gate" for wrapper in ("model.language_model", "language_model.model")]
    for written in names:
        for entry in (written, f"re:{written}"):
            assert [_ignoring(entry).key_for(name, matcher=matcher) for name in names] == [None, None]
    assert [_ignoring("*mlp.gate").key_for(name) for name in names] == [None, None]
    assert _ignoring(names[0]).key_for("model.layers.0.mlp.gate", matcher=matcher) == INT4


def test_short_names_are_whole_segments() -> None:
    """B05: b_proj is no part of kv_b_proj."""
    assert _ignoring("b_proj").key_for("x.b_proj") is None
    assert _ignoring("b_proj").key_for("x.kv_b_proj") == INT4
    assert _ignoring("5.attn.g_proj").key_for("layers.15.attn.g_proj") == INT4
