"""Kernels of experts against their definition, and the oracles that choose them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbit.kernels import native, probe
from fewbit.kernels.interface import Numerics, Prepared
from fewbit.kernels.moe.cpu_experts import described
from fewbit.kernels.moe.interface import MoeKernel, MoeRequest
from fewbit.kernels.moe.reference import MoeReference
from fewbit.kernels.oracles.int8 import Int8MoeBackend, select_int8_moe_backend
from fewbit.kernels.oracles.int_wna16 import WNA16MoeBackend, select_wna16_moe_backend
from fewbit.kernels.registry import choose_moe_kernel, moe_families, moe_family_of, moe_kernels
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.join import stack
from fewbit.spec import DEVICES, LinearKey
from fewbit.spec.hardware import CPU_EXTENSION
from tests.kernels.layers import DTYPES, KEYS, assert_close, layer

FOUND = native.extension()
SETS = ["none"] if isinstance(FOUND, native.Absent) else list(FOUND.instruction_sets)
REFERENCE = MoeReference()
COVERED = {name: key for name, key in KEYS.items() if any(family.covers(key) for family in moe_families())}
SIZES = [(3, 64, 48), (5, 72, 40)]  # E, H, I


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "none":
        yield request.param
        return
    with native.forced(request.param):
        yield request.param


def stacks(key: LinearKey, sizes: tuple[int, int, int]) -> tuple[QuantizedTensor, QuantizedTensor]:
    experts, hidden, intermediate = sizes
    torch.manual_seed(1)
    return tuple(
        stack([layer(key, rows, columns) for _ in range(experts)])
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate))
    )  # type: ignore[return-value]


def routing(tokens: int, experts: int, per_token: int = 2) -> tuple[Tensor, Tensor]:
    """Distinct experts for each token, some of which are none; weights."""
    scores = torch.rand(tokens, experts + 1)
    return scores.topk(per_token, -1).indices, torch.rand(tokens, per_token)


def admitted(key: LinearKey, sizes: tuple[int, int, int], dtype: str) -> Iterator[tuple[MoeKernel, MoeRequest]]:
    request = MoeRequest.of(*stacks(key, sizes), key, dtype)
    for kernel in moe_kernels().values():
        if not kernel.reference and kernel.refuse(request, probe.this_machine("cpu")) is None:
            yield kernel, request


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_every_kernel_is_the_definition(
    instruction_set: str, name: str, sizes: tuple[int, int, int], dtype: str
) -> None:
    key = COVERED[name]
    w13, w2 = stacks(key, sizes)
    for kernel, request in admitted(key, sizes, dtype):
        ready, definition = kernel.prepare(w13, w2, request), REFERENCE.prepare(w13, w2, request)
        for tokens in (0, 1, 2, 33):
            x = (torch.randn(tokens, sizes[1]) / 64).to(DTYPES[dtype])  # f16 ends at 65504
            chosen, weights = routing(tokens, sizes[0])
            found = kernel.run(x, ready, chosen, weights)
            wanted = REFERENCE.run(x, definition, chosen, weights)
            assert found.dtype == x.dtype and found.shape == wanted.shape
            if key.activation is None:
                assert_close(found, wanted.double(), dtype)
            elif tokens:  # one unit in the last place of a row can turn a code of the second product
                turned = 2e-2 if key.activation.element.bits == 8 else 1e-1
                assert (found.float() - wanted.float()).norm() <= turned * wanted.float().norm()


@pytest.mark.parametrize("name", ["W8A8", "W4A16 g32"])
def test_threads_change_no_bit(instruction_set: str, name: str) -> None:
    sizes = (4, 64, 160)
    w13, w2 = stacks(COVERED[name], sizes)
    x, (chosen, weights) = torch.randn(40, 64), routing(40, 4)
    for kernel, request in admitted(COVERED[name], sizes, "f32"):
        ready, results = kernel.prepare(w13, w2, request), []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(kernel.run(x, ready, chosen, weights))
        torch.set_num_threads(1)
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_the_router_have_any_dtype(instruction_set: str, dtype: torch.dtype) -> None:
    key, sizes = COVERED["W8A8"], (5, 64, 48)
    w13, w2 = stacks(key, sizes)
    x, (chosen, weights) = torch.randn(7, 64), routing(7, 5, 3)
    weights = weights.to(dtype)
    for kernel, request in admitted(key, sizes, "f32"):
        ready = kernel.prepare(w13, w2, request)
        found = kernel.run(x, ready, chosen, weights)
        assert torch.equal(found, kernel.run(x, ready, chosen, weights.float()))


def test_experts_are_described_to_the_library_once(instruction_set: str) -> None:
    """And again where they lie elsewhere."""
    key, sizes = COVERED["W4A16 g32"], (3, 64, 48)
    x, (chosen, weights) = torch.randn(2, 64), routing(2, 3)
    for kernel, request in admitted(key, sizes, "f32"):
        ready = kernel.prepare(*stacks(key, sizes), request)
        moved = Prepared({name: tensor.clone() for name, tensor in ready.tensors.items()}, ready.constants)
        first, before = kernel.run(x, ready, chosen, weights), described.cache_info().misses
        assert torch.equal(kernel.run(x, ready, chosen, weights), first)
        assert described.cache_info().misses == before
        assert torch.equal(kernel.run(x, moved, chosen, weights), first)
        assert described.cache_info().misses == before + 1


def test_integer_products_are_exact(instruction_set: str) -> None:
    """One expert, whole numbers: the down projection's sums are the integers' own."""
    key = COVERED["W8A8"]
    w13, w2 = stacks(key, (2, 64, 48))
    for kernel, request in admitted(key, (2, 64, 48), "f32"):
        x, once = torch.randn(3, 64), torch.ones(3, 1)
        alone = [kernel.run(x, kernel.prepare(w13, w2, request), torch.full((3, 1), expert), once) for expert in (0, 1)]
        both = kernel.run(x, kernel.prepare(w13, w2, request), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
        assert torch.equal(alone[0] + alone[1], both)


def test_the_cpu_comes_first_on_a_cpu() -> None:
    int8 = MoeRequest(COVERED["W8A8"], 8, 128, 64)
    device = next(device for device in DEVICES.values() if device.platform == "cpu" and device.has("avx2"))
    device = replace(device, software=frozenset({*device.software, CPU_EXTENSION}))
    assert select_int8_moe_backend(int8, device) is Int8MoeBackend.CPU
    assert select_wna16_moe_backend(replace(int8, key=COVERED["W4A16 g32"]), device) is WNA16MoeBackend.CPU
    bare = replace(device, software=frozenset())
    assert select_int8_moe_backend(int8, bare) is Int8MoeBackend.REFERENCE
    choice = choose_moe_kernel(int8, DEVICES["sm90"])
    assert choice.numerics is Numerics.REFERENCE
    reasons = [verdict.refusal.reason for verdict in choice.verdicts if verdict.refusal]
    assert reasons == ["runs on a CPU, found cuda"]


@pytest.mark.parametrize("name", COVERED)
def test_one_family_of_experts_covers_a_key(name: str) -> None:
    assert sum(family.covers(COVERED[name]) for family in moe_families()) == 1
    assert "reference" in list(moe_family_of(COVERED[name]).backends)
