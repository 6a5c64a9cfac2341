"""INT8 weights under INT8 activations on x86 with VNNI or AMX: oneDNN's `qlinear_pointwise`.

Activations go in as uint8 codes plus 128, since signed ones fall into a reference loop on CPUs without AMX; oneDNN
takes the 128 out again in int32. Sums are exact integers; they are rounded once to float32 and then multiplied by the
scales, whatever M is.

Without VNNI (AVX2, and AVX-512 before Cascade Lake) oneDNN adds pairs of products in 16 bits, which saturate silently:
the kernel refuses, and `torch_int8pack_w8a8` runs the layer exactly from plain weights, faster than oneDNN would with
activations split into two exact halves (measured there).

The result is asked for in float32 and rounded here: a bf16 result falls into a reference loop on AVX2 with VNNI.

The packed weight is an opaque oneDNN tensor, the only copy. A layer that holds it compiles like any other.
`copy.deepcopy`, `torch.save` and pickle unpack it and pack again on the way back (see `pack`), so a copy or a saved
layer is right on any CPU. It has no bytes that could be mapped or shared between processes, and it cannot go to another
device: torch raises where that is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.integer_activations import Rule, activation_obstacles, integers, static_scale
from fewbit.kernels.linear.obstacles import (
    found_features,
    int8_obstacles,
    record_obstacles,
    require_roles,
    row_scale_obstacles,
    x86_obstacles,
)
from fewbit.kernels.linear.operands import int8_codes, row_scales
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware

ZERO = 128  # what is added to signed codes to make them uint8


class TorchOneDnnInt8(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "torch_onednn_int8"
    backend: ClassVar[str] = "onednn"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        require_roles(record, request)
        assert request.key.activation is not None, "the request was refused"
        plain, rule = unpack_record(record), Rule.of(request.key.activation)
        tensors = {"weight": pack(int8_codes(plain)), "scale": row_scales(plain)}
        stored = static_scale(plain, request.key.activation)
        if stored is not None:
            tensors["input_scale"] = stored
        return Prepared(tensors, {"per_token": rule.per_token, "low": rule.low, "high": rule.high})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors, constants = prepared.tensors, prepared.constants
        return _operation(
            x,
            tensors["weight"],
            tensors["scale"],
            tensors.get("input_scale"),
            bias,
            constants["per_token"],
            constants["low"],
            constants["high"],
        )

    def prepared_bytes(self, request: LinearRequest) -> int:
        return request.rows * (request.columns + 4)


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from x86_obstacles(hardware)
    if not (hardware.has("vnni") or hardware.has("amx")):
        yield (
            "needs vnni or amx, without which oneDNN's 16-bit pair sums saturate and give wrong numbers, "
            f"found {found_features(hardware)}"
        )
    yield from int8_obstacles(request.key.weight, "weights")
    yield from row_scale_obstacles(request)
    yield from activation_obstacles(request.key.activation, request.batch_invariant)
    yield from record_obstacles(request)


def pack(codes: Tensor) -> Tensor:
    """oneDNN's form of int8 codes [N, K], an opaque tensor [K, N] that can be copied and saved.

    torch cannot copy or pickle an opaque tensor, and no subclass of one compiles, so the tensor itself carries what
    `copy` and `pickle` look for: both go through plain codes.
    """
    packed: Tensor = torch.ops.onednn.qlinear_prepack.default(codes, None)
    packed.__deepcopy__ = MethodType(_copied, packed)  # type: ignore[method-assign]
    packed.__reduce_ex__ = MethodType(_reduced, packed)  # type: ignore[method-assign]
    return packed


def unpack(packed: Tensor) -> Tensor:
    """int8 codes [N, K] from their packed form."""
    return packed.to_dense().t().contiguous()


def _copied(packed: Tensor, _memo: dict[int, Any]) -> Tensor:
    return pack(unpack(packed))


def _reduced(packed: Tensor, _protocol: int) -> tuple[Any, ...]:
    return pack, (unpack(packed),)


@cache
def _no_zero_points() -> Tensor:
    """oneDNN takes weights to be symmetric and ignores their zero points, which must be passed all the same."""
    return torch.zeros(0, dtype=torch.int32)


def _linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    per_token: bool,
    low: int,
    high: int,
) -> Tensor:
    if x.numel() == 0:
        return _fake(x, weight, scale)
    codes, token_scale = integers(x.reshape(-1, x.shape[-1]), input_scale, Rule(per_token, low, high))
    product = multiply(codes.add_(ZERO).to(torch.uint8), weight, scale).mul_(token_scale)
    if bias is not None:
        product.add_(bias)
    return product.to(x.dtype).view(*x.shape[:-1], scale.shape[0])


def multiply(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 (codes - 128) @ W.T * scale; codes uint8 [M, K], the weight packed, scale float32 [N].

    oneDNN does not check what it is given: a weight that is not packed ends the process.
    """
    assert weight.is_mkldnn, "the weight was not packed by `pack`"
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        codes, 1.0, ZERO, weight, scale, _no_zero_points(), None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _fake(x: Tensor, _weight: Tensor, scale: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], scale.shape[0])


_operation = define(
    "linear_onednn_int8(Tensor x, Tensor weight, Tensor scale, Tensor? input_scale, Tensor? bias, bool per_token, "
    "int low, int high) -> Tensor",
    _linear,
    _fake,
)
