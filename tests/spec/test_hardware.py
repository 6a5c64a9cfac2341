"""The table of devices."""

from __future__ import annotations

import dataclasses

import pytest

from fewbit.errors import SchemeError
from fewbit.spec import DEVICES, Hardware, device

EXPECTED = {
    "cuda": ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"],
    "rocm": ["gfx90a", "gfx942", "gfx950"],
    "xpu": ["xpu"],
    "cpu": ["x86-avx2", "x86-avx512", "x86-amx", "arm"],
}
FEATURES = {
    *("bf16", "int8", "fp8", "fp8_fnuz", "fp4", "mx"),
    *("avx2", "avx512", "vnni", "avx512_bf16", "amx", "neon", "i8mm"),
}


@pytest.mark.parametrize(
    ("platform", "name"), [(platform, name) for platform in EXPECTED for name in EXPECTED[platform]]
)
def test_the_devices_people_have_exist(platform: str, name: str) -> None:
    assert device(name).platform == platform


@pytest.mark.parametrize("known", DEVICES.values(), ids=lambda known: known.name)
def test_entries_are_whole(known: Hardware) -> None:
    assert DEVICES[known.name] is known
    assert known.platform in EXPECTED
    assert known.features <= FEATURES
    assert (known.capability > 0) == (known.platform in ("cuda", "rocm"))
    assert (known.bandwidth_gbs > 0) == (known.bf16_tflops > 0) == (known.capability > 0)
    if known.platform == "cuda":
        assert known.name == f"sm{known.capability}"


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("sm75", ["int8"], ["bf16", "fp8", "fp4"]),
        ("sm80", ["bf16", "int8"], ["fp8"]),
        ("sm89", ["fp8"], ["fp4", "mx"]),
        ("sm90", ["fp8"], ["fp4", "mx"]),
        ("sm100", ["fp4", "mx", "int8"], []),
        ("sm103", ["fp4", "mx"], ["int8"]),
        ("sm120", ["fp4", "mx"], []),
        ("gfx942", ["fp8_fnuz"], ["fp8", "fp4"]),
        ("gfx950", ["fp8", "fp4", "mx"], ["fp8_fnuz"]),
        ("x86-avx2", ["avx2"], ["avx512", "amx"]),
        ("x86-avx512", ["avx2", "avx512"], ["amx"]),
        ("x86-amx", ["avx512", "amx", "bf16"], []),
        ("arm", ["neon"], ["avx2"]),
    ],
)
def test_features(name: str, has: list[str], lacks: list[str]) -> None:
    assert device(name).has(*has)
    assert not any(device(name).has(feature) for feature in lacks)


@pytest.mark.parametrize("spelling", ["sm90", "SM90", "sm_90", " sm90 "])
def test_spellings(spelling: str) -> None:
    assert device(spelling) is DEVICES["sm90"]


@pytest.mark.parametrize(
    ("typo", "meant"), [("sm09", "sm90"), ("gfx924", "gfx942"), ("x86-avx215", "x86-avx2"), ("xpuu", "xpu")]
)
def test_a_typo_gets_the_closest_name(typo: str, meant: str) -> None:
    with pytest.raises(SchemeError, match=f"Did you mean '{meant}'"):
        device(typo)


def test_software_is_added_to_a_copy() -> None:
    before = device("sm120")
    after = before.with_software("flashinfer", "humming")
    assert set(after.software) == {*before.software, "flashinfer", "humming"}
    assert "flashinfer" not in before.software
    assert dataclasses.replace(after, software=before.software) == before
