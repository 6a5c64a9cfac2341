"""Fetching into the second-level cache ahead of use."""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def fetch_ahead(addresses):
    """Brings the lines of the addresses into the second-level cache and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
