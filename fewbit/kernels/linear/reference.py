"""The reference: dequantize, quantize and dequantize the activations, multiply in float32. Runs every key anywhere.

It is the definition that every other kernel is compared with. It holds the codes unpacked, one byte each, because
unpacking a dense bit string costs more than the matrix product.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.numerics.activations import fake_quantize
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import integer
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey


class Reference(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "reference"
    backend: ClassVar[str] = "reference"
    reference: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return None

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        plain = unpack_record(record)
        tensors = {role: plain[role] for role in plain.tensors}
        description = json.dumps({"key": str(request.key), "shape": record.shape, "roles": list(tensors)})
        return Prepared(tensors, {"description": description})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return _operation(x, list(prepared.tensors.values()), bias, prepared.constants["description"])

    def prepared_bytes(self, request: LinearRequest) -> int:
        # Codes and zero points take a byte each.
        unpacked = replace(request.key.weight, element=integer(8))
        shape = (request.rows, request.columns)
        held = int(unpacked.bits_per_weight(shape) * request.rows * request.columns / 8)
        if unpacked.global_scale:  # float64 in the hub
            bits = 64 - unpacked.global_scale.element.bits
            held += prod(unpacked.global_scale.granularity.scale_shape(shape)) * bits // 8
        return held


@dataclass(frozen=True)
class _Description:
    key: LinearKey
    shape: tuple[int, ...]
    roles: tuple[str, ...]


@cache
def _parsed(description: str) -> _Description:
    data = json.loads(description)
    return _Description(LinearKey.parse(data["key"]), tuple(data["shape"]), tuple(data["roles"]))


def _linear(x: Tensor, tensors: list[Tensor], bias: Tensor | None, description: str) -> Tensor:
    parsed = _parsed(description)
    record = QuantizedTensor(parsed.key.weight, parsed.shape, dict(zip(parsed.roles, tensors, strict=True)))
    numbers = x * record["pre_scale"].to(x.dtype) if "pre_scale" in record else x
    activation = parsed.key.activation
    numbers = fake_quantize(numbers, activation, record) if activation else numbers.float()
    product = torch.nn.functional.linear(numbers, dequantize(record), None if bias is None else bias.float())
    return product.to(x.dtype)


def _fake(x: Tensor, _tensors: list[Tensor], _bias: Tensor | None, description: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _parsed(description).shape[0])


_operation = define(
    "linear_reference(Tensor x, Tensor[] tensors, Tensor? bias, str description) -> Tensor", _linear, _fake
)
