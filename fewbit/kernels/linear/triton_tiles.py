"""Weights of 2 to 8 bits, FP4 and FP8 under 16-bit activations on GPUs: Triton programs over weight tiles.

Integers of any width with or without zero points, in groups of 16 to 128 or by rows, NVFP4, MXFP4, FP8 and MXFP8 are
decoded exactly; scales of groups multiply float32 sums, so nothing is rounded before the result. One prepared layout
serves every M: a program that decodes in registers up to a few hundred rows, above that weights decoded once into a
bf16 or f16 matrix for the vendor's product. Which, and in what blocks, `tile_plans` says.

Sums are split over K where blocks are too few to fill the device, and added in a fixed order: the same input gives
the same bits. A row's bits depend on M all the same, unless a batch-invariant layer is asked for: then one plan serves
every M.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import record_obstacles, require_roles, triton_obstacles
from fewbit.kernels.linear.tile_plans import fixed_plan, plan_for, rows_at_once
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
        return Prepared(
            {**tensors, "counters": counters}, {"layout": str(layout), "same_bits": request.batch_invariant}
        )

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors = prepared.tensors
        return _operation(
            x, tensors["tiles"], tensors["scale_words"], tensors["zero_words"], tensors["row_scale"],
            tensors["counters"], bias, prepared.constants["layout"], prepared.constants["same_bits"],
        )  # fmt: skip

    def prepared_bytes(self, request: LinearRequest) -> int:
        return tile_bytes(request)


def tile_bytes(request: LinearRequest) -> int:
    """Bytes of a prepared weight."""
    layout = layout_of(request)
    return 0 if layout is None else layout.nbytes + 4 * COUNTERS


def tile_obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    """What keeps a weight from being multiplied over tiles, whatever becomes of the activations."""
    yield from triton_obstacles(request, hardware)
    yield from record_obstacles(request)
    key = request.key.weight
    if layout_of(request) is None:
        yield (
            f"integers, e2m1, e4m3 or e5m2 under scales of rows or of groups that one of {GROUPS} divides are needed, "
            f"found {key} over K={request.columns}"
        )


def _linear(
    x: Tensor, tiles: Tensor, scale_words: Tensor, zero_words: Tensor, row_scale: Tensor, counters: Tensor,
    bias: Tensor | None, layout: str, same_bits: bool,
) -> Tensor:  # fmt: skip
    parsed = TileLayout.parse(layout)
    tensors = {"tiles": tiles, "scale_words": scale_words, "zero_words": zero_words, "row_scale": row_scale}
    flat = x.reshape(-1, parsed.columns).contiguous()
    return multiply(flat, None, tensors, counters, bias, parsed, same_bits).view(*x.shape[:-1], parsed.rows)


def multiply(
    flat: Tensor, x_scale: Tensor | None, tensors: dict[str, Tensor], counters: Tensor, bias: Tensor | None,
    layout: TileLayout, same_bits: bool,
) -> Tensor:  # fmt: skip
    """y [M, N] of x [M, K] by the plan for its M; x counts in units of `x_scale`, float32 [M] or [], if given.

    Args:
        same_bits: a row gets the same bits whatever M is.
    """
    if flat.numel() == 0:
        return flat.new_empty(flat.shape[0], layout.rows)
    on_device = flat.is_cuda or interprets_triton()
    if on_device and same_bits:
        return _with_same_bits(flat, x_scale, tensors, counters, bias, layout)
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


def _with_same_bits(
    flat: Tensor, x_scale: Tensor | None, tensors: dict[str, Tensor], counters: Tensor, bias: Tensor | None,
    layout: TileLayout,
) -> Tensor:  # fmt: skip
    """By the one plan for every M, no more rows at once than there are counters for."""
    from fewbit.kernels.programs import launch  # imports Triton

    rows = rows_at_once(layout, counters.numel())
    found = []
    for first in range(0, flat.shape[0], rows):
        part = flat[first : first + rows]
        scale = x_scale[first : first + rows] if x_scale is not None and x_scale.dim() else x_scale
        plan = fixed_plan(layout, part.shape[0])
        found.append(launch.multiply_tiles(part, tensors, counters, bias, layout, plan, scale))
    return found[0] if len(found) == 1 else torch.cat(found)


def _fake(
    x: Tensor, _tiles: Tensor, _scale_words: Tensor, _zero_words: Tensor, _row_scale: Tensor, *rest: object
) -> Tensor:
    return x.new_empty(*x.shape[:-1], TileLayout.parse(str(rest[-2])).rows)


_operation = define(
    "linear_tiles(Tensor x, Tensor tiles, Tensor scale_words, Tensor zero_words, Tensor row_scale, Tensor counters, "
    "Tensor? bias, str layout, bool same_bits) -> Tensor",
    _linear,
    _fake,
)
