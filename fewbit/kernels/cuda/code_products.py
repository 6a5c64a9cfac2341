"""Compiling and launching the products of 8-bit codes: from tensors and a cut to a result."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fewbit.kernels.cuda.compiler import compiled
from fewbit.kernels.cuda.driver import Function, addresses, lines_map, load, multiprocessors, stream_of
from fewbit.kernels.cuda.products import ARCHITECTURE, REGISTERS
from fewbit.kernels.cuda.sources import product_instruction, text
from fewbit.kernels.linear.code_cuts import LINE, CodeCut
from fewbit.kernels.linear.product_layout import ProductLayout

LEAST_BUSY = 0.9
SOURCES = ("hopper.cuh", "floats.cuh", "range.cuh", "bytes.cuh", "ring.cuh", "sums.cuh")


class Problem(ctypes.Structure):
    """The struct of the same name in `bytes.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "row_scale", "weight_sums", "group_scale", "bias", "x_scale")),
        *((name, ctypes.c_void_p) for name in ("x_zero", "partial", "flags")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "stride", "depths", "token_tiles", "tiles", "parts")),
        *((name, ctypes.c_int) for name in ("scale_stride", "zero_stride")),
    )


def multiply(
    codes: Tensor, tokens: int, x_scale: Tensor, x_zero: Tensor | None, tensors: Mapping[str, Tensor],
    bias: Tensor | None, layout: ProductLayout, cut: CodeCut, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y [M, N] of codes with their scales and zero points, see `programs.activations.quantized`.

    Args:
        codes: [rows, width], `cut.token_rows(M)` of them or more, of which the first M count. With fewer, rows that are
            not there are made up, which takes several times as long as to read them.
        tokens: M.
        tensors: of `product_tensors`, and `counters`, zero between calls.
        bias: [N] or None.
        layout: of codes under scales of rows.

    Raises:
        KernelError: there is no compiler, or the driver refuses.
    """
    weight, device = tensors["weight"], codes.device.index
    stride, fused = layout.rows + layout.rows % 2, bias if bias is None or bias.dtype == dtype else None
    out = codes.new_empty(tokens, stride, dtype=dtype)
    grid = _Grid.of(cut, tokens, layout, multiprocessors(device) // cut.cluster)
    blocks = grid.clusters * cut.cluster
    partial = x_scale.new_empty(blocks * cut.sums if grid.divides else 0)
    pointers = (
        out, tensors["row_scale"], tensors["weight_sums"], tensors["scale"], fused, x_scale, x_zero, partial,
        tensors["counters"],
    )  # fmt: skip
    problem = Problem(
        *(None if tensor is None else tensor.data_ptr() for tensor in pointers), tokens, layout.rows, stride,
        grid.depths, grid.token_tiles, grid.tiles, grid.parts, int(x_scale.dim() > 0),
        int(x_zero is not None and x_zero.dim() > 0),
    )  # fmt: skip
    shared = cut.cluster if cut.cluster > 1 else 0
    x_map = _boxes(codes, cut.tokens, cut.lines, 0 if cut.shares_weight else shared)
    weight_map = _boxes(weight, cut.rows, cut.lines, shared if cut.shares_weight else 0)
    scale_width = tensors["scale"].element_size() if cut.grouped else 0
    function = _product(layout.operand, dtype == torch.float16, x_zero is not None, cut, scale_width, device)
    function.launch(blocks, addresses(x_map, weight_map, problem), stream_of(codes))
    product = out if stride == layout.rows else out[:, : layout.rows].contiguous()
    return product if fused is bias else product.add_(bias)


@dataclass(frozen=True)
class _Grid:
    """How the work is shared out.

    Attributes:
        tiles: of a cluster's tokens and output features.
        token_tiles: of them, those of the same output features.
        depths: steps of a tile.
        clusters: of the launch.
        divides: whether tiles are divided by ranges.
        parts: equal ranges of a tile, or 1.
    """

    tiles: int
    token_tiles: int
    depths: int
    clusters: int
    divides: bool
    parts: int

    @classmethod
    @cache
    def of(cls, cut: CodeCut, tokens: int, layout: ProductLayout, room: int) -> _Grid:
        """For a device that has room for so many clusters, as few of them as are no slower."""
        token_tiles = -(-tokens // cut.cluster_tokens)
        tiles = token_tiles * -(-layout.rows // (cut.rows * (1 if cut.shares_weight else cut.cluster)))
        depths = -(-layout.width // (LINE * cut.lines))
        if cut.whole:
            return cls(tiles, token_tiles, depths, -(-tiles // -(-tiles // min(tiles, room))), False, 1)
        parts, work = room // tiles, tiles * depths
        if parts > 1 and depths % parts == 0 and tiles * parts >= LEAST_BUSY * room:
            return cls(tiles, token_tiles, depths, tiles * parts, True, parts)
        each = -(-work // min(work, room))
        return cls(tiles, token_tiles, depths, -(-work // each), work % each > 0 or each % depths > 0, 1)


def _boxes(matrix: Tensor, rows: int, lines: int, sharers: int) -> ctypes.Structure:
    return lines_map(matrix, rows // sharers, 1) if sharers else lines_map(matrix, rows, lines)


@cache
def _product(operand: str, half: bool, zeros: bool, cut: CodeCut, scale_width: int, device: int) -> Function:
    name = "multiply_groups" if cut.grouped else "multiply_bytes"
    with torch.cuda.device(device):
        return load(product_code(operand, half, zeros, cut, scale_width), name, cut.threads, cut.shared_bytes)


def product_code(operand: str, half: bool, zeros: bool, cut: CodeCut, scale_width: int = 0) -> bytes:
    """Machine code of the product, compiled for a cut.

    Args:
        operand: `int8` or `e4m3`.
        half: whether results are f16, else bf16.
        zeros: whether tokens have zero points.
        scale_width: bytes of a scale of groups, 2 of bf16 or 4 of float32, for a grouped cut.

    Raises:
        KernelError: there is no compiler.
    """
    registers, of_feeder = REGISTERS[cut.warpgroups] if cut.is_wide else (0, 0)
    macros = {
        "TOKENS": cut.tokens, "ROWS": cut.rows, "LINES": cut.lines, "STAGES": cut.stages,
        "WARPGROUPS": cut.warpgroups, "CLUSTER": cut.cluster, "SHARES_WEIGHT": int(cut.shares_weight),
        "WHOLE": int(cut.whole), "INTEGER": int(operand == "int8"),
        "HALF": int(half), "ZEROS": int(zeros), "REGISTERS": registers, "FEEDER_REGISTERS": of_feeder,
        "SCALE_WIDTH": scale_width,
    }  # fmt: skip
    width, last = (cut.grouped_width, "grouped.cu") if cut.grouped else (cut.rows, "bytes.cu")
    instruction = product_instruction(width, operand, in_registers=False)
    source = "".join([*(text(name) for name in SOURCES), instruction, text(last)])
    return compiled(source, macros, ARCHITECTURE)
