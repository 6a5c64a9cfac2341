"""Keys: one text form that parses back, and what it says about storage."""

from __future__ import annotations

import pytest
from hypothesis import given

from fewbit.errors import SchemeError
from fewbit.spec import ELEMENTS, LinearKey, QuantKey, group
from tests.spec.keys import LINEAR_KEYS, QUANT_KEYS


@given(QUANT_KEYS)
def test_the_text_form_of_a_key_parses_back(key: QuantKey) -> None:
    assert QuantKey.parse(str(key)) == key


@given(LINEAR_KEYS)
def test_the_text_form_of_a_layers_key_parses_back(key: LinearKey) -> None:
    assert LinearKey.parse(str(key)) == key


@given(QUANT_KEYS, QUANT_KEYS)
def test_keys_are_equal_where_their_texts_are(one: QuantKey, other: QuantKey) -> None:
    assert (one == other) == (str(one) == str(other))
    assert len({one, other}) == len({str(one), str(other)})


@pytest.mark.parametrize(
    "text",
    [
        "int4:group64:bf16",
        "int4:asym:group32:f16",
        "e4m3:token:f32:dynamic",
        "e2m1:group16:e4m3/tensor:f32",
        "e2m1:group32:e8m0",
        "e2m1:group16:e4m3:dynamic/tensor:f32",
        "e4m3:block128x128:bf16 * e4m3:group128:f32:dynamic",
    ],
)
def test_the_canonical_form_is_stable(text: str) -> None:
    assert str(LinearKey.parse(text)) == text


def test_parts_of_a_parsed_key() -> None:
    key = LinearKey.parse("e2m1:group16:e4m3/tensor:f32 * int8:asym:token:f32:dynamic")
    assert key.weight.element is ELEMENTS["e2m1"]
    assert key.weight.granularity == group(16)
    assert key.weight.global_scale is not None
    assert key.weight.symmetric
    assert not key.weight.is_dynamic
    assert key.activation is not None
    assert key.activation.is_dynamic
    assert not key.activation.symmetric


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Unknown element format ''"),
        ("int4", "Cannot read the scale ''"),
        ("int4:group64", "Cannot read the scale 'group64'"),
        ("int4:group64:bf16:static", "Cannot read the scale"),
        ("int9:group64:bf16", "Unknown element format 'int9'"),
        ("int4:group64:bf61", "Unknown element format 'bf61'"),
        ("int4:grp64:bf16", "Unknown granularity 'grp64'"),
        ("int4:sym:group64:bf16", "Cannot read the scale"),
        ("int4:group64:bf16/", "Cannot read the scale ''"),
        ("e2m1:group16:e4m3/tensor", "Cannot read the scale 'tensor'"),
        ("e2m1:group16:e4m3/tensor:f32/tensor:f32", "Cannot read the scale"),
        ("int4:group64:bf16 * ", "Unknown element format"),
        (" * int8:token:f32:dynamic", "Unknown element format ''"),
        ("int8:channel:bf16 * int8:token:f32:dynamic * int8:token:f32", "Cannot read the scale"),
    ],
)
def test_what_is_no_key_is_refused_by_its_wrong_part(text: str, named: str) -> None:
    with pytest.raises(SchemeError) as caught:
        LinearKey.parse(text)
    assert named in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "shape", "bits"),
    [
        ("int4:group128:bf16", (512, 1024), 4 + 16 / 128),
        ("int4:asym:group32:f16", (512, 1024), 4 + (16 + 4) / 32),
        ("int8:channel:bf16", (512, 1024), 8 + 16 / 1024),
        ("e2m1:group32:e8m0", (512, 1024), 4.25),
        ("e2m1:group16:e4m3/tensor:f32", (512, 1024), 4.5 + 32 / (512 * 1024)),
        ("e4m3:block128x128:f32", (130, 200), 8 + 4 * 32 / (130 * 200)),
        ("int4:group16:f16", (8, 24), 4 + 2 * 16 / 24),  # two groups, the last one short
        ("e4m3:tensor:f32", (4, 8, 16), 8 + 32 / 128),  # one scale for each of the stacked matrices
    ],
)
def test_bits_per_weight_counts_scales(text: str, shape: tuple[int, ...], bits: float) -> None:
    assert QuantKey.parse(text).bits_per_weight(shape) == pytest.approx(bits)


def test_bits_per_weight_of_nothing_is_finite() -> None:
    assert QuantKey.parse("int4:group128:bf16").bits_per_weight((0, 128)) == 4


def test_changing_the_first_level_leaves_the_rest() -> None:
    key = QuantKey.parse("e2m1:asym:group16:e4m3/tensor:f32")
    assert str(key.with_granularity(group(32))) == "e2m1:asym:group32:e4m3/tensor:f32"
    assert str(key.with_scale_element(ELEMENTS["f16"])) == "e2m1:asym:group16:f16/tensor:f32"
