"""Compiling and launching `weight_only.cu` and `decode.cu`: from tensors and a cut to a product or a matrix."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fewbit.kernels.cuda.compiler import compiled
from fewbit.kernels.cuda.driver import Function, addresses, load, matrix_map
from fewbit.kernels.linear.fragment_cuts import Cut
from fewbit.kernels.linear.fragment_layout import DTYPES, FragmentLayout

ARCHITECTURE = "sm_90a"
REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32), 4: (112, 24)}
"""Warpgroups that multiply -> registers of their threads, and of the threads of the warpgroup that feeds them."""
SWIZZLED = 64  # input features of 128 bytes
DECODE_THREADS = 256


class Problem(ctypes.Structure):
    """The struct of the same name in `weight_only.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "out", "bias", "partial", "flags")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "stride", "units", "depths", "token_tiles", "work")),
    )


def multiply(x: Tensor, weight: Tensor, flags: Tensor, bias: Tensor | None, layout: FragmentLayout, cut: Cut) -> Tensor:
    """y [M, N] of x [M, K], contiguous and not empty, on x's device.

    Args:
        x: in the layout's dtype.
        weight: from `fragments`.
        flags: int32, one for each block, zero between calls.
        bias: [N] in x's dtype, or None.

    Raises:
        KernelError: the source does not compile or the driver refuses.
    """
    tokens, stride = x.shape[0], layout.rows + layout.rows % 2
    if x.data_ptr() % 16:
        x = x.clone()
    out = x.new_empty(tokens, stride)
    token_tiles = -(-tokens // cut.tokens)
    work = token_tiles * -(-layout.units // (cut.units * cut.cluster)) * layout.depths
    each = -(-work // (_multiprocessors(x.device.index) // cut.cluster))
    blocks = -(-work // each) * cut.cluster
    partial = x.new_empty(blocks * cut.sums if each % layout.depths else 0, dtype=torch.float32)
    problem = Problem(
        weight.data_ptr(), out.data_ptr(), None if bias is None else bias.data_ptr(), partial.data_ptr(),
        flags.data_ptr(), tokens, layout.rows, stride, layout.units, layout.depths, token_tiles, work,
    )  # fmt: skip
    described = matrix_map(x, cut.tokens // cut.cluster, SWIZZLED)
    function = _product(layout.group, layout.has_zero, layout.dtype, cut, cut.shared_bytes(layout), x.device.index)
    function.launch(blocks, addresses(described, problem), _stream(x))
    return out if stride == layout.rows else out[:, : layout.rows].contiguous()


def decode(weight: Tensor, layout: FragmentLayout) -> Tensor:
    """The weight [N, K] in the layout's dtype.

    Raises:
        KernelError: the source does not compile or the driver refuses.
    """
    out = torch.empty(layout.rows, layout.columns, dtype=DTYPES[layout.dtype], device=weight.device)
    function = _decoder(layout.group, layout.has_zero, layout.dtype, weight.device.index)
    pointers = (ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    extents = (ctypes.c_int(layout.rows), ctypes.c_int(layout.columns), ctypes.c_int(layout.depths))
    function.launch(layout.units * layout.depths, addresses(*pointers, *extents), _stream(weight))
    return out


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _product(group: int, has_zero: bool, dtype: str, cut: Cut, shared_bytes: int, device: int) -> Function:
    with torch.cuda.device(device):
        return load(product_code(group, has_zero, dtype, cut), "weight_only", cut.threads, shared_bytes)


@cache
def _decoder(group: int, has_zero: bool, dtype: str, device: int) -> Function:
    with torch.cuda.device(device):
        return load(decoder_code(group, has_zero, dtype), "decode_weight", DECODE_THREADS, 0)


def product_code(group: int, has_zero: bool, dtype: str, cut: Cut) -> bytes:
    """Machine code of the product over weights of such groups, compiled for a cut.

    Raises:
        KernelError: the source does not compile.
    """
    registers, of_producer = REGISTERS[cut.warpgroups]
    macros = {
        "TOKENS": cut.tokens, "WARPGROUPS": cut.warpgroups, "TILES": cut.tiles, "STAGES": cut.stages,
        "STEP": cut.step, "CLUSTER": cut.cluster, "AHEAD": int(cut.ahead), "REGISTERS": registers, "PRODUCER_REGISTERS": of_producer,
    }  # fmt: skip
    source = _text("hopper.cuh") + _text("fragments.cuh") + product_instruction(cut.tokens, dtype)
    return compiled(source + _text("weight_only.cu"), macros | _decoding(group, has_zero, dtype), ARCHITECTURE)


def decoder_code(group: int, has_zero: bool, dtype: str) -> bytes:
    """Machine code that decodes weights of such groups.

    Raises:
        KernelError: the source does not compile.
    """
    source = _text("hopper.cuh") + _text("fragments.cuh") + _text("decode.cu")
    return compiled(source, _decoding(group, has_zero, dtype), ARCHITECTURE)


def _decoding(group: int, has_zero: bool, dtype: str) -> dict[str, int]:
    return {"GROUP": group, "HAS_ZERO": int(has_zero), "HALF": int(dtype == "f16")}


@cache
def _text(name: str) -> str:
    return (files("fewbit.kernels.cuda") / name).read_text(encoding="utf-8")


def product_instruction(tokens: int, dtype: str) -> str:
    """C++ for sums [64, tokens] += fragment [64, 16] @ x [tokens, 16]^T, which has as many operands as sums."""
    sums = tokens // 2
    targets = ", ".join(f"%{i}" for i in range(sums))
    sources = f"{{%{sums}, %{sums + 1}, %{sums + 2}, %{sums + 3}}}, %{sums + 4}"
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    shape = f"m64n{tokens}k16.f32.{dtype}.{dtype}"
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{sums}], const u32 (&a)[4], u64 x, bool adds) {{
    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{sums + 5}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.{shape} {{{targets}}}, {sources}, adds, 1, 1, 0;\\n}}"
                 : {outputs}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"((u32)adds));
}}
"""
