"""NVFP4 and MXFP8 on both sides, on CUDA from compute capability 10.0: torch's product of block-scaled floats.

`torch.nn.functional.scaled_mm` of torch 2.11 with one E4M3 scale for 16 numbers under one float32 scale a side, or one
E8M0 scale for 32. Scales lie in blocks of 128 rows and 4 groups, in which row r and group c have the place
`(r % 32) * 16 + r // 32 * 4 + c`; both axes are padded with zeros. K must be a multiple of 32 and N of 16.

**No such device was at hand: the layouts are tested against this description, the product itself has never run.** MXFP4
is left out: torch's CUDA builds multiply it only where an add-on was compiled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import Rounding, rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import (
    capability_obstacles,
    cublas_obstacles,
    record_obstacles,
    require_roles,
    triton_obstacles,
)
from fewbit.kernels.linear.products import static_tensors
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor, decode, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E2M1, E4M3, E8M0
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey

CAPABILITY = 100
GROUPS = {(E2M1, E4M3): 16, (E4M3, E8M0): 32}
"""(element, element of its scales) -> numbers under one scale."""
SCALE_ROWS, SCALE_GROUPS = 128, 4
QUANTA = {"N": 16, "K": 32}


class TorchScaledMmGroups(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "torch_scaled_mm_groups"
    backend: ClassVar[str] = "torch_scaled_mm"
    untested: ClassVar[str] = "this kernel has never run on such a device; disable it where results look wrong"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract. `weight` is [N, K / 2] pairs of E2M1 codes, the first in the lower half, or E4M3 [N, K]."""
        require_roles(record, request)
        activation = request.key.activation
        assert activation is not None, "the request was refused"
        plain = unpack_record(record)
        codes = plain["codes"].contiguous()
        global_scale = torch.ones((), device=codes.device)
        if request.key.weight.element == E2M1:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
            global_scale = plain["global_scale"].float().reshape(())
        scale = in_blocks(plain["scale"].view(torch.uint8))
        tensors = {"weight": codes, "scale": scale, "global_scale": global_scale, **static_tensors(plain, activation)}
        return Prepared(tensors, {"activation": str(activation)})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(
            x, tensors["weight"], tensors["scale"], tensors["global_scale"], tensors.get("input_global_scale"), bias,
            prepared.constants["activation"],
        )  # fmt: skip

    def prepared_bytes(self, request: LinearRequest) -> int:
        size = GROUPS.get((request.key.weight.element, request.key.weight.scale.element), 16)
        rows, groups = -(-request.rows // SCALE_ROWS), -(-request.columns // (size * SCALE_GROUPS))
        codes = request.rows * request.columns * request.key.weight.element.bits // 8
        return codes + rows * groups * SCALE_ROWS * SCALE_GROUPS


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from triton_obstacles(request, hardware)
    weight, activation = request.key.weight, request.key.activation
    yield from capability_obstacles(hardware, CAPABILITY, "arithmetic of block-scaled floats")
    if activation is None:
        yield "no activation key: both sides of the product must be quantized"
        return
    for side, key in (("weights", weight), ("activations", activation)):
        size = GROUPS.get((key.element, key.scale.element))
        if size is None or (key.granularity.rows, key.granularity.columns) != (1, size):
            yield f"{side} of NVFP4 or MXFP8 are needed, found {key}"
    if weight.element != activation.element:
        yield f"both sides must have one element, found {weight.element} and {activation.element}"
    if (weight.element == E2M1) != (weight.global_scale is not None):
        yield f"one scale of the tensor goes with e2m1 and none with e4m3, found {weight}"
    if weight.global_scale is not None and weight.global_scale.granularity.kind != "tensor":
        yield f"one second-level scale for the whole weight is needed, found {weight.global_scale}"
    yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
    for axis, extent in (("N", request.rows), ("K", request.columns)):
        if extent % QUANTA[axis]:
            yield f"{axis} must be a multiple of {QUANTA[axis]}, found {extent}"
    yield from record_obstacles(request)
    yield from cublas_obstacles(request)


def in_blocks(scale: Tensor) -> Tensor:
    """Bytes [R, G] in the order that the product reads them, uint8 [padded R * padded G]."""
    rows, groups = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -groups % SCALE_GROUPS, 0, -rows % SCALE_ROWS))
    blocks = padded.view(-1, 4, 32, padded.shape[1] // SCALE_GROUPS, SCALE_GROUPS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1)


def from_blocks(ordered: Tensor, rows: int, groups: int) -> Tensor:
    """The inverse of `in_blocks`: bytes [R, G]."""
    padded = -(-groups // SCALE_GROUPS)
    blocks = ordered.view(-1, padded, 32, 4, SCALE_GROUPS).permute(0, 3, 2, 1, 4)
    return blocks.reshape(-1, padded * SCALE_GROUPS)[:rows, :groups]


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, input_global_scale: Tensor | None,
    bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    if x.numel() == 0:
        return _fake(x, weight)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    static = {} if input_global_scale is None else {"input_global_scale": input_global_scale}
    if flat.is_cuda:
        product = _multiplied(flat, weight, scale, global_scale, static, activation)
    else:
        product = _defined(flat, weight, scale, global_scale, static, activation)
    if bias is not None:
        product = product + bias
    return product.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _multiplied(
    flat: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, static: dict[str, Tensor], activation: str
) -> Tensor:
    from fewbit.kernels.programs.activations import quantized  # imports Triton

    functional, rounding = torch.nn.functional, Rounding.of(activation)
    codes, x_scale, _ = quantized(flat, rounding, static, flat.shape[1], False)
    if static:
        recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
        swizzle = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
        ordered = in_blocks(x_scale.t().to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn)
        packed = torch.float4_e2m1fn_x2
        return functional.scaled_mm(
            codes.view(packed), weight.view(packed).t(), [ordered, static["input_global_scale"].float()], recipe,
            [scale.view(torch.float8_e4m3fn), global_scale], recipe, swizzle, swizzle, output_dtype=flat.dtype,
        )  # fmt: skip
    powers = (x_scale.t().contiguous().view(torch.int32) >> 23).to(torch.uint8)  # an E8M0 code is a float's exponent
    ordered, exponents = in_blocks(powers).view(torch.float8_e8m0fnu), scale.view(torch.float8_e8m0fnu)
    kind, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        codes, weight.t(), ordered, kind, exponents, kind, order, order, output_dtype=flat.dtype
    )  # fmt: skip


def _defined(
    flat: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, static: dict[str, Tensor], activation: str
) -> Tensor:
    """The same product in float32 where there is no such device."""
    key, columns = QuantKey.parse(activation), flat.shape[1]
    size = GROUPS[key.element, key.scale.element]
    if key.element == E2M1:
        weight = torch.stack([weight & 15, weight >> 4], 2).reshape(weight.shape[0], columns)
    factors = decode(from_blocks(scale, weight.shape[0], columns // size), key.scale.element) * global_scale
    numbers = decode(weight, key.element) * factors.repeat_interleave(size, 1)
    return torch.nn.functional.linear(dequantize(quantize_activations(flat, key, static)), numbers)


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_operation = define(
    "linear_scaled_mm_groups(Tensor x, Tensor weight, Tensor scale, Tensor global_scale, Tensor? input_global_scale, "
    "Tensor? bias, str activation) -> Tensor",
    _linear,
    _fake,
)
