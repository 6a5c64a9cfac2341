"""Launching the programs over weight tiles: from tensors and a plan to arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from fewbit.kernels.linear.tile_plans import Plan
from fewbit.kernels.linear.weight_tiles import FRACTIONS, TileLayout
from fewbit.kernels.programs.weight_only import decode, multiply

INTERPRETED = bool(triton.knobs.runtime.interpret)

_PACKS = not INTERPRETED and torch.version.hip is None and torch.cuda.is_available()


@cache
def decoding(layout: TileLayout, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments that say how fields become numbers."""
    is_bf16 = dtype == torch.bfloat16
    if layout.kind == "integer":
        magic = {8: 0 if is_bf16 else 1152}.get(layout.bits, 128 if is_bf16 else 1024)
        base = -magic if layout.has_zero else -magic - layout.offset
    else:
        magic, base = 0, 2.0 ** FRACTIONS[layout.kind][0 if is_bf16 else 1]
    return {
        "KIND": layout.kind, "BITS": layout.bits, "KK": layout.run, "BASE": float(base), "MAGIC": magic,
        "GROUPS": layout.groups, "UNITS_PER_GROUP": layout.units_per_group, "SCALE_KIND": layout.scale_kind,
        "SCALE_BITS": layout.scale_bits, "HAS_ZERO": layout.has_zero, "SCALED": layout.scales_operands(dtype), "PACKED": _PACKS,
    }  # fmt: skip


def _factor(layout: TileLayout, dtype: torch.dtype) -> float:
    """What sums are multiplied by: one, or what recoded E8M0 scales are too large by where they scale sums."""
    if layout.scale_kind == "e8m0" and not layout.scales_operands(dtype):
        return 2.0 ** (127 - layout.largest_exponent)
    return 1.0


def multiply_tiles(
    x: Tensor, tensors: Mapping[str, Tensor], counters: Tensor, bias: Tensor | None, layout: TileLayout, plan: Plan
) -> Tensor:
    """y [M, N] of x [M, K], contiguous, by one program for each block of outputs and part of K."""
    tokens = x.shape[0]
    out = x.new_empty(tokens, layout.rows)
    blocks = layout.padded_rows // plan.block_n * -(-tokens // plan.block_m)
    split = plan.split if blocks <= counters.numel() else 1
    partials = x.new_empty(split * tokens * layout.rows if split > 1 else 0, dtype=torch.float32)
    multiply[(blocks, split)](
        x, tensors["tiles"], tensors["scale_words"], tensors["zero_words"], tensors["row_scale"],
        x if bias is None else bias, out, partials, counters,
        tokens, layout.rows, layout.columns, layout.units, split, layout.padded_rows, _factor(layout, x.dtype),
        **decoding(layout, x.dtype),
        HAS_BIAS=bias is not None, EVEN_K=layout.columns % layout.unit == 0, BLOCK_N=plan.block_n,
        BLOCK_M=plan.block_m, STAGES=plan.stages, EXACT_DOT=INTERPRETED, num_warps=plan.warps,
    )  # fmt: skip
    return out


def decode_tiles(tensors: Mapping[str, Tensor], layout: TileLayout, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in a 16-bit dtype, each number rounded once."""
    out = torch.empty(layout.rows, layout.columns, dtype=dtype, device=tensors["tiles"].device)
    grid = (layout.padded_rows // 64, layout.units)
    decode[grid](
        tensors["tiles"], tensors["scale_words"], tensors["zero_words"], tensors["row_scale"], out,
        layout.rows, layout.columns, layout.units, layout.padded_rows, _factor(layout, dtype),
        **decoding(layout, dtype), DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, num_warps=4,
    )  # fmt: skip
    return out
