"""Families of keys and their declared orders."""

from __future__ import annotations

import pytest
from hypothesis import given

from fewbit.errors import SchemeError
from fewbit.kernels.oracles.family import Family
from fewbit.kernels.registry import families, family_of, linear_kernels
from fewbit.spec import DEVICES, PRESETS, LinearKey
from tests.kernels.layers import KEYS
from tests.spec.keys import LINEAR_KEYS

FAMILY_OF_PRESET = {
    **{f"W{bits}A16{suffix}": "int_wna16" for bits in range(2, 9) for suffix in ("", "_ASYM")},
    "W8A8": "int8",
    **dict.fromkeys(("FP8", "FP8_DYNAMIC", "FP8_BLOCK"), "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4A16"), "nvfp4"),
    **dict.fromkeys(("MXFP4", "MXFP4A16"), "mx"),
    "MXFP8": "mxfp8",
}


def test_families_have_names_of_their_own() -> None:
    names = [family.name for family in families()]
    assert sorted(set(names)) == sorted(names)
    assert set(names) == set(FAMILY_OF_PRESET.values())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_family(name: str) -> None:
    assert family_of(PRESETS[name].rules[0].key).name == FAMILY_OF_PRESET[name]


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_one_family_covers_a_key(key: LinearKey) -> None:
    assert sum(family.covers(key) for family in families()) == 1


@given(LINEAR_KEYS)
def test_exactly_one_family_covers_any_key_of_at_most_eight_bits(key: LinearKey) -> None:
    covering = [family for family in families() if family.covers(key)]
    if key.weight.element.bits <= 8:
        assert covering == [family_of(key)]
    else:
        assert covering == []
        with pytest.raises(SchemeError, match="No family"):
            family_of(key)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_orders_name_backends_of_the_family_once(family: Family) -> None:
    platforms = {device.platform for device in DEVICES.values()}
    assert set(family.priority) <= platforms
    for order in family.priority.values():
        assert all(isinstance(backend, family.backends) for backend in order)
        assert len(set(order)) == len(order)
        assert "reference" not in order, "the reference is last without being listed"
    assert "reference" in list(family.backends)


def test_every_backend_has_a_kernel_and_every_kernel_a_backend() -> None:
    declared = {str(backend) for family in families() for backend in family.backends}
    assert declared == {kernel.backend for kernel in linear_kernels().values()}


def test_unlisted_backends_come_last() -> None:
    family = next(family for family in families() if family.name == "int8")
    positions = [family.position(backend, "cpu") for backend in (*family.priority["cpu"], "reference")]
    assert positions == sorted(positions)
    unlisted = len(family.priority["xpu"])
    assert family.position("onednn", "xpu") == family.position("reference", "xpu") == unlisted
