"""Compiling and launching `weight_only.cu`: from tensors and a cut to a product."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fewbit.kernels.cuda.compiler import compiled
from fewbit.kernels.cuda.driver import Function, TensorMap, addresses, load, matrix_map
from fewbit.kernels.linear.fragment_layout import DEPTH, FragmentLayout

ARCHITECTURE = "sm_90a"
WARPGROUP = 128
REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32), 4: (112, 24)}
"""Warpgroups that multiply -> registers of their threads, and of the threads of the warpgroup that feeds them."""
SWIZZLED = 64  # input features of 128 bytes


@dataclass(frozen=True)
class Cut:
    """How a product is cut into blocks.

    Attributes:
        tokens: of a block: 8, 16, 32, 64, 128 or 256.
        warpgroups: that multiply, each `tiles` times 64 output features.
        stages: in flight, of 128 input features each.
        step: times 16 input features are decoded at once.
        cluster: blocks that share x.
    """

    tokens: int
    warpgroups: int = 2
    tiles: int = 1
    stages: int = 4
    step: int = 2
    cluster: int = 1

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def sums(self) -> int:
        """float32 sums of a block."""
        return self.tiles * self.tokens // 2 * self.warpgroups * WARPGROUP

    def shared_bytes(self, layout: FragmentLayout) -> int:
        """Shared memory of a block: stages in whole swizzles, and two barriers for each."""
        stage = self.tokens * DEPTH * 2 + self.warpgroups * self.tiles * layout.unit_bytes
        return self.stages * (-(-stage // 1024) * 1024 + 16)


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
    row_tiles = -(-layout.units // (cut.warpgroups * cut.tiles * cut.cluster))
    work = token_tiles * row_tiles * layout.depths
    each = -(-work // (_multiprocessors(x.device.index) // cut.cluster))
    blocks = -(-work // each) * cut.cluster
    partial = x.new_empty(blocks * cut.sums if each % layout.depths else 0, dtype=torch.float32)
    problem = Problem(
        weight.data_ptr(), out.data_ptr(), None if bias is None else bias.data_ptr(), partial.data_ptr(),
        flags.data_ptr(), tokens, layout.rows, stride, layout.units, layout.depths, token_tiles, work,
    )  # fmt: skip
    described = matrix_map(x, cut.tokens // cut.cluster, SWIZZLED)
    function = _function(layout.group, layout.has_zero, layout.dtype, cut, cut.shared_bytes(layout), x.device.index)
    function.launch(blocks, addresses(described, problem), torch.cuda.current_stream(x.device).cuda_stream)
    return out if stride == layout.rows else out[:, : layout.rows].contiguous()


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _function(group: int, has_zero: bool, dtype: str, cut: Cut, shared_bytes: int, device: int) -> Function:
    with torch.cuda.device(device):
        return load(machine_code(group, has_zero, dtype, cut), "weight_only", cut.threads, shared_bytes)


def machine_code(group: int, has_zero: bool, dtype: str, cut: Cut) -> bytes:
    """The kernel for weights of such groups, compiled for a cut.

    Raises:
        KernelError: the source does not compile.
    """
    registers, of_producer = REGISTERS[cut.warpgroups]
    macros = {
        "TOKENS": cut.tokens, "WARPGROUPS": cut.warpgroups, "TILES": cut.tiles, "STAGES": cut.stages,
        "STEP": cut.step, "CLUSTER": cut.cluster, "GROUP": group, "HAS_ZERO": int(has_zero),
        "HALF": int(dtype == "f16"), "REGISTERS": registers, "PRODUCER_REGISTERS": of_producer,
    }  # fmt: skip
    return compiled(_source(cut.tokens, dtype), macros, ARCHITECTURE)


@cache
def _source(tokens: int, dtype: str) -> str:
    folder = files("fewbit.kernels.cuda")
    parts = [(folder / name).read_text(encoding="utf-8") for name in ("hopper.cuh", "weight_only.cu")]
    return parts[0] + product_instruction(tokens, dtype) + parts[1]


def product_instruction(tokens: int, dtype: str) -> str:
    """C++ for sums [64, tokens] += fragment [64, 16] @ x [tokens, 16]^T, which has as many operands as sums."""
    sums = tokens // 2
    name = {"bf16": "bf16", "f16": "f16"}[dtype]
    targets = ", ".join(f"%{i}" for i in range(sums))
    sources = f"{{%{sums}, %{sums + 1}, %{sums + 2}, %{sums + 3}}}, %{sums + 4}"
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{sums}], const u32 (&a)[4], u64 x, bool adds) {{
    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{sums + 5}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{name}.{name} {{{targets}}}, {sources}, adds, 1, 1, 0;\\n}}"
                 : {outputs}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"((u32)adds));
}}
"""
