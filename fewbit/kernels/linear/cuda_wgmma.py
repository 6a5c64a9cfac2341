"""Integers of up to 8 bits, E4M3, NVFP4 and MXFP4 under 16-bit activations, decoded in the registers of Hopper.

One prepared layout serves every M: `wgmma` takes decoded weights as its left operand from registers and tokens from
shared memory; for prompts weights are decoded once into a bf16 or f16 matrix for the vendor's product. Decoded integers
are multiplied by the scale of their group and rounded to the dtype of activations, once, as the vendor's product would
take them. E2M1 times its block scale is exact, scales of rows and of tensors multiply sums.

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
from fewbit.kernels.linear.fragment_layout import DTYPES, GROUPS, FragmentLayout, fragment_layout_of
from fewbit.kernels.linear.fragment_tensors import fragment_numbers, fragment_tensors
from fewbit.kernels.linear.obstacles import nvrtc_obstacles, record_obstacles, require_roles
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware

QUANTUM = 8  # the copy engine takes rows of 16 bytes and multiples
FLAGS = 512
"""Blocks of a launch, no more than two for each multiprocessor; each has a flag, which is zero between calls."""

_TAKEN = {
    None: f"integers of up to 4 bits under scales of {{}}, of rows or of groups that one of {GROUPS} divides, "
    "symmetric ones of up to 8 bits, e4m3 under scales of rows, e2m1 in groups of 16 under e4m3 or, in bf16, of 32 "
    "under e8m0",
    E4M3.name: "signed, symmetric integers of up to 4 bits under scales of {}, of rows or of groups that one of "
    f"{GROUPS} divides, or, in bf16, e2m1 in groups of 32 under e8m0",
}
"""Operand -> weights that fragments hold, but for the dtype."""


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
        return _operation(
            x, tensors["weight"], tensors["flags"], tensors.get("row_scale"), bias, prepared.constants["layout"]
        )

    def prepared_bytes(self, request: LinearRequest) -> int:
        layout = fragment_layout_of(request)
        return 0 if layout is None else layout.nbytes + 4 * FLAGS


def prepared_fragments(record: QuantizedTensor, layout: FragmentLayout) -> dict[str, Tensor]:
    """The prepared weight, with its scales of output features, and the flags of its products.

    Raises:
        CheckpointError: a code lies outside the element's range.
    """
    tensors = fragment_tensors(unpack_record(record), layout)
    return tensors | {"flags": torch.zeros(FLAGS, dtype=torch.int32, device=tensors["weight"].device)}


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
        yield f"{_TAKEN[operand].format(request.dtype)} are needed, found {request.key.weight} over K={request.columns}"
    if request.columns % quantum:
        yield f"K must be a multiple of {quantum}, found {request.columns}"
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and this kernel splits its sums by M"


def _linear(
    x: Tensor, weight: Tensor, flags: Tensor, row_scale: Tensor | None, bias: Tensor | None, layout: str
) -> Tensor:
    parsed = FragmentLayout.parse(layout)
    flat = x.reshape(-1, parsed.columns).contiguous()
    return _multiply(flat, weight, flags, row_scale, bias, parsed).view(*x.shape[:-1], parsed.rows)


def _multiply(
    flat: Tensor, weight: Tensor, flags: Tensor, row_scale: Tensor | None, bias: Tensor | None, layout: FragmentLayout
) -> Tensor:
    tokens = flat.shape[0]
    if tokens == 0:
        return flat.new_empty(0, layout.rows)
    if not flat.is_cuda:
        product = torch.nn.functional.linear(flat.float(), fragment_numbers(weight, layout, row_scale))
        return (product if bias is None else product + bias).to(flat.dtype)
    from fewbit.kernels.cuda import products  # loads the driver's library

    cut = cut_for(layout, tokens, device_name(flat.device))
    with torch.cuda.device(flat.device):  # the driver launches where the current device is
        if cut.decodes_first:
            return torch.nn.functional.linear(flat, products.decode(weight, layout, row_scale), bias)
        return products.multiply(flat, weight, flags, bias, layout, cut, row_scale=row_scale)


def _fake(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], FragmentLayout.parse(str(rest[4])).rows)


_operation = define(
    "linear_wgmma(Tensor x, Tensor weight, Tensor flags, Tensor? row_scale, Tensor? bias, str layout) -> Tensor",
    _linear,
    _fake,
)
