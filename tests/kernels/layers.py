"""Layers to run kernels on, and what they must give: the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fewbit.kernels import native
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared
from fewbit.kernels.not_built import not_built
from fewbit.kernels.probe import this_machine
from fewbit.kernels.registry import linear_kernels
from fewbit.numerics import QuantizedTensor, dequantize, finite_codes, quantize
from fewbit.numerics.activations import fake_quantize, needs_calibration, static_input_scales
from fewbit.spec import CHANNEL, ELEMENTS, PRESETS, TENSOR, LinearKey, QuantKey, ScaleSpec, block, group, integer
from fewbit.spec.element import BF16, E4M3, F16, F32

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

TOLERANCE = {"f32": 1e-5, "bf16": 1.5e-2, "f16": 2e-3}
"""Of the largest number in a row.

A bf16 kernel may round the scale, the zero of an asymmetric group, the product and the sum with the bias by 2**-9 each,
and the bias may take away some of the product that the first three belong to.
"""

KERNELS = sorted(set(linear_kernels()) - set(not_built()))

_INT8_TOKENS = PRESETS["W8A8"].rules[0].key.activation
_INT8_TENSOR = QuantKey(integer(8), ScaleSpec(F32, TENSOR))
_JOINED_NVFP4 = QuantKey.parse(
    "e2m1:group16:e4m3/channel:f32"
)  # members of a joined matrix that keep their own factors
_FP8_TENSOR = QuantKey(E4M3, ScaleSpec(F32, TENSOR))
_FP8_TOKENS = PRESETS["FP8_DYNAMIC"].rules[0].key.activation


def weight_only(element: str, granularity: object, symmetric: bool = True, scale: object = BF16) -> LinearKey:
    return LinearKey(QuantKey(ELEMENTS[element], ScaleSpec(scale, granularity), symmetric=symmetric))


KEYS: dict[str, LinearKey] = {
    **{name: scheme.rules[0].key for name, scheme in PRESETS.items()},
    **{f"W4A16 g{size}": weight_only("int4", group(size)) for size in (16, 32, 64, 128, 256, 512)},
    **{f"W4A16 asym g{size}": weight_only("uint4", group(size), symmetric=False) for size in (32, 128)},
    "W4A16 channel": weight_only("int4", CHANNEL),
    "W4A16 tensor": weight_only("int4", TENSOR),
    "W4A16 biased": weight_only("uint4b8", group(32), scale=F16),
    "W4A16 signed asym": weight_only("int4", group(64), symmetric=False, scale=F32),
    "W4A16 unsigned": weight_only("uint4", group(32)),
    "W4A16 blocks": weight_only("int4", block(16, 64)),
    "W3A16 unsigned asym": weight_only("uint3", group(32), symmetric=False),
    "W2A16 unsigned asym": weight_only("uint2", CHANNEL, symmetric=False),
    "W5A16 channel": weight_only("int5", CHANNEL),
    "W8A16 biased": weight_only("uint8b128", CHANNEL, scale=F16),
    "W8A16 g32": weight_only("int8", group(32)),
    "W8A16 tensor": weight_only("int8", TENSOR, scale=F32),
    "W8A8 f32 scales": LinearKey(weight_only("int8", CHANNEL, scale=F32).weight, _INT8_TOKENS),
    "W8A8 static": LinearKey(weight_only("int8", CHANNEL).weight, _INT8_TENSOR),
    "W8A8 dynamic tensor": LinearKey(
        weight_only("int8", TENSOR).weight, replace(_INT8_TENSOR, scale=ScaleSpec(F32, TENSOR, dynamic=True))
    ),
    "W4A8": LinearKey(weight_only("int4", group(32)).weight, _INT8_TOKENS),
    "W4A4 channel": LinearKey(weight_only("int4", CHANNEL).weight, replace(_INT8_TOKENS, element=ELEMENTS["int4"])),
    **{
        f"{name} joined": LinearKey(_JOINED_NVFP4, PRESETS[name].rules[0].key.activation)
        for name in ("NVFP4", "NVFP4A16")
    },
    "W8A8 asym": LinearKey(weight_only("int8", CHANNEL).weight, replace(_INT8_TOKENS, symmetric=False)),
    "W8A8 asym unsigned": LinearKey(
        weight_only("int8", CHANNEL).weight, replace(_INT8_TOKENS, element=ELEMENTS["uint8"], symmetric=False)
    ),
    "W8A8 asym static": LinearKey(weight_only("int8", CHANNEL).weight, replace(_INT8_TENSOR, symmetric=False)),
    "W8A8 groups": LinearKey(
        weight_only("int8", group(128)).weight, QuantKey(integer(8), ScaleSpec(F32, group(64), dynamic=True))
    ),
    "W4A8 g128": LinearKey(weight_only("int4", group(128)).weight, _INT8_TOKENS),
    "W4A8 channel": LinearKey(weight_only("int4", CHANNEL).weight, replace(_INT8_TOKENS, symmetric=False)),
    "W4AF8 g128": LinearKey(weight_only("int4", group(128)).weight, _FP8_TOKENS),
    "W4AF8 g32": LinearKey(weight_only("int4", group(32), scale=F16).weight, _FP8_TOKENS),
    "W4AF8 static": LinearKey(weight_only("int4", CHANNEL).weight, _FP8_TENSOR),
    "W5AF8": LinearKey(weight_only("int5", group(64)).weight, _FP8_TOKENS),
    "MXFP4 AF8": LinearKey(PRESETS["MXFP4"].rules[0].key.weight, _FP8_TOKENS),
    "FP8 groups of 64": LinearKey(
        weight_only("e4m3", group(128), scale=F32).weight, QuantKey(E4M3, ScaleSpec(F32, group(64), dynamic=True))
    ),
    "FP8 weight-only": LinearKey(PRESETS["FP8"].rules[0].key.weight),
    "FP8 channel static": LinearKey(PRESETS["FP8_DYNAMIC"].rules[0].key.weight, _FP8_TENSOR),
    "FP8 tensor per token": LinearKey(PRESETS["FP8"].rules[0].key.weight, _FP8_TOKENS),
    "FP8 dynamic tensor": LinearKey(
        PRESETS["FP8"].rules[0].key.weight, replace(_FP8_TENSOR, scale=ScaleSpec(F32, TENSOR, dynamic=True))
    ),
}


def layer(key: LinearKey, rows: int, columns: int) -> QuantizedTensor:
    """A weight in which every finite code of its element occurs as often as the next, with static activation scales."""
    numbers = torch.randn(rows, columns)
    if key.weight.symmetric and key.weight.element.min == 0:
        numbers = numbers.abs()
    record = quantize(numbers, key.weight)
    if "codebook" in record:  # codes are numbers here
        plain = {role: tensor for role, tensor in record.tensors.items() if role != "codebook"}
        record = replace(record, tensors=plain)
    every = finite_codes(key.weight.element)
    picks = torch.arange(rows * columns).remainder(len(every))[torch.randperm(rows * columns)]
    record = record.with_tensors(codes=_taken(every, picks).reshape(rows, columns))
    if "zero_point" in record:
        shape = record["zero_point"].shape
        record = record.with_tensors(zero_point=_taken(every, torch.randint(len(every), shape)))
    if needs_calibration(key.activation):
        record = record.with_tensors(**static_input_scales(torch.tensor(2.5), key.activation))  # some inputs saturate
    if key.activation and not (key.activation.symmetric or key.activation.is_dynamic):
        record = record.with_tensors(input_zero_point=torch.tensor(37, dtype=torch.int8))
    return record


def _taken(codes: Tensor, picks: Tensor) -> Tensor:
    """`codes[picks]` for dtypes that torch cannot index by."""
    return codes.view(torch.uint8)[picks].view(codes.dtype)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of very different magnitudes, one of them zero where there are several."""
    x = torch.randn(shape)
    if x.dim() > 1 and x.shape[-2] > 1:
        x = x * torch.logspace(-1, 1, x.shape[-2]).unsqueeze(-1)
        x[..., 1, :] = 0
    return x.to(dtype)


def expected(x: Tensor, record: QuantizedTensor, key: LinearKey, bias: Tensor | None, kernel: LinearKernel) -> Tensor:
    """What the layer must give, float64: the activations as the kernel's class of numerics has them."""
    activation = None if kernel.weight_only else key.activation
    numbers = x if activation is None else fake_quantize(x, activation, record)
    product = numbers.double() @ dequantize(record).double().T
    return product if bias is None else product + bias.double()


def moved(record: QuantizedTensor, device: str) -> QuantizedTensor:
    return record.with_tensors(**{role: record[role].to(device) for role in record.tensors})


def placed(prepared: Prepared, device: str) -> Prepared:
    """The prepared weight on another device, as a layer that is moved has it."""
    return Prepared({name: tensor.to(device) for name, tensor in prepared.tensors.items()}, prepared.constants)


def admits(kernel: LinearKernel, request: LinearRequest, device: str) -> bool:
    """Whether the kernel takes the request on this machine."""
    return kernel.refuse(request, this_machine(device)) is None


FP8_SUMS = 5e-3
"""The same where tensor cores sum E4M3: every 32 products they cut sums off after some 14 bits."""


def assert_close(found: Tensor, wanted: Tensor, dtype: str, least: float = 0.0) -> None:
    """Every number within the dtype's tolerance, or `least` if that is more, of the largest one in its row."""
    if wanted.numel() == 0:
        return
    largest = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = ((found.double() - wanted).abs() / largest).max().item()
    assert error <= max(TOLERANCE[dtype], least), f"off by {error:.2e} of the largest number in a row"


def cpu_multiplies_fp8_by_rows() -> bool:
    """Whether this torch's CPU build takes row-wise scales in `_scaled_mm`: 2.13 does, 2.11 takes one scale a side."""
    codes = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(codes, codes.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_fp8_rows = pytest.mark.skipif(
    not cpu_multiplies_fp8_by_rows(), reason="This torch's CPU build multiplies FP8 by one scale a side only."
)


needs_extension = pytest.mark.skipif(
    isinstance(native.extension(), native.Absent), reason="fewbit was installed without its compiled CPU kernels."
)
