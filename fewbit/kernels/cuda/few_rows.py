"""Compiling and launching the product of few rows of x over weight fragments."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from fewbit.errors import KernelError
from fewbit.kernels.cuda.compiler import compiled
from fewbit.kernels.cuda.driver import Function, addresses, load, stream_of
from fewbit.kernels.cuda.products import ARCHITECTURE, decoding_files, macros_of
from fewbit.kernels.cuda.sources import text
from fewbit.kernels.linear.fragment_layout import ROWS, Decoding, FragmentLayout
from fewbit.kernels.linear.row_cuts import TILE, RowCut


class RowProblem(ctypes.Structure):
    """`Problem` in `few_rows.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "out", "x", "bias")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "columns", "stride", "tiles", "depths")),
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, layout: FragmentLayout, cut: RowCut) -> Tensor:
    """y [M, N] in the layout's dtype of x [M, K], contiguous, of 1 to `cut.tokens` rows, on x's device.

    Args:
        x: in the layout's dtype.
        weight: from `fragment_tensors`.
        bias: [N] in the layout's dtype, or None.

    Raises:
        KernelError: x has more rows, there is no compiler, or the driver refuses.
    """
    tokens, stride = x.shape[0], layout.rows + layout.rows % 2
    if tokens > cut.tokens:
        raise KernelError(f"a cut for {cut.tokens} rows of x was given {tokens}", "Take a cut of `cut_for`.")
    if x.data_ptr() % 16:
        x = x.clone()
    out = x.new_empty(tokens, stride)
    problem = RowProblem(
        weight.data_ptr(), out.data_ptr(), x.data_ptr(), None if bias is None else bias.data_ptr(), tokens, layout.rows,
        layout.columns, stride, layout.units * (ROWS // TILE), layout.depths,
    )  # fmt: skip
    function = _product(layout.decoding, cut, cut.shared_bytes(layout), x.device.index)
    function.launch(cut.launched(layout), addresses(problem), stream_of(x))
    return out if stride == layout.rows else out[:, : layout.rows].contiguous()


@cache
def _product(decoding: Decoding, cut: RowCut, shared_bytes: int, device: int) -> Function:
    with torch.cuda.device(device):
        return load(product_code(decoding, cut), "multiply_few_rows", cut.threads, shared_bytes)


def product_code(decoding: Decoding, cut: RowCut) -> bytes:
    """Machine code of the product over such weights, compiled for a cut.

    Raises:
        KernelError: there is no compiler.
    """
    macros = {
        "TILES": cut.tiles, "ROW_WARPS": cut.row_warps, "DEPTH_WARPS": cut.depth_warps, "STAGES": cut.stages,
        "EARLY": cut.early, "CLUSTER": cut.cluster,
    }  # fmt: skip
    if cut.digits:
        macros["TOKENS"] = cut.tokens
    products = "few_digits.cuh" if cut.digits else "few_floats.cuh"
    source = "".join(text(name) for name in (*decoding_files(decoding), "few_rows.cuh", products, "few_rows.cu"))
    return compiled(source, macros_of(decoding) | macros, ARCHITECTURE)
