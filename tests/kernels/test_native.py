"""The compiled CPU kernels: every instruction set that this CPU has, exactness, threads, and their absence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewbit.errors import CheckpointError
from fewbit.kernels import native, probe
from fewbit.kernels.interface import LinearRequest, Prepared
from fewbit.kernels.registry import linear_kernels
from fewbit.numerics import QuantizedTensor, dequantize, finite_codes
from fewbit.spec import CHANNEL, ELEMENTS, PRESETS, TENSOR, LinearKey, QuantKey, ScaleSpec, group
from fewbit.spec.element import BF16, F16, F32
from fewbit.spec.granularity import Granularity
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer, needs_extension

FOUND = native.extension()
SETS = [] if isinstance(FOUND, native.Absent) else list(FOUND.instruction_sets)
WEIGHT_ONLY, INT8 = linear_kernels()["cpu_weight_only"], linear_kernels()["cpu_int8"]

READABLE = [
    element
    for element in ELEMENTS.values()
    if element.bits <= 8 and not element.is_exponent_only  # every element a weight may have
]
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 29)
MANY = (24, 258)
"""Tokens that are multiplied by panels, and more than are multiplied at a time."""
INTEGER_ACTIVATIONS = QuantKey(ELEMENTS["int8"], ScaleSpec(F32, TENSOR))
PER_TOKEN = PRESETS["W8A8"].rules[0].key.activation


@pytest.fixture(params=SETS or [pytest.param("none", marks=needs_extension)])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced(request.param):
        yield request.param


def prepared(record: QuantizedTensor, key: LinearKey, dtype: str = "f32") -> Prepared:
    kernel = INT8 if key.activation is not None else WEIGHT_ONLY
    return kernel.prepare(record, LinearRequest.of(record, key, dtype))


def weight_key(element: str, scale: ScaleSpec, symmetric: bool = True) -> LinearKey:
    return LinearKey(QuantKey(ELEMENTS[element], scale, symmetric=symmetric))


@pytest.mark.parametrize("element", READABLE, ids=str)
@pytest.mark.parametrize("scale", [BF16, F16, F32], ids=str)
def test_every_code_is_read_exactly(instruction_set: str, element, scale) -> None:
    """One input of one after another picks the weights out, without any sum."""
    for granularity in (CHANNEL, group(24), group(40)):
        symmetric = [True, False] if element.is_integer else [True]
        for zero_points in symmetric:
            key = LinearKey(QuantKey(element, ScaleSpec(scale, granularity), symmetric=zero_points))
            record = layer(replace(key), 19, 270)
            assert len(record["codes"].view(torch.uint8).unique()) == len(finite_codes(element))
            for dtype in ("f32", "bf16"):
                picked = WEIGHT_ONLY.run(torch.eye(270, dtype=DTYPES[dtype]), prepared(record, key, dtype), None)
                assert torch.equal(picked.T, dequantize(record).to(DTYPES[dtype])), f"{key}"


@pytest.mark.parametrize("key", KEYS)
def test_every_tile_width_of_every_instruction_set(instruction_set: str, key: str) -> None:
    for kernel in (WEIGHT_ONLY, INT8):
        for rows, columns, widths, dtypes in (
            (16, 64, WIDTHS, ["f16"]),
            (33, 129, WIDTHS, ["f32", "bf16"]),
            (90, 600, MANY, ["bf16"]),
        ):
            record = layer(KEYS[key], rows, columns)
            for dtype in dtypes:
                request = LinearRequest.of(record, KEYS[key], dtype)
                if kernel.refuse(request, probe.this_machine("cpu")) is not None:
                    continue
                ready = kernel.prepare(record, request)
                for width in widths:
                    x = inputs((width, columns), DTYPES[dtype])
                    assert_close(kernel.run(x, ready, None), expected(x, record, request.key, None, kernel), dtype)


def integer_layer(element: str, code: int | None, columns: int) -> tuple[QuantizedTensor, LinearKey]:
    """A layer whose numbers are whole: scales of one, and one code everywhere or random ones."""
    weight = QuantKey(ELEMENTS[element], ScaleSpec(F32, CHANNEL))
    if code is None:
        codes = torch.randint(int(weight.element.min), int(weight.element.max) + 1, (20, columns))
    else:
        codes = torch.full((20, columns), code)
    record = QuantizedTensor(
        weight,
        (20, columns),
        {"codes": codes.to(torch.int8), "scale": torch.ones(20, 1), "input_scale": torch.tensor(1.0)},
    )
    return record, LinearKey(weight, INTEGER_ACTIVATIONS)


@pytest.mark.parametrize("element", ["int8", "int4"])
@pytest.mark.parametrize("code", ["lowest", "highest", "random"])
@pytest.mark.parametrize("number", [-128, 127, None])
def test_integer_sums_are_exact(instruction_set: str, element: str, code: str, number: int | None) -> None:
    extremes = {"lowest": int(ELEMENTS[element].min), "highest": int(ELEMENTS[element].max)}
    columns = 999  # 999 * 128 * 128 is less than 2**24, so that float32 holds every sum
    record, key = integer_layer(element, extremes.get(code), columns)
    ready = prepared(record, key)
    for width in WIDTHS:
        x = (
            torch.randint(-128, 128, (width, columns)).float()
            if number is None
            else torch.full((width, columns), number)
        )
        wanted = x.long() @ record["codes"].long().T
        assert torch.equal(INT8.run(x.float(), ready, None).long(), wanted)


def test_a_sum_of_the_longest_k_does_not_overflow(instruction_set: str) -> None:
    record, key = integer_layer("int8", 127, 1 << 16)
    for width in (1, MANY[0]):
        y = INT8.run(torch.full((width, 1 << 16), 127.0), prepared(record, key), None)
        assert torch.equal(y, torch.full((width, 20), 127.0 * 127 * (1 << 16)))


INTEGER_WEIGHTS = [("int8", CHANNEL), ("int8", group(36)), ("int4", CHANNEL), ("int4", group(32)), ("int4", group(72))]


@needs_extension
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("element", "granularity"), INTEGER_WEIGHTS, ids=str)
def test_instruction_sets_agree_about_integers_to_the_last_bit(
    element: str, granularity: Granularity, symmetric: bool
) -> None:
    """Sums are exact and come under the scales of one group after the other."""
    key = LinearKey(weight_key(element, ScaleSpec(F32, granularity), symmetric).weight, PER_TOKEN)
    for rows, columns in ((5, 72), (48, 320), (70, 1233)):
        record = layer(key, rows, columns)
        ready = prepared(record, key, "bf16")
        for tokens in (4, 15, 16, 17, 40, 98):
            x, results = inputs((tokens, columns), torch.bfloat16), []
            for name in SETS:
                with native.forced(name):
                    results.append(INT8.run(x, ready, None))
            assert all(torch.equal(result, results[0]) for result in results), (rows, columns, tokens)


@pytest.mark.parametrize("key", ["W4A16 g32", "W8A8", "W4A8", "FP8_DYNAMIC"])
def test_threads_change_no_bit(instruction_set: str, key: str) -> None:
    record = layer(KEYS[key], 200, 1000)
    ready = prepared(record, KEYS[key], "bf16")
    kernel = INT8 if "input_scale" in ready.tensors or "per_token" in ready.constants else WEIGHT_ONLY
    for tokens in (1, 2, 40, 300):
        x = inputs((tokens, 1000), torch.bfloat16)
        results = []
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            results.append(kernel.run(x, ready, None))
        torch.set_num_threads(1)
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("element", ["int4", "int3", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_act_order(instruction_set: str, element: str, symmetric: bool) -> None:
    key = weight_key(element, ScaleSpec(F16, group(32)), symmetric)
    record = layer(key, 40, 160)
    uneven = torch.randint(0, 5, (160,), dtype=torch.int32)
    shuffled = (torch.arange(160, dtype=torch.int32) // 32)[torch.randperm(160)]
    for order in (uneven, shuffled):
        laden = record.with_tensors(order=order)
        request = LinearRequest.of(laden, key, "f32")
        assert WEIGHT_ONLY.refuse(request, probe.this_machine("cpu")) is None
        for tokens, dtype in ((7, "f32"), (33, "bf16")):
            x = torch.randn(tokens, 160).to(DTYPES[dtype])
            y = WEIGHT_ONLY.run(x, WEIGHT_ONLY.prepare(laden, request), None)
            assert_close(y, x.double() @ dequantize(laden).double().T, dtype)


def test_minima_are_added(instruction_set: str) -> None:
    key = weight_key("uint4", ScaleSpec(F32, group(32)))
    record = layer(key, 21, 100)
    record = record.with_tensors(minimum=-torch.rand(21, 4))
    x = torch.randn(5, 100)
    assert_close(WEIGHT_ONLY.run(x, prepared(record, key), None), x.double() @ dequantize(record).double().T, "f32")


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers at an address that nothing but their own size divides, as a mapped file may have them."""
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)


@pytest.mark.parametrize("key", ["W4A16_ASYM", "W8A8", "FP8"])
def test_prepared_bytes_may_lie_anywhere(instruction_set: str, key: str) -> None:
    record = layer(KEYS[key], 48, 256)
    linear = KEYS[key] if key == "W8A8" else LinearKey(KEYS[key].weight)
    ready = prepared(record, linear, "bf16")
    moved = Prepared({name: shifted(tensor) for name, tensor in ready.tensors.items()}, ready.constants)
    kernel, x = INT8 if key == "W8A8" else WEIGHT_ONLY, inputs((3, 256), torch.bfloat16)
    assert torch.equal(kernel.run(x, moved, None), kernel.run(x, ready, None))


@needs_extension
def test_wrong_operands_are_errors() -> None:
    record = layer(KEYS["W4A16 g32"], 16, 64)
    ready = prepared(record, KEYS["W4A16 g32"], "bf16")
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    for bad in (torch.zeros(2, 63).bfloat16(), torch.zeros(2, 128).bfloat16()):
        with pytest.raises(RuntimeError, match="64 features are needed"):
            WEIGHT_ONLY.run(bad, ready, None)
    for bias in (torch.zeros(15).bfloat16(), torch.zeros(16), torch.zeros(32).bfloat16()[::2]):
        with pytest.raises(RuntimeError, match="bias"):
            WEIGHT_ONLY.run(x, ready, bias)


@pytest.mark.parametrize("code", [8, -9, 127])
def test_codes_outside_the_element_are_found(code: int) -> None:
    record = layer(KEYS["W4A16 g32"], 16, 64)
    record["codes"][3, 5] = code
    with pytest.raises(CheckpointError, match=f"{code} .*int4"):
        prepared(record, KEYS["W4A16 g32"])


@pytest.mark.parametrize(("element", "bits"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7C), ("e4m3fnuz", 0x80)])
def test_codes_that_are_no_number_are_found(element: str, bits: int) -> None:
    key = weight_key(element, ScaleSpec(F32, CHANNEL))
    record = layer(key, 16, 64)
    record["codes"].view(torch.uint8)[3, 5] = bits
    with pytest.raises(CheckpointError, match=f"{element} .*finite"):
        prepared(record, key)


ONE_RUNTIME = """
import torch
from fewbit.kernels import native
from tests.kernels.layers import KEYS, layer
from tests.kernels.test_native import WEIGHT_ONLY, prepared
assert native.extension().has_threads
torch.set_num_threads(2)
torch.randn(500, 500) @ torch.randn(500, 500)
record = layer(KEYS["W4A16 g32"], 512, 512)
WEIGHT_ONLY.run(torch.randn(64, 512).bfloat16(), prepared(record, KEYS["W4A16 g32"], "bf16"), None)
names = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
assert len(names) == 1, names
"""


@needs_extension
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="This system does not list what a process has mapped.")
def test_threads_are_those_of_the_one_runtime_that_torch_has_loaded(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--cpu-libraries"):
        pytest.skip("This test starts a process that loads the installed library.")
    subprocess.run([sys.executable, "-c", ONE_RUNTIME], check=True, cwd=Path(__file__).parents[2])


# Without the compiled kernels.


@pytest.fixture
def fresh() -> Iterator[None]:
    for cached in (native.extension, native._best, probe.installed):
        cached.cache_clear()
    yield
    for cached in (native.extension, native._best, probe.installed):
        cached.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_an_installation_without_a_compiler_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "PATH", tmp_path / "_cpu.so")
    assert "compiler" in probe.missing()["fewbit-cpu"]
    assert "fewbit-cpu" not in probe.installed()
    (tmp_path / "_cpu.so").write_bytes(b"no library")
    native.extension.cache_clear()
    assert "_cpu.so cannot be loaded" in probe.missing()["fewbit-cpu"]
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        native.call_linear()


@needs_extension
@pytest.mark.usefixtures("fresh")
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert "install fewbit again" in probe.missing()["fewbit-cpu"]


@needs_extension
def test_a_complete_installation_lacks_nothing() -> None:
    assert probe.missing() == {}
    assert probe.installed()["fewbit-cpu"] == str(native.VERSION)
    assert "avx2" in native.extension().instruction_sets
