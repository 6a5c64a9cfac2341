"""Presets under the names that people type."""

from __future__ import annotations

import pytest

from fewbit.errors import SchemeError
from fewbit.spec import PRESETS, preset

NAMES_PEOPLE_KNOW = [
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8"),
    *(f"W{bits}A16" for bits in range(2, 9)),
]


@pytest.mark.parametrize("name", NAMES_PEOPLE_KNOW)
def test_the_names_people_know_exist(name: str) -> None:
    assert preset(name).name == name


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_case_dashes_and_underscores_do_not_matter(name: str) -> None:
    for spelling in (name, name.lower(), name.title(), name.replace("_", "-"), name.replace("_", ""), f" {name} "):
        assert preset(spelling) is PRESETS[name]
    assert preset(name.replace("A16", "-a16")) is PRESETS[name]


@pytest.mark.parametrize(
    ("alias", "name"),
    [("int8", "W8A8"), ("INT4", "W4A16"), ("fp8-per-tensor", "FP8"), ("FP8_PER_CHANNEL", "FP8_DYNAMIC")],
)
def test_aliases(alias: str, name: str) -> None:
    assert preset(alias) is PRESETS[name]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("W4A61", "W4A16"),
        ("w4a16_asim", "W4A16_ASYM"),
        ("NVPF4", "NVFP4"),
        ("fp8-dinamic", "FP8_DYNAMIC"),
        ("mfxp8", "MXFP8"),
    ],
)
def test_a_typo_gets_the_closest_name(typo: str, meant: str) -> None:
    with pytest.raises(SchemeError, match=f"Did you mean '{meant}'") as caught:
        preset(typo)
    assert repr(typo) in caught.value.message


def test_a_name_close_to_none_gets_the_list() -> None:
    with pytest.raises(SchemeError) as caught:
        preset("zzz")
    assert all(name in caught.value.hint for name in PRESETS)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("W4A16", "int4:group128:bf16"),
        ("W4A16_ASYM", "int4:asym:group128:bf16"),
        ("W2A16", "int2:group128:bf16"),
        ("W8A16", "int8:channel:bf16"),
        ("W8A8", "int8:channel:bf16 * int8:token:f32:dynamic"),
        ("FP8", "e4m3:tensor:bf16 * e4m3:tensor:f32"),
        ("FP8_DYNAMIC", "e4m3:channel:bf16 * e4m3:token:f32:dynamic"),
        ("FP8_BLOCK", "e4m3:block128x128:bf16 * e4m3:group128:f32:dynamic"),
        ("NVFP4A16", "e2m1:group16:e4m3/tensor:f32"),
        ("NVFP4", "e2m1:group16:e4m3/tensor:f32 * e2m1:group16:e4m3:dynamic/tensor:f32"),
        ("MXFP4A16", "e2m1:group32:e8m0"),
        ("MXFP4", "e2m1:group32:e8m0 * e2m1:group32:e8m0:dynamic"),
        ("MXFP8", "e4m3:group32:e8m0 * e4m3:group32:e8m0:dynamic"),
    ],
)
def test_what_the_names_mean(name: str, key: str) -> None:
    assert str(preset(name).key_for("model.layers.0.q_proj")) == key


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_leaves_the_head_and_quantizes_linear_layers_only(name: str) -> None:
    scheme = preset(name)
    assert scheme.name == name
    assert scheme.key_for("lm_head") is None
    assert scheme.key_for("model.norm", "RMSNorm") is None
    key = scheme.key_for("model.layers.0.q_proj")
    assert key is not None
    assert not key.weight.is_dynamic
    assert (key.activation is None) == ("A16" in name)
