"""What this machine is."""

from __future__ import annotations

import pytest
import torch

from fewbit.errors import KernelError
from fewbit.kernels import probe
from fewbit.kernels.probe import cpu_features, cpu_name, this_machine
from fewbit.spec import DEVICES

ZEN3 = {"avx2": True, "fma3": True}
ALDER_LAKE = {**ZEN3, "avx_vnni": True}
SKYLAKE = {**ZEN3, "avx512_f": True}
CASCADE_LAKE = {**SKYLAKE, "avx512_vnni": True}
ZEN5 = {**CASCADE_LAKE, "avx512_bf16": True, "avx_vnni": True}
SAPPHIRE_RAPIDS = {**ZEN5, "amx_tile": True, "amx_int8": True, "amx_bf16": True}
GRAVITON3 = {"neon": True, "i8mm": True, "bf16": True, "sve": True}
PI = {"neon": True}

CPUS = [
    (ZEN3, "AVX2", "x86-avx2", "avx2"),
    (ALDER_LAKE, "AVX2", "x86-avx2-vnni", "avx2 vnni int8"),
    (SKYLAKE, "AVX512", "x86-avx512", "avx2 avx512"),
    (CASCADE_LAKE, "AVX512", "x86-avx512-vnni", "avx2 avx512 vnni int8"),
    (ZEN5, "AVX512", "x86-avx512-vnni", "avx2 avx512 vnni avx512_bf16 bf16 int8"),
    (SAPPHIRE_RAPIDS, "AVX512", "x86-amx", "avx2 avx512 vnni avx512_bf16 bf16 int8 amx"),
    (GRAVITON3, "SVE256", "arm-i8mm", "neon i8mm bf16 int8"),
    (PI, "DEFAULT", "arm", "neon"),
    ({}, "NEON", "arm", "neon"),
    ({}, "DEFAULT", "cpu", ""),
    # Torch told to use less than the CPU has.
    (ZEN5, "DEFAULT", "cpu", "vnni int8"),
    (ZEN5, "AVX2", "x86-avx2-vnni", "avx2 vnni int8"),
]


@pytest.mark.parametrize(("reported", "aten", "name", "features"), CPUS)
def test_cpus(reported: dict[str, bool], aten: str, name: str, features: str) -> None:
    found = cpu_features(reported, aten, exact=True)
    assert found == frozenset(features.split())
    assert cpu_name(found) == name


@pytest.mark.parametrize("reported", [ALDER_LAKE, ZEN5, SAPPHIRE_RAPIDS])
def test_byte_products_that_saturate_are_not_there(reported: dict[str, bool]) -> None:
    assert not cpu_features(reported, "AVX512", exact=False) & {"vnni", "amx", "int8"}


@pytest.mark.parametrize("reported", [ZEN3, ALDER_LAKE, SKYLAKE, ZEN5, SAPPHIRE_RAPIDS])
def test_listed_cpus_have_the_features_of_the_list(reported: dict[str, bool]) -> None:
    aten = "AVX512" if "avx512_f" in reported else "AVX2"
    features = cpu_features(reported, aten, exact=True)
    assert features == DEVICES[cpu_name(features)].features


def test_an_older_torch_without_the_list_is_asked_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for aten, exact, name in (
        ("AVX2", False, "x86-avx2"),
        ("AVX2", True, "x86-avx2-vnni"),
        ("AVX512", True, "x86-avx512-vnni"),
        ("AVX512", False, "x86-avx512"),
        ("DEFAULT", False, "cpu"),
    ):
        assert cpu_name(cpu_features(probe.cpu_capabilities(aten), aten, exact)) == name


def test_this_cpu() -> None:
    found = this_machine("cpu")
    assert found.platform == "cpu"
    assert found.name in DEVICES or found.name == "cpu"
    assert found.software["torch"] == torch.__version__
    assert isinstance(found.software["torch"], str)
    capability = torch.backends.cpu.get_cpu_capability()
    assert found.has("avx512") == capability.startswith(("AVX512", "AMX"))
    assert found.has("avx2") == (capability == "AVX2" or found.has("avx512"))
    if found.has("vnni") or found.has("amx"):
        assert probe.onednn_is_exact()
    assert this_machine("cpu") is found


@pytest.mark.skipif(not this_machine("cpu").has("avx2"), reason="This machine's CPU has no AVX2.")
def test_exactness_is_tried_out() -> None:
    reported = torch.cpu.get_capabilities()
    if not any(reported.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
        assert not probe.onednn_is_exact()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="This machine has no CUDA device.")
def test_this_gpu() -> None:
    found = this_machine("cuda")
    major, minor = torch.cuda.get_device_capability()
    assert (found.platform, found.capability) == ("cuda", major * 10 + minor)
    assert this_machine("auto") == found
    assert found.has("fp8") == (found.capability >= 89)


def test_an_unlisted_gpu_is_like_the_closest_below_it() -> None:
    assert probe._like("sm87", 87).features == DEVICES["sm86"].features
    assert probe._like("sm110", 110).features == DEVICES["sm103"].features
    unlisted = probe._like("sm130", 130)
    assert (unlisted.name, unlisted.capability, unlisted.bandwidth_gbs) == ("sm130", 130, 0.0)


@pytest.mark.parametrize(
    ("outcome", "found"), [("13.0", True), (KernelError("No NVRTC."), False), (ImportError("cuda"), False)]
)
def test_cuda_core_counts_where_it_finds_a_compiler(
    monkeypatch: pytest.MonkeyPatch, outcome: str | Exception, found: bool
) -> None:
    def version() -> str:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(probe.importlib.metadata, "version", lambda _: "1.0")
    monkeypatch.setattr(probe.compiler, "nvrtc_version", version)
    software = probe.installed.__wrapped__()
    assert ("cuda-core" in software) is found
    assert software["triton"] == "1.0"
