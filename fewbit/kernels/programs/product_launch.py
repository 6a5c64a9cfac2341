"""Launching products of 8-bit codes: from tensors and a plan to arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fewbit.kernels.linear.product_layout import CODES, SCALES, ProductLayout
from fewbit.kernels.linear.tile_plans import Plan
from fewbit.kernels.programs.device import HAS_ASSEMBLY, chains
from fewbit.kernels.programs.products import DEPTH, decode_nibbles, multiply_codes, multiply_described

DECODED_AT_ONCE = (8, 8)  # rows, units


def multiply(
    codes: Tensor, x_scale: Tensor, x_zero: Tensor | None, tensors: Mapping[str, Tensor], bias: Tensor | None,
    layout: ProductLayout, plan: Plan, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y [M, N] of codes [M, width] with their scales and zero points, see `programs.activations.quantized`."""
    out = codes.new_empty(codes.shape[0], layout.rows, dtype=dtype)
    launch = described_launch_of if plan.described and layout.is_described else launch_of
    program, grid, arguments, constants = launch(codes, x_scale, x_zero, out, tensors, bias, layout, plan)
    program[grid](*arguments, **constants)
    return out


def described_launch_of(
    codes: Tensor, x_scale: Tensor, x_zero: Tensor | None, out: Tensor, tensors: Mapping[str, Tensor],
    bias: Tensor | None, layout: ProductLayout, plan: Plan,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The program, grid, arguments and compile-time arguments of `multiply_described`."""
    tokens, weight = codes.shape[0], tensors["weight"]
    blocks = triton.cdiv(layout.rows, plan.block_n) * triton.cdiv(tokens, plan.block_m)
    chained = chains(codes.device)
    arguments = (
        TensorDescriptor.from_tensor(weight, [plan.block_n, DEPTH.value]),
        TensorDescriptor.from_tensor(codes, [plan.block_m, DEPTH.value]), tensors["row_scale"], x_scale,
        x_scale if x_zero is None else x_zero, tensors["weight_sums"], out if bias is None else bias, out,
        tokens, layout.rows, layout.width,
    )  # fmt: skip
    constants = {
        "OPERAND": layout.operand, "HAS_BIAS": bias is not None, "BLOCK_N": plan.block_n, "BLOCK_M": plan.block_m,
        "STAGES": plan.stages, "CHAINED": chained, "X_SCALES": "tokens" if x_scale.dim() else "one",
        "X_ZEROS": "none" if x_zero is None else "tokens" if x_zero.dim() else "one", "num_warps": plan.warps,
    }  # fmt: skip
    if chained:
        constants["launch_pdl"] = True
    return multiply_described, (min(blocks, plan.programs or blocks),), arguments, constants


def launch_of(
    codes: Tensor, x_scale: Tensor, x_zero: Tensor | None, out: Tensor, tensors: Mapping[str, Tensor],
    bias: Tensor | None, layout: ProductLayout, plan: Plan,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The program, grid, arguments and compile-time arguments of `multiply_codes`."""
    tokens = codes.shape[0]
    blocks = -(-layout.rows // plan.block_n) * -(-tokens // plan.block_m)
    programs = plan.programs if plan.programs and blocks <= tensors["counters"].numel() else blocks
    chunk = max(1, -(-blocks * layout.units // programs))
    parts = 1 if chunk % layout.units == 0 else -(-layout.units // chunk) + 1
    partials = x_scale.new_empty(parts * tokens * layout.rows if parts > 1 else 0)
    chained = chains(codes.device)
    grouped = layout.x_group > 0
    arguments = (
        codes, tensors["weight"], tensors["scale"], tensors["row_scale"],
        x_scale, x_scale if x_zero is None else x_zero, tensors["weight_sums"],
        out if bias is None else bias, out, partials, tensors["counters"],
        tokens, layout.rows, layout.width, layout.units * layout.run, layout.units, chunk,
    )  # fmt: skip
    constants = {
        "KIND": layout.kind, "OPERAND": layout.operand, "RUN": layout.run, "FIELDS": 8 // layout.bits,
        "GROUP": layout.group, "X_GROUP": layout.x_group, "HAS_BIAS": bias is not None, "BLOCK_N": plan.block_n,
        "BLOCK_M": plan.block_m, "STAGES": plan.stages, "PACKED": HAS_ASSEMBLY, "CHAINED": chained, "AHEAD": plan.ahead,
        "WHOLE": chunk == layout.units, "X_SCALES": "none" if grouped else "tokens" if x_scale.dim() else "one",
        "X_ZEROS": "none" if x_zero is None else "tokens" if x_zero.dim() else "one", "num_warps": plan.warps,
    }  # fmt: skip
    if chained:
        constants["launch_pdl"] = True
    return multiply_codes, (-(-blocks * layout.units // chunk),), arguments, constants


def decode_weight(weight: Tensor, scale: Tensor, layout: ProductLayout) -> Tensor:
    """Pairs of 4-bit codes [N, width / 2] as 8-bit operands [N, width], times the scales of groups where they fold."""
    out = weight.new_empty(layout.rows, layout.width)
    if layout.operand != "int8":
        out = out.view(torch.float8_e4m3fn)
    rows, units = DECODED_AT_ONCE
    decode_nibbles[(triton.cdiv(layout.rows, rows), triton.cdiv(layout.units, units))](
        weight, scale, out if layout.folds else out.view(torch.int8), layout.rows, weight.shape[1], layout.units,
        KIND=layout.kind, OPERAND=layout.operand, RUN=layout.run, GROUP=layout.group or layout.unit,
        FOLDS=layout.folds, ROWS=rows, UNITS=units, PACKED=HAS_ASSEMBLY, num_warps=4,
    )  # fmt: skip
    return out


def compile_for(layout: ProductLayout, plan: Plan, tokens: int, dtype: torch.dtype) -> None:
    """Compiles the program into Triton's cache, without weights or results."""
    counters = torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
    scales = torch.zeros(16, device="cuda")
    codes = torch.empty(tokens, layout.width, dtype=CODES[layout.operand], device="cuda")
    tensors = {
        "weight": codes if layout.kind == "codes" else counters.to(torch.int8), "counters": counters,
        "scale": scales.to(SCALES[layout.scale_dtype]), "row_scale": scales, "weight_sums": scales,
    }  # fmt: skip
    out = torch.empty(tokens, 1, dtype=dtype, device="cuda")
    launch = described_launch_of if plan.described and layout.is_described else launch_of
    program, _, arguments, constants = launch(codes, scales, None, out, tensors, None, layout, plan)
    program.warmup(*arguments, grid=(1,), **constants)
