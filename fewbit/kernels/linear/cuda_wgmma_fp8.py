"""E4M3 activations times integers of up to 4 bits or MXFP4 on Hopper: weights become E4M3 in registers.

Nothing but the activations is rounded: the scale of a group of integers multiplies the float32 sum over it, which runs
over 128 input features at most in the tensor cores. E2M1 takes its power of two in, so that all of K is summed in the
tensor cores, whose sums keep some 14 bits. The scales of output features and of tokens multiply the result. For prompts
weights are decoded once to codes for torch's products, integers where their groups are 128 long. For the rest see
`cuda_wgmma`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.producer import Producer, producer_of, rows_of
from fewbit.kernels.activation.rounding import Rounding, covers_rows, rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.cuda_wgmma import FLAGS, fragment_obstacles, prepared_fragments
from fewbit.kernels.linear.fragment_cuts import Cut, cut_for
from fewbit.kernels.linear.fragment_layout import DTYPES, FragmentLayout, fragment_layout_of
from fewbit.kernels.linear.fragment_tensors import fragment_numbers, group_scales
from fewbit.kernels.linear.obstacles import require_roles
from fewbit.kernels.linear.product_layout import ProductLayout
from fewbit.kernels.linear.products import static_tensors
from fewbit.kernels.linear.recoded_scales import can_fold
from fewbit.kernels.linear.vendor_products import of_blocks, vendor_multiplies, vendor_product
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey

QUANTUM = 16  # input features of 16 bytes
INTEGERS_COUNT = 512.0
"""What makes up for integers being decoded to the same bits of E4M3, which count in 2**-9."""


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
        if layout.folds and not can_fold(unpack_record(record)):
            layout = replace(layout, folds=False)
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
        x, tensors["weight"], tensors["flags"], tensors.get("row_scale"), tensors.get("input_scale"), bias,
        constants["layout"], constants["activation"], other, kind, epsilon,
    )  # fmt: skip


def _linear(
    x: Tensor, weight: Tensor, flags: Tensor, row_scale: Tensor | None, input_scale: Tensor | None,
    bias: Tensor | None, layout: str, activation: str, other: Tensor | None, kind: str, epsilon: float,
) -> Tensor:  # fmt: skip
    parsed = FragmentLayout.parse(layout)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], parsed.rows)
    static = {} if input_scale is None else {"input_scale": input_scale}
    flat, producer = rows_of(x, parsed.columns), producer_of(other, kind, epsilon)
    if x.is_cuda:
        from fewbit.kernels.programs.activations import quantized  # imports Triton

        codes, scale, _ = quantized(flat, Rounding.of(activation), static, parsed.columns, False, producer)
        product = _multiply(codes, scale, weight, flags, row_scale, bias, parsed)
    else:
        made = flat if producer is None else producer(flat)
        numbers = dequantize(quantize_activations(made, QuantKey.parse(activation), static))
        product = torch.nn.functional.linear(numbers, fragment_numbers(weight, parsed, row_scale))
        product = (product if bias is None else product + bias).to(x.dtype)
    return product.view(*x.shape[:-1], parsed.rows)


def _multiply(
    codes: Tensor, scale: Tensor, weight: Tensor, flags: Tensor, row_scale: Tensor | None, bias: Tensor | None,
    layout: FragmentLayout,
) -> Tensor:  # fmt: skip
    from fewbit.kernels.cuda import products  # loads the driver's library

    cut = cut_for(layout, codes.shape[0], device_name(codes.device))
    assert isinstance(cut, Cut), "cuts of rows are for operands of 16 bits"
    of_codes = ProductLayout(
        "e4m3", "codes", layout.rows, layout.columns, 0 if layout.folds else layout.group, 0, "f32"
    )
    with torch.cuda.device(codes.device):  # the driver launches where the current device is
        if cut.decodes_first and vendor_multiplies(of_codes):
            tensors = {"weight": products.decode(weight, layout)} | scales_of_codes(weight, row_scale, layout)
            # Of groups cuBLAS's is the one that was compared with the reference on these operands.
            product = vendor_product if layout.folds else of_blocks
            return product(codes, scale, tensors, bias, of_codes, DTYPES[layout.dtype])
        return products.multiply(codes, weight, flags, bias, layout, cut, scale, row_scale)


def scales_of_codes(weight: Tensor, row_scale: Tensor | None, layout: FragmentLayout) -> dict[str, Tensor]:
    """What multiplies codes, as `product_tensors` has it."""
    if row_scale is not None:
        return {"row_scale": row_scale[: layout.rows]}
    return {
        "scale": group_scales(weight, layout),
        "row_scale": weight.new_full((layout.rows,), INTEGERS_COUNT, dtype=torch.float32),
    }


def _fake(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], FragmentLayout.parse(str(rest[5])).rows)


_operation = define(
    "linear_wgmma_fp8(Tensor x, Tensor weight, Tensor flags, Tensor? row_scale, Tensor? input_scale, Tensor? bias, "
    "str layout, str activation, Tensor? other, str producer, float epsilon) -> Tensor",
    _linear,
    _fake,
)
