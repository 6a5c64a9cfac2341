"""Launching the programs over weight tiles: from tensors and a plan to arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fewbit.kernels.linear.tile_codes import codes_layout
from fewbit.kernels.linear.tile_plans import Plan
from fewbit.kernels.linear.weight_tiles import FRACTIONS, TileLayout
from fewbit.kernels.programs.device import HAS_ASSEMBLY, INTERPRETED, chains
from fewbit.kernels.programs.weight_only import decode, multiply


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
        "SCALE_BITS": layout.scale_bits, "HAS_ZERO": layout.has_zero, "SCALED": layout.scales_operands(dtype),
        "PACKED": HAS_ASSEMBLY,
    }  # fmt: skip


def _factor(layout: TileLayout, dtype: torch.dtype) -> float:
    """What sums are multiplied by: one, or what recoded E8M0 scales are too large by where they scale sums."""
    if layout.scale_kind == "e8m0" and not layout.scales_operands(dtype):
        return 2.0 ** (127 - layout.largest_exponent)
    return 1.0


def _dots(layout: TileLayout, dtype: torch.dtype) -> int:
    """Products of a unit where scales of groups multiply sums."""
    return layout.groups if layout.groups > 1 and not layout.scales_operands(dtype) else 1


def multiply_tiles(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    counters: Tensor,
    bias: Tensor | None,
    layout: TileLayout,
    plan: Plan,
    x_scale: Tensor | None = None,
) -> Tensor:
    """y [M, N] of x [M, K], contiguous; x counts in units of `x_scale`, float32 [M] or [], where that is given."""
    out = x.new_empty(x.shape[0], layout.rows)
    grid, arguments, constants = launch_of(x, out, tensors, counters, bias, layout, plan, x_scale)
    multiply[grid](*arguments, **constants)
    return out


def launch_of(
    x: Tensor, out: Tensor, tensors: Mapping[str, Tensor], counters: Tensor, bias: Tensor | None, layout: TileLayout,
    plan: Plan, x_scale: Tensor | None = None,
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid, arguments and compile-time arguments of `multiply`."""
    tokens = x.shape[0]
    blocks = layout.padded_rows // plan.block_n * -(-tokens // plan.block_m)
    programs = plan.programs if plan.programs and blocks <= counters.numel() else blocks
    chunk = max(1, -(-blocks * layout.units // programs))
    parts = 1 if chunk % layout.units == 0 else -(-layout.units // chunk) + 1
    partials = x.new_empty(parts * tokens * layout.rows if parts > 1 else 0, dtype=torch.float32)
    chained = chains(x.device)
    described = plan.described and x.stride(0) % 8 == 0
    depth = layout.run if plan.folds and layout.can_fold(x.dtype) else layout.unit // _dots(layout, x.dtype)
    arguments = (
        TensorDescriptor.from_tensor(x, [plan.block_m, depth]) if described else x, tensors["tiles"],
        tensors["scale_words"], tensors["zero_words"], tensors["row_scale"],
        tensors["row_scale"] if x_scale is None else x_scale, x if bias is None else bias, out, partials, counters,
        tokens, layout.rows, layout.columns, layout.units, chunk, layout.padded_rows, _factor(layout, x.dtype),
    )  # fmt: skip
    constants = decoding(layout, x.dtype) | {
        "HAS_BIAS": bias is not None, "EVEN_K": layout.columns % layout.unit == 0, "BLOCK_N": plan.block_n,
        "BLOCK_M": plan.block_m, "STAGES": plan.stages, "EXACT_DOT": INTERPRETED, "CHAINED": chained,
        "WHOLE": chunk == layout.units,
        "X_SCALES": "none" if x_scale is None else "tokens" if x_scale.dim() else "one",
        "FOLDS": plan.folds and layout.can_fold(x.dtype), "AHEAD": plan.ahead,
        "DESCRIBED": described, "num_warps": plan.warps,
    }  # fmt: skip
    if chained:
        constants["launch_pdl"] = True
    if plan.registers:
        constants["maxnreg"] = plan.registers
    return (-(-blocks * layout.units // chunk),), arguments, constants


def compile_for(layout: TileLayout, plan: Plan, tokens: int, dtype: torch.dtype, scaled: bool = False) -> None:
    """Compiles the program into Triton's cache, without weights or results; `scaled`: x has scales of tokens."""
    counters = torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
    words, scales = counters[:16].to(torch.int16), torch.zeros(16, device="cuda")
    tensors = {"tiles": words, "scale_words": counters, "zero_words": counters, "row_scale": scales}
    x = torch.empty(tokens, layout.columns, dtype=dtype, device="cuda")
    _, arguments, constants = launch_of(x, x, tensors, counters, None, layout, plan, scales if scaled else None)
    multiply.warmup(*arguments, grid=(1,), **constants)


def decode_tiles(tensors: Mapping[str, Tensor], layout: TileLayout, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in a 16-bit dtype, each number rounded once."""
    out = torch.empty(layout.rows, layout.columns, dtype=dtype, device=tensors["tiles"].device)
    _decode(tensors, tensors["row_scale"], out, tensors["row_scale"], layout, dtype, False)
    return out


def decode_to_codes(tensors: Mapping[str, Tensor], layout: TileLayout) -> tuple[Tensor, Tensor]:
    """The weight as E4M3 codes [N, K], and float32 scales of groups [groups, N] or none, see `linear.tile_codes`."""
    device, factors = tensors["tiles"].device, tensors["code_scales"][0]
    out = torch.empty(layout.rows, layout.columns, dtype=torch.float8_e4m3fn, device=device)
    groups = codes_layout(layout).group
    scale = torch.empty(layout.columns // groups if groups else 0, layout.rows, device=device)
    _decode(tensors, factors, out, scale, layout, torch.bfloat16, True)
    return out, scale


def _decode(
    tensors: Mapping[str, Tensor], row_scale: Tensor, out: Tensor, group_scale: Tensor, layout: TileLayout,
    dtype: torch.dtype, codes: bool,
) -> None:  # fmt: skip
    decode[(layout.padded_rows // 64, layout.units)](
        tensors["tiles"], tensors["scale_words"], tensors["zero_words"], row_scale, out, group_scale,
        layout.rows, layout.columns, layout.units, layout.padded_rows, _factor(layout, dtype),
        **decoding(layout, dtype), DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, CODES=codes,
        num_warps=4,
    )  # fmt: skip
