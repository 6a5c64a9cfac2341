"""Weights of at most 4 bits under bf16 activations on x86: torch's `_weight_int4pack_mm_for_cpu`.

The operation computes `W[n, k] = (q - 8) * scale + zero` in float32 from codes q of 0..15 and bf16 pairs (scale, zero)
for each 32, 64, 128 or 256 input features, sums in float32 and rounds once. So:

* A symmetric weight with bf16 scales is exact up to the rounding of the result. Scales stored in f16 or f32 are rounded
  to bf16, a relative error of at most 2**-9.
* An asymmetric weight needs zero = (8 - zero point) * scale in bf16. That is exact for |8 - zero point| in {0, 1, 2, 4,
  8} if the scale is a bf16 number; otherwise it shifts the weights of a group by at most 2**-9 of the zero: 0.011 of a
  step for a distance of 3, 0.024 for 7, 0.003 on average, where rounding to the grid already costs up to 0.5.

One layout serves every M. Measured on AVX2 (one thread, us; interleaved in one run), against bf16 `F.linear` and
against float32 `F.linear` on codes that are dequantized in chunks at each call:

                    1536x576, groups of 64                 4096x4096
      M    int4pack     bf16   dequantize      int4pack      bf16   dequantize
      1         149      295            -          3122      5593            -
     16        1166     3835         2584         22312     57852        50535
     64        4677    15017         4069         80456    222860        70745
    128        9463    29672         6670        168618    457006       111575

Above M of about 64 dequantizing would win, by 1.4 to 1.5 at 128, and earlier on CPUs with AVX-512 and bf16. It would
need the codes a second time, since the packed order is torch's own and differs between AVX2 and AVX-512: not done. For
that reason, too, a prepared weight is good only in a process of the same instruction set and is never saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import record_obstacles, require_roles, x86_obstacles
from fewbit.kernels.linear.operands import integers_in_range, spread
from fewbit.kernels.operations import define
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor, decode, effective_scale
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import Element
from fewbit.spec.hardware import Hardware

GROUPS = (256, 128, 64, 32)  # what the operation takes, the fewest scales first
ROW_QUANTUM = 16
MIDDLE = 8  # the code that the operation takes as zero
SUPPORTED = ("minimum", FLOAT_ZERO_POINT)


class TorchInt4Pack(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "torch_int4pack"
    backend: ClassVar[str] = "torch_int4pack"
    weight_only: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range; packed, it would change its neighbours.
        """
        require_roles(record, request, SUPPORTED)
        plain = unpack_record(record)
        group = _group(request)
        assert group is not None, "the request was refused"
        scale = spread(effective_scale(plain), plain, group).bfloat16().float()
        zero = scale * (MIDDLE - _shift(plain.key.element))
        if "zero_point" in plain:
            zero -= scale * spread(decode(plain["zero_point"], plain.key.element), plain, group)
        if "minimum" in plain:
            zero += spread(plain["minimum"].float(), plain, group)
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(_fields(plain), 1)
        scales = torch.stack([scale.t(), zero.t()], -1).bfloat16().contiguous()
        return Prepared({"weight": weight, "scales": scales}, {"group": group})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return _operation(x, prepared.tensors["weight"], prepared.tensors["scales"], bias, prepared.constants["group"])

    def prepared_bytes(self, request: LinearRequest) -> int:
        groups = request.columns // (_group(request) or GROUPS[-1])
        return request.rows * (request.columns // 2 + groups * 4)


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    weight, columns = request.key.weight, request.columns
    yield from x86_obstacles(hardware)
    if not weight.element.is_integer or weight.element.bits > 4:
        yield f"integer weights of at most 4 bits are needed, found {weight.element}"
    yield from record_obstacles(request, SUPPORTED)
    if request.dtype != "bf16":
        yield (
            f"bf16 activations are needed, found {request.dtype}: torch's loop for it is scalar "
            "(36 ms where bf16 takes 1.2 ms, 1536x576 at M=16)"
        )
    if request.rows % ROW_QUANTUM:
        yield f"N must be a multiple of {ROW_QUANTUM}, found {request.rows}"
    if _group(request) is None:
        yield f"32, 64, 128 or 256 must divide K and the scales' width, found K={columns} under {weight.granularity}"


def _group(request: LinearRequest) -> int | None:
    """The largest group of the operation's that divides K and lies within one scale of the weight's."""
    columns = request.columns
    width = request.key.weight.granularity.columns or columns
    # A scale over all of K, or over more than that, needs no alignment beyond K's own.
    fits = (size for size in GROUPS if columns % size == 0 and (width >= columns or width % size == 0))
    return next(fits, None)


def _shift(element: Element) -> int:
    """What turns the element's numbers into codes of 0..15 whose middle is as close to the operation's as possible."""
    return MIDDLE if element.min < 0 else MIDDLE - (1 << (element.bits - 1))


def _fields(plain: QuantizedTensor) -> Tensor:
    """int32 codes of 0..15, [N, K]."""
    return integers_in_range(plain) + _shift(plain.key.element)


def _linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, group: int) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(flat, weight, group, scales)
    if bias is not None:
        product.add_(bias)
    return product.view(*x.shape[:-1], scales.shape[1])


def _fake(x: Tensor, _weight: Tensor, scales: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], scales.shape[1])


_operation = define(
    "linear_int4pack(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int group) -> Tensor", _linear, _fake
)
