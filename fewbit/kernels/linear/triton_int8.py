"""INT8 activations times integer weights of up to 8 bits on INT8 tensor cores: a Triton program, CUDA from 7.5 on.

Sums of codes are exact in 32 bits. Activations have one scale a token, one for all, or one for each group of a row,
with or without zero points, which are taken out of the sum at the end: the sum of a row of the weight times the code
of zero. Weights of up to 4 bits are held in pairs and become int8 in two instructions for four of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from fewbit.kernels.activation.rounding import rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import int8_obstacles, record_obstacles, require_roles, triton_obstacles
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of
from fewbit.kernels.linear.products import prepare_product, product_bytes, run_product
from fewbit.numerics import QuantizedTensor
from fewbit.spec.hardware import Hardware

MAX_COLUMNS = 1 << 16
"""Where sums of products of 8-bit codes, each sixteen times a 4-bit one, leave 32 bits."""


class TritonInt8(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_int8"
    backend: ClassVar[str] = "triton"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        layout = _layout_of(request)
        assert layout is not None, "the request was refused"
        return prepare_product(record, request, layout)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return run_product(x, prepared, bias)

    def prepared_bytes(self, request: LinearRequest) -> int:
        return product_bytes(_layout_of(request))


def _layout_of(request: LinearRequest) -> ProductLayout | None:
    return None if any(_key_obstacles(request)) else product_layout_of(request, "int8")


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from triton_obstacles(request, hardware)
    if not hardware.has("int8"):
        yield f"INT8 tensor cores are needed, {hardware.name} has none"
    yield from record_obstacles(request)
    yield from _key_obstacles(request)
    if product_layout_of(request, "int8") is None:
        key = request.key.weight
        yield (
            "integers of at most 8 bits without zero points, one scale for at least 64 input features (32 for 4 bits), "
            f"are needed, found {key} under {request.key.activation} over K={request.columns}"
        )


def _key_obstacles(request: LinearRequest) -> Iterator[str]:
    activation = request.key.activation
    if activation is None:
        yield "no activation key: integer activations are needed"
        return
    if not activation.element.is_integer:
        yield f"activations must be integers, found {activation.element}"
    yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
    yield from int8_obstacles(request.key.weight, "weights")
    if request.columns > MAX_COLUMNS:
        yield f"sums of 32 bits hold {MAX_COLUMNS} input features, found K={request.columns}"
