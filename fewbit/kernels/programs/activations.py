"""Activations by token, or by one known scale, as the 16-bit numbers that their codes stand for, in one program a row.

The numbers of E4M3 and of integers of up to 8 bits are exact in bf16 and f16, so a product over them is the product
over the codes. Rounding is to nearest, ties to even, by adding and taking away a large number of the right binade.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from fewbit.spec.element import F32


def quantized_numbers(
    x: Tensor, input_scale: Tensor | None, divisor: float, low: float, high: float, is_float: bool
) -> tuple[Tensor, Tensor]:
    """The numbers [M, K] that codes of x stand for, in x's dtype, and scales, float32 [M], or `input_scale` itself.

    Args:
        x: [M, K], contiguous.
        input_scale: float32 [], or None for one dynamic scale a token.
        divisor: the code that the largest magnitude of a token is brought to.
        low, high: the range of the codes.
        is_float: whether codes are E4M3, else integers.
    """
    tokens, columns = x.shape
    numbers = torch.empty_like(x)
    scales = x.new_empty(tokens, dtype=torch.float32) if input_scale is None else input_scale
    block = 1 << (columns - 1).bit_length()
    quantize_rows[(tokens,)](
        x, numbers, scales, columns, divisor, low, high, F32.smallest_positive, input_scale is None, is_float, block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return numbers, scales


@triton.jit
def quantize_rows(
    x, numbers, scales, columns, divisor, low, high, smallest, DYNAMIC: tl.constexpr, IS_FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(x + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    if DYNAMIC:
        extreme = tl.max(tl.abs(values), axis=0)
        scale = tl.where(extreme > 0, tl.maximum(tl.div_rn(extreme, divisor), tl.cast(smallest, tl.float32)), 1.0)
        tl.store(scales + row, scale)
    else:
        scale = tl.load(scales)
    quotient = tl.div_rn(values, scale + tl.zeros_like(values))
    clamped = tl.minimum(tl.maximum(quotient, low), high)
    if IS_FLOAT:
        binade = (clamped.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(binade, 0.015625) * 1572864.0  # 1.5 * 2**20; E4M3's smallest binade is 2**-6
    else:
        large = 12582912.0 + tl.zeros_like(clamped)  # 1.5 * 2**23
    rounded = (clamped + large) - large
    tl.store(numbers + row * columns + offsets, rounded.to(numbers.dtype.element_ty), mask=inside)
