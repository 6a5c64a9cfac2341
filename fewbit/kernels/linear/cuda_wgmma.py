"""Integers of up to 4 bits under 16-bit activations on Hopper: CUDA C++ whose decoded weights never leave registers.

One prepared layout serves every M: `wgmma` takes decoded weights as its left operand from registers and tokens from
shared memory; for prompts weights are decoded once into a bf16 or f16 matrix for the vendor's product. Decoded numbers
are multiplied by their scale and rounded to the dtype of activations, once, as the vendor's product would take them.

Up to eight rows another kernel reads the same layout, see `few_rows.cuh`: one or two of them as integers of 22 bits and
a sign under a power of two for each 128 input features, multiplied by the codes without rounding.

The work is cut into equal ranges over all multiprocessors, and ranges that share outputs are added in a fixed order:
the same input gives the same bits, and a row's bits depend on M.

Kernels are compiled by NVRTC when a shape of block is first needed, within seconds, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.fragment_cuts import cut_for
from fewbit.kernels.linear.fragment_layout import (
    DTYPES,
    GROUPS,
    FragmentLayout,
    fragment_layout_of,
    fragment_numbers,
    fragments,
)
from fewbit.kernels.linear.obstacles import nvrtc_obstacles, record_obstacles, require_roles
from fewbit.kernels.linear.row_cuts import RowCut
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware

QUANTUM = 8  # the copy engine takes rows of 16 bytes and multiples
FLAGS = 512
"""Blocks of a launch, no more than two for each multiprocessor; each has a flag, which is zero between calls."""


class CudaWgmma(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "cuda_wgmma"
    backend: ClassVar[str] = "cuda"
    weight_only: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(fragment_obstacles(request, hardware, None, QUANTUM))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        layout = fragment_layout_of(request)
        assert layout is not None, "the request was refused"
        return Prepared(prepared_fragments(record, layout), {"layout": str(layout)})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(x, tensors["weight"], tensors["flags"], bias, prepared.constants["layout"])

    def prepared_bytes(self, request: LinearRequest) -> int:
        layout = fragment_layout_of(request)
        return 0 if layout is None else layout.nbytes + 4 * FLAGS


def prepared_fragments(record: QuantizedTensor, layout: FragmentLayout) -> dict[str, Tensor]:
    """The prepared weight and the flags of its products.

    Raises:
        CheckpointError: a code lies outside the element's range.
    """
    weight = fragments(unpack_record(record), layout)
    return {"weight": weight, "flags": torch.zeros(FLAGS, dtype=torch.int32, device=weight.device)}


def fragment_obstacles(request: LinearRequest, hardware: Hardware, operand: str | None, quantum: int) -> Iterator[str]:
    """What keeps a weight from being multiplied over fragments.

    Args:
        operand: see `fragment_layout_of`.
        quantum: input features of 16 bytes.
    """
    yield from nvrtc_obstacles(hardware)
    if request.dtype not in DTYPES:
        yield f"bf16 or f16 activations are needed, found {request.dtype}"
    yield from record_obstacles(request)
    if fragment_layout_of(request, operand) is None:
        signed = "" if operand is None else "signed, symmetric "
        yield (
            f"{signed}integers of up to 4 bits under scales of {request.dtype}, of rows or of groups that one of "
            f"{GROUPS} divides, are needed, found {request.key.weight} over K={request.columns}"
        )
    if request.columns % quantum:
        yield f"K must be a multiple of {quantum}, found {request.columns}"
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and this kernel splits its sums by M"


def _linear(x: Tensor, weight: Tensor, flags: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    parsed = FragmentLayout.parse(layout)
    flat = x.reshape(-1, parsed.columns).contiguous()
    return _multiply(flat, weight, flags, bias, parsed).view(*x.shape[:-1], parsed.rows)


def _multiply(flat: Tensor, weight: Tensor, flags: Tensor, bias: Tensor | None, layout: FragmentLayout) -> Tensor:
    tokens = flat.shape[0]
    if tokens == 0:
        return flat.new_empty(0, layout.rows)
    if not flat.is_cuda:
        product = torch.nn.functional.linear(flat.float(), fragment_numbers(weight, layout))
        return (product if bias is None else product + bias).to(flat.dtype)
    from fewbit.kernels.cuda import few_rows, products  # load the driver's library

    cut = cut_for(layout, tokens, device_name(flat.device))
    with torch.cuda.device(flat.device):  # the driver launches where the current device is
        if isinstance(cut, RowCut):
            return few_rows.multiply(flat, weight, bias, layout, cut)
        if cut.decodes_first:
            return torch.nn.functional.linear(flat, products.decode(weight, layout), bias)
        return products.multiply(flat, weight, flags, bias, layout, cut)


def _fake(x: Tensor, _weight: Tensor, _flags: Tensor, _bias: Tensor | None, layout: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], FragmentLayout.parse(layout).rows)


_operation = define(
    "linear_wgmma(Tensor x, Tensor weight, Tensor flags, Tensor? bias, str layout) -> Tensor", _linear, _fake
)
