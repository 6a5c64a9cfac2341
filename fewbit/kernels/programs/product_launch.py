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


CHAINED_ROWS = 256
"""Rows of x up to which a product lets the next kernel begin before it ends: longer ones lose more to its programs,
which wait on the multiprocessors, than the start of a kernel takes."""


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
    steps = layout.width // DEPTH.value
    splits = plan.splits and plan.programs > 0 and blocks <= tensors["counters"].numel()
    chunk = triton.cdiv(blocks * steps, plan.programs) if splits else steps
    parts = triton.cdiv(steps, chunk) + 1 if splits else 0
    chained = chains(codes.device) and tokens <= CHAINED_ROWS
    arguments = (
        TensorDescriptor.from_tensor(weight, [plan.block_n, DEPTH.value]),
        TensorDescriptor.from_tensor(codes, [plan.block_m, DEPTH.value]), weight, tensors["row_scale"], x_scale,
        x_scale if x_zero is None else x_zero, tensors["weight_sums"], out if bias is None else bias, out,
        x_scale.new_empty(parts * tokens * layout.rows), tensors["counters"], tokens, layout.rows, layout.width, chunk,
    )  # fmt: skip
    constants = {
        "OPERAND": layout.operand, "HAS_BIAS": bias is not None, "BLOCK_N": plan.block_n, "BLOCK_M": plan.block_m,
        "STAGES": plan.stages, "CHAINED": chained, "AHEAD": plan.ahead, "WHOLE": not splits,
        "X_SCALES": "tokens" if x_scale.dim() else "one",
        "X_ZEROS": "none" if x_zero is None else "tokens" if x_zero.dim() else "one", "num_warps": plan.warps,
    }  # fmt: skip
    if chained:
        constants["launch_pdl"] = True
    if plan.registers:
        constants["maxnreg"] = plan.registers
    programs = triton.cdiv(blocks * steps, chunk) if splits else min(blocks, plan.programs or blocks)
    return multiply_described, (programs,), arguments, constants


def launch_of(
    codes: Tensor, x_scale: Tensor, x_zero: Tensor | None, out: Tensor, tensors: Mapping[str, Tensor],
    bias: Tensor | None, layout: ProductLayout, plan: Plan,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The program, grid, arguments and compile-time arguments of `multiply_codes`."""
    tokens = codes.shape[0]
    blocks = -(-layout.rows // plan.block_n) * -(-tokens // plan.block_m)
    programs = plan.programs if plan.programs and blocks <= tensors["counters"].numel() else blocks
    run = _run_of(layout, plan)
    units = layout.width // (run * 8 // layout.bits)
    chunk = max(1, -(-blocks * units // programs))
    parts = 1 if chunk % units == 0 else -(-units // chunk) + 1
    partials = x_scale.new_empty(parts * tokens * layout.rows if parts > 1 else 0)
    chained = chains(codes.device) and tokens <= CHAINED_ROWS
    grouped = layout.x_group > 0
    arguments = (
        codes, tensors["weight"], tensors["scale"], tensors["row_scale"],
        x_scale, x_scale if x_zero is None else x_zero, tensors["weight_sums"],
        out if bias is None else bias, out, partials, tensors["counters"],
        tokens, layout.rows, layout.width, units * run, units, chunk,
    )  # fmt: skip
    constants = {
        "KIND": layout.kind, "OPERAND": layout.operand, "RUN": run, "FIELDS": 8 // layout.bits,
        "GROUP": 0 if layout.folds else layout.group, "FOLDS": layout.folds, "X_GROUP": layout.x_group,
        "HAS_BIAS": bias is not None, "BLOCK_N": plan.block_n, "BLOCK_M": plan.block_m, "STAGES": plan.stages,
        "PACKED": HAS_ASSEMBLY, "CHAINED": chained, "AHEAD": plan.ahead, "WHOLE": chunk == units,
        "X_SCALES": "none" if grouped else "tokens" if x_scale.dim() else "one",
        "X_ZEROS": "none" if x_zero is None else "tokens" if x_zero.dim() else "one", "num_warps": plan.warps,
    }  # fmt: skip
    if chained:
        constants["launch_pdl"] = True
    if plan.registers:
        constants["maxnreg"] = plan.registers
    return multiply_codes, (-(-blocks * units // chunk),), arguments, constants


def _run_of(layout: ProductLayout, plan: Plan) -> int:
    """Bytes of a row that are read at a time."""
    deep = plan.depth and layout.kind == "codes" and not (layout.group or layout.x_group)
    return plan.depth if deep and layout.width % plan.depth == 0 else layout.run


def decode_weight(weight: Tensor, scale: Tensor, layout: ProductLayout) -> Tensor:
    """Pairs of 4-bit codes [N, width / 2] as 8-bit operands [N, width], times the scales of groups where they fold."""
    out = weight.new_empty(layout.rows, layout.width)
    if layout.operand != "int8":
        out = out.view(torch.float8_e4m3fn)
    rows, units = DECODED_AT_ONCE
    decode_nibbles[(triton.cdiv(layout.rows, rows), triton.cdiv(layout.units, units))](
        weight, scale, out.view(torch.int8), layout.rows, layout.units * layout.run, layout.units,
        KIND=layout.kind, OPERAND=layout.operand, RUN=layout.run,
        FOLDS=layout.folds, ROWS=rows, UNITS=units, PACKED=HAS_ASSEMBLY, num_warps=4,
    )  # fmt: skip
    return out


def compile_for(layout: ProductLayout, plan: Plan, tokens: int, dtype: torch.dtype) -> None:
    """Compiles the program into Triton's cache, without weights or results."""
    counters = torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
    scales = torch.zeros(16, device="cuda")
    codes = torch.empty(tokens, layout.width, dtype=CODES[layout.operand], device="cuda")
    held = counters if layout.folds else scales.to(SCALES[layout.scale_dtype])
    tensors = {
        "weight": codes if layout.kind == "codes" else counters.to(torch.int8), "counters": counters, "scale": held,
        "row_scale": scales, "weight_sums": scales,
    }  # fmt: skip
    out = torch.empty(tokens, 1, dtype=dtype, device="cuda")
    launch = described_launch_of if plan.described and layout.is_described else launch_of
    program, _, arguments, constants = launch(codes, scales, None, out, tensors, None, layout, plan)
    program.warmup(*arguments, grid=(1,), **constants)
