"""Recipes: what decided an output, as JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import SchemeError
from fewbit.spec import Recipe, ScaleRules, preset
from fewbit.spec.recipe import RECIPE_VERSION
from tests.spec.test_scheme import SCHEMES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = st.dictionaries(st.text(max_size=8), JSON, max_size=3)
RULES = st.builds(ScaleRules, st.sampled_from(["full", "restricted"]), st.sampled_from(["floor", "even", "ceil"]))
RECIPES = st.builds(
    Recipe,
    SCHEMES,
    st.text(max_size=8),
    st.text(max_size=8),
    SETTINGS,
    RULES,
    st.none() | SETTINGS,
    st.text(max_size=8),
    st.lists(st.fixed_dictionaries({"name": st.text(max_size=8), "settings": SETTINGS}), max_size=2).map(tuple),
)


@given(RECIPES)
def test_json_round_trip(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()) == recipe


@given(RECIPES)
def test_equal_recipes_have_equal_texts(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()).to_json() == recipe.to_json()


def _text(**changes: Any) -> str:
    return json.dumps(json.loads(Recipe(preset("W4A16")).to_json()) | changes)


def _text_without(field: str) -> str:
    data = json.loads(_text())
    del data[field]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[]", "version"),
        ("{}", "version"),
        (_text(version=RECIPE_VERSION + 1), "version"),
        (_text_without("version"), "version"),
        (_text_without("scheme"), "no scheme"),
        (_text(scheme={"name": "W4A16"}), "rules"),
        (_text(scheme="W4A16"), "scheme"),
        (_text(algoritm="gptq"), "'algoritm'"),
        (_text(scale_rules={"integer": "ful"}), "'ful'"),
        (_text(scale_rules={"mx": "round"}), "'round'"),
        (_text(scale_rules={"fp8": "ceil"}), "scale_rules"),
        (_text(scale_rules=None), "scale_rules"),
        (_text(transforms="awq"), "transforms"),
        (_text(activation_percentile=20), "percentile"),
        (_text(activation_percentile="99"), "percentile"),
        (_text(transforms=[{"settings": {}}]), "transforms"),
    ],
)
def test_text_that_is_no_recipe_is_refused(text: str, named: str) -> None:
    with pytest.raises(SchemeError) as caught:
        Recipe.from_json(text)
    assert named in caught.value.message
    assert caught.value.hint


def test_an_unknown_field_gets_the_closest_name() -> None:
    with pytest.raises(SchemeError, match="Did you mean 'algorithm'"):
        Recipe.from_json(_text(algoritm="gptq"))


@pytest.mark.parametrize(
    "field", ["format", "algorithm", "settings", "scale_rules", "calibration", "source", "transforms"]
)
def test_fields_left_out_get_their_defaults(field: str) -> None:
    assert Recipe.from_json(_text_without(field)) == Recipe(preset("W4A16"))


@pytest.mark.parametrize("name", ["integer", "mx"])
def test_unknown_scale_rules_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SchemeError, match="Known: f"):
        ScaleRules(**{name: "nearest"})
