"""FP8 weights under FP8 activations on CUDA: `torch._scaled_mm`, from compute capability 8.9 on.

Two forms, by the keys: one scale for the weight and one for the activations, or one for each output feature and each
token; where only one side has a scale for each row, the other side's single scale is repeated. Codes of activations are
computed here in plain torch, operation by operation as `numerics.quantize` does.

The product of 128x128 blocks and 1x128 activations is refused: torch has it on capability 9.0 alone, behind layouts of
scales that differ between its two interfaces, and it was not verified here. Its place is a kernel of its own.

Results are bf16 or f16: the row-wise product of devices other than 9.0 writes nothing wider. Accumulation is the
accurate one (`use_fast_accum=False`).

From torch's source, not from memory: K and N must be multiples of 16, M is free; the second matrix is column-major;
scales are contiguous float32, [] for one, [M, 1] and [1, N] row-wise. A bf16 bias goes into a bf16 product; any other
bias is added afterwards, since not every device's product takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import MAX_COLUMNS, Rounding, covers_all
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.integer_activations import dynamic_scale, scale_obstacles, static_scale
from fewbit.kernels.linear.obstacles import (
    capability_obstacles,
    cublas_obstacles,
    record_obstacles,
    require_roles,
    row_scale_obstacles,
)
from fewbit.kernels.linear.operands import row_scales
from fewbit.kernels.operations import define
from fewbit.kernels.probe import has_triton
from fewbit.numerics import QuantizedTensor, effective_scale
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware

CAPABILITY = 89
QUANTUM = 16
LARGEST = E4M3.max
_PER_TOKEN, _STATIC = "e4m3:token:f32:dynamic", "e4m3:tensor:f32"


class TorchScaledMm(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "torch_scaled_mm"
    backend: ClassVar[str] = "torch_scaled_mm"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract. `scale` is [] where one number scales the whole product, else [1, N]."""
        require_roles(record, request)
        activation = request.key.activation
        assert activation is not None, "the request was refused"
        plain, per_token = unpack_record(record), not covers_all(activation)
        if effective_scale(plain).numel() == 1 and not per_token:
            scale = effective_scale(plain).reshape(())
        else:
            scale = row_scales(plain).reshape(1, -1)
        tensors = {"weight": plain["codes"].contiguous(), "scale": scale}
        stored = static_scale(plain, activation)
        if stored is not None:
            tensors["input_scale"] = stored
        return Prepared(tensors, {"per_token": per_token})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(
            x, tensors["weight"], tensors["scale"], tensors.get("input_scale"), bias, prepared.constants["per_token"]
        )

    def prepared_bytes(self, request: LinearRequest) -> int:
        return request.rows * (request.columns + 4)


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    if hardware.platform != "cuda":
        yield f"runs on CUDA, found {hardware.platform}"
    yield from capability_obstacles(hardware, CAPABILITY, "FP8 arithmetic")
    yield from _key_obstacles(request)
    if request.dtype not in ("bf16", "f16"):
        yield f"the product is written in bf16 or f16, the layer works in {request.dtype}"
    for axis, extent in (("N", request.rows), ("K", request.columns)):
        if extent % QUANTUM:
            yield f"{axis} must be a multiple of {QUANTUM}, found {extent}"
    yield from record_obstacles(request)
    yield from cublas_obstacles(request)


def _key_obstacles(request: LinearRequest) -> Iterator[str]:
    weight, activation = request.key.weight, request.key.activation
    if weight.element != E4M3:
        yield f"weights of e4m3 are needed, found {weight.element}"
    if activation is None:
        yield "no activation key: both sides of the product must be FP8"
        return
    if activation.element != E4M3:
        yield f"activations of e4m3 are needed, found {activation.element}"
    if weight.granularity.kind == "block":
        yield (
            f"one scale for each output feature or for all is needed, found {weight.granularity}: torch's product of "
            "blocks exists on compute capability 9.0 alone and was not verified"
        )
    yield from row_scale_obstacles(request)
    yield from scale_obstacles(activation, request.batch_invariant)


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None, per_token: bool
) -> Tensor:
    if x.numel() == 0:
        return _fake(x, weight)
    codes, activation_scale = quantized(x.reshape(-1, x.shape[-1]), input_scale, per_token)
    if scale.dim() == 2 and not per_token:  # row-wise on both sides; an expanded scale of one row has a stride of zero
        activation_scale = activation_scale.reshape(1, 1).repeat(codes.shape[0], 1)
    fused = bias if x.dtype == torch.bfloat16 and bias is not None and bias.dtype == x.dtype else None
    product = torch._scaled_mm(codes, weight.t(), activation_scale, scale, bias=fused, out_dtype=x.dtype)
    if bias is not None and fused is None:
        product.add_(bias)
    return product.view(*x.shape[:-1], weight.shape[0])


def quantized(flat: Tensor, input_scale: Tensor | None, per_token: bool) -> tuple[Tensor, Tensor]:
    """E4M3 codes [M, K] of activations and their scales, float32 [M, 1] or [].

    Args:
        flat: [M, K], not empty.
        input_scale: the static scale, or None.
        per_token: one dynamic scale for each row.
    """
    fits = flat.shape[1] <= MAX_COLUMNS and (per_token or input_scale is not None)
    if flat.is_cuda and fits and has_triton():
        from fewbit.kernels.programs.activations import quantized as by_program  # imports Triton

        static = {} if input_scale is None else {"input_scale": input_scale}
        rounding = Rounding.of(_PER_TOKEN if input_scale is None else _STATIC)
        codes, scale, _ = by_program(flat.contiguous(), rounding, static, flat.shape[1], False)
        return codes, scale.view(-1, 1) if scale.dim() else scale
    numbers = flat.float()
    scale = dynamic_scale(numbers, LARGEST, per_token) if input_scale is None else input_scale
    # torch's cast turns what lies beyond the largest number into NaN in some versions, so it is clamped first.
    return (numbers / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_operation = define(
    "linear_scaled_mm(Tensor x, Tensor weight, Tensor scale, Tensor? input_scale, Tensor? bias, bool per_token) "
    "-> Tensor",
    _linear,
    _fake,
)
