"""Products of block-scaled floats on both sides: what kernels of Blackwell's tensor cores have in common.

One E4M3 scale for 16 numbers under one float32 scale a side (NVFP4), or one E8M0 scale for 32 (MXFP4, MXFP8). Scales
lie in blocks of 128 rows and 4 groups, in which row r and group c have the place `(r % 32) * 16 + r // 32 * 4 + c`;
both axes are padded with zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import Rounding, rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import capability_obstacles, record_obstacles, require_roles, triton_obstacles
from fewbit.kernels.linear.products import static_tensors
from fewbit.numerics import QuantizedTensor, decode, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E2M1, E4M3, E8M0, Element
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey

CAPABILITY = 100
NVFP4, MXFP4, MXFP8 = (E2M1, E4M3), (E2M1, E8M0), (E4M3, E8M0)
NAMES: Mapping[tuple[Element, Element], str] = {NVFP4: "NVFP4", MXFP4: "MXFP4", MXFP8: "MXFP8"}
GROUPS = {NVFP4: 16, MXFP4: 32, MXFP8: 32}
"""(element, element of its scales) -> numbers under one scale."""
SCALE_ROWS, SCALE_GROUPS = 128, 4

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
"""Codes of x and of the weight, their scales in blocks as bytes, the weight's global scale, x's, dtype -> product."""


class BlockScaledKernel(LinearKernel):
    """What kernels of such products share: all but their obstacles and their operation."""

    untested: ClassVar[str] = "this kernel has never run on such a device; disable it where results look wrong"

    @abstractmethod
    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        """What keeps a layer from the product."""

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(self._obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract. `weight` is [N, K / 2] pairs of E2M1 codes, the first in the lower half, or E4M3 [N, K]."""
        require_roles(record, request)
        activation = request.key.activation
        assert activation is not None, "the request was refused"
        plain = unpack_record(record)
        codes = plain["codes"].contiguous()
        if request.key.weight.element == E2M1:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        one = torch.ones((), device=codes.device)
        global_scale = plain["global_scale"].float().reshape(()) if "global_scale" in plain else one
        scale = in_blocks(plain["scale"].view(torch.uint8))
        tensors = {"weight": codes, "scale": scale, "global_scale": global_scale, **static_tensors(plain, activation)}
        return Prepared(tensors, {"activation": str(activation)})

    def prepared_bytes(self, request: LinearRequest) -> int:
        size = GROUPS.get((request.key.weight.element, request.key.weight.scale.element), 16)
        rows, groups = -(-request.rows // SCALE_ROWS), -(-request.columns // (size * SCALE_GROUPS))
        codes = request.rows * request.columns * request.key.weight.element.bits // 8
        return codes + rows * groups * SCALE_ROWS * SCALE_GROUPS


def operands(x: Tensor, prepared: Prepared, bias: Tensor | None) -> tuple[Tensor | str | None, ...]:
    """What operations of such products take first, in the order of `linear`."""
    tensors = prepared.tensors
    return (
        x, tensors["weight"], tensors["scale"], tensors["global_scale"], tensors.get("input_global_scale"), bias,
        prepared.constants["activation"],
    )  # fmt: skip


def fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    """The shape of what such operations give."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def block_scaled_obstacles(
    request: LinearRequest, hardware: Hardware, kinds: Collection[tuple[Element, Element]], quanta: Mapping[str, int]
) -> Iterator[str]:
    """What keeps a layer from such a product.

    Args:
        kinds: of `GROUPS`, those that the kernel multiplies.
        quanta: what N and K must be multiples of.
    """
    yield from triton_obstacles(request, hardware)
    weight, activation = request.key.weight, request.key.activation
    yield from capability_obstacles(hardware, CAPABILITY, "arithmetic of block-scaled floats")
    if activation is None:
        yield "no activation key: both sides of the product must be quantized"
        return
    names = " or ".join(NAMES[kind] for kind in kinds)
    for side, key in (("weights", weight), ("activations", activation)):
        kind = (key.element, key.scale.element)
        if kind not in kinds or (key.granularity.rows, key.granularity.columns) != (1, GROUPS[kind]):
            yield f"{side} of {names} are needed, found {key}"
    if weight.element != activation.element:
        yield f"both sides must have one element, found {weight.element} and {activation.element}"
    if ((weight.element, weight.scale.element) == NVFP4) != (weight.global_scale is not None):
        yield f"one scale of the tensor goes with scales of e4m3 and none with e8m0, found {weight}"
    if weight.global_scale is not None and weight.global_scale.granularity.kind != "tensor":
        yield f"one second-level scale for the whole weight is needed, found {weight.global_scale}"
    yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
    for axis, extent in (("N", request.rows), ("K", request.columns)):
        if extent % quanta[axis]:
            yield f"{axis} must be a multiple of {quanta[axis]}, found {extent}"
    yield from record_obstacles(request)


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


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, input_global_scale: Tensor | None,
    bias: Tensor | None, activation: str, multiply: Multiply,
) -> Tensor:  # fmt: skip
    """x [*, K] rounded to its key, times the weight: by `multiply` on CUDA, by the definition elsewhere."""
    if x.numel() == 0:
        return fake(x, weight)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if flat.is_cuda:
        codes, ordered = _rounded(flat, input_global_scale, activation)
        product = multiply(codes, weight, ordered, scale, global_scale, input_global_scale, flat.dtype)
    else:
        product = _defined(flat, weight, scale, global_scale, input_global_scale, activation)
    if bias is not None:
        product = product + bias
    return product.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _static(input_global_scale: Tensor | None) -> dict[str, Tensor]:
    return {} if input_global_scale is None else {"input_global_scale": input_global_scale}


def _rounded(flat: Tensor, input_global_scale: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Codes, in pairs for E2M1, and their scales in blocks, as bytes."""
    from fewbit.kernels.programs.activations import quantized  # imports Triton

    rounding = Rounding.of(activation)
    codes, scale, _ = quantized(flat, rounding, _static(input_global_scale), flat.shape[1], False)
    if rounding.scale_kind == "e8m0":  # an E8M0 code is a float's exponent
        return codes, in_blocks((scale.t().contiguous().view(torch.int32) >> 23).to(torch.uint8))
    return codes, in_blocks(scale.t().to(torch.float8_e4m3fn).view(torch.uint8))


def _defined(
    flat: Tensor,
    weight: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    input_global_scale: Tensor | None,
    activation: str,
) -> Tensor:
    """The same product in float32 where there is no such device."""
    key, columns = QuantKey.parse(activation), flat.shape[1]
    size = GROUPS[key.element, key.scale.element]
    if key.element == E2M1:
        weight = torch.stack([weight & 15, weight >> 4], 2).reshape(weight.shape[0], columns)
    factors = decode(from_blocks(scale, weight.shape[0], columns // size), key.scale.element) * global_scale
    numbers = decode(weight, key.element) * factors.repeat_interleave(size, 1)
    return torch.nn.functional.linear(dequantize(quantize_activations(flat, key, _static(input_global_scale))), numbers)
