"""Humming, an optional backend (`humming-kernels`): weights of 2 to 8 bits, FP8 and FP4 on CUDA from 7.5 on.

Its kernels are compiled on the device when a shape is first seen. A layer's tensors are those of version 0.1.20: codes
end to end in 32-bit words, integers plus half their range, scales as they are; `HummingLayer.transform` then makes its
own layout of them, on the GPU. Activations stay as they are or become FP8 by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import record_obstacles, require_roles
from fewbit.kernels.linear.operands import integers_in_range
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor
from fewbit.packing.fields import narrowed, words_of
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E2M1, E4M3, E8M0, F32, Element
from fewbit.spec.granularity import TOKEN
from fewbit.spec.hardware import Hardware

PACKAGE = "humming-kernels"
FIRST, SECOND = "weight_scale", "weight_scale" + "_2"  # what Humming calls scales of either level
CAPABILITY = 75
QUANTA = {"N": 64, "K": 128}
GROUPS = (0, 32, 64, 128)
MOST_BITS_FP8 = 5
"""Of integers that e4m3 holds."""
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_NAMES = {"bf16": "bfloat16", "f16": "float16"}
_FLOATS = {E4M3: "float8e4m3", E2M1: "float4e2m1"}
_FLOAT_SCALES = {E4M3: ("float8e4m3", 16), E8M0: ("float8e8m0", 32)}
"""Element of the scales of FP4 -> what Humming calls it, and its group."""
_CONFIGURATIONS: dict[str, Any] = {}
"""What `transform` found out about layers, by its text; operations take texts."""


class Humming(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "humming"
    backend: ClassVar[str] = "humming"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract. Needs the GPU, whatever device the record is on."""
        require_roles(record, request)
        from humming.layer import HummingLayer

        layer = HummingLayer(
            shape_n=request.rows, shape_k=request.columns, weight_config=_weight_config(request),
            input_config={"dtype": _NAMES[request.dtype] if request.key.activation is None else "float8e4m3"},
            torch_dtype=_DTYPES[request.dtype],
        ).to("cuda")  # fmt: skip
        layer.load_state_dict(_stored(unpack_record(record), request), strict=False)
        layer.transform()
        text = layer.humming_config.to_str()
        _CONFIGURATIONS[text] = layer.humming_config
        tensors = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        return Prepared({**tensors, "locks": layer.locks}, {"configuration": text})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(
            x, tensors["weight"], tensors.get(FIRST), tensors.get(SECOND), tensors["locks"], bias,
            prepared.constants["configuration"],
        )  # fmt: skip


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    if hardware.platform != "cuda":
        yield f"runs on CUDA, found {hardware.platform}"
    if hardware.capability < CAPABILITY:
        yield f"needs compute capability 7.5, {hardware.name} has {hardware.capability / 10}"
    if PACKAGE not in hardware.software:
        yield f"{PACKAGE} is not installed"
    if request.dtype not in _DTYPES:
        yield f"bf16 or f16 activations are needed, found {request.dtype}"
    yield from _key_obstacles(request, hardware)
    for axis, extent in (("N", request.rows), ("K", request.columns)):
        if extent % QUANTA[axis]:
            yield f"{axis} must be a multiple of {QUANTA[axis]}, found {extent}"
    yield from record_obstacles(request)
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and this kernel splits its sums by M"


def _key_obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    weight, activation = request.key.weight, request.key.activation
    group = weight.granularity.columns
    if weight.granularity.rows != 1 or not weight.symmetric:
        yield f"symmetric weights under scales of rows or groups are needed, found {weight}"
    if weight.element == E2M1:
        if _FLOAT_SCALES.get(weight.scale.element, ("", -1))[1] != group:
            yield f"FP4 as NVFP4 or MXFP4 is needed, found {weight}"
    elif not weight.element.is_integer and (weight.element != E4M3 or group):
        yield f"integers, FP4 or e4m3 under scales of rows are needed, found {weight}"
    elif group not in GROUPS or weight.scale.element.name != request.dtype or weight.element.min >= 0:
        wanted = f"signed codes under scales of {request.dtype} of rows or of groups of 32, 64 or 128"
        yield f"{wanted} are needed, found {weight}"
    if activation is None:
        return
    per_token = (activation.granularity.rows, activation.granularity.columns) == (TOKEN.rows, TOKEN.columns)
    if activation.element != E4M3 or not per_token or activation.scale.element != F32 or not activation.is_dynamic:
        yield f"activations as they are, or e4m3 by token, are needed, found {activation}"
    if weight.element.bits > MOST_BITS_FP8 if weight.element.is_integer else weight.scale.element == E4M3:
        wanted = f"integers of up to {MOST_BITS_FP8} bits, e4m3 and MXFP4 weights"
        yield f"FP8 activations go with {wanted} here, found {weight}"
    if not hardware.has("fp8"):
        yield f"FP8 arithmetic is needed, {hardware.name} has none"


def _weight_config(request: LinearRequest) -> dict[str, Any]:
    key = request.key.weight
    name = f"int{key.element.bits}" if key.element.is_integer else _FLOATS[key.element]
    scale = _FLOAT_SCALES[key.scale.element][0] if key.element == E2M1 else _NAMES[request.dtype]
    found = {"dtype": name, "group_size": key.granularity.columns, "scale_dtype": scale}
    return found | ({"scale_2_type": "tensor"} if key.global_scale is not None else {})


def _stored(plain: QuantizedTensor, request: LinearRequest) -> dict[str, Tensor]:
    element: Element = request.key.weight.element
    if element.is_integer:
        fields = integers_in_range(plain) + (1 << (element.bits - 1))
    else:
        fields = plain["codes"].view(torch.uint8).int()
    scale = plain["scale"]
    words = narrowed(words_of(fields.long(), element.bits, 32), 32)
    found = {"weight": words, FIRST: scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale}
    if "global_scale" in plain:
        found[SECOND] = plain["global_scale"].float().reshape(1)
    return found


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, tensor_scale: Tensor | None, locks: Tensor, bias: Tensor | None,
    configuration: str,
) -> Tensor:  # fmt: skip
    config = _CONFIGURATIONS[configuration]
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], config.shape_n)
    from humming.forward import humming_forward

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    scales = {FIRST: scale, SECOND: tensor_scale}
    product: Tensor = humming_forward(config, inputs=flat, weight=weight, locks=locks, **scales)
    if bias is not None:
        product = product + bias
    return product.view(*x.shape[:-1], config.shape_n)


def _fake(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], _CONFIGURATIONS[str(rest[-1])].shape_n)


_operation = define(
    "linear_humming(Tensor x, Tensor weight, Tensor? scale, Tensor? tensor_scale, Tensor locks, Tensor? bias, "
    "str configuration) -> Tensor",
    _linear,
    _fake,
)
