"""Weights of 2 to 8 bits, FP4 and FP8 under 16-bit activations on GPUs: Triton programs over weight tiles.

Integers of any width with or without zero points, in groups of 16 to 128 or by rows, NVFP4, MXFP4, FP8 and MXFP8 are
decoded exactly; scales of groups multiply float32 sums, so nothing is rounded before the result. One prepared layout
serves every M: a program that decodes in registers up to a few hundred rows, above that weights decoded once into a
bf16 or f16 matrix for the vendor's product. Which, and in what blocks, `tile_plans` says.

Sums are split over K where blocks are too few to fill the device, and added in a fixed order: the same input gives
the same bits, but a row's bits may depend on M, which is why batch-invariant requests are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import record_obstacles, require_roles
from fewbit.kernels.linear.tile_plans import plan_for
from fewbit.kernels.linear.weight_tiles import GROUPS, TileLayout, layout_of, tile_numbers, tile_tensors
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name, interprets_triton
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware

COUNTERS = 4096
"""Blocks of outputs that may be split over K at once; each needs a counter, which is zero between calls."""


class TritonTiles(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_tiles"
    backend: ClassVar[str] = "triton"
    weight_only: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(tile_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        layout = layout_of(request)
        assert layout is not None, "the request was refused"
        tensors = tile_tensors(unpack_record(record), layout)
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=tensors["tiles"].device)
        return Prepared({**tensors, "counters": counters}, {"layout": str(layout)})

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(
            x, tensors["tiles"], tensors["scale_words"], tensors["zero_words"], tensors["row_scale"],
            tensors["counters"], bias, prepared.constants["layout"],
        )  # fmt: skip

    def prepared_bytes(self, request: LinearRequest) -> int:
        layout = layout_of(request)
        return 0 if layout is None else layout.nbytes + 4 * COUNTERS


def tile_obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    """What keeps a weight from being multiplied over tiles, whatever becomes of the activations."""
    if hardware.platform != "cuda":
        yield f"runs on CUDA, found {hardware.platform}"
    if not any(package in hardware.software for package in ("triton", "pytorch-triton")):
        yield "triton is not installed"
    if request.dtype not in ("bf16", "f16"):
        yield f"bf16 or f16 activations are needed, found {request.dtype}"
    if request.dtype == "bf16" and not hardware.has("bf16"):
        yield f"bf16 arithmetic is needed, {hardware.name} has none; ask for float16"
    yield from record_obstacles(request)
    key = request.key.weight
    if layout_of(request) is None:
        yield (
            f"integers, e2m1, e4m3 or e5m2 under scales of rows or of groups that one of {GROUPS} divides are needed, "
            f"found {key} over K={request.columns}"
        )
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and this kernel splits its sums by M"


def _linear(
    x: Tensor, tiles: Tensor, scale_words: Tensor, zero_words: Tensor, row_scale: Tensor, counters: Tensor,
    bias: Tensor | None, layout: str,
) -> Tensor:  # fmt: skip
    parsed = TileLayout.parse(layout)
    tensors = {"tiles": tiles, "scale_words": scale_words, "zero_words": zero_words, "row_scale": row_scale}
    flat = x.reshape(-1, parsed.columns).contiguous()
    return multiply(flat, None, tensors, counters, bias, parsed).view(*x.shape[:-1], parsed.rows)


def multiply(
    flat: Tensor, x_scale: Tensor | None, tensors: dict[str, Tensor], counters: Tensor, bias: Tensor | None,
    layout: TileLayout,
) -> Tensor:  # fmt: skip
    """y [M, N] of x [M, K] by the plan for its M; x counts in units of `x_scale`, float32 [M] or [], if given."""
    if flat.numel() == 0:
        return flat.new_zeros(flat.shape[0], layout.rows)
    on_device = flat.is_cuda or interprets_triton()
    plan = plan_for(layout, flat.shape[0], device_name(flat.device))
    if on_device and not plan.decodes_first:
        from fewbit.kernels.programs import launch  # imports Triton

        return launch.multiply_tiles(flat, tensors, counters, bias, layout, plan, x_scale)
    if on_device:
        from fewbit.kernels.programs import launch

        weight = launch.decode_tiles(tensors, layout, flat.dtype)
    else:
        weight, flat, dtype = tile_numbers(tensors, layout), flat.float(), flat.dtype
    product = torch.nn.functional.linear(flat, weight)
    if x_scale is not None:
        product.mul_(x_scale.unsqueeze(-1) if x_scale.dim() else x_scale)
    if bias is not None:
        product = product + bias
    return product.to(flat.dtype if on_device else dtype)


def _fake(
    x: Tensor, _tiles: Tensor, _scale_words: Tensor, _zero_words: Tensor, _row_scale: Tensor, *rest: object
) -> Tensor:
    return x.new_empty(*x.shape[:-1], TileLayout.parse(rest[-1]).rows)


_operation = define(
    "linear_tiles(Tensor x, Tensor tiles, Tensor scale_words, Tensor zero_words, Tensor row_scale, Tensor counters, "
    "Tensor? bias, str layout) -> Tensor",
    _linear,
    _fake,
)
