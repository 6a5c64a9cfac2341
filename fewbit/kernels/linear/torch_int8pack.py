"""INT8 weights on x86 without repacking: torch's `_weight_int8pack_mm` for a few rows, float32 chunks for more.

Two kernels read one layout, plain int8 codes [N, K] with one scale for each row:

* `torch_int8pack` leaves activations as they are (W8A16).
* `torch_int8pack_w8a8` rounds them to integers first (W8A8). Integers up to 256 are exact in bf16 and in float32, and
  so are their products' sums below 2**24, so this is integer arithmetic on any x86; larger sums are rounded in float32,
  as every W8A8 kernel does in the end. It is what runs W8A8 on CPUs without VNNI, where oneDNN saturates.

Two ways, chosen by M inside the operation:

* up to `FEW_ROWS` rows in bf16: `_weight_int8pack_mm`, which sums in float32 and rounds each sum to bf16. With scales
  that are no bf16 numbers, and for integer activations, scaling afterwards rounds to bf16 a second time.
* otherwise: the weight is widened to float32 in chunks that stay in the cache, and multiplied as float32; the result is
  rounded once.

Measured on AVX2 (one thread, us; interleaved in one run), against bf16 `F.linear` and against oneDNN with activations
split in two halves, its only exact form without VNNI, which needs a packed weight:

                   1536x576                              4096x4096
      M    int8pack  chunks  oneDNN    bf16      int8pack  chunks  oneDNN     bf16
      1         383     660     573     379          3296    8027   11451     6331
      4         491     829     706    1032          5551   16368   12836    16242
      8         798     930     801    1995         10532   17937   14399    29630
     16        1384    1215    1097    3879         21441   23044   18083    57560
    128        8858    5617    4915   29652       (M=64) 84202   49152   43320   221790

`_weight_int8pack_mm` reads past the ends of rows unless K is a multiple of 16, and is a scalar loop for f16 and
float32: these go through chunks at every M.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.integer_activations import Rule, activation_obstacles, integers, static_scale
from fewbit.kernels.linear.obstacles import (
    int8_obstacles,
    record_obstacles,
    require_roles,
    row_scale_obstacles,
    x86_obstacles,
)
from fewbit.kernels.linear.operands import exact_in, int8_codes, row_scales
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware

FEW_ROWS = 8
ANY_ROWS = 1 << 62
COLUMN_QUANTUM = 16
CHUNK = 1 << 18  # numbers widened at a time: 1 MiB of float32


class TorchInt8Pack(LinearKernel):
    """Weight-only; see the head of this file."""

    name: ClassVar[str] = "torch_int8pack"
    backend: ClassVar[str] = "torch_int8pack"
    weight_only: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        plain = _plain(record, request)
        return Prepared(_tensors(plain), {"few": _few_rows(request)})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(
            x, tensors["weight"], tensors["scale"], tensors.get("factor"), bias, prepared.constants["few"]
        )

    def prepared_bytes(self, request: LinearRequest) -> int:
        return _prepared_bytes(request)


class TorchInt8PackW8A8(LinearKernel):
    """With integer activations; see the head of this file."""

    name: ClassVar[str] = "torch_int8pack_w8a8"
    backend: ClassVar[str] = "torch_int8pack"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_integer_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        assert request.key.activation is not None, "the request was refused"
        plain, rule = _plain(record, request), Rule.of(request.key.activation)
        tensors = _tensors(plain)
        stored = static_scale(plain, request.key.activation)
        if stored is not None:
            tensors["input_scale"] = stored
        constants = {"few": _few_rows(request), "per_token": rule.per_token, "low": rule.low, "high": rule.high}
        return Prepared(tensors, constants)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors, constants = prepared.tensors, prepared.constants
        return _integer_operation(
            x,
            tensors["weight"],
            tensors["scale"],
            tensors.get("factor"),
            tensors.get("input_scale"),
            bias,
            constants["few"],
            constants["per_token"],
            constants["low"],
            constants["high"],
        )

    def prepared_bytes(self, request: LinearRequest) -> int:
        return _prepared_bytes(request)


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from x86_obstacles(hardware)
    yield from int8_obstacles(request.key.weight, "weights")
    yield from row_scale_obstacles(request)
    yield from record_obstacles(request)
    if request.batch_invariant and not _few_rows(request):
        yield (
            f"the same bits at every M are asked for, which needs bf16 and a K that {COLUMN_QUANTUM} divides, "
            f"found {request.dtype} and K={request.columns}"
        )


def _integer_obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from _obstacles(request, hardware)
    yield from activation_obstacles(request.key.activation, request.batch_invariant)


def _few_rows(request: LinearRequest) -> int:
    """Up to how many rows `_weight_int8pack_mm` runs; its rows do not depend on each other, those of a GEMM may."""
    if request.dtype != "bf16" or request.columns % COLUMN_QUANTUM:
        return 0
    return ANY_ROWS if request.batch_invariant else FEW_ROWS


def _plain(record: QuantizedTensor, request: LinearRequest) -> QuantizedTensor:
    require_roles(record, request)
    return unpack_record(record)


def _tensors(plain: QuantizedTensor) -> dict[str, Tensor]:
    """weight int8 [N, K]; scale float32 [N]; factor: the scales in bf16, left out unless that is exact."""
    scale = row_scales(plain)
    tensors = {"weight": int8_codes(plain), "scale": scale}
    return tensors | {"factor": scale.bfloat16()} if exact_in(scale, torch.bfloat16) else tensors


def _prepared_bytes(request: LinearRequest) -> int:
    return request.rows * (request.columns + 6)


def multiply(flat: Tensor, weight: Tensor, scale: Tensor, factor: Tensor | None, few: int) -> Tensor:
    """flat @ W.T * scale, [M, N], in bf16 for few rows and exact scales, else in float32.

    Args:
        flat: [M, K], not empty; rounded to bf16 if M <= few.
        weight, scale, factor: see `_tensors`.
        few: up to how many rows go through `_weight_int8pack_mm`.
    """
    if flat.shape[0] > few:
        return _by_chunks(flat.float(), weight).mul_(scale)
    narrow = flat.bfloat16().contiguous()
    if factor is not None:
        scaled: Tensor = torch.ops.aten._weight_int8pack_mm.default(narrow, weight, factor)
        return scaled
    ones = torch.ones_like(scale, dtype=torch.bfloat16)
    sums: Tensor = torch.ops.aten._weight_int8pack_mm.default(narrow, weight, ones)
    return sums.float().mul_(scale)


def _by_chunks(numbers: Tensor, weight: Tensor) -> Tensor:
    """numbers @ W.T, all float32, the weight widened a few rows at a time into one buffer that stays in the cache."""
    rows, columns = weight.shape
    step = max(COLUMN_QUANTUM, CHUNK // columns)
    widened = numbers.new_empty(min(step, rows), columns)
    product = numbers.new_empty(numbers.shape[0], rows)
    for start in range(0, rows, step):
        chunk = weight[start : start + step]
        torch.mm(numbers, widened[: chunk.shape[0]].copy_(chunk).t(), out=product[:, start : start + step])
    return product


def _finished(product: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if bias is not None:
        product.add_(bias)
    return product.to(x.dtype).view(*x.shape[:-1], product.shape[-1])


def _linear(x: Tensor, weight: Tensor, scale: Tensor, factor: Tensor | None, bias: Tensor | None, few: int) -> Tensor:
    if x.numel() == 0:
        return _fake(x, weight)
    return _finished(multiply(x.reshape(-1, x.shape[-1]), weight, scale, factor, few), bias, x)


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _integer_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    few: int,
    per_token: bool,
    low: int,
    high: int,
) -> Tensor:
    if x.numel() == 0:
        return _fake(x, weight)
    codes, token_scale = integers(x.reshape(-1, x.shape[-1]), input_scale, Rule(per_token, low, high))
    product = multiply(codes, weight, scale, factor, few).float().mul_(token_scale)
    return _finished(product, bias, x)


_operation = define(
    "linear_int8pack(Tensor x, Tensor weight, Tensor scale, Tensor? factor, Tensor? bias, int few) -> Tensor",
    _linear,
    _fake,
)
_integer_operation = define(
    "linear_int8pack_w8a8(Tensor x, Tensor weight, Tensor scale, Tensor? factor, Tensor? input_scale, Tensor? bias, "
    "int few, bool per_token, int low, int high) -> Tensor",
    _integer_linear,
    _fake,
)
