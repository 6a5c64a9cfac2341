"""What kernels refuse: never by raising, never by looking at the machine, always with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.kernels.interface import EXTRAS, LinearRequest, Refusal
from fewbit.kernels.registry import linear_kernels
from fewbit.spec import CHANNEL, DEVICES, Hardware, Layout
from tests.kernels.layers import KERNELS, KEYS, layer, weight_only
from tests.spec.keys import LINEAR_KEYS

EXTENTS = st.sampled_from([0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 96, 127, 128, 576, 1000, 4096, 14336]) | st.integers(
    0, 1 << 20
)
REQUESTS = st.builds(
    LinearRequest,
    st.sampled_from(list(KEYS.values())) | LINEAR_KEYS,
    EXTENTS,
    EXTENTS,
    dtype=st.sampled_from(["bf16", "f16", "f32"]),
    layout=st.builds(Layout, st.sampled_from(["plain", "dense", "unheard of"]), st.integers(1, 8)),
    has_order=st.booleans(),
    has_input_scale=st.booleans(),
    batch_invariant=st.booleans(),
    extras=st.frozensets(st.sampled_from(EXTRAS)),
)
UNKNOWN = Hardware("bare", "cpu")


@pytest.mark.parametrize("name", KERNELS)
@given(request=REQUESTS, hardware=st.sampled_from([*DEVICES.values(), UNKNOWN]))
def test_a_kernel_consents_or_refuses_with_a_sentence(name: str, request: LinearRequest, hardware: Hardware) -> None:
    kernel = linear_kernels()[name]
    verdict = kernel.refuse(request, hardware)
    assert verdict is None or isinstance(verdict, Refusal)
    assert kernel.refuse(request, hardware) == verdict
    if verdict is not None:
        assert verdict.reason == verdict.reason.strip()
        assert verdict.reason
        assert not verdict.reason.endswith(".")
    assert kernel.prepared_bytes(request) >= 0
    kernel.numerics(request)


@given(request=REQUESTS, hardware=st.sampled_from([*DEVICES.values(), UNKNOWN]))
def test_the_reference_takes_everything(request: LinearRequest, hardware: Hardware) -> None:
    assert linear_kernels()["reference"].refuse(request, hardware) is None


@pytest.mark.parametrize("name", KERNELS)
def test_the_machine_is_never_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the machine was asked")

    for module, question in (
        (torch.cuda, "is_available"),
        (torch.cuda, "get_device_capability"),
        (torch.cpu, "get_capabilities"),
        (torch.backends.cpu, "get_cpu_capability"),
        (torch.backends.mkldnn, "is_available"),
    ):
        monkeypatch.setattr(module, question, asked, raising=False)
    for key in KEYS.values():
        for hardware in DEVICES.values():
            linear_kernels()[name].refuse(LinearRequest(key, 64, 256), hardware)


def reason(kernel: str, key: str, device: str, **changes: object) -> str:
    """Why the kernel refuses a layer, empty where it does not."""
    request = replace(LinearRequest(KEYS[key], 64, 256), **changes)
    verdict = linear_kernels()[kernel].refuse(request, DEVICES[device])
    return "" if verdict is None else verdict.reason


CONSENTS = [
    *[("torch_int4pack", "W4A16 g32", device) for device in ("x86-avx2", "x86-avx512", "x86-avx512-vnni", "x86-amx")],
    *[
        ("torch_int4pack", key, "x86-avx2")
        for key in ("W4A16", "W4A16_ASYM", "W4A16 channel", "W4A16 tensor", "W4A16 biased", "W4A16 blocks", "W4A8")
    ],
    *[("cpu_weight_only", key, device) for key in KEYS for device in ("x86-avx2", "x86-avx512-vnni", "x86-amx")],
    *[("cpu_int8", key, "x86-avx2") for key in ("W8A8", "W8A8 static", "W8A8 dynamic tensor", "W4A8", "W4A4 channel")],
    *[("torch_int4pack", key, "x86-avx2") for key in ("W2A16", "W3A16_ASYM", "W4A16 g512")],
    *[
        ("torch_int8pack", key, "x86-avx2")
        for key in ("W8A16", "W8A16 biased", "W8A16 tensor", "W5A16 channel", "W8A8")
    ],
    *[("torch_int8pack_w8a8", key, "x86-avx2") for key in ("W8A8", "W8A8 static", "W4A4 channel")],
    *[("torch_onednn_int8", "W8A8", device) for device in ("x86-avx2-vnni", "x86-avx512-vnni", "x86-amx")],
    *[
        ("torch_scaled_mm", key, device)
        for key in ("FP8", "FP8_DYNAMIC", "FP8 channel static", "FP8 tensor per token")
        for device in ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
    ],
]


@pytest.mark.parametrize(("kernel", "key", "device"), CONSENTS)
def test_consent(kernel: str, key: str, device: str) -> None:
    assert reason(kernel, key, device) == ""


REFUSALS: list[tuple[str, str, str, dict[str, object], list[str]]] = [
    # Where: the value found and the value needed.
    ("torch_int4pack", "W4A16", "sm90", {}, ["CPU", "cuda"]),
    ("torch_int4pack", "W4A16", "arm", {}, ["avx2", "arm with neon"]),
    ("cpu_weight_only", "W4A16", "sm90", {}, ["CPU", "cuda"]),
    ("cpu_weight_only", "W4A16", "arm-i8mm", {}, ["avx2", "arm-i8mm with"]),
    ("cpu_int8", "W8A8", "arm", {}, ["avx2", "arm with neon"]),
    ("torch_int8pack", "W8A16", "arm-i8mm", {}, ["avx2", "i8mm"]),
    ("torch_onednn_int8", "W8A8", "x86-avx2", {}, ["vnni or amx", "saturate", "x86-avx2 with avx2"]),
    ("torch_onednn_int8", "W8A8", "x86-avx512", {}, ["vnni or amx", "saturate", "avx512"]),
    ("torch_scaled_mm", "FP8", "sm86", {}, ["8.9", "sm86 has 8.6"]),
    ("torch_scaled_mm", "FP8", "sm75", {}, ["8.9", "sm75 has 7.5"]),
    ("torch_scaled_mm", "FP8", "gfx942", {}, ["CUDA", "rocm"]),
    ("torch_scaled_mm", "FP8", "x86-amx", {}, ["CUDA", "cpu"]),
    # Which element, which dtype.
    ("torch_int4pack", "W5A16 channel", "x86-avx2", {}, ["4 bits", "int5"]),
    ("torch_int4pack", "W4A16", "x86-avx2", {"dtype": "f32"}, ["bf16", "f32", "36 ms", "1.2 ms"]),
    ("torch_int4pack", "W4A16", "x86-avx2", {"dtype": "f16"}, ["bf16", "f16"]),
    ("torch_int8pack", "FP8", "x86-avx2", {}, ["integers", "e4m3"]),
    ("cpu_int8", "FP8", "x86-avx2", {}, ["integer weights", "e4m3"]),
    ("cpu_int8", "W8A16", "x86-avx2", {}, ["activation"]),
    ("cpu_int8", "W8A8", "x86-avx2", {"columns": 65537}, ["65536", "65537"]),
    ("torch_onednn_int8", "W8A16", "x86-amx", {}, ["activation"]),
    ("torch_scaled_mm", "W8A8", "sm90", {}, ["e4m3", "int8"]),
    ("torch_scaled_mm", "FP8 weight-only", "sm90", {}, ["activation"]),
    ("torch_scaled_mm", "FP8", "sm90", {"dtype": "f32"}, ["bf16 or f16", "f32"]),
    # Which scales.
    ("torch_int4pack", "W4A16 g16", "x86-avx2", {}, ["K=256", "group16", "32, 64, 128 or 256"]),
    ("torch_int8pack", "W8A16 g32", "x86-avx2", {}, ["each output feature", "group32", "K=256"]),
    ("torch_int8pack", "W8A16_ASYM", "x86-avx2", {}, ["symmetric"]),
    ("torch_int8pack_w8a8", "W4A8", "x86-avx2", {}, ["each output feature", "group32"]),
    ("torch_scaled_mm", "FP8_BLOCK", "sm90", {}, ["block128x128", "not verified"]),
    # Which shape.
    ("torch_int4pack", "W4A16 g32", "x86-avx2", {"rows": 33}, ["N", "multiple of 16", "33"]),
    ("torch_int4pack", "W4A16 channel", "x86-avx2", {"columns": 80}, ["K=80"]),
    ("torch_int4pack", "W4A16", "x86-avx2", {"columns": 1000}, ["K=1000", "group128"]),
    ("torch_scaled_mm", "FP8", "sm90", {"rows": 33}, ["N", "16", "33"]),
    ("torch_scaled_mm", "FP8", "sm90", {"columns": 100}, ["K", "16", "100"]),
    ("torch_int8pack", "W8A16", "x86-avx2", {"rows": 0}, ["empty", "[0, 256]"]),
    # What else the record carries.
    ("torch_int4pack", "W4A16", "x86-avx2", {"has_order": True}, ["act-order"]),
    ("torch_int8pack", "W8A16", "x86-avx2", {"extras": frozenset({"pre_scale"})}, ["pre_scale"]),
    ("torch_int4pack", "W4A16", "x86-avx2", {"extras": frozenset({"codebook"})}, ["codebook"]),
    ("torch_scaled_mm", "FP8", "sm90", {"extras": frozenset({"pre_scale"})}, ["pre_scale"]),
    ("cpu_int8", "W8A8", "x86-avx2", {"extras": frozenset({"minimum"})}, ["minimum"]),
    ("cpu_weight_only", "W4A16", "x86-avx2", {"extras": frozenset({"pre_scale"})}, ["pre_scale"]),
    ("cpu_weight_only", "W4A16", "x86-avx2", {"rows": 0}, ["empty", "[0, 256]"]),
    # Batch invariance.
    ("cpu_weight_only", "W4A16", "x86-avx2", {"batch_invariant": True}, ["every M"]),
    ("torch_scaled_mm", "FP8", "sm90", {"batch_invariant": True}, ["every M"]),
    ("torch_int8pack", "W8A16", "x86-avx2", {"batch_invariant": True, "dtype": "f32"}, ["every M", "f32"]),
    ("torch_int8pack", "W8A16", "x86-avx2", {"batch_invariant": True, "columns": 100}, ["every M", "K=100"]),
    ("torch_onednn_int8", "W8A8 dynamic tensor", "x86-amx", {"batch_invariant": True}, ["every M", "all tokens"]),
]


@pytest.mark.parametrize(("kernel", "key", "device", "changes", "words"), REFUSALS)
def test_refusal(kernel: str, key: str, device: str, changes: dict[str, object], words: list[str]) -> None:
    """B28: what a kernel's tiles cannot take it refuses with the numbers."""
    found = reason(kernel, key, device, **changes)
    assert all(word in found for word in words), found


@pytest.mark.parametrize("kernel", ["cpu_weight_only", "cpu_int8"])
def test_what_is_not_compiled_is_not_consented_to(kernel: str) -> None:
    bare = replace(DEVICES["x86-avx2"], software={})
    verdict = linear_kernels()[kernel].refuse(LinearRequest(KEYS["W4A8"], 64, 256), bare)
    assert verdict is not None
    assert "compiled" in verdict.reason


@pytest.mark.parametrize("element", ["e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_only_one_fp8_element_has_a_product(element: str) -> None:
    key = replace(KEYS["FP8_DYNAMIC"], weight=weight_only(element, CHANNEL).weight)
    verdict = linear_kernels()["torch_scaled_mm"].refuse(LinearRequest(key, 64, 256), DEVICES["sm90"])
    assert verdict is not None
    assert "e4m3" in verdict.reason
    assert element in verdict.reason


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "reference"])
@pytest.mark.parametrize("role", ["pre_scale", "order", "codebook"])
def test_a_record_that_its_request_does_not_tell_of_is_not_prepared_wrongly(name: str, role: str) -> None:
    key = KEYS[{"torch_int4pack": "W4A16 g32", "torch_scaled_mm": "FP8"}.get(name, "W8A8")]
    record = layer(key, 32, 64)
    request = LinearRequest.of(record, key)
    with pytest.raises(ValueError, match=role):
        linear_kernels()[name].prepare(record.with_tensors(**{role: torch.ones(64)}), request)


def test_a_request_tells_all_of_its_record() -> None:
    key = KEYS["FP8"]
    record = layer(key, 32, 64)
    plain = LinearRequest.of(record, key, "f16")
    assert (plain.rows, plain.columns, plain.dtype, plain.has_input_scale) == (32, 64, "f16", True)
    assert plain.extras == frozenset()
    assert not plain.has_order
    laden = LinearRequest.of(record.with_tensors(pre_scale=torch.ones(64), order=torch.zeros(64)), key)
    assert laden.extras == {"pre_scale"}
    assert laden.has_order
