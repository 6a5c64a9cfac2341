"""E4M3 activations times integers of up to 4 bits on Hopper: CUDA C++ that decodes weights to E4M3 in registers.

The scale of a group multiplies the float32 sum over it, the scale of a token the result, so that nothing but the
activations is rounded; no sum of the tensor cores runs over more than 128 input features. For the rest see
`cuda_wgmma`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.producer import Producer, producer_of, rows_of
from fewbit.kernels.activation.rounding import Rounding, covers_rows, rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.cuda_wgmma import FLAGS, fragment_obstacles, prepared_fragments
from fewbit.kernels.linear.fragment_cuts import Cut, cut_for
from fewbit.kernels.linear.fragment_layout import FragmentLayout, fragment_layout_of, fragment_numbers
from fewbit.kernels.linear.obstacles import require_roles
from fewbit.kernels.linear.products import static_tensors
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey

QUANTUM = 16  # input features of 16 bytes


class CudaWgmmaFp8(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "cuda_wgmma_fp8"
    backend: ClassVar[str] = "cuda"
    rounds_produced: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        layout, activation = fragment_layout_of(request, E4M3.name), request.key.activation
        assert layout is not None and activation is not None, "the request was refused"
        tensors = prepared_fragments(record, layout) | static_tensors(record, activation)
        return Prepared(tensors, {"layout": str(layout), "activation": str(activation)})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return _run(x, prepared, bias, None, "", 0.0)

    def run_produced(self, x: Tensor, producer: Producer, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return _run(x, prepared, bias, producer.other, producer.kind, producer.epsilon)

    def prepared_bytes(self, request: LinearRequest) -> int:
        layout = fragment_layout_of(request, E4M3.name)
        return 0 if layout is None else layout.nbytes + 4 * FLAGS


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    activation = request.key.activation
    if activation is None or activation.element != E4M3 or not covers_rows(activation):
        yield f"activations of e4m3 under a scale for each token or for all are needed, found {activation}"
        return
    if "triton" not in hardware.software:
        yield "triton, whose program rounds activations, is not installed"
    yield from fragment_obstacles(request, hardware, E4M3.name, QUANTUM)
    yield from rounding_obstacles(activation, request.columns, request.batch_invariant)


def _run(x: Tensor, prepared: Prepared, bias: Tensor | None, other: Tensor | None, kind: str, epsilon: float) -> Tensor:
    tensors, constants = prepared.tensors, prepared.constants
    return _operation(
        x, tensors["weight"], tensors["flags"], tensors.get("input_scale"), bias, constants["layout"],
        constants["activation"], other, kind, epsilon,
    )  # fmt: skip


def _linear(
    x: Tensor, weight: Tensor, flags: Tensor, input_scale: Tensor | None, bias: Tensor | None, layout: str,
    activation: str, other: Tensor | None, kind: str, epsilon: float,
) -> Tensor:  # fmt: skip
    parsed = FragmentLayout.parse(layout)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], parsed.rows)
    static = {} if input_scale is None else {"input_scale": input_scale}
    flat, producer = rows_of(x, parsed.columns), producer_of(other, kind, epsilon)
    if x.is_cuda:
        from fewbit.kernels.cuda import products  # loads the driver's library
        from fewbit.kernels.programs.activations import quantized  # imports Triton

        codes, scale, _ = quantized(flat, Rounding.of(activation), static, parsed.columns, False, producer)
        cut = cut_for(parsed, flat.shape[0], device_name(flat.device))
        assert isinstance(cut, Cut), "cuts of rows are for operands of 16 bits"
        with torch.cuda.device(flat.device):  # the driver launches where the current device is
            product = products.multiply(codes, weight, flags, bias, parsed, cut, scale)
    else:
        made = flat if producer is None else producer(flat)
        numbers = dequantize(quantize_activations(made, QuantKey.parse(activation), static))
        product = torch.nn.functional.linear(numbers, fragment_numbers(weight, parsed))
        product = (product if bias is None else product + bias).to(x.dtype)
    return product.view(*x.shape[:-1], parsed.rows)


def _fake(x: Tensor, _weight: Tensor, _flags: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], FragmentLayout.parse(str(rest[2])).rows)


_operation = define(
    "linear_wgmma_fp8(Tensor x, Tensor weight, Tensor flags, Tensor? input_scale, Tensor? bias, str layout, "
    "str activation, Tensor? other, str producer, float epsilon) -> Tensor",
    _linear,
    _fake,
)
