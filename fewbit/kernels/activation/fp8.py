"""Activations to E4M3 in one Triton kernel: per token with the scale found in the same pass, or by a known scale.

Bit for bit what `numerics.quantize` gives: divisions are correctly rounded, values are clamped before the cast. In
plain torch the same takes a dozen launches, more than the product of a small layer costs. Triton's interpreter rounds
casts to FP8 otherwise than GPUs do, so this is compared with the definition on a GPU only.

Triton comes with GPU builds of torch and is imported only when a kernel runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fewbit.spec.element import E4M3, F32

LARGEST = E4M3.max
MAX_COLUMNS = 16384
"""A row is held in the registers of one program; a longer one would spill."""


def quantize_fp8(flat: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """E4M3 codes [M, K] and scales, float32 [M, 1], or `input_scale` itself where it is given.

    Args:
        flat: [M, K] on a GPU, contiguous, K at most `MAX_COLUMNS`.
        input_scale: float32 [], or None for one dynamic scale a token.
    """
    rows, columns = flat.shape
    codes = torch.empty_like(flat, dtype=torch.float8_e4m3fn)
    scale = flat.new_empty(rows, 1, dtype=torch.float32) if input_scale is None else input_scale
    block = 1 << (columns - 1).bit_length()
    warps = min(16, max(1, block // 512))
    _kernel()[(rows,)](
        flat, codes, scale, columns, LARGEST, F32.smallest_positive, input_scale is None, block, num_warps=warps
    )
    return codes, scale


@cache
def _kernel() -> Any:
    import triton
    from triton import language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def quantize_rows(x, codes, scales, columns, largest, smallest, dynamic: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        offsets = tl.arange(0, block)
        inside = offsets < columns
        numbers = tl.load(x + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        if dynamic:
            extreme = tl.max(tl.abs(numbers), axis=0)
            scale = tl.where(extreme > 0, tl.maximum(tl.div_rn(extreme, largest), smallest), 1.0)
            tl.store(scales + row, scale)
        else:
            scale = tl.load(scales)
        quotient = tl.div_rn(numbers, scale + tl.zeros_like(numbers))
        clamped = tl.minimum(tl.maximum(quotient, -largest), largest)
        tl.store(codes + row * columns + offsets, clamped.to(codes.dtype.element_ty), mask=inside)

    return quantize_rows
