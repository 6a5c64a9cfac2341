"""Compiling and launching the products of 8-bit codes: from tensors and a cut to a result."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from fewbit.kernels.cuda.compiler import compiled
from fewbit.kernels.cuda.driver import Function, addresses, lines_map, load, multiprocessors, stream_of
from fewbit.kernels.cuda.products import ARCHITECTURE, REGISTERS
from fewbit.kernels.cuda.sources import product_instruction, text
from fewbit.kernels.linear.code_cuts import LINE, CodeCut
from fewbit.kernels.linear.product_layout import ProductLayout

SOURCES = ("hopper.cuh", "floats.cuh", "range.cuh", "bytes.cuh", "ring.cuh", "sums.cuh")


class Problem(ctypes.Structure):
    """The struct of the same name in `bytes.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "row_scale", "weight_sums", "bias", "x_scale", "x_zero")),
        *((name, ctypes.c_void_p) for name in ("partial", "flags")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "stride", "depths", "token_tiles", "tiles", "parts")),
        *((name, ctypes.c_int) for name in ("scale_stride", "zero_stride")),
    )


def multiply(
    codes: Tensor, x_scale: Tensor, x_zero: Tensor | None, tensors: Mapping[str, Tensor], bias: Tensor | None,
    layout: ProductLayout, cut: CodeCut, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y [M, N] of codes [M, width] with their scales and zero points, see `programs.activations.quantized`.

    Args:
        tensors: of `product_tensors`, and `counters`, zero between calls.
        bias: [N] in `dtype`, or None.
        layout: of codes under scales of rows.

    Raises:
        KernelError: there is no compiler, or the driver refuses.
    """
    tokens, weight = codes.shape[0], tensors["weight"]
    stride = layout.rows + layout.rows % 2
    out = codes.new_empty(tokens, stride, dtype=dtype)
    per_token_tile = cut.tokens * (cut.cluster if cut.shares_weight else 1)
    per_row_tile = cut.rows * (1 if cut.shares_weight else cut.cluster)
    token_tiles, depths = -(-tokens // per_token_tile), -(-layout.width // (LINE * cut.lines))
    tiles = token_tiles * -(-layout.rows // per_row_tile)
    pieces = tiles if cut.whole else tiles * depths
    clusters = min(pieces, multiprocessors(codes.device.index) // cut.cluster)
    clusters = -(-pieces // -(-pieces // clusters))  # as few as are no slower
    each, rest = divmod(tiles * depths, clusters)
    cuts_tiles = not cut.whole and (rest or each % depths)
    parts = depths // each if cuts_tiles and not rest and depths % each == 0 else 1
    blocks = clusters * cut.cluster
    partial = x_scale.new_empty(blocks * cut.sums if cuts_tiles else 0)
    problem = Problem(
        out.data_ptr(), tensors["row_scale"].data_ptr(), tensors["weight_sums"].data_ptr(),
        None if bias is None else bias.data_ptr(), x_scale.data_ptr(), None if x_zero is None else x_zero.data_ptr(),
        partial.data_ptr(), tensors["counters"].data_ptr(), tokens, layout.rows, stride, depths, token_tiles, tiles,
        parts, int(x_scale.dim() > 0), int(x_zero is not None and x_zero.dim() > 0),
    )  # fmt: skip
    shared = cut.cluster if cut.cluster > 1 else 0
    x_map = _boxes(codes, cut.tokens, cut.lines, 0 if cut.shares_weight else shared)
    weight_map = _boxes(weight, cut.rows, cut.lines, shared if cut.shares_weight else 0)
    function = _product(layout.operand, dtype == torch.float16, x_zero is not None, cut, codes.device.index)
    function.launch(blocks, addresses(x_map, weight_map, problem), stream_of(codes))
    return out if stride == layout.rows else out[:, : layout.rows].contiguous()


def _boxes(matrix: Tensor, rows: int, lines: int, sharers: int) -> ctypes.Structure:
    return lines_map(matrix, rows // sharers, 1) if sharers else lines_map(matrix, rows, lines)


@cache
def _product(operand: str, half: bool, zeros: bool, cut: CodeCut, device: int) -> Function:
    with torch.cuda.device(device):
        return load(product_code(operand, half, zeros, cut), "multiply_bytes", cut.threads, cut.shared_bytes)


def product_code(operand: str, half: bool, zeros: bool, cut: CodeCut) -> bytes:
    """Machine code of the product, compiled for a cut.

    Args:
        operand: `int8` or `e4m3`.
        half: whether results are f16, else bf16.
        zeros: whether tokens have zero points.

    Raises:
        KernelError: there is no compiler.
    """
    registers, of_feeder = REGISTERS[cut.warpgroups] if cut.is_wide else (0, 0)
    macros = {
        "TOKENS": cut.tokens, "ROWS": cut.rows, "LINES": cut.lines, "STAGES": cut.stages,
        "WARPGROUPS": cut.warpgroups, "CLUSTER": cut.cluster, "SHARES_WEIGHT": int(cut.shares_weight),
        "RESIDENTS": cut.residents, "WHOLE": int(cut.whole), "INTEGER": int(operand == "int8"), "HALF": int(half),
        "ZEROS": int(zeros), "REGISTERS": registers, "FEEDER_REGISTERS": of_feeder,
    }  # fmt: skip
    instruction = product_instruction(cut.rows, operand, in_registers=False)
    source = "".join([*(text(name) for name in SOURCES), instruction, text("bytes.cu")])
    return compiled(source, macros, ARCHITECTURE)
