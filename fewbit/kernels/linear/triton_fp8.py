"""E4M3 activations times weights of E4M3, E2M1 or small integers on FP8 tensor cores, CUDA from 8.9 on.

FP8 W8A8 with scales of rows, of the tensor or of blocks, and W4A8: integers of up to 4 bits and E2M1 are held in pairs
and become E4M3 in registers, exactly. Scales of groups multiply float32 sums over a group, and no sum of the tensor
cores runs over more than 128 input features. Where a plan says so, torch's own product multiplies the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from fewbit.kernels.activation.rounding import rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import record_obstacles, require_roles, triton_obstacles
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of
from fewbit.kernels.linear.products import prepare_product, product_bytes, run_product
from fewbit.numerics import QuantizedTensor
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware

CAPABILITY = 89


class TritonFp8(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_fp8"
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
    return None if any(_key_obstacles(request)) else product_layout_of(request, "e4m3")


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from triton_obstacles(request, hardware)
    if hardware.capability < CAPABILITY:
        found = f"{hardware.capability // 10}.{hardware.capability % 10}"
        yield f"FP8 arithmetic needs compute capability 8.9, {hardware.name} has {found}"
    yield from record_obstacles(request)
    yield from _key_obstacles(request)
    if product_layout_of(request, "e4m3") is None:
        key = request.key.weight
        yield (
            "weights of e4m3, e2m1 or integers of at most 5 bits without zero points, one scale for at least 64 input "
            f"features (32 for 4 bits), are needed, found {key} under {request.key.activation} over K={request.columns}"
        )


def _key_obstacles(request: LinearRequest) -> Iterator[str]:
    activation = request.key.activation
    if activation is None:
        yield "no activation key: FP8 activations are needed"
        return
    if activation.element != E4M3:
        yield f"activations of e4m3 are needed, found {activation.element}"
    yield from rounding_obstacles(activation, request.columns, request.batch_invariant)
