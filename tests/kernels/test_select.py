"""The choice among kernels: what comes first, what the user may ask, and what the answer says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import KernelError
from fewbit.kernels.interface import LinearKernel, LinearRequest, Numerics, Refusal
from fewbit.kernels.registry import family_of, linear_kernels
from fewbit.kernels.select import Choice, Preference, choose
from fewbit.spec import DEVICES, PRESETS, Hardware, LinearKey
from tests.kernels.layers import KEYS

AVX2, H200 = DEVICES["x86-avx2"], DEVICES["sm90"]
UNCOMPILED = replace(AVX2, name="uncompiled", software={})
"""The same CPU where fewbit was installed without a compiler."""


def chosen(
    key: LinearKey | str,
    hardware: Hardware,
    preference: Preference = Preference(),
    rows: int = 64,
    columns: int = 256,
    dtype: str = "bf16",
) -> Choice:
    key = KEYS[key] if isinstance(key, str) else key
    request = LinearRequest(key, rows, columns, dtype)
    return choose(request, hardware, linear_kernels().values(), family_of(key), preference)


@pytest.mark.parametrize("hardware", DEVICES.values(), ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("key", [*PRESETS, "W4A8", "W8A16 g32", "FP8 weight-only", "W4A4 channel"])
def test_everything_that_can_be_stored_runs_on_everything(key: str, hardware: Hardware) -> None:
    for rows, columns in ((64, 256), (33, 65), (4096, 14336)):
        choice = chosen(key, hardware, rows=rows, columns=columns)
        assert choice.kernel is choice.verdicts[0].kernel
        assert choice.verdicts[0].refusal is None
        assert {verdict.kernel.name for verdict in choice.verdicts} == set(linear_kernels())
        assert_ordered(choice)


def assert_ordered(choice: Choice) -> None:
    """Admissible ones first, in the order of their classes; the reference is the last of them."""
    consents = [verdict.refusal is None for verdict in choice.verdicts]
    assert consents == sorted(consents, reverse=True)
    admissible = [verdict for verdict in choice.verdicts if verdict.refusal is None]
    classes = [verdict.numerics for verdict in admissible]
    assert classes == sorted(classes)
    assert admissible[-1].kernel.reference
    assert choice.numerics is classes[0]


EXPECTED = [
    ("W4A16 g32", "x86-avx2", "cpu_weight_only", Numerics.KEEPS),
    ("W4A16 g32", "uncompiled", "torch_int4pack", Numerics.KEEPS),
    ("W4A16_ASYM", "x86-amx", "cpu_weight_only", Numerics.KEEPS),
    ("W3A16", "uncompiled", "torch_int4pack", Numerics.KEEPS),
    ("W8A16", "x86-avx2", "cpu_weight_only", Numerics.KEEPS),
    ("W8A16", "uncompiled", "torch_int8pack", Numerics.KEEPS),
    ("W8A8", "x86-avx2", "cpu_int8", Numerics.KEEPS),
    ("W8A8", "x86-avx512", "cpu_int8", Numerics.KEEPS),
    ("W8A8", "uncompiled", "torch_int8pack_w8a8", Numerics.KEEPS),
    ("W8A8", "x86-avx2-vnni", "cpu_int8", Numerics.KEEPS),
    ("W8A8", "x86-avx512-vnni", "cpu_int8", Numerics.KEEPS),
    ("W8A8", "x86-amx", "cpu_int8", Numerics.KEEPS),
    ("W4A8", "x86-avx2", "cpu_int8", Numerics.KEEPS),
    ("W4A8", "uncompiled", "torch_int4pack", Numerics.DROPS_ACTIVATION),
    ("FP8_DYNAMIC", "x86-avx2", "cpu_weight_only", Numerics.DROPS_ACTIVATION),
    ("FP8_BLOCK", "x86-avx512", "cpu_weight_only", Numerics.DROPS_ACTIVATION),
    ("NVFP4A16", "x86-avx2", "cpu_weight_only", Numerics.KEEPS),
    ("MXFP4", "x86-amx", "cpu_weight_only", Numerics.DROPS_ACTIVATION),
    ("MXFP8", "x86-avx2", "cpu_weight_only", Numerics.DROPS_ACTIVATION),
    ("NVFP4", "uncompiled", "reference", Numerics.REFERENCE),
    ("W4A4 channel", "x86-amx", "cpu_int8", Numerics.KEEPS),
    ("FP8", "sm89", "triton_fp8", Numerics.KEEPS),
    ("FP8_DYNAMIC", "sm90", "triton_fp8", Numerics.KEEPS),
    ("FP8_DYNAMIC", "sm120", "triton_fp8", Numerics.KEEPS),
    ("FP8_DYNAMIC", "sm86", "triton_tiles_quantized", Numerics.KEEPS),
    ("W8A8", "sm90", "triton_int8", Numerics.KEEPS),
    ("FP8_BLOCK", "sm90", "triton_fp8", Numerics.KEEPS),
    ("FP8_BLOCK", "sm86", "triton_tiles", Numerics.DROPS_ACTIVATION),
    ("W4A16", "sm80", "triton_tiles", Numerics.KEEPS),
    ("W3A16_ASYM", "sm120", "triton_tiles", Numerics.KEEPS),
    ("NVFP4A16", "sm90", "triton_tiles", Numerics.KEEPS),
    ("W4A16", "sm75", "reference", Numerics.REFERENCE),
    ("FP8", "gfx942", "reference", Numerics.REFERENCE),
    ("W8A8", "arm-i8mm", "reference", Numerics.REFERENCE),
    ("W4A16", "xpu", "reference", Numerics.REFERENCE),
    ("W8A8 asym", "sm90", "triton_int8", Numerics.KEEPS),
    ("W8A8", "sm103", "triton_tiles_quantized", Numerics.KEEPS),
    ("W4A8", "sm80", "triton_int8", Numerics.KEEPS),
    ("W4AF8 g128", "sm90", "triton_fp8", Numerics.KEEPS),
    ("W4AF8 g128", "sm80", "triton_tiles_quantized", Numerics.KEEPS),
    ("MXFP4 AF8", "sm90", "triton_fp8", Numerics.KEEPS),
    ("NVFP4", "sm100", "torch_scaled_mm_groups", Numerics.KEEPS),
    ("NVFP4", "sm120", "torch_scaled_mm_groups", Numerics.KEEPS),
    ("NVFP4", "sm121", "torch_scaled_mm_groups", Numerics.KEEPS),
    ("MXFP8", "sm103", "torch_scaled_mm_groups", Numerics.KEEPS),
    ("NVFP4", "sm90", "triton_tiles", Numerics.DROPS_ACTIVATION),
    ("MXFP4", "sm120", "triton_tiles", Numerics.DROPS_ACTIVATION),
]


@pytest.mark.parametrize(("key", "device", "kernel", "numerics"), EXPECTED)
def test_the_kernel_people_get(key: str, device: str, kernel: str, numerics: Numerics) -> None:
    choice = chosen(key, UNCOMPILED if device == "uncompiled" else DEVICES[device])
    assert (choice.kernel.name, choice.numerics) == (kernel, numerics)
    assert bool(choice.note) == (numerics is not Numerics.KEEPS or bool(choice.kernel.untested))


def test_fp8_on_a_device_without_it_says_what_is_missing() -> None:
    verdicts = {verdict.kernel.name: verdict for verdict in chosen("FP8", DEVICES["sm86"]).verdicts}
    assert (
        verdicts["triton_fp8"].refusal
        == verdicts["torch_scaled_mm"].refusal
        == Refusal("FP8 arithmetic needs compute capability 8.9, sm86 has 8.6")
    )


@given(st.permutations(list(linear_kernels().values())), st.sampled_from(list(KEYS)), st.sampled_from(list(DEVICES)))
def test_the_order_of_candidates_does_not_matter(candidates: list[LinearKernel], key: str, device: str) -> None:
    request = LinearRequest(KEYS[key], 64, 256)
    found = choose(request, DEVICES[device], candidates, family_of(KEYS[key]))
    assert [verdict.kernel.name for verdict in found.verdicts] == [
        verdict.kernel.name for verdict in chosen(key, DEVICES[device]).verdicts
    ]


@pytest.mark.parametrize("hardware", DEVICES.values(), ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("key", KEYS)
def test_no_kernel_that_changes_numbers_precedes_one_that_keeps_them(key: str, hardware: Hardware) -> None:
    """W4A4 before W4A16 on sm120, emulation after everything that the hardware does itself."""
    assert_ordered(chosen(key, hardware))


@pytest.mark.parametrize("key", ["NVFP4", "MXFP4", "MXFP8"])
def test_block_scaled_activations_are_emulated_where_that_is_asked_for(key: str) -> None:
    dropped = chosen(key, H200)
    assert dropped.numerics is Numerics.DROPS_ACTIVATION
    assert "strict, or asking for emulation, runs triton_tiles_emulated" in dropped.note
    for preference in (Preference(strict=True), Preference("emulation"), Preference(backends={"W4": "x"}, strict=True)):
        choice = chosen(key, H200, preference)
        assert (choice.kernel.name, choice.numerics) == ("triton_tiles_emulated", Numerics.EMULATES)
    assert chosen(key, DEVICES["sm75"], Preference(strict=True), dtype="f16").kernel.name == "triton_tiles_emulated"


# What the user asks.


def test_sizes_that_no_tile_divides_run_on_the_next_kernel_b28() -> None:
    """B28: 24 rows and 40 columns; the verdicts hold the numbers."""
    choice = chosen("W4A16 g32", UNCOMPILED, rows=24, columns=40)
    assert choice.kernel.name == "reference"
    refused = [str(verdict.refusal) for verdict in choice.verdicts if verdict.refusal]
    assert any("multiple of 16, found 24" in reason for reason in refused)


def test_a_backend_or_a_kernel_can_be_forced() -> None:
    assert chosen("W8A8", DEVICES["x86-amx"], Preference("torch_int8pack")).kernel.name == "torch_int8pack_w8a8"
    assert chosen("W8A8", DEVICES["x86-amx"], Preference("torch_int8pack_w8a8")).kernel.name == "torch_int8pack_w8a8"
    assert chosen("W8A8", DEVICES["x86-amx"], Preference("reference")).kernel.name == "reference"
    others = chosen("W8A8", AVX2, Preference("reference")).verdicts[1:]
    assert all(verdict.refusal == Refusal("reference was asked for") for verdict in others)


def test_a_backend_can_be_forced_for_a_family_or_a_key() -> None:
    wanted = Preference(backends={"nvfp4": "emulation", str(KEYS["W8A8"]): "triton_tiles_quantized"})
    assert chosen("NVFP4", H200, wanted).kernel.name == "triton_tiles_emulated"
    assert chosen("W8A8", H200, wanted).kernel.name == "triton_tiles_quantized"
    assert chosen("W4A8 g128", H200, wanted).kernel.name == "triton_int8"
    with pytest.raises(KernelError, match="nothing to emulate"):
        chosen("NVFP4A16", H200, wanted)


@pytest.mark.parametrize(
    ("name", "key", "device", "words"),
    [
        ("marlin", "W4A16", "sm90", ["not part of fewbit", "vLLM", "triton_tiles"]),
        ("machete", "W4A16", "sm80", ["9.0", "8.0"]),
        ("cutlass", "FP8", "sm90", ["not part of fewbit", "triton_fp8"]),
        ("b12x", "NVFP4", "sm120", ["not part of fewbit", "torch_scaled_mm_groups"]),
        ("flashinfer_trtllm", "NVFP4", "sm100", ["not part of fewbit", "order"]),
        ("deep_gemm", "FP8_BLOCK", "sm90", ["not part of fewbit", "triton_fp8"]),
        ("aiter", "FP8", "sm90", ["rocm", "cuda"]),
        ("aiter", "FP8", "gfx942", ["AMD"]),
        ("xpu", "W4A16", "xpu", ["Intel"]),
        ("marlin", "W3A16", "sm90", ["int4", "int3"]),
        ("deep_gemm", "FP8 weight-only", "sm90", ["activations", "none"]),
    ],
)
def test_kernels_of_other_projects_say_why_they_are_not_here(
    name: str, key: str, device: str, words: list[str]
) -> None:
    verdicts = {verdict.kernel.name: verdict for verdict in chosen(key, DEVICES[device]).verdicts}
    assert all(word in str(verdicts[name].refusal) for word in words), verdicts[name].refusal
    with pytest.raises(KernelError, match=r"not part of fewbit|runs|multiplies|takes"):
        chosen(key, DEVICES[device], Preference(name))


def test_humming_is_there_where_its_package_is() -> None:
    with_it = H200.with_software("humming-kernels")
    for key in ("W4AF8 g128", "W4A16", "W3A16", "NVFP4A16", "MXFP4A16", "FP8_DYNAMIC"):
        choice = chosen(key, with_it, Preference("humming"))
        assert (choice.kernel.name, choice.numerics) == ("humming", Numerics.KEEPS)
        assert chosen(key, with_it).kernel.name != "humming", "what was not measured does not go first"
    for key, rows, words in (("W4A16_ASYM", 64, "symmetric"), ("W8A8", 64, "e4m3 by token"), ("W4A16", 33, "found 33")):
        with pytest.raises(KernelError, match=words):
            chosen(key, with_it, Preference("humming"), rows=rows)
    with pytest.raises(KernelError, match="humming-kernels is not installed"):
        chosen("W4A16", H200, Preference("humming"))


def test_a_forced_backend_that_refuses_says_why_and_nothing_else() -> None:
    with pytest.raises(KernelError, match=r"sm86 has 8\.6") as caught:
        chosen("FP8", DEVICES["sm86"], Preference("torch_scaled_mm"))
    assert "was asked for" not in str(caught.value)
    assert caught.value.hint
    with pytest.raises(KernelError, match="saturate"):
        chosen("W8A8", AVX2, Preference("onednn"))


@pytest.mark.parametrize(("typo", "meant"), [("onedn", "onednn"), ("Torch_Int4Pak", "torch_int4pack"), ("ref", "ref")])
def test_an_unknown_backend_gets_a_suggestion(typo: str, meant: str) -> None:
    with pytest.raises(KernelError, match=f"Unknown backend '{typo}'") as caught:
        chosen("W8A8", AVX2, Preference(typo))
    assert meant in caught.value.hint


def test_a_disabled_kernel_is_passed_over() -> None:
    without = Preference(disabled=frozenset({"torch_int8pack_w8a8"}))
    choice = chosen("W8A8", UNCOMPILED, without)
    assert choice.kernel.name == "torch_int8pack"
    assert choice.numerics is Numerics.DROPS_ACTIVATION
    reasons = {verdict.kernel.name: verdict.refusal for verdict in choice.verdicts}
    assert reasons["torch_int8pack_w8a8"] == Refusal("disabled by request")


def test_strict_refuses_to_drop_activations() -> None:
    assert chosen("W4A8", UNCOMPILED).numerics is Numerics.DROPS_ACTIVATION
    strict = chosen("W4A8", UNCOMPILED, Preference(strict=True))
    assert strict.kernel.name == "reference"
    with pytest.raises(KernelError, match="strict"):
        chosen("W4A8", AVX2, Preference("torch_int4pack", strict=True))
    assert chosen("W4A8", AVX2, Preference(strict=True)).kernel.name == "cpu_int8"


def test_nothing_left_lists_every_reason() -> None:
    everything = Preference(disabled=frozenset(linear_kernels()))
    with pytest.raises(KernelError) as caught:
        chosen("W8A8", AVX2, everything)
    assert all(name in str(caught.value) for name in linear_kernels())


# Measured costs, on kernels made for the purpose.


class Made(LinearKernel):
    """Takes everything."""

    name: ClassVar[str] = "made"
    backend: ClassVar[str] = "made"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return None

    def prepare(self, record, request):
        raise NotImplementedError

    def run(self, x, prepared, bias):
        raise NotImplementedError


def made(name: str, **attributes: object) -> LinearKernel:
    return type(name, (Made,), {"name": name, "backend": name, **attributes})()


KEEPS_A, KEEPS_B = made("keeps_a"), made("keeps_b")
DROPS, EMULATES = made("drops", weight_only=True), made("emulates", emulates=True)
REFERENCE = made("last", reference=True)
REFUSES = made("never", refuse=lambda *_: Refusal("never"))


def order(costs: dict[str, float], candidates: list[LinearKernel], key: str = "W8A8") -> list[str]:
    """Names of the admissible kernels, best first."""
    request = LinearRequest(KEYS[key], 64, 256)
    found = choose(request, AVX2, candidates, family_of(KEYS[key]), Preference(costs=costs))
    return [verdict.kernel.name for verdict in found.verdicts if verdict.refusal is None]


def test_classes_come_before_costs() -> None:
    everything = [REFERENCE, EMULATES, DROPS, KEEPS_B, KEEPS_A]
    assert order({}, everything) == ["keeps_a", "keeps_b", "drops", "emulates", "last"]
    costs = {"last": 1, "emulates": 2, "drops": 3, "keeps_a": 5, "keeps_b": 4}
    assert order(costs, everything) == ["keeps_b", "keeps_a", "drops", "emulates", "last"]
    random.shuffle(everything)
    assert order(costs, everything) == ["keeps_b", "keeps_a", "drops", "emulates", "last"]


def test_without_an_activation_key_there_is_nothing_to_drop_or_emulate() -> None:
    assert order({}, [REFERENCE, EMULATES, DROPS, KEEPS_A], "W8A16") == ["drops", "emulates", "keeps_a", "last"]


def test_costs_decide_only_where_every_admissible_kernel_of_the_class_has_one() -> None:
    pair = [KEEPS_A, KEEPS_B]
    assert order({"keeps_b": 1}, pair) == ["keeps_a", "keeps_b"]
    assert order({"keeps_a": 9, "keeps_b": 1}, pair) == ["keeps_b", "keeps_a"]
    assert order({"keeps_a": 9, "keeps_b": 1}, [*pair, REFUSES]) == ["keeps_b", "keeps_a"]
    # Another class without measurements takes nothing away from this one.
    assert order({"keeps_a": 9, "keeps_b": 1}, [*pair, DROPS]) == ["keeps_b", "keeps_a", "drops"]


def test_costs_are_in_the_verdicts() -> None:
    request = LinearRequest(KEYS["W8A8"], 64, 256)
    preference = Preference(costs={"keeps_a": 2.5})
    found = choose(request, AVX2, [KEEPS_A, KEEPS_B], family_of(KEYS["W8A8"]), preference)
    assert {verdict.kernel.name: verdict.cost_us for verdict in found.verdicts} == {"keeps_a": 2.5, "keeps_b": None}


def test_declared_order_decides_before_names_and_costs_before_both() -> None:
    onednn, other = made("zz", backend="onednn"), made("aa", backend="torch_int8pack")
    assert order({}, [other, onednn]) == ["zz", "aa"]
    assert order({"aa": 1, "zz": 2}, [other, onednn]) == ["aa", "zz"]
    unlisted = made("a_unlisted")
    assert order({}, [unlisted, other, onednn]) == ["zz", "aa", "a_unlisted"]


def test_software_that_a_kernel_needs_is_looked_for() -> None:
    bare = replace(H200, software={"torch": "2.11"})
    for key in KEYS:
        assert chosen(key, bare).kernel.backend != "triton"
        assert chosen(key, H200).kernel is chosen(key, H200.with_software("flashinfer-python")).kernel, "not for Hopper"
    assert chosen("W4A16", bare.with_software("triton")).kernel.name == "triton_tiles"
