"""Kernels as torch operations: what fakes promise, whole graphs, and torch's own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared
from fewbit.kernels.registry import linear_kernels
from fewbit.spec import DEVICES
from tests.kernels.layers import KERNELS, KEYS, layer, needs_extension, needs_fp8_rows

LAYERS = [
    ("reference", "W4A16_ASYM"),
    ("reference", "FP8"),
    ("torch_int4pack", "W4A16 g32"),
    ("torch_int4pack", "W4A16 asym g32"),
    ("torch_int8pack", "W8A16"),
    ("torch_int8pack_w8a8", "W8A8"),
    ("torch_int8pack_w8a8", "W8A8 static"),
    ("torch_onednn_int8", "W8A8"),
    ("torch_onednn_int8", "W8A8 static"),
    *[
        pytest.param(name, key, marks=needs_extension)
        for name, key in (
            ("cpu_weight_only", "W4A16 g32"),
            ("cpu_weight_only", "W4A16_ASYM"),
            ("cpu_weight_only", "FP8_DYNAMIC"),
            ("cpu_weight_only", "NVFP4A16"),
            ("cpu_int8", "W8A8"),
            ("cpu_int8", "W8A8 static"),
            ("cpu_int8", "W4A8"),
        )
    ],
    ("torch_scaled_mm", "FP8"),
    pytest.param("torch_scaled_mm", "FP8_DYNAMIC", marks=needs_fp8_rows),
    ("cuda_fp8", "FP8_DYNAMIC"),
    ("cuda_fp8", "FP8 tensor per token"),
    ("cuda_int8", "W8A8"),
    ("cuda_int8", "W8A8 asym static"),
    ("cuda_wgmma", "W4A16 asym g32"),
    ("cuda_wgmma", "W4A16"),
    ("cuda_wgmma", "NVFP4A16"),
    ("cuda_wgmma_fp8", "MXFP4 AF8"),
    ("cuda_wgmma_fp8", "W4AF8 g128"),
    ("cuda_wgmma_fp8", "W4AF8 static"),
    ("triton_tiles", "W4A16 asym g32"),
    ("triton_tiles", "NVFP4A16"),
    ("triton_tiles_quantized", "FP8_DYNAMIC"),
    ("triton_tiles_quantized", "W8A8 static"),
    ("triton_tiles_emulated", "NVFP4"),
    ("triton_tiles_emulated", "MXFP8"),
    ("triton_int8", "W8A8 asym static"),
    ("triton_int8", "W4A8 g128"),
    ("triton_fp8", "FP8"),
    ("triton_fp8", "FP8_BLOCK"),
    ("triton_fp8", "W4AF8 g32"),
    ("torch_scaled_mm_groups", "NVFP4"),
    ("torch_scaled_mm_groups", "MXFP8"),
    ("flashinfer", "NVFP4"),
    ("flashinfer", "MXFP4"),
    ("flashinfer", "MXFP8"),
]
ELSEWHERE = {"humming"} | {name for name in KERNELS if name.startswith("flashinfer_")}
"""The first prepares on a GPU only; the others call FlashInfer's operation."""
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# Some checks compare arguments before and after a call, which torch can do neither for opaque tensors nor for FP8.
CHECKS_OF_FP8 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKS_OF_OPAQUE = ("test_aot_dispatch_dynamic",)
COLUMNS = 64
ROWS = 32


def test_every_kernel_is_checked() -> None:
    named = {getattr(entry, "values", entry)[0] for entry in LAYERS}
    assert named | ELSEWHERE == set(KERNELS)


def prepared_layer(name: str, key: str) -> tuple[LinearKernel, Prepared]:
    """A prepared layer on the CPU, whether or not the kernel is fast or exact there."""
    kernel, record = linear_kernels()[name], layer(KEYS[key], ROWS, COLUMNS)
    return kernel, kernel.prepare(record, LinearRequest.of(record, KEYS[key]))


@pytest.mark.parametrize("name", sorted(set(KERNELS) - ELSEWHERE))
def test_prepared_tensors_are_contiguous(name: str) -> None:
    """Programs are given addresses, not strides: one that lies transposed would be read in the wrong order."""
    kernel, devices = linear_kernels()[name], [device.with_software("cuda-core") for device in DEVICES.values()]
    for key in KEYS.values():
        record = layer(key, 64, 256)
        request = LinearRequest.of(record, key)
        if all(kernel.refuse(request, device) for device in devices):
            continue
        for role, tensor in kernel.prepare(record, request).tensors.items():
            assert tensor.is_mkldnn or tensor.is_contiguous(), f"{key}: {role}"


class Calls(TorchDispatchMode):
    """Remembers the calls of fewbit's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fewbit":
            assert not kwargs
            self.made.append((func, args))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("name", "key"), LAYERS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_torch_finds_nothing_wrong_with_the_operation(name: str, key: str, with_bias: bool) -> None:
    kernel, prepared = prepared_layer(name, key)
    bias = torch.randn(ROWS).bfloat16() if with_bias else None
    with Calls() as calls:
        kernel.run(torch.randn(3, COLUMNS).bfloat16(), prepared, bias)
    assert len(calls.made) == 1, "one operation for each layer: two hundred calls a token are felt"
    operation, arguments = calls.made[0]
    torch.library.opcheck(operation, arguments, test_utils=_possible_checks(arguments))


def _possible_checks(arguments: tuple[Any, ...]) -> tuple[str, ...]:
    listed = [part for argument in arguments for part in (argument if isinstance(argument, list) else [argument])]
    tensors = [part for part in listed if isinstance(part, Tensor)]
    if any(tensor.is_mkldnn for tensor in tensors):
        return CHECKS_OF_OPAQUE
    return CHECKS_OF_FP8 if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors) else CHECKS


@pytest.mark.parametrize(("name", "key"), LAYERS)
@pytest.mark.parametrize("tokens", [(), (0,), (5,), (2, 3)])
def test_fakes_promise_what_runs_give(name: str, key: str, tokens: tuple[int, ...]) -> None:
    kernel, prepared = prepared_layer(name, key)
    real = kernel.run(torch.randn(*tokens, COLUMNS).bfloat16(), prepared, None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = kernel.run(torch.empty(*tokens, COLUMNS, dtype=torch.bfloat16), prepared, None)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(("name", "key"), LAYERS)
def test_a_layer_compiles_into_one_graph(name: str, key: str) -> None:
    kernel, prepared = prepared_layer(name, key)
    bias = torch.randn(ROWS).bfloat16()

    def forward(x: Tensor) -> Tensor:
        return kernel.run(x * 2, prepared, bias).relu()

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 17):
        x = torch.randn(tokens, COLUMNS).bfloat16()
        assert torch.equal(compiled(x), forward(x))
