"""Compiling and launching the products over weight fragments, and decoding them: from tensors and a cut to a result."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from fewbit.kernels.cuda.compiler import compiled
from fewbit.kernels.cuda.driver import Function, addresses, load, matrix_map, multiprocessors, stream_of
from fewbit.kernels.cuda.sources import product_instruction, text
from fewbit.kernels.linear.fragment_cuts import Cut
from fewbit.kernels.linear.fragment_layout import DTYPES, Decoding, FragmentLayout
from fewbit.spec.element import E4M3

ARCHITECTURE = "sm_90a"
REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32), 4: (112, 24)}
"""Warpgroups that multiply -> registers of their threads, and of the threads of the warpgroup that feeds them."""
FLOATS = ("hopper.cuh", "floats.cuh", "fragments.cuh")
SOURCES = (*FLOATS, "range.cuh", "fragment_problem.cuh", "ring.cuh", "sums.cuh", "fragment_blocks.cuh")
SWIZZLED = 128  # bytes of a row of a box
DECODE_THREADS = 256


class Problem(ctypes.Structure):
    """The struct of the same name in `ring.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "out", "bias", "token_scale", "partial", "flags")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "stride", "units", "depths", "token_tiles", "work")),
        *((name, ctypes.c_int) for name in ("parts", "scale_stride")),
    )


def multiply(
    x: Tensor, weight: Tensor, flags: Tensor, bias: Tensor | None, layout: FragmentLayout, cut: Cut,
    token_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [M, N] in the layout's dtype of x [M, K], contiguous and not empty, on x's device.

    Args:
        x: in the layout's dtype, or codes of e4m3 where the layout's operand is.
        weight: from `fragments`.
        flags: int32, one for each block, zero between calls.
        bias: [N] in the layout's dtype, or None.
        token_scale: what codes count in, float32 [M] or [].

    Raises:
        KernelError: there is no compiler, or the driver refuses.
    """
    tokens, stride = x.shape[0], layout.rows + layout.rows % 2
    if x.data_ptr() % 16:
        x = x.clone()
    out = x.new_empty(tokens, stride, dtype=DTYPES[layout.dtype])
    token_tiles = -(-tokens // cut.tokens)
    work = token_tiles * -(-layout.units // (cut.units * cut.cluster)) * layout.depths
    clusters = min(work, multiprocessors(x.device.index) * cut.blocks // cut.cluster)
    if cut.even:
        clusters = -(-work // -(-work // clusters))
    blocks, (each, rest) = clusters * cut.cluster, divmod(work, clusters)
    parts = layout.depths // each if not rest and layout.depths % each == 0 else 1
    partial = x.new_empty(blocks * cut.sums if rest or each % layout.depths else 0, dtype=torch.float32)
    problem = Problem(
        weight.data_ptr(), out.data_ptr(), None if bias is None else bias.data_ptr(),
        None if token_scale is None else token_scale.data_ptr(), partial.data_ptr(), flags.data_ptr(), tokens,
        layout.rows, stride, layout.units, layout.depths, token_tiles, work,
        parts, int(token_scale is not None and token_scale.dim() > 0),
    )  # fmt: skip
    described = matrix_map(x, cut.tokens // cut.cluster, SWIZZLED // x.element_size())
    function = _product(layout.decoding, cut, cut.shared_bytes(layout), x.device.index)
    function.launch(blocks, addresses(described, problem), stream_of(x))
    return out if stride == layout.rows else out[:, : layout.rows].contiguous()


def decode(weight: Tensor, layout: FragmentLayout) -> Tensor:
    """The weight [N, K] in the layout's dtype.

    Raises:
        KernelError: there is no compiler, or the driver refuses.
    """
    out = torch.empty(layout.rows, layout.columns, dtype=DTYPES[layout.dtype], device=weight.device)
    function = _decoder(layout.decoding, weight.device.index)
    pointers = (ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    extents = (ctypes.c_int(layout.rows), ctypes.c_int(layout.columns), ctypes.c_int(layout.depths))
    function.launch(layout.units * layout.depths, addresses(*pointers, *extents), stream_of(weight))
    return out


@cache
def _product(decoding: Decoding, cut: Cut, shared_bytes: int, device: int) -> Function:
    with torch.cuda.device(device):
        return load(product_code(decoding, cut), "multiply_fragments", cut.threads, shared_bytes)


@cache
def _decoder(decoding: Decoding, device: int) -> Function:
    with torch.cuda.device(device):
        return load(decoder_code(decoding), "decode_weight", DECODE_THREADS, 0)


def product_code(decoding: Decoding, cut: Cut) -> bytes:
    """Machine code of the product over such weights, compiled for a cut.

    Raises:
        KernelError: there is no compiler.
    """
    registers, of_producer = REGISTERS[cut.warpgroups]
    is_fp8 = decoding.operand == E4M3.name
    macros = {
        "TOKENS": cut.tokens, "WARPGROUPS": cut.warpgroups, "TILES": cut.tiles, "STAGES": cut.stages,
        "CLUSTER": cut.cluster, "RESIDENTS": cut.residents, "OPERAND_BYTES": 1 if is_fp8 else 2, "REGISTERS": registers,
        "PRODUCER_REGISTERS": of_producer,
    }  # fmt: skip
    if not is_fp8:
        macros |= {"STEP": cut.step, "AHEAD": int(cut.ahead)}
    instruction = product_instruction(cut.tokens, decoding.operand, in_registers=True)
    last = ("weight_fp8.cuh" if is_fp8 else "weight_only.cuh", "kernel.cu")
    source = "".join([*(text(name) for name in SOURCES), instruction, *(text(name) for name in last)])
    return compiled(source, macros | decoding_macros(decoding), ARCHITECTURE)


def decoder_code(decoding: Decoding) -> bytes:
    """Machine code that decodes such weights.

    Raises:
        KernelError: there is no compiler.
    """
    source = "".join(text(name) for name in (*FLOATS, "decode.cu"))
    return compiled(source, decoding_macros(decoding), ARCHITECTURE)


def decoding_macros(decoding: Decoding) -> dict[str, int]:
    """What `fragments.cuh` is compiled for."""
    return {
        "GROUP": decoding.group, "HAS_ZERO": int(decoding.has_zero), "HALF": int(decoding.dtype == "f16"),
    }  # fmt: skip
