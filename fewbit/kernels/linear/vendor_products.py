"""Products of E4M3 codes by torch's own operations: scales of rows, of blocks of 128x128, or of groups of 128.

Those of groups of a weight alone are multiplied in CUDA C++ (`cuda/grouped.cu`) where NVRTC is at hand, which took 0.66
to 0.95 of cuBLAS's time at 1,024 and 4,096 rows.

That of rows sums all of K in the tensor cores, whose sums keep some 14 bits: K = 14336 costs 0.3 % of an output's norm
where bf16 costs 0.17 %, and the product is a tenth faster than with sums of 128 apiece. Those of blocks and of groups
are cuBLAS's of compute capability 9.0 alone, with sums of 128; only a table of measurements asks for them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fewbit.kernels.cuda.compiler import PACKAGE
from fewbit.kernels.linear.code_cuts import group_cut
from fewbit.kernels.linear.product_layout import BLOCK, ProductLayout
from fewbit.kernels.probe import installed

ROW_QUANTUM = 4
"""Rows of x that the products with scales of blocks take at a time."""


def vendor_multiplies(layout: ProductLayout) -> bool:
    """Whether torch has the product: E4M3 on both sides, nothing padded."""
    if layout.operand != "e4m3" or layout.kind != "codes" or layout.width != layout.columns or layout.rows % 16:
        return False
    if not layout.group:
        return not layout.x_group
    of_groups = layout.group == BLOCK and layout.block_rows == 1 and layout.x_group in (0, BLOCK)
    return layout.columns % BLOCK == 0 and (of_groups or layout.in_blocks)


def runs_on_hopper_alone(layout: ProductLayout) -> bool:
    """Of a layout that torch multiplies: whether only compute capability 9.0 has the product."""
    return layout.group > 0


@cache
def vendor_runs(layout: ProductLayout, device: torch.device) -> bool:
    """Whether torch multiplies such codes on this device."""
    if device.type != "cuda" or torch.version.hip is not None or not vendor_multiplies(layout):
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability == (9, 0) if runs_on_hopper_alone(layout) else capability >= (8, 9)


def vendor_product(
    codes: Tensor, x_scale: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, layout: ProductLayout,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y [M, N] of codes [M, K] with their scales, see `programs.activations.quantized`.

    Args:
        tensors: `weight` of codes, `row_scale` [N] and `scale` or `block_scale` as `product_tensors` has them.
    """
    assert tensors["row_scale"].shape == (layout.rows,), "compiled products read a scale for each output feature"
    if not layout.group:
        return _of_rows(codes, x_scale, tensors, bias, dtype)
    if compiles_groups(layout, codes.device):
        return _of_groups(codes, x_scale, tensors, bias, layout, dtype)
    return of_blocks(codes, x_scale, tensors, bias, layout, dtype)


@cache
def compiles_groups(layout: ProductLayout, device: torch.device) -> bool:
    """Whether CUDA C++ multiplies such codes on this device."""
    of_weight = layout.group == BLOCK and layout.block_rows == 1 and not layout.x_group
    return of_weight and PACKAGE in installed() and vendor_runs(layout, device)


def _of_groups(
    codes: Tensor, x_scale: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, layout: ProductLayout,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    from fewbit.kernels.cuda import code_products  # loads the driver's library

    scale, empty = tensors["scale"], x_scale.new_empty(0)
    sides = {
        "weight": tensors["weight"], "row_scale": tensors["row_scale"].contiguous(), "weight_sums": empty,
        "scale": (scale if scale.dtype == torch.bfloat16 else scale.float()).contiguous(), "counters": empty,
    }  # fmt: skip
    tokens = codes.shape[0]
    with torch.cuda.device(codes.device):  # the driver launches where the current device is
        cut = group_cut(layout.rows, tokens)
        return code_products.multiply(codes, tokens, x_scale, None, sides, bias, layout, cut, dtype)


def _of_rows(
    codes: Tensor, x_scale: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    tokens = codes.shape[0]
    over_tokens = x_scale.reshape(-1, 1) if x_scale.dim() else x_scale.reshape(1, 1).repeat(tokens, 1)
    fused = bias if bias is not None and bias.dtype == dtype == torch.bfloat16 else None
    product = torch._scaled_mm(
        codes, tensors["weight"].t(), over_tokens, tensors["row_scale"].view(1, -1), bias=fused, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return product if bias is None or fused is not None else product.add_(bias)


def of_blocks(
    codes: Tensor, x_scale: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, layout: ProductLayout,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`vendor_product` of blocks and groups by cuBLAS, which takes scales of x along M first, of groups along N."""
    kinds, tokens = torch.nn.functional.ScalingType, codes.shape[0]
    missing = -tokens % ROW_QUANTUM
    if not layout.x_group:
        x_scale = x_scale.expand(tensors["scale"].shape[0], tokens)
    if missing:
        codes = torch.nn.functional.pad(codes.view(torch.int8), (0, 0, 0, missing)).view(codes.dtype)
        x_scale = torch.nn.functional.pad(x_scale, (0, missing), value=1.0)
    if layout.in_blocks:
        scale, kind = tensors["block_scale"].t(), kinds.BlockWise128x128
    else:
        scale, kind = (tensors["scale"].float() * tensors["row_scale"]).t(), kinds.BlockWise1x128
    product = torch.nn.functional.scaled_mm(
        codes, tensors["weight"].t(), x_scale.contiguous().t(), kinds.BlockWise1x128, scale, kind, output_dtype=dtype
    )
    product = product[:tokens]
    return product if bias is None else product.add_(bias)
