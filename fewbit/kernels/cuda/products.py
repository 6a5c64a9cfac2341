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
from fewbit.kernels.linear.fragment_layout import DEPTH, DTYPES, INTEGERS, Decoding, FragmentLayout

ARCHITECTURE = "sm_90a"
REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32), 4: (112, 24)}
"""Warpgroups that multiply -> registers of their threads, and of the threads of the warpgroup that feeds them."""
BLOCKS = ("range.cuh", "fragment_problem.cuh", "ring.cuh", "sums.cuh", "fragment_blocks.cuh")
PREPARATIONS = 4 + len(BLOCKS)  # sources before the loops
SWIZZLED = 128  # bytes of a row of a box
DECODE_THREADS = 256


class Problem(ctypes.Structure):
    """The struct of the same name in `fragment_problem.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "out", "bias", "token_scale", "partial", "flags")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "stride", "units", "depths", "token_tiles", "work")),
        *((name, ctypes.c_int) for name in ("parts", "scale_stride")),
        ("row_scale", ctypes.c_void_p),
    )


def multiply(
    x: Tensor, weight: Tensor, flags: Tensor, bias: Tensor | None, layout: FragmentLayout, cut: Cut,
    token_scale: Tensor | None = None, row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [M, N] in the layout's dtype of x [M, K], contiguous and not empty, on x's device.

    Args:
        x: in the layout's dtype, or codes of e4m3 where the layout's operand is.
        weight: from `fragment_tensors`, and so is `row_scale`, where the layout has it.
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
        weight.data_ptr(), out.data_ptr(), _pointer(bias), _pointer(token_scale), partial.data_ptr(), flags.data_ptr(),
        tokens, layout.rows, stride, layout.units, layout.depths, token_tiles, work,
        parts, int(token_scale is not None and token_scale.dim() > 0), _pointer(row_scale),
    )  # fmt: skip
    described = matrix_map(x, cut.tokens // cut.cluster, SWIZZLED // x.element_size())
    function = _product(layout.decoding, cut, cut.shared_bytes(layout), x.device.index)
    function.launch(blocks, addresses(described, problem), stream_of(x))
    return out if stride == layout.rows else out[:, : layout.rows].contiguous()


def decode(weight: Tensor, layout: FragmentLayout, row_scale: Tensor | None = None) -> Tensor:
    """The weight [N, K] in the layout's dtype, or as codes of e4m3 where the layout's operand is, before `row_scale`.

    Raises:
        KernelError: there is no compiler, or the driver refuses.
    """
    dtype = torch.float8_e4m3fn if layout.decoding.is_fp8 else DTYPES[layout.dtype]
    out = torch.empty(layout.rows, layout.columns, dtype=dtype, device=weight.device)
    function = _decoder(layout.decoding, weight.device.index)
    pointers = [ctypes.c_void_p(_pointer(tensor)) for tensor in (weight, out, row_scale)]
    extents = [ctypes.c_int(extent) for extent in (layout.rows, layout.columns, layout.depths)]
    parameters = addresses(*pointers[:2], *extents, pointers[2])  # lists keep alive what they point to
    function.launch(layout.units * layout.depths, parameters, stream_of(weight))
    return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
    texts = [text(name) for name in product_files(decoding)]
    texts.insert(PREPARATIONS, product_instruction(cut.tokens, decoding.operand, in_registers=True))
    return compiled("".join(texts), macros_of(decoding, cut), ARCHITECTURE)


def decoder_code(decoding: Decoding) -> bytes:
    """Machine code that decodes such weights.

    Raises:
        KernelError: there is no compiler.
    """
    texts = [text(name) for name in (*decoding_files(decoding), "decode.cu")]
    return compiled("".join(texts), macros_of(decoding), ARCHITECTURE)


def decoding_files(decoding: Decoding) -> list[str]:
    """Sources that tell how units of a weight are stored and decoded."""
    decoder = f"{decoding.element}_fp8.cuh" if decoding.is_fp8 else f"{decoding.element}.cuh"
    return ["hopper.cuh", "floats.cuh", "fragments.cuh", decoder]


def product_files(decoding: Decoding) -> list[str]:
    """Sources of a product, but for the instruction that multiplies, which follows the first PREPARATIONS."""
    sums = "group_sums.cuh" if decoding.sums_groups else "whole_sums.cuh"
    few = [] if decoding.is_fp8 else ["few_integers.cuh" if decoding.element == INTEGERS else "few_weights.cuh"]
    return [*decoding_files(decoding), *BLOCKS, sums, *few, "kernel.cu"]


def macros_of(decoding: Decoding, cut: Cut | None = None) -> dict[str, int]:
    """What the sources leave to be defined, for a decoder or for the product in a cut."""
    macros = {
        "CODE_BITS": decoding.code_bits, "GROUP": decoding.group or DEPTH, "SCALE_WIDTH": decoding.scale_width,
        "HAS_ZERO": int(decoding.has_zero), "HALF": int(decoding.dtype == "f16"),
        "ROW_SCALED": int(decoding.row_scaled), "OPERAND_BYTES": 1 if decoding.is_fp8 else 2,
    }  # fmt: skip
    if cut is None:
        return macros
    registers, of_producer = REGISTERS[cut.warpgroups]
    macros |= {
        "TOKENS": cut.tokens, "WARPGROUPS": cut.warpgroups, "TILES": cut.tiles, "STAGES": cut.stages,
        "CLUSTER": cut.cluster, "RESIDENTS": cut.residents, "REGISTERS": registers, "PRODUCER_REGISTERS": of_producer,
    }  # fmt: skip
    return macros if decoding.sums_groups else macros | {"STEP": cut.step, "AHEAD": int(cut.ahead)}
